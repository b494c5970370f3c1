"""Examines a task in a process of its own: what it is made of there, and how its scoring behaves; nothing can hang.

`examine` is what is done, `examine_in_fresh_process` starts the process and ends it when a call does not come back.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .messages import first_line, where_raised
from .scoring_checks import (
    UNBOUNDED,
    Progress,
    check_demonstrations,
    check_scoring,
    right_answers,
    scores_of,
    scorings_of,
    silent,
)
from .task_findings import Finding, Findings, quoted
from .tasks import InnerTask, resolve_task
from .tasks.base import Benchmark, Source
from .tasks.rows import canonical

BUILDING = "building"
_BLOCKS = 2_000
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Examined:
    """What one process found.

    Attributes:
        parts: part of the task -> checksums of its entries in order; equal tasks have equal ones.
        scores: scorer -> its scores as text.
        right: scorer -> prompts with an answer that it gives full marks.
        findings: what is wrong.
        broken: scorers that hung.
    """

    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    scores: Mapping[str, Sequence[str]] = field(default_factory=dict)
    right: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    broken: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "parts": {name: list(sums) for name, sums in self.parts.items()},
            "scores": {name: list(scores) for name, scores in self.scores.items()},
            "right": {name: [list(pair) for pair in pairs] for name, pairs in self.right.items()},
            "findings": [finding.to_dict() for finding in self.findings],
            "broken": list(self.broken),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Examined:
        """Read `to_dict` back."""
        right = {name: [(prompt, text) for prompt, text in pairs] for name, pairs in data["right"].items()}
        found = [Finding(**entry) for entry in data["findings"]]
        return cls(**{**data, "right": right, "findings": found})


def examine(
    task: InnerTask, seconds: float, skipped: Collection[str] = (), progress: Progress = silent, thorough: bool = True
) -> Examined:
    """Build a task's parts and try its scoring, unless its own trainer scores.

    Args:
        task: the task.
        seconds: time limit of each call of a scorer.
        skipped: scorers that are left alone, by the name that `scoring_checks.Scoring.where` has.
        progress: is told what is about to be called.
        thorough: whether to look for faults; else only what a comparison needs is gathered.
    """
    findings = Findings()
    parts = _parts(task, findings)
    benchmark, sources = parts.get("benchmark"), parts.get("sources", ())
    if task.trainer() is not None:
        return Examined(_checksums(parts), findings=findings.all)  # what it scores may be no text
    scores: dict[str, list[str]] = {}
    right: dict[str, list[tuple[str, str]]] = {}
    broken: list[str] = []
    for scoring in scorings_of(benchmark, sources):
        if scoring.where in skipped:
            continue
        if thorough:
            check_scoring(findings, scoring, seconds, progress)
        if not scoring.broken:
            scores[scoring.where] = scores_of(scoring, seconds, progress)
        if thorough and not scoring.truth and not scoring.broken:
            right[scoring.where] = right_answers(scoring, seconds, progress)
        if scoring.broken:
            broken.append(scoring.where)
    for source in sources if thorough else ():
        if f"the verifier of source {source.name!r}" not in (*skipped, *broken):
            check_demonstrations(findings, source, seconds, progress)
    return Examined(_checksums(parts), scores, right, findings.all, broken)


def _parts(task: InnerTask, findings: Findings) -> dict[str, Any]:
    """Return what the task's methods return, those that raise or return something else left out and told."""
    parts: dict[str, Any] = {}
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        for name in ("benchmark", "sources", "chat", "facts"):
            try:
                parts[name] = getattr(task, name)()
            except (Exception, SystemExit) as error:
                told = str(error) if isinstance(error, ValueError) else f"it raised {where_raised(error)}."
                findings.error("parts", f"{name}()", told, f"See `InnerTask.{name}` for what it must return.")
    if printed.getvalue():
        findings.warning(
            "prints",
            "the task",
            f"building it prints {quoted(printed.getvalue())}.",
            "Take the print out: it would stand between figures that programs read.",
        )
    if "benchmark" in parts and not isinstance(parts["benchmark"], Benchmark):
        findings.error("parts", "benchmark()", f"it returned {quoted(parts.pop('benchmark'))}, no Benchmark.")
    if "sources" in parts:
        try:
            parts["sources"] = list(parts["sources"])
        except TypeError:
            findings.error("parts", "sources()", f"it returned {quoted(parts.pop('sources'))}, no list of Source.")
    if any(not isinstance(source, Source) for source in parts.get("sources", ())):
        findings.error("parts", "sources()", f"it returned {quoted(parts.pop('sources'))}, no list of Source.")
    if parts.get("sources") == []:
        findings.error("parts", "sources()", "it returned no source.", "A task needs at least one to train on.")
    _check_facts(findings, parts)
    return parts


def _check_facts(findings: Findings, parts: dict[str, Any]) -> None:
    facts = parts.pop("facts", {})
    try:
        if not isinstance(facts, dict):
            raise ValueError(f"it returned {quoted(facts)}, no dictionary")
        if json.loads(json.dumps(facts, allow_nan=False)) != facts:
            raise ValueError("tuples, or keys that are no text, come back otherwise")
    except (TypeError, ValueError, RecursionError) as error:
        findings.error(
            "facts",
            "facts()",
            f"it is no plain JSON: {first_line(error) if not isinstance(error, ValueError) else error}.",
            "Keep text, finite numbers, truth values, lists and dictionaries with text as keys.",
        )
        return
    parts["facts"] = facts


def _checksums(parts: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return checksums over blocks of a task's entries, few enough to send and many enough to say which differ."""
    sums: dict[str, list[int]] = {}
    for source in parts.get("sources", ()):
        for kind, rows in source.rows.items():
            block = len(rows) // _BLOCKS + 1
            sums[f"source {source.name!r}, {kind}"] = [
                zlib.crc32(b"".join(_bytes(dict(row)) for row in rows[start : start + block]))
                for start in range(0, len(rows), block)
            ]
        sums[f"source {source.name!r}, verifier_version"] = [zlib.crc32(source.verifier_version.encode())]
    benchmark = parts.get("benchmark")
    if benchmark is not None:
        for split in ("validation", "test"):
            sums[f"benchmark, {split} items"] = [
                zlib.crc32(_bytes([item.prompt, item.dimension, dict(item.data)])) for item in benchmark.items(split)
            ]
        settings = [dict(benchmark.weights), benchmark.max_new_tokens, benchmark.scorer_version]
        sums["benchmark, settings"] = [zlib.crc32(_bytes(settings))]
    chat = parts.get("chat")
    if chat is not None:
        sums["chat"] = [zlib.crc32(_bytes([chat.template, chat.system, chat.tool_version, chat.max_turns]))]
    if "facts" in parts:
        sums["facts()"] = [zlib.crc32(_bytes(parts["facts"]))]
    return sums


def _bytes(value: Any) -> bytes:
    try:
        return canonical(value)
    except (ValueError, TypeError):
        return b"?"  # told where the content hash is made


# The process ----------------------------------------------------------------------------------------------------------


def sendable(task: str | InnerTask, instance: int | None) -> dict[str, Any]:
    """Return what a fresh process needs to have the task, as plain JSON types; no instance is the first.

    Raises:
        Exception: an object that cannot be pickled raises whatever it does.
    """
    if isinstance(task, str):
        return {"name": task, "instance": instance}
    try:
        pickled = importlib.import_module("cloudpickle").dumps(task)  # what vector environments send tasks with
    except ImportError:
        pickled = pickle.dumps(task)
    return {"pickled": pickled.hex()}


def examine_in_fresh_process(
    sent: Mapping[str, Any],
    *,
    hash_seed: str,
    seconds: float,
    build_seconds: float,
    skipped: Collection[str] = (),
    thorough: bool = True,
) -> Examined:
    """Return what a process of its own finds about a task; scorers that hang end it, and it is begun again.

    Args:
        sent: what `sendable` returned.
        hash_seed: the process's ``PYTHONHASHSEED``, which the order of sets follows.
        seconds: time limit of each call of a scorer.
        build_seconds: time limit of importing and building the task.
        skipped: scorers that are left alone.
        thorough: as in `examine`.
    """
    left_alone, told = list(skipped), Findings()
    while True:
        with tempfile.TemporaryDirectory(prefix="posttrain-task-") as folder:
            request = {**sent, "seconds": seconds, "skipped": left_alone, "thorough": thorough}
            Path(folder, "request.json").write_text(json.dumps(request), "utf-8")
            where, asked, died = _run(folder, hash_seed, seconds, build_seconds)
            done = Path(folder, "result.json")
            if done.is_file():
                result = Examined.from_dict(json.loads(done.read_text("utf-8")))
                found = [*told.all, *result.findings]
                return Examined(result.parts, result.scores, result.right, found, [*left_alone, *result.broken])
        if where == BUILDING or where in left_alone:
            problem = died or f"importing and building it took longer than {build_seconds:g} seconds."
            told.error("resolves", "the task", problem, "It must work in every worker process, not only in this one.")
            return Examined(findings=told.all, broken=left_alone)
        if died:
            told.error("raises", where, f"{died.rstrip('.')}, {asked}", "Nothing that is said may end the process.")
        else:
            problem = f"it did not come back {asked.rstrip('.')}; only the end of its process ended it."
            told.error("hangs", where, problem, UNBOUNDED)
        left_alone.append(where)


def _run(folder: str, hash_seed: str, seconds: float, build_seconds: float) -> tuple[str, str, str]:
    """Run the process to its end; return what it was at: where, asked what, and how it died when it did by itself."""
    progress, errors = Path(folder, "progress"), Path(folder, "errors")
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1])"
    died, changed, since = "", "", time.monotonic()
    with errors.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", code, folder],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            while child.poll() is None:
                now = progress.read_text("utf-8", "replace") if progress.is_file() else ""
                if now != changed:
                    changed, since = now, time.monotonic()
                where, _ = _at(changed)
                if time.monotonic() - since > (build_seconds if where == BUILDING else 2 * seconds + 3):
                    break
                time.sleep(_POLL_SECONDS)
            else:
                last = errors.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["no word"]
                died = f"its process ended with code {child.returncode}: {last[0][:300]}."
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    where, asked = _at(progress.read_text("utf-8", "replace") if progress.is_file() else "")
    return where, asked, died


def _at(progress: str) -> tuple[str, str]:
    """Return where a process is, and what was asked there, from what it wrote of its progress."""
    _, where, asked, *_ = [*progress.split("\n", 2), "", "", ""]
    return where.strip() or BUILDING, asked.strip()


def main(folder: str) -> None:
    """Do what ``FOLDER/request.json`` asks and write ``FOLDER/result.json``; the process's own entry."""
    request = json.loads(Path(folder, "request.json").read_text("utf-8"))
    calls = 0
    target = os.open(Path(folder, "progress"), os.O_CREAT | os.O_WRONLY)

    def progress(text: str) -> None:
        nonlocal calls
        calls += 1
        os.pwrite(target, f"{calls}\n{text}\n".encode("utf-8", "replace").ljust(2000)[:2000], 0)

    progress(BUILDING)
    findings, printed = Findings(), io.StringIO()
    task: Any = None
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            if "pickled" in request:
                task = pickle.loads(bytes.fromhex(request["pickled"]))  # the parent's own object, a moment old
            else:
                family, instance = resolve_task(request["name"]), request["instance"]
                task = family.instance(family.train_seeds[0] if instance is None else instance)
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, ValueError) else f"it raised {where_raised(error)}."
        if "pickled" in request:
            told = f"a fresh process cannot have it: {told}"
        findings.error("resolves", "the task", told, "Workers must be able to have it too, from the same folder.")
    if printed.getvalue():
        findings.warning(
            "prints",
            "the task",
            f"importing or making it prints {quoted(printed.getvalue())}.",
            "Take the print out: it would stand between figures that programs read.",
        )
    if task is None:
        result = Examined(findings=findings.all)
    else:
        result = examine(task, request["seconds"], request["skipped"], progress, request["thorough"])
        result = replace(result, findings=[*findings.all, *result.findings])
    partial = Path(folder, "result.partial")
    partial.write_text(json.dumps(result.to_dict()), "utf-8")
    partial.replace(Path(folder, "result.json"))
    os._exit(0)  # threads that were given up must not hold the process
