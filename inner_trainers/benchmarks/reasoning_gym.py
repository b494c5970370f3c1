"""Questions of reasoning-gym by the name of a data set: benchmark items, and training rows that never repeat them.

Which split a question belongs to follows from its text alone, so no seed and no size brings one into two splits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from ..messages import did_you_mean, first_line, require_integer, require_number
from ..tasks.base import Source
from .verifiers.base import Versioned, require_columns
from .verifiers.extraction import Extraction

SPLIT_SHARES: Mapping[str, int] = MappingProxyType({"validation": 2, "test": 2, "train": 6})
"""Split -> questions of ten that belong to it."""

_ROUNDS = 12  # how often more questions are drawn when too few different ones came


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        prompt: what is asked.
        answer: the right answer, as the data set writes it.
        metadata: what the data set's own scorer needs, as JSON text.
    """

    prompt: str
    answer: str
    metadata: str


def require_reasoning_gym() -> Any:
    """Return the package.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ImportError(
            "reasoning_gym: the package is not installed; run `pip install 'posttrain-gym[benchmarks]'`."
        ) from error
    return reasoning_gym


def split_of(prompt: str) -> str:
    """Return the split that a question's text puts it in: ``train``, ``validation`` or ``test``."""
    place = zlib.crc32(prompt.encode("utf-8", "surrogatepass")) % 10
    for split, share in SPLIT_SHARES.items():
        if place < share:
            return split
        place -= share
    raise AssertionError  # the shares sum to ten


def draw_questions(dataset: str, settings: Mapping[str, Any], split: str, size: int, seed: int) -> list[Question]:
    """Draw different questions of one split.

    Args:
        dataset: name of a data set of reasoning-gym.
        settings: its settings, such as ``{"max_terms": 2}``.
        split: ``train``, ``validation`` or ``test``.
        size: how many.
        seed: decides which. The package makes question i of seed s from s + i, so draws with seeds that are close share
            most of their questions; choose them some thousands apart for others.

    Raises:
        ValueError: an unknown data set or setting, too few different questions, or a data set whose own answers do not
            pass its scorer once they are plain data.
        ImportError: reasoning-gym is not installed.
    """
    require_integer("size", size, low=1, high=1_000_000)
    require_integer("seed", seed, low=0, high=2**63 - 1)
    if split not in SPLIT_SHARES:
        raise ValueError(f"split: unknown {split!r}.{did_you_mean(split, SPLIT_SHARES)}")
    found: dict[str, Question] = {}
    verifier = ReasoningGym(dataset, tuple(sorted(settings.items())), extract="whole")
    wanted = size * 10 // SPLIT_SHARES[split] + 20
    for attempt in range(_ROUNDS):
        # a seed of its own for each attempt, the first of which is the seed itself
        for entry in _created(dataset, settings, wanted, seed + attempt * 1_000_003):
            question = _question(dataset, entry)
            if split_of(question.prompt) == split:
                found.setdefault(question.prompt, question)
        if len(found) >= size:
            drawn = list(found.values())[:size]
            for question in drawn[:4]:
                row = {"prompt": question.prompt, "answer": question.answer, "metadata": question.metadata}
                if verifier.score(row, question.answer) < 1.0:
                    raise ValueError(
                        f"reasoning_gym: the scorer of {dataset!r} does not pass the data set's own answer "
                        f"{question.answer!r}, so right answers could not be told; choose another data set."
                    )
            return drawn
    raise ValueError(
        f"reasoning_gym: {dataset!r} with {dict(settings)} has only {len(found)} different questions for the {split} "
        f"split within reach, {size} are asked; lower size, or widen its settings."
    )


def read_reasoning_source(
    name: str,
    dataset: str,
    settings: Mapping[str, Any] | None = None,
    size: int = 500,
    seed: int = 0,
    *,
    extract: str = "whole",
) -> Source:
    """Return a source of training questions with their answers: demonstrations, and prompts with a verifier.

    Args:
        name: what recipes call the source.
        dataset: name of a data set of reasoning-gym.
        settings: its settings.
        size: rows.
        seed: decides which.
        extract: how the verifier finds the answer in a completion, see `Extraction`.

    Raises:
        ValueError: see `draw_questions`.
        ImportError: reasoning-gym is not installed.
    """
    settings = dict(settings or {})
    verifier = ReasoningGym(dataset, tuple(sorted(settings.items())), extract=extract)
    questions = draw_questions(dataset, settings, "train", size, seed)
    shown = [{"prompt": each.prompt, "completion": each.answer} for each in questions]
    asked = [{"prompt": each.prompt, "answer": each.answer, "metadata": each.metadata} for each in questions]
    return Source(name, {"demonstrations": shown, "prompts": asked}, verifier.score, verifier.version)


@dataclass(frozen=True)
class ReasoningGym(Versioned):
    """Judges with the data set's own scorer; partial credit counts for nothing unless it is asked for.

    The scorer gives small credit for an answer somewhere in longer text, which a search would learn to farm: an answer
    is right from ``threshold`` on.

    Attributes:
        dataset: name of the data set.
        settings: its settings, as sorted pairs.
        extract: how the answer is found in a completion, see `Extraction`.
        threshold: smallest credit that counts as right, in (0, 1].
        partial: whether credit below the threshold is given as it is.
    """

    dataset: str
    settings: tuple[tuple[str, Any], ...] = ()
    extract: str = "whole"
    threshold: float = 0.99
    partial: bool = False
    package: str = field(init=False)
    _extraction: Extraction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: an unknown data set or way to extract, or a threshold outside its range.
            ImportError: reasoning-gym is not installed.
        """
        require_number("threshold", self.threshold, low=0, high=1, low_open=True)
        object.__setattr__(self, "_extraction", Extraction(self.extract))
        _known(self.dataset)
        object.__setattr__(self, "package", metadata.version("reasoning-gym"))

    @property
    def version(self) -> str:
        """Also the package's version, whose scorers may change."""
        return f"{super().version} of reasoning-gym {self.package}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The answer, and what the scorer needs."""
        return ("answer", "metadata")

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without answer or metadata; see `Verifier.check_row`."""
        require_columns(row, self.columns)

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return the data set's credit for the extracted answer, 1.0 from the threshold on."""
        found = self._extraction(completion)
        if found is None:
            return 0.0
        entry = {"question": row.get("prompt", ""), "answer": row["answer"], "metadata": json.loads(row["metadata"])}
        try:
            credit = float(_scorer(self.dataset, json.dumps(self.settings)).score_answer(answer=found, entry=entry))
        except Exception:  # its scorers parse what a model wrote, and some raise at what is no answer
            return 0.0
        if credit >= self.threshold:
            return 1.0
        return min(1.0, max(0.0, credit)) if self.partial else 0.0

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the completion is an answer and nothing else."""
        found = self._extraction(completion)
        return bool(found) and found == completion.strip()


@lru_cache(maxsize=64)
def _scorer(dataset: str, settings: str) -> Any:
    return require_reasoning_gym().create_dataset(dataset, size=1, seed=0, **dict(json.loads(settings)))


def _known(dataset: str) -> None:
    require_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ValueError(f"reasoning_gym: no data set is called {dataset!r}.{did_you_mean(dataset, DATASETS)}")


def _created(dataset: str, settings: Mapping[str, Any], size: int, seed: int) -> Any:
    _known(dataset)
    for name in ("size", "seed"):
        if name in settings:
            raise ValueError(f"reasoning_gym: {name} stands beside settings, not in them.")
    try:
        return require_reasoning_gym().create_dataset(dataset, size=size, seed=seed % 2**31, **settings)
    except TypeError as error:
        from dataclasses import fields

        from reasoning_gym.factory import DATASETS

        known = {each.name for each in fields(DATASETS[dataset][1])} - {"size", "seed"}
        unknown = next((name for name in settings if name not in known), "")
        raise ValueError(
            f"reasoning_gym: {dataset!r} has no setting {unknown!r} ({first_line(error)})."
            f"{did_you_mean(unknown, known)}"
        ) from None
    except (AssertionError, ValueError) as error:  # how the package says that a setting is out of range
        raise ValueError(f"reasoning_gym: {dataset!r} refuses {dict(settings)}: {first_line(error)}.") from None


def _question(dataset: str, entry: Mapping[str, Any]) -> Question:
    if not isinstance(entry["answer"], str):
        raise ValueError(
            f"reasoning_gym: {dataset!r} has no single right answer as text (got {entry['answer']!r}), so there is "
            "nothing to show or to compare with; choose another data set."
        )
    try:
        return Question(entry["question"], entry["answer"], json.dumps(entry["metadata"], sort_keys=True))
    except TypeError as error:
        raise ValueError(
            f"reasoning_gym: {dataset!r} keeps objects that are no plain data ({first_line(error)}); choose another."
        ) from None
