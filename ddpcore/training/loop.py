"""The loop of a run: steps, epochs, evaluations, checkpoints, when to stop, and what it writes."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.records.run import MODEL, RECORD, STEPS, nested, rank_of, step_file
from ddpcore.runtime.launch import StopSignal
from ddpcore.runtime.progress import ProgressReport
from ddpcore.storage.files import replace_file
from ddpcore.storage.json_lines import JsonLines, read_lines, to_json, write_lines
from ddpcore.storage.serialization import tensors_of
from ddpcore.strategies.learner import NonFinite, NonFiniteError, is_finite
from ddpcore.training.build import LearnerPlacement, total_steps
from ddpcore.training.checkpoint import Checkpoints, load_safetensors
from ddpcore.training.progress import Progress
from ddpcore.training.statistics import Measurements, flatness_of
from ddpcore.training.trainer import Evaluation, Trainer

OnRecord = Callable[[dict[str, Any]], None]
OnProgress = Callable[[int, int], None]
_LAST = "epoch", "end"  # kinds of rows that are written after an evaluation
CHECK_EVERY = 20  # steps between two checks of the loss; a check waits for the device and for all ranks


def warn(line: str) -> None:
    """Print a line beside the progress bar."""
    print(f"ddpcore: {line}", file=sys.stderr, flush=True)


class RunWriter(JsonLines):
    """Writes the files and the progress bar of a run, on rank 0 alone. As a context manager it closes them.

    ``header`` is the first row of a new run; its ``total_steps`` is the length of the progress bar. ``resumed`` is the
    row of a resumed run. Rows after its ``step`` are removed from the record, and with ``in_epoch`` the row of an epoch
    at this step. If the run was shorter, it gets the new length, and a last row and a model of the shorter run are
    removed. ``on_record`` is called with each further row, and ``on_progress`` with the steps taken and those of all.
    One that ``takes_over`` from a rank that has died does not write ``resumed``, nor again its epochs and end.
    """

    def __init__(
        self,
        out: Path,
        header: dict[str, Any],
        resumed: dict[str, Any] | None = None,
        on_record: OnRecord | None = None,
        on_progress: OnProgress | None = None,
        in_epoch: bool = False,
        takes_over: bool = False,
    ) -> None:
        path, step = out / RECORD, 0 if resumed is None else resumed["step"]
        known = read_lines(path)
        for problem in known.problems:
            warn(f"{problem}: the run goes on without it")
        rows = [] if resumed is None else [row for row in known.rows if row.get("step", 0) <= step]
        if in_epoch:
            rows = [row for row in rows if (row.get("kind"), row.get("step")) != ("epoch", step)]
        run, num_steps = next((row for row in rows if row.get("kind") == "run"), None), header["total_steps"]
        if run is None:
            rows.insert(0, header)
        elif run.get("total_steps", num_steps) < num_steps:  # the run is longer now
            (out / MODEL).unlink(missing_ok=True)
            rows = [row for row in rows if row.get("kind") != "end"]
            run |= {"config": {**nested(run["config"]), "run": header["config"]["run"]}, "total_steps": num_steps}
        out.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows if resumed is None or takes_over else [*rows, resumed])
        super().__init__(path)
        self._known = {(row.get("kind"), row.get("step")) for row in rows if takes_over and row.get("kind") in _LAST}
        self._on_record, self._on_progress, self._step, self._num_steps = on_record, on_progress, step, num_steps
        self._progress = ProgressReport("training", num_steps, completed=step)

    def __enter__(self) -> "RunWriter":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__()
        super().__exit__(*error)

    def advance(self, step: int, text: str) -> None:
        """Update the progress bar and the text beside it."""
        self._progress.advance(step - self._step, text)
        self._step = step
        if self._on_progress is not None:
            self._on_progress(step, self._num_steps)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the record."""
        if (row.get("kind"), row.get("step")) in self._known:
            return
        self.append(row)
        if self._on_record is not None:
            self._on_record(to_json(row))


class StepRecorder:
    """Writes a line for each step of this rank. :meth:`close` writes the last lines.

    docs/report.md explains the keys of a line. On a GPU each step waits for the device, so that the times are the
    work's, not its start's.
    """

    def __init__(self, out: Path, rank: int, trainer: Trainer) -> None:
        path = out / STEPS / step_file(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep(path, trainer.num_steps)
        membership = trainer.handle.comm.membership
        if membership is not None and rank == membership.members[0]:  # also of ranks that are gone
            for other in path.parent.glob(step_file("*")):
                if rank_of(other) not in membership.members:
                    _keep(other, trainer.num_steps)
        self._file, self._trainer = JsonLines(path), trainer
        self._lines: list[tuple[dict[str, Any], Tensor]] = []
        self.resume()

    def close(self) -> None:
        """Write the noted steps, and close the file."""
        self.flush()
        self._file.close()

    def resume(self) -> None:
        """Begin to measure a step: at the start, and after a pause for an evaluation, a checkpoint or a check."""
        self._waited, self._before = dict(self._trainer.handle.comm.waited), self._counts()
        self._began = time.perf_counter()

    def _counts(self) -> tuple[float, ...]:
        """Seconds so far: exposed, forward, backward, overlapped."""
        phases = self._trainer.handle.phases
        return phases.waited, phases.forward, phases.backward, phases.overlapped

    def add(self, losses_L: Tensor) -> None:
        """Note the step that has just ended. Losses stay on the device until :meth:`flush`."""
        if losses_L.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        handle, batches = self._trainer.handle, self._trainer.batches
        counts = [new - old for new, old in zip(self._counts(), self._before, strict=True)]
        exposed = None if handle.learner is None and handle.comm.num_learners == 1 else counts[0]
        is_alone = 1 < len(handle.comm.learners) == handle.comm.num_learners
        line = {
            "step": self._trainer.num_steps,
            "learners": list(self._trainer.learners),
            **({"batch_size": batches.batch_size_at(self._trainer.num_steps - 1)} if batches.growth else {}),
            "seconds": seconds,
            "compute": None if exposed is None else max(0.0, seconds - exposed),
            "exposed": exposed,
            "forward": counts[1],
            "backward": counts[2],
            "overlapped": None if handle.learner is None else counts[3],
            "waits": {rank: total - self._waited.get(rank, 0.0) for rank, total in handle.comm.waited.items()},
            "consensus_distance": handle.consensus_distance() if is_alone else None,
        }
        self._lines.append((line, losses_L.detach().clone()))
        self.resume()

    def flush(self, to_disk: bool = False) -> None:
        """Write the noted steps, ``to_disk`` also past the caches of files. It waits for the device."""
        for line, losses in self._lines:
            self._file.append({**line, "loss": losses})
        self._lines.clear()
        if to_disk:
            self._file.sync()


def _keep(path: Path, step: int) -> None:
    """Keep the lines up to a step, from which the run goes on."""
    known = read_lines(path)
    for problem in known.problems:
        warn(f"{problem}: the run goes on without it")
    steps = (line for line in known.rows if isinstance(line.get("step"), int))
    write_lines(path, [line for line in steps if line["step"] <= step])


@dataclass
class Loop:
    """A run in progress: all its parts, and the loop over its steps.

    Only rank 0 has a ``writer``. ``take_over`` makes one in the first rank that is left after that rank has died.
    """

    placement: LearnerPlacement
    trainer: Trainer
    measured: Measurements
    progress: Progress
    checkpoints: Checkpoints
    writer: RunWriter | None
    take_over: Callable[[], RunWriter]
    steps: StepRecorder | None = None

    def __post_init__(self) -> None:
        self.config, self.comm, self.batches = self.placement.config, self.trainer.handle.comm, self.trainer.batches
        self.total_steps = total_steps(self.config, self.batches)
        self._resumed_at = 0.0  # when training last began or went on after a pause, by the clock of `comm`
        self._num_changes = self._num_shared = 0  # of the members, that are written, and that new ones know
        self._writer = self.comm.members[0]  # id of the rank that writes, by the changes that are written
        self.joins = self.placement.joins  # until it has the progress of the step that the others have just taken
        self.is_saved = True  # whether the last checkpoint that was due was written

    def run(self, stop_signal: StopSignal) -> bool:
        """Train to the end. False: ``stop_signal`` came first, and the run is saved in a checkpoint."""
        trainer, progress = self.trainer, self.progress
        self._resumed_at, above = self.comm.now(), self.config.run.diverged_above
        if progress.epoch_steps and self._ends_epoch():  # this checkpoint was written before the evaluation
            progress.check(self.comm, False, above)
            self._end_epoch()
        while self.joins or not self._is_over():
            if not self.joins:
                try:
                    losses_L = trainer.step()
                except NonFiniteError as error:  # weights; see _collect for gradients
                    if self.placement.real:
                        raise
                    progress.diverged, progress.reason = True, str(error)
                    break
                only_finite = self.config.strategy.on_nonfinite != "raise"
                progress.add(losses_L, only_finite=only_finite, shares_L=trainer.shares_L)
                if self.steps is not None:
                    self.steps.add(losses_L)
            self._welcome()
            step = trainer.num_steps
            epoch_ends = self._ends_epoch()
            may_die = self.comm.membership is not None  # a checkpoint has the ranks that are left after the evaluation
            before = None
            if epoch_ends and not may_die:
                with self._paused():
                    before = progress.state_dict()
            stop = stop_signal.asked and not self.placement.real
            if epoch_ends or step == 1 or step % CHECK_EVERY == 0:
                num_mine = len(trainer.handle.nonfinite)
                loss, stop, num_found = progress.check(self.comm, stop_signal.asked, above, num_mine)
                self._write_rows(num_found, self._changes())
                if self.writer is not None:
                    reached = "" if progress.accuracy is None else f", last evaluated {100 * progress.accuracy:.2f} %"
                    self.writer.advance(step, f"epoch {1 + self.batches.epoch(step - 1)}, loss {loss:.4f}{reached}")
                if self.steps is not None:
                    self.steps.flush()
                    self.steps.resume()
            stop = stop and not self._is_over()
            comes_first = not may_die and (stop or self._needs_checkpoint(step, epoch_ends))
            if comes_first:  # an error in the evaluation then loses nothing
                self.is_saved = self._save(before)
            is_best = self._end_epoch() if epoch_ends or progress.diverged else False
            if not comes_first and (stop or self._needs_checkpoint(step, epoch_ends, is_best)):
                self.is_saved = self._save(before)
            if stop:
                return False
        self._end()
        return True

    def _welcome(self) -> None:
        """If a rank has joined in this step, give it the progress of the run; it is in the same call. Collective."""
        changes = self.trainer.handle.changes[self._num_shared :]
        self._num_shared += len(changes)
        joined = [change.joined[0] for change in changes if change.joined]
        if joined:  # a new rank knows its own join
            with self._paused():  # so that the progress has the seconds of training until now
                record = self.progress.share(self.comm, (self._writer, self._num_changes), joined[-1])
            self._writer, self._num_changes = record  # the new rank writes later changes itself if that one has died
            self.joins = False

    def _is_over(self) -> bool:
        """Whether all steps are taken, the run has diverged, or an evaluation has reached the config's target."""
        target, best = self.config.run.target, self.progress.best
        has_reached = target is not None and best is not None and best["accuracy"] >= target
        return self.trainer.num_steps >= self.total_steps or self.progress.diverged or has_reached

    def _write_rows(self, num_found: int, changes: Sequence[dict[str, Any]] = ()) -> None:
        """Write what happened since the last call, in the order of steps. Collective if ``num_found`` is not 0."""
        rows = [*(self._collect(num_found) if num_found else []), *changes, *self.measured.new_rows()]
        if self.writer is not None:
            for row in sorted(rows, key=lambda row: row["step"]):
                self.writer.write(row)

    def _collect(self, num_found: int) -> list[dict[str, Any]]:
        """Rows of what was found since the last check, at most ``num_found`` on each rank. Collective."""
        found, names = self.trainer.handle.nonfinite, [name for name, _ in self.trainer.module.named_parameters()]
        mine = torch.full((len(self.comm.learners), num_found, 3), -1, dtype=torch.int64, device="cpu")
        for index, one in enumerate(found):
            learner = -1 if one.learner is None else one.learner
            mine[0, index] = torch.tensor([one.step, learner, names.index(one.parameter)], device="cpu")
        found.clear()
        everyone = self.comm.gather(mine.to(self.placement.device)).flatten(0, 1).tolist()
        action = self.config.strategy.on_nonfinite
        events = []
        for step, learner, index in sorted({(*row,) for row in everyone if row[0] >= 0}):
            whose = None if learner < 0 else learner
            events.append(NonFinite(step=step, learner=whose, parameter=names[index], what="gradient", action=action))
        if action == "raise":  # all ranks end at the same step, as virtual learners do
            self.progress.diverged, self.progress.reason = True, str(events[0])
        return [{"kind": "nonfinite", **asdict(event)} for event in events]

    def _changes(self) -> list[dict[str, Any]]:
        """Rows of who has died. If that was the rank that writes, the first one that is left takes over."""
        changes = self.trainer.handle.changes[self._num_changes :]
        self._num_changes += len(changes)
        for change in changes:
            if self._writer in change.lost:
                self._writer = min(change.members)
        if changes and self.writer is None and self._writer == self.trainer.learners[0]:
            self.writer = self.take_over()
        step = self.trainer.num_steps
        return [{**asdict(change), "kind": "members", "step": step, "text": str(change)} for change in changes]

    def _ends_epoch(self) -> bool:
        """Whether the last step has ended an epoch or the run."""
        step, epoch = self.trainer.num_steps, self.batches.epoch
        return step == self.total_steps or epoch(step) > epoch(step - 1)

    def _needs_checkpoint(self, step: int, epoch_ends: bool, is_best: bool = False) -> bool:
        every = self.config.run.checkpoint_every
        if every == 0 or self.progress.diverged:
            return False
        return (epoch_ends if every is None else step % every == 0) or (is_best and self.config.run.keep_best)

    def _end_epoch(self) -> bool:
        """Evaluate if it is due, and write the row of the epoch. True: this evaluation is the best so far."""
        config, trainer, progress, batches = self.config, self.trainer, self.progress, self.batches
        step = trainer.num_steps
        with self._paused():
            before = progress.total_seconds
            epoch = 1 + batches.epoch(step - 1)
            taken = batches.num_taken(step) - batches.num_taken(step - progress.epoch_steps)
            seconds = progress.epoch_seconds
            row: dict[str, Any] = {
                "kind": "epoch",
                "epoch": epoch,
                "step": step,
                "train_loss": progress.end_epoch(self.comm),
                "lr": trainer.optimizer.param_groups[0]["lr"],
                **({"batch_size": batches.batch_size_at(step - 1)} if batches.growth else {}),
                "seconds": seconds,
                "samples_per_s": taken * self.comm.num_learners / seconds,
                "consensus_distance": trainer.handle.consensus_distance() if self.comm.num_learners > 1 else None,
            }
            is_best = False
            is_due = step == self.total_steps or (config.run.evaluate_every and epoch % config.run.evaluate_every == 0)
            if is_due and not progress.diverged:
                evaluation = trainer.evaluate(self._evaluation_model(), config.run.evaluate_on)
                if evaluation is not None:
                    is_best = progress.evaluated(evaluation.scores.accuracy, evaluation.loss, epoch, step)
                    row |= {"split": config.run.evaluate_on, **evaluation.to_dict()}
            total = progress.total_seconds
            row |= {"evaluation_seconds": total - before, "total_seconds": total}
            self._write_last(lambda writer: writer.write(row))
        return is_best

    def _write_last(self, write: Callable[[RunWriter], None]) -> None:
        """Write the changes, then call ``write``: anew if the rank that writes dies. Collective if ranks may die."""
        self._write_rows(0, self._changes())
        if self.writer is not None:
            write(self.writer)
        if self.comm.member is not None:
            self._most(0)  # waits for that rank
            if any(self._writer in change.lost for change in self.trainer.handle.changes[self._num_changes :]):
                self._write_last(write)

    def _evaluation_model(self) -> nn.Module:
        run = self.config.run
        return self.trainer.evaluation_model(run.evaluation_batch_norm, run.recalibration_batches)

    def _end(self) -> None:
        model, test = self._evaluation_model(), None
        if self.config.run.evaluate_on == "validation" and not self.progress.diverged:
            test = self.trainer.evaluate(model, "test")
        self._write_last(lambda writer: self._write_end(writer, model, test))

    def _write_end(self, writer: RunWriter, model: nn.Module, test: Evaluation | None) -> None:
        progress, best = self.progress, self.progress.best or {}
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if self.config.run.save_nonfinite or is_finite(tensors.values()):
            replace_file(writer.path.with_name(MODEL), load_safetensors().torch.save(tensors))
        row = {
            "kind": "end", "step": self.trainer.num_steps,
            "diverged": progress.diverged, "diverged_reason": progress.reason, "accuracy": progress.accuracy,
            "best_accuracy": best.get("accuracy"), "best_epoch": best.get("epoch"),
            "test": None if test is None else test.to_dict(),
            **self._flatness(model), "total_seconds": progress.total_seconds,
        }  # fmt: skip
        writer.write(row)

    def _flatness(self, model: nn.Module) -> dict[str, Any]:
        """Columns of the last row: the flatness, or the reason why it is missing although the config requests it."""
        run, flat, reason = self.config.run, None, None
        if run.flatness_samples and self.progress.diverged:
            reason = "the run diverged"
        elif run.flatness_samples:
            try:
                flat = flatness_of(model, self.trainer.dataset, num_samples=run.flatness_samples, seed=run.seed)
            except Exception as error:  # no error of this kind may lose the finished training
                reason = f"{type(error).__name__}: {error}"
        return {"flatness": flat, "flatness_reason": reason}

    def _save(self, progress: dict[str, Any] | None = None) -> bool:
        """Save a checkpoint, unless a number on any rank is not finite, so that good ones stay. Collective.

        At the end of an epoch with the ``progress`` before it. So a run that resumes there ends the epoch again, or
        goes on with it if the run is longer now.
        """
        members, is_saved = tuple[int, ...](), False
        with self._paused():
            while self.checkpoints.members != members:  # again after a death, because the state depends on who is left
                members = self.checkpoints.members
                is_saved = self._try_to_save(members, progress)
        return is_saved

    def _try_to_save(self, members: tuple[int, ...], progress: dict[str, Any] | None) -> bool:
        if (live := getattr(self.trainer.handle.learner, "live", None)) is not None:
            live.settle()  # else slower ranks still average with the row that a faster one saves
        state = self.trainer.state_dict()
        if not self.config.run.save_nonfinite and self._most(not is_finite(tensors_of(state))):
            if self.writer is not None:
                warn(f"step {self.trainer.num_steps}: not finite, so no checkpoint is written")
            return False
        if self.checkpoints.members != members:
            return False
        # A run that resumes here does not compute these records again, so older events must stand before them.
        raises = self.config.strategy.on_nonfinite == "raise"
        self._write_rows(0 if raises else self._most(len(self.trainer.handle.nonfinite)))
        if self.writer is not None:
            self.writer.sync()  # a checkpoint must not be newer than the record
        if self.steps is not None:
            self.steps.flush(to_disk=True)
        state |= {"progress": progress or self.progress.state_dict(), "statistics": self.measured.state_dict()}
        best = self.progress.best if self.config.run.keep_best else None
        kept = None if best is None else best["step"]
        self.checkpoints.save(self.trainer.num_steps, state, keep_last=self.config.run.keep_last, best=kept)
        return True

    def _most(self, number: int) -> int:
        """The largest number of any rank. Collective."""
        mine_L = torch.full((len(self.comm.learners),), float(number), dtype=torch.float32, device="cpu")
        return int(self.comm.gather(mine_L.to(self.placement.device)).max())

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The time inside does not count as training."""
        if self.placement.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.epoch_seconds += self.comm.now() - self._resumed_at
        yield
        self._resumed_at = self.comm.now()
        if self.steps is not None:
            self.steps.resume()
