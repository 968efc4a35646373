"""The states of parameters in a ``state_dict``: copies, loading by name, the numbers of rounded ones, and checks.

**Rounded states.** With the option ``state_dtype`` momentum and moments are in bfloat16, rounded stochastically. The
random bits of an element depend on the steps and the number of its parameter in the optimizer, and on its place in
memory. So every rank and every virtual learner draws the same ones (docs/optimizers.md).
"""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from ddpcore.ops.library import is_narrow
from ddpcore.optim.checks import Group, State, check_capture, is_capturing, is_rounded, is_scalar, options_of
from ddpcore.optim.shards import check_shard_of_state, first_of_shard
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.shards import local

ELEMENTS = 2**40  # more than a parameter has: the indices of two parameters never overlap

Named = Iterable[tuple[tuple[str | int, Tensor], Group]]


class SavedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``state_dict`` is a copy of its state, and which copies what it loads.

    States with names are loaded by name. What torch's loading changes is restored: states that it casts to the dtype
    of the parameter, and step counters that parameters share.
    """

    _is_captured = False  # whether a CUDA graph has captured a step
    _given: tuple[dict[Any, Tensor], dict[Any, State]] | None = None  # while a state_dict is loaded

    def check_loading(self, groups: Sequence[Group], saved: Mapping[Any, Tensor], state_dict: dict[str, Any]) -> None:
        """Raise ValueError unless a state can be loaded into ``groups``, the optimizer's with the options of the file.

        ``saved`` has the parameter of each number in the file.
        """
        raise NotImplementedError

    def state_dtype_of(self, group: Group, param: Tensor, name: str, state: State) -> torch.dtype:
        """The dtype of a loaded state of the parameter."""
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[tuple[str | int, Tensor], Group]]:
        """Every parameter with its group, and its name if each has another one, else its index."""
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        keys = names if len(set(names)) == len(params) else range(len(params))
        for key, (param, group) in zip(keys, params, strict=True):
            yield (key, param), group

    def give_own_rate(self) -> None:
        """Copy the learning rate of the last group if it is the tensor of another group: schedulers write into both."""
        *others, group = self.param_groups
        if isinstance(group["lr"], Tensor) and group["lr"] is self.defaults["lr"]:
            self.defaults["lr"] = group["lr"].clone()  # of later groups, whatever schedulers write into this one
        if isinstance(group["lr"], Tensor) and any(group["lr"] is one["lr"] for one in others):
            group["lr"] = group["lr"].clone()

    def note_capture(self) -> None:
        """Before a step: see :func:`~ddpcore.optim.checks.check_capture`, if a CUDA graph captures it."""
        first = self.param_groups[0]["params"]
        if first and is_capturing(first[0]):
            check_capture(self.param_groups, self.defaults)
            self._is_captured = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch adds
        if self._given is not None:
            self._restore(*self._given)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state, as in torch. Options that are missing in ``state_dict`` keep their value.

        If the optimizer and the file have names of parameters, each state goes to the parameter of its name. States of
        optimizers of torch that mean the same are accepted too. ValueError: groups, names, rules, shapes or buffers do
        not match, or an option is invalid; nothing is changed then. RuntimeError: a CUDA graph has captured a step.
        """
        if self._is_captured:
            why = "a CUDA graph has captured a step of this optimizer and would go on with the old state"
            advice = "load before the capture, or load into a new optimizer and capture its step"
            raise RuntimeError(f"load_state_dict: {why}: {advice}")
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict := state_dict.copy())
            state_dict = state_dict if changed is None else changed
        own, groups = self.param_groups, list(state_dict["param_groups"])
        saved: dict[Any, Tensor] = {}
        if [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]:  # else torch refuses
            key_of = keys_of(own, groups)
            groups = [
                {**mine, **options_of(group), **order_of(index, mine, group, key_of)}
                for index, (mine, group) in enumerate(zip(own, groups, strict=True))
            ]
            for mine, group in zip(own, groups, strict=True):
                saved.update(zip(group["params"], mine["params"], strict=True))
            self.check_loading(groups, saved, state_dict)
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        self._given = saved, state_dict["state"]
        try:
            super().load_state_dict({**state_dict, "param_groups": groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._given = hooks, None

    @override
    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, which later steps do not change. Every parameter has its own ``step``, as in torch."""
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            result: dict[str, Any] = tree_map_only(Tensor, lambda one: one.detach().clone(), super().state_dict())
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for hook in hooks.values():  # they get the copy, so that what they change is not the optimizer's own
            changed = hook(self, result)
            result = result if changed is None else changed
        return result

    def _restore(self, saved: dict[Any, Tensor], states: dict[Any, State]) -> None:
        steps: dict[Any, Tensor] = {}
        group_of = {id(p): (index, group) for index, group in enumerate(self.param_groups) for p in group["params"]}
        for number, param in saved.items():
            given, state = states.get(number, {}), self.state.get(param, {})
            index, group = group_of[id(param)]
            for name, value in given.items():
                if name != "step" and isinstance(value, Tensor):
                    dtype = self.state_dtype_of(group, param, name, given)
                    state[name] = value.detach().to(device=param.device, dtype=dtype, copy=True)
            if not is_narrow(param.dtype):
                state.pop("master", None)
            if "step" in given:
                key = (index, param.device, float(given["step"]))
                step = torch.tensor([key[2]], dtype=torch.float32, device=param.device)
                state["step"] = steps.setdefault(key, step)


WRAPPER = r"(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
"""What wrappers of torch add to the names of parameters."""


def order_of(index: int, own: Group, loaded: Group, key_of: Callable[[str], str]) -> Group:
    """``params`` and ``param_names`` of a loaded group, in the order of the names of the optimizer's group.

    ValueError if both have names, and these differ, or are not unique and in another order.
    """
    if "param_names" not in own or "param_names" not in loaded:
        return {"params": loaded["params"], **{key: own[key] for key in ("param_names",) if key in own}}
    names, others = list(map(key_of, own["param_names"])), list(map(key_of, loaded["param_names"]))
    if names == others:
        return {"params": loaded["params"], "param_names": own["param_names"]}
    numbers = dict(zip(others, loaded["params"], strict=True))
    lacking, more = list(Counter(names) - Counter(others)), list(Counter(others) - Counter(names))
    if lacking or len(numbers) < len(names):
        found = "names that are equal, reordered"
        if lacking:
            found = f"no parameter {lacking[0]}, but {', '.join(more[:3])}"
        advice = "load the state of the same model with the same groups, or rename param_names in the file"
        raise ValueError(f"state_dict: group {index} has {found}: {advice}")
    return {"params": [numbers[name] for name in names], "param_names": own["param_names"]}


def keys_of(own: Sequence[Group], loaded: Sequence[Group]) -> Callable[[str], str]:
    """How to compare names: as they are, without the model's wrappers, or without any, if different ones stay so."""
    sides = [[name for group in groups for name in group.get("param_names", ())] for groups in (own, loaded)]
    front, anywhere = re.compile(f"^({WRAPPER})+"), re.compile(rf"(?<![^.]){WRAPPER}")
    keys: list[Callable[[str], str]] = [str, partial(front.sub, ""), partial(anywhere.sub, "")]
    found = [[{*map(key_of, names)} for names in sides] for key_of in keys]
    kept = [place for place, sets in enumerate(found) if [*map(len, sets)] == [*map(len, found[0])]]
    return keys[next((place for place in kept if found[place][0] == found[place][1]), kept[-1])]


def check_roundable(named: Named, loaded: Mapping[int, State] | None = None) -> None:
    """Raise ValueError if a parameter cannot have the rounded states of its group, or of ``loaded``, by its id."""
    for (name, param), group in named:
        if not is_rounded(group):
            continue
        has_master = loaded is not None and loaded.get(id(param), {}).get("master") is not None
        if is_narrow(param.dtype) and (group["master_weights"] or has_master):
            why = "whose momentum and moments are float32, and state_dtype is bfloat16"
            advice = "leave out master_weights or state_dtype"
            raise ValueError(f"parameter {name} has a float32 master weight, {why}: {advice}")


def firsts_of(params: Sequence[Tensor], named: Named, flat: FlatParameters | None) -> list[int]:
    """The index of each parameter's first element among the random numbers, by its place in ``named``, which has all.

    Virtual learners, whose parameters are views of ``flat``, have the numbers of the first one.
    """
    num = 0 if flat is None else len(flat.segments)
    first_of = {} if flat is None else {id(p): id(flat.parameters[i % num]) for i, p in enumerate(flat.parameters)}
    numbers: dict[int, int] = {}
    for (_, param), _ in named:
        if first_of.get(id(param), id(param)) == id(param):
            numbers[id(param)] = len(numbers)
    return [numbers[first_of.get(id(param), id(param))] * ELEMENTS + first_of_shard(param) for param in params]


def check_tensors(name: str, params: Sequence[Tensor], grads: Sequence[Tensor], states: Mapping[Tensor, State]) -> None:
    """Raise RuntimeError if the optimizer ``name`` cannot step these parameters with these gradients and states."""
    if True in [grad.is_sparse for grad in grads]:
        raise RuntimeError(f"{name} needs dense gradients: use nn.Embedding(sparse=False), or another optimizer")
    if [(grad.dtype, grad.device) for grad in grads] != [(param.dtype, param.device) for param in params]:
        raise RuntimeError(f"{name}: a gradient has another dtype or device than its parameter: leave grad_dtype out")
    if any(map(_overlaps_itself, map(local, params))):
        raise RuntimeError(f"{name}: a parameter overlaps itself in memory: pass a clone of it")
    if not torch.compiler.is_compiling() and any(map(Tensor.is_neg, map(local, params))):  # torch resolves gradients
        raise RuntimeError(f"{name}: a tensor has torch's negative bit, its memory the other sign: call resolve_neg()")
    again = "call zero_grad and compute the gradient again"
    anew = "call optimizer.state.pop(parameter) to begin a new state, or make a new optimizer"
    for param, grad in zip(params, grads, strict=True):
        kept = [(key, value, anew) for key, value in states.get(param, {}).items() if key != "step"]
        for what, value, advice in (("a gradient", grad, again), *kept):
            if isinstance(value, Tensor) and value.shape != param.shape:
                shapes = f"{tuple(value.shape)} and its parameter {tuple(param.shape)}, whose data was replaced"
                raise RuntimeError(f"{name}: {what} has shape {shapes}: {advice}")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory: a stride is no larger than what the smaller strides reach."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def check_state(index: Any, param: Tensor, state: dict[str, Any], buffers: Sequence[str]) -> None:
    """Raise ValueError unless a loaded state fits the parameter and an optimizer with these buffers."""
    if foreign := [name for name in state if name not in (*buffers, "step", "master")]:
        what = f"state_dict: parameter {index} has {', '.join(map(str, foreign))}, of another optimizer"
        raise ValueError(f"{what}: this one keeps {', '.join(buffers)}")
    needed = (*buffers, "step") if "exp_avg" in buffers else ()
    missing = [name for name in needed if state.get(name) is None]
    if missing and len(missing) < len(needed):
        raise ValueError(f"state_dict: parameter {index} lacks {', '.join(missing)}: load all of its state, or none")
    for name, value in state.items():
        where = f"state_dict: {name} of parameter {index}"
        if name == "step":
            if not is_scalar(value) or not 0 <= float(value) < math.inf:
                raise ValueError(f"{where} is {value}: it must be a number from 0 on")
        elif value is not None:
            if not isinstance(value, Tensor):
                raise ValueError(f"{where} is {value!r}: it must be a tensor")
            if not value.is_floating_point():
                raise ValueError(f"{where} is {value.dtype}: it must be floating-point")
            if value.shape != param.shape:
                raise ValueError(f"{where} has shape {tuple(value.shape)}, the parameter has {tuple(param.shape)}")
            check_shard_of_state(index, name, param, value)


def check_rule(own: str | None, index: int, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if states of a file's group have the names of the optimizer's, and are of another rule.

    ``own``: ``muon``, a variant of LARS (``scaled_lr`` also for SGD), or None. LARS of others is ``scaled_grad``.
    """
    loaded, found = state_dict["param_groups"][index], own
    if "ns_steps" in loaded:
        found = "muon"
    elif own is not None and (own != "muon" or "dampening" in loaded):
        is_lars = any(key.startswith("trust_coeff") for key in loaded)
        found = loaded.get("variant", "scaled_grad") if is_lars else "scaled_lr"
    states = [state_dict["state"].get(number, {}) for number in loaded["params"]]
    kept = {key for state in states for key, value in state.items() if value is not None}
    if found != own and not kept <= {"step", "master"}:
        what = f"state_dict: the states of group {index} are of variant {found!r} and not {own or 'adamw'!r}"
        advice = "see 'Checkpoints and states of others' in docs/optimizers.md for how to go on"
        raise ValueError(f"{what} (SGD has 'scaled_lr'): {advice}")
