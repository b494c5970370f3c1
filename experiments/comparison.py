"""A comparison: the episodes every policy ran on the same instances and seeds, and the figures drawn from them.

Words: an *instance* is one meta-test task, a *seed* one repetition of it, an *episode* one policy's whole search on
one instance and seed. Scores of an episode are means over the TEST split, which no policy sees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from .statistics import (
    FloatArray,
    Statistic,
    interquartile_mean,
    mean_of_task_means,
    probability_of_improvement,
    stratified_bootstrap_interval,
    task_bootstrap_interval,
    two_sample_bootstrap_interval,
)

ROOM_TO_IMPROVE_FLOOR = 1e-3
FEW_UNITS = 10  # below, a nominal 95 % percentile bootstrap excludes a true zero clearly more often than in 5 %

Resampling: TypeAlias = Literal["seeds", "instances", "none"]
Record = TypeVar("Record", "RoundRecord", "EpisodeResult", "Estimate", "PolicySummary", "Comparison")


def normalised(base: float, score: float) -> float:
    """The normalised gain is the share of the room above the base score that was won."""
    return (score - base) / max(1.0 - base, ROOM_TO_IMPROVE_FLOOR)


@dataclass(frozen=True)
class RoundRecord:
    """One round of an episode, as the episode stood when the round ended.

    Attributes:
        round: number of the round in its episode, from 1.
        budget_fraction: share of the episode's budget spent so far; slightly above 1 after an overshoot.
        best_validation_score: best validation score so far, the base checkpoint included, in [0, 1].
        best_test_score: TEST score of the checkpoint that is best on validation, so it may fall; None if not measured.
        recipe: the recipe in words.
        gain: change of the best validation score by this round, as the reward sees it.
        ended: ``"finished"``, ``"budget"``, ``"stopped"`` or ``"failed"``.
        failure: cause of the failure; None for a sound round.
    """

    round: int
    budget_fraction: float
    best_validation_score: float
    best_test_score: float | None = None
    recipe: str = ""
    gain: float = 0.0
    ended: str = "finished"
    failure: str | None = None

    def __post_init__(self) -> None:
        _make_plain(self)


@dataclass(frozen=True)
class EpisodeResult:
    """What one policy reached on one instance and seed.

    Attributes:
        policy: name of the policy.
        instance: which meta-test instance.
        seed: which repetition; the same number means the same base checkpoint and data for every policy.
        base_score: TEST score of the base checkpoint, in [0, 1].
        final_score: TEST score of the checkpoint the episode hands over, in [0, 1].
        base_error: standard error of ``base_score``.
        final_error: standard error of ``final_score``.
        base_validation_score: validation score of the base checkpoint, in [0, 1].
        validation_gain: normalised gain on the validation split, which the policy does see.
        budget_used: share of the budget spent; slightly above 1 after an overshoot.
        rounds: how many rounds were run.
        failures: cause -> number of failed rounds.
        recorded: whether rounds were answered from recorded ones or a model of them instead of being trained.
        trajectory: the rounds in order.

    Raises:
        ValueError: a figure is NaN, infinite or out of its range; names the policy, the instance and the seed.
    """

    policy: str
    instance: int
    seed: int
    base_score: float
    final_score: float
    base_error: float
    final_error: float
    base_validation_score: float
    validation_gain: float
    budget_used: float
    rounds: int
    failures: Mapping[str, int] = field(default_factory=dict)
    recorded: bool = False
    trajectory: tuple[RoundRecord, ...] = ()

    def __post_init__(self) -> None:
        _make_plain(self)
        for name in ("instance", "seed", "rounds"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"{self.label}: {name} must be an integer, got {getattr(self, name)!r}.")
        for name in ("base_score", "final_score", "base_validation_score"):
            self._check(name, getattr(self, name), 0.0, 1.0)
        for name in ("base_error", "final_error", "budget_used", "rounds"):
            self._check(name, getattr(self, name), 0.0, math.inf)
        self._check("validation_gain", self.validation_gain, -math.inf, math.inf)
        for cause, count in self.failures.items():
            self._check(f"failures[{cause!r}]", count, 0.0, math.inf)
        object.__setattr__(self, "trajectory", tuple(self.trajectory))
        spent = 0.0
        for entry in self.trajectory:
            where = f"trajectory, round {entry.round}:"
            self._check(f"{where} budget_fraction", entry.budget_fraction, spent, math.inf)
            self._check(f"{where} best_validation_score", entry.best_validation_score, 0.0, 1.0)
            self._check(f"{where} gain", entry.gain, -math.inf, math.inf)
            if entry.best_test_score is not None:
                self._check(f"{where} best_test_score", entry.best_test_score, 0.0, 1.0)
            spent = entry.budget_fraction

    @property
    def normalised_gain(self) -> float:
        """``(final_score - base_score) / max(1 - base_score, 1e-3)`` on the TEST split."""
        return normalised(self.base_score, self.final_score)

    @property
    def within_noise(self) -> bool:
        """Whether the two TEST scores differ by no more than twice the standard error of their difference.

        The error treats the two scores as independent. Both come from the same items, so it errs towards "noise".
        """
        return abs(self.final_score - self.base_score) <= 2.0 * math.hypot(self.base_error, self.final_error)

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> EpisodeResult:
        """Returns the episode a plain row describes; ``trajectory`` may hold plain rows too.

        Raises:
            ValueError: a key is missing or unknown, or ``normalised_gain`` is given and does not fit the scores.
        """
        values = dict(row)
        given_gain = values.pop("normalised_gain", None)
        values["trajectory"] = tuple(
            entry if isinstance(entry, RoundRecord) else build_record(RoundRecord, entry)
            for entry in values.get("trajectory", ())
        )
        result = build_record(cls, values)
        if given_gain is not None and not math.isclose(given_gain, result.normalised_gain, abs_tol=1e-6):
            raise ValueError(
                f"{result.label}: normalised_gain is {given_gain!r}, its scores give {result.normalised_gain!r}."
            )
        return result

    @property
    def label(self) -> str:
        """The episode's name in an error: policy, instance and seed."""
        return f"Policy {self.policy!r}, instance {self.instance}, seed {self.seed}"

    def _check(self, name: str, value: object, low: float, high: float) -> None:
        """Raises unless ``value`` is a finite number in the range."""
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value
        if math.isinf(number) or not low <= number <= high:  # NaN fails the second test
            raise ValueError(f"{self.label}: {name} must be a finite number in [{low:g}, {high:g}], got {value!r}.")


@dataclass(frozen=True)
class Estimate:
    """A figure with the two ends of its interval; both equal it where no interval can be drawn."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicySummary:
    """One policy's figures over all its episodes; gains are normalised TEST gains.

    Attributes:
        policy: name of the policy.
        episodes: number of episodes.
        gain: mean gain.
        interquartile_gain: interquartile mean of the gain.
        regret: mean of (best gain any compared policy reached on that instance and seed) minus this policy's.
        gain_over_reference: mean difference to the reference on the same instance and seed; None for the reference.
        probability_over_reference: probability of improvement over the reference; None for the reference.
        failures: cause -> number of failed rounds.
        mean_rounds: mean rounds per episode.
        mean_budget_used: mean share of the budget spent.
        within_noise_share: share of episodes whose TEST change is within noise (`EpisodeResult.within_noise`).
        recorded_episodes: how many of the episodes rest on recorded rounds.
    """

    policy: str
    episodes: int
    gain: Estimate
    interquartile_gain: Estimate
    regret: Estimate
    gain_over_reference: Estimate | None
    probability_over_reference: Estimate | None
    failures: Mapping[str, int]
    mean_rounds: float
    mean_budget_used: float
    within_noise_share: float
    recorded_episodes: int


@dataclass(frozen=True)
class Comparison:
    """All policies' figures on one grid of instances and seeds.

    Attributes:
        policies: a summary per policy, in the order the policies first appear in the results.
        reference: name of the policy the others are held against.
        instances: the meta-test instances.
        seeds_per_instance: how many seeds each instance was run with.
        confidence: confidence of every interval.
        resamples: bootstrap samples per interval.
        resampling: what the bootstrap redraws: ``"seeds"`` (instances fixed), ``"instances"`` (and the seeds within
            each), or ``"none"`` (one episode per policy: no interval).
        episodes: the results the figures come from.
    """

    policies: tuple[PolicySummary, ...]
    reference: str
    instances: tuple[int, ...]
    seeds_per_instance: int
    confidence: float
    resamples: int
    resampling: Resampling
    episodes: tuple[EpisodeResult, ...]

    @property
    def recorded(self) -> bool:
        """Whether any episode rests on recorded rounds."""
        return any(episode.recorded for episode in self.episodes)

    @property
    def resampled_units(self) -> int:
        """How many independent units the bootstrap redraws: seeds per instance, or instances."""
        return self.seeds_per_instance if self.resampling == "seeds" else len(self.instances)

    @property
    def interval_label(self) -> str:
        """What the intervals mean, in words, for a table's or a plot's caption."""
        if self.resampling == "none":
            return "no interval: one episode per policy"
        percent = f"{100 * self.confidence:g}% bootstrap interval"
        if self.resampling == "seeds":
            text = f"{percent} over seeds ({self.seeds_per_instance} per instance), instances held fixed"
        elif self.seeds_per_instance == 1:
            text = f"{percent} over instances ({len(self.instances)}, one seed each)"
        else:
            text = f"{percent} over instances ({len(self.instances)}) and their {self.seeds_per_instance} seeds"
        if self.resampled_units < FEW_UNITS:
            share = math.sqrt((self.resampled_units - 1) / self.resampled_units)
            text += f"; with so few it is too narrow, about {100 * share:.0f}% of the right width"
        return text

    def policy(self, name: str) -> PolicySummary:
        """Returns the summary of the named policy."""
        for summary in self.policies:
            if summary.policy == name:
                return summary
        raise ValueError(f"No policy {name!r} in this comparison; it has {[entry.policy for entry in self.policies]}.")


def summarise(
    results: Iterable[EpisodeResult | Mapping[str, Any]],
    *,
    reference: str | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    resampling: Literal["auto", "seeds", "instances"] = "auto",
) -> Comparison:
    """Returns the comparison of every policy in ``results``, which must form a full grid.

    Args:
        results: one episode per policy, instance and seed.
        reference: the policy the others are held against; the first one in ``results`` when None.
        confidence: confidence of the intervals.
        resamples: bootstrap samples per interval.
        seed: seed of the bootstrap.
        resampling: what the bootstrap redraws. ``"auto"`` redraws seeds within each instance, or the instances when
            each has a single seed and there is nothing else to redraw.

    Raises:
        ValueError: no results, an episode twice, an episode missing (named), an unknown reference, a bad figure.
    """
    episodes = tuple(row if isinstance(row, EpisodeResult) else EpisodeResult.from_mapping(row) for row in results)
    gains, cells, instances = _grid(episodes)
    names = list(gains)
    held_against = names[0] if reference is None else reference
    if held_against not in gains:
        raise ValueError(f"The reference {held_against!r} is not among the compared policies {names}.")
    n_seeds = len(cells) // len(instances)
    redrawn = _resampling(resampling, n_seeds, len(instances))
    options: dict[str, Any] = {"confidence": confidence, "resamples": resamples, "seed": seed}

    def estimate(scores: FloatArray, statistic: Statistic = mean_of_task_means) -> Estimate:
        interval = stratified_bootstrap_interval if redrawn == "seeds" else task_bootstrap_interval
        low, high = interval(scores, statistic, **options)
        return Estimate(float(statistic(scores)), low, high)

    def over_reference(scores: FloatArray) -> Estimate:
        low, high = two_sample_bootstrap_interval(
            scores, gains[held_against], resample_tasks=redrawn != "seeds", **options
        )
        return Estimate(probability_of_improvement(scores, gains[held_against]), low, high)

    best = np.max(list(gains.values()), axis=0)  # (n_seeds, n_instances)
    summaries = []
    for name, scores in gains.items():
        own = [episode for episode in episodes if episode.policy == name]
        failures: Counter[str] = Counter()
        for episode in own:
            failures.update(episode.failures)
        is_reference = name == held_against
        summaries.append(
            PolicySummary(
                policy=name,
                episodes=len(own),
                gain=estimate(scores),
                interquartile_gain=estimate(scores, interquartile_mean),
                regret=estimate(best - scores),
                gain_over_reference=None if is_reference else estimate(scores - gains[held_against]),
                probability_over_reference=None if is_reference else over_reference(scores),
                failures={cause: failures[cause] for cause in sorted(failures) if failures[cause]},
                mean_rounds=float(np.mean([episode.rounds for episode in own])),
                mean_budget_used=float(np.mean([episode.budget_used for episode in own])),
                within_noise_share=float(np.mean([episode.within_noise for episode in own])),
                recorded_episodes=sum(episode.recorded for episode in own),
            )
        )
    return Comparison(
        policies=tuple(summaries),
        reference=held_against,
        instances=instances,
        seeds_per_instance=n_seeds,
        confidence=confidence,
        resamples=resamples,
        resampling=redrawn,
        episodes=episodes,
    )


def episode_grid(episodes: Sequence[EpisodeResult]) -> tuple[dict[str, list[EpisodeResult]], tuple[int, int]]:
    """Returns each policy's episodes sorted by instance, then seed, and the grid's ``(n_instances, n_seeds)``.

    Raises:
        ValueError: the episodes do not form a full grid; the message names what is missing.
    """
    gains, cells, instances = _grid(episodes)
    by_key = {(episode.policy, episode.instance, episode.seed): episode for episode in episodes}
    ordered = {name: [by_key[name, instance, seed] for instance, seed in cells] for name in gains}
    return ordered, (len(instances), len(cells) // len(instances))


def _make_plain(record: RoundRecord | EpisodeResult) -> None:
    """Turns the record's NumPy scalars into plain numbers, which JSON and equality need."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, np.generic):
            object.__setattr__(record, entry.name, value.item())


def _resampling(asked: str, n_seeds: int, n_instances: int) -> Resampling:
    """Returns what the bootstrap redraws, given what was asked and what there is to redraw."""
    if asked not in ("auto", "seeds", "instances"):
        raise ValueError(f"resampling: expected 'auto', 'seeds' or 'instances', got {asked!r}.")
    if asked == "seeds" and n_seeds == 1:
        raise ValueError("resampling='seeds' needs at least two seeds per instance, got one; use 'auto'.")
    if asked == "instances" and n_instances == 1:
        raise ValueError("resampling='instances' needs at least two instances, got one; use 'auto'.")
    if asked == "seeds" or (asked == "auto" and n_seeds > 1):
        return "seeds"
    return "instances" if n_instances > 1 else "none"


def _grid(
    episodes: Sequence[EpisodeResult],
) -> tuple[dict[str, FloatArray], list[tuple[int, int]], tuple[int, ...]]:
    """Returns the gains ``(n_seeds, n_instances)`` by policy, the sorted (instance, seed) cells and the instances."""
    if not episodes:
        raise ValueError("A comparison needs at least one episode, got none.")
    by_policy: dict[str, dict[tuple[int, int], float]] = {}
    for episode in episodes:
        own = by_policy.setdefault(episode.policy, {})
        if (episode.instance, episode.seed) in own:
            raise ValueError(f"{episode.label}: given twice; a comparison takes one episode for each.")
        own[episode.instance, episode.seed] = episode.normalised_gain
    cells = sorted({cell for own in by_policy.values() for cell in own})
    gaps = []
    for name, own in by_policy.items():
        missing = [f"(instance {instance}, seed {seed})" for instance, seed in cells if (instance, seed) not in own]
        if missing:
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            gaps.append(f"policy {name!r} lacks {len(missing)} of {len(cells)}: {', '.join(missing[:10])}{more}")
    if gaps:
        raise ValueError(f"Every policy must run every instance and seed: {'; '.join(gaps)}. Run them, or drop them.")
    seeds: dict[int, list[int]] = {}
    for instance, seed in cells:
        seeds.setdefault(instance, []).append(seed)
    if len({len(own_seeds) for own_seeds in seeds.values()}) > 1:
        counts = ", ".join(f"instance {instance} has seeds {own_seeds}" for instance, own_seeds in seeds.items())
        raise ValueError(f"Every instance must be run with the same number of seeds: {counts}.")
    shape = (len(seeds), len(cells) // len(seeds))
    gains = {
        name: np.asarray([own[cell] for cell in cells], dtype=np.float64).reshape(shape).T
        for name, own in by_policy.items()
    }
    return gains, cells, tuple(seeds)


def build_record(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """Returns ``cls(**values)``, or raises ``ValueError`` naming the keys that are missing or unknown."""
    known = {entry.name for entry in fields(cls)}
    try:
        if not set(values) <= known:
            raise TypeError(f"unknown keys {sorted(set(values) - known)}")
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}; known keys: {', '.join(sorted(known))}.") from error
