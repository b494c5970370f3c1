"""Judges whether the assistant says the same in every turn of a conversation, and whether that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import Versioned, require_bool
from .extraction import Extraction, last_number


@dataclass(frozen=True)
class Consistency(Versioned):
    """The share of later turns whose answer is that of the first turn.

    With ``require_correct``, only turns with the row's ``answer`` count, the first one too: a model that says the same
    wrong thing throughout is consistent and scores 0 there.

    Attributes:
        extract: how a turn's answer is found, see `Extraction`.
        require_correct: whether a turn counts only when its answer is right.
        casefold: whether case does not count.
        answer: the column with the right answer, text or a number; read with ``require_correct`` alone.
    """

    extract: str = "last_number"
    require_correct: bool = True
    casefold: bool = True
    answer: str = "answer"
    _extraction: Extraction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: an unknown way to extract.
        """
        require_bool("require_correct", self.require_correct)
        require_bool("casefold", self.casefold)
        object.__setattr__(self, "_extraction", Extraction(self.extract))

    @property
    def columns(self) -> tuple[str, ...]:
        """The column with the answer, where it is read."""
        return (self.answer,) if self.require_correct else ()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row whose answer is missing or neither text nor number; see `Verifier.check_row`."""
        for column in self.columns:
            if isinstance(row.get(column), bool) or not isinstance(row.get(column), str | int | float):
                raise ValueError(f"column {column!r} must be text or a number, got {row.get(column)!r}.")

    def score_turns(self, row: Mapping[str, Any], turns: Sequence[str]) -> float:
        """Return the share of turns that count, in [0, 1]; see the class."""
        answers = [self._form(self._extraction(turn)) for turn in turns]
        if not answers:
            return 0.0
        if self.require_correct:
            right = self._form(str(row[self.answer]))
            return sum(answer == right for answer in answers) / len(answers)
        first, later = answers[0], answers[1:]
        if first is None or not later:
            return 0.0
        return sum(answer == first for answer in later) / len(later)

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return how a single turn fares: 1.0 when its answer is right; without a right answer there is nothing to say.

        Raises:
            ValueError: a single turn, and ``require_correct`` is false.
        """
        if not self.require_correct:
            raise ValueError("consistency: one turn alone is neither consistent nor not; give the items follow_ups.")
        return self.score_turns(row, [completion])

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether an answer can be found in the last turn."""
        return self._extraction(completion) is not None

    def _form(self, answer: str | None) -> str | None:
        if answer is None:
            return None
        answer = " ".join(answer.split()).strip(" .!?,;:")
        number = last_number(answer)
        if number is not None and number == answer:
            plain = number.replace(",", "").replace("−", "-")
            return plain.lstrip("+").rstrip("0").rstrip(".") if "." in plain and "e" not in plain.lower() else plain
        return answer.casefold() if self.casefold else answer
