"""Finished rounds in one JSON-lines file, with what they were played in: written line by line, read back checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inner_trainers.base import RoundReport
from .journal import Journal

SUFFIX = ".jsonl"


@dataclass(frozen=True)
class RecordedRound:
    """One finished round.

    Attributes:
        report: its record.
        facts: ``task``, ``instance``, ``search_seed``, ``episode``, ``round`` (from 1), ``reward``, ``charged``,
            ``unit``, ``best_before``, ``best_after``, ``base_model_size``, ``action_mask`` (before the round),
            ``machine`` (whose seconds its report has; None for a replayed round).
    """

    report: RoundReport
    facts: Mapping[str, Any]


class RoundFile:
    """Appends finished rounds to a file; one process at a time may write to it.

    What is written is on disk when `append` returns. Bytes of a write that was cut are set aside in a ``.damaged`` file
    beside it, and the next line goes behind the last whole one; a lock file keeps a second process out.

    Args:
        path: the file, ``rounds-NAME.jsonl``; made when missing.

    Raises:
        ValueError: another name, or a folder.
        JournalInUseError: another process writes to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _checked(path)
        self._journal = Journal(self.path.parent, self.path.name.removeprefix("rounds-").removesuffix(SUFFIX))

    def __len__(self) -> int:
        return len(self._journal)

    def append(self, report: RoundReport, facts: Mapping[str, Any]) -> None:
        """Write one round down."""
        self._journal.append(f"recorded.{len(self._journal)}", {"report": report.to_dict(), "facts": _plain(facts)})

    def close(self) -> None:
        """Let another process write to the file."""
        self._journal.close()


def read_rounds(path: str | Path) -> list[RecordedRound]:
    """Return the rounds of a file in the order in which they were written; a last line that was cut is left out.

    Raises:
        ValueError: no such file, or a line that is no round; names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"rounds {path}: no such file; `RecordRounds` and `Journal` write rounds-NAME.jsonl.")
    rounds = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == len(lines)):
            continue  # the last ends without a line break only where a write was cut
        try:
            entry = json.loads(line)
            if "report" in entry:
                rounds.append(RecordedRound(RoundReport.from_dict(entry["report"]), entry.get("facts", {})))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"rounds {path}, line {number}: no round ({type(error).__name__}: {error}).") from error
    return rounds


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if not (path.name.startswith("rounds-") and path.name.endswith(SUFFIX) and len(path.name) > len("rounds-.jsonl")):
        raise ValueError(f"path: expected a file called rounds-NAME{SUFFIX}, got {str(path)!r}.")
    if path.is_dir():
        raise ValueError(f"path: {path} is a folder; expected a file.")
    return path


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain JSON types; numbers that are not finite become text, as JSON has no such numbers."""
    plain: dict[str, Any] = {}
    for name, value in facts.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        plain[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return plain
