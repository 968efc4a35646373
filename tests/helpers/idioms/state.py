"""Copies, pickles and checkpoints of models and optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.idioms.run import STEPS, Run, add, idiom, net, one_step, sgd, start, train

RANKS = ("ranks",)
Model = Any


def _before_each_step(run: Run, look: Callable[[Run], Any], make: Any = sgd) -> None:
    """What is looked at changes nothing, before the first step and between steps."""
    model = net()
    run.distribute(model, make(model))
    for step in range(STEPS):
        look(run)
        one_step(run, step)
    look(run)


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


LOOKS: dict[str, Callable[[Run], Any]] = {
    "deepcopy_of_the_model": lambda run: copy.deepcopy(run.inner)(torch.zeros(1, 5)).sum().backward(),
    "deepcopy_of_the_optimizer": lambda run: copy.deepcopy(run.optimizer).step(),
    "deepcopy_of_both": lambda run: copy.deepcopy((run.inner, run.optimizer))[1].step(),
    "pickled_model": lambda run: pickle.loads(pickle.dumps(run.inner))(torch.zeros(1, 5)),
    "saved_model": lambda run: saved(run.inner)(torch.zeros(1, 5)),
    "saved_states": lambda run: saved([run.inner.state_dict(), run.optimizer.state_dict()]),
    "own_state_loaded": lambda run: run.inner.load_state_dict(copy.deepcopy(run.inner.state_dict())),
    "own_optimizer_state_loaded": lambda run: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
    "printed": lambda run: (repr(run.inner), repr(run.optimizer)),
    "gradients_copied": lambda run: [p.grad.clone() for p in run.inner.parameters() if p.grad is not None],
    "weights_as_numpy": lambda run: [p.detach().numpy().copy() for p in run.inner.parameters()],
    "model_traced": lambda run: torch.jit.trace(copy.deepcopy(run.inner).eval(), torch.zeros(1, 5)),
    "model_exported": lambda run: torch.export.export(copy.deepcopy(run.inner).eval(), (torch.zeros(2, 5),)),
}
for name, look in LOOKS.items():
    add(f"state_{name}", partial(_before_each_step, look=look), worlds=RANKS)

# Programs that read the model in training: no step begins.
READS: dict[str, Callable[[Model], Any]] = {
    "traced": lambda model: torch.jit.trace(model, torch.zeros(2, 5)),
    "exported": lambda model: torch.export.export(model, (torch.zeros(2, 5),)),
    "exported_for_evaluation": lambda model: torch.export.export(model.eval(), (torch.zeros(2, 5),)),
    "made_a_graph": lambda model: make_fx(model)(torch.zeros(2, 5)),
    "run_with_fake_tensors": lambda model: _with_fakes(model),
}


def _with_fakes(model: Model) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.zeros(2, 5))


def _read(run: Run, read: Callable[[Model], Any]) -> None:
    start(run)
    for step in range(STEPS):
        read(run.inner)
        run.inner.train()
        one_step(run, step)


for name, read in READS.items():
    add(f"the_model_is_{name}", partial(_read, read=read))
add(
    "the_model_is_scripted",
    partial(_read, read=torch.jit.script),
    refused="torch.jit.script cannot compile a model in training: take the handle's evaluation_model",
)

DCP: dict[str, Callable[[Run], Any]] = {
    "model_state": lambda run: dcp_state.get_model_state_dict(run.inner),
    "both_states": lambda run: dcp_state.get_state_dict(run.inner, run.optimizer),
}


def _dcp_after_a_step(run: Run, look: Callable[[Run], Any], make: Any) -> None:
    """torch's fake step has no effect on weights, strategy and later steps. It may count as a step of Adam itself."""
    model = net()
    run.distribute(model, make(model))
    for step in range(STEPS):
        if not run.is_plain or make is not adam or step:
            look(run)
        if make is adam and not step:
            run.optimizer.state.clear()
        one_step(run, step)
        run.optimizer.zero_grad()


for name, look in DCP.items():
    for kind in (sgd, adam):
        add(f"dcp_{name}_{kind.__name__}", partial(_dcp_after_a_step, look=look, make=kind), worlds=RANKS)


@idiom(worlds=RANKS)
def dcp_options_of_plain_sgd(run: Run) -> None:
    """An optimizer without states: torch makes its fake step at every call."""
    model = net()
    run.distribute(model, sgd(model, momentum=0.0, weight_decay=0.1))
    for step in range(STEPS):
        dcp_state.get_optimizer_state_dict(run.inner, run.optimizer)
        one_step(run, step)
        run.optimizer.zero_grad()


@idiom(worlds=RANKS)
def dcp_round_trip(run: Run) -> None:
    """Two steps, a checkpoint, two steps; then the checkpoint again, and the same two steps."""
    start(run)
    train(run, steps=2)
    kept = copy.deepcopy(dcp_state.get_state_dict(run.inner, run.optimizer))
    train(run, first=2, steps=2)
    run.tensors += [parameter.detach().clone() for parameter in run.inner.parameters()]
    dcp_state.set_state_dict(run.inner, run.optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])
    train(run, first=2, steps=2)


@idiom(worlds=RANKS)
def optimizer_state_loaded_before(run: Run) -> None:
    """A run that goes on with the momentum of another one."""
    first = net()
    optimizer = sgd(first)
    first(run.batch(0)[0]).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for buffer in state["state"].values():
        buffer["momentum_buffer"].fill_(0.1)
    model = net()
    again = sgd(model)
    again.load_state_dict(state)
    run.distribute(model, again)
    train(run)


@idiom(worlds=RANKS)
def optimizer_state_cleared(run: Run) -> None:
    start(run)
    train(run, steps=2)
    run.optimizer.state.clear()
    train(run, first=2, steps=2)


@idiom()
def a_loss_from_before_distribute(run: Run) -> None:
    """Its graph keeps the nodes that accumulated gradients of the parameters as they were."""
    model = net()
    loss = model(torch.ones(2, 5)).square().sum()
    start(run, model)
    train(run)
    assert loss.requires_grad


@idiom(worlds=RANKS)
def gradients_before_distribute(run: Run) -> None:
    """They are this learner's own, and the next backward pass adds to them."""
    model = net()
    F = nn.functional
    F.cross_entropy(model(run.batch(7)[0]), run.batch(7)[1]).backward()
    run.distribute(model, sgd(model))
    inputs, labels = run.batch(0)
    run.backward(run.loss(run.model(inputs), labels))
    run.step()
    train(run, first=1)


@idiom(worlds=RANKS)
def load_state_hooks(run: Run) -> None:
    start(run)
    run.inner.register_load_state_dict_post_hook(lambda module, keys: None)
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    train(run, steps=2)
    run.optimizer.load_state_dict({k: v for k, v in run.optimizer.state_dict().items() if k != "more"})
    train(run, first=2, steps=2)


@idiom(worlds=RANKS)
def averaged_copy_trained_alone(run: Run) -> None:
    """The copy of the handle is an ordinary model, which another optimizer may step."""
    start(run)
    train(run, steps=2)
    if not run.is_plain:
        copied = run.handle.evaluation_model()
        optimizer = sgd(copied)
        copied(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    train(run, first=2, steps=2)
