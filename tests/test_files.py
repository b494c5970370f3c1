"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain_gym.inner_trainers.files import write_atomically


def test_a_file_is_written_with_its_folders_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert write_atomically(path, b"one") == path
    assert write_atomically(path, b"two").read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "a", b"old")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
