"""Matches completions against a pattern, for forms and for answers that a pattern can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from ...messages import did_you_mean
from .base import Versioned, require_bool, require_columns
from .extraction import LONGEST, REGEX_SECONDS, compiled

FLAGS = {
    "ignorecase": regex.IGNORECASE,
    "multiline": regex.MULTILINE,
    "dotall": regex.DOTALL,
}


@dataclass(frozen=True)
class Pattern(Versioned):
    """Right when the pattern matches, and its named groups equal the row's columns of their names.

    A pattern that takes longer than a second on one completion matches nothing.

    Attributes:
        pattern: the pattern (that of the ``regex`` package, a superset of Python's); empty for the row's own.
        full: whether it must match the whole completion without white space at its ends; else any part.
        flags: names of `FLAGS`.
        column: the column with the row's own pattern, where ``pattern`` is empty.
    """

    pattern: str = ""
    full: bool = True
    flags: tuple[str, ...] = ()
    column: str = "pattern"
    _compiled: regex.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings and compile the pattern.

        Raises:
            ValueError: an unknown flag, or no pattern; says where in it.
        """
        require_bool("full", self.full)
        flags = (self.flags,) if isinstance(self.flags, str) else tuple(self.flags)
        for flag in flags:
            if flag not in FLAGS:
                raise ValueError(f"flags: unknown {flag!r}.{did_you_mean(str(flag), FLAGS)}")
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "_compiled", self._compile(self.pattern) if self.pattern else None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The pattern's named groups, or the column with the row's own pattern."""
        return (self.column,) if self._compiled is None else tuple(sorted(self._compiled.groupindex))

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row whose own pattern is none; see `Verifier.check_row`."""
        require_columns(row, self.columns)
        require_columns(row, tuple(self._pattern_of(row).groupindex))

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return 1.0 for a match whose groups fit the row, else 0.0."""
        match = self._match(row, completion)
        if match is None:
            return 0.0
        return float(all(str(row.get(name)) == (value or "") for name, value in match.groupdict().items()))

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the pattern matches, whatever its groups hold."""
        return self._match(row, completion) is not None

    def _match(self, row: Mapping[str, Any], completion: str) -> regex.Match[str] | None:
        pattern = self._pattern_of(row)
        text = completion.strip()[-LONGEST:]
        try:
            found: regex.Match[str] | None
            if self.full:
                found = pattern.fullmatch(text, timeout=REGEX_SECONDS)
            else:
                found = pattern.search(text, timeout=REGEX_SECONDS)
        except TimeoutError:
            return None
        return found

    def _pattern_of(self, row: Mapping[str, Any]) -> regex.Pattern[str]:
        return self._compile(str(row[self.column])) if self._compiled is None else self._compiled

    def _compile(self, pattern: str) -> regex.Pattern[str]:
        flags = 0
        for name in self.flags:
            flags |= FLAGS[name]
        return compiled(pattern, "pattern", flags)
