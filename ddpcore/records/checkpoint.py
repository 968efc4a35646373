"""The checkpoints of a run: names of folders and files, and the manifest of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ddpcore.storage.limits import read_file

FORMAT = 2
MANIFEST = "manifest.json"
FILES = re.compile(r"rank-[0-9]+\.(safetensors|json)")  # so a manifest names no file outside its folder


def step_folder(checkpoints: Path, step: int, state: str = "step") -> Path:
    """The folder of a step. ``state``: ``step`` if it is complete, else ``partial``, ``replaced`` or ``damaged``."""
    return checkpoints / f"{state}-{step:08d}"


def steps_of(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint, complete or damaged, in ascending order."""
    found = (re.fullmatch("step-([0-9]{8,})", path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def rank_files(rank: int | str) -> tuple[str, str]:
    """The names of the two files of a rank: its tensors, and everything else; ``*`` stands for all ranks."""
    return f"rank-{rank}.safetensors", f"rank-{rank}.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the complete checkpoint in a folder: format, step, num_ranks, config, files."""
    manifest: dict[str, Any] = json.loads(read_file(folder / MANIFEST))["manifest"]
    return manifest
