"""One of four real ranks that step DTensors on several meshes; what it saw is saved under the name of each trial."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedOptimizer, FusedSGD, Muon, matrices, shard_exchange
from ddpcore.optim import muon as muon_module
from helpers import shard_checkpoint_ranks
from helpers.ranks import join

# On two and on four ranks each shard of the first tensor ends with a block of 4096 elements.
SHAPES = {"blocks": (256, 64), "uneven": (5, 7), "one": (1,), "long": (9000, 3), "square": (8, 8)}
OPTIMIZERS: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    "sgd": (FusedSGD, {"momentum": 0.9, "max_grad_norm": 0.5}),
    "adamw": (FusedAdamW, {"max_grad_norm": 0.5}),
    "lars": (FusedLARS, {"nesterov": True}),
    "lamb": (FusedLAMB, {"max_grad_norm": 0.5, "trust_clip": 2.0}),
}
STEPS = 3


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def layouts(mesh: DeviceMesh) -> dict[str, list[list[Placement]]]:
    """The placements of the tensors of SHAPES, in turn."""
    if mesh.ndim == 2:
        hybrid, both = [Replicate(), Shard(0)], [Shard(0), Shard(0)]
        return {"hsdp": [hybrid], "both": [both], "mixed": [hybrid, both, [Replicate()] * 2, [Shard(0), Replicate()]]}
    return {"fsdp": [[Shard(0)]], "mixed": [[Shard(0)], [Replicate()], [Shard(0)], [Shard(1)]]}


def train(name: str, make: Callable[[int, Tensor], Tensor], dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    cls, options = OPTIMIZERS[name]
    weights = {key: nn.Parameter(make(i, value.to(dtype))) for i, (key, value) in enumerate(values(0).items())}
    names = list(weights)
    groups = [
        {"params": [(key, weights[key]) for key in names[:2]], "weight_decay": 0.01},
        {"params": [(key, weights[key]) for key in names[2:]], "weight_decay": 0.0},
    ]
    optimizer = cls(groups, lr=0.05, master_weights=dtype != torch.float32, **options, **more)
    for step in range(STEPS):
        for i, (key, value) in enumerate(values(step + 1).items()):
            weights[key].grad = make(i, value.to(dtype))
        optimizer.step()
    states = {key: {name: whole(value) for name, value in optimizer.state[p].items()} for key, p in weights.items()}
    ratios = optimizer.trust_ratios() if hasattr(optimizer, "trust_ratios") else {}
    return {"weights": {key: whole(weight) for key, weight in weights.items()}, "states": states, "ratios": ratios}


def equal_steps(meshes: dict[str, DeviceMesh], rank: int) -> dict[str, Any]:
    """Every optimizer on every mesh and layout, beside the unsharded one."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name in OPTIMIZERS:
            found[name, str(dtype)] = train(name, lambda _, value: value.clone(), dtype)
            if dtype == torch.float32:
                found[name, "rounded"] = train(name, lambda _, value: value.clone(), dtype, state_dtype="bfloat16")
            for size, mesh in meshes.items():
                if mesh.get_coordinate() is None:
                    continue
                for layout, placements in layouts(mesh).items():
                    if dtype == torch.bfloat16 and layout != "mixed":
                        continue

                    def make(i: int, value: Tensor, mesh: Any = mesh, places: Any = placements) -> Tensor:
                        placed = places[i % len(places)]
                        fits = all(not p.is_shard() or p.dim < value.dim() for p in placed)
                        return spread(value, mesh, placed) if fits else value.clone()

                    found[name, str(dtype), size, layout] = train(name, make, dtype)
                    if dtype == torch.float32:
                        found[name, "rounded", size, layout] = train(name, make, dtype, state_dtype="bfloat16")
    return found


MATRICES = {"wide": (6, 20), "tall": (20, 6), "uneven": (7, 9), "few": (2, 5), "joint": (12, 8), "experts": (6, 4, 5)}
MATRICES["grouped"] = (16, 6)  # eight rows of queries, four of keys and four of values
BLOCK_STEPS, PERIOD, BLOCK_LR = 5, 3, 0.5


def part(value: Tensor, place: int) -> Tensor:
    """One of two parts, as torch.chunk divides."""
    half = -(-len(value) // 2)
    return value[place * half : (place + 1) * half]


def fsdp_and_tensor(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """As FSDP2 divides what tensor parallelism has divided."""
    data, tensor = mesh.get_coordinate()
    mine, places = part(part(value, tensor), data).clone(), [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(mine, mesh, places, run_check=False, shape=value.shape, stride=value.stride())


def whole_of_both(tensor: DTensor) -> Tensor:
    """The whole of :func:`fsdp_and_tensor`: ``full_tensor`` has other rows where a number of rows is uneven."""
    parts: list[Tensor] = [torch.empty(0)] * 4
    dist.all_gather_object(parts, tensor.to_local())
    return torch.cat([parts[0], parts[2], parts[1], parts[3]])


def muon(meshes: dict[str, DeviceMesh]) -> dict[str, dict[str, Any]]:
    """Muon on shards and on whole matrices, how many matrices this rank orthogonalized, and when it sent something."""
    found, counts, events = {}, [], []
    real, send, size, compute = (
        matrices.orthogonalize,
        dist.all_to_all_single,
        shard_exchange.ROUND,
        muon_module.results_of,
    )
    matrices.orthogonalize = lambda stack, **more: (counts.append(len(stack)), real(stack, **more))[1]
    muon_module.results_of = lambda *words: (events.append("compute"), compute(*words))[1]
    dist.all_to_all_single = lambda *words, **more: (events.append("send"), send(*words, **more))[1]
    for name, mesh, places in (
        ("whole", None, []), ("rows", meshes["4"], [Shard(0)]), ("columns", meshes["2"], [Shard(1)]),
        ("hsdp", meshes["2x2"], [Replicate(), Shard(0)]), ("replicas", meshes["4"], [Replicate()]),
        ("both", meshes["2x2"], [Shard(0), Shard(0)]), ("rows and columns", meshes["2x2"], [Shard(0), Shard(1)]),
        ("fsdp and tensor", meshes["2x2"], []), ("columns and rows", meshes["2x2"], [Shard(1), Shard(0)]),
    ):  # fmt: skip
        if mesh is not None and mesh.get_coordinate() is None:
            continue
        make = (lambda value: value.clone()) if mesh is None else (lambda value, m=mesh, p=places: spread(value, m, p))
        join = whole
        if name == "fsdp and tensor":
            make, join = (lambda value, m=mesh: fsdp_and_tensor(value, m)), whole_of_both
        shard_exchange.ROUND = size if name in ("columns", "both") else 1  # else a round for each matrix
        draw = torch.Generator().manual_seed(0)
        weights = {key: nn.Parameter(make(torch.randn(shape, generator=draw))) for key, shape in MATRICES.items()}
        plain = [weights[key] for key in ("wide", "tall", "uneven", "few")]
        groups = [{"params": plain}, {"params": [weights["joint"]], "split": 3}]
        groups.append({"params": [weights["grouped"]], "split": (8, 4, 4)})
        groups.append({"params": [weights["experts"]], "batched": True})
        optimizer = Muon(groups, lr=0.1, ns_dtype=torch.float32)
        counts.clear()
        events.clear()
        for _ in range(STEPS):
            for key, shape in MATRICES.items():
                weights[key].grad = make(torch.randn(shape, generator=draw))
            optimizer.step()
        found[name] = {key: join(weight.detach()) for key, weight in weights.items()}
        found[name] |= {"count": sum(counts), "events": events.copy()}
        kept = {key: join(optimizer.state[weight]["momentum_buffer"]) for key, weight in weights.items()}
        found[name] |= {f"momentum of {key}": value for key, value in kept.items()}
    matrices.orthogonalize, dist.all_to_all_single, shard_exchange.ROUND, muon_module.results_of = (
        real,
        send,
        size,
        compute,
    )
    return found


def drawn(key: str) -> list[Tensor]:
    """The weights of one of MATRICES in float64, and the gradient of each step."""
    draw = torch.Generator().manual_seed(list(MATRICES).index(key))
    return [torch.randn(MATRICES[key], generator=draw, dtype=torch.float64) for _ in range(1 + BLOCK_STEPS)]


def blockwise(meshes: dict[str, DeviceMesh]) -> dict[Any, Tensor]:
    """Weights in float64 after steps of Muon on blocks. The run goes on from its saved state after the first step."""
    found = {}
    for layout, mesh, places in (
        ("rows", meshes["4"], [Shard(0)]), ("rows and columns", meshes["2x2"], [Shard(0), Shard(1)]),
        ("replicas", meshes["4"], [Replicate()]),
    ):  # fmt: skip
        for key in ("wide", "tall", "uneven", "few", "experts"):
            start, *grads = drawn(key)
            param = nn.Parameter(spread(start, mesh, places))
            kind = {"batched": True if key == "experts" else None}
            group = {"params": [param], "period": PERIOD, "block_lr": BLOCK_LR, **kind}
            optimizer = Muon([group], lr=0.1)
            for step, grad in enumerate(grads):
                param.grad = spread(grad, mesh, places)
                optimizer.step()
                if step == 0:
                    state, optimizer = optimizer.state_dict(), Muon([{**group, "period": 1}], lr=0.1)
                    optimizer.load_state_dict(state)
            found[layout, key] = whole(param).detach()
    return found


def equal_rows(mesh: DeviceMesh | None) -> Tensor:
    """The rounded momentum of a tensor whose rows are equal."""
    param, grad = (torch.full((8, 64), number) for number in (1.0, 0.3))
    if mesh is not None:
        param, grad = (spread(value, mesh, [Shard(0)]) for value in (param, grad))
    param = nn.Parameter(param)
    optimizer = FusedSGD([param], lr=0.1, momentum=0.9, state_dtype=torch.bfloat16)
    for _ in range(STEPS):
        param.grad = grad.clone()
        optimizer.step()
    return whole(optimizer.state[param]["momentum_buffer"])


def num_reductions(meshes: dict[str, DeviceMesh]) -> dict[Any, int]:
    """All-reduces of one step, of five tensors of two dtypes."""
    found = {}
    for name in OPTIMIZERS:
        for mesh, placed in (("4", [Shard(0)]), ("2x2", [Replicate(), Shard(0)]), ("2x2", [Shard(0), Shard(0)])):
            cls, options = OPTIMIZERS[name]
            params = [nn.Parameter(spread(value, meshes[mesh], placed)) for value in values(0).values()]
            params[0] = nn.Parameter(params[0].detach().to(torch.bfloat16))
            optimizer = cls(params, lr=0.1, **options)
            for param in params:
                param.grad = torch.ones_like(param)
            calls, real = [], dist.all_reduce
            dist.all_reduce = lambda *words, calls=calls, real=real, **more: (calls.append(1), real(*words, **more))[1]
            try:
                optimizer.step()
            finally:
                dist.all_reduce = real
            found[name, len([p for p in placed if p.is_shard()])] = len(calls)
    return found


def overflow(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """A gradient of one rank is not finite: no rank steps."""
    param = nn.Parameter(spread(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = FusedLAMB([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.ones_like(param)
    if rank == 2:
        param.grad._local_tensor.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    skipped, step = whole(param), float(optimizer.state[param]["step"])
    param.grad = torch.full_like(param, 4.0)
    scaler.step(optimizer)
    return {"skipped": skipped, "step": step, "stepped": whole(param), "scale": scaler.get_scale()}


def mlp() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 3))


def shard_layers(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def models(meshes: dict[str, DeviceMesh], rank: int) -> dict[str, Any]:
    """Real wrappers of torch on the same samples, beside the plain model."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ways: dict[str, tuple[Callable[[nn.Sequential], nn.Sequential], int]] = {
        "plain": (lambda model: model, 1),
        "fsdp": (lambda model: shard_layers(model, meshes["4"]), 4),
        "hsdp": (lambda model: shard_layers(model, meshes["2x2"]), 4),
        "fsdp and tensor": (lambda model: shard_layers(tensor_parallel(model, both["tensor"]), both["data"]), 2),
        "tensor": (lambda model: tensor_parallel(model, both["tensor"]), 1),
    }
    found = {}
    for name, (wrap, parts) in ways.items():
        model = wrap(mlp())
        optimizer = FusedLAMB(model.named_parameters(), lr=0.02, weight_decay=0.01, max_grad_norm=0.1)
        for step in range(STEPS):
            torch.manual_seed(step)
            inputs = torch.randn(16, 12)
            mine = inputs.chunk(parts)[rank * parts // 4]
            model(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = {key: whole(value) for key, value in model.named_parameters()}
    return found


def refused(meshes: dict[str, DeviceMesh]) -> dict[str, Any]:
    """The message of each bad input, and whether the weights stayed."""
    mesh, other = meshes["4"], meshes["2x2"]
    found: dict[str, Any] = {}

    def message(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except ValueError as error:
            found[name] = str(error)

    def named() -> list[tuple[str, nn.Parameter]]:
        return [("first", nn.Parameter(spread(torch.ones(8, 4), mesh, [Shard(0)])))]

    pairs = named()
    optimizer = FusedLAMB(pairs, lr=0.1)
    pairs[0][1].grad = spread(torch.ones(8, 4), mesh, [Shard(0)])
    optimizer.step()
    before, saved = whole(pairs[0][1]), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        pairs[0][1]._grad = None
    gradient = spread(torch.ones(8, 4), other, [Shard(0), Shard(0)])
    object.__setattr__(gradient, "unused", None)
    pairs[0][1].grad = gradient
    message("mesh of the gradient", optimizer.step)
    found["unchanged"] = torch.equal(whole(pairs[0][1]), before)
    matrices = named()
    matrices[0][1].grad = gradient
    message("mesh of the gradient of a matrix", Muon(matrices).step)

    shared = torch.ones(2, 4)
    tied = [(name, nn.Parameter(DTensor.from_local(shared, mesh, [Shard(0)]))) for name in ("in", "out")]
    message("tied", lambda: FusedLARS(tied))
    message("tied groups", lambda: FusedLARS([{"params": tied[:1]}, {"params": tied[1:]}]))
    partial = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    message("partial", lambda: FusedSGD([("sum", partial)]))
    strided = nn.Parameter(spread(torch.ones(16, 4), mesh, [_StridedShard(0, split_factor=2)]))
    message("muon", lambda: Muon([("first", strided)]))
    state = saved["state"][0]
    saved["state"][0] = {**state, "exp_avg": whole(state["exp_avg"])}
    message("whole state", lambda: optimizer.load_state_dict(saved))
    saved["state"][0] = {**state, "exp_avg": state["exp_avg"].redistribute(placements=[Replicate()])}
    message("other layout", lambda: optimizer.load_state_dict(saved))
    plain = FusedLAMB([nn.Parameter(torch.ones(8, 4))])
    saved["state"][0] = state
    message("shards of a plain parameter", lambda: plain.load_state_dict(saved))
    found["states kept"] = isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
    return found


def partial_gradient(mesh: DeviceMesh, rank: int) -> dict[str, Tensor]:
    """A gradient that is a sum over ranks is reduced before the step, as in torch.optim."""
    found = {}
    for name, cls in (("fused", FusedSGD), ("torch", torch.optim.SGD)):
        param = nn.Parameter(spread(torch.ones(6), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.full((6,), float(rank)), mesh, [Partial()])
        cls([param], lr=0.1).step()
        found[name] = whole(param)
    return found


def main() -> None:
    path, rank, world_size = join()
    meshes = {
        "2": DeviceMesh("cpu", [0, 1]),
        "4": init_device_mesh("cpu", (world_size,)),
        "2x2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")),
    }
    found = {
        "steps": equal_steps(meshes, rank),
        "muon": muon(meshes),
        "blocks": blockwise(meshes),
        "equal rows": (equal_rows(meshes["4"]), equal_rows(None)),
        "reductions": num_reductions(meshes),
        "overflow": overflow(meshes["4"], rank),
        "models": models(meshes, rank),
        "refused": refused(meshes),
        "partial": partial_gradient(meshes["4"], rank),
        "checkpoint": shard_checkpoint_ranks.run(rank, world_size),
    }
    torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
