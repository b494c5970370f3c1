"""The decision log of rounds under a controller: what was seen, thought of, done, and what came of it.

Three files of JSON lines in one folder, each line on its own and on disk before the next step:

- ``decisions.jsonl``: a ``round`` row at each round's begin, a ``decision`` row for each look (what was done before the
  next step, ``none`` too), an ``effect`` row once enough steps have passed since an adjustment, a ``failed`` row when a
  controller is given up, and an ``end`` row with the round's report;
- ``signals.jsonl`` (from level ``signals`` on): the raw signals of every step;
- ``timings.jsonl`` (level ``timings``): where each step's time went, in seconds.

A number that is not finite stands there as text (``"nan"``). A line that was cut by a killed process is set aside.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ...inner_trainers.adjustments import CATALOGUE_NAMES
from ...inner_trainers.base import RoundReport
from ...inner_trainers.messages import did_you_mean, first_line, require_integer
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.signals import Signals
from .base import Candidate, ControlState, Decision
from .rules import label

_LOG = logging.getLogger(__name__)
LEVELS = ("decisions", "signals", "timings")
"""How much is written down; each level has what the one before has."""
FORMAT = 1
HORIZON = 10
"""Steps over which an adjustment's effect is looked at, before and after it."""


class DecisionLog:
    """Writes the decision log of one round or several into a folder.

    Args:
        folder: made when missing. Rounds are added to those it holds.
        level: one of `LEVELS`.
        horizon: steps before and after an adjustment over which its effect is taken, in [1, 10000].

    Raises:
        ValueError: an unknown level, a horizon outside its range, a folder that is a file or cannot be made, or one
            that another log is writing to.
    """

    def __init__(self, folder: str | Path, level: str = "decisions", horizon: int = HORIZON) -> None:
        if level not in LEVELS:
            raise ValueError(f"level: unknown {level!r}.{did_you_mean(str(level), LEVELS)}")
        self.folder, self.level = Path(folder), level
        self._horizon = require_integer("horizon", horizon, low=1, high=10_000)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"log: {self.folder} is a file; expected the name of a folder.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _FolderLock(self.folder)
        except OSError as error:
            raise ValueError(f"log: {self.folder} cannot be written to ({first_line(error)}); name another.") from None
        names = LEVELS[: LEVELS.index(level) + 1]
        for name in names:
            _set_cut_line_aside(self.folder / f"{name}.jsonl")
        self._round = _rounds_in(self.folder / "decisions.jsonl") - 1
        self._files: dict[str, IO[bytes]] = {}
        for name in names:
            self._files[name] = open(self.folder / f"{name}.jsonl", "ab")  # noqa: SIM115 - closed by `close`
        self._effects = _Effects(self._horizon)
        self._mask, self._settings = "", dict[str, float]()
        self._rate: float | None = None

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let go of the folder; what cannot be written any more is said, not raised."""
        for name, file in self._files.items():
            try:
                file.close()
            except OSError as error:
                _LOG.warning("log %s: the last lines are lost (%s)", self.folder / f"{name}.jsonl", first_line(error))
        self._lock.close()

    def begin(
        self, recipe: Recipe, sources: Sequence[str], controller: str, facts: Mapping[str, Any], interval: int
    ) -> None:
        """Begin a round."""
        self._round += 1
        self._effects = _Effects(self._horizon)
        self._rate = None
        self._write(
            "decisions",
            {
                "row": "round",
                "round": self._round,
                "format": FORMAT,
                "recipe": recipe.to_dict(),
                "sources": list(sources),
                "controller": controller,
                "facts": dict(facts),
                "interval": interval,
                "horizon": self._horizon,
                "catalogue": list(CATALOGUE_NAMES),
            },
        )

    def step(self, step: int, signals: Signals, learning_rate: float | None) -> None:
        """Note what a step showed, and the learning rate it used."""
        self._rate = learning_rate
        for row in self._effects.step(step, signals.values):
            self._write("decisions", row)
        if "signals" in self._files:
            row = {"row": "signals", "step": step, "learning_rate": learning_rate, "values": _present(signals.values)}
            self._write("signals", {**row, "broken": list(signals.broken)} if signals.broken else row)

    def remember(self, state: ControlState) -> None:
        """Note what can be applied and is in force, before something is applied: `decision` writes it down."""
        self._mask = "".join("1" if allowed else "0" for allowed in state.legal)
        self._settings = dict(state.settings)

    def decision(self, state: ControlState, decision: Decision, refused: str | None = None) -> None:
        """Write down a decision, and why the session refused it when it did."""
        signals, chosen = state.signals, decision.chosen
        values = _present(signals.values)
        row: dict[str, Any] = {
            "row": "decision",
            "step": state.step,
            "chosen": label(chosen),
            "by": chosen.by,
            "reason": chosen.reason,
            "confidence": chosen.confidence,
            "adjustment": chosen.adjustment.to_dict(),
            "candidates": [_candidate(candidate) for candidate in decision.candidates],
            "held_back": dict(decision.held_back),
            "learning_rate": self._rate,
            "settings": self._settings,
            "mask": self._mask,
            "values": values,
            "z": {name: signals.z[name] for name in values if name in signals.z},
        }
        for name, entry in (("flags", list(decision.flags)), ("broken", list(signals.broken)), ("refused", refused)):
            if entry:
                row[name] = entry
        self._write("decisions", row)
        if chosen.adjustment.kind != "none" and refused is None:
            self._effects.applied(state.step, label(chosen), chosen.by)

    def failed(self, step: int, problem: str) -> None:
        """Write down that the controller was given up."""
        self._write("decisions", {"row": "failed", "step": step, "problem": problem})

    def timings(self, step: int, seconds: Mapping[str, float]) -> None:
        """Note where a step's time went."""
        if "timings" in self._files:
            self._write("timings", {"row": "timings", "step": step, **seconds})

    def finish(self) -> None:
        """Write down the effects of adjustments that the round's end came too early for."""
        for row in self._effects.rest():
            self._write("decisions", row)

    def end(self, report: RoundReport) -> None:
        """Write down how the round ended; where that cannot be written it is said, not raised: the round has ended."""
        data = report.to_dict()
        kept = ("ended", "steps", "checkpoint", "failure", "rescued", "rolled_back_to", "flags", "adjustments")
        try:
            self._write("decisions", {"row": "end", **{name: data[name] for name in kept}})
        except OSError as error:
            _LOG.warning("log %s: it does not say how the round ended (%s)", self.folder, first_line(error))

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        row = {"row": row["row"], "round": self._round, **row}
        try:
            text = json.dumps(row, allow_nan=False, default=_plain_type)
        except ValueError:
            text = json.dumps(_finite(row), allow_nan=False, default=_plain_type)
        file = self._files[name]
        file.write(text.encode() + b"\n")
        file.flush()


class _FolderLock:
    """An exclusive lock on a folder, gone with its process at the latest.

    Raises:
        ValueError: another log holds it, in this process or another.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY)
        self._let_go = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"log: another log is writing to {folder}; wait until it is closed, or name another folder."
            ) from None

    def close(self) -> None:
        """Let go."""
        self._let_go()


class _Effects:
    """Follows what came after each adjustment of one round."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._seen: dict[str, list[float]] = {"reward": [], "loss": []}
        self._open: list[dict[str, Any]] = []

    def step(self, step: int, values: Mapping[str, float | None]) -> list[dict[str, Any]]:
        """Take in a step; return the rows of effects that are now complete."""
        for name, seen in self._seen.items():
            value = values.get(name)
            if value is not None:
                seen.append(value)
                del seen[: -self._horizon]
                for entry in self._open:
                    if entry["objective"] == name:
                        entry["after"].append(value)
        complete = [entry for entry in self._open if step - entry["step"] >= self._horizon]
        self._open = [entry for entry in self._open if step - entry["step"] < self._horizon]
        return [_effect_row(entry) for entry in complete]

    def applied(self, step: int, what: str, by: str) -> None:
        """Follow an adjustment that was applied after a step."""
        for entry in self._open:
            entry["others"] += 1
        objective = "reward" if self._seen["reward"] else "loss"
        before = list(self._seen[objective])
        others = len(self._open)
        entry = {"step": step, "what": what, "by": by, "objective": objective, "before": before, "after": []}
        self._open.append({**entry, "others": others})

    def rest(self) -> list[dict[str, Any]]:
        """Return the rows of what is followed still, with the steps there were."""
        rows = [_effect_row(entry) for entry in self._open]
        self._open = []
        return rows


def _effect_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    before, after = _mean(entry["before"]), _mean(entry["after"])
    change = None if before is None or after is None else after - before
    return {
        "row": "effect",
        "step": entry["step"],
        "what": entry["what"],
        "by": entry["by"],
        "objective": entry["objective"],
        "before": before,
        "after": after,
        "change": change,
        "better": None if change is None else (change > 0) == (entry["objective"] == "reward") and change != 0,
        "steps_before": len(entry["before"]),
        "steps_after": len(entry["after"]),
        "others": entry["others"],
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "what": label(candidate),
        "by": candidate.by,
        "reason": candidate.reason,
        "confidence": candidate.confidence,
    }


def _finite(value: Any) -> Any:
    """Return plain data in which numbers that are not finite are text."""
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain_type(value: Any) -> Any:
    """Return what JSON can hold of a value it does not know: a NumPy number's own, else text."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _finite(value.item())
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _set_cut_line_aside(path: Path) -> None:
    """Move what stands after the last whole line into a ``.damaged`` file."""
    if not path.exists():
        return
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        with open(path.with_suffix(".damaged"), "ab") as file:
            file.write(raw[whole:] + b"\n")
        with open(path, "r+b") as file:
            file.truncate(whole)


def _rounds_in(path: Path) -> int:
    """Return how many rounds a log holds."""
    if not path.exists():
        return 0
    return sum(line.startswith(b'{"row": "round"') for line in path.read_bytes().splitlines())
