"""Tries scorers and verifiers on what models say at their worst: whether they end, keep their range and repeat.

A pattern that backtracks for ever holds the interpreter, so that no limit within the process ends it; `fresh_process`
runs these checks in a process of their own, which can be killed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .data.shingles import texts_in
from .messages import where_raised
from .task_findings import Findings, counted, quoted
from .tasks.base import Benchmark, Item, Row, Source
from .time_limit import TimeLimitError, call_with_time_limit

NONSENSE = "Xq7 zzk vrrm."
"""A completion that answers nothing."""

ODD_TEXTS: tuple[str, ...] = (
    "",
    " \n\t",
    NONSENSE,
    "None",
    "nan",
    "-inf",
    "1e999999",
    "0" * 5_000 + "1",  # more digits than Python makes an integer of
    "9" * 5_000,
    "²",  # a digit that is no decimal
    "１２",  # full-width digits
    "\u202e\u05d0\u05d1 \u0639\u0631",  # right to left
    "e\u0301\u0300\ufe0f\U0001f469\u200d\U0001f4bb",
    "\x00\x07\x1b[31m",
    "\ufffd\ufffd",  # what decoders write for half a character
    "\u2028\u2029\x85",
    "[" * 20_000,  # nested deeper than parsers go
    "{{7*7}} ${x} %s {0}",
    "a" * 60 + "!",
    "x" * 1_048_576,
    "0 " * 524_288,
)
"""Completions that a scorer must take: a model says whatever it can."""

UNBOUNDED = "Bound what it does by the length of the text; a pattern that backtracks is the usual cause."

Progress = Callable[[str], None]
"""Is told, before each call, what is called."""

_SUBJECTS = 2
_MANY_SUBJECTS = 20
_MOST_PAIRS, _FEW_PAIRS = 500, 8


def silent(text: str) -> None:
    """Tell nobody."""


@dataclass
class Scoring:
    """One function that judges completions, and what it is tried on.

    Attributes:
        where: how findings call it.
        function: ``function(subject, completion)``.
        subjects: items or rows.
        truth: whether it answers yes or no, as ``well_formed`` does.
        right: of each subject, texts that may be right answers.
        broken: whether it hung, so that it is left alone.
    """

    where: str
    function: Callable[[Any, str], Any]
    subjects: Sequence[Any]
    truth: bool = False
    right: Sequence[Sequence[str]] = ()
    broken: bool = field(default=False, init=False)


def scorings_of(benchmark: Benchmark | None, sources: Sequence[Source]) -> list[Scoring]:
    """Return what judges completions in a task: its scorer by dimension, its form check, the verifiers of sources."""
    found = []
    if benchmark is not None:
        for name in benchmark.dimensions:
            items = [item for split in ("validation", "test") for item in benchmark.items(split)]
            items = _spread([item for item in items if item.dimension == name])
            right = [candidates(item.data) for item in items]
            found.append(Scoring(f"benchmark.score, dimension {name!r}", benchmark.score, items, right=right))
            found.append(Scoring(f"benchmark.well_formed, dimension {name!r}", benchmark.well_formed, items, True))
            several = [item for item in items if item.follow_ups]
            if benchmark.score_turns is not None and several:
                where = f"benchmark.score_turns, dimension {name!r}"
                found.append(Scoring(where, partial(_same_turns, benchmark.score_turns), several))
    for source in sources:
        if source.verifier is not None and "prompts" in source.rows:
            rows = _spread(source.rows["prompts"])
            right = [candidates(row) for row in rows]
            found.append(Scoring(f"the verifier of source {source.name!r}", source.verifier, rows, right=right))
    return found


def _same_turns(score: Callable[[Item, Sequence[str]], float], item: Item, text: str) -> float:
    """Return the score of a conversation in which the assistant says the same at every turn."""
    return score(item, [text] * (1 + len(item.follow_ups)))


def candidates(data: Mapping[str, Any]) -> list[str]:
    """Return the texts that the data of an item or row may mean as the right answer, the likeliest first."""
    found: dict[str, None] = {}
    for column in sorted(data, key=lambda name: (name not in ("answer", "target", "completion", "solution"), name)):
        value = data[column]
        if column == "prompt" or isinstance(value, bool) or value is None:
            continue
        for text in [str(value)] if isinstance(value, int | float) else texts_in(value):
            found.setdefault(text)
            if len(found) == 8:
                return list(found)
    return list(found)


def check_scoring(findings: Findings, scoring: Scoring, seconds: float, progress: Progress = silent) -> None:
    """Try one scorer or verifier on `ODD_TEXTS`, twice each; then see whom it pays.

    Args:
        findings: what is found is added here.
        scoring: what is tried.
        seconds: time limit of each call.
        progress: is told what is called.
    """
    caller, told = _Caller(scoring, seconds, findings, progress), False
    for subject, right in zip(scoring.subjects[:_SUBJECTS], _padded(scoring.right), strict=False):
        texts = [*ODD_TEXTS, *right]
        first = [caller.call(subject, text) for text in texts]
        again = [caller.call(subject, text) for text in reversed(texts)][::-1]
        for text, one, other in zip(texts, first, again, strict=True):
            if one is not None and other is not None and one != other and not told:
                told = True
                findings.error(
                    "deterministic",
                    scoring.where,
                    f"it gave {one:g}, then {other:g}, for the completion {quoted(text)} of {_name(subject)}.",
                    "Draw no random numbers in it and keep no state between calls.",
                )
        if scoring.broken:
            return
    if not scoring.truth:
        _check_pay(findings, scoring, caller)


def _check_pay(findings: Findings, scoring: Scoring, caller: _Caller) -> None:
    subjects = list(zip(scoring.subjects, _padded(scoring.right), strict=False))[:_MANY_SUBJECTS]
    empty = [caller.call(subject, "") for subject, _ in subjects]
    anything = [caller.call(subject, NONSENSE) for subject, _ in subjects]
    best = [max((caller.call(subject, text) or 0.0 for text in right), default=None) for subject, right in subjects]
    if scoring.broken or not subjects:
        return
    if all(score == 1 for score in [*empty, *anything]):
        findings.error(
            "generous",
            scoring.where,
            f"it gives full marks to whatever is said: 1 for {quoted(NONSENSE)} and for nothing at all, on all of "
            f"{len(subjects)} tried.",
            "Compare the completion with the item's data.",
        )
    elif all(score == 1 for score in empty):
        findings.error(
            "generous",
            scoring.where,
            f"it gives full marks to the empty completion, on all of {len(subjects)} tried.",
            "A model that says nothing would be the best; score empty text 0.",
        )
    elif any(score == 1 for score in empty):
        count = sum(score == 1 for score in empty)
        findings.warning(
            "generous",
            scoring.where,
            f"it gives full marks to the empty completion for {count} of {len(subjects)} tried, the first "
            f"{_name(subjects[empty.index(1.0)][0])}.",
            "Score empty text 0 unless saying nothing is right there.",
        )
    tried = [score for score in best if score is not None]
    if tried and max(tried) == 0:
        findings.warning(
            "pays",
            scoring.where,
            f"nothing in the data of {len(tried)} tried is paid when it is said word for word, the first "
            f"{quoted(scoring.right[0][0] if scoring.right[0] else '')}.",
            "That is right where the data holds no answer as it must be said; else the scorer pays nothing.",
        )


def right_answers(scoring: Scoring, seconds: float, progress: Progress = silent) -> list[tuple[str, str]]:
    """Return (prompt, text) for the subjects of which a text in the data gets full marks."""
    caller = _Caller(scoring, seconds, Findings(), progress)
    found = []
    for subject, right in zip(scoring.subjects[:_MANY_SUBJECTS], _padded(scoring.right), strict=False):
        text = next((text for text in right if caller.call(subject, text) == 1), None)
        if text is not None:
            found.append((_prompt(subject), text))
    return found


def scores_of(scoring: Scoring, seconds: float, progress: Progress = silent) -> list[str]:
    """Return every score on `ODD_TEXTS` and the likely answers as text, for a comparison between processes."""
    caller = _Caller(scoring, seconds, Findings(), progress)
    return [
        repr(caller.call(subject, text))
        for subject, right in zip(scoring.subjects[:_SUBJECTS], _padded(scoring.right), strict=False)
        for text in (*ODD_TEXTS, *right)
    ]


def check_demonstrations(findings: Findings, source: Source, seconds: float, progress: Progress = silent) -> None:
    """Let a source's verifier judge the source's own demonstrations and preferences, where it has rows of both kinds.

    A row of a prompt that a ``prompts`` row asks too is judged by that row, one with the same columns by itself; at
    most 500 of each kind.
    """
    if source.verifier is None or "prompts" not in source.rows:
        return
    where = f"source {source.name!r}"
    scoring = Scoring(f"the verifier of {where}", source.verifier, ())
    caller = _Caller(scoring, seconds, findings, progress)
    asking = {row["prompt"]: row for row in source.rows["prompts"]}
    columns = set(source.rows["prompts"][0])
    judged, wrong, first = 0, [], ""
    for number, row in enumerate(source.rows.get("demonstrations", ()), start=1):
        prompt, completion = _said(row)
        judge = asking.get(prompt, row if columns <= set(row) else None)
        if judge is not None and judged < _MOST_PAIRS and not scoring.broken:
            judged += 1
            if (caller.call(judge, completion) or 0.0) < 1:
                wrong.append(number)
                first = first or f"prompt {quoted(prompt)}, completion {quoted(completion)}"
    if judged >= _FEW_PAIRS and len(wrong) == judged:
        findings.error(
            "demonstrations",
            where,
            f"its verifier gives full marks to none of its own {judged} demonstrations; the first: {first}.",
            "Either they are wrong or the verifier is: look at that one row.",
        )
    elif wrong:
        findings.warning(
            "demonstrations",
            where,
            f"its verifier calls {len(wrong)} of {judged} demonstrations wrong, {counted(wrong)}; the first: {first}.",
            "Mend or leave out those rows, unless they are meant to be wrong.",
        )
    upside_down = []
    for number, row in enumerate(source.rows.get("preferences", ())[:_MOST_PAIRS], start=1):
        if row["prompt"] in asking and not scoring.broken:
            chosen, rejected = (
                caller.call(asking[row["prompt"]], _text_of(row[side])) or 0.0 for side in ("chosen", "rejected")
            )
            if rejected > chosen:
                upside_down.append(number)
    if upside_down:
        findings.warning(
            "demonstrations",
            where,
            f"its verifier pays the rejected answer more than the chosen one in {len(upside_down)} preferences, "
            f"{counted(upside_down)}.",
            "Swap the two, or leave those rows out.",
        )


def _said(row: Row) -> tuple[str, str]:
    """Return what a demonstration asks, and what it answers at its end."""
    if "messages" in row:
        users = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
        return users[-1] if users else "", row["messages"][-1].get("content") or ""
    return row["prompt"], row["completion"]


def _text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer[-1].get("content") or ""


class _Caller:
    """Calls a scorer under a time limit and notes what it does besides scoring."""

    def __init__(self, scoring: Scoring, seconds: float, findings: Findings, progress: Progress) -> None:
        self._scoring, self._seconds, self._findings, self._progress = scoring, seconds, findings, progress
        self._told: set[str] = set()

    def call(self, subject: Any, text: str) -> float | None:
        """Return the score; None where there is none."""
        scoring = self._scoring
        if scoring.broken:
            return None
        before, printed = _copied(subject), io.StringIO()
        asked = f"for the completion {quoted(text)} of {_name(subject)}"
        self._progress(f"{scoring.where}\n{asked}")
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                value = call_with_time_limit(
                    lambda: scoring.function(subject, text), self._seconds, scoring.where, min(2.0, self._seconds)
                )
        except TimeLimitError:
            scoring.broken = True
            self._tell("hangs", f"it ran longer than {self._seconds:g} seconds {asked}.", UNBOUNDED)
            return None
        except (Exception, SystemExit) as error:
            self._tell(
                "raises",
                f"it raised {where_raised(error)} {asked}.",
                "Score text that cannot be read 0 instead: a round ends as failed when scoring raises.",
            )
            return None
        if printed.getvalue():
            self._tell(
                "prints",
                f"it printed {quoted(printed.getvalue())} {asked}.",
                "Take the print out: it is called thousands of times, beside figures that programs read.",
                severity="warning",
            )
        if before is not None and before != _copied(subject):
            self._tell("mutates", f"it changed its data {asked}.", "Copy what it changes; all rounds share one object.")
        return self._number(value, asked)

    def _number(self, value: Any, asked: str) -> float | None:
        if self._scoring.truth or isinstance(value, bool | np.bool_):
            return float(bool(value))
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if isinstance(plain, int | float) and not isinstance(plain, bool) and math.isfinite(plain) and 0 <= plain <= 1:
            return float(plain)
        self._tell(
            "range",
            f"it returned {quoted(value)} {asked}; expected a number in [0, 1].",
            "Scale or clip it, and return 0.0 where there is nothing to score.",
        )
        return None

    def _tell(self, check: str, problem: str, remedy: str, severity: str = "error") -> None:
        if check not in self._told:
            self._told.add(check)
            getattr(self._findings, severity)(check, self._scoring.where, problem, remedy)


def _copied(subject: Any) -> Any:
    """Return a copy of what a scorer could change; None for what cannot be copied."""
    try:
        return copy.deepcopy(dict(subject.data if isinstance(subject, Item) else subject))
    except Exception:  # a person's objects may refuse
        return None


def _name(subject: Any) -> str:
    return f"prompt {quoted(_prompt(subject))}"


def _prompt(subject: Any) -> str:
    return str(subject.prompt if isinstance(subject, Item) else subject.get("prompt", ""))


def _spread(subjects: Sequence[Any]) -> list[Any]:
    """Return at most `_MANY_SUBJECTS`, from beginning to end."""
    step = max(1, len(subjects) // _MANY_SUBJECTS)
    return list(subjects[::step][:_MANY_SUBJECTS])


def _padded(right: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    return right or [()] * _MANY_SUBJECTS
