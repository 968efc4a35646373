"""A copy of the model with the average of all learners' weights, to evaluate or to save."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from itertools import compress
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ddpcore.comm.base import Communicator
from ddpcore.parameters.copies import copy_of, overwrite
from ddpcore.parameters.shards import is_dtensor, local
from ddpcore.strategies.learner import Learner

POWER_STEPS = 100  # from averaged vectors, which are near the vectors of the averaged weights
Average = Callable[[Tensor], Tensor]  # of rows ``[L, X]`` over all learners, as ``Learner.average_of``. Collective.
BATCH_NORM = ("average", "local", "recalibrate")


def averaged_model(learner: Learner, batch_norm: str) -> nn.Module:
    """Return a copy of the model with averaged weights, without changing any learner's model. Collective.

    Frozen parameters are averaged where learners differ, as a teacher that follows its student. With ``local``
    the copy has the floating-point and complex buffers of the (first) learner held here, else their average.
    """
    flat, models = learner.flat, learner.models_read
    weights_LP = learner.weights()
    views = flat.views_of(learner.average_of(weights_LP))
    averages = dict(zip(map(id, flat.parameters), views, strict=True))  # a parametrization may change names
    result = copy_of(models[0])
    for parameter, copied in zip(models[0].parameters(), result.parameters(), strict=True):
        if id(parameter) in averages:
            copied.grad = None
            copied.data = averages[id(parameter)].clone()
    columns = [
        (copied, own)
        for copied, *own in zip(result.parameters(), *(m.parameters() for m in models), strict=True)
        if id(own[0]) not in flat.index and has_average(own[0]) and own[0].numel()
    ]
    for copied, own in compress(columns, _apart([own for _, own in columns], learner.comm)):
        copied.data = _mean_of(own, learner.average_of)
    used = (_masks(one).items() if batch_norm == "local" else one.named_buffers() for one in models)
    check_shared(learner.gather([*map(digest, used)]))
    _average_pruned(result, learner, dict(zip(map(id, flat.parameters), flat.views_of(weights_LP), strict=True)))
    if batch_norm != "local":
        average_buffers(dict(result.named_buffers()), models, learner.average_of)
        renew_singular_vectors(result)
    return result


class AveragedShards(nn.Module):
    """A sharded model with the average of all learners' weights. No rank holds the whole model.

    A call runs the training model with the averaged shards in the place of its own, and is collective over the ranks of
    a learner. Its parameters and ``state_dict()`` are DTensors, to read only. For ``batch_norm`` see
    :func:`averaged_model`. ValueError: it is ``recalibrate``.
    """

    def __init__(self, learner: Learner, batch_norm: str) -> None:
        super().__init__()
        flat, self._learner, (model,) = learner.flat, learner, learner.models
        if batch_norm == "recalibrate":
            raise ValueError("a sharded learner has no batch_norm='recalibrate': take 'average' or 'local'")
        assert flat.shards is not None
        flat.shards.reshard()  # an evaluation of the training model may have left gathered weights in it
        self._average_LP = learner.average_of(learner.weights())
        places = dict(zip(map(id, flat.parameters), flat.views_of(self._average_LP), strict=True))
        self._frozen: list[tuple[Any, Tensor]] = []  # where learners differ
        frozen = [one for one in model.parameters() if id(one) not in places and has_average(one)]
        for parameter in compress(frozen, _apart([[one] for one in frozen], learner.comm)):
            (row,) = learner.average_of(flat.shards.padded(parameter)[None])
            places[id(parameter)] = row[: local(parameter).numel()].view(local(parameter).shape)
            self._frozen.append((parameter, places[id(parameter)]))
        self._averages: dict[int, Any] = {id(buffer): buffer.clone() for buffer in model.buffers()}
        for one in model.parameters():
            averaged = flat.shards.gradient(one, places.get(id(one), local(one)))
            self._averages[id(one)] = nn.Parameter(averaged, one.requires_grad)
        layers: dict[nn.Module, nn.Module] = {model: self}  # with the names of the model's, but without its code
        for module in model.modules():
            layer = layers[module]
            layer.training = module.training
            layer._parameters.update({name: self._averages.get(id(one)) for name, one in module._parameters.items()})
            layer._buffers.update({name: self._averages.get(id(one)) for name, one in module._buffers.items()})
            parts = ((name, one) for name, one in module._modules.items() if one is not None)
            layer._modules.update({name: layers.setdefault(one, nn.Module()) for name, one in parts})
        if batch_norm != "local":
            check_shared(learner.gather([digest(self.named_buffers())]))
            average_buffers(dict(self.named_buffers()), learner.models, learner.average_of)
            for buffer in (one for one in self.buffers() if has_average(one) and not is_dtensor(one)):
                # each rank of a learner has seen its own samples
                buffer.copy_(flat.shards.add_(buffer.clone()).div_(int(flat.shards.mesh.size())))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the averaged model. RuntimeError: a later backward pass would compute with other weights."""
        if torch.is_grad_enabled():
            raise RuntimeError("the average of a sharded model has no gradients: evaluate under torch.no_grad()")
        learner, (model,) = self._learner, self._learner.models
        assert learner.flat.shards is not None
        own = [(buffer, buffer.data) for buffer in model.buffers()]
        frozen = [(parameter, local(parameter)) for parameter, _ in self._frozen]
        learner.flat.shards.reshard()
        try:
            for (buffer, _), held in zip(own, self.buffers(), strict=True):
                buffer.data = held
            for parameter, average in self._frozen:
                learner.flat.shards.move(parameter, average)
            with modes_kept(model), learner.flat.at(self._average_LP):
                for module, layer in zip(model.modules(), self.modules(), strict=True):
                    module.training = layer.training
                return model(*args, **kwargs)
        finally:
            learner.flat.shards.reshard()
            for parameter, part in frozen:
                learner.flat.shards.move(parameter, part)
            for buffer, data in own:
                buffer.data = data

    def train(self, mode: bool = True) -> "AveragedShards":
        """Set the modes that the model's own ``train()`` sets."""
        with modes_kept(model := self._learner.models[0]):
            model.train(mode)
            for layer, module in zip(self.modules(), model.modules(), strict=True):
                layer.training = module.training
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The averaged weights, as DTensors, and buffers, by the names of the training model's, which hooks may change.

        RuntimeError: it has another tensor than those that were averaged.
        """
        (model,), shards = self._learner.models, self._learner.flat.shards
        given: dict[str, Any] = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        others, keeps = set(given.get("destination") or ()), given.pop("keep_vars", False)
        assert shards is not None
        shards.reshard()
        state = model.state_dict(**given, keep_vars=True)
        for name in [name for name, value in state.items() if name not in others and isinstance(value, Tensor)]:
            if (average := self._averages.get(id(state[name]))) is None:
                what = f"{name} of state_dict() is another tensor than was averaged"
                raise RuntimeError(f"{what}: remove the hook that makes it, or save the average before the next pass")
            state[name] = average if keeps else average.detach()
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AveragedShards":
        return self if all(fn(one) is one for one in [*self.parameters(), *self.buffers()]) else self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("the average of a sharded learner is read-only: load its state_dict() into your own model")

    load_state_dict = __reduce_ex__ = _refuse


def _apart(tensors: Sequence[Sequence[Tensor]], comm: Communicator) -> list[bool]:
    """Which tensors, each given for every learner held here, differ between learners: by sums of bits. Collective."""
    if not tensors:
        return []
    sums = [torch.stack([_sum_of_bits(local(one)) for one in own]) for own in tensors]
    everyone = comm.gather(torch.stack(sums, dim=1))
    return list(map(bool, (everyone != everyone[0]).any(dim=0).tolist()))


def _mean_of(own: Sequence[Tensor], average: Average) -> Tensor:
    """The average over all learners of a tensor that is given for every learner held here."""
    return average(torch.stack([one.reshape(-1) for one in own]))[0].view(own[0].shape)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The bytes of the values, each times its place, modulo 2^52: a number that differs where tensors differ."""
    parts = tensor.detach().contiguous().view(-1).view(torch.uint8).long()
    places = torch.arange(1, 1 + len(parts), device=parts.device, dtype=torch.int64)
    return (parts * places).sum().remainder(2**52).double()


def average_buffers(copies: Mapping[str, Tensor], models: Sequence[nn.Module], average: Average) -> None:
    """Overwrite copies of floating-point and complex buffers with their average over all learners' models."""
    held = [averaged_buffers(model) for model in models]
    for name in held[0]:
        overwrite(local(copies[name]), _mean_of([local(one[name]) for one in held], average))


def _average_pruned(result: nn.Module, learner: Learner, weights: Mapping[int, Tensor]) -> None:
    """Where masks of pruning differ, average what learners compute with, from trained weights by id. Collective."""
    copied, *held = (_pruned(one) for one in (result, *learner.models_read))
    columns = [[getattr(owner, f"{name}_mask") for owner, name in own] for own in zip(*held, strict=True)]
    pruned = zip(copied, zip(*held, strict=True), columns, strict=True)
    for (owner, name), own, masks in compress(pruned, _apart(columns, learner.comm)):
        originals = [getattr(one, f"{name}_orig") for one, _ in own]
        kept = [weights.get(id(one), one) * mask for one, mask in zip(originals, masks, strict=True)]
        getattr(owner, f"{name}_orig").data = _mean_of(kept, learner.average_of)
        getattr(owner, f"{name}_mask").data = _mean_of(masks, learner.average_of).ne(0).to(masks[0].dtype)


def _pruned(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of ``torch.nn.utils.prune``, and the names of their pruned parameters."""
    if (prune := sys.modules.get("torch.nn.utils.prune")) is None:  # torch imports it late
        return []
    hooks = ((module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values())
    return [(module, hook._tensor_name) for module, hook in hooks if isinstance(hook, prune.BasePruningMethod)]


def _masks(model: nn.Module) -> dict[str, Tensor]:
    """The masks of pruning, by name. A mean of masks is none."""
    masks = {id(getattr(owner, f"{name}_mask")) for owner, name in _pruned(model)}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in masks}


def renew_singular_vectors(model: nn.Module) -> None:
    """Compute the vectors of spectral norms from the averaged weights, where learners had different ones.

    Their averages are shorter than 1, and belong to no weight.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and not _is_unit(module, f"{hook.name}_"):
                for _ in range(POWER_STEPS):
                    hook.compute_weight(module, do_power_iteration=True)
        for chain in getattr(module, "parametrizations", {}).values():
            for place, part in enumerate(chain):
                if isinstance(part, _SpectralNorm) and hasattr(part, "_u") and not _is_unit(part, "_"):
                    weight = reduce(lambda value, one: one(value), list(chain)[:place], chain.original)
                    part._power_method(part._reshape_weight_to_matrix(weight), POWER_STEPS)


def _is_unit(owner: nn.Module, prefix: str) -> bool:
    norms = [getattr(owner, f"{prefix}{name}").norm() for name in "uv"]
    return all(abs(float(norm) - 1) < 16 * torch.finfo(norm.dtype).eps for norm in norms)


def has_average(buffer: Tensor) -> bool:
    """Whether a buffer is averaged: it holds real or complex numbers, and no counters or flags."""
    return buffer.is_floating_point() or buffer.is_complex()


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that have an average, by name."""
    masks = _masks(model)
    return {name: buffer for name, buffer in model.named_buffers() if has_average(buffer) and name not in masks}


def digest(named: Iterable[tuple[str, Tensor]]) -> int:
    """A number that differs where names, dtypes or sizes of buffers that have an average do."""
    return crc32(repr([(name, one.dtype, tuple(one.shape)) for name, one in named if has_average(one)]).encode())


def check_shared(digests: Iterable[Iterable[int]]) -> None:
    """Raise RuntimeError if the digests of all learners' buffers differ."""
    if len({number for row in digests for number in row}) > 1:
        what = "buffers differ in names, sizes or dtypes between learners, or from those at distribute()"
        raise RuntimeError(f"{what}: register them before it, or on all learners alike, or keep each learner's own")


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in training or evaluation mode as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any], comm: Communicator | None = None) -> None:
    """Recompute the running statistics of batch normalisation over the union of all batches of all ranks.

    The statistics of averaged weights are not the average of the statistics (Izmailov et al. 2018, section 3.2). The
    variance of the union includes the variance of the means of the batches.

    Args:
        model: changed in place. Its training mode is restored, also after an exception.
        batches: inputs of the model: tensors, or tuples of arguments. ValueError: there is none.
        comm: the connection to the other ranks, which must call this too; None takes the batches of this rank alone.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    seen: dict[nn.Module, Tensor] = {}  # by layer, see _moments

    def add_moments(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        moments = _moments(inputs[0])
        seen[norm] = _of_union(torch.stack([seen[norm], moments])) if norm in seen else moments

    with modes_kept(model), ExitStack() as hooks:
        model.eval()
        for norm in norms:
            hooks.callback(norm.register_forward_pre_hook(add_moments).remove)
            norm.reset_running_stats()
            norm.train()
        count = 0
        for count, batch in enumerate(batches, start=1):  # noqa: B007
            model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if not count:
            raise ValueError("recalibrate needs at least one batch: pass batches= of training inputs")
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        none = norm.running_mean.new_zeros(1 + 2 * norm.num_features, dtype=torch.float64)
        moments = seen.get(norm, none)  # no batch of this rank may have reached the layer
        if comm is not None:
            rows = len(comm.learners)  # equal for all learners of a rank
            moments = _of_union(comm.gather(moments.repeat(rows, 1))[::rows])
        num, mean, squares = moments.split([1, norm.num_features, norm.num_features])
        if num > 0:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(squares / (num - 1).clamp(min=1))


def _moments(inputs: Tensor) -> Tensor:
    """The moments of a batch ``[B, C, ...]``, float64 ``[1 + 2C]``: a count, C means, C sums of squared deviations."""
    values = inputs if inputs.dtype == torch.float64 else inputs.float()
    variance, mean = torch.var_mean(values, [dim for dim in range(values.dim()) if dim != 1], correction=0)
    num = torch.full((1,), values.numel() / values.shape[1], dtype=torch.float64, device=values.device)
    return torch.cat([num, mean.double(), num * variance.double()])


def _of_union(parts: Tensor) -> Tensor:
    """The moments ``[1 + 2C]`` of the union of k sets, from their moments ``[k, 1 + 2C]`` (Chan et al. 1979)."""
    num_channels = parts.shape[1] // 2
    nums, means, squares = parts.split([1, num_channels, num_channels], dim=1)
    num = nums.sum(dim=0)
    mean = (nums * means).sum(dim=0) / num.clamp(min=1)
    return torch.cat([num, mean, (squares + nums * (means - mean).square()).sum(dim=0)])
