"""Whether an optimizer is an ordinary one, and can train learners."""

import io
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore import SSGD, LocalSGD, distribute
from ddpcore.testing.learners import STEPS, MakeOptimizer, batch

SHAPES = ((7, 5), (7,), (3, 7), (3,), ())


def check_optimizer(factory: MakeOptimizer) -> None:
    """Check an optimizer as a training loop uses it.

    Two runs give the same bits. A run that is saved with ``torch.save``, loaded with ``weights_only=True`` and resumed
    gives the uninterrupted run's. A parameter without a gradient stays as it is. ``step(closure)`` returns the
    loss. Under :func:`ddpcore.distribute` one virtual learner takes the steps of a plain loop, bit for bit, and of
    several that never average each takes the steps of its own loop.

    Args:
        factory: makes the optimizer of the parameters that it is given: ``lambda params: MyRule(params, lr=0.1)``.

    AssertionError: something is wrong; one line says what.
    """
    reference = _train(factory)
    name = type(factory([nn.Parameter(torch.zeros(1))])).__name__
    _demand(f"{name}: two equal runs", _train(factory), reference)
    for resume_at in (1, STEPS // 2):
        _demand(f"{name}: a run resumed after step {resume_at}", _train(factory, resume_at=resume_at), reference)
    if all(torch.equal(start, end) for start, end in zip(_parameters(), reference, strict=True)):
        raise AssertionError(f"{name}: {STEPS} steps changed nothing")
    params = _parameters()
    optimizer = factory(params)
    for parameter in params[1:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if not torch.equal(params[0], _parameters()[0]):
        raise AssertionError(f"{name}: a parameter whose gradient is None changed")
    _check_closure(factory, name)
    _check_learners(factory, name)


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _train(factory: MakeOptimizer, resume_at: int | None = None) -> list[Tensor]:
    params, generator = _parameters(), torch.Generator().manual_seed(2)
    optimizer = factory(params)
    for step in range(STEPS):
        if step == resume_at:
            saved = io.BytesIO()
            torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, saved)
            state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
            params = [nn.Parameter(tensor) for tensor in state["params"]]
            optimizer = factory(params)
            optimizer.load_state_dict(state["optimizer"])
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in params]


def _check_closure(factory: MakeOptimizer, name: str) -> None:
    params = _parameters()
    optimizer = factory(params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in params]).sum()
        loss.backward()
        return loss

    expected = torch.stack([parameter.detach().square().sum() for parameter in params]).sum()
    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
    if loss is None or abs(loss.item() - expected.item()) > 1e-4 * expected.item():
        raise AssertionError(f"{name}: step(closure) returned {loss}, the loss is {expected.item():g}")


def _check_learners(factory: MakeOptimizer, name: str) -> None:
    """A plain loop a learner against virtual learners: one with SSGD, and three that never average."""
    plain = [_loop(factory, learner, None)[0] for learner in range(3)]
    alone, several = _loop(factory, 0, 1)[0], _loop(factory, 0, 3)
    if not torch.equal(alone, plain[0]):
        raise AssertionError(f"{name}: one virtual learner differs from a plain loop by {_apart(alone, plain[0]):.3g}")
    for learner, (row, wanted) in enumerate(zip(several, plain, strict=True)):
        if not torch.equal(row, wanted):
            what = f"{name}: virtual learner {learner} of 3 that never average differs from a plain loop"
            raise AssertionError(f"{what} by {_apart(row, wanted):.3g}: the rule must not combine different parameters")


def _loop(factory: MakeOptimizer, first: int, num_rows: int | None) -> Tensor:
    """Weights ``[L, P]`` after some steps, of a plain loop where ``num_rows`` is None."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer, models = factory(model.parameters()), [model]
    if num_rows is not None:
        strategy = SSGD() if num_rows == 1 else LocalSGD(period=10**6)
        handle = distribute(model, optimizer, strategy, learners=num_rows, vectorize=False)
        model, models = handle.model, list(handle.models)
    for step in range(STEPS):
        inputs, labels = (x[first : first + (num_rows or 1)] for x in batch(step, 3))
        optimizer.zero_grad()
        outputs = model(inputs[0])[None] if num_rows is None else model(inputs)
        losses = [nn.functional.cross_entropy(*pair) for pair in zip(outputs, labels, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return torch.stack([torch.cat([p.detach().flatten() for p in one.parameters()]) for one in models])


def _demand(what: str, ours: list[Tensor], reference: list[Tensor]) -> None:
    worst = max(_apart(a, b) for a, b in zip(ours, reference, strict=True))
    if not worst == 0:
        raise AssertionError(f"{what} ends with other weights: they differ by {worst:.3g}")


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()
