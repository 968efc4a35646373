"""Fetching the canonical files from where their makers or torchvision keep them; never without being asked to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddpcore.data import cifar, mnist

try:
    import pooch
except ImportError:  # the extra `data`: nothing but a download needs it
    pooch = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing to fetch.

    Attributes:
        folder: where it goes, relative to data_dir; an archive is unpacked there too.
        layouts: lists of files relative to data_dir; where all of one list are there, there is nothing to fetch.
    """

    url: str
    md5: str
    folder: str
    layouts: tuple[tuple[str, ...], ...]


SOURCES = {
    "mnist": tuple(
        Source(
            url=f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",
            md5=mnist.MD5[f"{name}.gz"],
            folder="MNIST/raw",
            layouts=((f"MNIST/raw/{name}",), (f"MNIST/raw/{name}.gz",)),
        )
        for name in mnist.FILES
    ),
    "cifar10": (
        Source(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            md5="c58f30108f718f92721af3b95e74349a",
            folder="",
            layouts=cifar.CIFAR10.layouts,
        ),
    ),
    "cifar100": (
        Source(
            url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            folder="",
            layouts=cifar.CIFAR100.layouts,
        ),
    ),
}


def download(name: str, data_dir: str | Path) -> None:
    """Fetch what of a data set is not in data_dir yet, check its MD5 and unpack it, laid out as `build` reads it.

    ValueError if pooch is not installed, or a file cannot be fetched or is not the canonical one.
    """
    root = Path(data_dir)
    for source in SOURCES[name]:
        if any(all((root / file).exists() for file in layout) for layout in source.layouts):
            continue
        if pooch is None:
            raise ValueError("downloading needs pooch: pip install 'ddpcore[data]', or fetch the files by hand")
        unpack = pooch.Untar(extract_dir=".") if source.url.endswith(".tar.gz") else None
        folder, file = root / source.folder, source.url.rpartition("/")[2]
        try:
            pooch.retrieve(source.url, f"md5:{source.md5}", fname=file, path=folder, processor=unpack)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            reason = str(error).splitlines()[0]
            raise ValueError(f"{source.url}: cannot be fetched ({reason}), try again or fetch it by hand") from error
