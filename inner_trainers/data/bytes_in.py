"""Opens one file of rows as bytes: known by its first bytes, a regular file, the same before and after it is read."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..messages import did_you_mean
from .errors import DataError

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
"""First bytes -> compression that is read."""

FOREIGN = {
    b"\x28\xb5\x2f\xfd": "Zstandard; decompress it with `zstd -d`",
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it, or save it as JSONL or CSV",
    b"SQLite format 3\x00": "an SQLite database; export the table as CSV",
    b"\x89HDF": "HDF5; export it as Parquet",
    b"%PDF": "a PDF",
    b"\x80\x04\x95": "a Python pickle, which is never opened; save it as JSONL or Parquet",
    b"\x80\x05\x95": "a Python pickle, which is never opened; save it as JSONL or Parquet",
    b"version https://git-lfs": "a Git LFS pointer and not the data itself; run `git lfs pull`",
}
"""First bytes -> what a file is that cannot be read."""

TRUNCATED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""What the standard library raises at the end of compressed files that are cut or damaged."""

_CHUNK = 1 << 20


def first_bytes(path: Path, count: int = 64) -> bytes:
    """Return the first bytes of a file.

    Raises:
        DataError: it is missing, no regular file, or may not be read.
    """
    require_file(path)
    with path.open("rb") as file:
        return file.read(count)


def require_file(path: Path) -> None:
    """Refuse what is not a regular file that may be read.

    Raises:
        DataError: with what it is, and files of similar names where it is missing.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(path, f"there is no such file.{_similar(path)}") from None
    except OSError as error:
        raise DataError(path, f"it cannot be read: {error.strerror or error}.") from error
    if stat.S_ISDIR(mode):
        raise DataError(path, "it is a folder; name a file in it.")
    if not stat.S_ISREG(mode):
        raise DataError(
            path, "it is a device or a pipe, which can be read only once; write what comes out of it to a file first."
        )
    if not os.access(path, os.R_OK):
        raise DataError(path, "you may not read it; `chmod u+r` gives leave.")


def compression_of(path: Path) -> str:
    """Return ``"gzip"``, ``"bzip2"``, ``"xz"`` or empty, whatever the file is called.

    Raises:
        DataError: it is something that cannot be read.
    """
    start = first_bytes(path)
    for magic, what in FOREIGN.items():
        if start.startswith(magic):
            raise DataError(path, f"it is {what}.")
    return next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), "")


class _Bzip2File(bz2.BZ2File):
    """A bzip2 file whose damage is told from what a disk reports: the library raises a bare OSError for both."""

    def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        with _damage_told():
            return super().readline(-1 if size is None else size)

    def read(self, size: int | None = -1) -> bytes:
        with _damage_told():
            return super().read(-1 if size is None else size)


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise EOFError(str(error)) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, uncompressed.

    Raises:
        DataError: when the block ends, if the file changed while it was read.
    """
    require_file(path)
    before = _state(path)
    compression = compression_of(path)
    raw: Any  # closed by the block below
    if compression == "gzip":
        raw = gzip.GzipFile(path)
    elif compression == "bzip2":
        raw = _Bzip2File(path)
    elif compression == "xz":
        raw = lzma.LZMAFile(path)  # noqa: SIM115
    else:
        raw = io.BufferedReader(io.FileIO(path), _CHUNK)
    with raw:
        yield raw
    require_unchanged(path, before)


def state_of(path: Path) -> tuple[int, int, int]:
    """Return what tells a file from an edited or replaced one: inode, size, time of its last change in ns."""
    require_file(path)
    return _state(path)


def require_unchanged(path: Path, before: tuple[int, int, int]) -> None:
    """Refuse a file that is another than it was.

    Raises:
        DataError: it was edited, replaced or removed since ``before``.
    """
    try:
        after = _state(path)
    except OSError:
        after = None
    if after != before:
        raise DataError(
            path, "it changed while it was read, so its rows are of two versions; read it again once it is at rest."
        )


def hash_of(path: Path) -> bytes:
    """Return the SHA-256 of a file's bytes as they lie on disk.

    Raises:
        DataError: it cannot be read, or changed while it was.
    """
    before = state_of(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    require_unchanged(path, before)
    return digest.digest()


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _similar(path: Path) -> str:
    if not path.parent.is_dir():
        return f" Neither is there a folder {path.parent}."
    return did_you_mean(path.name, sorted(entry.name for entry in path.parent.iterdir())[:200])
