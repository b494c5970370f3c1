"""`check_task`: tells the author of a task in words what is wrong with it, before a budget is spent on it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .base import InnerTrainer
from .fresh_process import Examined, examine_in_fresh_process, sendable
from .item_checks import check_contamination, check_items, check_sources, check_versions
from .messages import where_raised
from .task_findings import CHECKS, SEVERITIES, Finding, Findings
from .tasks import InnerTask, SingleTask, TaskFamily, resolve_task

__all__ = ["CHECKS", "SEVERITIES", "Finding", "check_task"]

_HASH_SEEDS = ("20211", "11202")


def check_task(
    task: str | Path | InnerTask | TaskFamily | type,
    instance: int | None = None,
    *,
    evaluate: bool = False,
    call_seconds: float = 5.0,
    build_seconds: float = 300.0,
) -> list[Finding]:
    """Return what is wrong with a task, in the order in which it was looked for; empty when nothing is.

    The task is built, and its scorer and verifiers are called, in two fresh processes that differ in their hash seed;
    they can be ended when a call does not come back. Then it is built here, and its model is loaded. Nothing is
    trained.

    Args:
        task: a built-in name, a task file, ``module:Class``, a class or an object.
        instance: seed of the family's instance that is checked; None for the first of meta-training.
        evaluate: whether to score the base model on the validation split too, and to take the task's own trainer, if
            it has one, through `conformance.TrainerConformance`, which trains short rounds.
        call_seconds: time limit of each call of a scorer or verifier.
        build_seconds: time limit of importing and building the task.
    """
    findings = Findings()
    sink = io.StringIO()  # what the task prints is told by the process that examines it
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        _check(findings, task, instance, evaluate, call_seconds, build_seconds)
    return sorted(findings.all, key=lambda finding: SEVERITIES.index(finding.severity))


def _check(
    findings: Findings,
    task: str | Path | InnerTask | TaskFamily | type,
    instance: int | None,
    evaluate: bool,
    call_seconds: float,
    build_seconds: float,
) -> None:
    name, examined = _name_of(task), None
    if name is not None:
        examined = _examined(findings, name, instance, call_seconds, build_seconds)
        if examined is None:
            return
    try:
        family = resolve_task(task)
        seed = family.train_seeds[0] if instance is None else instance
        drawn = family.instance(seed)
    except (Exception, SystemExit) as error:
        findings.error("resolves", "the task", told(error))
        return
    if name is None:
        examined = _examined(findings, drawn, seed, call_seconds, build_seconds)
    if examined is None or findings.has("parts"):
        return
    if not _tried(findings, "parts", "the task", lambda: drawn.built):
        return
    _tried(findings, "family", "the family", lambda: _check_family(findings, family, seed))
    _tried(findings, "repeatable", "the task", lambda: _check_repeats(findings, drawn))
    own = drawn.trainer()
    check_contamination(findings, drawn.built)
    check_items(findings, drawn.built.benchmark, own is not None)
    if own is not None:
        _check_with_own_trainer(findings, drawn, own, evaluate)
        return
    check_versions(findings, drawn.built.benchmark, list(drawn.built.sources.values()))
    from .model_checks import check_headroom, check_model

    trainer, right = _trl(), examined.right
    _tried(findings, "sources", "the task", lambda: check_sources(findings, drawn, trainer))
    _tried(findings, "model", "the model", lambda: check_model(findings, drawn, trainer, right))
    if evaluate and not findings.has("model") and not findings.has("template"):
        check_headroom(findings, drawn, trainer)


def _check_with_own_trainer(findings: Findings, task: InnerTask, own: InnerTrainer, evaluate: bool) -> None:
    problem = "scorers and verifiers were not tried on text, as the task's own trainer scores."
    findings.note("trainer", "trainer()", problem)
    if not isinstance(own, InnerTrainer):
        missing = [part for part in _contract() if not hasattr(own, part)]
        problem = f"{type(own).__name__} is no InnerTrainer: {', '.join(missing)} missing."
        findings.error("trainer", "trainer()", problem, "See `posttrain_gym.inner_trainers.base.InnerTrainer`.")
        return
    _tried(findings, "sources", "the task", lambda: check_sources(findings, task, own))
    if evaluate:
        from .conformance import trainer_findings
        from .model_checks import check_headroom

        for where, problem in trainer_findings(own, task):
            findings.error("trainer", where, problem)
        check_headroom(findings, task, own)


def _tried(findings: Findings, check: str, where: str, look: Callable[[], object]) -> bool:
    """Return whether looking came to its end; what it raises is a finding: a person's code may raise anything."""
    try:
        look()
    except (Exception, SystemExit) as error:
        findings.error(check, where, told(error))
        return False
    return True


def _name_of(task: object) -> str | None:
    """Return the name by which another process can have a task; None for an object."""
    if isinstance(task, str | Path):
        return os.fspath(task)
    if isinstance(task, type) and task.__module__ != "__main__" and "<locals>" not in task.__qualname__:
        return f"{task.__module__}:{task.__qualname__}"
    return None


def _examined(
    findings: Findings, task: str | InnerTask, instance: int | None, call_seconds: float, build_seconds: float
) -> Examined | None:
    """Examine a task in two fresh processes and compare them; None where a fresh process cannot have the task."""
    try:
        sent = sendable(task, instance)
    except Exception as error:  # whatever a person's object raises
        findings.error(
            "pickles",
            "the task",
            f"it cannot be sent to workers: {where_raised(error)}.",
            "Keep no open files, locks, generators or models in the object; open them where they are used.",
        )
        return None
    first = examine_in_fresh_process(sent, hash_seed=_HASH_SEEDS[0], seconds=call_seconds, build_seconds=build_seconds)
    findings.all.extend(first.findings)
    if any(finding.check == "resolves" for finding in first.findings):
        return None
    second = examine_in_fresh_process(
        sent,
        hash_seed=_HASH_SEEDS[1],
        seconds=call_seconds,
        build_seconds=build_seconds,
        skipped=first.broken,
        thorough=False,
    )
    for part in sorted(first.parts.keys() | second.parts.keys()):
        _compare(findings, part, first.parts.get(part, ()), second.parts.get(part, ()), "two fresh processes")
    for where, scores in first.scores.items():
        others = second.scores.get(where, scores)
        different = sum(one != other for one, other in zip(scores, others, strict=False))
        if different and not any(f.check == "deterministic" and f.where == where for f in findings):
            findings.error(
                "deterministic",
                where,
                f"{different} of {len(scores)} scores are others in a process with another hash seed.",
                "Let nothing depend on the order of a set, on hash() or on random numbers.",
            )
    return first


def _compare(findings: Findings, part: str, one: Sequence[int], other: Sequence[int], between: str) -> None:
    if list(one) == list(other):
        return
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first = "" if max(len(one), len(other)) == 1 else f", the first at about entry {place + 1} of {len(one)}"
    findings.error(
        "repeatable",
        part,
        f"it is another in {between}{first}.",
        "Draw it from generators with fixed seeds, in an order that is sorted: sets, hash() and the time differ.",
    )


def _check_family(findings: Findings, family: TaskFamily, seed: int) -> None:
    """Look at the seeds of a family, and at whether one seed is one task."""
    if isinstance(family, SingleTask):
        return
    both = set(family.train_seeds) & set(family.test_seeds)
    if both:
        findings.error(
            "family",
            "the family",
            f"{len(both)} seeds are for meta-training and for meta-test, for example {min(both)}.",
            "Keep train_seeds and test_seeds apart: figures on seen tasks are not for unseen ones.",
        )
    one, other = family.instance(seed), family.instance(seed)
    if one is not other and one.built.content_hash != other.built.content_hash:
        findings.error(
            "family",
            "the family",
            f"instance({seed}) gives another task each time it is called.",
            "Draw everything from a generator that is seeded with the instance's seed.",
        )
    last = family.instance(family.test_seeds[-1])
    for part, ours, theirs in (
        ("sources", set(one.built.sources), set(last.built.sources)),
        ("dimensions", set(one.built.benchmark.weights), set(last.built.benchmark.weights)),
    ):
        if ours != theirs:
            findings.error(
                "family",
                "the family",
                f"instances {seed} and {family.test_seeds[-1]} have other {part}: {sorted(ours ^ theirs)}.",
                "All instances share source names and dimensions, which observations and actions are made of.",
            )


def _check_repeats(findings: Findings, task: InnerTask) -> None:
    """Ask one object for its parts twice: generators that go on between calls give others."""
    from .fresh_process import examine

    one, other = (examine(task, 1.0, skipped=_all_scorings(task), thorough=False) for _ in range(2))
    before = {finding.where for finding in findings if finding.check == "repeatable"}
    for part in sorted(one.parts.keys() | other.parts.keys()):
        if part not in before:
            _compare(findings, part, one.parts.get(part, ()), other.parts.get(part, ()), "two calls on one object")


def _all_scorings(task: InnerTask) -> list[str]:
    from .scoring_checks import scorings_of

    return [scoring.where for scoring in scorings_of(task.built.benchmark, list(task.built.sources.values()))]


def _trl() -> InnerTrainer:
    from .evaluation import Evaluator
    from .trl.trainer import TrlTrainer

    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=4, k=4))


def _contract() -> list[str]:
    return sorted({"recorded", *(name for name in vars(InnerTrainer) if not name.startswith("_"))})


def told(error: BaseException) -> str:
    """Return what an error says: our own errors and a person's say what is wrong, others are named with their line."""
    return str(error) if isinstance(error, ValueError) else f"it raised {where_raised(error)}."
