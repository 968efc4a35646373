"""The run around the trainer: epochs, evaluation, checkpoints, and when to stop."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ddpcore.runtime.signals import StopSignal
from ddpcore.training.build import LearnerPlacement, total_steps
from ddpcore.training.checkpoint import Checkpoints
from ddpcore.training.evaluation import Evaluation
from ddpcore.training.progress import Progress
from ddpcore.training.run_writer import RunWriter
from ddpcore.training.statistics import flatness_of, row_of
from ddpcore.training.trainer import Trainer

CHECK_EVERY = 20  # steps between two looks at the loss, each of which waits for the device and all ranks


@dataclass
class Loop:
    """One run, at some step.

    Attributes:
        place: config and device.
        trainer: takes the steps.
        model: what was given to ``distribute``.
        checkpoints: where they go.
        progress: how far the run is.
        outputs: None on all ranks but the first.
    """

    place: LearnerPlacement
    trainer: Trainer
    model: nn.Module
    checkpoints: Checkpoints
    progress: Progress
    outputs: RunWriter | None = None

    def __post_init__(self) -> None:
        self.config = self.place.config
        self.steps_per_epoch = self.trainer.batches.steps_per_epoch
        self.total = total_steps(self.config, self.steps_per_epoch)
        self._started = time.perf_counter() - self.progress.seconds
        self._mark = 0.0  # where training went on last, by the clock that training is timed by
        self._num_records = 0  # of the statistics, that are written

    def run(self, listener: StopSignal) -> bool:
        """Train to the end; False where ``listener`` was asked to stop before it, and the run is saved."""
        trainer, progress = self.trainer, self.progress
        self._mark = trainer.handle.comm.now()
        while trainer.num_steps < self.total and not (progress.diverged or self._has_arrived()):
            progress.add(trainer.step())
            step = trainer.num_steps
            over = step % self.steps_per_epoch == 0 or step == self.total
            stop = listener.asked and not self.place.real
            if over or step == 1 or step % CHECK_EVERY == 0:
                loss, stop = progress.check(trainer.handle.comm, listener.asked, self.config.diverged_above)
                self._advance(loss)
                self._write_statistics()
            best = self._end_epoch() if over or progress.diverged else False
            if self._is_due(step, over, best) or (stop and step < self.total):
                self._save()
            if stop and step < self.total:
                return False
        self._end()
        return True

    def _has_arrived(self) -> bool:
        """Whether an evaluation has reached the config's target."""
        target, best = self.config.target, self.progress.best
        return target is not None and best is not None and best["accuracy"] >= target

    def _advance(self, loss: float) -> None:
        if self.outputs is not None:
            step, accuracy = self.trainer.num_steps, self.progress.accuracy
            reached = "" if accuracy is None else f", accuracy {100 * accuracy:.2f} %"
            epoch = 1 + (step - 1) // self.steps_per_epoch
            self.outputs.advance(step, f"epoch {epoch}, loss {loss:.4f}{reached}")

    def _write_statistics(self) -> None:
        """Records since the last time; here, where the loss was waited for, they keep nobody waiting."""
        statistics = self.trainer.statistics
        records = [] if statistics is None else statistics.records[self._num_records :]
        self._num_records += len(records)
        if self.outputs is not None:
            for record in records:
                self.outputs.write(row_of(record))

    def _is_due(self, step: int, over: bool, best: bool) -> bool:
        """Whether a checkpoint is to be written after this step."""
        every = self.config.checkpoint_every
        if every == 0 or self.progress.diverged:
            return False
        return (over if every is None else step % every == 0) or (best and self.config.keep_best)

    def _end_epoch(self) -> bool:
        """Evaluate where it is time to, and write the epoch's row; True where it is the best so far."""
        config, trainer, progress = self.config, self.trainer, self.progress
        self._pause()
        paused = time.perf_counter()
        step = trainer.num_steps
        epoch = -(-step // self.steps_per_epoch)
        comm = trainer.handle.comm
        samples = min(progress.epoch_steps * config.batch_size, trainer.batches.samples_per_learner * config.learners)
        seconds = progress.epoch_seconds
        row: dict[str, Any] = {
            "kind": "epoch",
            "epoch": epoch,
            "step": step,
            "train_loss": progress.end_epoch(comm),
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "seconds": seconds,
            "samples_per_s": samples / seconds,
            "consensus_distance": trainer.handle.consensus_distance() if comm.num_learners > 1 else None,
        }
        best = False
        on_time = step == self.total or (config.evaluate_every and epoch % config.evaluate_every == 0)
        if on_time and not progress.diverged:
            evaluation = trainer.evaluate(self._evaluation_model(), config.evaluate_on)
            if evaluation is not None:
                best = progress.evaluated(evaluation.scores.accuracy, evaluation.loss, epoch, step)
                row |= {"split": config.evaluate_on, **_scores(evaluation)}
        row["evaluation_seconds"] = time.perf_counter() - paused
        row["total_seconds"] = time.perf_counter() - self._started
        if self.outputs is not None:
            self.outputs.write(row)
        self._mark = comm.now()
        return best

    def _evaluation_model(self) -> nn.Module:
        config = self.config
        return self.trainer.evaluation_model(config.evaluation_batch_norm, config.recalibration_batches)

    def _end(self) -> None:
        """The last row, and the model that the last scores are of."""
        progress, best = self.progress, self.progress.best or {}
        chose = self.config.evaluate_on == "validation" and not progress.diverged
        model = self._evaluation_model()
        test = self.trainer.evaluate(model, "test") if chose else None
        if self.outputs is None:
            return
        self.outputs.write_model(safetensors.torch.save({n: t.contiguous() for n, t in model.state_dict().items()}))
        self.outputs.write(
            {
                "kind": "end",
                "step": self.trainer.num_steps,
                "diverged": progress.diverged,
                "accuracy": progress.accuracy,
                "best_accuracy": best.get("accuracy"),
                "best_epoch": best.get("epoch"),
                "test": None if test is None else _scores(test),
                **self._flatness(model),
                "total_seconds": time.perf_counter() - self._started,
            }
        )

    def _flatness(self, model: nn.Module) -> dict[str, Any]:
        """Columns of the last row: the measures, or why there are none although they were asked for."""
        config, flat, reason = self.config, None, None
        if config.flatness_samples and self.progress.diverged:
            reason = "the run diverged"
        elif config.flatness_samples:
            try:
                flat = flatness_of(model, self.trainer.dataset, num_samples=config.flatness_samples, seed=config.seed)
            except Exception as error:  # whatever it is, the training that is done is not lost for it
                reason = f"{type(error).__name__}: {error}"
        return {"flatness": flat, "flatness_reason": reason}

    def _pause(self) -> None:
        """What follows is not training: add up its seconds."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.epoch_seconds += self.trainer.handle.comm.now() - self._mark

    # ---- checkpoints ----

    def _save(self) -> None:
        self._pause()
        self._write_statistics()  # a run that goes on from here does not take them again
        self.progress.seconds = time.perf_counter() - self._started
        best = self.progress.best
        if self.outputs is not None:
            self.outputs.sync()
        self.checkpoints.save(
            self.trainer.num_steps,
            self.state_dict(),
            keep_last=self.config.keep_last,
            best=best["step"] if best is not None and self.config.keep_best else None,
        )
        self._mark = self.trainer.handle.comm.now()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        trainer, device = self.trainer, self.place.device
        statistics = trainer.statistics
        random = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(device)
        return {
            "step": trainer.num_steps,
            "model": dict(self.model.state_dict()),
            "optimizer": trainer.optimizer.state_dict(),
            "handle": trainer.handle.state_dict(),
            "random": random,
            "progress": self.progress.state_dict(),
            "statistics": None if statistics is None else statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Every rank must call it.

        Raises:
            ValueError: it is the state of another model.
        """
        mine, theirs = self.model.state_dict(), state["model"]
        for name in [*mine, *theirs]:
            shapes = [tuple(side[name].shape) if name in side else None for side in (mine, theirs)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the checkpoint is of another model: {name} is {shapes[1]} there and {shapes[0]} here: "
                    "build the model it came from"
                )
        self.trainer.rehearse()
        self.model.load_state_dict(theirs)
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.trainer.handle.load_state_dict(state["handle"])
        self.trainer.num_steps = state["step"]
        self.progress = Progress(**state["progress"])
        if self.trainer.statistics is not None:
            self.trainer.statistics.load_state_dict(state["statistics"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and self.place.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), self.place.device)
        self._started = time.perf_counter() - self.progress.seconds


def _scores(evaluation: Evaluation) -> dict[str, float]:
    return {"loss": evaluation.loss, **asdict(evaluation.scores)}
