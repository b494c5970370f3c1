"""Tries a verifier on a file's own rows: on each row's own answer, on nothing, and on another row's answer."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..messages import did_you_mean, where_raised
from ..scoring_checks import Scoring, candidates, check_scoring
from ..task_findings import Findings
from ..time_limit import TimeLimitError, call_with_time_limit
from .inspection_findings import DataFinding, Places
from .inspection_rows import ReadRow

TRIED = 64
"""Rows that a verifier is tried on."""

_FEW = 4  # rows below which a constant score says nothing


@dataclass(frozen=True)
class Judge:
    """What judges completions.

    Attributes:
        name: how findings call it.
        score: ``score(row, completion)``.
        check_row: refuses rows that cannot be judged; None where there is nothing to check.
    """

    name: str
    score: Callable[[Mapping[str, Any], str], float]
    check_row: Callable[[Mapping[str, Any]], None] | None = None


def read_judge(text: str) -> Judge:
    """Return the verifier behind ``NAME[:setting=value,…]`` or ``module:function``.

    Raises:
        ValueError: there is none, or it cannot be made.
    """
    from ..benchmarks.verifiers import VERIFIERS, parse_verifier

    name, _, rest = text.partition(":")
    if name.strip() in VERIFIERS or not rest or "=" in rest:
        made = parse_verifier(text)
        return Judge(text, made.score, made.check_row)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--verifier {text!r}: module {error.name!r} cannot be imported; run from its folder or put it on "
            f"PYTHONPATH.{did_you_mean(name, VERIFIERS)}"
        ) from None
    except (Exception, SystemExit) as error:  # whatever a person's module does when it is imported
        raise ValueError(f"--verifier {text!r}: importing {name!r} failed with {where_raised(error)}.") from error
    found = getattr(module, rest, None)
    if found is None:
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ValueError(f"--verifier {text!r}: module {name!r} has no {rest!r}.{did_you_mean(rest, public)}")
    made = found() if isinstance(found, type) else found
    score = getattr(made, "score", made)
    if not callable(score):
        raise ValueError(f"--verifier {text!r}: expected a function of a row and a completion, got {made!r}.")
    return Judge(text, score, getattr(made, "check_row", None))


def try_judge(
    judge: Judge, rows: Sequence[ReadRow], path: str, call_seconds: float
) -> tuple[dict[str, Any], list[DataFinding]]:
    """Return the scores of a sample, and what is wrong with them.

    Args:
        judge: the verifier.
        rows: some rows, in the order of the file.
        path: names the file in findings.
        call_seconds: time limit of one call.

    Returns:
        ``own``, ``empty`` and ``other``: number of scores, their least, mean, greatest and standard deviation; and the
        findings.
    """
    asked = [row for row in rows if isinstance(row.row.get("prompt"), str)][:TRIED]
    if not asked:
        note = DataFinding(
            "note", "skipped", path, "the verifier was not tried", "It judges answers to prompts, and no row has one."
        )
        return {}, [note]
    subjects = [{**row.value, "prompt": row.row["prompt"]} for row in asked]
    answers = [_answers(row) for row in asked]
    found, refused = [], Places()
    reason = ""
    if judge.check_row is not None:
        for row, subject in zip(asked, subjects, strict=True):
            try:
                judge.check_row(subject)
            except ValueError as error:
                reason = reason or str(error)
                refused.add(row.number, row.line)
    if refused.count:
        problem = f"the verifier {judge.name} cannot judge {refused.count} of {len(asked)} rows tried ({reason})"
        found.append(refused.finding("error", "verifier", path, problem, "Give it the columns that it reads."))
        return {}, found
    scoring = Scoring(f"verifier {judge.name}", judge.score, subjects, right=[each[:1] for each in answers])
    checked = Findings()
    check_scoring(checked, scoring, call_seconds)
    for one in checked:
        severity = "note" if one.check == "pays" else one.severity
        found.append(DataFinding(severity, "verifier", path, f"{one.where}: {one.problem}".rstrip("."), one.remedy))
    if scoring.broken:
        return {}, found
    firsts = [each[0] if each else None for each in answers]
    scores = {
        "own": _scores(judge, subjects, firsts, call_seconds),
        "empty": _scores(judge, subjects, [""] * len(subjects), call_seconds),
        "other": _scores(judge, subjects, _others(firsts), call_seconds),
    }
    own, other = scores["own"], scores["other"]
    if len(own) >= _FEW and max(own) == min(own):
        places = Places()
        for row in asked:
            places.add(row.number, row.line)
        if own[0] == 0:
            problem = f"the verifier {judge.name} gives no credit to the own answer of any of {len(own)} rows tried"
            remedy = "Either the answers are wrong or the verifier is: look at one row."
            found.append(places.finding("error", "verifier", path, problem, remedy))
        elif other and max(other) == min(other) == own[0]:
            problem = f"the verifier {judge.name} gives {own[0]:g} to own and to other rows' answers alike"
            remedy = "A constant reward teaches nothing; let it compare with the row."
            found.append(places.finding("error", "verifier", path, problem, remedy))
    return {name: _summary(values) for name, values in scores.items()}, found


def _answers(row: ReadRow) -> list[str]:
    said = row.row.get("completion", row.row.get("chosen"))
    if isinstance(said, str):
        return [said]
    return candidates(row.value)


def _others(firsts: Sequence[str | None]) -> list[str | None]:
    """Return of each row the answer of the next row that has another one; None where there is none."""
    others: list[str | None] = []
    for i, own in enumerate(firsts):
        turned = [*firsts[i + 1 :], *firsts[:i]]
        others.append(next((text for text in turned if text is not None and text != own), None))
    return others


def _scores(
    judge: Judge, subjects: Sequence[Mapping[str, Any]], texts: Sequence[str | None], call_seconds: float
) -> list[float]:
    import contextlib
    import io
    from functools import partial

    scores = []
    for subject, text in zip(subjects, texts, strict=True):
        if text is None:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                value = float(
                    call_with_time_limit(partial(judge.score, subject, text), call_seconds, judge.name, call_seconds)
                )
        except TimeLimitError:
            break  # told of by `check_scoring`
        except (Exception, SystemExit):
            continue  # likewise
        if math.isfinite(value):
            scores.append(value)
    return scores


def _summary(values: Sequence[float]) -> dict[str, float | int]:
    if not values:
        return {"rows": 0}
    return {
        "rows": len(values),
        "least": min(values),
        "mean": float(np.mean(values)),
        "greatest": max(values),
        "deviation": float(np.std(values)),
    }
