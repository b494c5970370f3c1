"""The figures and the page of the sparse-reward comparison, all of them from the rows of its runs."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .make_sparse_control import Args

Row = Mapping[str, Any]
RESAMPLES = 10_000
LEVEL = 0.05
"""Episodes are called fewer where the interval leaves 0 out and the exact p-value is below this."""
CLAIM = 0.69
"""Share of episodes to first success that the authors of the method say adaptive control saves."""
SMALL = "default, minibatches of 64"
ORDER = ("default", SMALL, "best fixed", "rules")
FIXED = ("default", SMALL, "best fixed")
"""Arms that the others are compared with."""


def reward_moments(row: Row, last: int | None = None) -> tuple[float, float]:
    """Return mean and variance of the reward of an episode, over the episodes that ended in a run.

    Args:
        row: the run.
        last: only those of so many last iterations; None for all.
    """
    begin = 0 if last is None else -last
    counts = np.array(row["iteration_episodes"][begin:], np.float64)
    means = np.array(row["iteration_reward"][begin:])
    spreads = np.array(row["iteration_reward_std"][begin:])
    mean = float((counts * means).sum() / counts.sum())
    return mean, float((counts * (spreads**2 + means**2)).sum() / counts.sum() - mean**2)


def late_success(row: Row) -> float:
    """Return the share of episodes with a reward, of those that ended in the last quarter of a run."""
    begin = -max(1, len(row["iteration_episodes"]) // 4)
    counts = np.array(row["iteration_episodes"][begin:], np.float64)
    return float((counts * np.array(row["iteration_success"][begin:])).sum() / counts.sum())


def horizon(rows: Sequence[Row]) -> int:
    """Return the number of episodes that every run without success had, at which episode counts are restricted.

    Runs have equal environment steps and unequal episodes. Up to the fewest episodes of a run without success none is
    censored, so a mean of ``min(episodes to first success, horizon)`` needs no model of what was not seen. Where every
    run succeeded it is the most episodes that one took.
    """
    never = [row["episodes"] for row in rows if row["first_success_episode"] is None]
    return int(min(never)) if never else max(int(row["first_success_episode"]) for row in rows)


def restricted(row: Row, at: int, of: str = "first_success_episode") -> float:
    """Return episodes (or steps) to the first success, at most ``at``; a run that never had one counts as ``at``."""
    value = row[of]
    return float(at if value is None else min(int(value), at))


def censored_median(values: Sequence[float | None]) -> float | None:
    """Return the median where None is longer than any number; None when the median is not reached."""
    ordered = sorted(math.inf if value is None else float(value) for value in values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return None if math.isinf(median) else median


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; the error of one value is 0."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def paired(
    left: Sequence[float], right: Sequence[float], statistic: Callable[[Any, Any], Any]
) -> tuple[float, float, float]:
    """Return a statistic of paired values and its 95 % bootstrap interval, which redraws pairs.

    Args:
        left: values of one arm, by seed.
        right: those of the other, of the same seeds.
        statistic: of two arrays ``(..., seeds)`` along the last axis.
    """
    one, other = np.array(left), np.array(right)
    picks = np.random.default_rng(0).integers(len(one), size=(RESAMPLES, len(one)))
    low, high = np.quantile(statistic(one[picks], other[picks]), (0.025, 0.975))
    return float(statistic(one, other)), float(low), float(high)


def sign_flip(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the exact two-sided p-value of paired differences under changes of their signs.

    It is the share of all sign patterns whose summed difference is at least as large; exact for any number of pairs, so
    it does not share the bootstrap's optimism with few of them.
    """
    differences = np.array(left) - np.array(right)
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float((sums >= abs(differences.sum()) - 1e-9 * np.abs(differences).sum()).mean())


def difference(one: Any, other: Any) -> Any:
    """Return by how much the mean of one is above that of the other."""
    return (one - other).mean(axis=-1)


def saved(one: Any, other: Any) -> Any:
    """Return which share of the other's mean one needs less."""
    return 1.0 - one.mean(axis=-1) / other.mean(axis=-1)


def arms_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return arm -> test rows sorted by seed, in the order of `ORDER`."""
    tests = [row for row in rows if row["phase"] == "test"]
    names = [name for name in ORDER if any(row["arm"] == name for row in tests)]
    return {name: sorted((r for r in tests if r["arm"] == name), key=lambda row: row["seed"]) for name in names}


MEASURES: Mapping[str, tuple[str, Callable[[Row, int], float]]] = {
    "episodes": ("episodes to first success, restricted", lambda row, at: restricted(row, at)),
    "steps": (
        "environment steps to first success, restricted",
        lambda row, at: restricted(row, row["environment_steps"], "first_success_steps"),
    ),
    "reward": ("mean reward per episode", lambda row, at: reward_moments(row)[0]),
    "variance": ("variance of the reward per episode", lambda row, at: reward_moments(row)[1]),
    "late": ("success in the last quarter of training", lambda row, at: late_success(row)),
    "success": ("success on test starts", lambda row, at: row["test_success"]),
    "marks": ("marks on test starts, share", lambda row, at: row["test_marks"]),
}


def values(rows: Sequence[Row], measure: str, at: int) -> list[float]:
    """Return a measure of each run; see `MEASURES`."""
    return [MEASURES[measure][1](row, at) for row in rows]


def word(low: float, high: float, more: str, less: str) -> str:
    """Return ``more`` or ``less`` where an interval lies on one side of 0, else ``"not told apart"``."""
    return more if low > 0 else less if high < 0 else "not told apart"


def describe(rows: Sequence[Row], chosen: str, args: Args) -> str:
    """Return the Markdown page.

    Args:
        rows: every run.
        chosen: name of the fixed setting that the tuning seeds chose.
        args: of the comparison.
    """
    from .examples.sparse_locomotion import PROBLEMS

    arms = arms_of(rows)
    tests = [row for found in arms.values() for row in found]
    at, problem = horizon(tests), PROBLEMS[args.problem]
    steps, titles = tests[0]["environment_steps"], " | ".join(title for title, _ in MEASURES.values())
    lines = [
        "# Sparse-reward control: fixed settings and adaptive ones at equal environment steps",
        "",
        f"Stable-Baselines3's PPO on `{problem.environment}`, where reward is 1 when a mark "
        f"({', '.join(f'{mark:g}' for mark in problem.marks)} {problem.unit}) is reached for the first time in an "
        f"episode of at most {problem.max_steps} steps, and 0 else; the body's own reward is dropped. A run is "
        f"{tests[0]['iterations']} PPO iterations, {steps:,} environment steps, whoever controls it. Success is that "
        f"the first mark is reached. {len(args.seeds)} seeds each; a seed decides the untrained policy, the actions "
        "and the order of starts, and arms are paired by it.",
        "",
        "Arms: *default* is Stable-Baselines3's settings with minibatches of 256"
        + ("; *default, minibatches of 64* is its settings as they are" if SMALL in arms else "")
        + f", in 8 environments; *best fixed* is {chosen}, the best of {len(grid_names(rows))} by mean reward on "
        f"{len(args.tuning_seeds)} other seeds (below); *rules* is "
        "[sparse_control_rules.yaml](../examples/sparse_control_rules.yaml), from the default's settings: entropy and "
        "discount go up while nothing is rewarded, and back as rewards come. No learned controller was run.",
        "",
        f"Episodes to first success are censored where a run never had one. They are restricted at {at:,} episodes, "
        "the fewest that a run without success had, and steps at the budget: restricted means need no model of what "
        "was not seen. ± is the standard error over seeds.",
        "",
        f"| arm | never succeeded | median episodes to first success | {titles} |",
        "|---|---|---|" + "---|" * len(MEASURES),
    ]
    for name, found in arms.items():
        never = sum(row["first_success_episode"] is None for row in found)
        median = censored_median([row["first_success_episode"] for row in found])
        cells = [_shown(*mean_and_error(values(found, measure, at))) for measure in MEASURES]
        reached = "not reached" if median is None else f"{median:,.0f}"
        lines.append(f"| {name} | {never} of {len(found)} | {reached} | " + " | ".join(cells) + " |")
    lines += ["", *_differences(arms, at), "", *_verdict(arms, at), "", *_tuning(rows), "", *_how(arms, rows)]
    return "\n".join(lines) + "\n"


def grid_names(rows: Sequence[Row]) -> list[str]:
    """Return the fixed settings that were tried, in the order of their first rows."""
    return list(dict.fromkeys(row["arm"] for row in rows if row["phase"] == "tuning"))


def _shown(mean: float, error: float) -> str:
    return f"{mean:,.0f} ± {error:,.0f}" if mean >= 100 else f"{mean:.3f} ± {error:.3f}"


def _differences(arms: Mapping[str, Sequence[Row]], at: int) -> list[str]:
    lines = [
        "Differences on the same seeds, with 95 % bootstrap intervals over seeds (of few seeds they are too narrow):",
        "",
        "| arm | less | " + " | ".join(title for title, _ in MEASURES.values()) + " |",
        "|---|---|" + "---|" * len(MEASURES),
    ]
    for name, other in _pairs(arms):
        cells = []
        for measure in MEASURES:
            mean, low, high = paired(values(arms[name], measure, at), values(arms[other], measure, at), difference)
            digits = 0 if measure in ("episodes", "steps") else 3
            cells.append(f"{mean:+,.{digits}f} [{low:+,.{digits}f}, {high:+,.{digits}f}]")
        lines.append(f"| {name} | {other} | " + " | ".join(cells) + " |")
    return lines


def _pairs(arms: Mapping[str, Sequence[Row]]) -> list[tuple[str, str]]:
    return [
        (name, other)
        for other in FIXED
        for name in arms
        if name in ("best fixed", "rules") and name != other and other in arms
        if len(arms[name]) == len(arms[other])
    ]


def _verdict(arms: Mapping[str, Sequence[Row]], at: int) -> list[str]:
    """Say in words, from the figures, whether adaptive control wins."""
    lines = ["In words:", ""]
    for name, other in _pairs(arms):
        if name == "best fixed":
            continue
        mine, others = values(arms[name], "episodes", at), values(arms[other], "episodes", at)
        share, low, high = paired(mine, others, saved)
        chance = sign_flip(mine, others)
        said = word(low, high, "fewer", "more") if chance < LEVEL else "not told apart"
        sooner = sum(a < b for a, b in zip(mine, others, strict=True))
        later = sum(a > b for a, b in zip(mine, others, strict=True))
        claim = "within" if low <= CLAIM <= high else "below" if high < CLAIM else "above"
        reward = paired(values(arms[name], "reward", at), values(arms[other], "reward", at), difference)
        success = paired(values(arms[name], "success", at), values(arms[other], "success", at), difference)
        counted = said if said == "not told apart" else f"{said} episodes"
        lies = "within the interval" if claim == "within" else f"outside: the interval is {claim} it"
        lines.append(
            f"- {name} against {other}: {share:+.0%} episodes saved [{low:+.0%}, {high:+.0%}]; sooner on {sooner} "
            f"seeds, later on {later}, exact sign-flip p = {chance:.3f}: {counted}. The method authors' claim is "
            f"{CLAIM:.0%} fewer, which lies {lies}. Mean reward: {word(*reward[1:], 'higher', 'lower')}; success on "
            f"test starts: {word(*success[1:], 'higher', 'lower')}."
        )
    return lines


def _tuning(rows: Sequence[Row]) -> list[str]:
    lines = [
        "The grid of fixed settings, on seeds that no test uses. So few seeds choose with much noise: what is best on "
        "them need not be on others, and a wider search would make a stronger baseline.",
        "",
        "| fixed setting | mean reward per episode | never succeeded | success on test starts |",
        "|---|---|---|---|",
    ]
    for name in grid_names(rows):
        found = [row for row in rows if (row["phase"], row["arm"]) == ("tuning", name)]
        never = sum(row["first_success_episode"] is None for row in found)
        reward = _shown(*mean_and_error([reward_moments(row)[0] for row in found]))
        success = _shown(*mean_and_error([row["test_success"] for row in found]))
        lines.append(f"| {name} | {reward} | {never} of {len(found)} | {success} |")
    return lines


def _how(arms: Mapping[str, Sequence[Row]], rows: Sequence[Row]) -> list[str]:
    lines = [
        "What the controlled runs did, per run on average, and each run's first success:",
        "",
        "| arm | adjustments | highest entropy coefficient | highest gamma | first success after, episodes by seed |",
        "|---|---|---|---|---|",
    ]
    for name, found in arms.items():
        done: Counter[str] = Counter()
        for row in found:
            done.update(json.loads(row["adjustments"]))
        told = ", ".join(f"{kind} {count / len(found):.1f}" for kind, count in done.most_common()) or "none"
        entropy = statistics.fmean(max(row["iteration_entropy_coef"]) for row in found)
        gamma = statistics.fmean(max(row["iteration_gamma"]) for row in found)
        first = ", ".join(
            f"never in {row['episodes']:,}"
            if row["first_success_episode"] is None
            else f"{row['first_success_episode']:,}"
            for row in found
        )
        lines.append(f"| {name} | {told} | {entropy:.4f} | {gamma:.4f} | {first} |")
    minutes = sum(row["train_seconds"] for row in rows) / 60
    return [
        *lines,
        "",
        "What the table does not show: other bodies, other marks, longer runs. The rules were written by hand and "
        "looked at on two seeds that no test uses; unlike the fixed settings they were not searched for. No comparison "
        "is corrected for their number.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_sparse_control`, from the repository root. "
        f"{len(rows)} runs, {minutes:.0f} minutes of wall time on a shared CPU, one thread. Versions: "
        f"{rows[0]['versions']}.",
    ]
