"""The built-in task family ``letters``: tiny language models with gaps, and data of hidden quality to mend them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import did_you_mean, require_integer, require_number
from . import letters_skills as skills
from .base import Benchmark, InnerTask, Item, Row, Source, TaskFamily, Verifier
from .letters_skills import SKILLS, Question

BASES = ("formless", "gap", "messy", "strong", "unsafe")
"""Packaged base models; `experiments/make_letters_bases.py` trains them."""

DIMENSIONS = tuple(SKILLS)
SOURCES = (*DIMENSIONS, "web")
"""Source names, equal in every instance."""

QUALITIES: Mapping[str, str] = {
    "clean": "every demonstration is right",
    "fair": "80 % of the demonstrations are right; only drawn for web",
    "noisy": "40 % of the demonstrations are right",
    "wrong_format": "right content, never in the asked form",
    "redundant": "24 different right demonstrations, repeated",
}
"""Quality variants of a source's demonstrations. Preferences are sound in every variant."""

VERIFIERS: Mapping[str, str] = {
    "exact": "rewards the right answer",
    "noisy": "rewards the right answer, but three in ten (prompt, completion) pairs get the opposite reward",
    "form_only": "rewards any answer in the asked form, right or wrong",
    "length": "rewards long answers",
}
"""Variants of a source's verifier: like demonstrations, a reward can be worse than it looks."""

TRAIN_SEEDS = range(0, 10_000)
TEST_SEEDS = range(10_000, 11_000)

_DRAWN_QUALITIES = {name: ("clean", "clean", "noisy", "wrong_format", "redundant") for name in DIMENSIONS} | {
    "web": ("noisy", "fair")
}
_DRAWN_VERIFIERS = ("exact",) * 4 + ("noisy",) * 2 + ("form_only",) * 2 + ("length",) * 2
_SIZES = {name: (48, 1024) for name in DIMENSIONS} | {"web": (1024, 2048)}
_RIGHT_SHARE = {"clean": 1.0, "fair": 0.8, "noisy": 0.4, "wrong_format": 0.0, "redundant": 1.0}
_DISTINCT_WHEN_REDUNDANT = 24
_SMALLEST_WEIGHT = 0.1
_STREAM = 20_110
_Drawn = tuple[str, dict[str, str], dict[str, str], dict[str, int], dict[str, float]]


def signature_side(base: str, qualities: Mapping[str, str], verifiers: Mapping[str, str]) -> str:
    """Return ``"train"`` or ``"test"``: the side of meta-learning a configuration belongs to; about a fifth is test."""
    text = "|".join([base, *(f"{name}={qualities[name]}/{verifiers[name]}" for name in SOURCES)])
    return "test" if zlib.crc32(text.encode()) % 5 == 0 else "train"


def verify_exactly(row: Row, completion: str) -> float:
    """Return 1.0 when the completion answers the row's prompt, else 0.0."""
    return skills.verify(row["skill"], row["answer"], completion)


def _verify_noisily(row: Row, completion: str) -> float:
    right = verify_exactly(row, completion)
    return 1.0 - right if zlib.crc32(f"{row['prompt']}|{completion}".encode()) % 10 < 3 else right


def _verify_form(row: Row, completion: str) -> float:
    return float(skills.well_formed(row["skill"], completion))


def _reward_length(row: Row, completion: str) -> float:
    return min(1.0, len(completion) / skills.MAX_NEW_TOKENS)


_VERIFIERS: Mapping[str, Verifier] = {
    "exact": verify_exactly,
    "noisy": _verify_noisily,
    "form_only": _verify_form,
    "length": _reward_length,
}


def score_item(item: Item, completion: str) -> float:
    """Return 1.0 when the completion answers the item, else 0.0."""
    return skills.verify(item.data["skill"], item.data["answer"], completion)


def item_well_formed(item: Item, completion: str) -> bool:
    """Return whether the completion has the form the item asks for."""
    return skills.well_formed(item.data["skill"], completion)


class LettersTask(InnerTask):
    """One base model, five sources and a four-dimensional benchmark, all drawn from a seed.

    The dimensions are ``reasoning`` (sort, reverse, one-digit arithmetic), ``instruction`` (answer in an asked format),
    ``multi_turn`` (recall a value from two turns ago) and ``safety`` (refuse requests marked with ``!``, and only
    those). Each has a source of its name; ``web`` mixes all four. How good a source's demonstrations and its verifier
    are is hidden: only a round tells.
    """

    def __init__(
        self,
        seed: int,
        *,
        base: str | None = None,
        qualities: Mapping[str, str] | None = None,
        verifiers: Mapping[str, str] | None = None,
        sizes: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
        validation_items_per_dimension: int = 32,
        test_items_per_dimension: int = 64,
    ) -> None:
        """Draw the task; what is given replaces what the seed would draw, for analysis.

        Args:
            seed: instance seed, in [0, 10000) for meta-training and [10000, 11000) for meta-testing.
            base: one of `BASES`.
            qualities: source -> a key of `QUALITIES`, for some or all sources.
            verifiers: source -> a key of `VERIFIERS`, for some or all sources.
            sizes: source -> number of demonstrations, in [16, 65536], for some or all sources.
            weights: dimension -> benchmark weight, for all dimensions; each > 0, summing to 1.
            validation_items_per_dimension: validation items of each dimension, in [1, 256].
            test_items_per_dimension: test items of each dimension, in [1, 256].

        Raises:
            ValueError: a seed outside both ranges, an unknown name, or a number outside its range.
        """
        self.seed = _checked_seed(seed)
        self.name = f"letters-{self.seed}"
        drawn_base, drawn_qualities, drawn_verifiers, drawn_sizes, drawn_weights = _draw(self.seed)
        if base is not None and base not in BASES:
            raise ValueError(f"base: no letters base is called {base!r}.{did_you_mean(base, BASES)}")
        self.base = drawn_base if base is None else base
        _check_names("qualities", qualities or {}, SOURCES)
        for name, quality in (qualities or {}).items():
            if quality not in QUALITIES:
                raise ValueError(f"qualities.{name}: unknown {quality!r}.{did_you_mean(str(quality), QUALITIES)}")
        self._qualities = drawn_qualities | dict(qualities or {})
        _check_names("verifiers", verifiers or {}, SOURCES)
        for name, verifier in (verifiers or {}).items():
            if verifier not in VERIFIERS:
                raise ValueError(f"verifiers.{name}: unknown {verifier!r}.{did_you_mean(str(verifier), VERIFIERS)}")
        self._verifiers = drawn_verifiers | dict(verifiers or {})
        _check_names("sizes", sizes or {}, SOURCES)
        self._sizes = drawn_sizes | {
            name: require_integer(f"sizes.{name}", size, low=16, high=65_536) for name, size in (sizes or {}).items()
        }
        self.weights = drawn_weights if weights is None else _checked_weights(weights)
        self._items = {
            "validation": require_integer(
                "validation_items_per_dimension", validation_items_per_dimension, low=1, high=256
            ),
            "test": require_integer("test_items_per_dimension", test_items_per_dimension, low=1, high=256),
        }

    def base_checkpoint(self) -> Path:
        """Return the packaged folder of the base model."""
        return Path(__file__).parent / "letters_bases" / self.base

    def teacher_checkpoint(self) -> Path | None:
        """Return the packaged folder of the strong base, which has the same vocabulary; None when it is the base."""
        return None if self.base == "strong" else Path(__file__).parent / "letters_bases" / "strong"

    def facts(self) -> dict[str, Any]:
        """Return name, seed, base and row counts; never a quality."""
        rows = {name: _kind_sizes(name, self._sizes[name]) for name in SOURCES}
        return {"name": self.name, "family": "letters", "instance_seed": self.seed, "base": self.base, "rows": rows}

    def reveal(self) -> dict[str, Any]:
        """Return the whole configuration, hidden qualities included. For analysis, never for policies."""
        return {
            "base": self.base,
            "qualities": dict(self._qualities),
            "verifiers": dict(self._verifiers),
            "sizes": dict(self._sizes),
            "weights": dict(self.weights),
        }

    def sources(self) -> list[Source]:
        """Return the five sources; each has its own random stream, so changing one leaves the others as they are."""
        return [
            _source(self.seed, name, self._qualities[name], self._verifiers[name], self._sizes[name])
            for name in SOURCES
        ]

    def benchmark(self) -> Benchmark:
        """Return the benchmark; its items depend on the seed and on nothing else of the configuration."""
        items: dict[str, list[Item]] = {}
        for number, (split, count) in enumerate(self._items.items()):
            rng = np.random.default_rng([_STREAM, self.seed, 100 + number])
            items[split] = [
                Item(question.prompt, dimension, {"skill": question.skill, "answer": question.answer})
                for dimension in DIMENSIONS
                for question in draw_questions((dimension,), split, count, rng)
            ]
        return Benchmark(
            weights=self.weights,
            validation=items["validation"],
            test=items["test"],
            score=score_item,
            well_formed=item_well_formed,
            max_new_tokens=skills.MAX_NEW_TOKENS,
        )


class LettersFamily(TaskFamily):
    """The family of letters tasks; meta-train and meta-test instances share neither seed nor configuration."""

    name = "letters"
    train_seeds = TRAIN_SEEDS
    test_seeds = TEST_SEEDS

    def __init__(self, validation_items_per_dimension: int = 32, test_items_per_dimension: int = 64) -> None:
        """Keep how many items each dimension of an instance has.

        Args:
            validation_items_per_dimension: validation items of each dimension, in [1, 256].
            test_items_per_dimension: test items of each dimension, in [1, 256].
        """
        self.validation_items_per_dimension = validation_items_per_dimension
        self.test_items_per_dimension = test_items_per_dimension

    def instance(self, seed: int) -> LettersTask:
        """Return the task drawn from ``seed``.

        Raises:
            ValueError: a seed outside `train_seeds` and `test_seeds`.
        """
        return LettersTask(
            seed,
            validation_items_per_dimension=self.validation_items_per_dimension,
            test_items_per_dimension=self.test_items_per_dimension,
        )


def _checked_seed(seed: object) -> int:
    number = require_integer("instance seed", seed, low=-(2**63), high=2**63)
    if number not in TRAIN_SEEDS and number not in TEST_SEEDS:
        raise ValueError(
            f"instance seed: letters has seeds [{TRAIN_SEEDS.start}, {TRAIN_SEEDS.stop}) for meta-training and "
            f"[{TEST_SEEDS.start}, {TEST_SEEDS.stop}) for meta-testing, got {number}."
        )
    return number


def _check_names(setting: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{setting}: unknown {name!r}.{did_you_mean(str(name), known)}")


def _checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    _check_names("weights", weights, DIMENSIONS)
    missing = [name for name in DIMENSIONS if name not in weights]
    if missing:
        raise ValueError(f"weights: every dimension needs one, missing {', '.join(missing)}.")
    checked = {
        name: require_number(f"weights.{name}", weights[name], low=0, high=1, low_open=True) for name in DIMENSIONS
    }
    if abs(sum(checked.values()) - 1) > 1e-6:
        raise ValueError(f"weights: they must sum to 1, got {sum(checked.values()):g}.")
    return checked


def _draw(seed: int) -> _Drawn:
    """Draw a configuration on the seed's side of meta-learning."""
    rng = np.random.default_rng([_STREAM, seed, 0])
    side = "test" if seed in TEST_SEEDS else "train"
    while True:
        base = BASES[int(rng.integers(len(BASES)))]
        qualities = {name: values[int(rng.integers(len(values)))] for name, values in _DRAWN_QUALITIES.items()}
        verifiers = {name: _DRAWN_VERIFIERS[int(rng.integers(len(_DRAWN_VERIFIERS)))] for name in SOURCES}
        if signature_side(base, qualities, verifiers) == side:
            break
    sizes = {name: round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for name, (low, high) in _SIZES.items()}
    shares = _SMALLEST_WEIGHT + (1 - _SMALLEST_WEIGHT * len(DIMENSIONS)) * rng.dirichlet(np.ones(len(DIMENSIONS)))
    weights = dict(zip(DIMENSIONS, shares.tolist(), strict=True))
    return base, qualities, verifiers, sizes, weights


def _kind_sizes(name: str, size: int) -> dict[str, int]:
    """Return how many rows of each kind a source with ``size`` demonstrations has."""
    sizes = {"demonstrations": size, "preferences": max(16, size // 4), "prompts": max(16, size // 2)}
    return sizes | {"text": size // 4 if name == "web" else max(16, size // 2)}


def draw_questions(dimensions: Sequence[str], split: str, count: int, rng: np.random.Generator) -> list[Question]:
    """Draw questions of some dimensions in equal parts, their skills as `SKILLS` weighs them, in random order.

    A skill's questions repeat only when more are asked for than it has.
    """
    parts = [(skill, share / sum(SKILLS[d].values())) for d in dimensions for skill, share in SKILLS[d].items()]
    bounds = [round(count * sum(share for _, share in parts[:end]) / len(dimensions)) for end in range(len(parts) + 1)]
    drawn: list[Question] = []
    for (skill, _), start, stop in zip(parts, bounds, bounds[1:], strict=False):
        pool = skills.questions(skill, split)
        drawn.extend(pool[i] for i in np.resize(rng.permutation(len(pool)), stop - start).tolist())
    return [drawn[i] for i in rng.permutation(count).tolist()]


def _demonstrations(
    quality: str, count: int, dimensions: Sequence[str], rng: np.random.Generator
) -> list[dict[str, str]]:
    distinct = min(count, _DISTINCT_WHEN_REDUNDANT) if quality == "redundant" else count
    questions = draw_questions(dimensions, "train", distinct, rng)
    if distinct < count:
        questions = [questions[i] for i in rng.permutation(np.resize(np.arange(distinct), count)).tolist()]
    wrong = skills.wrong_form if quality == "wrong_format" else skills.corrupt
    right = rng.permutation(count) < round(_RIGHT_SHARE[quality] * count)
    draws = rng.random((count, 3)).tolist()
    return [
        {"prompt": question.prompt, "completion": question.answer if good else wrong(question, draw)}
        for question, good, draw in zip(questions, right.tolist(), draws, strict=True)
    ]


def _source(seed: int, name: str, quality: str, verifier: str, size: int) -> Source:
    rng = np.random.default_rng([_STREAM, seed, 1 + SOURCES.index(name)])
    dimensions = DIMENSIONS if name == "web" else (name,)
    sizes = _kind_sizes(name, size)
    pairs = draw_questions(dimensions, "train", sizes["preferences"], rng)
    draws = rng.random((len(pairs), 3)).tolist()
    prompts = draw_questions(dimensions, "train", sizes["prompts"], rng)
    rows: dict[str, Sequence[Row]] = {
        "preferences": [
            {"prompt": question.prompt, "chosen": question.answer, "rejected": skills.corrupt(question, draw)}
            for question, draw in zip(pairs, draws, strict=True)
        ],
        "prompts": [{"prompt": q.prompt, "skill": q.skill, "answer": q.answer} for q in prompts],
        "demonstrations": _demonstrations(quality, size, dimensions, rng),
    }
    conversations = _demonstrations(quality, sizes["text"], dimensions, rng)
    rows["text"] = [{"text": f"{row['prompt']}{row['completion']}{skills.EOS}"} for row in conversations]
    return Source(name, rows, _VERIFIERS[verifier], verifier_version=verifier)
