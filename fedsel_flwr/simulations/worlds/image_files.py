"""Image files: scikit-learn's digits, and the image sets of torchvision from a folder, an archive or the network.

Inputs that another process has sent come first: data sets and files, for a node of a Ray cluster without them. The
process that starts the runs reads each data set once. The nodes get it through Ray's object store, and small files next
to the code of this package. A run on a node therefore needs no data folder.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import socket
import tarfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

import fedsel_flwr
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError

Read = TypeVar("Read")
SENT_FILES = "fedsel_sent_files"
"""Folder of the sent files, next to the folder of this package."""


SENT_INPUTS: dict[str, Callable[[], Any]] = {}
"""Name of an input that another process has sent -> function that returns it; empty unless on a node of a cluster."""


def sent_or_read(name: str, read: Callable[[], Read]) -> Read:
    """Return the sent input with a name; if there is none, read it here.

    >>> sent_or_read("digits", lambda: 3)
    3
    """
    return cast(Read, SENT_INPUTS.get(name, read)())


def sent_file(path: str) -> Path:
    """Return where a file has arrived on this node, if it was sent.

    Args:
        path: The path that the scenario names.
    """
    name = hashlib.sha256(path.encode()).hexdigest()[:16]
    return Path(fedsel_flwr.__file__).resolve().parent.parent / SENT_FILES / name


def without_gaps(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """Return an array in the order of its memory, and the order of axes that turns it back.

    Pickles lose the order in memory, on which the rounding of later sums depends.

    >>> turned, axes = without_gaps(np.zeros((2, 4, 5, 3)).transpose(0, 3, 1, 2))
    >>> turned.shape, turned.transpose(axes).shape, turned.transpose(axes).strides
    ((2, 4, 5, 3), (2, 3, 4, 5), (480, 8, 120, 24))
    """
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return array.transpose(order), tuple(int(axis) for axis in np.argsort(order))


logger = logging.getLogger("fedsel_flwr")
Examples = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]

DATA_DIR_VARIABLE = "FEDSEL_DATA"
"""Environment variable with the path of the data folder."""
_DOWNLOAD_TIMEOUT_S = 30.0
"""Seconds without data after which a download fails. Without a limit, a firewall that drops packets would block it."""
_LARGEST_FILE = 2**26
"""Most bytes of a file in an archive. The largest original file has 31 MB; a larger one is not read into memory."""


@dataclass(frozen=True)
class ImageSet:
    """Image set of torchvision.

    Args:
        torchvision_name: Name of the class in `torchvision.datasets`.
        expected_file: One of its files, relative to the data folder. Messages name it if it is missing.
        shape: The shape of one image (channels, height, width).
        mean: The usual mean of the training pixels in [0, 1], one per channel.
        std: The usual standard deviation of the training pixels, one per channel.
        split: The torchvision split to read, for a set with several splits.
        transposed: Whether the files store the images transposed.
        archives: Names of archives in the data folder that may hold the files.
    """

    torchvision_name: str
    expected_file: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    split: str = ""
    transposed: bool = False
    archives: tuple[str, ...] = ()


IMAGE_SETS = {
    "mnist": ImageSet("MNIST", "MNIST/raw/train-images-idx3-ubyte", (1, 28, 28), (0.1307,), (0.3081,)),
    "fashion-mnist": ImageSet(
        "FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte", (1, 28, 28), (0.2860,), (0.3530,)
    ),
    "emnist": ImageSet(
        "EMNIST", "EMNIST/raw/emnist-balanced-train-images-idx3-ubyte", (1, 28, 28), (0.1751,), (0.3332,),
        split="balanced", transposed=True,
    ),
    "cifar-10": ImageSet(
        "CIFAR10", "cifar-10-batches-py/data_batch_1", (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        archives=("cifar-10-python.tar.gz", "cifar-10.tar.xz"),
    ),
}  # fmt: skip
"""Names in scenarios -> image sets of torchvision."""


def read_digits() -> Examples:
    """Read scikit-learn's 1,797 handwritten digits.

    Returns:
        Pixels in [0, 1], float32 of shape (1797, 1, 8, 8), and labels of shape (1797,).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # The pixels in the files are 0 … 16.
    return (bunch.images[:, np.newaxis] / 16).astype(np.float32), bunch.target.astype(np.int64)


def find_data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Find the folder with the image sets.

    Args:
        data_dir: The folder. If None, the folder in FEDSEL_DATA, or a cache folder in the home directory if the
            variable is not set.

    Returns:
        The folder. It exists, unless it is the cache folder.

    Raises:
        ParameterError: The named folder does not exist.
    """
    named = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not named:
        return Path.home() / ".cache" / "fedsel-flwr"
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = "--data-dir" if data_dir else DATA_DIR_VARIABLE
        raise ParameterError(
            f"the data folder {folder} (from {origin}) does not exist or is not a folder. Name an existing folder "
            f"with --data-dir or {DATA_DIR_VARIABLE}, or leave both out to download into a cache folder."
        )
    return folder


def find_file(path: str, *, key: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """Find a file of a scenario by an absolute path, or relative to the working directory or the data folder.

    Args:
        path: The path.
        key: The scenario's key that holds the path, for messages.
        data_dir: The data folder. If None, the folder in FEDSEL_DATA.

    Returns:
        The path of the file.

    Raises:
        ParameterError: There is no such file, it is a folder, or the named data folder does not exist.
    """
    # First, because a node may have another file at the same path.
    if (sent := sent_file(path)).is_file():
        return sent
    named = Path(path).expanduser()
    if named.is_dir():
        raise ParameterError(f"{key} {path!r} is a folder. Give the path of a CSV file.")
    if named.is_absolute() or named.exists():
        return named
    folder = find_data_folder(data_dir)
    if not (folder / named).exists():
        raise ParameterError(
            f"cannot read {key} {path!r}: the file is neither in the working directory nor in the data folder "
            f"{folder}. Name the folder that holds it with --data-dir or {DATA_DIR_VARIABLE}, or give its full path."
        )
    return folder / named


def has_image_set(name: str, folder: Path) -> bool:
    """Return whether a folder contains an image set, as files or as an archive.

    Args:
        name: A key of :data:`IMAGE_SETS`.
        folder: The folder.
    """
    source = IMAGE_SETS[name]
    return (folder / source.expected_file).is_file() or _find_archive(source, folder) is not None


def read_image_set(name: str, folder: Path) -> tuple[Examples, Examples]:
    """Read an image set of torchvision; download it first if the folder contains neither its files nor its archive.

    An archive is unpacked once, into the user's cache folder. Nothing is written into ``folder`` then.

    Args:
        name: A key of :data:`IMAGE_SETS`.
        folder: The folder of the files, or the folder to download them to.

    Returns:
        The training and the test examples: uint8 pixels of shape (n, channels, height, width), and labels of shape
        (n,).

    Raises:
        ParameterError: The files are missing and cannot be downloaded, or are damaged. Also raised if an archive is
            damaged or cannot be unpacked.
    """
    from torchvision import datasets

    source = IMAGE_SETS[name]
    torchvision_set = getattr(datasets, source.torchvision_name)
    if archive := _find_archive(source, folder):
        folder = _unpack(archive, torchvision_set)
    try:
        train, test = (_read_half(torchvision_set, source, folder, train=train) for train in (True, False))
        return train, test
    except (OSError, RuntimeError) as problem:
        raise ParameterError(
            f"{name} was not found complete in the data folder {folder} (expected {folder / source.expected_file} and "
            f"its companions{''.join(f' or {one}' for one in source.archives)}), and the download failed "
            f"({textwrap.shorten(str(problem), 160, placeholder=' …')}). "
            f"Name the folder that holds the files with --data-dir or {DATA_DIR_VARIABLE}, or connect to the network."
        ) from problem
    # If a file is truncated, torchvision raises errors of assertions, unpickling or reshaping.
    except Exception as problem:
        raise ParameterError(
            f"the files of {name} in the data folder {folder} (such as {folder / source.expected_file}) are damaged "
            f"({type(problem).__name__}: {problem}). Delete them, so that they are downloaded again."
        ) from problem


def _find_archive(source: ImageSet, folder: Path) -> Path | None:
    """Return the archive to unpack; None if there is no archive, or if the folder with the files exists."""
    if (folder / source.expected_file).parent.exists():
        return None
    return next((folder / name for name in source.archives if (folder / name).is_file()), None)


def _unpack(archive: Path, torchvision_set: Any) -> Path:
    """Unpack an archive into the user's cache folder, if this has not been done before.

    Returns:
        The folder with the unpacked files, in the layout of torchvision.
    """
    # Not into the data folder, which may belong to somebody else. A changed archive gets another folder.
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fedsel-flwr"
    state = archive.stat()
    unpacked = cache / f"{archive.name}-{state.st_size}-{state.st_mtime_ns}"
    if unpacked.is_dir():
        return unpacked
    logger.info("Unpacking %s into %s", archive, unpacked)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unpacking-", dir=cache) as temporary:
            complete = Path(temporary) / "complete"
            _extract(archive, torchvision_set, complete)
            # The folder gets its name last, so that no process sees a part of the files. If another process was
            # faster, its folder has the same files.
            try:
                complete.rename(unpacked)
            except OSError:
                if not unpacked.is_dir():
                    raise
    except ParameterError:
        raise
    # A damaged archive raises errors of tarfile and of each compression, and a full disk raises OSError.
    except Exception as problem:
        raise ParameterError(
            f"{archive} cannot be unpacked into {cache} ({type(problem).__name__}: {problem}). If the archive is "
            "damaged, replace it. Otherwise set XDG_CACHE_HOME to a folder with 200 MB of free space."
        ) from problem
    return unpacked


def _extract(archive: Path, torchvision_set: Any, folder: Path) -> None:
    """Extract the files that torchvision expects, and no others, from an archive into a new folder."""
    digests = dict([*torchvision_set.train_list, *torchvision_set.test_list])
    digests[torchvision_set.meta["filename"]] = torchvision_set.meta["md5"]
    target = folder / torchvision_set.base_folder
    target.mkdir(parents=True)
    with tarfile.open(archive) as members:
        for member in members:
            parent, _, name = member.name.removeprefix("./").rpartition("/")
            # The paths of an archive from a stranger may lead out of the folder, so only known names are used. Links
            # and other special members are no regular files.
            if parent != torchvision_set.base_folder or name not in digests or not member.isreg():
                continue
            if member.size <= _LARGEST_FILE and (file := members.extractfile(member)):
                content = file.read()
                if hashlib.md5(content, usedforsecurity=False).hexdigest() == digests[name]:
                    (target / name).write_bytes(content)
                    del digests[name]
            # The rest of the archive is not decompressed.
            if not digests:
                return
    raise ParameterError(
        f"the archive {archive} does not contain the original {', '.join(digests)}. Replace it by the archive "
        f"{torchvision_set.url}, or delete it so that the data set is downloaded."
    )


def _read_half(torchvision_set: Any, source: ImageSet, folder: Path, *, train: bool) -> Examples:
    """Read the training or the test half; download it first if it is not in the folder."""
    which: dict[str, Any] = {"split": source.split} if source.split else {}
    with warnings.catch_warnings():
        # The files of CIFAR-10 are pickles from an old version of NumPy.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        # First without download=True, so that a complete folder is never written to. "Not found" is a RuntimeError.
        try:
            loaded = torchvision_set(os.fspath(folder), train=train, **which)
        except RuntimeError:
            with contextlib.ExitStack() as after:
                # torchvision downloads with urllib, and sets no timeout.
                after.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
                socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)
                loaded = torchvision_set(os.fspath(folder), train=train, download=True, **which)
    pixels, labels = np.asarray(loaded.data), np.asarray(loaded.targets, dtype=np.int64)
    pixels = pixels[:, np.newaxis] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    if source.transposed:
        pixels = pixels.swapaxes(2, 3)
    if pixels.shape[1:] != source.shape or len(pixels) != len(labels):
        raise ValueError(
            f"{len(pixels)} images of shape {pixels.shape[1:]} and {len(labels)} labels, not of {source.shape}"
        )
    return pixels, labels


def read_writers(folder: Path) -> tuple[IntArray, IntArray]:
    """Read the digit and the writer of each training image of MNIST from the extended labels of QMNIST.

    Args:
        folder: The folder of the image sets, which contains ``QMNIST/raw``.

    Returns:
        Digits and writer ids, int64 of shape (60000,), in the order of MNIST's files.

    Raises:
        ParameterError: The file with the extended labels is missing or damaged.

    References:
        C. Yadav and L. Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.
    """
    from torchvision.datasets import QMNIST

    url = QMNIST.resources["train"][1][0]
    packed = folder / "QMNIST" / "raw" / url.rpartition("/")[2]
    paths = [path for path in (packed, packed.with_suffix("")) if path.is_file()]
    if not paths:
        raise ParameterError(
            f"the writers of MNIST's images are in the file {packed}, which does not exist. Copy {url} to this path, "
            f"or name the folder that contains QMNIST/raw with --data-dir or {DATA_DIR_VARIABLE}."
        )
    try:
        content = gzip.decompress(paths[0].read_bytes()) if paths[0] == packed else paths[0].read_bytes()
        table = np.frombuffer(content, ">i4", offset=12).reshape(-1, 8)
        # The header: 32-bit integers in two dimensions, and the two sizes.
        if np.frombuffer(content, ">i4", count=3).tolist() != [0xC02, *table.shape]:
            raise ValueError("the header does not fit the content")
    except Exception as problem:
        raise ParameterError(
            f"{paths[0]} is damaged ({type(problem).__name__}: {problem}). Copy {url} again."
        ) from problem
    return table[:, 0].astype(np.int64), table[:, 2].astype(np.int64)
