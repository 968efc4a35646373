"""When the models of virtual learners may run in one ``torch.func.vmap``: where it computes the same as in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ddpcore.parameters.flat import FlatParameters

_PLAIN = {
    *(nn.Sequential, nn.Linear, nn.LayerNorm, nn.Flatten, nn.Unflatten, nn.Identity),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_VALUES = (bool, int, float, str, torch.Size)


class VmapRules:
    """Knows the modules of all learners' models. It reads them again when a module or parameter was replaced.

    Args:
        models: one per learner.
        flat: their parameters.
    """

    def __init__(self, models: Iterable[nn.Module], flat: FlatParameters) -> None:
        self._models, self._flat = list(models), flat
        self._modules: list[nn.Module] = []
        self._members: list[int] = []
        self._alike = False
        self._names: dict[int, str] = {}  # of learner 0's parameters, by id

    @property
    def names(self) -> list[str]:
        """The present name of each segment in learner 0's model."""
        return [self._names[id(parameter)] for parameter in self._flat.parameters[: len(self._flat.segments)]]

    def allow(self, *, plain_only: bool) -> bool:
        """Whether all models have the same structure, no hooks and no parametrizations, and the rows as parameters.

        Args:
            plain_only: whether their classes must be known to compute the same in vmap.
        """
        self._read()
        if not self._alike or _has_any_global_hook() or any(map(_has_hooks, self._modules)):
            return False
        if tuple(map(Tensor.data_ptr, self._flat.parameters)) != self._flat.param_pointers:
            return False  # the program has set parameter.data for this pass
        if not plain_only:
            return True
        first = self._modules[: len(self._modules) // len(self._models)]
        if not all(_vectorizes(module) for module in first) or any("forward" in vars(m) for m in self._modules):
            return False
        options = list(map(_options_of, first))
        return all(_options_of(module) == options[i % len(first)] for i, module in enumerate(self._modules))

    def _read(self) -> None:
        if self._modules and self._members == _members_of(self._modules):
            return
        modules = [list(model.modules()) for model in self._models]
        self._modules = [module for own in modules for module in own]
        self._members = _members_of(self._modules)
        self._names = {id(parameter): name for name, parameter in self._models[0].named_parameters()}
        trained = set(map(id, self._flat.parameters))
        present = [set(map(id, model.parameters())) for model in self._models]
        self._alike = (
            trained.issubset(set().union(*present))
            and all(own - trained == present[0] - trained for own in present)  # frozen ones are shared
            and all(len(own) == len(modules[0]) for own in modules)
        )


def _members_of(modules: Sequence[nn.Module]) -> list[int]:
    return [
        id(member)
        for module in modules
        for members in (module._modules, module._parameters)
        for member in members.values()
    ]


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks or a parametrization, or is compiled: vmap cannot run these for all learners."""
    own = vars(module)
    if "parametrizations" in module._modules or own.get("_compiled_call_impl") is not None:
        return True
    return any(not getattr(hook, "is_ours", False) for name in _HOOKS if own.get(name) for hook in own[name].values())


def _options_of(module: nn.Module) -> list[Any]:
    """The class of a module and the plain values among its attributes, by which its ``forward`` computes."""
    return [module.__class__, *(item for item in vars(module).items() if isinstance(item[1], _VALUES))]


def _vectorizes(module: nn.Module) -> bool:
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return owner in _PLAIN or bool(vars(owner).get("vectorizes"))
