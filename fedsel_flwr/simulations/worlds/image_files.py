"""Image files: scikit-learn's digits, and torchvision's image sets from a folder or from the network."""

from __future__ import annotations

import contextlib
import os
import socket
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError

Examples = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]

DATA_DIR_VARIABLE = "FEDSEL_DATA"
"""The environment variable that names the data folder."""
_DOWNLOAD_TIMEOUT_S = 30.0
"""Seconds of silence after which a download fails: a firewall that drops packets would block it for ever."""


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """One of torchvision's image sets.

    Args:
        torchvision_name: The class in `torchvision.datasets`.
        expected_file: One of its files, relative to the data folder; named in messages if it is missing.
        shape: The shape of one image (channels, height, width).
        mean: The usual mean of the training pixels in [0, 1], one per channel.
        std: Their usual standard deviation, one per channel.
        split: The split of torchvision that is read, for a set with several splits.
        transposed: Whether the files store the images transposed.
    """

    torchvision_name: str
    expected_file: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    split: str = ""
    transposed: bool = False


IMAGE_SETS = {
    "mnist": ImageSet(
        torchvision_name="MNIST",
        expected_file="MNIST/raw/train-images-idx3-ubyte",
        shape=(1, 28, 28),
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fashion-mnist": ImageSet(
        torchvision_name="FashionMNIST",
        expected_file="FashionMNIST/raw/train-images-idx3-ubyte",
        shape=(1, 28, 28),
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "emnist": ImageSet(
        torchvision_name="EMNIST",
        expected_file="EMNIST/raw/emnist-balanced-train-images-idx3-ubyte",
        shape=(1, 28, 28),
        mean=(0.1751,),
        std=(0.3332,),
        split="balanced",
        transposed=True,
    ),
    "cifar-10": ImageSet(
        torchvision_name="CIFAR10",
        expected_file="cifar-10-batches-py/data_batch_1",
        shape=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
}
"""The scenario's name -> the set that torchvision reads."""


def read_digits() -> Examples:
    """Read scikit-learn's 1,797 handwritten digits.

    Returns:
        Pixels in [0, 1], float32 of shape (1797, 1, 8, 8), and labels of shape (1797,).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # The set's own pixels are 0 … 16.
    return (bunch.images[:, np.newaxis] / 16).astype(np.float32), bunch.target.astype(np.int64)


def find_data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Find the folder with the image sets.

    Args:
        data_dir: The folder; None: that of FEDSEL_DATA; without the variable, a cache folder in the home directory.

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
    """Find a file that a scenario names: an absolute path, one from the working directory, or one in the data folder.

    Args:
        path: The path.
        key: The scenario's key that holds it, for messages.
        data_dir: The data folder; None: that of FEDSEL_DATA.

    Returns:
        The path of the file.

    Raises:
        ParameterError: There is no such file, it is a folder, or the named data folder does not exist.
    """
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


def read_image_set(name: str, folder: Path) -> tuple[Examples, Examples]:
    """Read a torchvision set, and download it first if the folder lacks it.

    Args:
        name: A key of :data:`IMAGE_SETS`.
        folder: The folder that holds, or will hold, the files.

    Returns:
        The training and the test examples: pixels uint8 of shape (n, channels, height, width), labels of shape (n,).

    Raises:
        ParameterError: The files are missing and cannot be downloaded, or are damaged.
    """
    from torchvision import datasets

    source = IMAGE_SETS[name]
    torchvision_set = getattr(datasets, source.torchvision_name)
    try:
        train, test = (_read_half(torchvision_set, source, folder, train=train) for train in (True, False))
        return train, test
    except (OSError, RuntimeError) as problem:
        raise ParameterError(
            f"{name} was not found complete in the data folder {folder} (expected {folder / source.expected_file} and "
            f"its companions), and the download failed ({textwrap.shorten(str(problem), 160, placeholder=' …')}). "
            f"Name the folder that holds the files with --data-dir or {DATA_DIR_VARIABLE}, or connect to the network."
        ) from problem
    # A truncated file raises inside torchvision: assertions, unpickling and reshaping errors.
    except Exception as problem:
        raise ParameterError(
            f"the files of {name} in the data folder {folder} (such as {folder / source.expected_file}) are damaged "
            f"({type(problem).__name__}: {problem}). Delete them, so that they are downloaded again."
        ) from problem


def _read_half(torchvision_set: Any, source: ImageSet, folder: Path, *, train: bool) -> Examples:
    """Read the training or the test half, after a download if the folder lacks it."""
    which: dict[str, Any] = {"split": source.split} if source.split else {}
    with warnings.catch_warnings():
        # CIFAR-10's files are pickles of an old NumPy.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        # Without download=True first: a folder that has the files is never written to. "Not found" is a RuntimeError.
        try:
            loaded = torchvision_set(os.fspath(folder), train=train, **which)
        except RuntimeError:
            with _socket_timeout(_DOWNLOAD_TIMEOUT_S):
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


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Give new connections a timeout: torchvision downloads with urllib and sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
