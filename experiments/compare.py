"""Runs several policies on the same meta-test instances, seeds and budget, and summarises what they reached."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from ..inner_trainers.files import write_atomically
from ..inner_trainers.messages import did_you_mean
from ..meta_policies.catalogue import check_policy_name, policy_file
from ..meta_policies.files import file_digest
from .comparison import Comparison, EpisodeResult, RoundRecord, summarise
from .comparison_files import to_json, write_parquet
from .episodes import policy_labels, run_named_episode
from .settings import EnvSettings, require_folder
from .workers import end_with_parent

Job = tuple[tuple[str, str], int, int]
"""(policy, label), instance, seed."""


def compare(
    settings: EnvSettings,
    policies: Sequence[str],
    instances: Sequence[int],
    seeds: Sequence[int],
    out: Path,
    *,
    workers: int = 1,
    reference: str | None = None,
    deterministic: bool = False,
    on_episode: Callable[[int, int, EpisodeResult], None] | None = None,
) -> Comparison:
    """Run every policy on every instance and seed, and write episodes, summary and figures to ``out``.

    Each finished round is on disk at once; a second call with the same folder runs only what is missing.

    Args:
        settings: the environment, the same for every policy.
        policies: heuristics by name, trained policies by file.
        instances: instance seeds.
        seeds: episode seeds.
        out: result folder.
        workers: processes; each imports TRL once and runs many episodes.
        reference: policy that others are compared with, by name or label; None for the first.
        deterministic: whether trained policies take their likeliest action instead of sampling.
        on_episode: called with (done, total, result) after each episode.

    Raises:
        ValueError: an unknown policy, a repeated policy, instance or seed, or a folder that holds a comparison with
            other settings.
    """
    for name in policies:
        check_policy_name(name)
    labels = policy_labels(policies)
    held_against = _reference(reference, policies, labels)
    for kind, values in (("policy", labels), ("instance", list(instances)), ("seed", list(seeds))):
        repeated = sorted({str(v) for v in values if list(values).count(v) > 1})
        if repeated or not values:
            raise ValueError(f"compare: each {kind} once, at least one; got {values}.")
    require_folder("out", out)
    facts = {**comparison_settings(settings, policies, labels, instances), "deterministic": deterministic}
    out.mkdir(parents=True, exist_ok=True)
    check_settings_file(out / "compare.json", facts, ignore=("content", "trained"))
    jobs = [(p, i, s) for i in instances for s in seeds for p in zip(policies, labels, strict=True)]
    results: dict[Job, EpisodeResult] = {}
    for job in jobs:
        stored = _episode_path(out, job)
        if stored.exists():
            results[job] = _read_episode(stored)
    missing = [job for job in jobs if job not in results]
    for job, result in _run(settings, missing, out, workers, deterministic):
        results[job] = result
        write_atomically(_episode_path(out, job), json.dumps(asdict(result)).encode())
        shutil.rmtree(_journal_path(out, job), ignore_errors=True)  # its rounds are in the episode's file
        if on_episode is not None:
            on_episode(len(results), len(jobs), result)
    episodes = [results[job] for job in jobs]
    comparison = summarise(episodes, reference=held_against)
    write_parquet(episodes, out)
    write_atomically(out / "comparison.json", to_json(comparison).encode())
    return comparison


def comparison_settings(
    settings: EnvSettings, policies: Sequence[str], labels: Sequence[str], instances: Sequence[int]
) -> dict[str, Any]:
    """Return what must be equal for two comparisons to share a folder.

    ``content`` (instance -> hash of its data, items and base weights) and ``trained`` (label -> hash of the file) may
    grow by new entries, but an entry that is there must not change: an edited data file or a retrained policy is
    another comparison.
    """
    family = settings.family()
    return {
        "environment": settings.to_dict(),
        "version": __version__,
        "content": {str(instance): family.instance(instance).built.content_hash for instance in instances},
        "trained": {
            label: file_digest(file)
            for policy, label in zip(policies, labels, strict=True)
            if (file := policy_file(policy)) is not None
        },
    }


def _reference(reference: str | None, policies: Sequence[str], labels: Sequence[str]) -> str:
    if reference is None:
        return labels[0]
    for policy, label in zip(policies, labels, strict=True):
        if reference in (policy, label):
            return label
    raise ValueError(f"reference: {reference!r} is not among the compared policies.{did_you_mean(reference, labels)}")


def check_settings_file(path: Path, settings: Mapping[str, Any], ignore: Sequence[str] = ()) -> None:
    """Write the settings beside a run's results, or refuse a folder that was made with others.

    Args:
        path: the settings file.
        settings: plain data.
        ignore: top-level keys that may change; of a mapping among them, entries may be added and none may change.

    Raises:
        ValueError: names each differing key with both values.
    """
    plain = json.loads(json.dumps(settings))
    if path.exists():
        try:
            stored = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); use a new folder, or restore the file.") from error
        if not isinstance(stored, dict):
            raise ValueError(f"{path}: damaged (no mapping); use a new folder, or restore the file.")
        for key in ignore:
            old, new = stored.get(key), plain.get(key)
            if isinstance(old, dict) and isinstance(new, dict):
                plain[key] = {**old, **new}
                stored[key] = {**{k: v for k, v in plain[key].items() if k not in old}, **old}
            else:
                stored[key] = new
        differences = list(_differences(stored, plain))
        if differences:
            raise ValueError(
                f"{path.parent}: it was made with other settings; {'; '.join(differences)}. "
                "Use the same settings to resume, or a new folder."
            )
    write_atomically(path, json.dumps(plain, indent=1).encode())


def _differences(stored: Any, given: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in sorted({*stored, *given}):
            yield from _differences(stored.get(key), given.get(key), f"{prefix}.{key}" if prefix else key)
    elif stored != given:
        yield f"{prefix}: {stored!r} there, {given!r} now"


def _run(
    settings: EnvSettings, jobs: Sequence[Job], out: Path, workers: int, deterministic: bool
) -> Iterator[tuple[Job, EpisodeResult]]:
    def arguments(job: Job, worker: int) -> tuple[Any, ...]:
        (policy, label), instance, seed = job
        return settings, policy, instance, seed, worker, label, _journal_path(out, job), deterministic

    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, run_job(*arguments(job, 0))
        return
    # Spawned, never forked: a fork copies CUDA's state and every lock that a thread of ours may hold.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent)
    try:
        futures = {pool.submit(run_job, *arguments(job, i % workers)): job for i, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process died (out of memory, or ended from outside); finished rounds are kept, "
            "run the same command again to go on, perhaps with fewer --workers."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_job(
    settings: EnvSettings,
    policy: str,
    instance: int,
    seed: int,
    worker: int,
    label: str,
    journal: Path,
    deterministic: bool,
) -> EpisodeResult:
    """Run one episode of a comparison; a spawn target."""
    return run_named_episode(
        settings, policy, instance, seed, worker, name=label, journal=journal, deterministic=deterministic
    )


def _job_name(job: Job) -> str:
    """Return a file name that no other job has: labels that look alike as file names differ in their checksum."""
    (_, label), instance, seed = job
    readable = "".join(c if c.isalnum() or c in "-_" else "_" for c in label)
    return f"{readable}-{zlib.crc32(label.encode()):08x}-{instance}-{seed}"


def _episode_path(out: Path, job: Job) -> Path:
    return out / "episodes" / f"{_job_name(job)}.json"


def _journal_path(out: Path, job: Job) -> Path:
    return out / "running" / _job_name(job)


def _read_episode(path: Path) -> EpisodeResult:
    try:
        data = json.loads(path.read_text())
        trajectory = tuple(RoundRecord(**entry) for entry in data.pop("trajectory"))
        return EpisodeResult(**data, trajectory=trajectory)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete the file to run this episode again.") from error
