"""Virtual learners: all n of them rows of one buffer in this process. The executable reference of the real ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ddpcore import ops
from ddpcore.comm.base import Communicator, Exchange, Work, all_reduce_bytes
from ddpcore.ops import Mixture
from ddpcore.topology import Topology


class VirtualCommunicator(Communicator):
    """Connects the rows of one ``[n, P]`` buffer. Nothing is sent; ``bytes_sent`` is what real learners would send."""

    def __init__(self, num_learners: int) -> None:
        if num_learners < 1:
            raise ValueError(f"learners is {num_learners}: it must be at least 1")
        self.num_learners = num_learners
        self.learners = range(num_learners)
        self.description = f"{num_learners} virtual learners in one process"

    def broadcast_(self, rows: Tensor) -> None:
        """See :class:`Communicator`."""
        rows[1:].copy_(rows[0])

    def average_(self, rows: Tensor) -> Work:
        """See :class:`Communicator`. Learners are added in ascending order."""
        if self.num_learners > 1:
            self.bytes_sent += all_reduce_bytes(rows[0].numel() * rows.element_size(), self.num_learners)
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            rows.copy_(total.div_(self.num_learners))
        return _Done()

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """See :class:`Communicator`."""
        sent = len(topology.round(step, 0, self.num_learners).destinations)
        self.bytes_sent += sent * weights_LP.shape[1] * weights_LP.element_size()
        matrix = torch.from_numpy(topology.matrix(step, self.num_learners)).to(weights_LP.device, torch.float32)
        return _StackedExchange(weights_LP, matrix)

    def gather(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        return values


class _Done(Work):
    def wait(self) -> None:
        return


class _StackedExchange(Exchange):
    def __init__(self, weights_LP: Tensor, matrix: Tensor) -> None:
        self._weights_LP, self._matrix = weights_LP, matrix

    def mix_(self) -> Tensor:
        return ops.mix_stacked_(self._weights_LP, self._matrix)[:, None]

    def mixture(self) -> Mixture | None:
        return None


class StackedModel(nn.Module):
    """Runs each learner's row of the parameters on its own batch: ``[L, B, ...] -> [L, B, ...]``.

    Args:
        model: its parameters that need a gradient are stacks ``[L, *S]``, as ``FlatParameters`` leaves them. Its
            buffers become stacks too, each learner with its own.
        num_learners: L.
        vectorize: True runs all learners in one ``torch.func.vmap``, False one after the other with the arithmetic of a
            real learner bit for bit. None takes vmap where the model has no buffers, convolutions or randomness.
    """

    def __init__(self, model: nn.Module, num_learners: int, vectorize: bool | None = None) -> None:
        super().__init__()
        self.module = model
        self.num_learners = num_learners
        self.vectorize = _vectorizes_well(model) if vectorize is None else vectorize
        for owner in model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                persistent = name not in owner._non_persistent_buffers_set
                stack = buffer.expand(num_learners, *buffer.shape).clone()
                owner.register_buffer(name, stack, persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        """Learner j sees ``inputs[j]`` only."""
        if inputs.shape[0] != self.num_learners:
            raise ValueError(
                f"inputs have {inputs.shape[0]} rows for {self.num_learners} learners: "
                "give [learners, batch, ...], one mini-batch a learner"
            )
        parameters: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        buffers = dict(self.module.named_buffers())
        if self.vectorize:

            def one(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
                return functional_call(self.module, (p, b), (x,))

            return vmap(one, randomness="different")(parameters, buffers, inputs)
        # unbind has one gradient for the whole stack; indexing row by row would add up L gradients of the size of it.
        rows = {name: p.unbind(0) for name, p in parameters.items()}
        return torch.stack(
            [
                functional_call(
                    self.module,
                    ({name: row[j] for name, row in rows.items()}, {name: b[j] for name, b in buffers.items()}),
                    (inputs[j],),
                )
                for j in range(self.num_learners)
            ]
        )


def single_model(stacked: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A copy of a stacked model for one learner: parameters from ``values``, buffers the mean over learners.

    Integer buffers (counters) are learner 0's.
    """
    model = copy.deepcopy(stacked)
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.grad = None
            parameter.data = values[name]
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(name, buffer.mean(0) if buffer.is_floating_point() else buffer[0])
    return model


def _vectorizes_well(model: nn.Module) -> bool:
    convolutions = (nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd, nn.RNNBase)
    return next(model.buffers(), None) is None and not any(isinstance(m, convolutions) for m in model.modules())
