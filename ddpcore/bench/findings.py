"""What ``ddpcore doctor`` concludes from facts and measurements: problems with the line to type, costs, advice."""

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from ddpcore.bench.step_model import Compute, Step, Transfer, predict
from ddpcore.distributed import phases
from ddpcore.parameters.flat import MiB

BUCKET_BYTES = 25 * MiB  # of the averaged gradients, as DistributedDataParallel has them
SMALL_SHM = 64 * MiB
SLOW_LINK = 1e9 / 8  # bytes per second
SLOW_RANK_SECONDS, SLOW_RANK_SHARE = 0.05, 0.25  # above the median, both
FEW_FILES = 1024
SHARE = 0.1  # of a step that communication may take
LONGEST = 10_000  # H


def of_host(facts: Mapping[str, Any]) -> list[str]:
    """The problems of one host, see :func:`ddpcore.bench.doctor.facts`."""
    found = []
    if "cpu" not in facts["kernels"]:
        found.append("the kernels are not built, so slow Python code runs: pip install --no-build-isolation .")
    home, nvcc = facts["CUDA_HOME"], facts["nvcc"]
    if home and not facts["CUDA_HOME_has_nvcc"]:
        right = f"export CUDA_HOME={nvcc.removesuffix('/bin/nvcc')}" if nvcc else "unset CUDA_HOME"
        found.append(f"CUDA_HOME is {home}, which has no bin/nvcc: {right}")
    if facts["gpus"] and facts["cuda"] is None:
        found.append(f"torch {facts['torch']} is built without CUDA, on a host with a GPU: pip install --force torch")
    elif facts["gpus"] and "cuda" not in facts["kernels"]:
        why = "install the CUDA toolkit, then" if not (nvcc or facts["CUDA_HOME_has_nvcc"]) else "nvcc is there:"
        found.append(f"no kernels for the GPU: {why} DDPCORE_CUDA=1 pip install --no-build-isolation .")
    elif facts["gpus"]:
        found.append("no release has run on a GPU: check this one first, with benchmarks/run_gpu.sh OUT (docs/gpu.md)")
    if facts["shm_bytes"] < SMALL_SHM:
        size = f"{facts['shm_bytes'] / MiB:.3g} MiB, too small for ranks that share memory"
        found.append(f"/dev/shm has {size}: mount -o remount,size=8G /dev/shm, or docker run --shm-size=8g")
    if 0 <= facts["open_files"] < FEW_FILES:
        found.append(f"a process may open {facts['open_files']} files only: ulimit -n 65536")
    return [f"{facts['host']}: {one}" for one in found]


def slow_ranks(seconds: Sequence[float], hosts: Sequence[str]) -> list[str]:
    """The ranks whose computation takes much longer than the median of all: seconds of the same work, and hosts."""
    middle = median_low(seconds)
    least = middle + max(SLOW_RANK_SECONDS, SLOW_RANK_SHARE * middle)
    why = f"ms for work that takes {1e3 * middle:.0f} ms elsewhere: see what else runs there (top, nvidia-smi)"
    ranks = enumerate(zip(seconds, hosts, strict=True))
    return [f"rank {rank} on {host} is slow: {1e3 * own:.0f} {why}" for rank, (own, host) in ranks if own > least]


def waited_for(own: Mapping[int, tuple[float, ...]], waiting: Mapping[int, float]) -> list[str]:
    """A sentence for each rank for which the others wait in training, see :mod:`ddpcore.distributed.phases`."""
    return [f"{str(one).capitalize()}." for one in phases.slow_ranks(own, waiting)]


def slow_links(links: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pairs of hosts whose link is below 1 Gb/s."""
    return [
        f"the link between {' and '.join(link['hosts'])} carries {8e-6 * link['bytes_per_s']:.0f} Mb/s over "
        f"{link['interface']}: if there is a faster network, export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to it"
        for link in links
        if link["bytes_per_s"] < SLOW_LINK and link["hosts"][0] != link["hosts"][1]
    ]


def costs(num_bytes: float, step_seconds: float, num_ranks: int, link: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds that communication adds to a step, by the model of ``bench predict``, and the H from which it is small.

    A ring of n ranks sends 2 (n - 1) / n of the gradient over each link, and gossip with one neighbour the weights.

    Args:
        num_bytes: of the weights.
        step_seconds: of a step without communication.
        num_ranks: n.
        link: the slowest one: ``bytes_per_s`` and ``latency_s``.

    Returns seconds a step of ``ssgd``, ``dpsgd`` and ``local_sgd``; ``period``, the H of the last one, with which
    communication takes less than a tenth of the time; ``take``, the advice.
    """
    rate, latency = link["bytes_per_s"], link["latency_s"]
    ring = 2 * (num_ranks - 1) / num_ranks * num_bytes / rate + 2 * (num_ranks - 1) * latency
    num = max(1, math.ceil(num_bytes / BUCKET_BYTES))
    arrivals = tuple((1, (place + 1) / num) for place in range(num))
    compute = Compute(forward=step_seconds / 3, backward=step_seconds * 2 / 3, update=0.0, cpu=0.0, arrivals=arrivals)

    def added(*steps: Step) -> float:
        return predict(compute, steps, cores=math.inf, background=True) - step_seconds

    ssgd = added(Step(messages=[Transfer(seconds=ring / num)] * num, sizes=[1] * num))
    dpsgd = added(Step(hidden=Transfer(seconds=num_bytes / rate + latency)))
    period = min(LONGEST, max(1, math.ceil((1 / SHARE - 1) * ring / step_seconds)))
    local = added(*[Step()] * (period - 1), Step(after=Transfer(seconds=ring)))
    if ssgd <= SHARE * step_seconds:
        take = "take SSGD: averaging gradients in every step is hidden here"
    elif dpsgd <= SHARE * step_seconds:
        take = "take DPSGD(RandomPair()): gossip with one neighbour hides behind the computation, and SSGD does not"
    else:
        why = f"weights averaged every {period} steps cost less than a tenth of the time"
        take = f"take LocalSGD(period={period}): {why}"
    return {"ssgd": ssgd, "dpsgd": dpsgd, "local_sgd": local, "period": period, "take": take}
