"""``GossipStrategy``: a strategy of Lightning's ``Trainer`` that trains with ``ddpcore.distribute``."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from ddpcore.comm.connect import Connection
from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import load_run_state, replaced, run_state
from ddpcore.distributed.state_sync import Policies
from ddpcore.options.extras import extra
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.registry import STRATEGIES, is_baseline

with extra("lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn

KEY = "ddpcore"  # of a checkpoint: the states of all ranks


class _Steps(nn.Module):
    """The module that ``distribute`` gets. Lightning calls it once a training step, so its hooks run once a step."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning puts ``training_step`` in the place of the module's ``forward``."""
        return self.module(*args, **kwargs)


class GossipStrategy(DDPStrategy):
    """Ranks as those of Lightning's DDP, whose learners average as a strategy of ddpcore says.

    Validation, tests and predictions use the averaged model. A checkpoint holds the averaged weights, so any strategy
    can load it, and beside them the state of each rank, so that a resumed run has the same bits. Rank 0 writes all of
    it into one file, for which it needs memory for the states of all ranks.

    Args:
        strategy: such as ``DPSGD()``, or its name. Names are registered too: ``Trainer(strategy="ddpcore-dpsgd")``.
        policies: see :func:`ddpcore.distribute`; and so for ``connection`` and ``on_nonfinite``.
        connection: transport, timeout and buckets.
        on_nonfinite: what happens if a gradient is not finite.
        options: of ``DDPStrategy`` except those of the wrapper: ``process_group_backend``, ``timeout``,
            ``start_method``.

    Raises:
        ValueError: an option that belongs to DistributedDataParallel, a baseline, or (in ``fit``) several optimizers.
    """

    def __init__(
        self,
        strategy: Strategy | str,
        *,
        policies: Policies | None = None,
        connection: Connection | None = None,
        on_nonfinite: str = "raise",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        unused = [name for name in options if name in self._ddp_kwargs or name.startswith(("ddp_", "model_averaging"))]
        if unused:
            raise ValueError(f"GossipStrategy wraps no model in DistributedDataParallel: leave {', '.join(unused)} out")
        made = STRATEGIES.build(strategy) if isinstance(strategy, str) else strategy
        if not isinstance(made, Strategy):
            raise ValueError(f"GossipStrategy got {strategy!r}: pass a strategy of ddpcore, such as DPSGD()")
        self._gossip = made
        self._options: dict[str, Any] = {"policies": policies, "connection": connection, "on_nonfinite": on_nonfinite}
        self.handle: Distributed | None = None
        self._average: Any = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # distribute starts all ranks alike, so each loads its own weights afterwards

    @override
    def configure_ddp(self) -> None:
        self.model: nn.Module | None = _Steps(self.lightning_module)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise ValueError(f"the module has {len(self.optimizers)} optimizers: ddpcore trains with one")
        scaler = getattr(self.precision_plugin, "scaler", None)
        assert self.model is not None
        self.handle = distribute(self.model, self.optimizers[0], self._gossip, scaler=scaler, **self._options)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.handle is None else self.handle.no_sync()

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The backward pass, then the step without a closure: a strategy acts between the two."""
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:  # it already calls the closure first
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def _take_average(self) -> None:
        with torch.inference_mode(False):
            self._average = None if self.handle is None else self.handle.evaluation_model()

    on_validation_start = on_test_start = on_predict_start = _take_average

    def _averaged(self) -> AbstractContextManager[None]:
        if self._average is None:
            return nullcontext()
        return replaced(self.lightning_module, self._average.module)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().predict_step(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.handle is None:
            return super().lightning_module_state_dict()
        with torch.inference_mode(False):
            average: Any = self.handle.evaluation_model()
            return average.module.state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.handle is not None and "optimizer_states" in checkpoint:
            states: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            file = (
                io.BytesIO()
            )  # parameters are views of one buffer, which torch.save writes once and pickle many times
            torch.save(run_state(self.handle), file)
            dist.gather_object(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), states)
            checkpoint[KEY] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if KEY in checkpoint and self.handle is not None:
            files = (io.BytesIO(state.numpy().tobytes()) for state in checkpoint[KEY])
            load_run_state(self.handle, [torch.load(file, map_location="cpu", weights_only=True) for file in files])
        else:  # of another strategy
            super().load_optimizer_state_dict(checkpoint)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self.handle = None  # the file's averaged model is evaluated, and no learner any more


for _name in STRATEGIES.names():
    if not is_baseline(_name):
        StrategyRegistry.register(f"ddpcore-{_name}", partial(GossipStrategy, _name), f"ddpcore's {_name}")
