"""Compares the answer with the right ones, character by character."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import Versioned, require_bool, require_columns
from .extraction import Extraction


@dataclass(frozen=True)
class Exact(Versioned):
    """Right when the extracted answer is equal to the row's ``answer``, text or a list of texts that are all right.

    ``"7"``, ``"007"`` and ``"7.50"`` are three answers; `Numeric` takes the first two for one.

    Attributes:
        extract: how the answer is found, see `Extraction`.
        strip: whether white space at the ends does not count.
        casefold: whether case does not count.
        collapse: whether a run of white space counts as one space.
        nfkc: whether Unicode's compatibility forms count as the plain characters.
        punctuation: characters that do not count at the ends, such as ``".!"``.
        answer: the column with the right answer.
    """

    extract: str = "whole"
    strip: bool = True
    casefold: bool = False
    collapse: bool = False
    nfkc: bool = False
    punctuation: str = ""
    answer: str = "answer"
    _extraction: Extraction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: an unknown way to extract, or a setting of another type.
        """
        for name in ("strip", "casefold", "collapse", "nfkc"):
            require_bool(name, getattr(self, name))
        object.__setattr__(self, "_extraction", Extraction(self.extract))

    @property
    def columns(self) -> tuple[str, ...]:
        """The column with the answer."""
        return (self.answer,)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row whose answer is neither text nor a list of texts; see `Verifier.check_row`."""
        require_columns(row, self.columns)
        self._answers(row)

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0."""
        found = self._extraction(completion)
        return float(found is not None and self._form(found) in {self._form(right) for right in self._answers(row)})

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the completion has something to extract."""
        return bool(self._extraction(completion))

    def _answers(self, row: Mapping[str, Any]) -> list[str]:
        given = row[self.answer]
        answers = list(given) if isinstance(given, list | tuple) else [given]
        for each in answers:
            if not isinstance(each, str):
                raise ValueError(
                    f"column {self.answer!r} must be text, or a list of texts, got {each!r} ({type(each).__name__}); "
                    "numbers compare by value with the verifier numeric."
                )
        if not answers:
            raise ValueError(f"column {self.answer!r} is an empty list, so no answer would be right.")
        return answers

    def _form(self, text: str) -> str:
        if self.nfkc:
            text = unicodedata.normalize("NFKC", text)
        if self.casefold:
            text = text.casefold()
        if self.collapse:
            text = " ".join(text.split())
        if self.strip:
            text = text.strip()
        return text.strip(self.punctuation + " ") if self.punctuation else text
