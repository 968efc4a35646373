"""Downloads from a server in this process: fetched once, checked, unpacked, and each failure one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ddpcore.data import DATASETS, cifar, download, load_dataset, mnist

FILES: dict[str, bytes] = {}
REQUESTS: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        REQUESTS.append(name)
        self.send_response(200 if name in FILES else 404)
        self.send_header("Content-Length", str(len(FILES.get(name, b""))))
        self.end_headers()
        self.wfile.write(FILES.get(name, b""))

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every source of every set, from here, with small files of the same names, which are the canonical ones."""
    pytest.importorskip("pooch")
    FILES.clear()
    REQUESTS.clear()
    images = struct.pack(">IIII", 2051, 2, 28, 28) + bytes(2 * 784)
    for name in mnist.FILES:
        plain = images if "images" in name else struct.pack(">II", 2049, 2) + bytes([3, 4])
        FILES[f"{name}.gz"] = gzip.compress(plain)
    FILES["cifar-10-python.tar.gz"] = archive(cifar.CIFAR10)
    FILES["cifar-100-python.tar.gz"] = archive(cifar.CIFAR100)
    for name in ("CIFAR10", "CIFAR100"):
        variant = getattr(cifar, name)
        md5s = dict.fromkeys(variant.md5, hashlib.md5(pickled(variant)).hexdigest())
        monkeypatch.setattr(cifar, name, replace(variant, md5=md5s))
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    for name, sources in list(download.SOURCES.items()):
        local = []
        for source in sources:
            file = source.url.rpartition("/")[2]
            md5 = hashlib.md5(FILES[file]).hexdigest()
            local.append(replace(source, url=f"http://127.0.0.1:{httpd.server_port}/{file}", md5=md5))
        monkeypatch.setitem(download.SOURCES, name, tuple(local))
    yield
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def pickled(variant: cifar.Variant) -> bytes:
    return pickle.dumps({"data": np.zeros((2, 3072), dtype=np.uint8), variant.label_key: [1, 2]}, protocol=2)


def archive(variant: cifar.Variant) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in (*variant.train, variant.test):
            content = pickled(variant)
            member = tarfile.TarInfo(f"{variant.python_folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize(("name", "num_files"), [("mnist", 4), ("cifar10", 1), ("cifar100", 1)])
def test_download_then_read_and_never_again(tmp_path: Path, server: None, name: str, num_files: int) -> None:
    with pytest.raises(ValueError, match=r"no such file|holds neither"):
        load_dataset(name, data_dir=tmp_path)
    assert REQUESTS == [], "nothing is fetched unasked"
    folder = tmp_path / "made" / "here"
    built = load_dataset(name, data_dir=folder, download=True, verify=False)
    assert built.test is not None and len(built.test) == 2
    assert len(REQUESTS) == num_files
    load_dataset(name, data_dir=folder, download=True, verify=False)
    assert len(REQUESTS) == num_files, "what is there is not fetched again"


def test_only_what_is_missing_is_fetched(tmp_path: Path, server: None) -> None:
    download.download("mnist", tmp_path)
    packed = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    REQUESTS.clear()
    download.download("mnist", tmp_path)
    assert REQUESTS == ["train-labels-idx1-ubyte.gz"]
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for path in cifar.CIFAR10.layouts[1]:
        (tmp_path / path).touch()
    download.download("cifar10", tmp_path)
    assert len(REQUESTS) == 1, "the binary layout will do"


def test_half_a_folder_is_made_whole(tmp_path: Path, server: None) -> None:
    download.download("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    assert len(load_dataset("cifar10", data_dir=tmp_path, download=True, verify=False).train) == 10


def test_a_file_with_another_sum_or_none_at_all_is_one_line(tmp_path: Path, server: None) -> None:
    FILES["cifar-10-python.tar.gz"] += b"\0"
    del FILES["train-images-idx3-ubyte.gz"]
    for name, url in (("cifar10", "cifar-10-python.tar.gz"), ("mnist", "train-images-idx3-ubyte.gz")):
        with pytest.raises(ValueError, match=f"{url}: cannot be fetched") as caught:
            load_dataset(name, data_dir=tmp_path, download=True)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "cifar-10-batches-py").exists(), "nothing of it was unpacked"


def test_an_archive_writes_only_the_files_of_its_data_set(tmp_path: Path, server: None) -> None:
    """Members outside the folder, links and devices are left out, whatever names they have."""
    variant, packed = cifar.CIFAR10, io.BytesIO(gzip.decompress(archive(cifar.CIFAR10)))
    first, second = (f"{variant.python_folder}/{name}" for name in variant.train[:2])
    with tarfile.open(fileobj=packed, mode="a") as tar:
        for name in ("../evil", f"{variant.python_folder}/../../evil", str(tmp_path / "evil"), "evil"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        for name, kind, target in (
            (first, tarfile.SYMTYPE, "/etc/passwd"),
            (second, tarfile.LNKTYPE, "../../evil"),
            (variant.python_folder, tarfile.SYMTYPE, "/tmp"),
            (first, tarfile.FIFOTYPE, ""),
            (first, tarfile.CHRTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    file = "cifar-10-python.tar.gz"
    FILES[file] = gzip.compress(packed.getvalue())
    (source,) = download.SOURCES["cifar10"]
    download.SOURCES["cifar10"] = (replace(source, md5=hashlib.md5(FILES[file]).hexdigest()),)
    root = tmp_path / "one" / "two"
    assert len(load_dataset("cifar10", data_dir=root, download=True, verify=False).train) == 10
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert found == {f"one/two/{name}" for name in (file, *variant.layouts[0])}
    assert not any(path.is_symlink() for path in root.rglob("*"))


def test_without_pooch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ValueError, match=r"^pooch is not installed: pip install 'ddpcore\[train\]'$"):
        load_dataset("cifar100", data_dir=tmp_path, download=True)


def test_sources_and_checksums_are_well_formed() -> None:
    """Every set of images has sources; a sum is 32 hexadecimal digits, and no two files share one."""
    assert set(download.SOURCES) == set(DATASETS.names()) - {
        "digits",
        "python_text",
        "synthetic",
        "synthetic_speech",
        "saddle",
        "features",
    }
    sums = [source.md5 for sources in download.SOURCES.values() for source in sources]
    sums += [mnist.MD5[name] for name in mnist.FILES] + [*cifar.CIFAR10.md5.values(), *cifar.CIFAR100.md5.values()]
    assert all(len(s) == 32 and set(s) <= set("0123456789abcdef") for s in sums)
    assert len(set(sums)) == len(sums) == 4 + 2 + 4 + 6 + 2
    assert all(source.url.startswith("https://") for sources in download.SOURCES.values() for source in sources)
