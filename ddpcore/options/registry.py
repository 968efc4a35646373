"""Registries find parts of one kind, such as topologies, by name: parts of ddpcore, a user, or an installed package.

A name has one of three forms: the short name of a part of ddpcore (``ring``), ``module:attribute`` for a user's part
(``mylab.gossip:Chain``), or the name of an entry point of an installed package (group ``ddpcore.topologies``).
"""

import importlib
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from ddpcore.options.typed import suggest, typed

Part = TypeVar("Part")
Factory = Callable[..., Part]


@dataclass(eq=False)
class Registry(Generic[Part]):
    """The parts of one kind."""

    kind: str  #: the word for a part in error messages, such as topology
    group: str  #: of entry points, such as ddpcore.topologies
    base: type[Any] | tuple[type[Any], ...]  #: of every part
    own: Mapping[str, Factory[Part]]  #: ddpcore's parts: from a name to the class or function that makes the part
    reserved: Collection[str] = ()  #: parameters that the caller of `build` sets, which are no options for users

    def names(self) -> tuple[str, ...]:
        """The short names: first the names of ddpcore, then the names of installed packages."""
        return (*self.own, *(name for name in sorted(self._installed()) if name not in self.own))

    def find(self, name: str) -> Factory[Part]:
        """The class or function that makes the part of this name. ValueError, in one line, if it cannot be found."""
        if name in self.own:
            return self.own[name]
        if ":" in name:
            found = self._load(name, EntryPoint(name, name, self.group))
        elif name in (installed := self._installed()):
            found = self._load(name, installed[name])
        else:
            advice = suggest(name, self.names())
            own = "" if advice.startswith("did") else ", or name your own as module:attribute"
            raise ValueError(f"unknown {self.kind} {name!r}: {advice}{own}")
        if not callable(found) or (inspect.isclass(found) and not issubclass(found, self.base)):
            raise ValueError(f"{self.kind} {name}: {found!r} makes no {self._base_names()}: name a class or function")
        return found

    def options(self, name: str) -> dict[str, Any]:
        """The options of this part and their defaults, ``inspect.Parameter.empty`` for none. ValueError as `find`."""
        found = [one for one in self.parameters(name).values() if one.kind in _BY_KEYWORD]
        return {one.name: one.default for one in found if one.name not in self.reserved}

    def takes(self, name: str, parameter: str) -> bool:
        """Whether the part of this name has a parameter of this name, which may be an option or reserved."""
        return parameter in self.parameters(name)

    def parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        """The parameters of the part of this name, options and reserved ones."""
        return inspect.signature(self.find(name)).parameters

    def hints(self, name: str) -> dict[str, Any]:
        """The types of the options whose type follows from a plain type hint or from the default."""
        make, found = self.find(name), {}
        try:
            hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
        except (NameError, TypeError, AttributeError):  # type hints of a user's part that cannot be evaluated
            hints = {}
        for option, default in self.options(name).items():
            if option in hints and _is_plain(hints[option]):
                found[option] = hints[option]
            elif isinstance(default, tuple) and default and type(default[0]) in (int, float):
                found[option] = tuple[type(default[0]), ...]  # type: ignore[misc]
        return found

    def check_options(self, name: str, options: Mapping[str, Any], others: Collection[str] = ()) -> dict[str, Any]:
        """The options as the part takes them: a list, or a single number, is a tuple where the type hint is one.

        ValueError: an option does not exist (the message has the most similar name, of these and of ``others``), or its
        value has a wrong type.
        """
        known, hints, found = self.options(name), self.hints(name), dict(options)
        for option, value in options.items():
            if option not in known:
                raise ValueError(f"{self.kind} {name} has no option {option!r}: {suggest(option, [*known, *others])}")
            if option in hints:
                is_tuple = get_origin(hints[option]) is tuple
                single = (value,) if is_tuple and type(value) in (int, float) else value
                checked = typed(f"{self.kind} {name}: {option}", single, hints[option])
                found[option] = checked if is_tuple else value
        return found

    def build(self, name: str, *arguments: Any, **options: Any) -> Part:
        """Make the part of this name (short, or ``module:attribute``) from these arguments.

        Reserved parameters that the part does not have are left out. ValueError: there is no such part or option, or
        the part cannot be made; one line with the part's name.
        """
        make = self.find(name)
        given = {key: value for key, value in options.items() if key not in self.reserved or self.takes(name, key)}
        given |= self.check_options(name, {key: value for key, value in given.items() if key not in self.reserved})
        try:
            part = make(*arguments, **given)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(reason if name in reason else f"{self.kind} {name}: {reason}") from error
        if not isinstance(part, self.base):
            raise ValueError(f"{self.kind} {name} makes a {type(part).__name__}: it must make a {self._base_names()}")
        return part

    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _load(self, name: str, point: EntryPoint) -> Any:
        module, _, attribute = point.value.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise ValueError(f"{self.kind} {name}: cannot import {module} ({reason})") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                public = [other for other in vars(found) if not other.startswith("_")]
                raise ValueError(f"{self.kind} {name}: {module} has no {attribute!r}: {suggest(part, public)}")
            found = getattr(found, part)
        return found

    def _base_names(self) -> str:
        return " or ".join(base.__name__ for base in (self.base if isinstance(self.base, tuple) else (self.base,)))


def _is_plain(hint: Any) -> bool:
    """Whether ``typed`` can check this type hint: bool, a number, text, a tuple of these, or one of these or None."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if getattr(kind, "__name__", "") not in _LEFT_OUT]
        return len(kinds) == 1 and _is_plain(kinds[0])
    if get_origin(hint) is tuple:
        return get_args(hint)[1:] == (...,) and _is_plain(get_args(hint)[0])
    return hint in (int, float, bool, str)


_LEFT_OUT = ("NoneType", "Tensor")  # of torch's optimizers
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
