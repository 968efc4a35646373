"""Writes the first inputs of each target: small whole files, and files that once were read wrong."""

from __future__ import annotations

import gzip
import io
import json
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


def npz(compress: bool) -> bytes:
    file = io.BytesIO()
    arrays = {"inputs": np.zeros((2, 1, 2), np.float32), "labels": np.array([0, 1])}
    (np.savez_compressed if compress else np.savez)(file, **arrays)
    return file.getvalue()


def npz_of_header(shape: str) -> bytes:
    """A header that claims more than follows."""
    file = io.BytesIO()
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inputs.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    return file.getvalue()


def surface(**how: object) -> bytes:
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        out["xcoordinates"], out["ycoordinates"] = np.arange(2.0), np.arange(3.0)
        out.create_dataset("train_loss", **(how or {"data": np.ones((3, 2))}))
        out.attrs["mark a\n"] = "b" if how else (0.0, 1.0)
    return file.getvalue()


def corpus() -> dict[str, dict[str, bytes]]:
    study = b'title = "a"\nquestion = "b"\nsource = "c"\nmetrics = ["error_pct"]\n[shared]\nepochs = 1\n[rows.first]\n'
    idx = struct.pack(">IIII", 2051, 1, 28, 28) + bytes(784)
    tree = json.dumps({"a": {"__tensor__": ".a", "shape": [2], "stride": [1], "on": "cpu"}, "b": {"__tuple__": [1]}})
    tensors = json.dumps({".a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return {
        "idx": {"images": idx, "labels": struct.pack(">II", 2049, 2) + b"\x00\x01", "claims": idx[:4] + b"\xff" * 12},
        "gzip": {"whole": gzip.compress(idx, mtime=0), "bomb": gzip.compress(bytes(3 << 20), mtime=0)},
        "npz": {"plain": npz(False), "deflated": npz(True), "claims": npz_of_header("(1500000000, 1, 1)")},
        "surface": {
            "plain": surface(),
            "elsewhere": surface(shape=(3, 2), dtype="f8", external=[("/etc/hostname", 0, 48)]),
            "claims": surface(shape=(30_000, 20_000), dtype="f8"),
            "chunks": surface(data=np.ones((3, 2)), chunks=(3, 2), compression="gzip"),
        },
        "toml": {"study": study, "dots": b"a." * 3000 + b"b = 1\n", "seeds": b"seeds = 100000000\n" + study},
        "record": {"lines": b'{"kind": "run", "config": {}}\n{"kind": "epoch", "step": 1}\n', "deep": b"[" * 3000},
        "checkpoint": {
            "json": b"j" + tree.encode(),
            "tensors": b"s" + struct.pack("<Q", len(tensors)) + tensors + bytes(8),
            "outside": b'm{"manifest": {"format": 2, "files": {"../../dev/zero": ""}}, "sha256": ""}',
            "expands": b'j{"a": {"__tensor__": ".a", "shape": [1000000000000], "stride": [0], "on": "cpu"}}',
            "deep": b"j" + b"[" * 3000,
        },
    }


def main() -> int:
    for target, inputs in corpus().items():
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
