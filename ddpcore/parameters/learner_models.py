"""One model per virtual learner, and how they run together."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch.func import functional_call, vmap
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from typing_extensions import override

from ddpcore.parameters.chains import Layer, Pass, is_aligned, run_chain
from ddpcore.parameters.copies import overwrite
from ddpcore.parameters.flat import FlatParameters, is_trained
from ddpcore.parameters.hooks import exclude_from_compilation, is_traced, own_hooks, refuse_compiled_autograd
from ddpcore.parameters.vmap_rules import VmapRules, choice_by_shape

_PLAIN = (str, bytes, int, float, type(None))
_set_versions = torch._C._autograd._unsafe_set_version_counter  # torch's own FSDP2 takes it, too


class LearnerModels(nn.Module):
    """Runs each virtual learner's model on its own batch: tensors ``[L, B, ...]`` to tensors ``[L, B, ...]``.

    Each learner is an ordinary model: hooks, Python state and buffers are its own, and it may be called by itself.

    Args:
        vectorize: False runs one learner after the other, with the bits of a real learner. None runs learners together
            where that is faster. A chain is an ``nn.Sequential`` of linear layers, ``nn.Flatten`` and activations by
            element: it computes one product a layer for all learners, with the same bits. On a CPU that takes batches
            whose rows are aligned, a multiple of 16 samples in float32. Other batches, and models of classes
            that set ``vectorizes = True`` beside a ``forward`` without ``torch.autocast`` (vmap ignores it), of
            normalisations of samples and of softmax, run together if they are many and small
            (:func:`~ddpcore.parameters.vmap_rules.choice_by_shape`), in ``torch.func.vmap`` if they are no chain. True
            runs any models together. Models with hooks or parametrizations always run in turn.
    """

    def __init__(self, models: Sequence[nn.Module], flat: FlatParameters, vectorize: bool | None = None) -> None:
        super().__init__()
        # torch.compile(handle.model) compiles the models that are called here.
        exclude_from_compilation(LearnerModels, "forward", "_together", "_in_turn", recursive=False)
        exclude_from_compilation(LearnerModels, "_run_chain")
        exclude_from_compilation(sys.modules[__name__], "_call", recursive=False)
        self.models = nn.ModuleList(models)
        self._flat, self._rules = flat, VmapRules(self.models, flat)
        self._token = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        self.rows = range(len(self.models))  # learners that the next call runs: all, except in a loop over split()
        self._are_together: bool | None = None  # whether the calls inside split() run learners together
        self.vectorize = vectorize
        self._wants_together, self._why = bool(vectorize), f"vectorize={vectorize!r}"
        if vectorize is None:
            self._wants_together, self._why = choice_by_shape(flat)
        self._takes_any_batch = self._wants_together
        if vectorize is None and self._rules.allow(plain_only=True) and self._rules.chain is not None:
            self._wants_together, self._why = True, "one product a layer for all learners"

    @property
    def choice(self) -> str:
        """How the models run, and why: ``together: ...`` or ``in turn: ...``."""
        if self._wants_together and not self.runs_together():
            why = "models have hooks, differ, keep a layer or weight twice"
            return f"in turn: {why}, or are not known to compute the same in vmap"
        return f"{'together' if self._wants_together else 'in turn'}: {self._why}"

    def runs_together(self) -> bool:
        """Whether a call runs all learners together."""
        return self._wants_together and self._rules.allow(plain_only=self.vectorize is None)

    def split(self, *tensors: Tensor, at_once: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        """See :meth:`ddpcore.Distributed.split`."""
        num = len(self.models)
        self._are_together = self.runs_together()
        at_once = (num if self._are_together else 1) if at_once is None else at_once
        if at_once < 1:
            raise ValueError(f"at_once is {at_once}: it must be 1 or more learners")
        try:
            for begin in range(0, num, at_once):
                self.rows = range(begin, min(begin + at_once, num))
                yield tuple(tensor[begin : self.rows.stop] for tensor in tensors)
        finally:
            self.rows, self._are_together = range(num), None

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of all learners.

        Raises:
            RuntimeError: ``clip_grad_norm_`` asks for them, which would take one norm of all learners' gradients.
        """
        code = sys._getframe(1).f_code
        if len(self.models) > 1 and code.co_name == "clip_grad_norm_" and code.co_filename == clip_grad.__file__:
            advice = "call handle.clip_grad_norm_(max_norm), which clips the gradients of each learner"
            raise RuntimeError(f"clip_grad_norm_ would clip by one norm of the gradients of all learners: {advice}")
        yield from super().parameters(recurse)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Learner j gets ``x[j]`` of every tensor x in the arguments, and other values as they are.

        In the learners' outputs tensors are stacked, and other values are lists with one item per learner.
        """
        num = len(self.rows)
        is_one = not named_inputs and len(inputs) == 1 and isinstance(inputs[0], Tensor)
        leaves = inputs if is_one else tree_leaves((inputs, named_inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.dim() == 0 or len(tensor) != num:
                what = f"inputs have {len(tensor) if tensor.dim() else 'no'} rows for {num} learners"
                raise ValueError(f"{what}: pass [learners, batch, ...], one mini-batch per learner")
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)] if len(tensors) < len(leaves) else []
        if hiding := [type(one).__name__ for one in others if any(map(self._has_rows, _parts(one)))]:
            advice = "also in tuples, lists and dicts, as [learners, batch, ...], or call each of handle.models"
            raise ValueError(f"an input of type {hiding[0]} would go whole to each learner: pass its tensors, {advice}")
        in_transform = torch._C._functorch.maybe_current_level() is not None or is_traced()
        modes = torch.overrides._get_current_function_mode_stack()
        in_transform |= any(type(mode).__module__.split(".")[0] not in ("torch", "ddpcore") for mode in modes)
        in_transform |= torch.autograd.forward_ad._current_level >= 0  # all of these see each model's own operations
        if in_transform or not tensors:
            return self._in_turn(inputs, named_inputs)
        if not (self.runs_together() if self._are_together is None else self._are_together):
            return self._in_turn(inputs, named_inputs)
        chain = self._rules.chain
        if chain is None and self.vectorize is None:  # vmap saves other tensors, and adds a bias in another dtype
            packs = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
            if packs or torch.is_autocast_enabled(tensors[0].device.type):
                return self._in_turn(inputs, named_inputs)
        is_whole = is_one and inputs[0].dim() > 2 and inputs[0].layout == torch.strided
        if chain is not None and not self._takes_any_batch and not (is_whole and is_aligned(inputs[0])):
            return self._in_turn(inputs, named_inputs)
        if chain is None or not is_whole:
            return self._together(inputs, named_inputs)
        return self._run_chain(inputs[0], chain)

    def _has_rows(self, value: Any) -> bool:
        return bool(value.ndim > 1 and len(value) == len(self.models) > 1)

    def _run_chain(self, inputs_LB: Tensor, chain: Sequence[Layer]) -> Tensor:
        one, stacks = self._begin_pass()
        return run_chain(chain, inputs_LB, stacks, one, exact=not self._takes_any_batch and not inputs_LB.is_cuda)

    def _begin_pass(self) -> tuple[Pass, Sequence[Tensor]]:
        """A pass of the learners that run, and their weights in an autograd graph, ``[L, *S]`` of each segment."""
        flat, rows = self._flat, self.rows
        flat.forget_loan()
        num, parameters = len(flat.segments), flat.parameters
        if len(rows) < flat.num_rows:
            parameters = parameters[rows.start * num : rows.stop * num]
        one = Pass(flat, rows, parameters, self._token if all(map(is_trained, flat.parameters)) else None)
        return one, _apply_rows(one.token, one, *parameters)

    def _together(self, inputs: Any, named_inputs: Any) -> Any:
        models = [*self.models][self.rows.start : self.rows.stop]  # a slice would register them
        own = [dict(self._rules.untrained(model)) for model in models] if self._rules.have_untrained else [{}]
        kinds = [{name: (one.dtype, one.shape) for name, one in buffers.items()} for buffers in own]
        if any(kind != kinds[0] for kind in kinds):
            return self._in_turn(inputs, named_inputs)
        one_pass, rows = self._begin_pass()
        stacks = dict(zip(self._rules.names, rows, strict=True))
        buffers = {name: torch.stack([buffers[name] for buffers in own]) for name in own[0]}
        values: list[Any] = []  # of the outputs of one learner; vmap returns tensors only
        structure: Any = None

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
            nonlocal values, structure
            state = {**parameters, **buffers}
            called = _call(lambda *own, **named: _in_vmap(models[0], state, own, named), args, kwargs)
            values, structure = tree_flatten(called)
            outputs = [value for value in values if isinstance(value, Tensor)]
            return outputs, {name: state[name] for name in buffers}  # functional_call stores buffers set anew there

        dims = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, (inputs, named_inputs))
        run = vmap(one, in_dims=(0, 0, *dims), randomness="different")
        outputs, buffers = run(stacks, buffers, inputs, named_inputs)
        for name, rows in buffers.items():
            for row, model_buffers in zip(rows, own, strict=True):
                overwrite(model_buffers[name], row.detach())
        self._rules.share_state(self.rows)
        with own_hooks():
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(lambda _: one_pass.check_weights())
        rest = iter(outputs)
        leaves = [next(rest) if isinstance(value, Tensor) else [value] * len(models) for value in values]
        return tree_unflatten(leaves, structure)

    def _in_turn(self, inputs: Any, named_inputs: Any) -> Any:
        models, known = [self.models[place] for place in self.rows], dict[int, list[Any]]()
        if not named_inputs and len(inputs) == 1 and isinstance(inputs[0], Tensor):
            results = [model(_row_of(inputs[0], row, known)) for row, model in enumerate(models)]
        else:
            results = []
            for row, model in enumerate(models):
                args, kwargs = tree_map_only(Tensor, lambda x: _row_of(x, row, known), (inputs, named_inputs))  # noqa: B023
                results.append(_call(model, args, kwargs))
        for tensor, _, latest, rows in known.values():
            latest, is_one_memory = max(latest, tensor._version), not tensor.requires_grad
            _take_back(tensor, list(rows.values()))
            if is_one_memory:  # a learner may have changed what its graph saved, and the last one nothing
                _set_versions((tensor,), (latest,))
        if all(isinstance(result, Tensor) for result in results):
            return torch.stack(results)
        flattened = [tree_flatten(result) for result in results]
        if any(structure != flattened[0][1] for _, structure in flattened):
            raise ValueError("the learners' models return outputs of different structures: call each of handle.models")
        leaves = [
            torch.stack(values) if all(isinstance(one, Tensor) for one in values) else list(values)
            for values in zip(*(found for found, _ in flattened), strict=True)
        ]
        return tree_unflatten(leaves, flattened[0][1])


def _call(model: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A learner's call. RuntimeError: the model puts values into a container or an object among its inputs."""
    given = tree_leaves((args, kwargs))
    others = [one for one in given if not isinstance(one, Tensor)]
    objects = [one for one in others if hasattr(one, "__dict__") or isinstance(one, set)]
    held = [part for one in objects for part in _parts(one)]
    result = model(*args, **kwargs)
    are_mixed = Counter(id(part) for one in objects for part in _parts(one)) - Counter(map(id, held))
    if Counter(map(id, tree_leaves((args, kwargs)))) - Counter(map(id, given)) or are_mixed:
        what = "a model puts values into a list, dict or object among its inputs"
        why = "values of learners are lost or mixed: let forward() copy it (batch = dict(batch))"
        raise RuntimeError(f"{what}, where {why} and return what the loop needs, or call each of handle.models")
    return result


def _in_vmap(model: nn.Module, state: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """A learner's call in vmap. Its errors, also those of the model, keep class and text, and say how to do without."""
    try:
        return functional_call(model, state, args, kwargs)
    except RuntimeError as error:
        if type(error) not in (RuntimeError, NotImplementedError):  # such as torch.OutOfMemoryError
            raise
        reason, *more = str(error).split("\n", 1)
        hint = f"{reason.removesuffix('.')} (in torch.func.vmap; learners run in turn with vectorize=False)"
        raise type(error)("\n".join([hint, *more])) from error


def _row_of(tensor: Tensor, row: int, known: dict[int, list[Any]]) -> Tensor:
    """The input of one learner, with the first of the ``known`` versions: a first layer may change it in place."""
    is_dual = torch.autograd.forward_ad._current_level >= 0  # detach() drops the tangent
    if tensor.layout == torch.strided and not tensor.stride(0):  # expand(): learners would change one memory
        return tensor[row].clone()
    if is_dual or tensor.is_inference() or torch._C._functorch.maybe_current_level() is not None:
        return tensor[row]
    entry = known.setdefault(id(tensor), [tensor, tensor._version, 0, {}])
    first, rows = entry[1], entry[3]
    entry[2] = max(entry[2], tensor._version)
    if row not in rows:
        if tensor._version != first:
            _set_versions((tensor,), (first,))
        # detach() keeps the version of all, so autograd sees when the program changes them
        rows[row] = tensor[row].clone() if tensor.requires_grad else tensor[row].detach()
    return rows[row]


def _take_back(tensor: Tensor, rows: list[Tensor]) -> None:
    """Give an input the graph of what models have written into its ``rows``, which autograd does not see."""
    if tensor.requires_grad:
        is_written = not (tensor.is_leaf and torch.is_grad_enabled()) and any(row._version for row in rows)
    else:
        is_written = any(row.grad_fn is not None for row in rows)
    if is_written and all(row.shape == tensor.shape[1:] and row.stride() == tensor.stride()[1:] for row in rows):
        with torch.set_grad_enabled(any(row.requires_grad for row in rows)):
            tensor.copy_(torch.stack(rows))


def _parts(value: Any, depth: int = 4) -> Iterator[Tensor | np.ndarray]:
    """The tensors and arrays of a value that torch's pytree does not open."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif depth and not isinstance(value, nn.Module | ModuleType | type):
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
        for part in (*items, *getattr(value, "__dict__", {}).values()):
            if not isinstance(part, _PLAIN):
                yield from _parts(part, depth - 1)


class _Rows(torch.autograd.Function):
    """One tensor ``[L, *S]`` per segment, in the memory of the parameters. Gradients go to the parameters."""

    @staticmethod
    def forward(ctx: Any, token: Tensor | None, one: Pass, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.one = one
        ctx.set_materialize_grads(False)
        rows_LP = one.flat.param_LP[one.rows.start : one.rows.stop]
        return tuple(stack.detach() for stack in one.flat.stacks_of(rows_LP))  # with the version of all weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_compiled_autograd()
        flat, parameters = ctx.one.flat, ctx.one.parameters
        rows = len(parameters) // len(grads)
        own: list[Sequence[Tensor | None]]
        # create_graph=True needs the graph of each gradient, and is_grads_batched=True passes batches of gradients.
        if torch.is_grad_enabled() or any(g is not None and is_legacy_batchedtensor(g) for g in grads):
            own = [(None,) * rows if grad is None else grad.unbind(0) for grad in grads]
        elif ctx.one.accumulates() and flat.add_gradients(parameters, grads, ctx.one):
            return (None,) * (2 + len(parameters))
        else:  # each gradient has its own version counter
            grads = flat.take_back(grads, ctx.one)
            own = [[None if grad is None else grad[row].data for row in range(rows)] for grad in grads]
        return None, None, *(segment[row] for row in range(rows) for segment in own)


# Function.apply looks at each argument, which takes as long as the rest. No transform of torch.func is active here.
_apply_rows = super(torch.autograd.Function, _Rows).apply
