"""Hashes of policy files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_digest(path: str | Path) -> str:
    """Return 16 hex digits over the file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
