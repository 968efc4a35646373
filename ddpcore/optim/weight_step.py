"""One step of the weights: it averages them, steps them, and switches the flat buffer. No other code does.

A strategy describes the average as a :class:`ddpcore.ops.WeightAverage`, and an optimizer its rule by an operator and
its arguments. :class:`WeightStep` runs both: in one pass over the weights if there is a kernel for that, else one after
the other. Both ways give the same bits.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import MAX_STEP_PEERS, Mixture, WeightAverage
from ddpcore.ops.library import KERNEL_DTYPES, refuse_saved_copies, wide
from ddpcore.optim.checks import Group, is_rounded
from ddpcore.parameters.flat import LARGE, FlatParameters, Segment, gradient_of


class WeightStep:
    """Averages and steps the weights of a flat buffer.

    ``optimizer`` is a :class:`~ddpcore.optim.FusedOptimizer`, whose ``step()`` calls :meth:`run`; None for any other.
    """

    def __init__(self, flat: FlatParameters, optimizer: Any = None) -> None:
        self.flat, self._optimizer = flat, optimizer
        self._average: WeightAverage | None = None
        self._members = {id(parameter) for parameter in flat.parameters}
        self._columns: _Columns | None = None
        self._ready: set[int] = set()  # ids of the groups whose states are in the buffers
        self._held: list[Any] = []  # parameters with states, and these states
        self._states_by_params: dict[tuple[int, ...], list[dict[str, Any]]] = {}  # by ids of parameters

    def average(self, average: WeightAverage | None, *, at_once: bool = False) -> None:
        """Set the average for the next step. It is applied at once if asked for, or if the optimizer is not fused."""
        refuse_saved_copies("step()")
        self._average = average
        if self._optimizer is None or at_once:
            self._apply_average()

    def forget_states(self) -> None:
        """Call this after other states were loaded. The next step copies them into new buffers."""
        self._columns = None

    def run(self) -> None:
        """Average the weights and step all groups of the fused optimizer."""
        average, groups = self._average, self._optimizer.param_groups
        if isinstance(average, Mixture) and self._is_one_pass(average, groups):
            self._average = None
            self._optimizer.step_lists(groups, average)
            self.flat.move_to(average.out)
            return
        self._apply_average()
        if self._optimizer.rule.uses_norms or self.flat.shards is not None:  # states of DTensors are DTensors
            self._optimizer.step_lists(groups)
        else:  # each element is stepped alone
            self._run_columns(groups)

    def _is_one_pass(self, mixture: Mixture, groups: Sequence[Group]) -> bool:
        """Whether the optimizer's kernel takes the mixture, and steps every parameter of the flat buffer."""
        flat = self.flat
        if self._is_scaled() or flat.param_LP.dtype not in KERNEL_DTYPES or any(map(is_rounded, groups)):
            return False
        is_split = flat.shards is not None and self._optimizer.rule.uses_norms  # between its passes ranks add norms
        if len(mixture.peers) > MAX_STEP_PEERS or flat.num_rows > 1 or is_split:
            return False
        if any(group["master_weights"] for group in groups) and flat.param_LP.dtype != torch.float32:
            return False
        stepped = [id(p) for group in groups for p in group["params"] if p.grad is not None]
        return len(stepped) == len(flat.parameters) and self._members.issuperset(stepped)

    def _run_columns(self, groups: Sequence[Group]) -> None:
        """Step the groups, where possible by columns of the buffers ``[L, P]``, which are fewer tensors."""
        if self._columns is None or self._columns.layout is not self.flat.segments:
            self._columns = _Columns(self.flat)  # the layout has changed: states are copied into new buffers
        own = self.flat.own_grads(LARGE)
        self.flat.gather_grads(left=own)
        self._ready.clear()
        names_of = [self._column_states(group) for group in groups]
        self._divide_steps(groups, names_of)
        for group, names in zip(groups, names_of, strict=True):
            if names is not None:
                self._step_columns(group, names, own)
        if rest := [group for group, names in zip(groups, names_of, strict=True) if names is None]:
            self._optimizer.step_lists(rest)

    def _is_scaled(self) -> bool:
        """Whether ``GradScaler`` leaves unscaling to this step."""
        optimizer = self._optimizer
        return getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None

    def _apply_average(self) -> None:
        if self._average is not None:
            self.flat.average_(self._average)
            self._average = None

    def _column_states(self, group: Group) -> tuple[str, ...] | None:
        """The states of a group that columns can step: no gradient is missing or scaled, and states agree."""
        optimizer, params = self._optimizer, group["params"]
        if self._is_scaled() or group["max_grad_norm"] is not None or not params or isinstance(group["lr"], Tensor):
            return None
        if params[0].dtype not in ((torch.float32,) if group["master_weights"] else KERNEL_DTYPES):
            return None
        if is_rounded(group):  # random numbers are numbered by parameter, not by the place in the row
            return None
        if any(map(is_, map(gradient_of, params), repeat(None))) or not self._covers_all_learners(params):
            return None
        names: tuple[str, ...] = optimizer.state_names(group)
        if not names:
            return names
        assert self._columns is not None
        states = self._states_of(params)
        if self._columns.hold(names, params, states):
            self._ready.add(id(group))
            return names
        points = [(id(state.get("step")), *(state.get(name) is None for name in names)) for state in states]
        return names if all(point == points[0] for point in points) else None

    def _states_of(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The states of parameters. They are looked up again when the optimizer has others, since a lookup is slow."""
        state, key = self._optimizer.state, tuple(map(id, params))
        held = [*state, *state.values()]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._held = held
            self._states_by_params.clear()
        if key not in self._states_by_params:
            self._states_by_params[key] = [state.get(param, {}) for param in params]
        return self._states_by_params[key]

    def _divide_steps(self, groups: Sequence[Group], names_of: Sequence[tuple[str, ...] | None]) -> None:
        """Give a group its own step counters, where the program has moved a parameter to it: kernels count by group."""
        state, owned = self._optimizer.state, set[Tensor]()
        for group, names in zip(groups, names_of, strict=True):
            params = group["params"] if names is None else group["params"][:1]  # columns have one counter
            steps = {state[param]["step"] for param in params if "step" in state.get(param, ())}
            copies = {step: step.clone() for step in owned & steps}
            for param in group["params"] if copies else ():
                if state.get(param, {}).get("step") in copies:
                    state[param]["step"] = copies[state[param]["step"]]
            owned |= steps

    def _covers_all_learners(self, params: list[Tensor]) -> bool:
        """Whether all parameters are members, and cover the same segments for each learner."""
        flat, members = self.flat, set(map(id, params))
        if not members <= self._members:
            return False
        if flat.num_rows == 1 or len(members) == len(self._members):
            return True
        num, inside = len(flat.segments), [id(parameter) in members for parameter in flat.parameters]
        return inside == inside[:num] * flat.num_rows

    def _step_columns(self, group: Group, names: tuple[str, ...], own: dict[int, Tensor]) -> None:
        optimizer, columns, flat, params = self._optimizer, self._columns, self.flat, group["params"]
        assert columns is not None
        if id(group) not in self._ready and names:
            columns.take_states(names, group, optimizer)
        pieces = columns.pieces_of(params, own)

        def rows_of(buffer_LP: Tensor) -> list[Tensor]:
            return [row for begin, end, _ in pieces for row in rows_in(buffer_LP, begin, end)]

        weights = rows_of(flat.param_LP)
        buffers = [rows_of(columns.states[name][0]) if name in names else [] for name in optimizer.rule.buffers]
        getattr(ops, optimizer.rule.operator)(
            weights,
            [row for begin, end, rows in pieces for row in rows or rows_in(flat.grad_LP, begin, end)],
            *buffers,
            [],
            [optimizer.state[params[0]]["step"]] if names else [],
            columns.scratch if names else None,
            lr=[group["lr"]],
            weight_decay=[group["weight_decay"]],
            group_sizes=[len(weights)],
            maximize=group["maximize"],
            **optimizer.arguments(None, [group]),
        )
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(params)


def rows_in(buffer_LP: Tensor, begin: int, end: int) -> Sequence[Tensor]:
    """Columns of all rows, one tensor a row; one tensor of all rows if these are all columns."""
    whole = begin == 0 and end == buffer_LP.shape[1] and buffer_LP.is_contiguous()
    return (buffer_LP.view(-1),) if whole else buffer_LP[:, begin:end].unbind(0)


class _Columns:
    """State buffers with the layout of the weights, for one layout of the flat buffer."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self.layout: tuple[Segment, ...] = flat.segments
        num = 2 + flat.param_LP.shape[0] * len(flat.segments)
        self.scratch = torch.zeros(num, dtype=torch.float64, device=flat.param_LP.device)
        # name -> buffer [L, P], and by parameter id its view and the address that the view must have
        self.states: dict[str, tuple[Tensor, dict[int, tuple[Tensor, int]]]] = {}
        # The same views and addresses as lists, for some states of some parameters.
        self._held: dict[tuple[Any, ...], list[tuple[list[Tensor], list[int]]]] = {}
        self._spans: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}

    def take_states(self, names: tuple[str, ...], group: Group, optimizer: Any) -> None:
        """The states of the group's parameters become views of buffers ``[L, P]``."""
        views_of_all = [pair for _, views in self.states.values() for pair in views.values()]
        if any(view.data_ptr() != address for view, address in views_of_all):  # the program has set a state's .data
            self._held.clear()
            self.states.clear()
        for name in names:
            if name not in self.states:
                weights_LP = self._flat.param_LP
                dtype = wide(weights_LP.dtype) if optimizer.rule.wide_states else weights_LP.dtype
                buffer_LP = torch.zeros_like(weights_LP, dtype=dtype)
                views = zip(self._flat.parameters, self._flat.views_of(buffer_LP), strict=True)
                self.states[name] = buffer_LP, {id(param): (view, view.data_ptr()) for param, view in views}
        own = {id(view): key for _, views in self.states.values() for key, (view, _) in views.items()}
        for parameter, state in optimizer.state.items():  # the program may have exchanged states, and views are written
            moved = [name for name, held in state.items() if own.get(id(held), id(parameter)) != id(parameter)]
            state.update((name, state[name].clone()) for name in moved)
        fresh: dict[tuple[torch.device, float], Tensor] = {}
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            views_of_state = {name: self.states[name][1][id(parameter)][0] for name in names}
            if all(state.get(name) is view for name, view in views_of_state.items()):
                continue
            optimizer.create_states(group, parameter, fresh)
            for name, view in views_of_state.items():
                if state[name] is not view:
                    state[name] = view.copy_(state[name])  # a state that is new, was loaded, or has an older layout

    def hold(self, names: tuple[str, ...], params: list[Tensor], states: list[Any]) -> bool:
        """Whether these states are views of the buffers already, with one counter of steps."""
        key = (names, *map(id, params))
        if key not in self._held:
            if any(name not in self.states for name in names):
                return False
            found = [[self.states[name][1][id(param)] for param in params] for name in names]
            self._held[key] = [([view for view, _ in pairs], [address for _, address in pairs]) for pairs in found]
        try:
            steps = list(map(itemgetter("step"), states))
            return all(map(is_, steps, repeat(steps[0]))) and all(
                all(map(is_, map(itemgetter(name), states), views)) and list(map(Tensor.data_ptr, views)) == addresses
                for name, (views, addresses) in zip(names, self._held[key], strict=True)
            )
        except KeyError:
            return False

    def pieces_of(self, params: list[Tensor], own: dict[int, Tensor]) -> list[tuple[int, int, list[Tensor]]]:
        """(begin, end, rows) of the parameters' columns. Adjacent ones in ``grad_LP`` are one piece.

        ``own`` has gradients outside of ``grad_LP``, by the parameter's index: ``rows`` are then the gradients of all
        learners, and else empty.
        """
        members = tuple(map(id, params))
        if members not in self._spans:  # the columns of a segment end with the padding behind it
            chosen = set(members)
            spans = enumerate(zip(self._flat.parameters, self.layout, strict=False))  # learner 0's come first
            self._spans[members] = [(i, one.offset, one.end, one.numel) for i, (p, one) in spans if id(p) in chosen]
        num, outside = len(self.layout), {index % len(self.layout) for index in own}
        pieces: list[tuple[int, int, list[Tensor]]] = []
        for index, begin, end, size in self._spans[members]:
            if index in outside:
                inside = self._flat.grad_LP[:, begin : begin + size].unbind(0)
                rows = [own.get(row * num + index, gradient) for row, gradient in enumerate(inside)]
                pieces.append((begin, begin + size, rows))
            elif pieces and not pieces[-1][2] and pieces[-1][1] == begin:
                pieces[-1] = (pieces[-1][0], end, [])
            else:
                pieces.append((begin, end, []))
        return pieces
