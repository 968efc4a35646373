"""What a program does around a loop: settings of torch, several models, copies, states, errors, calls of its own."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers.idioms.changes import KINDS
from helpers.idioms.run import Run, add, net, one_step, start, train

RANKS = ("ranks",)
Model = Any


def begin(run: Run, kind: str, model: nn.Module | None = None, **options: Any) -> Model:
    """Distribute a model and an optimizer of a kind."""
    model = net() if model is None else model
    run.distribute(model, KINDS[kind](run, model), **options)
    return model


# ---- settings of torch ----


@contextmanager
def _set(on: Callable[[], Any], off: Callable[[], Any]) -> Iterator[None]:
    on()
    try:
        yield
    finally:
        off()


SETTINGS: dict[str, Callable[[], Any]] = {
    "default_device": lambda: _set(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "default_dtype": lambda: _set(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "deterministic": lambda: _set(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "one_autograd_thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "function_mode": BaseTorchFunctionMode,
    "autocast_around_the_step": lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=True),
}


def _inside(run: Run, kind: str, setting: Callable[[], Any], first: bool) -> None:
    """With the setting from before ``distribute``, or around each pass and step."""
    model = net()
    optimizer = KINDS[kind](run, model)
    batches = [run.batch(step) for step in range(4)]
    with setting() if first and not run.is_plain else torch.enable_grad():
        run.distribute(model, optimizer)
    for inputs, labels in batches:
        run.optimizer.zero_grad()
        if setting is SETTINGS["autocast_around_the_step"]:
            run.backward(run.loss(run.model(inputs), labels))
            with setting():
                run.step()
            continue
        with torch.enable_grad() if run.is_plain else setting():
            run.backward(run.loss(run.model(inputs), labels))
            run.step()


for setting, make in SETTINGS.items():
    for kind in ("sgd", "fused_adamw", "muon"):
        add(f"setting_{setting}_{kind}", partial(_inside, kind=kind, setting=make, first=True), worlds=RANKS)


# ---- two models ----


def _judge(run: Run, outputs: Tensor, target: float) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, target), reduction="none")
    return run.mean(losses)


def _adversarial(run: Run, kind: str, way: str) -> None:
    torch.manual_seed(3)
    maker = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    judge = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    other = Run(run.strategy, run.world)
    begin(other, kind, judge)
    begin(run, kind, maker)
    for step in range(5):
        real, noise = run.batch(step)[0], run.batch(100 + step)[0]
        other.optimizer.zero_grad()
        made = run.model(noise)
        other.backward(_judge(run, other.model(real), 1.0) + _judge(run, other.model(made.detach()), 0.0))
        other.step()
        for parameter in other.parameters() if way == "clipped" else ():
            parameter.data.clamp_(-0.1, 0.1)
        if way == "in_turn" and step % 2:
            continue
        run.optimizer.zero_grad()
        for one in other.models:
            one.requires_grad_(way != "frozen")
        run.backward(_judge(run, other.model(made if way == "one_graph" else run.model(noise)), 1.0))
        for one in other.models:
            one.requires_grad_(True)
        run.step()
    run.tensors += other.close()[0]


for way in ("usual", "frozen", "clipped", "in_turn", "one_graph"):
    for kind in ("sgd", "fused_adamw"):
        add(f"adversarial_{way}_{kind}", partial(_adversarial, kind=kind, way=way))


def _one_backward(run: Run, kind: str, **options: Any) -> None:
    """Two models, each with its own ``distribute`` call, one loss."""
    torch.manual_seed(3)
    first, last = net(), nn.Linear(3, 3)
    other = Run(run.strategy, run.world)
    begin(other, kind, last, **options)
    begin(run, kind, first, **options)
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        other.optimizer.zero_grad()
        run.loss(other.model(torch.tanh(run.model(inputs))), labels).backward()
        if run.is_plain and run.strategy == "ssgd":
            run._average([p.grad for p in (*run.parameters(), *other.parameters()) if p.grad is not None])
        run.step()
        other.step()
    run.tensors += other.close()[0]


for kind in ("sgd", "muon"):
    add(f"two_models_in_one_backward_{kind}", partial(_one_backward, kind=kind))
few = {"bucket_bytes": 64, "first_bucket_bytes": 64}
add("two_models_in_one_backward_many_buckets", partial(_one_backward, kind="sgd", **few))


# ---- copies and states ----


def _saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Model], Model]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
}


def _copy_trains_too(run: Run, kind: str, make: Callable[[Model], Model]) -> None:
    model = begin(run, kind)
    train(run, steps=2)
    other, copied = Run(run.strategy, run.world), make(model)
    for parameter in copied.parameters() if run.is_plain else ():
        dist.broadcast(parameter.data, 0)  # distribute() starts all learners alike
    begin(other, kind, copied)
    for step in range(4):
        one_step(run, step)
        one_step(other, step + 10)
    run.tensors += other.close()[0]


for how, make_copy in COPIES.items():
    add(f"a_copy_is_distributed_too_{how}", partial(_copy_trains_too, kind="fused_sgd", make=make_copy), worlds=RANKS)


def _back_to_a_state(run: Run, kind: str, anew: bool) -> None:
    """To the state of an earlier step, with the same objects or new ones."""
    model = begin(run, kind)
    train(run, steps=3)
    handle = {} if run.handle is None else run.handle.state_dict()
    kept = copy.deepcopy((model.state_dict(), run.optimizer.state_dict(), handle))
    steps = run._steps
    train(run, first=3, steps=3)
    if anew:
        model = begin(run, kind)
    model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    if run.handle is not None:
        run.handle.load_state_dict(kept[2])
    run._steps = steps
    train(run, first=20)


for kind in KINDS:
    for anew in (False, True):
        name = f"back_to_a_state_{'of_new_objects_' if anew else ''}{kind}"
        add(name, partial(_back_to_a_state, kind=kind, anew=anew), worlds=RANKS)


def _states_first(run: Run, kind: str) -> None:
    """torch makes the optimizer create its states by a step of zero before the first pass."""
    model = begin(run, kind)
    get_state_dict(model, run.optimizer)
    train(run)


for kind in KINDS:
    add(f"states_before_the_first_pass_{kind}", partial(_states_first, kind=kind), worlds=RANKS)


# ---- errors in a pass, after which the loop goes on ----


class Deep(nn.Module):
    """Equal layers, so that all messages have one size. A gradient hook of an activation may raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        self.last = nn.Linear(5, 3, bias=False)
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "forward":
            raise MemoryError
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.place == f"layer {index}":
                x.register_hook(self.fail)
        result: Tensor = self.last(x)
        return result

    def fail(self, gradient: Tensor) -> None:
        raise MemoryError


def _tried_again(run: Run, place: str, at: int) -> None:
    """On both ranks: a pass fails and the step is taken again."""
    model = Deep()
    begin(run, "sgd", model, bucket_bytes=128, first_bucket_bytes=128)
    for step in range(at + 3):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        if step == at and not run.is_plain:
            model.place = place
            try:
                run.backward(run.loss(run.model(inputs), labels))
            except MemoryError:
                model.place = ""
            run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        run.step()


for place in ("forward", "layer 3", "layer 1", "layer 0"):
    for at in (1, 17):  # learners are compared in the first steps
        add(
            f"tried_again_after_{place.replace(' ', '_')}_in_step_{at}",
            partial(_tried_again, place=place, at=at),
            worlds=RANKS,
        )


# ---- ways of a pass ----


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, parts: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.body, self.reentrant, self.parts = nn.Linear(5, 5), net(), reentrant, parts

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.parts > 1:
            result: Tensor = checkpoint_sequential(self.body, self.parts, x, use_reentrant=self.reentrant)
        else:
            result = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return result


for reentrant in (False, True):
    for parts in (1, 2):
        add(
            f"checkpoint_{'reentrant_' if reentrant else ''}of_{parts}_parts",
            lambda run, reentrant=reentrant, parts=parts: (  # type: ignore[misc]
                begin(run, "sgd", Checkpointed(reentrant, parts)),
                train(run),
            ),
            worlds=RANKS,
        )


class InOrder(nn.Module):
    """Branches in another order on each rank, so that their gradients come in another order."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches, self.backwards = nn.ModuleList(nn.Linear(5, 3) for _ in range(3)), backwards

    def forward(self, x: Tensor) -> Tensor:
        branches = list(self.branches)
        return sum(branch(x) for branch in (reversed(branches) if self.backwards else branches))  # type: ignore


def _in_order(run: Run, kind: str) -> None:
    begin(run, kind, InOrder(run.rank == 1), **few)
    train(run)


for kind in ("sgd", "fused_sgd", "muon"):
    add(f"branches_in_another_order_on_each_rank_{kind}", partial(_in_order, kind=kind), worlds=RANKS, digits=5)


def _in_a_thread(run: Run) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            start(run)
            train(run)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


add("the_loop_in_a_thread", _in_a_thread, worlds=RANKS)


def _in_two_calls(run: Run, kind: str) -> None:
    """``backward(inputs=)`` of some layers, and then of the others."""
    model = begin(run, kind)
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        loss.backward(inputs=list(model[0].parameters()), retain_graph=True)
        loss.backward(inputs=list(model[2].parameters()))
        if run.is_plain and run.strategy == "ssgd":
            run._average([p.grad for p in run.parameters() if p.grad is not None])
        run.step()


for kind in ("sgd", "fused_adamw", "muon"):
    add(f"backward_of_inputs_in_two_calls_{kind}", partial(_in_two_calls, kind=kind), worlds=RANKS)


def _own_average(run: Run, kind: str, what: str) -> None:
    """The program averages weights or gradients itself, beside the strategy."""
    begin(run, kind)
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for parameter in run.parameters() if what == "gradients" else ():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
        run.step()
        for parameter in run.parameters() if what == "weights" else ():
            dist.all_reduce(parameter.data)
            parameter.data.div_(dist.get_world_size())


for kind in ("sgd", "fused_sgd", "muon"):
    for what in ("weights", "gradients"):
        add(f"own_average_of_{what}_{kind}", partial(_own_average, kind=kind, what=what), worlds=RANKS)
