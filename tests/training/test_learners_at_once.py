"""Virtual learners whose passes run one after the other: the memory of one, and the same bits."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import ddpcore
from ddpcore.data import Dataset, Split
from ddpcore.distributed.handle import Distributed
from ddpcore.models.small import SimpleCNN
from ddpcore.training import DataConfig, ModelConfig, OptimizerConfig, RunConfig, StrategyConfig, TrainConfig, build
from ddpcore.training.build import LearnerPlacement, build_trainer
from ddpcore.training.memory import activation_bytes, estimate
from helpers.each import each

L, B = 4, 6
STRATEGIES = ["ssgd", "dpsgd", "local_sgd", "noisy_ssgd", "gradient_tracking", "push_sum"]
IN_TURN = ModelConfig(name="lenet5", options={"widths": [4, 4, 12, 8]})  # with dropout and batch normalization
IN_VMAP = ModelConfig(name="mlp", options={"hidden": [24, 16]})


def _trainer(at_once, strategy="ssgd", model=IN_TURN, accumulation=1, compile=False):
    torch.manual_seed(0)
    dataset = Dataset("mnist", Split(torch.randn(96, 1, 28, 28), torch.randint(10, (96,))), None, 10, (1, 28, 28))
    config = TrainConfig(
        model=dataclasses.replace(model, compile=compile),
        data=DataConfig(name="mnist", batch_size=L * B, accumulation=accumulation),
        optimizer=OptimizerConfig(name="lars", lr=0.05, options={"momentum": 0.9, "trust_coefficient": 0.1}),
        strategy=StrategyConfig(name=strategy, learners=L, learners_at_once=at_once),
        run=RunConfig(steps=3, device="cpu"),
    )
    vectorize = {"vectorize": True} if model is IN_VMAP else {}
    return build_trainer(LearnerPlacement.of(config, None), dataset, **vectorize)


@pytest.fixture(autouse=True)
def _no_small_models(monkeypatch):
    monkeypatch.setattr(build, "AT_ONCE_WORK", 0)


def _trained(at_once, *args, **options):
    trainer = _trainer(at_once, *args, **options)
    losses = [trainer.step() for _ in range(3)]
    assert len({loss.shape for loss in losses}) == 1
    models = trainer.handle.models  # the order of the flat buffer may differ
    state = [value.clone() for one in models for value in one.state_dict().values()]
    return [*losses, torch.rand(2), *state, *(p.grad.clone() for one in models for p in one.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", [IN_TURN, IN_VMAP], ids=["in turn", "vmap"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_number_at_once_gives_the_same_bits(strategy, model, accumulation):
    together = _trained(L, strategy, model, accumulation)
    for at_once in (1, 3, None):
        apart = _trained(at_once, strategy, model, accumulation)
        assert all(map(torch.equal, apart, together)), at_once


class _Saved:
    """The most bytes that autograd has saved at once."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        box = _Box(self, tensor)
        self.now += box.size
        self.most = max(self.most, self.now)
        return box

    @staticmethod
    def unpack(box):
        return box.tensor


class _Box:
    def __init__(self, saved, tensor):
        self.saved, self.tensor, self.size = saved, tensor, tensor.nbytes

    def __del__(self):
        self.saved.now -= self.size


@pytest.mark.parametrize(("model", "default"), [(IN_TURN, 1), (IN_VMAP, L)], ids=["in turn", "vmap"])
def test_activations_of_so_many_learners_live_at_once(model, default):
    most = {}
    for at_once in (L, 2, 1, None):
        trainer, saved = _trainer(at_once, model=model), _Saved()
        trainer.step()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            trainer.step()
        assert saved.now == 0
        most[at_once] = saved.most
    assert most[None] == most[default]
    assert most[1] == pytest.approx(most[L] / L, rel=0.02)
    assert most[2] == pytest.approx(most[L] / 2, rel=0.02)


def _loop(handle, optimizer, parts):
    losses = []
    for x, y in parts:
        found = torch.stack([F.cross_entropy(o, t) for o, t in zip(handle.model(x), y, strict=True)])
        handle.backward(found)
        losses.append(found.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat(losses)


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, ddpcore.DPSGD])
def test_split_in_a_loop_of_your_own(strategy):
    found = []
    for at_once in (L, None, 3):
        torch.manual_seed(0)
        model = SimpleCNN(input_shape=(3, 32, 32), num_classes=10)
        optimizer = ddpcore.optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=L, vectorize=False)
        x, y = torch.randn(2, L, B, 3, 32, 32), torch.randint(10, (2, L, B))
        losses = [_loop(handle, optimizer, handle.split(*batch, at_once=at_once)) for batch in zip(x, y, strict=True)]
        found.append([*losses, handle.learner.flat.param_LP.clone()])
        assert handle.learner.step == 2
    assert all(map(torch.equal, found[1], found[0]))
    assert all(map(torch.equal, found[2], found[0]))


def test_a_loop_that_ends_early_leaves_the_model_as_it_was():
    model = SimpleCNN(input_shape=(3, 32, 32), num_classes=10)
    handle = ddpcore.distribute(model, ddpcore.optim.FusedSGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=L)
    x = torch.randn(L, B, 3, 32, 32)
    for (part,) in handle.split(x):
        assert handle.model(part).shape == (1, B, 10)
        break
    assert handle.model(x).shape == (L, B, 10)


def test_a_baseline_gets_its_batch_as_it_is():
    x = torch.randn(B, 3, 32, 32)
    model = SimpleCNN(input_shape=(3, 32, 32), num_classes=10)
    assert [part is x for (part,) in Distributed(model, None).split(x)] == [True]


def test_small_learners_run_all_at_once(monkeypatch):
    monkeypatch.undo()
    assert _trainer(None).at_once == L
    assert _trainer(1).at_once == 1
    monkeypatch.setattr(build, "AT_ONCE_WORK", 0)
    assert _trainer(None).at_once is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "^CUDA out of memory. Tried .*learners_at_once=1"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 9"), "can't allocate memory: 9 .*accumulation"),
    ],
)
def test_out_of_memory_names_the_option(monkeypatch, error, text):
    trainer = _trainer(None)

    def fail(*args):
        raise error

    monkeypatch.setattr(trainer, "_losses", fail)
    with pytest.raises(MemoryError, match=text):
        trainer.step()


def test_other_errors_of_a_pass_stay_as_they_are(monkeypatch):
    trainer = _trainer(None)
    trainer.model = lambda x: torch.zeros(1) @ torch.zeros(2)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        trainer.step()


@each(
    ("name", "options", "shape", "tolerance"),
    [
        ("lenet5", {}, (3, 32, 32), 0.02),
        ("resnet18", {}, (3, 32, 32), 0.02),
        ("mlp", {"hidden": [24]}, (1, 28, 28), 0.02),
        ("densenet121", {"growth_rate": 4}, (3, 32, 32), 0.02),
        ("vit", {}, (3, 32, 32), 0.15),  # meta takes another attention kernel than the CPU
    ],
)
def test_estimate_is_what_autograd_keeps(name, options, shape, tolerance):
    dataset = Dataset("cifar10", Split(torch.randn(8, *shape), torch.randint(10, (8,))), None, 10, shape)
    config = TrainConfig(model=ModelConfig(name=name, options=options), run=RunConfig(steps=1, device="cpu"))
    model = build.build_model(config, dataset, torch.device("cpu"))
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        loss = F.cross_entropy(model(dataset.train.inputs[:4].clone()), dataset.train.labels[:4])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    found = activation_bytes(config, dataset, 4)
    assert found == pytest.approx(sum(size for key, size in storages.items() if key not in own), rel=tolerance)
    assert activation_bytes(config, dataset, 8) == pytest.approx(2 * found, rel=0.02)
    assert loss.isfinite()


def test_the_estimate_counts_the_learners_that_live_at_once():
    for at_once, words in ((None, "1 of 4 learners at once"), (3, "3 of 4 learners at once")):
        trainer = _trainer(at_once)
        config = TrainConfig(
            model=IN_TURN,
            data=DataConfig(name="mnist", batch_size=L * 2**20),
            strategy=StrategyConfig(name="ssgd", learners=L),
            run=RunConfig(steps=1, device="cpu"),
        )
        bytes_of_one = activation_bytes(config, trainer.dataset, 2**20)
        line = estimate(config, trainer)
        assert words in line
        assert f"activations {(at_once or 1) * bytes_of_one / 2**30:.2f} GiB" in line
