"""``ddpcore doctor``: what is wrong with these hosts and their network, and which strategy suits them."""

import fcntl
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from ddpcore.bench import findings
from ddpcore.bench.command import Kind, model_bytes, publish
from ddpcore.bench.config import Options
from ddpcore.comm.connect import choose_backend
from ddpcore.comm.groups import barrier, default_group, gather_objects
from ddpcore.display.table import number, table_of
from ddpcore.models import MODELS
from ddpcore.options.fields import field
from ddpcore.parameters.flat import MiB
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine

VARIABLES = ("CUDA_HOME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TIMEOUT = 60.0
PINGS = 20
LINK_SECONDS = 1.0  # about, for each pair of hosts
LARGEST = 64 * MiB
WORK_SIZE, WORK_REPEATS = 512, 8  # of the matrices that every rank multiplies
_SIOCGIFADDR = 0x8915  # the request for the address of a network interface, linux/sockios.h


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Options):
    """Check this host, or under torchrun all hosts and the links between them, and say what to do."""

    EXAMPLE = "ddpcore doctor --parameters 100 --step-ms 300"

    model: str | None = field(None, "estimate the costs of this model", parts=MODELS)
    parameters: float | None = field(None, "millions of parameters, instead of a model", above=0)
    step_ms: float = field(100.0, "of a step of your training without communication", above=0)


def prepare(config: DoctorConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    if config.model is not None and config.parameters is not None:
        raise ValueError("--model and --parameters both say how large the model is: give one")
    if torchrun is None or torchrun.world_size == 1:
        return lambda: run_rank(World(), config)
    device, num_gpus = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", 0)
    backend = choose_backend("auto", world_size=torchrun.local_world_size, device=device, num_gpus=num_gpus).name
    backend = "gloo" if backend == "virtual" else backend
    return lambda: launch.run(run_rank, (config,), world_size=torchrun.world_size, backend=backend, timeout=TIMEOUT)


def run_rank(world: World, config: DoctorConfig) -> None:
    """What every rank runs; rank 0 prints and writes the result."""
    device = torch.device("cuda") if dist.is_initialized() and dist.get_backend() == "nccl" else torch.device("cpu")
    everyone, seconds, links = [facts(device.type)], [0.0], []
    if world.world_size > 1:
        barrier("the start of a measurement")
        everyone = gather_objects(default_group(None), everyone[0], "the facts", TIMEOUT)
        seconds = gather_objects(default_group(None), work(device), "the work", TIMEOUT)
        links = measured_links(world, everyone, device)
    if world.rank:
        return
    hosts, costs = everyone[:: world.local_world_size], None
    problems = [problem for one in hosts for problem in findings.of_host(one)]
    problems += findings.slow_ranks(seconds, [one["host"] for one in everyone]) + findings.slow_links(links)
    num_bytes = None if config.parameters is None else 4e6 * config.parameters
    num_bytes = num_bytes if config.model is None else model_bytes(config.model)
    if links and num_bytes is not None:
        slowest = min(links, key=lambda link: link["bytes_per_s"])
        costs = findings.costs(num_bytes, config.step_ms / 1e3, world.world_size, slowest)
    work_ms = [1e3 * one for one in seconds]
    publish({"hosts": hosts, "work_ms": work_ms, "rows": links, "problems": problems, "costs": costs}, KIND, config)


def facts(device: str) -> dict[str, Any]:
    """What is installed and built on this host, and its limits, as plain values."""
    variables = launch.variables(VARIABLES)
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    home, library = variables["CUDA_HOME"], "NCCL" if device == "cuda" else "GLOO"
    return {
        **machine(device),
        **variables,
        "host": socket.gethostname(),
        "CUDA_HOME_has_nvcc": home is not None and (Path(home) / "bin" / "nvcc").is_file(),
        "nvcc": shutil.which("nvcc"),
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "shm_bytes": shm,
        "clock": time.time(),
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "interface": variables[f"{library}_SOCKET_IFNAME"] or interface_of_name(),
    }


def interface_of_name() -> str:
    """The network interface with the address of this machine's name, which gloo takes if no variable names another."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.gethostbyname(socket.gethostname())
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == address or (name == "lo" and address.startswith("127.")):
                    return name
    return "unknown"


def work(device: torch.device) -> float:
    """Seconds of a fixed computation: the median of several products of matrices, times their number."""
    matrix, seconds = torch.ones(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.float32), []
    for _ in range(1 + WORK_REPEATS):
        start = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return WORK_REPEATS * median(seconds[1:])  # the first one also starts threads or loads a library


def measured_links(world: World, everyone: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Latency and bandwidth between each pair of hosts, by the first rank of each; of one host, its first two ranks."""
    firsts, rows = list(range(0, world.world_size, world.local_world_size)), []
    for first, second in combinations(firsts if len(firsts) > 1 else [0, 1], 2):
        barrier("the start of a measurement")
        mine = measured_link(world.rank, first, second, device) if world.rank in (first, second) else None
        found = gather_objects(default_group(None), mine, "a link", TIMEOUT)[first]
        hosts = [everyone[rank]["host"] for rank in (first, second)]
        rows.append({"hosts": hosts, "interface": everyone[first]["interface"], **found})
    return rows


def measured_link(rank: int, first: int, second: int, device: torch.device) -> dict[str, float]:
    """Half of the shortest round trip, and the bandwidth of the largest message for which there is time."""

    def round_trip(message: torch.Tensor) -> float:
        start = time.perf_counter()
        if rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        else:
            dist.recv(message, first)
            dist.send(message, first)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    small = torch.zeros(2, device=device, dtype=torch.float32)
    latency = min(round_trip(small) for _ in range(PINGS)) / 2
    size = MiB // 4
    while True:
        seconds = round_trip(torch.zeros(size // 4, device=device, dtype=torch.float32))
        small[0] = float(4 * seconds > LINK_SECONDS or size >= LARGEST)
        round_trip(small)  # the first rank decides for both
        if small[0]:
            return {"latency_s": latency, "bytes_per_s": 2 * size / seconds}
        size *= 4


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    hosts = table_of(_HOSTS, result["hosts"], title="hosts", left=("host", "interface", "kernels", "torch"))
    alone = "one process: start ddpcore doctor by torchrun on all hosts to measure the network between them"
    links = table_of(_LINKS, result["rows"], title="links, one message each way", left=("between",))
    found: list[Table | str] = [hosts, links if result["rows"] else alone]
    found += [f"problem: {problem}" for problem in result["problems"]] or ["no problem was found"]
    if (costs := result["costs"]) is not None:
        times = ", ".join(f"{name} {1e3 * costs[name]:.1f} ms" for name in ("ssgd", "dpsgd", "local_sgd"))
        found += [f"communication adds to a step: {times} (period {costs['period']})", costs["take"]]
    elif result["rows"]:
        found.append("say how large the model is (--model or --parameters) and --step-ms for an advice")
    return found


_HOSTS = {
    "host": lambda row: row["host"],
    "cores": number("cores", "{}"),
    "NUMA": number("numa_nodes", "{}"),
    "GPUs": number("gpus", "{}"),
    "torch": lambda row: row["torch"],
    "kernels": lambda row: ", ".join(row["kernels"]) or "none",
    "interface": lambda row: row["interface"],
    "/dev/shm MiB": lambda row: f"{row['shm_bytes'] / MiB:,.0f}",
    "open files": number("open_files", "{}"),
}
_LINKS = {
    "between": lambda row: " and ".join(row["hosts"]),
    "interface": lambda row: row["interface"],
    "latency us": lambda row: f"{1e6 * row['latency_s']:,.0f}",
    "Mb/s": lambda row: f"{8e-6 * row['bytes_per_s']:,.0f}",
}
KIND = Kind(lambda result: "problems" in result, "Hosts and links", parts, lambda result: [], DoctorConfig, prepare)
