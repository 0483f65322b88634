"""CIFAR-10 from its archive: unpacked once, into the cache; archives from strangers, and damaged ones."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets as torchvision_datasets

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds import image_files
from fedsel_flwr.simulations.worlds.data import load_dataset
from tests.simulations.worlds.test_data import lengths

BASE = "cifar-10-batches-py"


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: list[str]) -> dict[str, bytes]:
    """The files of a CIFAR-10 of 100 + 20 images, image i uniformly grey with value i, and its checksums; a cache."""
    files: dict[str, bytes] = {"batches.meta": pickle.dumps({"label_names": [str(i) for i in range(10)]})}
    batches = {f"data_batch_{i + 1}": range(20 * i, 20 * i + 20) for i in range(5)} | {"test_batch": range(20)}
    for name, rows in batches.items():
        grey = np.repeat(np.array(rows, dtype=np.uint8)[:, None], 3 * 32 * 32, axis=1)
        files[name] = pickle.dumps({"data": grey, "labels": [i % 10 for i in rows]})
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    cifar = torchvision_datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [[f"data_batch_{i}", sums[f"data_batch_{i}"]] for i in range(1, 6)])
    monkeypatch.setattr(cifar, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": sums["batches.meta"]})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return files


def write_archive(path: Path, files: Mapping[str, bytes], *, before: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    """Write an archive of CIFAR-10, with members in front of its files."""
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as archive:
        for member in before:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
        for name, content in files.items():
            member = tarfile.TarInfo(f"{BASE}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def everything_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["cifar-10.tar.xz", "cifar-10-python.tar.gz"])
def test_an_archive_is_unpacked_once_and_the_data_folder_stays_as_it_is(
    tmp_path: Path, small_cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, no_network: list[str], name: str
) -> None:
    archive = write_archive(tmp_path / "data" / name, small_cifar)
    cifar = load_dataset("cifar-10", data_dir=tmp_path / "data")
    assert lengths(cifar) == [90, 10, 20]
    # image i: (i / 255 - mean) / std of its channel
    expected = (19 / 255 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2616])
    np.testing.assert_allclose(cifar.test.inputs[19, :, 5, 7], expected, rtol=1e-5)
    assert everything_in(tmp_path / "data") == {name}
    cache = tmp_path / "cache" / "fedsel-flwr"
    (unpacked,) = cache.iterdir()
    assert everything_in(unpacked) == {BASE, *(f"{BASE}/{one}" for one in small_cifar)}

    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", None)  # a second unpacking would fail
        again = load_dataset("cifar-10", data_dir=tmp_path / "data")
    np.testing.assert_array_equal(again.train.inputs, cifar.train.inputs)
    os.utime(archive, ns=(1, 1))  # another archive of the same name and size
    load_dataset("cifar-10", data_dir=tmp_path / "data")
    assert len(list(cache.iterdir())) == 2
    assert no_network == []


def test_files_beside_an_archive_are_read_and_not_the_archive(tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    (tmp_path / "data" / BASE).mkdir()
    for name, content in small_cifar.items():
        (tmp_path / "data" / BASE / name).write_bytes(content)
    (tmp_path / "data" / "cifar-10.tar.xz").write_bytes(b"no archive")
    assert lengths(load_dataset("cifar-10", data_dir=tmp_path / "data")) == [90, 10, 20]
    assert not (tmp_path / "cache").exists()


def test_without_xdg_the_cache_is_in_the_home_directory(
    here: Path, small_cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(here / "data" / "cifar-10.tar.xz", small_cifar)
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says: ignore a path that is not absolute
    load_dataset("cifar-10", data_dir=here / "data")
    assert {path.name for path in here.iterdir()} == {"data", "home"}
    assert len(list((here / "home" / ".cache" / "fedsel-flwr").iterdir())) == 1


def special(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    return member


def test_an_archive_from_a_stranger_writes_only_the_expected_files(
    tmp_path: Path, small_cifar: dict[str, bytes]
) -> None:
    hostile = (
        special("../../../outside", size=3),
        special(f"{tmp_path}/absolute", size=3),
        special(f"{BASE}/../../sideways", size=3),
        special(f"{BASE}/data_batch_1/../../up", size=3),
        special(BASE, tarfile.SYMTYPE, str(tmp_path)),
        special(f"{BASE}/data_batch_2", tarfile.SYMTYPE, str(tmp_path / "victim")),
        special(f"{BASE}/data_batch_3", tarfile.LNKTYPE, "../victim"),
        special(f"{BASE}/test_batch", tarfile.FIFOTYPE),
        special(f"{BASE}/data_batch_4", size=3),  # not the original
        special(f"{BASE}/more", size=3),
        special("data_batch_5", size=3),
    )
    (tmp_path / "victim").write_text("untouched")
    write_archive(tmp_path / "data" / "cifar-10.tar.xz", small_cifar, before=hostile)
    load_dataset("cifar-10", data_dir=tmp_path / "data")
    (unpacked,) = (tmp_path / "cache" / "fedsel-flwr").iterdir()
    assert everything_in(unpacked) == {BASE, *(f"{BASE}/{one}" for one in small_cifar)}
    assert all((unpacked / BASE / name).read_bytes() == content for name, content in small_cifar.items())
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "data", "victim"}
    assert (tmp_path / "victim").read_text() == "untouched"


@pytest.mark.parametrize("fault", ["lacking", "changed", "link", "huge", "truncated", "no archive"])
def test_a_damaged_archive_is_named_and_leaves_nothing_behind(
    tmp_path: Path, small_cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, no_network: list[str], fault: str
) -> None:
    path, before = tmp_path / "data" / "cifar-10-python.tar.gz", ()
    files = {name: content for name, content in small_cifar.items() if name != "data_batch_3"}
    if fault == "changed":
        files["data_batch_3"] = small_cifar["data_batch_3"][:-1] + b"?"
    if fault == "link":
        before = (special(f"{BASE}/data_batch_3", tarfile.SYMTYPE, "/dev/zero"),)
    if fault == "huge":
        monkeypatch.setattr(image_files, "_LARGEST_FILE", len(small_cifar["data_batch_3"]) - 1)
        files = small_cifar
    write_archive(path, files, before=before)
    if fault in ("truncated", "no archive"):
        path.write_bytes(path.read_bytes()[:500] if fault == "truncated" else b"nothing packed")
    with pytest.raises(ParameterError, match=r"cifar-10-python\.tar\.gz .*(data_batch_3|cannot be unpacked into)"):
        load_dataset("cifar-10", data_dir=tmp_path / "data")
    assert everything_in(tmp_path / "cache" / "fedsel-flwr") == set()
    assert everything_in(tmp_path / "data") == {path.name}
    assert no_network == []


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    write_archive(tmp_path / "data" / "cifar-10.tar.xz", small_cifar)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ParameterError, match=r"cannot be unpacked into .*set XDG_CACHE_HOME"):
        load_dataset("cifar-10", data_dir=tmp_path / "data")


def test_no_process_sees_a_part_of_an_archive(
    tmp_path: Path, small_cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the files are written, the folder has not yet its name; and another process may finish first."""
    write_archive(tmp_path / "data" / "cifar-10.tar.xz", small_cifar)
    cache, extract, seen = tmp_path / "cache" / "fedsel-flwr", image_files._extract, []

    def interrupted(*args: Any) -> None:
        extract(*args)
        seen.extend(path.name for path in cache.iterdir())
        raise KeyboardInterrupt

    def overtaken(*args: Any) -> None:
        extract(*args)
        with monkeypatch.context() as patch:
            patch.setattr(image_files, "_extract", extract)
            load_dataset("cifar-10", data_dir=tmp_path / "data")  # the other process, from start to end

    with monkeypatch.context() as patch:
        patch.setattr(image_files, "_extract", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_dataset("cifar-10", data_dir=tmp_path / "data")
    assert len(seen) == 1
    assert seen[0].startswith(".unpacking-")
    assert list(cache.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "_extract", overtaken)
        assert lengths(load_dataset("cifar-10", data_dir=tmp_path / "data")) == [90, 10, 20]
    assert [path.name.startswith("cifar-10.tar.xz-") for path in cache.iterdir()] == [True]


@pytest.mark.slow
def test_the_real_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path, no_network: list[str]
) -> None:
    if not (shared_data / "cifar-10.tar.xz").exists():
        pytest.skip(f"{shared_data / 'cifar-10.tar.xz'} is not there; set FEDSEL_DATA to a folder with this archive")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (train, labels), (test, test_labels) = image_files.read_image_set("cifar-10", shared_data)
    assert (train.shape, test.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert np.bincount(labels).tolist() == [5000] * 10
    assert np.bincount(test_labels).tolist() == [1000] * 10
    assert no_network == []
