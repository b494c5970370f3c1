"""Checks what a task is made of: items and splits, rows and what they share with items, versions, algorithms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .base import InnerTrainer
from .data.shingles import normalise
from .task_findings import Findings, counted, quoted
from .tasks.base import SPLITS, Benchmark, BuiltTask, InnerTask, Source
from .tasks.rows import canonical

WIDEST_SPREAD = 0.5
"""The largest standard deviation that scores in [0, 1] can have."""

_TOLD_AT_LEAST = 0.5
_TOLD_WELL = 0.25


def smallest_gain(items: int) -> float:
    """Return the gain that ``items`` items tell from noise at 95 % where scores differ the most between items.

    It is 1.96 · √2 · 0.5 / √items, as two means that each have the standard error 0.5 / √items are compared.
    """
    return 1.96 * math.sqrt(2) * WIDEST_SPREAD / math.sqrt(items)


def check_items(findings: Findings, benchmark: Benchmark, own_trainer: bool) -> None:
    """Look for dimensions too small to tell a gain, and items that are there twice, within a split or in both.

    Args:
        findings: what is found is added here.
        benchmark: the benchmark.
        own_trainer: whether the task's own trainer evaluates, whose items may be more than one sample each.
    """
    for split in SPLITS:
        counts = Counter(item.dimension for item in benchmark.items(split))
        for name in benchmark.dimensions:
            count, where = counts[name], f"benchmark, dimension {name!r}"
            gain, error = smallest_gain(count), WIDEST_SPREAD / math.sqrt(count)
            if gain <= _TOLD_WELL:
                continue
            told = (
                f"its {split} split has {count} item{'s' if count > 1 else ''}: the standard error of the mean can "
                f"reach {error:.2f}, so a gain below {min(gain, 1.0):.2f} may not be told from noise."
            )
            wanted = math.ceil((1.96 * math.sqrt(2) * WIDEST_SPREAD / _TOLD_WELL) ** 2)
            add = findings.error if gain > _TOLD_AT_LEAST and not own_trainer else findings.warning
            add("items", where, told, f"Bring {wanted} or more, which tell a gain of {_TOLD_WELL}.")
    first: dict[str, tuple[str, str]] = {}  # form -> split, prompt
    shared: list[str] = []
    twice: dict[str, list[str]] = {}
    for split in SPLITS:
        for item in benchmark.items(split):
            form = str((normalise(item.prompt) or item.prompt, getattr(item, "follow_ups", ())))
            before = first.setdefault(form, (split, item.prompt))
            if before[0] != split:
                shared.append(f"{quoted(before[1])} and {quoted(item.prompt)}")
        for prompt, count in Counter(item.prompt for item in benchmark.items(split)).items():
            if count > 1:
                twice.setdefault(split, []).append(prompt)
    if shared:
        findings.error(
            "splits",
            "benchmark",
            f"{len(shared)} items stand in validation and in test in forms that differ only in case, white space or "
            f"outer punctuation; the first: {shared[0]}.",
            "Keep each on one side: what is tuned on validation is else rewarded on test.",
        )
    _check_data(findings, benchmark)
    for split, prompts in twice.items():
        findings.warning(
            "splits",
            "benchmark",
            f"{len(prompts)} prompts are there more than once in {split}, the first {quoted(prompts[0])}.",
            "Copies make the standard error look smaller than it is; keep one of each.",
        )


def _check_data(findings: Findings, benchmark: Benchmark) -> None:
    """Look for data of items that is missing here and there, or text in some and a number in others."""
    from .data.sources import mixed_types

    for name in benchmark.dimensions:
        data = [item.data for split in SPLITS for item in benchmark.items(split) if item.dimension == name]
        for column in sorted({column for row in data for column in row}):
            where = f"benchmark, dimension {name!r}"
            there = sum(row.get(column) is not None for row in data)
            if 0 < there < len(data):
                problem = f"{column!r} is missing or None in {len(data) - there} of {len(data)} items."
                findings.warning(
                    "rows", where, problem, "A scorer reads it as no answer; complete it, or leave it out."
                )
            mixed = mixed_types(data, column)
            if mixed:
                kinds = " and ".join(f"{kind} ({len(rows)})" for kind, rows in sorted(mixed.items()))
                problem = f"{column!r} mixes {kinds}."
                findings.warning("rows", where, problem, "7 and '7' are not equal; write all of them as text.")


def check_contamination(findings: Findings, built: BuiltTask) -> None:
    """Tell what had to be taken out because rows and items had it in common."""
    for name, count in built.leaked.items():
        findings.warning(
            "contamination",
            f"source {name!r}",
            f"{count} rows ask a benchmark prompt; they are taken out whenever the task is built.",
            "Take them out of the data, so that others who train on it do not learn the answers.",
        )
    if built.contaminated:
        first = built.contaminated[0]
        findings.warning(
            "contamination",
            "benchmark",
            f"{len(built.contaminated)} items are not scored because a run of their words stands in training rows; "
            f"the first, of {first.split}: {quoted(first.prompt)}, in source {first.source!r}, {first.kind} row "
            f"{first.row}: {quoted(first.shared)}.",
            "Take those rows out of the data, or other items.",
        )


def check_sources(findings: Findings, task: InnerTask, trainer: InnerTrainer) -> None:
    """Look for sources that no algorithm can use, rows that are copies, answers that are none."""
    usable = {name for algorithm in trainer.algorithms for name in trainer.usable_sources(task, algorithm)}
    for name, source in task.built.sources.items():
        where = f"source {name!r}"
        if name not in usable:
            kinds = ", ".join(source.rows) or "no rows that are left"
            remedy = "Bring demonstrations, preferences, text, or prompts with a verifier."
            findings.error("sources", where, f"no algorithm can train on it: it has {kinds}.", remedy)
        for kind, rows in source.rows.items():
            distinct = len({canonical(dict(row)) for row in rows})
            if distinct < len(rows):
                findings.warning(
                    "rows",
                    where,
                    f"{len(rows)} {kind} rows, {distinct} distinct.",
                    "Copies weigh as often as they are there; keep one of each unless that is meant.",
                )
            if kind == "preferences":
                same = [number for number, row in enumerate(rows, 1) if row["chosen"] == row["rejected"]]
                if same:
                    problem = f"chosen and rejected are equal in {len(same)} preferences, {counted(same)}."
                    findings.warning("rows", where, problem, "They teach nothing; leave them out.")
            if kind == "demonstrations":
                empty = [number for number, row in enumerate(rows, 1) if row.get("completion", "-").strip() == ""]
                if empty:
                    problem = f"the completion is empty in {len(empty)} demonstrations, {counted(empty)}."
                    findings.warning("rows", where, problem, "They teach to say nothing; leave them out.")


def check_versions(findings: Findings, benchmark: Benchmark, sources: Sequence[Source]) -> None:
    """Look for scorers and verifiers without a version: the content hash sees no code."""
    remedy = 'Name one, such as "1", and change it with the code, or finished rounds are taken for equal.'
    if not benchmark.scorer_version:
        findings.warning("version", "benchmark", "scorer_version is empty.", remedy)
    for source in sources:
        if source.verifier is not None and not source.verifier_version and "prompts" in source.rows:
            findings.warning("version", f"source {source.name!r}", "verifier_version is empty.", remedy)
