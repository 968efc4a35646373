"""Downloads of the canonical files, from their authors or torchvision's mirror."""

import tarfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddpcore.data import cifar, mnist
from ddpcore.options.extras import extra
from ddpcore.storage.files import CIFAR_BYTES, plain, replace_file


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to download. An archive is unpacked, too, into the files of the first of the layouts."""

    url: str
    md5: str
    folder: str  # where it is stored, relative to data_dir
    layouts: tuple[tuple[str, ...], ...]  # lists of files relative to data_dir; one that is complete is enough


def _cifar(variant: cifar.Variant, archive: str, md5: str) -> tuple[Source, ...]:
    url = f"https://www.cs.toronto.edu/~kriz/{archive}.tar.gz"
    return (Source(url=url, md5=md5, folder="", layouts=variant.layouts),)


def _mnist(name: str, md5: str) -> Source:
    url, folder = f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", "MNIST/raw"
    return Source(url=url, md5=md5, folder=folder, layouts=((f"{folder}/{name}",), (f"{folder}/{name}.gz",)))


_MNIST = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
SOURCES = {
    "mnist": tuple(_mnist(*pair) for pair in zip(mnist.FILES, _MNIST, strict=True)),
    "cifar10": _cifar(cifar.CIFAR10, "cifar-10-python", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": _cifar(cifar.CIFAR100, "cifar-100-python", "eb9058c3a382ffc7106e4002c42a8d85"),
}


def download(name: str, data_dir: str | Path) -> None:
    """Download the files of a data set that data_dir does not hold yet, check their MD5 and unpack them.

    MissingPackage: pooch is not installed. ValueError: a file cannot be downloaded or has another MD5.
    """
    root = Path(data_dir)
    for source in SOURCES[name]:
        if any(all((root / file).exists() for file in layout) for layout in source.layouts):
            continue
        with extra("train"):
            import pooch  # noqa: PLC0415  only downloads need it
        folder, file = root / source.folder, source.url.rpartition("/")[2]
        try:
            archive = pooch.retrieve(source.url, f"md5:{source.md5}", fname=file, path=folder)
            if file.endswith(".tar.gz"):
                _unpack(Path(archive), folder, source.layouts[0])
        except (OSError, ValueError, EOFError, zlib.error, tarfile.TarError) as error:  # requests' are OSErrors
            reason = plain((str(error).splitlines() or [type(error).__name__])[0])
            raise ValueError(f"{source.url}: cannot be fetched ({reason}), try again or fetch it by hand") from error


def _unpack(archive: Path, folder: Path, names: Collection[str]) -> None:
    """Unpack the members with these names, which must be files, and nothing else: a member cannot choose its place."""
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            if member.name in names and member.isreg() and member.size <= CIFAR_BYTES:
                content = members.extractfile(member)
                assert content is not None, "a file has a content"
                (folder / member.name).parent.mkdir(exist_ok=True)
                replace_file(folder / member.name, content.read())
