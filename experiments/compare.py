"""Runs several policies on the same meta-test instances, seeds and budget, and summarises what they reached."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..meta_policies.catalogue import check_policy_name
from .comparison import Comparison, EpisodeResult, RoundRecord, summarise, to_json, write_atomically, write_parquet
from .episodes import policy_label, run_named_episode
from .settings import EnvSettings


def compare(
    settings: EnvSettings,
    policies: Sequence[str],
    instances: Sequence[int],
    seeds: Sequence[int],
    out: Path,
    *,
    workers: int = 1,
    reference: str | None = None,
    on_episode: Callable[[int, int, EpisodeResult], None] | None = None,
) -> Comparison:
    """Run every policy on every instance and seed, and write episodes, summary and figures to ``out``.

    Each finished episode is on disk at once; a second call with the same folder runs only what is missing.

    Args:
        settings: the environment, the same for every policy.
        policies: heuristics by name, trained policies by file.
        instances: instance seeds.
        seeds: episode seeds.
        out: result folder.
        workers: processes; each imports TRL once and runs many episodes.
        reference: policy that others are compared with; None for the first.
        on_episode: called with (done, total, result) after each episode.

    Raises:
        ValueError: an unknown policy, a repeated policy, instance or seed, or a folder that holds a comparison with
            other settings.
    """
    for name in policies:
        check_policy_name(name)
    labels = [policy_label(name) for name in policies]
    for kind, values in (("policy", labels), ("instance", list(instances)), ("seed", list(seeds))):
        repeated = sorted({str(v) for v in values if list(values).count(v) > 1})
        if repeated or not values:
            raise ValueError(f"compare: each {kind} once, at least one; got {values}.")
    out.mkdir(parents=True, exist_ok=True)
    check_settings_file(out / "compare.json", comparison_settings(settings, policies))
    jobs = [(p, i, s) for i in instances for s in seeds for p in policies]
    results: dict[tuple[str, int, int], EpisodeResult] = {}
    for job in jobs:
        stored = _episode_path(out, *job)
        if stored.exists():
            results[job] = _read_episode(stored)
    missing = [job for job in jobs if job not in results]
    for job, result in _run(settings, missing, workers):
        results[job] = result
        write_atomically(_episode_path(out, *job), json.dumps(asdict(result)).encode())
        if on_episode is not None:
            on_episode(len(results), len(jobs), result)
    episodes = [results[job] for job in jobs]
    comparison = summarise(episodes, reference=reference if reference is not None else labels[0])
    write_parquet(episodes, out)
    write_atomically(out / "comparison.json", to_json(comparison).encode())
    return comparison


def comparison_settings(settings: EnvSettings, policies: Sequence[str]) -> dict[str, Any]:
    """Return what must be equal for two comparisons to share a folder; a retrained policy file counts as another."""
    from ..meta_policies.sb3 import file_digest

    files = {policy_label(p): file_digest(p) for p in policies if p.endswith(".zip")}
    return {"environment": settings.to_dict(), "trained": files}


def check_settings_file(path: Path, settings: Mapping[str, Any], ignore: Sequence[str] = ()) -> None:
    """Write the settings beside a run's results, or refuse a folder that was made with others.

    Raises:
        ValueError: names each differing key with both values.
    """
    plain = json.loads(json.dumps(settings))
    if path.exists():
        try:
            stored = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); use a new folder, or restore the file.") from error
        differences = [d for d in _differences(stored, plain) if d.split(":")[0] not in ignore]
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
    settings: EnvSettings, jobs: Sequence[tuple[str, int, int]], workers: int
) -> Iterator[tuple[tuple[str, int, int], EpisodeResult]]:
    if workers <= 1 or len(jobs) <= 1:
        for policy, instance, seed in jobs:
            yield (policy, instance, seed), run_named_episode(settings, policy, instance, seed)
        return
    # Spawned, never forked: a fork copies CUDA's state and every lock that a thread of ours may hold.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {
            pool.submit(run_named_episode, settings, policy, instance, seed, index % workers): (policy, instance, seed)
            for index, (policy, instance, seed) in enumerate(jobs)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process died (out of memory, or ended from outside); finished episodes are kept, "
            "run the same command again to go on, perhaps with fewer --workers."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _episode_path(out: Path, policy: str, instance: int, seed: int) -> Path:
    label = "".join(c if c.isalnum() or c in "-_" else "_" for c in policy_label(policy))
    return out / "episodes" / f"{label}-{instance}-{seed}.json"


def _read_episode(path: Path) -> EpisodeResult:
    try:
        data = json.loads(path.read_text())
        trajectory = tuple(RoundRecord(**entry) for entry in data.pop("trajectory"))
        return EpisodeResult(**data, trajectory=trajectory)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete the file to run this episode again.") from error
