"""``prepare`` with the real Accelerate, on two gloo ranks and in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from helpers import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks save."""
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    return ranks.run("accelerate_ranks", 2, more=[[folder]] * 2)


@pytest.fixture(scope="module")
def alone(both: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What one process finds, which also goes on with what the ranks have saved."""
    return ranks.run("accelerate_ranks", 1, more=[[folder, "alone"]])[0]


def test_ssgd_is_their_ddp_with_accumulation_and_clipping(both: list[dict[str, Any]]) -> None:
    """They add gradients in another order: rounding errors of float32, over 9 steps."""
    for found in both:
        (losses, others), (weights, own) = found["ssgd"]["losses"], found["ssgd"]["weights"]
        assert len(losses) == 18 and losses[0] == others[0]
        assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-5)
        assert torch.allclose(weights, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_resumed_run_has_the_same_bits(both: list[dict[str, Any]], precision: str) -> None:
    for found in both:
        run = found[precision]
        assert torch.equal(*run["weights"]) and run["losses"][0] == run["losses"][1]
        assert torch.equal(*run["file"])  # save_state writes the averaged weights
        assert run["distance"] > 1e-4
    assert not torch.equal(both[0][precision]["weights"][0], both[1][precision]["weights"][0])


def test_a_resumed_run_has_the_gradient_scaler_of_each_rank(both: list[dict[str, Any]]) -> None:
    for whole, later, *scalers in (found["scaler"] for found in both):
        assert torch.equal(whole, later) and scalers[0] == scalers[1]
    assert both[1]["scaler"][2]["scale"] < both[0]["scaler"][2]["scale"] == 256


def test_a_checkpoint_of_ddp_begins_a_gossip_run_and_back(both: list[dict[str, Any]]) -> None:
    for found in both:
        gossip, back = found["moves"]
        assert len(gossip) == 12 and len(back) == 6
        assert max(gossip[0], back[0]) < 0.95 * found["ssgd"]["losses"][0][0]  # the loss of a new model


def test_a_checkpoint_of_ddp_may_be_pickled(both: list[dict[str, Any]]) -> None:
    for found in both:
        assert torch.equal(*found["pickled"])


def test_the_average_that_a_pass_inside_no_sync_asks_for(both: list[dict[str, Any]]) -> None:
    """Each rank had trained alone."""
    for found in both:
        assert torch.allclose(*found["triggered"], rtol=0, atol=1e-6)
    assert torch.equal(*(found["triggered"][1] for found in both))


def test_save_model_writes_all_averaged_weights(both: list[dict[str, Any]]) -> None:
    """Accelerate takes tensors of one storage for one tensor, and had saved one of them."""
    for found in both:
        assert torch.equal(*found["model"])


def test_refusals_are_one_line(both: list[dict[str, Any]]) -> None:
    expected = {
        "prepared": "accelerator.prepare() has the model already",
        "prepared with DDP": "accelerator.prepare() has the model already",
        "wrapped": "wrapped by DistributedDataParallel",
        "another": "use the same strategy",
        "fsdp": "Accelerate runs FSDP, which averages or shards by itself",
        "part": "group has 1 of 2 processes: leave group= out",
        "over": "begun: another run has saved its weights over those of ddpcore_rank_*.pt: remove these to go on",
    }
    assert set(expected) == set(both[0]["refused"])
    for name, words in expected.items():
        message = both[0]["refused"][name]
        assert words in message and "\n" not in message, (name, message)


def test_one_process_saves_into_the_folder_of_two_ranks(alone: dict[str, Any]) -> None:
    """It had loaded the average of its own weights and those of the rank that has gone."""
    assert torch.equal(*alone["again"])


def test_one_process_goes_on_with_the_average_of_two_ranks(both: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert torch.allclose(alone["begun"], both[0]["no"]["file"][0], rtol=0, atol=1e-7)
    losses = alone["losses"]
    assert len(losses) == 24 and max(losses) < both[0]["no"]["losses"][0][0]  # a new model has 1.1 and more
    assert alone["step"] == 6 + 12  # two epochs of two ranks with 6 batches each; then of one, with 12


def test_one_process(alone: dict[str, Any]) -> None:
    assert torch.equal(*alone["resumed"])


def test_a_model_that_another_accelerator_had() -> None:
    """Its autocast is gone, and a compiled average of a run goes on, too."""
    import accelerate
    from accelerate.state import AcceleratorState

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    weights, inputs = copy.deepcopy(model.state_dict()), torch.randn(2, 4)
    wanted = model(inputs)
    for backend, others in (("no", "no"), ("no", "eager"), ("eager", "no"), ("eager", "eager"), ("no", "no")):
        AcceleratorState._reset_state()
        other = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend=others)
        model = other.prepare(model)
        assert not torch.equal(model(inputs), wanted)
        _, handle, model, train = _run(model, dynamo_backend=backend)
        assert torch.equal(model(inputs), wanted)
        train(3, seed=0)
        model = handle.evaluation_model()
        model.load_state_dict({name: weights[name.removeprefix("_orig_mod.")] for name in model.state_dict()})
    AcceleratorState._reset_state()
    model = nn.Linear(4, 4)
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    before = model.forward
    model.forward = lambda inputs: 3 * before(inputs)
    accelerate.Accelerator().free_memory()
    with pytest.raises(ValueError, match="a program replaced forward after an Accelerator wrapped it: pass the model"):
        _run(model)


def test_several_models_of_one_loop(tmp_path: Path) -> None:
    """Of equal shapes, as a model and its teacher: each is saved by itself, and loads its own state."""
    import accelerate

    from ddpcore.integrations.accelerate import prepare

    def begin(seed: int) -> tuple[Any, list[Any], list[Any]]:
        accelerate.Accelerator().free_memory()
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(seed)
        models = [nn.Linear(4, 4) for _ in range(4)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for place in range(4):
            if place % 2:
                _, model, optimizer = prepare(accelerator, models[place], optimizers[place], ddpcore.SSGD())
            else:
                model, optimizer = accelerator.prepare(models[place], optimizers[place])
            models[place], optimizers[place] = model, optimizer
        return accelerator, models, optimizers

    def train(accelerator: Any, models: list[Any], optimizers: list[Any], num_steps: int) -> list[torch.Tensor]:
        for step in range(num_steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
        return [model.weight.detach().clone() for model in models]

    first = begin(0)
    train(*first, 3)
    first[0].save_state(str(tmp_path))
    expected = train(*first, 2)
    second = begin(1)
    second[0].load_state(str(tmp_path))
    assert all(map(torch.equal, expected, train(*second, 2)))


def test_a_hook_of_the_program_saves_the_weights_itself(tmp_path: Path) -> None:
    """As programs that save adapters alone do: the folder has the state of the rank and no weights besides."""
    import accelerate

    from ddpcore.integrations.accelerate import prepare

    found = []
    for seed in range(2):
        accelerate.Accelerator().free_memory()
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        _, model, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD())
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        if seed:
            assert not torch.equal(found[0], model.weight)
            accelerator.load_state(str(tmp_path))
        else:
            accelerator.save_state(str(tmp_path))
            assert not list(tmp_path.glob("model*"))
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def _run(model: nn.Module, **options: Any) -> tuple[Any, ...]:
    """The accelerator, the model and its optimizer, and a function that trains them by so many steps."""
    import accelerate
    from accelerate.state import AcceleratorState

    from ddpcore.integrations.accelerate import prepare

    AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **options)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    handle, model, optimizer = prepare(accelerator, model, optimizer, ddpcore.SSGD())

    def train(num_steps: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            optimizer.zero_grad()
            outputs = model(torch.randn(8, 4, generator=generator))
            accelerator.backward(nn.functional.cross_entropy(outputs, torch.randint(4, (8,), generator=generator)))
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return accelerator, handle, model, train


@pytest.mark.parametrize("kind", ["same sums", "nan"])
def test_weights_of_another_run_are_refused(tmp_path: Path, kind: str) -> None:
    """Steps of SGD with cross entropy leave the sum of a layer's weights as it is, so another run has the same sum."""
    import safetensors.torch

    def begin() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return _run(nn.Linear(4, 4))

    accelerator, _, _, train = begin()
    train(3, seed=0)
    accelerator.save_state(str(tmp_path))
    begin()[0].load_state(str(tmp_path))
    _, _, other, train = begin()
    train(3, seed=1)
    weights = {name: one.detach().clone() for name, one in other.named_parameters()}
    if kind == "nan":
        weights["weight"][0, 0] = float("nan")
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="another run has saved its weights over those of ddpcore_rank_"):
        begin()[0].load_state(str(tmp_path))


def test_a_rank_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """Also where another number of processes loads the average of all files."""
    for rank in range(2):
        torch.manual_seed(0)
        accelerator, _, _, train = _run(nn.Linear(4, 4))
        train(3, seed=rank)
        accelerator.save_state(str(tmp_path / str(rank)))
    (tmp_path / "1" / "ddpcore_rank_0.pt").rename(tmp_path / "0" / "ddpcore_rank_1.pt")
    with pytest.raises(ValueError, match="another run has saved its weights"):
        accelerator.load_state(str(tmp_path / "0"))


def test_ranks_that_may_die_load_their_own_files(tmp_path: Path) -> None:
    """Also those that are left after a death: a file has the number that a resumed run would give to its rank."""
    found = ranks.run("accelerate_ranks", 4, more=[[tmp_path, "dies"]] * 4)
    assert [len(one) for one in found] == [2, 1, 2, 2]
    for had, loaded in (pair for one in found for pair in one):
        assert torch.equal(had, loaded)
    assert not torch.equal(found[0][0][0], found[2][0][0])
    assert sorted(path.name for path in (tmp_path / "left").iterdir()) == [f"ddpcore_rank_{one}.pt" for one in range(3)]


def test_a_load_that_failed_does_not_come_back(tmp_path: Path) -> None:
    """The optimizer then loads what the program gives it, and not the rank's file."""
    accelerator, _, _, train = _run(nn.Linear(4, 4))
    train(3, seed=0)
    accelerator.save_state(str(tmp_path))
    train(3, seed=1)
    (optimizer,) = accelerator._optimizers
    own = {number: one["momentum_buffer"].clone() for number, one in optimizer.state_dict()["state"].items()}
    state = copy.deepcopy(optimizer.state_dict())

    def fail(models: list[Any], folder: str) -> None:
        raise RuntimeError("no such node")

    failing = accelerator.register_load_state_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no such node"):
        accelerator.load_state(str(tmp_path))
    optimizer.load_state_dict(state)
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[number]["momentum_buffer"], one) for number, one in own.items())
    failing.remove()
    accelerator.load_state(str(tmp_path))
    assert not torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], own[0])


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", ["tied", "compiled", "tied and compiled"])
def test_tied_and_compiled_models_go_on(tmp_path: Path, kind: str, safe: bool) -> None:
    def begin(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        if "tied" in kind:
            model[2].weight = model[0].weight
        return _run(model, **({"dynamo_backend": "eager"} if "compiled" in kind else {}))

    accelerator, handle, _, train = begin(0)
    train(3, seed=0)
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    names = {"0.weight", "0.bias", "2.bias"} | ({"2.weight"} if "tied" not in kind else set())
    loaded = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    saved = accelerate_state(tmp_path)
    assert names <= set(saved)
    loaded.load_state_dict({"2.weight": saved.get("2.weight", saved["0.weight"]), **saved})
    average = dict(getattr(model := handle.evaluation_model(), "_orig_mod", model).state_dict())
    assert all(torch.equal(average[name], one) for name, one in loaded.state_dict().items())
    expected = train(2, seed=1)
    second, _, _, train = begin(1)
    second.load_state(str(tmp_path))
    assert all(map(torch.equal, expected, train(2, seed=1)))


def test_two_models_whose_layers_are_compiled(tmp_path: Path) -> None:
    """Accelerate then calls another module than the one that it saves."""
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    from ddpcore.integrations.accelerate import prepare

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    found = []
    for seed in range(2):
        AcceleratorState._reset_state()
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
        torch.manual_seed(seed)
        models: list[nn.Module] = [Layers(), Layers()]
        for place, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            _, models[place], optimizer = prepare(accelerator, model, optimizer, ddpcore.SSGD())
            accelerator.backward(models[place](torch.ones(2, 4)).sum())
            optimizer.step()
        if seed:
            accelerator.load_state(str(tmp_path))
        else:
            accelerator.save_state(str(tmp_path))
            assert len(list(tmp_path.glob("ddpcore_*"))) == 2
        found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def accelerate_state(folder: Path) -> dict[str, Any]:
    """The weights of a folder of ``save_state``."""
    from accelerate.utils import load_state_dict

    return dict(load_state_dict(str(next(file for file in folder.iterdir() if "model" in file.name))))


def test_a_scheduler_follows_its_own_optimizer() -> None:
    """It steps only if no optimizer that it knows has left a step out, as a scaler does."""
    import accelerate

    from ddpcore.integrations.accelerate import prepare

    accelerate.Accelerator().free_memory()
    accelerator = accelerate.Accelerator(cpu=True)
    for _ in range(2):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        _, _, prepared, scheduler = prepare(accelerator, model, optimizer, ddpcore.SSGD(), schedule)
        assert scheduler.optimizers == [prepared]
