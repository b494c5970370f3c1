"""Scores a checkpoint on a benchmark split: batched sampling, several seeds, a `Scorecard`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import DimensionScore, Scorecard
from .faults import ScorerFault
from .messages import require_integer, require_number, where_raised
from .printed import Printed, prints_kept
from .time_limit import TimeLimitError, call_with_time_limit

if TYPE_CHECKING:
    from .chat import ChatFormat
    from .tasks.base import Benchmark, Item

_LOG = logging.getLogger(__name__)

QUICK_SAMPLES = 2
"""Completions per item of a quick evaluation."""


@dataclass(frozen=True)
class Evaluator:
    """How a checkpoint is scored; frozen, so that every round of a search is scored alike.

    Attributes:
        seeds: sampling seeds; each draws ``samples_per_seed`` completions per item.
        samples_per_seed: completions per item and seed.
        k: the ``k`` of pass@k, at most the completions per item.
        temperature: sampling temperature.
        batch_sequences: completions sampled at once.
        stratified: whether the items of quick evaluations are taken from the dimensions in turn, so that each has its
            share, or else drawn from all validation items alike; see `smaller_benchmark`.
    """

    seeds: tuple[int, ...] = (0, 1)
    samples_per_seed: int = 4
    k: int = 8
    temperature: float = 1.0
    batch_sequences: int = 1024
    stratified: bool = True

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting outside its range; ``k`` above the number of completions per item.
        """
        if not self.seeds:
            raise ValueError("evaluator.seeds: expected at least one seed.")
        for seed in self.seeds:
            require_integer("evaluator.seeds", seed, low=0, high=2**63 - 1)
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"evaluator.seeds: {self.seeds} repeats a seed, which would draw the same samples twice.")
        require_integer("evaluator.samples_per_seed", self.samples_per_seed, low=1, high=100_000)
        require_integer("evaluator.k", self.k, low=1, high=self.samples)
        require_number("evaluator.temperature", self.temperature, low=0, high=10, low_open=True)
        require_integer("evaluator.batch_sequences", self.batch_sequences, low=1, high=1_000_000)
        if not isinstance(self.stratified, bool):
            raise ValueError(f"evaluator.stratified: expected true or false, got {self.stratified!r}.")

    @property
    def samples(self) -> int:
        """Completions per item."""
        return len(self.seeds) * self.samples_per_seed

    @property
    def settings(self) -> dict[str, Any]:
        """Plain JSON types: what tells two evaluators apart."""
        settings = {**asdict(self), "seeds": list(self.seeds)}
        if self.stratified:
            del settings["stratified"]  # as journals of before there was a choice have it
        return settings

    def quick(self) -> Evaluator:
        """Return the evaluator of quick evaluations: the first seed, at most `QUICK_SAMPLES` completions per item."""
        samples = min(QUICK_SAMPLES, self.samples_per_seed)
        return replace(self, seeds=self.seeds[:1], samples_per_seed=samples, k=min(self.k, samples))

    def quick_benchmark(self, benchmark: Benchmark, items: int) -> Benchmark:
        """Return the benchmark of quick evaluations on ``items`` validation items; see `smaller_benchmark`."""
        return smaller_benchmark(benchmark, items, None if self.stratified else self.seeds[0])

    def evaluate(
        self,
        model: Any,
        tokenizer: Any,
        benchmark: Benchmark,
        split: str,
        chat: ChatFormat | None = None,
        *,
        scoring_seconds: float | None = None,
        grace_seconds: float = 5.0,
    ) -> tuple[Scorecard, int, int]:
        """Return the scorecard with the tokens sampled and the prompt tokens scored; moves no global generator.

        Args:
            model: a transformers causal language model in eval mode.
            tokenizer: its tokenizer.
            benchmark: what to score it on.
            split: ``"validation"`` or ``"test"``.
            chat: how prompts become turns; the scorer is given the assistant's last. None for text to continue.
            scoring_seconds: longest that the scorer may take for all completions together; None for any.
            grace_seconds: how long a scorer that was interrupted may take to end.

        Raises:
            ScorerFault: the scorer raised; names item and line.
            TimeLimitError: the scorer took longer than ``scoring_seconds``; names the item and completion it was at.
        """
        from .sampling import sample_completions

        items = benchmark.items(split)
        completions: list[list[str]] = [[] for _ in items]
        turns: list[list[list[str]]] = [[] for _ in items]  # of items with follow-ups, all of the assistant's
        generated = scored = empty = clipped = 0
        for seed in self.seeds:
            drawn = sample_completions(
                model,
                tokenizer,
                [item.prompt for item in items],
                samples=self.samples_per_seed,
                max_new_tokens=benchmark.max_new_tokens,
                temperature=self.temperature,
                seed=seed,
                batch_sequences=self.batch_sequences,
                chat=chat,
                follow_ups=[item.follow_ups for item in items],
            )
            generated += drawn.generated_tokens
            scored += drawn.prompt_tokens
            empty += drawn.empty
            clipped += drawn.clipped
            for texts, new in zip(completions, drawn.texts, strict=True):
                texts.extend(new)
            for answers, more in zip(turns, drawn.turns or (), strict=drawn.turns is not None):
                answers.extend(more)
        limit = scoring_seconds, grace_seconds
        return self._scorecard(benchmark, split, completions, turns, empty, clipped, limit), generated, scored

    def _scorecard(
        self,
        benchmark: Benchmark,
        split: str,
        completions: Sequence[Sequence[str]],
        turns: Sequence[Sequence[Sequence[str]]],
        empty: int,
        clipped: int,
        limit: tuple[float | None, float],
    ) -> Scorecard:
        items = benchmark.items(split)
        scores, formed = _judged(benchmark, split, completions, turns, limit)
        dimensions = {}
        for name in benchmark.dimensions:
            rows = [i for i, item in enumerate(items) if item.dimension == name]
            dimensions[name] = summarise_dimension(scores[rows], formed[rows], self.k)
        weights = benchmark.weights
        total = len(items) * self.samples
        return Scorecard(
            split=split,
            dimensions=dimensions,
            score=math.fsum(weights[name] * entry.mean for name, entry in dimensions.items()),
            standard_error=math.sqrt(
                math.fsum((weights[name] * entry.standard_error) ** 2 for name, entry in dimensions.items())
            ),
            k=self.k,
            items=len(items),
            samples=self.samples,
            empty_share=empty / total,
            clipped_share=clipped / total,
        )


def _judged(
    benchmark: Benchmark,
    split: str,
    completions: Sequence[Sequence[str]],
    turns: Sequence[Sequence[Sequence[str]]],
    limit: tuple[float | None, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the scorer says, both (items, samples): scores in [0, 1], and whether the form is right."""
    items = benchmark.items(split)
    at: list[Any] = ["", ""]  # the prompt and the completion that the scorer is asked about

    def score(item: Item, text: str, answers: Sequence[str]) -> float:
        at[:] = item.prompt, text
        if answers and benchmark.score_turns is not None and item.follow_ups:
            given = _asked(benchmark.score_turns, "score_turns", item, answers)
        else:
            given = _asked(benchmark.score, "score", item, text)
        return _checked_score(given, item.prompt)

    def judge() -> tuple[np.ndarray, np.ndarray, Printed]:
        with prints_kept() as printed:
            scores = np.array(
                [
                    [score(item, text, said) for text, said in zip(texts, answers or [()] * len(texts), strict=True)]
                    for item, texts, answers in zip(items, completions, turns, strict=True)
                ]
            )
            formed = np.array(
                [
                    [bool(_asked(benchmark.well_formed, "well_formed", item, text)) for text in texts]
                    for item, texts in zip(items, completions, strict=True)
                ]
            )
        return scores, formed, printed

    seconds, grace_seconds = limit
    try:
        scores, formed, printed = call_with_time_limit(judge, seconds, f"scoring on {split}", grace_seconds)
    except TimeLimitError as error:
        assert seconds is not None  # there is no such error without a limit
        what = f"scoring on {split}, at prompt {shortened(at[0])} and completion {shortened(at[1])},"
        raise TimeLimitError(what, seconds, error.ended) from None
    if printed:
        _tell_once(f"the benchmark's scorer printed {printed}")
    return scores, formed


def shortened(text: str, most: int = 120) -> str:
    """Return a text in quotes, cut where it is long."""
    return repr(text if len(text) <= most else text[:most] + "…")


@cache
def _tell_once(sentence: str) -> None:
    _LOG.warning(sentence)


def smaller_benchmark(benchmark: Benchmark, items: int, seed: int | None = None) -> Benchmark:
    """Return the benchmark with ``items`` of its validation items.

    Args:
        benchmark: the whole.
        items: how many, at least 1.
        seed: None takes the first items of each dimension in turn, and one of each at least, so there may be more than
            ``items``. A seed draws them from all items alike, without replacement and in their order: a dimension of
            which none is drawn is left out, and the weights of the others are scaled to sum to 1.
    """
    if seed is None:
        by_dimension = [[i for i in benchmark.validation if i.dimension == name] for name in benchmark.dimensions]
        longest = max(map(len, by_dimension))
        in_turn = [found[rank] for rank in range(longest) for found in by_dimension if rank < len(found)]
        return replace(benchmark, validation=in_turn[: max(items, len(by_dimension))])
    count = len(benchmark.validation)
    places = np.random.default_rng(seed).choice(count, size=min(items, count), replace=False)
    drawn = [benchmark.validation[place] for place in sorted(places)]
    kept = {item.dimension for item in drawn}
    total = math.fsum(benchmark.weights[name] for name in kept)
    return replace(
        benchmark,
        weights={name: weight / total for name, weight in benchmark.weights.items() if name in kept},
        validation=drawn,
        test=[item for item in benchmark.test if item.dimension in kept],
    )


def summarise_dimension(scores: np.ndarray, formed: np.ndarray, k: int) -> DimensionScore:
    """Return the statistics of one dimension.

    Args:
        scores: ``(items, samples)`` in [0, 1].
        formed: ``(items, samples)`` bool, whether the completion has the asked form.
        k: the ``k`` of pass@k, at most ``samples``.
    """
    items, samples = scores.shape
    item_means = scores.mean(axis=1)
    # One item tells nothing of the spread between items: the widest error a score in [0, 1] can have is assumed.
    error = float(item_means.std(ddof=1) / math.sqrt(items)) if items > 1 else 0.5
    right = (scores >= 1.0).sum(axis=1)
    return DimensionScore(
        mean=float(item_means.mean()),
        standard_error=error,
        pass_at_1=float(right.mean() / samples),
        pass_at_k=float(np.mean([unbiased_pass_at_k(samples, int(c), k) for c in right])),
        format_rate=float(formed.mean()),
    )


def completion_flags(scorecard: Scorecard) -> tuple[str, ...]:
    """Return sentences about completions that end at once or never, where all of them do; usually none."""
    flags = []
    if scorecard.empty_share == 1.0:
        flags.append(
            "100 % of the evaluated completions are empty: the model ends at once; check that its generation settings "
            "do not list the padding token among the end tokens"
        )
    if scorecard.clipped_share == 1.0:
        flags.append(
            "100 % of the evaluated completions reach the length limit: the model never ends; check the end token in "
            "the training rows, or raise max_new_tokens"
        )
    return tuple(flags)


def unbiased_pass_at_k(samples: int, right: int, k: int) -> float:
    """Return 1 - C(samples - right, k) / C(samples, k), the unbiased estimate of Chen et al. (2021)."""
    if samples - right < k:
        return 1.0
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _asked(function: Callable[[Item, Any], Any], name: str, item: Item, completion: str | Sequence[str]) -> Any:
    """Return a scorer's answer; whatever it raises, an exit too, becomes one fault that names item and line."""
    try:
        return function(item, completion)
    except (Exception, SystemExit) as error:
        raise ScorerFault(
            f"the benchmark's {name} raised {where_raised(error)} for prompt {item.prompt!r}, completion {completion!r}"
        ) from error


def _checked_score(value: Any, prompt: str) -> float:
    if isinstance(value, bool | np.bool_):
        return float(value)
    number = require_number(f"benchmark score for prompt {prompt!r}", value, low=0, high=1)
    return number
