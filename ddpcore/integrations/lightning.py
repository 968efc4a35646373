"""``GossipStrategy``: a strategy of Lightning's ``Trainer`` that trains with ``ddpcore.distribute``."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import Parameter, signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.guards import learner_of
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import Lent, load_run_state, run_state
from ddpcore.options.extras import extra
from ddpcore.storage.serialization import pack, unpack
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.registry import STRATEGIES, is_baseline

with extra("lightning"):
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn

KEY, TRAINERS = "ddpcore", "ddpcore_trainers"  # of a checkpoint: the states of all ranks, and of their trainers


class _Steps(nn.Module):
    """What ``distribute`` gets. Lightning calls it once a training step, so its hooks run once a step."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning puts ``training_step`` in the place of the module's ``forward``."""
        return self.module(*args, **kwargs)


class GossipStrategy(DDPStrategy):
    """Ranks as in Lightning's DDP, whose learners average as a strategy of ddpcore says.

    Validation, tests and predictions use the averaged model, after the hook ``on_validation_start`` and its like: there
    callbacks and module still have the learner's weights. A checkpoint has the averaged model, so any strategy can load
    it, and the state of each rank too, for a resumed run with the same bits. Rank 0 needs memory for all of these. A
    module that this trainer has not trained is evaluated and saved as it is.

    Args:
        strategy: such as ``DPSGD()``, or its name. ``Trainer(strategy="ddpcore-dpsgd")`` works too.
        options: of :func:`ddpcore.distribute`, such as ``{"policies": Policies(momentum="average")}``.
        kwargs: of ``DDPStrategy``, not of its wrapper: ``process_group_backend``, ``timeout``, ``start_method``.

    ValueError: an option of DistributedDataParallel, no strategy of ddpcore; in ``fit`` EMA, LBFGS or two optimizers.
    """

    restore_checkpoint_after_setup = True  # distribute starts all ranks alike, so each loads its own weights afterwards

    def __init__(self, strategy: Strategy | str, *, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if unused := [name for name in kwargs if name in self._ddp_kwargs or name.startswith(("ddp_", "model_aver"))]:
            raise ValueError(f"GossipStrategy wraps no model in DistributedDataParallel: leave {', '.join(unused)} out")
        self._gossip: Any = STRATEGIES.build(strategy) if isinstance(strategy, str) else strategy
        if not isinstance(self._gossip, Strategy):
            raise ValueError(f"GossipStrategy got {strategy!r}: pass a strategy of ddpcore, such as DPSGD()")
        self._options, self._lent = options or {}, list[Lent]()  # of the evaluation that runs
        self.handle: Distributed | None = None
        self._num_passes = 0  # backward passes of the training_step that runs

    @override
    def configure_ddp(self) -> None:
        self.model: nn.Module | None = _Steps(self.lightning_module)

    @override
    def setup(self, trainer: Trainer) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING
        mixed = self.handle is not None and not self._is_trained() and not fits
        if mixed and learner_of(self.lightning_module.parameters()) is not None:
            why = "the module shares parameters with the one that learners train, and has no average"
            raise ValueError(f"{why}: pass that one, or one with layers of the handle's evaluation_model()")
        if fits or not self._is_trained() or self.accelerator is None:
            super().setup(trainer)
        else:
            self.accelerator.setup(trainer)  # and no more: DDPStrategy would give rank 0's weights to all learners
            self.model_to_device()
        if fits and self.model is not None:
            self._check(trainer)
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.handle = distribute(self.model, self.optimizers[0], self._gossip, scaler=scaler, **self._options)

    def _check(self, trainer: Trainer) -> None:
        if len(self.optimizers) != 1:
            raise ValueError(f"the module has {len(self.optimizers)} optimizers: ddpcore trains with one")
        closure, name = signature(self.optimizers[0].step).parameters.get("closure"), type(self.optimizers[0]).__name__
        if closure is not None and closure.default is Parameter.empty:
            why = f"{name} needs a closure in each step, and GossipStrategy steps without one"
            raise ValueError(f"{why}: take another optimizer, or call distribute() in your own loop")
        for one in trainer.callbacks:
            if isinstance(one, WeightAveraging):
                what = f"{type(one).__name__} averages one learner's weights over steps"
                raise ValueError(f"{what}, and validation takes the mean of the learners: leave the callback out")

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._num_passes = 0
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """RuntimeError: a second pass of a ``training_step`` has no noise, because the strategy acts once a call."""
        if self.handle is not None and self._num_passes and self._gossip.plan(0).shifted:
            why = "adds its noise once a training_step, and a second backward pass would have none"
            raise RuntimeError(f"{self._gossip.name} {why}: leave one pass in each, or take where='shared'")
        self._num_passes += 1
        super().pre_backward(closure_loss)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.handle is None else self.handle.no_sync()

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The backward pass, then the step without a closure: a strategy acts between the two."""
        if getattr(self.precision_plugin, "scaler", None) is not None:  # it already calls the closure first
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def _is_trained(self) -> bool:
        """Whether the trainer's module is the one that learners train: another one is evaluated and saved as it is."""
        return self.handle is not None and cast(Any, self.handle.models[0]).module is self.lightning_module

    def _lend(self) -> None:
        self._give_back()
        if self.handle is not None and self._is_trained():
            self._lent.append(Lent(self.handle))

    def _give_back(self) -> None:
        while self._lent:
            self._lent.pop().swap()

    on_validation_start = on_test_start = on_predict_start = _lend
    on_validation_end = on_test_end = on_predict_end = _give_back

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._give_back()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._give_back()
        super().teardown()

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """A context in which the module has its learner's weights, also in an evaluation."""
        for lent in self._lent:
            lent.swap()
        try:
            yield
        finally:
            for lent in self._lent:
                lent.swap()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.handle is None or not self._is_trained():
            return super().lightning_module_state_dict()
        with self._own_weights(), torch.inference_mode(False):
            return cast(Any, self.handle.evaluation_model()).module.state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.handle is not None and "optimizer_states" in checkpoint and self._is_trained():
            own = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
            own = move_data_to_device({} if self.is_global_zero else own, torch.device("cpu"))  # rank 0's is the file
            states: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            with self._own_weights():
                dist.gather_object((pack(run_state(self.handle)), own), states)
            if states is not None:
                checkpoint[KEY], checkpoint[TRAINERS] = ([one[part] for one in states] for part in (0, 1))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of as many ranks: with this rank's callbacks, schedulers, loops and gradient scaler, which may differ."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        trainers = checkpoint.pop(TRAINERS, ())
        return checkpoint | (trainers[self.global_rank] if len(trainers) == self.world_size else {})

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if KEY in checkpoint and self.handle is not None:
            load_run_state(self.handle, [unpack(one[0], one[1], self.root_device) for one in checkpoint[KEY]])
        else:  # of another strategy
            super().load_optimizer_state_dict(checkpoint)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING and self._is_trained():
            self.handle = None  # the file's averaged model is evaluated, and no learner any more


for _name in STRATEGIES.names():
    if not is_baseline(_name):
        StrategyRegistry.register(f"ddpcore-{_name}", partial(GossipStrategy, _name), f"ddpcore's {_name}")
