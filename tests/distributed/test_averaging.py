"""The averaged copy: its batch normalisation, and that the model in training does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import Ring
from ddpcore.data import Split
from ddpcore.distributed.averaging import recalibrate
from ddpcore.training.trainer import evaluate
from helpers import training
from helpers.connection import connected

N = 3


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Dropout(0.5), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(Ring()), learners=N)
    for seed in range(3):
        optimizer.zero_grad()
        handle.model(batches(seed, N)).square().sum().backward()
        optimizer.step()
    return model, handle


def batches(seed: int, *rows: int) -> Tensor:
    return torch.randn(*rows, 8, 5, generator=torch.Generator().manual_seed(seed)) + 1


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_recalibrated_statistics_are_those_of_the_averaged_weights() -> None:
    _, handle = trained()
    before = snapshot(handle.model)
    inputs = [batches(seed)[: 8 - number] + number for number, seed in enumerate((10, 11, 12))]
    evaluation = handle.evaluation_model(batch_norm="recalibrate", batches=inputs)
    hidden = torch.cat([evaluation[0](batch) for batch in inputs])
    torch.testing.assert_close(evaluation[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(evaluation[1].running_var, hidden.var(0))
    assert evaluation[1].momentum == 0.3
    assert evaluation.training and evaluation[2].training
    assert all(torch.equal(value, before[name]) for name, value in handle.model.state_dict().items())


def test_recalibrated_images_and_layers_that_are_used_twice() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.Conv2d(3, 3, 3), norm, nn.BatchNorm2d(3, track_running_stats=False))
    inputs = [torch.randn(num, 3, 6, 5) + num for num in (2, 5)]
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].transpose(0, 1).flatten(1)))
    recalibrate(model, inputs)
    handle.remove()
    values = torch.cat(seen, dim=1)
    assert len(seen) == 4
    torch.testing.assert_close(norm.running_mean, values.mean(1))
    torch.testing.assert_close(norm.running_var, values.var(1))
    assert not norm._forward_pre_hooks


def test_local_and_average() -> None:
    model, handle = trained()
    assert torch.equal(handle.evaluation_model(batch_norm="local")[1].running_mean, model[1].running_mean)
    averaged = handle.evaluation_model()[1].running_mean
    torch.testing.assert_close(averaged, training.rows_of(handle, "1.running_mean").mean(0))
    for batch_norm in ("local", "average"):
        handle.evaluation_model(batch_norm=batch_norm)[1].running_mean.fill_(7)
    assert not (training.rows_of(handle, "1.running_mean") == 7).any()


@pytest.mark.slow
def test_nothing_of_a_learner_that_is_gone_is_evaluated() -> None:
    """Neither its buffers nor its frozen weights, whether an operation has come since it died or not."""
    for dead, has_stepped in ((0, False), (0, True), (1, True)):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        more = connected(learners=4, on_failure="shrink")
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(Ring()), **more)
        handle.lose(dead)
        if has_stepped:
            handle.model(torch.ones(4, 2, 5)).sum().backward()
            optimizer.step()
        for row, one in enumerate(handle.models):
            value = torch.nan if row == dead else 7.0
            nn.init.constant_(one[0].weight, value)
            one[1].running_mean.fill_(value)
            one[1].num_batches_tracked.fill_(99 if row == dead else 5)
        handle.models[dead][1].running_var = torch.ones(1)
        for batch_norm in ("local", "average"):
            found = handle.evaluation_model(batch_norm)
            assert (found[0].weight == 7).all() and (found[1].running_mean == 7).all(), (dead, batch_norm)
            assert found[1].num_batches_tracked == 5 and found[1].running_var.shape == (4,)
        split = Split(torch.ones(6, 5), torch.ones(6, dtype=torch.int64))
        assert evaluate(nn.Linear(5, 3), split, 3, handle.comm).confusion.sum() == 6


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_that_of_the_averaged_weights(norm: Any) -> None:
    """Averages of the learners' singular vectors are shorter than 1, so the layer would be larger than its norm."""
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(5, 4)), nn.Tanh(), norm(nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(100), learners=N)
    whole = [nn.Linear(5, 4), nn.Linear(4, 3)]
    for place, layer in zip((0, 2), whole, strict=True):
        weights = torch.randn(N, *layer.weight.shape)
        for one, weight in zip(handle.models, weights, strict=True):
            next(p for p in one[place].parameters() if p.dim() > 1).data.copy_(weight)
        mean = weights.mean(dim=0)
        layer.weight.data, layer.bias.data = mean / torch.linalg.matrix_norm(mean, 2), model[place].bias.data.clone()
    for _ in range(30):  # power iterations of each learner
        handle.model(torch.ones(N, 2, 5))
    x = torch.randn(6, 5)
    expected = whole[1](whole[0](x).tanh())
    torch.testing.assert_close(handle.evaluation_model().eval()(x), expected, rtol=1e-3, atol=1e-4)
    assert handle.evaluation_model().training


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_of_equal_learners_keeps_its_vectors(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Linear(5, 4)))
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    handle.model(torch.ones(2, 2, 5))
    averaged = handle.evaluation_model()
    for buffer, own in zip(averaged.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, own)


def test_an_exception_leaves_the_model_in_training_alone() -> None:
    _, handle = trained()
    before = snapshot(handle.model)

    def broken() -> Any:
        yield batches(1)
        raise KeyError("the loader died")

    with pytest.raises(KeyError):
        handle.evaluation_model(batch_norm="recalibrate", batches=broken())
    assert all(torch.equal(value, before[name]) for name, value in handle.model.state_dict().items())
    assert handle.model.training


def test_recalibrate_puts_modes_back_after_an_exception() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[2].eval()
    with pytest.raises(RuntimeError):
        recalibrate(model, [torch.ones(8, 6)])
    assert [module.training for module in model] == [True, True, False]
    assert model[1].momentum == 0.1
    with pytest.raises(ValueError, match="at least one batch"):
        recalibrate(model, [])


class Keeping(nn.Module):
    """Keeps activations as attributes and in containers, as feature extractors and old-style weight_norm do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(5, 4))
        self.last = nn.Linear(4, 3)
        self.kept: dict[str, Any] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = self.first(inputs)
        self.kept["pair"] = [self.hidden, (2 * self.hidden,)]
        return self.last(self.hidden)


@pytest.mark.parametrize("vectorize", [None, True, False], ids=["single", "together", "in turn"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_model_that_keeps_activations(vectorize: bool | None) -> None:
    """The copy computes the same as the learners, and its activations are its own and need no gradient."""
    torch.manual_seed(0)
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {} if vectorize is None else {"learners": N, "vectorize": vectorize}
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.SSGD() if options else ddpcore.Single(), **connected(**options)
    )
    inputs = batches(0, N) if options else batches(0)
    handle.model(inputs).square().sum().backward()
    optimizer.step()
    hidden = model.hidden
    outputs = handle.model(inputs)
    evaluation = handle.evaluation_model()
    assert evaluation.hidden is evaluation.kept["pair"][0] is not model.hidden
    assert not evaluation.hidden.requires_grad
    assert model.hidden is not hidden and (vectorize or model.hidden.requires_grad)
    torch.testing.assert_close(evaluation(batches(0, N)[0] if options else inputs), outputs[0] if options else outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "mean"}, "batch_norm is 'mean': choose from average, local, recalibrate"),
        ({"batch_norm": "recalibrate"}, "pass both or none"),
        ({"batches": [1]}, "pass both or none"),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    _, handle = trained()
    with pytest.raises(ValueError, match=message):
        handle.evaluation_model(**options)


@pytest.mark.parametrize("read", [lambda h: h.evaluation_model(), lambda h: h.consensus_distance()])
@pytest.mark.parametrize("change", ["vector", "data", "double"])
def test_weights_in_the_place_of_the_buffer_are_not_averaged(read: Any, change: str) -> None:
    """The average would be of the weights of before, which the models no longer have."""
    model, handle = trained()
    read(handle)
    if change == "vector":
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(2 * vector, model.parameters())
    elif change == "data":
        model[3].weight.data = 2 * model[3].weight.data
    else:
        model.double()
    with pytest.raises(RuntimeError, match=r"parameter 3\.\w+ has left the flat buffer"):
        read(handle)


@pytest.mark.parametrize("strategy", [
    lambda: ddpcore.LocalSGD(1, weights=(3.0, 2.0, 1.0)),
    lambda: ddpcore.DPSGD(ddpcore.Weighted(ddpcore.Complete(), (3.0, 2.0, 1.0))),
])  # fmt: skip
def test_learners_with_weights_count_alike_in_all_averages(strategy: Any) -> None:
    """Else a teacher, or statistics of batches, would belong to another mean than the trained weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False))
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy(), learners=N)
    for seed in range(3):
        handle.model(batches(seed, N)).square().sum().backward()
        handle.learner.optimizer.step()
    values = torch.tensor([1.0, 2.0, 4.0])
    for one, value in zip(handle.models, values, strict=True):
        for tensor in (one[0].bias, one[1].running_mean, one[2].weight):
            tensor.data.fill_(float(value))
    averaged, mean = handle.evaluation_model(), float((values * torch.tensor([3.0, 2.0, 1.0])).sum() / 6)
    for tensor in (averaged[0].bias, averaged[1].running_mean, averaged[2].weight):
        torch.testing.assert_close(tensor, torch.full_like(tensor, mean))
