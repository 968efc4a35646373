"""One of four real ranks that are two or four learners, each of one or two ranks; what it saw is saved."""

from __future__ import annotations

import contextlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: F401  the page uses it
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import ddpcore
from ddpcore import Connection, Policies
from ddpcore.diagnostics import Hessian, NoiseStatistics
from ddpcore.optim import FusedAdamW, FusedSGD
from helpers import oracle, sharded_around, sharded_memory, sharded_sums
from helpers.oracle import MAKERS
from helpers.ranks import ROOT, join
from helpers.sharded_averages import average_of_ties_and_teachers
from helpers.sharded_models import FEATURES, net, sharded
from helpers.sharded_places import (
    CPU,
    OPTIMIZERS,
    STEPS,
    TOPOLOGY,
    WHOLE,
    Place,
    begun,
    distance,
    weights,
)
from helpers.sharded_states import refused_states, resharded, resumed, save_and_load

SHARDABLE = [name for name in MAKERS if not name.startswith("noisy")]
WHOLE_ROWS = ("int4", "int8", "topk", "sparse")  # codecs that scale or choose by chunks of a row


def beside_virtual(
    place: Place, strategy: str, optimizer: str, feature: str = "plain", hook: str = "", folder: Path | None = None
) -> dict[str, float]:
    """The largest differences from virtual learners whose batches are those of all shards.

    ``hook``: the program has a hook that halves each gradient. ``folder``: the run is saved there in the middle, and
    the differences from new objects that load it and go on are "resumed".
    """
    box: list[Any] = [_virtual(place, strategy, optimizer, feature, hook) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)  # one rank computes what is the same on all
    model, (rows, wanted, distance_apart) = FEATURES[feature](place.mesh["shard"]), box[0]
    handle = begun(place, strategy, optimizer, model)
    _halve(handle, hook)
    options: dict[str, Any] = {"clip": True, "micros": _micros(feature)}
    place.train(handle, range(3), **options)
    again = None
    if folder is not None:
        again = begun(place, strategy, optimizer, FEATURES[feature](place.mesh["shard"]))
        save_and_load(place, handle, again, folder / f"{strategy}-{optimizer}-{feature}")
        place.train(again, range(3, STEPS), **options)
    place.train(handle, range(3, STEPS), **options)
    with torch.no_grad():
        outputs = handle.evaluation_model()(place.x[0, 0].to(wanted.dtype))
    mine = weights(model)
    return {
        "weights": distance(mine, rows[place.learner]),
        "average": float((outputs - wanted).abs().max()),
        "consensus": abs(handle.consensus_distance() - distance_apart),
        **({} if again is None else {"resumed": distance(mine, weights(again.model))}),
    }


def _virtual(place: Place, strategy: str, optimizer: str, feature: str, hook: str) -> tuple[Any, torch.Tensor, float]:
    """The weights of each virtual learner, an output of their average, and their distance from it."""
    other = WHOLE.get(feature, net)()
    virtual = begun(place, strategy, optimizer, other, virtual=True)
    _halve(virtual, hook)
    place.train(virtual, range(STEPS), clip=True, micros=_micros(feature))
    with torch.no_grad():
        wanted = virtual.evaluation_model()(place.x[0, 0].to(next(other.parameters()).dtype))
    return [weights(one) for one in virtual.models], wanted, virtual.consensus_distance()


def _micros(feature: str) -> int:
    return 2 if feature == "mixed" else 1


def _halve(handle: Any, hook: str) -> None:
    for parameter in (parameter for each in handle.models for parameter in each.parameters() if hook):
        parameter.register_post_accumulate_grad_hook(halve)


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def bits_of_plain_ranks(place: Place, strategy: str, optimizer: str) -> bool:
    """Whether learners of one rank have the bits of the same ranks without FSDP2."""
    found = []
    for model in (sharded(net(), place.mesh["shard"]), net()):
        made, learners = OPTIMIZERS[optimizer](model.parameters()), place.mesh["learners"]
        handle = ddpcore.distribute(model, made, MAKERS[strategy](TOPOLOGY), group=learners)
        place.train(handle, range(STEPS))
        found.append(weights(model))
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# ---- what FSDP2 can do, beside averages by hand ----


def beside_averages_by_hand(place: Place, feature: str, strategy: str) -> bool:
    """Whether SSGD and LocalSGD have the bits of FSDP2 with averages of local shards written out."""
    found = []
    for by_hand in (True, False):
        model = FEATURES[feature](place.mesh["shard"])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        if not by_hand:
            made = ddpcore.SSGD() if strategy == "ssgd" else ddpcore.LocalSGD(2)
            connection = Connection(transport="pg")
            ddpcore.distribute(model, optimizer, made, group=place.mesh["learners"], connection=connection)
        for step in range(STEPS):
            with torch.no_grad():
                model(place.x[step, 0])  # an evaluation leaves gathered weights
            optimizer.zero_grad()
            x, y = place.batch(step)
            if feature == "tensor_parallel":  # its ranks take the same samples
                x, y = place.x[step, place.learner], place.y[step, place.learner]
            cross_entropy(model(x), y).backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            if by_hand and strategy == "ssgd":
                average([p.grad for p in trained], place)
            optimizer.step()
            if by_hand and strategy == "local_sgd" and step % 2:
                average([p.detach() for p in trained], place)
        found.append(weights(model))
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def average(tensors: list[Any], place: Place) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor.to_local(), group=place.mesh.get_group("learners"))
        tensor.to_local().div_(place.num)


def accumulated(place: Place) -> dict[str, bool]:
    """Micro-batches with ``no_sync`` and with ``set_requires_gradient_sync`` have the bits of averages by hand.

    Learner 1 has no pass in a last step. A step whose passes were all inside ``no_sync`` is refused after that.
    """
    found = {}
    for way in ("by_hand", "no_sync", "of_fsdp"):
        model = sharded(net(), place.mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = None
        if way != "by_hand":
            connection = Connection(transport="pg")
            handle = ddpcore.distribute(
                model, optimizer, ddpcore.SSGD(), group=place.mesh["learners"], connection=connection
            )
        for step in range(0, STEPS, 2):
            optimizer.zero_grad()
            for micro in (0, 1):
                x, y = place.batch(step + micro)
                if way == "of_fsdp":
                    model.set_requires_gradient_sync(micro == 1)
                if handle is not None and way == "no_sync" and micro == 0:
                    with handle.no_sync():
                        cross_entropy(model(x), y).backward()
                else:
                    cross_entropy(model(x), y).backward()
            if way == "by_hand":
                average([p.grad for p in model.parameters()], place)
            optimizer.step()
        optimizer.zero_grad()
        if place.learner == 0:
            cross_entropy(model(x), y).backward()
        if way == "by_hand":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            average([p.grad for p in model.parameters()], place)
        optimizer.step()
        found[way] = weights(model)
        if way == "no_sync":
            with handle.no_sync():
                cross_entropy(model(x), y).backward()
            with pytest.raises(RuntimeError, match=r"were inside no_sync\(\)"):
                optimizer.step()
    return {
        way: distance(found[way], found["by_hand"]) <= (0 if way == "no_sync" else 1e-6)
        for way in ("no_sync", "of_fsdp")
    }


# ---- the rest of a run ----


def saved_average(place: Place, page: str, folder: Path) -> dict[str, Any]:
    """Run the blocks of the page, with CPUs and two ranks a learner, and load the average into a whole model."""
    first, second, third = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {**globals(), "model": net(norm=True), "partial": partial}
    exec(first.replace('"cuda", (2, 8)', '"cpu", (2, 2)'), names)
    place.train(names["handle"], range(2))
    exec(second.replace('checkpoint_id="average"', f'checkpoint_id="{folder}/average"'), names)
    other, averaged, model = net(norm=True).eval(), names["averaged"], names["model"]
    state = other.state_dict()
    load(state, storage_reader=FileSystemReader(folder / "average"))
    other.load_state_dict(state)
    with torch.no_grad():
        outputs, wanted = averaged(place.x[0, 0]), other(place.x[0, 0])
    exec(third.replace('="saved"', f'="{folder}/saved"'), names)
    own = distance(weights(model), {name: value for name, value in state.items() if "running" not in name})
    return {"outputs": float((outputs - wanted).abs().max()), "own": own, "training": model.training}


def momentum_average(place: Place) -> float:
    """Policies average momentum of shards, as of virtual learners."""
    model, other = sharded(net(), place.mesh["shard"]), net()
    handle = ddpcore.distribute(
        model, FusedSGD(model.parameters(), lr=0.1, momentum=0.9), ddpcore.LocalSGD(2), group=place.mesh["learners"],
        policies=Policies(momentum="average"),
    )  # fmt: skip
    momentum = FusedSGD(other.parameters(), lr=0.1, momentum=0.9)
    options = {"policies": Policies(momentum="average")}
    virtual = ddpcore.distribute(other, momentum, ddpcore.LocalSGD(2), learners=place.num, **options)
    place.train(handle, range(STEPS))
    for step in range(STEPS):
        virtual.learner.optimizer.zero_grad()
        virtual.backward(
            [cross_entropy(o, y) for o, y in zip(virtual.model(place.x[step]), place.y[step], strict=True)]
        )
        virtual.learner.optimizer.step()
    return distance(weights(model), virtual.models[place.learner].state_dict())


def noise(place: Place, strategy: str, *, dynamic: bool) -> dict[str, list[tuple[float, ...]]]:
    """Numbers of each record of sharded learners, and of virtual ones with whole batches.

    ``dynamic``: with the passes at the mean weights, and those over the samples of all steps.
    """
    found: dict[str, list[tuple[float, ...]]] = {}
    for kind in ("sharded", "virtual", "refused"):
        model = sharded(net(), place.mesh["shard"]) if kind != "virtual" else net()
        options = {"learners": place.num} if kind == "virtual" else {"group": place.mesh["learners"]}
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, MAKERS[strategy](TOPOLOGY), **options)
        if kind == "refused":
            for more in ({"full_loss": lambda: None, "loss": lambda: None, "hessian": True}, {"directions": 1}):
                with contextlib.suppress(ValueError):
                    NoiseStatistics(handle, optimizer, 2, **more)
                    found[str(more)] = []
            break

        def loss_of(step: int, handle: Any = handle, is_virtual: bool = kind == "virtual") -> torch.Tensor:
            if not is_virtual:
                x, y = place.batch(step)
                return cross_entropy(handle.model(x), y)
            outputs = handle.model(place.x[step])
            return sum(cross_entropy(o, y) for o, y in zip(outputs, place.y[step], strict=True))

        now, passes = [0], {}
        if dynamic:
            passes = {
                "loss": lambda loss_of=loss_of, now=now: loss_of(now[0]),
                "full_loss": lambda loss_of=loss_of: (loss_of(step) / STEPS for step in range(STEPS)),
                "max_grad_norm": 0.05,
            }
        seen = []
        hook = next(model.parameters()).register_post_accumulate_grad_hook(lambda one, seen=seen: seen.append(0))
        statistics = NoiseStatistics(handle, optimizer, 2, batch_size=8, **passes)
        for now[0] in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(now[0])
            loss.backward()
            optimizer.step()
        hook.remove()
        assert len(seen) == STEPS, "a hook of the program saw a pass of the statistics"
        found[kind] = [
            (one.whole.noise_scale, one.spread.consensus_distance if one.spread else 0.0, *rates(one.dynamics))
            for one in statistics.records
        ]
        found[f"weights of {kind}"] = [tuple(float(one.sum()) for one in weights(model).values())]
    return found


def rates(dynamics: Any) -> tuple[float, ...]:
    return () if dynamics is None else (dynamics.effective_lr, dynamics.noise, dynamics.full_loss)


def nonfinite(place: Place, mode: str, strategy: str) -> dict[str, Any]:
    """A sample of one shard of learner 1 is not finite, in the second step."""
    model = sharded(net(), place.mesh["shard"])
    handle = ddpcore.distribute(
        model, FusedAdamW(model.parameters(), lr=0.01), MAKERS[strategy](TOPOLOGY), group=place.mesh["learners"],
        on_nonfinite=mode,
    )  # fmt: skip
    optimizer = handle.learner.optimizer
    for step in range(2):
        optimizer.zero_grad()
        x, y = place.batch(step)
        cross_entropy(model(x), y).backward()
        if step == 1 and (place.learner, place.shard) == (1, 1):  # of one rank's shard alone
            next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().fill_(torch.nan)
        try:
            optimizer.step()
        except ddpcore.NonFiniteError as error:
            return {"error": str(error)}
    return {"found": [(one.learner, one.step) for one in handle.nonfinite], "steps": handle.learner.step}


def refused(place: Place) -> dict[str, str]:
    """The message of each call that is refused, and whether the model still trains afterwards."""
    mesh, texts = place.mesh, {}

    def call(name: str, model: nn.Module, strategy: Any = None, **options: Any) -> None:
        before = weights(model) if name not in ("offload", "fsdp1", "ddp") else {}
        try:
            optimizer = FusedSGD(model.parameters(), lr=0.1)
            ddpcore.distribute(model, optimizer, strategy or ddpcore.SSGD(), **options)
            texts[name] = "nothing was refused"
        except ValueError as error:
            texts[name] = str(error)
            assert "\n" not in texts[name]
        if before and distance(weights(model), before):
            texts[name] += ", and weights were changed"

    learners, shard = mesh["learners"], mesh["shard"]
    call("all ranks", sharded(net(), mesh._flatten()), group=learners)
    call("without mesh", sharded(net(), shard))
    call("rows", sharded(net(), shard), group=learners, learners=2)
    call("two dimensions", sharded(net(), shard), group=mesh)
    call("virtual", sharded(net(), shard), learners=2)
    call("baseline", sharded(net(), shard), ddpcore.DDP(), group=learners)
    model = net()
    fully_shard(model.blocks[0], mesh=shard)
    call("partly", model, group=learners)
    call("partly parallel", parallelize_module(net(), shard, {"head": ColwiseParallel()}), group=learners)
    model = net()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], process_group=shard.get_group(), device_id=CPU)
    call("fsdp1", model, group=learners)
    model = net()
    model.blocks[0] = nn.parallel.DistributedDataParallel(model.blocks[0], process_group=shard.get_group())
    call("ddp", model, group=learners)
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=shard)
    call("other ranks", fully_shard(model, mesh=learners), group=learners)
    call("shrink", sharded(net(), shard), group=learners, connection=Connection(on_failure="shrink"))
    call("scaler", sharded(net(), shard), group=learners, scaler=torch.amp.GradScaler("cpu"))
    call("quarantine", sharded(net(), shard), ddpcore.DPSGD(), group=learners, on_nonfinite="quarantine")
    call("adpsgd", sharded(net(), shard), ddpcore.ADPSGD(), group=learners)
    call("noisy_ssgd", sharded(net(), shard), ddpcore.NoisySSGD(0.1), group=learners)
    call("offload", sharded(net(), shard, offload_policy=CPUOffloadPolicy(pin_memory=False)), group=learners)
    call("other placements", sharded(net(), shard) if place.learner else replicate(net(), mesh=shard), group=learners)
    model = sharded(net(), shard)
    handle = ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), ddpcore.SSGD(), group=learners)
    for name, own in {"hessian": model, "average": handle.evaluation_model()}.items():
        try:
            Hessian(own, lambda own=own: own(place.x[0, 0]).square().mean())
        except ValueError as error:
            texts[name] = str(error)
    model = sharded(net(), shard)
    try:
        ddpcore.join(model, FusedSGD(model.parameters(), lr=0.1), ddpcore.DPSGD(), dist.HashStore())
    except ValueError as error:
        texts["join"] = str(error)
    call("other options", sharded(net(), shard), ddpcore.LocalSGD(2 + place.shard), group=learners)
    for name in ("int8", "bf16"):
        call(name, sharded_sums.sequence_parallel(shard), ddpcore.DPSGD(compression=name), group=learners)
    return texts


def refused_samples(place: Place) -> dict[str, str]:
    """The ranks of learner 0 have set different numbers of samples."""
    model = sharded(net(), place.mesh["shard"])
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(weights="samples"), group=place.mesh["learners"])
    handle.num_samples = 8 if place.learner else 5 - 2 * place.shard
    try:
        model(place.batch(0)[0]).square().mean().backward()
    except ValueError as error:
        return {"samples": str(error)}
    return {}


QUICK = ("ssgd", "streaming", "dpsgd", "dpsgd_cta", "push_sum", "tracking")
BITS = [(name, "adamw") for name in SHARDABLE]
BITS += [(n, one) for n in ("dpsgd", "ssgd", "diloco") for one in OPTIMIZERS if (n, one) not in BITS]
PLAIN = [case for case in BITS if case != ("dpsgd", "muon")]  # gossip mixes no float64, which Muon needs here
CASES = [(n, one, "mixed") if one == "adamw" else (n, one, "double" if one == "muon" else "plain") for n, one in PLAIN]
MORE: list[tuple[str, ...]] = [("dpsgd", "lars", "replicate"), ("units", "adamw")]
MORE += [("ssgd", "sgd", "plain", "hook"), ("dpsgd", "sgd", "replicate", "hook")]


def fits(case: tuple[str, ...], learners: int, shards: int) -> bool:
    """Codecs take chunks of a row: shards have others than a whole model, and with ``group`` other layers first."""
    chunked = any(word in case[0] for word in WHOLE_ROWS)
    return oracle.fits("ring", learners, case[0]) and not (chunked and (shards > 1 or case[0].startswith("grouped")))


def four(folder: Path) -> dict[str, Any]:
    two, four = Place(2, 2), Place(4, 1)
    found = {"memory": sharded_memory.beyond_fsdp(two.mesh)}  # first: a compiled model leaves tensors
    cases = [case for case in [*CASES, *MORE] if fits(case, 2, 2)]
    virtual = {case: beside_virtual(two, *case, folder=folder if case[2:] == ("mixed",) else None) for case in cases}
    resume = [(name, "adamw") for name in SHARDABLE if fits((name, "adamw"), 2, 1)]
    resume = [case for case in resume if "resumed" not in virtual.get((*case, "mixed"), ())]
    resume += [("dpsgd", "adamw"), ("diloco", "adamw"), ("ssgd", "muon")]  # with buffers
    by_hand = [(one, name) for one in FEATURES if one != "double" for name in ("ssgd", "local_sgd")]
    skipped = [("raise", "local_sgd"), ("skip", "local_sgd"), ("skip", "dpsgd")]
    return found | {
        "virtual": virtual,
        "plain": {
            case: bits_of_plain_ranks(four, *case) for case in [*BITS, ("outer_int4", "sgd")] if fits(case, 4, 1)
        },
        "features": {case: beside_averages_by_hand(two, *case) for case in by_hand},
        "accumulated": accumulated(two),
        "resumed": {case: resumed(two, *case, folder) for case in resume},
        "resharded": {
            name: resharded(two, name, "adamw", folder) for name in ("dpsgd", "diloco", "streaming", "slowmo", "gasloc")
        },
        "momentum": momentum_average(two),
        "saved": saved_average(two, sys.argv[5], folder),
        "nonfinite": {case: nonfinite(two, *case) for case in skipped},
        "average": average_of_ties_and_teachers(two),
        "around": {"evaluated": sharded_around.evaluated(two), "halved": sharded_around.halved(two)},
        "buffers": {option: sharded_around.buffers(two, option) for option in ("plain", "skip", "policy")},
        "noise": {
            f"{name} {dynamic}": noise(two, name, dynamic=dynamic)
            for name in ("ssgd", "dpsgd")
            for dynamic in (False, True)
        },
        "refused": {**refused(two), **refused_states(two, folder), **refused_samples(two)},
    }


def six(folder: Path) -> dict[str, Any]:
    place = Place(2, 3)
    cases = [(name, "adamw") for name in QUICK] + [("dpsgd", "lamb"), ("diloco", "lars")]
    return {"virtual": {case: beside_virtual(place, *case) for case in cases}}


def sums(folder: Path) -> dict[str, Any]:
    place = Place(2, 2)
    return {"virtual": {case: sharded_sums.beside_virtual(place, *case) for case in sharded_sums.CASES}}


def main() -> None:
    path, _, _ = join()
    what = {"four": four, "six": six, "sums": sums}[sys.argv[4]]
    torch.save(what(path.parent), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
