"""Rules for running virtual learners in one ``torch.func.vmap``: only if it computes the same as in turn."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from ddpcore.parameters.chains import Layer, chain_of
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.hooks import num_hooks

_PLAIN = {
    *(nn.Sequential, nn.Linear, nn.LayerNorm, nn.Flatten, nn.Unflatten, nn.Identity),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax),
}
# On a CPU vmap costs about the calls of five learners, whatever their number. It saves the calls of each learner's
# layers, and loses time for each weight, whose gradient it writes in another layout. Measured by bench_learners.py.
FIXED = 5  # learners
LAYER = 2**16  # weights of a layer for which vmap loses as much as it saves
_CALLED = frozenset(("forward", "__call__", "__iter__"))  # of the class that says what a module computes
_IN_TURN = ("_compiled_call_impl", "padding_idx")  # in vmap torch gives the padding of an embedding a gradient
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, str, torch.Size)
_own_members = itemgetter("_modules", "_parameters")  # of the attributes of a module


def choice_by_shape(flat: FlatParameters) -> tuple[bool, str]:
    """Whether a step of plain models with these parameters takes less time in vmap than in turn, and why.

    It reads no clock, because the two ways differ in the last bits, and a run must be repeatable.
    """
    num, device = flat.num_rows, flat.param_LP.device.type
    if device != "cpu":
        return True, f"vmap launches fewer kernels on {device}"
    layers = max(1, sum(len(segment.shape) > 1 for segment in flat.segments))
    per_layer = sum(segment.numel for segment in flat.segments) // layers
    limit = max(0, LAYER * (num - FIXED) // num)
    return per_layer <= limit, f"{per_layer} weights a layer, and vmap of {num} learners is faster for at most {limit}"


class VmapRules:
    """Knows the modules of all learners' models. It reads them again when one of them has changed."""

    def __init__(self, models: Iterable[nn.Module], flat: FlatParameters) -> None:
        self._models, self._flat = list(models), flat
        self._modules: list[nn.Module] = []  # of all models, learner 0's modules first
        self._members: list[Any] = []  # their modules and parameters
        self._facts: list[Any] = []
        self._getters: list[Callable[[Any], Any]] = []  # of the attributes of each module of a model
        self._num_hooks = -1  # number of others' hooks at the last search for hooks
        self._alike = self._hooked = self._plain = self._have_frozen = False
        self._is_repeated = False  # whether a module with tensors has several names
        self._loose: list[tuple[nn.Module, nn.Module, str]] = []  # attributes that must be compared for each pass
        self._names: dict[int, str] = {}  # of learner 0's parameters, by id
        self._chain: list[Layer] | None = None
        self._layout: object = None  # of the flat buffer, when the chain was read

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_members": []}  # a copy reads its own; these may be tensors of functional_call

    @property
    def names(self) -> list[str]:
        """The present name of each segment in learner 0's model."""
        return [self._names[id(parameter)] for parameter in self._flat.parameters[: len(self._flat.segments)]]

    @property
    def chain(self) -> list[Layer] | None:
        """The layers of models that are a chain; None if they are none."""
        if self._layout is not self._flat.segments:
            self._layout = self._flat.segments
            self._chain = chain_of(self._models, self._flat) if self._plain else None
        return self._chain

    @property
    def have_untrained(self) -> bool:
        """Whether a model has buffers or frozen parameters."""
        return self._have_frozen or any(map(itemgetter("_buffers"), map(vars, self._modules)))

    def untrained(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The buffers and frozen parameters of a model. Each learner may write its own."""
        yield from model.named_buffers()
        yield from ((name, p) for name, p in model.named_parameters() if id(p) not in self._flat.index)

    def allow(self, *, plain_only: bool) -> bool:
        """Whether all models compute alike, with the rows as parameters and without hooks and parametrizations.

        With ``plain_only`` their classes must be known to compute the same in vmap, and all their attributes alike.
        """
        if not self._is_known():
            self._read()
        if self._hooked or self._num_hooks != num_hooks():
            self._num_hooks, self._hooked = num_hooks(), any(map(_breaks_vmap, self._modules))
        if not self._alike or self._hooked or _has_any_global_hook():
            return False
        if tuple(map(Tensor.data_ptr, self._flat.parameters)) != self._flat.param_pointers:
            return False  # the program has set parameter.data for this pass
        if self._is_repeated and self.chain is None:
            return False  # functional_call would leave its tensors in the module
        return self._plain or (not plain_only and self._are_same())

    def share_state(self, rows: range) -> None:
        """Copy to the other learners what a pass in vmap has changed in the modules of the first, which alone ran."""
        num = len(self._getters)
        own = self._modules[rows.start * num : rows.stop * num]
        _check_kept(own[:num])
        if not self._has_changed(own[:num], rows.start) if self._plain else self._is_known() and self._are_same():
            return
        for first, other in zip(own[:num] * len(rows), own, strict=True):
            for name in _public(first):
                value = vars(first)[name]
                if not _same(value, vars(other).get(name, self)) and not any(
                    isinstance(leaf, Tensor) for leaf in tree_leaves(value)
                ):
                    vars(other)[name] = copy.deepcopy(value)

    def _has_changed(self, modules: Sequence[nn.Module], learner: int) -> bool:
        """Whether a pass has changed attributes of a learner's modules; those of torch's classes stay."""
        _, counts, values = self._facts
        counts = counts[learner * len(modules) :]
        return any(
            len(vars(module)) != counts[place] or getter(vars(module)) != values[place][learner]
            for place, (module, getter) in enumerate(zip(modules, self._getters, strict=True))
            if type(module) not in _PLAIN
        )

    def _are_same(self) -> bool:
        return all(_same(vars(first).get(name), vars(other).get(name)) for first, other, name in self._loose)

    def _is_known(self) -> bool:
        """Whether nothing has changed. It runs before each forward pass, so it has no loop in Python over modules."""
        attributes = list(map(vars, self._modules))
        members = _members_of(attributes)
        if not members or len(members) != len(self._members) or not all(map(is_, members, self._members)):
            return False
        try:
            return self._read_facts(attributes) == self._facts
        except (KeyError, RuntimeError, ValueError):  # one was deleted, or is a tensor or array that was replaced
            return False

    def _read_facts(self, attributes: list[dict[str, Any]]) -> list[Any]:
        """Class, number of attributes and, of models that are alike, the public attributes of all modules."""
        num = len(self._getters)
        values = [list(map(getter, attributes[index::num])) for index, getter in enumerate(self._getters)]
        return [list(map(type, self._modules)), list(map(len, attributes)), values]

    def _read(self) -> None:
        modules = [list(model.modules()) for model in self._models]
        self._modules = [module for own in modules for module in own]
        attributes = list(map(vars, self._modules))
        self._members = _members_of(attributes)
        self._num_hooks = -1
        self._names = {id(parameter): name for name, parameter in self._models[0].named_parameters()}
        first = modules[0]
        every = [module for _, module in self._models[0].named_modules(remove_duplicate=False)]
        repeated = [module for module, num in Counter(every).items() if num > 1]
        self._is_repeated = any(next(chain(one.parameters(), one.buffers()), None) is not None for one in repeated)
        self._alike = all(len(own) == len(first) for own in modules) and self._have_rows() and not _have_views(first)
        pairs = list(zip(first * len(modules), self._modules, strict=True)) if self._alike else []
        self._alike = self._alike and all(_computes_alike(*pair) for pair in pairs)
        pairs = pairs if self._alike else []
        named = [(one, other, name) for one, other in pairs for name in _public(one) if one is not other]
        values = [(vars(one)[name], vars(other)[name]) for one, other, name in named]
        self._plain = self._alike and all(map(_vectorizes, first)) and all(_is_equal_value(*two) for two in values)
        self._layout = None
        self._loose = [place for place, two in zip(named, values, strict=True) if not _decides(*two)]
        self._getters = [itemgetter("training", *_public(module)) for module in first] if self._alike else []
        self._facts = self._read_facts(attributes)

    def _have_rows(self) -> bool:
        """Whether each model's trained parameters are its row, and all parameters have learner 0's names."""
        num, places = len(self._flat.segments), []
        for row, model in enumerate(self._models):
            index = {name: self._flat.index.get(id(parameter)) for name, parameter in model.named_parameters()}
            places.append({name: None if at is None else at - row * num for name, at in index.items()})
        inside = sorted(at for at in places[0].values() if at is not None)
        self._have_frozen = len(inside) < len(places[0])
        return inside == list(range(num)) and all(own == places[0] for own in places)


def _members_of(attributes: Iterable[dict[str, Any]]) -> list[Any]:
    """The modules and parameters that are in the modules with these attributes."""
    return list(chain.from_iterable(map(methodcaller("values"), chain.from_iterable(map(_own_members, attributes)))))


def _have_views(modules: Iterable[nn.Module]) -> bool:
    """Whether buffers share memory, which vmap would give memory of their own, or an attribute has that of learner 0.

    That is a tensor, also in a list or dict, which is a parameter or buffer or a view of one.
    """
    buffers = {id(one): one for module in modules for one in module._buffers.values() if one is not None}
    parameters = [one for module in modules for one in module._parameters.values() if one is not None]
    others = tree_leaves([vars(module)[name] for module in modules for name in _public(module)])
    kinds = ([one for one in kind if isinstance(one, Tensor)] for kind in (buffers.values(), parameters, others))
    held, trained, kept = (
        [one.untyped_storage()._cdata for one in kind if torch._C._has_storage(one)] for kind in kinds
    )
    return len(set(held)) < len(held) or not {*held, *trained}.isdisjoint(kept)


def _check_kept(modules: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if a module keeps a tensor of a pass in vmap, which has ended."""
    for module in modules:
        names = [] if type(module) in _PLAIN else _public(module)
        for name, value in [*((name, vars(module)[name]) for name in names), *module._buffers.items()]:
            if any(isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in tree_leaves(value)):
                what = f"{type(module).__name__}.{name} keeps a tensor of a pass in torch.func.vmap, which ends with it"
                raise RuntimeError(f"{what}: make it a buffer that begins with a value, or pass vectorize=False")


def _breaks_vmap(module: nn.Module) -> bool:
    """Whether vmap cannot run a module for all learners: it has hooks or a parametrization, or one of ``_IN_TURN``."""
    own = vars(module)
    if "parametrizations" in module._modules or any(own.get(name) is not None for name in _IN_TURN):
        return True
    return any(not getattr(hook, "is_ours", False) for name in _HOOKS if own.get(name) for hook in own[name].values())


def _public(module: nn.Module) -> list[str]:
    """The names of a module's attributes by which its ``forward`` may compute: those that not every module has."""
    return [name for name in vars(module) if name not in _OF_EVERY_MODULE]


def _computes_alike(first: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have equal classes, modes, plain values and functions as attributes."""
    own, its = vars(first), vars(other)
    if type(first) is not type(other) or first.training != other.training or "forward" in own or "forward" in its:
        return False
    names = _public(first)
    pairs = ((own[name], its[name]) for name in names)
    return names == _public(other) and all(_is_equal_value(*pair) or not _decides(*pair) for pair in pairs)


def _decides(*values: Any) -> bool:
    """Whether one is a plain value, a function or None. Others, such as lists, are copied for each learner."""
    return any(value is None or callable(value) or isinstance(value, _VALUES) for value in values)


def _is_equal_value(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _VALUES) and type(one) is type(other) and bool(one == other))


def _same(one: Any, other: Any) -> bool:
    """Whether two values, each of another learner, are known to be equal."""
    if _is_equal_value(one, other):
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if any(is_functorch_wrapped_tensor(x) or x.is_nested or x.is_meta for x in (one, other)):
            return False  # torch.equal takes none of them, and no sparse ones
        facts = [(x.layout, x.device, x.dtype, x.shape) for x in (one, other)]
        return facts[0] == facts[1] and one.layout == torch.strided and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return False


def _vectorizes(module: nn.Module) -> bool:
    owner = next(base for base in type(module).__mro__ if _CALLED.intersection(vars(base)))
    return owner in _PLAIN or bool(vars(owner).get("vectorizes"))
