"""``GossipTrainer``: a ``Trainer`` of transformers that trains with ``ddpcore.distribute``."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.saved import replaced
from ddpcore.integrations import accelerate
from ddpcore.options.extras import extra
from ddpcore.strategies.base import Strategy

with extra("transformers"):
    from transformers import Trainer


class GossipTrainer(Trainer):
    """A ``Trainer`` that does not wrap the model in DistributedDataParallel. Start it with torchrun.

    ``evaluate``, ``predict`` and ``save_model`` use the averaged model, so call each of them on all ranks. A checkpoint
    is one of ``Trainer``, with the averaged model, and has a file with the state of each rank besides. Only the state
    of the scheduler and of callbacks is that of rank 0.

    Args:
        args, kwargs: as for ``Trainer``.
        strategy: such as ``DPSGD()``.
        options: of :func:`ddpcore.distribute`.

    ValueError: DeepSpeed, FSDP or another library averages or shards the model too, or ``auto_find_batch_size`` is set.
    """

    def __init__(self, *args: Any, strategy: Strategy, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(strategy, Strategy):
            raise ValueError(f"GossipTrainer got strategy={strategy!r}: pass a strategy of ddpcore, such as DPSGD()")
        accelerate.check_plain(self.accelerator, self.model, options or {})
        self.accelerator.prepare_model = partial(accelerate.prepare_model, self.accelerator)
        if self.args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size trains anew, and GossipTrainer only once: find it by a Trainer")
        if self.args.n_gpu > 1:
            raise ValueError("one process would use several GPUs by DataParallel: start one rank a GPU by torchrun")
        self._strategy, self._options = strategy, dict(**accelerate.one_learner(), **(options or {}))
        self.handle: Any = None
        self._scaler: dict[str, Any] | None = None
        if not strategy.traits.averages_gradients:
            self.args.average_tokens_across_devices = False  # it would wait for all ranks in each step

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self.handle is not None:
            raise ValueError("a GossipTrainer trains once: make a new one with model=trainer.handle.evaluation_model()")
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        model, optimizer, scaler = self.model, self.optimizer.optimizer, self.accelerator.scaler
        self.handle = distribute(model, optimizer, self._strategy, scaler=scaler, **self._options)
        model.no_sync = accelerate.NoSync(self.handle)
        if resume_from_checkpoint is not None:  # after distribute, which starts all ranks alike
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
            if self._scaler and scaler is not None:  # of this rank, in the place of rank 0's
                scaler.load_state_dict(self._scaler)
        return prepared

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.handle is None else replaced(self.handle):
            return super().evaluation_loop(*args, **kwargs)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        average = None if self.handle is None else self.handle.evaluation_model()
        super()._save(output_dir, state_dict if average is None else average.state_dict())

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.handle is not None:
            accelerate.save_rank_file(self.handle, output_dir, scaler=self.accelerator.scaler)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.handle is not None and checkpoint is not None and accelerate.rank_file(checkpoint, 0).exists():
            device = self.args.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):  # else samplers draw other samples
                self._scaler = accelerate.load_rank_file(self.handle, checkpoint, self.model)
