"""Keeps models that have to be converted: once per machine, whole or not at all, and checked when one is used."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import write_atomically

CACHE = "POSTTRAIN_GYM_CACHE"
"""Environment variable that names the folder of converted models; default: ``posttrain-gym`` in the user's cache."""

_checked: dict[Path, dict[str, tuple[int, int]]] = {}  # folders found whole -> what their files looked like then
_digests: dict[Path, tuple[tuple[int, int], str]] = {}  # source files -> what they looked like, SHA-256


def cache_folder() -> Path:
    """Return the folder of converted models, made if need be; see `CACHE`.

    Raises:
        ValueError: it cannot be made.
    """
    given = os.environ.get(CACHE)
    if given:
        folder = Path(given).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain-gym"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{CACHE}: {folder} cannot be made ({error.strerror}); name a folder you may write to."
        ) from None
    return folder.resolve()


def converted(name: str, source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the cached folder of a model that has to be converted, converting it when it is not there or not whole.

    One process converts while others wait, and the folder gets its name when it is complete. Its ``converted.json``
    names the source with its SHA-256. Those of the folder's files stand beside the folder; they are compared when a
    process first uses it, and again when a file's size or time changed since.

    Args:
        name: names the folder in the cache.
        source: the file that is converted; its SHA-256 is part of the folder's name.
        convert: writes the model of a file into a folder.

    Raises:
        ValueError: the cache folder cannot be made.
    """
    digest = _digest_of_source(source)
    target = cache_folder() / f"{name}-{digest[:16]}"
    if _is_whole(target):
        return target
    with _locked(target.with_name(f"{target.name}.lock")):
        if _is_whole(target):  # another process was faster
            return target
        for left in target.parent.glob(f"{target.name}.*.partial"):  # of a conversion that was ended
            shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
        try:
            partial.chmod(0o755)
            convert(source, partial)
            sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            said = {"source": source.name, "sha256": digest, "files": sizes}
            (partial / "converted.json").write_text(json.dumps(said, indent=1))
            sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
            write_atomically(_sums(target), json.dumps(sums, indent=1).encode())
            if target.exists():
                shutil.rmtree(target)
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _sums(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sha256.json")


def _is_whole(folder: Path) -> bool:
    """Return whether every file of a folder is there as it was written."""
    try:
        sums: dict[str, str] = json.loads(_sums(folder).read_text())
        stamps = {name: _stamp(folder / name) for name in sums}
        if _checked.get(folder) != stamps:
            if any(_sha256(folder / name) != expected for name, expected in sums.items()):
                return False
            _checked[folder] = stamps
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    return bool(sums)


def _digest_of_source(source: Path) -> str:
    stamp = _stamp(source)
    if source not in _digests or _digests[source][0] != stamp:
        _digests[source] = stamp, _sha256(source)
    return _digests[source][1]


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that the system lets go of when its process ends, however that is."""
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
