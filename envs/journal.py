"""The durable record of a run's rounds: one JSON line per round, and the weights a restart would need.

A line is on disk before the round's reward is returned, so a killed process loses at most the round it was in. A
restarted run repeats its decisions from the seed and reads the outcome of each finished round here instead of
training it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import weakref
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..inner_trainers.base import Checkpoint, RoundReport
from ..inner_trainers.files import write_atomically

FORMAT = 1
_CHECKSUM = '"crc32": "'
"""Ends each line, followed by eight hex digits: a line of which one byte changed is set aside, not believed."""
_LOG = logging.getLogger(__name__)


class JournalInUseError(ValueError):
    """Another process is writing to the journal."""


class Journal:
    """Appends finished rounds to ``rounds-NAME.jsonl`` and answers for those it already holds.

    Bytes after the last whole line (a write that was cut) are set aside in a ``.damaged`` file beside it. One process
    at a time may have the journal open: the lock on ``rounds-NAME.lock`` goes with `close`, with the last journal of
    this file in the process, or with the process, however it ends.

    Args:
        folder: run directory; made when missing.
        name: distinguishes the environments that share the folder.

    Attributes:
        set_aside: damaged bytes found on opening.

    Raises:
        JournalInUseError: another process has it open.
    """

    def __init__(self, folder: str | Path, name: str = "0") -> None:
        self.folder, self.name = Path(folder), name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"rounds-{name}.jsonl"
        self._lock: _Lock | None = _Lock.of(self.path.with_suffix(".lock"))
        self._weights = self.folder / f"checkpoints-{name}"
        self._known: dict[str, dict[str, Any]] = {}
        self.set_aside = 0
        self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> Journal:
        """Return itself: Gymnasium copies an environment's arguments into its spec, and a journal is one file."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Journal, (self.folder, self.name)  # another process opens it anew, and asks for its lock

    def __len__(self) -> int:
        return len(self._known)

    def _load(self) -> None:
        if not self.path.exists():
            return
        raw = self.path.read_bytes()
        whole = b""
        damaged = b""
        for number, line in enumerate(raw.splitlines(keepends=True), start=1):
            entry = _parse(line) if line.endswith(b"\n") else None
            if entry is None:
                damaged += line
                continue
            if entry["format"] != FORMAT:
                raise ValueError(
                    f"{self.path}, line {number}: format {entry['format']!r}, this version reads {FORMAT}; "
                    "use a new folder, or the version that wrote it."
                )
            whole += line
            self._known[entry["key"]] = entry
        if damaged:
            self.set_aside = len(damaged)
            aside = self.path.with_suffix(".damaged")
            with open(aside, "ab") as file:
                file.write(damaged)
            write_atomically(self.path, whole)
            _LOG.warning("%s: %d damaged bytes were moved to %s", self.path, len(damaged), aside.name)

    def entry(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored entry of ``key``, or None."""
        return self._known.get(key)

    def close(self) -> None:
        """Let another process open the journal; it can still be read, no longer written."""
        self._lock = None

    def append(self, key: str, payload: Mapping[str, Any]) -> None:
        """Write one entry and wait until it is on disk.

        Raises:
            ValueError: the journal is closed.
        """
        if self._lock is None:
            raise ValueError(f"journal {self.path}: it is closed.")
        entry = {"format": FORMAT, "key": key, **payload}
        body = json.dumps(entry, allow_nan=False, default=str)
        line = f'{body[:-1]}, {_CHECKSUM}{zlib.crc32(body.encode()):08x}"}}\n'.encode()
        with open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._known[key] = json.loads(body)

    def save_weights(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint's weights; the file's name holds the hash of its content.

        Weights that are no mapping of tensors or arrays are not written; a restart then repeats their round.
        """
        data = _serialise(checkpoint.weights)
        if data is not None:
            write_atomically(self._weights / f"{checkpoint.id}-{_digest(data)}.safetensors", data)

    def keep_only(self, ids: Collection[str]) -> None:
        """Remove the weights of every other checkpoint."""
        for path in self._weights.glob("*.safetensors"):
            if path.is_file() and path.stem.rpartition("-")[0] not in ids:
                path.unlink()

    def weights(self, key: str) -> Any | None:
        """Return the stored weights of a checkpoint, or None when they are missing or a byte of them changed."""
        for path in sorted(self._weights.glob(f"{key}-*.safetensors")):
            if path.is_file():
                data = path.read_bytes()
                if path.stem.rpartition("-")[2] == _digest(data):
                    return _deserialise(path)
        return None

    def reports(self) -> list[RoundReport]:
        """Return every round in the order it was run."""
        return [RoundReport.from_dict(e["report"]) for e in self._known.values() if "report" in e]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, or None when a byte of it is not what was written."""
    body, mark, checksum = line.rstrip(b"\n").rpartition(f", {_CHECKSUM}".encode())
    if not mark or checksum != f'{zlib.crc32(body + b"}"):08x}"}}'.encode():
        return None
    entry: dict[str, Any] = json.loads(body + b"}")
    return entry


class _Lock:
    """An exclusive lock on a file, shared by the journals of this process and gone with the last of them."""

    _held: weakref.WeakValueDictionary[tuple[int, Path], _Lock] = weakref.WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - held open: closing it is what lets go
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise JournalInUseError(
                f"another process is writing to {path.parent} ({path.stem}); wait until it ends, or use another folder."
            ) from error
        weakref.finalize(self, self._file.close)

    @classmethod
    def of(cls, path: Path) -> _Lock:
        key = os.getpid(), path.resolve()  # a forked process holds no lock of its own
        lock = cls._held.get(key)
        if lock is None:
            lock = cls._held[key] = cls(path)
        return lock


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _serialise(weights: Any) -> bytes | None:
    if not isinstance(weights, Mapping) or not weights:
        return None
    import numpy as np

    if all(isinstance(value, np.ndarray) for value in weights.values()):
        from safetensors.numpy import save as save_arrays

        return bytes(save_arrays({k: np.ascontiguousarray(v) for k, v in weights.items()}))
    if all(type(value).__module__.startswith("torch") for value in weights.values()):
        from safetensors.torch import save as save_tensors

        return bytes(save_tensors({k: v.contiguous() for k, v in weights.items()}, metadata={"format": "pt"}))
    return None


def _deserialise(path: Path) -> Any | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            torch_made = (file.metadata() or {}).get("format") == "pt"
        with safe_open(path, framework="pt" if torch_made else "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator there)
    except (SafetensorError, OSError):
        return None
