"""Checkpoints that are whole or not there: a folder a step, two files a process, and a manifest with checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ddpcore.storage.files import sync_folder, write_file
from ddpcore.storage.serialization import pack, unpack

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run, ``folder/step-00000123``, which every process of the run can read and write.

    Each process writes its tensors as safetensors and all else as JSON into a folder of another name, which gets its
    own once everything is on the disk. Nothing is unpickled on load.

    Attributes:
        folder: made when the first is saved.
        config: of the run, as plain values; kept with every checkpoint.
        rank: of this process.
        num_ranks: processes of the run.
    """

    folder: Path
    config: dict[str, Any]
    rank: int = 0
    num_ranks: int = 1

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, whole or damaged, ascending."""
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, step: int, state: Any, *, keep_last: int, best: int | None = None) -> None:
        """Write the state of this process. Collective.

        Args:
            step: the name of the checkpoint.
            state: see :func:`ddpcore.storage.serialization.pack`.
            keep_last: checkpoints that are kept, this one among them; older ones are dropped, and so are those of
                later steps, which a run that was resumed before them has left, and what a crash left half-written.
            best: the step of one more to keep.
        """
        partial = self.folder / f"partial-{step:08d}"
        if self.rank == 0:
            for left in self.folder.glob("partial-*"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        self._barrier()
        tree, tensors = pack(state)
        mine = {
            f"rank-{self.rank}.safetensors": safetensors.torch.save(tensors),
            f"rank-{self.rank}.json": json.dumps(tree).encode(),
        }
        for name, content in mine.items():
            write_file(partial / name, content)
        digests: list[Any] = [{name: _digest(content) for name, content in mine.items()}]
        if self.num_ranks > 1:
            digests = [None] * self.num_ranks
            dist.all_gather_object(digests, {name: _digest(content) for name, content in mine.items()})
        if self.rank == 0:
            files = {name: digest for one in digests for name, digest in one.items()}
            manifest = {
                "format": FORMAT,
                "step": step,
                "num_ranks": self.num_ranks,
                "config": self.config,
                "files": files,
            }
            text = json.dumps({"manifest": manifest, "sha256": _digest(_canonical(manifest))}, indent=1)
            write_file(partial / MANIFEST, text.encode())
            sync_folder(partial)
            shutil.rmtree(self.path(step), ignore_errors=True)
            partial.rename(self.path(step))
            sync_folder(self.folder)
            kept = {*[other for other in self.steps() if other <= step][-keep_last:], best}
            for other in set(self.steps()) - kept:
                shutil.rmtree(self.path(other))

    def load_last(self, device: torch.device | str, say: Callable[[str], None]) -> tuple[int, Any] | None:
        """Step and state of the last whole checkpoint; None where there is none at all. Collective.

        Damaged ones after it get another name, ``damaged-00000123``, and count no more.

        Args:
            device: for tensors that were on an accelerator.
            say: called with one line for each damaged checkpoint that is passed over.

        Raises:
            ValueError: all are damaged, or the last whole one is of another number of processes.
        """
        found = -1
        steps = self.steps()
        if self.rank == 0:
            for step in reversed(steps):
                problem = self._problem(step)
                if problem is None:
                    found = step
                    break
                then = "there is none before it" if step == steps[0] else "taking the one before it"
                say(f"checkpoint {self.path(step)} is damaged ({problem}): {then}")
            for step in (step for step in steps if 0 <= found < step):
                damaged = self.folder / f"damaged-{step:08d}"
                shutil.rmtree(damaged, ignore_errors=True)
                self.path(step).rename(damaged)
        if self.num_ranks > 1:
            answer: list[Any] = [found, steps]
            dist.broadcast_object_list(answer, src=0)
            found, steps = answer
        if found < 0:
            if steps:
                raise ValueError(
                    f"{self.folder}: every checkpoint is damaged: remove {self.folder.parent} to begin anew"
                )
            return None
        manifest = self.manifest(found)
        if manifest["num_ranks"] != self.num_ranks:
            raise ValueError(
                f"checkpoint {self.path(found)} was written by {manifest['num_ranks']} processes and these are "
                f"{self.num_ranks}: resume with as many"
            )
        tree = json.loads((self.path(found) / f"rank-{self.rank}.json").read_bytes())
        tensors = safetensors.torch.load_file(self.path(found) / f"rank-{self.rank}.safetensors")
        return found, unpack(tree, tensors, device)

    def manifest(self, step: int) -> dict[str, Any]:
        """What a whole checkpoint says of itself: format, step, num_ranks, config, files."""
        manifest: dict[str, Any] = json.loads((self.path(step) / MANIFEST).read_bytes())["manifest"]
        return manifest

    def _problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint; None where it is whole."""
        folder = self.path(step)
        try:
            outer = json.loads((folder / MANIFEST).read_bytes())
            if outer["sha256"] != _digest(_canonical(outer["manifest"])):
                return f"{MANIFEST} does not match its checksum"
            if outer["manifest"]["format"] != FORMAT:
                return f"format {outer['manifest']['format']} where this version reads {FORMAT}"
            for name, digest in outer["manifest"]["files"].items():
                if _digest((folder / name).read_bytes()) != digest:
                    return f"{name} does not match its checksum"
            for path in folder.glob("*.safetensors"):
                with safetensors.safe_open(path, framework="pt"):
                    pass
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()
