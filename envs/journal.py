"""The durable record of a run's rounds: one JSON line per round, and the weights a restart would need.

A line is on disk before the round's reward is returned, so a killed process loses at most the round it was in. A
restarted run repeats its decisions from the seed and reads the outcome of each finished round here instead of
training it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..inner_trainers.base import Checkpoint, RoundReport

FORMAT = 1


class Journal:
    """Appends finished rounds to ``rounds-NAME.jsonl`` and answers for those it already holds.

    Bytes after the last whole line (a write that was cut) are set aside in a ``.damaged`` file beside it.

    Args:
        folder: run directory; made when missing.
        name: distinguishes the environments that share the folder.
    """

    def __init__(self, folder: str | Path, name: str = "0") -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"rounds-{name}.jsonl"
        self._weights = self.folder / f"checkpoints-{name}"
        self._known: dict[str, dict[str, Any]] = {}
        self.set_aside = 0
        self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> Journal:
        """Return itself: Gymnasium copies an environment's arguments into its spec, and a journal is one file."""
        return self

    def __len__(self) -> int:
        return len(self._known)

    def _load(self) -> None:
        if not self.path.exists():
            return
        raw = self.path.read_bytes()
        whole = b""
        damaged = b""
        for line in raw.splitlines(keepends=True):
            entry = _parse(line) if line.endswith(b"\n") else None
            if entry is None:
                damaged += line
                continue
            whole += line
            self._known[entry["key"]] = entry
        if damaged:
            self.set_aside = len(damaged)
            with open(self.path.with_suffix(".damaged"), "ab") as file:
                file.write(damaged)
            _write_atomically(self.path, whole)

    def entry(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored entry of ``key``, or None."""
        return self._known.get(key)

    def append(self, key: str, payload: Mapping[str, Any]) -> None:
        """Write one entry and wait until it is on disk."""
        entry = {"format": FORMAT, "key": key, **payload}
        line = json.dumps(entry, allow_nan=False, default=str).encode() + b"\n"
        with open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._known[key] = json.loads(line)

    def save_weights(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint's weights, over what is there: it may be damaged.

        Weights that are no mapping of tensors or arrays are not written; a restart then repeats their round.
        """
        data = _serialise(checkpoint.weights)
        if data is not None:
            self._weights.mkdir(exist_ok=True)
            _write_atomically(self._weights / f"{checkpoint.id}.safetensors", data)

    def keep_only(self, ids: Collection[str]) -> None:
        """Remove the weights of every other checkpoint."""
        for path in self._weights.glob("*.safetensors"):
            if path.stem not in ids:
                path.unlink()

    def weights(self, key: str) -> Any | None:
        """Return the stored weights of a checkpoint, or None when they are missing or damaged."""
        path = self._weights / f"{key}.safetensors"
        return _deserialise(path) if path.exists() else None

    def reports(self) -> list[RoundReport]:
        """Return every round in the order it was run."""
        return [RoundReport.from_dict(e["report"]) for e in self._known.values() if "report" in e]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
