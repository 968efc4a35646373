"""What is fuzzed: each function takes any bytes, reads them as a file from a stranger, and raises only for a defect.

ValueError with one printable line is the right answer to damage. ``fuzz.py`` runs these functions, and
``test_corpus.py`` replays the inputs that it found.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ddpcore.data import features, mnist
from ddpcore.experiments.study import load_study
from ddpcore.records.surface import read_surface
from ddpcore.storage.files import read_packed
from ddpcore.storage.json_lines import read_lines
from ddpcore.training.checkpoint import Checkpoints

MAX_BYTES = 2**20  # of a file, unpacked: small, so that a fuzzer finds what exceeds it
TEMPORARY = tempfile.TemporaryDirectory(prefix="ddpcore-fuzz-")  # it goes with the last reference
FOLDER = Path(TEMPORARY.name)


def refuses(read: Callable[[], object]) -> None:
    """Read, and check a refusal."""
    try:
        read()
    except ValueError as error:
        assert str(error).isprintable(), f"the message is not one printable line: {error!r}"


def written(name: str, content: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(content)
    return path


def idx(content: bytes) -> None:
    refuses(lambda: mnist._parse(Path("images"), content, mnist._IMAGES_MAGIC, (28, 28)))
    refuses(lambda: mnist._parse(Path("labels"), content, mnist._LABELS_MAGIC, ()))


def gzip(content: bytes) -> None:
    path = written("file.gz", content)
    refuses(lambda: read_packed(path.with_suffix(""), "advice", MAX_BYTES))


def npz(content: bytes) -> None:
    path = written("features.npz", content)
    refuses(lambda: features._read(path, MAX_BYTES, 0, None))


def surface(content: bytes) -> None:
    refuses(lambda: read_surface(written("surface.h5", content)))


def toml(content: bytes) -> None:
    refuses(lambda: load_study(written("study.toml", content)))


def record(content: bytes) -> None:
    refuses(lambda: read_lines(written("record.jsonl", content)))


def checkpoint(content: bytes) -> None:
    """The first byte chooses which file the rest is; the manifest fits the other files unless it is chosen."""
    shutil.rmtree(FOLDER / "checkpoints", ignore_errors=True)
    folder = FOLDER / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    chosen, content = content[:1], content[1:]
    files = {
        "rank-0.safetensors": content if chosen == b"s" else _safetensors(),
        "rank-0.json": content if chosen == b"j" else b'{"a":{"__tensor__":".a","shape":[2],"stride":[1],"on":"cpu"}}',
    }
    for name, one in files.items():
        (folder / name).write_bytes(one)
    digests = {name: hashlib.sha256(one).hexdigest() for name, one in files.items()}
    manifest = {"format": 2, "step": 1, "num_ranks": 1, "config": {}, "files": digests}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    whole = json.dumps({"manifest": manifest, "sha256": digest}).encode()
    (folder / "manifest.json").write_bytes(content if chosen == b"m" else whole)
    lines: list[str] = []
    refuses(lambda: Checkpoints(folder=folder.parent, config={}).load_last("cpu", lines.append))
    assert all(line.isprintable() for line in lines), lines


def _safetensors() -> bytes:
    header = json.dumps({".a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + np.ones(2, np.float32).tobytes()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "idx": idx,
    "gzip": gzip,
    "npz": npz,
    "surface": surface,
    "toml": toml,
    "record": record,
    "checkpoint": checkpoint,
}
