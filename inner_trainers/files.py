"""Writes a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a file whole and return its path: readers and killed writers see all of it or what was there before.

    Missing folders are made. The content is on disk when this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
