"""Checkpoints that are complete or absent: one folder per step, two files per process, a manifest with checksums."""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpcore.comm.base import Communicator
from ddpcore.comm.groups import barrier, default_group, gather_objects
from ddpcore.comm.membership import Membership
from ddpcore.options.extras import extra
from ddpcore.records.run import FILES, FORMAT, MANIFEST, nested, rank_files, read_manifest, step_folder, steps_of
from ddpcore.storage.files import TREE_BYTES, open_file, plain, read_file, sha256_of, shown, sync_folder, write_file
from ddpcore.storage.serialization import pack, unpack

_DIGEST_BYTES = 512  # room for the names and digests of the two files of a rank


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run, ``folder/step-00000123``. Every process of the run must see the folder.

    Each process writes its tensors as safetensors, and everything else as JSON, into a folder ``partial-00000123``.
    The folder gets its final name when all files are on the disk. Until then, an earlier checkpoint of the same step is
    there as ``replaced-00000123``. It gets its name back if the process is killed in between. A folder is renamed
    before it is removed, so a folder with a final name has all of its files. Loading does not unpickle anything.

    Every checkpoint has the ``config`` of the run, as plain values. ``comm`` is the connection of ranks that may die:
    then a checkpoint has the ranks that are left, by their ids.
    """

    folder: Path
    config: dict[str, Any]
    rank: int = 0
    num_ranks: int = 1
    comm: Communicator | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ids of the processes of the run, ascending."""
        return tuple(range(self.num_ranks) if self.comm is None else self.comm.members)

    @property
    def is_first(self) -> bool:
        """Whether this process does what one does for all."""
        return self.rank == self.members[0]

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return step_folder(self.folder, step)

    def save(self, step: int, state: Any, *, keep_last: int, best: int | None = None) -> bool:
        """Write the state of this process, and keep the last checkpoints and the one of the step ``best``. Collective.

        Checkpoints of later steps, which an earlier process of a resumed run has written, and incomplete folders of a
        crash are removed. ``state`` is what :func:`ddpcore.storage.serialization.pack` takes.

        Returns:
            False if a rank died meanwhile: nothing is saved, and ``state`` is of more learners than are left.
        """
        partial, members = step_folder(self.folder, step, "partial"), self.members
        if self.is_first:
            self._clean_up()
            partial.mkdir(parents=True)
        if self.comm is not None:
            self.comm.gather(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
        elif self.num_ranks > 1:
            barrier(f"the checkpoint of step {step}")
        if self.members != members:
            return False
        tree, tensors = pack(state)
        contents = load_safetensors().torch.save(tensors), json.dumps(tree).encode()
        mine = dict(zip(rank_files(self.rank), contents, strict=True))
        for name, content in mine.items():
            write_file(partial / name, content)
        digests = self._everyone({name: hashlib.sha256(content).hexdigest() for name, content in mine.items()})
        if self.members != members:
            return False
        if self.is_first:
            self._publish(partial, step, {name: digest for one in digests for name, digest in one.items()})
            steps = steps_of(self.folder)
            for other in set(steps) - {*[one for one in steps if one <= step][-keep_last:], best}:
                self.path(other).rename(step_folder(self.folder, other, "partial"))
            self._clean_up()
        return True

    def _everyone(self, digests: dict[str, str]) -> list[dict[str, str]]:
        """The digests of all ranks that are left."""
        if self.comm is not None:
            text = json.dumps(digests).ljust(_DIGEST_BYTES).encode()
            rows = self.comm.gather(torch.tensor([list(text)], device="cpu"))
            return [json.loads(bytes(row.tolist())) for row in rows]
        return gather_objects(default_group(None), digests, "a checkpoint") if self.num_ranks > 1 else [digests]

    def _publish(self, partial: Path, step: int, files: dict[str, str]) -> None:
        manifest = {
            "format": FORMAT,
            "step": step,
            "num_ranks": len(self.members),
            **({} if self.comm is None else {"members": list(self.members)}),
            "config": self.config,
            "files": files,
        }
        text = json.dumps({"manifest": manifest, "sha256": _digest(manifest)}, indent=1)
        write_file(partial / MANIFEST, text.encode())
        sync_folder(partial)
        if self.path(step).exists():
            self.path(step).rename(step_folder(self.folder, step, "replaced"))
        partial.rename(self.path(step))
        sync_folder(self.folder)

    def _clean_up(self) -> None:
        """Give a replaced checkpoint its name back if no new one has it, and remove what else a crash has left."""
        for replaced in sorted(self.folder.glob("replaced-*")):
            final = replaced.with_name(replaced.name.replace("replaced", "step"))
            shutil.rmtree(replaced) if final.exists() else replaced.rename(final)
        for left in sorted(self.folder.glob("partial-*")):
            shutil.rmtree(left)

    def load_last(
        self, device: torch.device | str, warn: Callable[[str], None], *, moves: bool = False
    ) -> tuple[int, Any] | None:
        """Step and state of the last complete checkpoint; None if there is no checkpoint. Collective.

        Damaged checkpoints after it are renamed to ``damaged-00000123`` and no longer count. ``warn`` gets one line for
        each of them. Tensors that were on an accelerator go to the device. With ``moves`` the run may have had another
        number of learners. Then the state is a list, of all processes that have written the checkpoint. ValueError: all
        are damaged, or, without ``moves``, another number of processes has written the last complete one.
        """
        found, steps = -1, []
        if self.is_first:
            self._clean_up()
            steps = steps_of(self.folder)
            found = self._find_last(steps, warn)
        if self.num_ranks > 1:
            found, steps = gather_objects(default_group(None), (found, steps), "the search for the last checkpoint")[0]
        if found < 0 and steps:
            raise ValueError(f"{shown(self.folder.parent)}: every checkpoint is damaged: remove it to begin anew")
        if found < 0:
            return None
        manifest = read_manifest(self.path(found))
        members = tuple(manifest.get("members", range(manifest["num_ranks"])))
        if moves and _num_learners(manifest["config"]) != _num_learners(self.config):
            return found, [self._load(found, member, device) for member in members]
        if members != self.members:
            which = f", of learners {list(members)}," if len(members) == len(self.members) else ""
            what = f"checkpoint {shown(self.path(found))} was written by {len(members)} processes{which}"
            raise ValueError(f"{what} and these are {len(self.members)}: resume with as many")
        return found, self._load(found, self.rank, device)

    def _load(self, step: int, rank: int, device: torch.device | str) -> Any:
        try:
            of_tensors, of_tree = (self.path(step) / name for name in rank_files(rank))
            tree = json.loads(read_file(of_tree, TREE_BYTES, "ddpcore.storage.files.TREE_BYTES"))
            return unpack(tree, load_safetensors().torch.load_file(of_tensors), device)
        except Exception as error:  # its checksums fit, so somebody has made it: any error can occur
            reason = plain((str(error).splitlines() or [""])[0]) or type(error).__name__
            raise ValueError(f"checkpoint {shown(self.path(step))} cannot be read ({reason}): remove it") from error

    def _find_last(self, steps: list[int], warn: Callable[[str], None]) -> int:
        """The last complete step, -1 if there is none; renames the damaged checkpoints after it."""
        damaged: list[int] = []
        for step in reversed(steps):
            if (problem := self._problem(step)) is None:
                for later in damaged:
                    renamed = step_folder(self.folder, later, "damaged")
                    shutil.rmtree(renamed, ignore_errors=True)
                    self.path(later).rename(renamed)
                return step
            then = "there is none before it" if step == steps[0] else "taking the one before it"
            warn(f"checkpoint {shown(self.path(step))} is damaged ({plain(problem)}): {then}")
            damaged.append(step)
        return -1

    def _problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint; None if it is complete."""
        folder, safetensors = self.path(step), load_safetensors()
        try:
            outer = json.loads(read_file(folder / MANIFEST))
            if outer["sha256"] != _digest(outer["manifest"]):
                return f"{MANIFEST} does not match its checksum"
            if outer["manifest"]["format"] != FORMAT:
                return f"format {outer['manifest']['format']} where this version reads {FORMAT}"
            for name, digest in outer["manifest"]["files"].items():
                if not FILES.fullmatch(name):
                    return f"{shown(name)} is no file of a checkpoint"
                with open_file(folder / name) as file:
                    if sha256_of(file) != digest:
                        return f"{name} does not match its checksum"
            for path in folder.glob(rank_files("*")[0]):
                open_file(path).close()
                with safetensors.safe_open(path, framework="pt"):
                    pass
        except Exception as error:  # damaged bytes can cause any error
            return f"{type(error).__name__}: {error}"
        return None


def members_left(folder: Path) -> Membership | None:
    """The members in the last checkpoint of ranks with ``on_failure="shrink"``; None of other runs, or without one."""
    for step in reversed(steps_of(folder)):
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: loading says so
            manifest = read_manifest(step_folder(folder, step))
            if "members" not in manifest:
                return None
            first = int(nested(manifest["config"])["strategy"]["learners"])
            return Membership(tuple(map(int, manifest["members"])), first)
    return None


def _num_learners(config: dict[str, Any]) -> int:
    return int(nested(config).get("strategy", {}).get("learners", 1))


def load_safetensors() -> Any:
    """The package safetensors, with its part for torch. Raises MissingPackage if it is not installed."""
    with extra("train"):
        import safetensors.torch  # noqa: PLC0415  the command must start before it can report a missing package
    return safetensors


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
