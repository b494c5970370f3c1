"""What a verifier is: it judges a completion by the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Verifier(Protocol):
    """Judges completions; total on any text, deterministic, silent, and done in bounded time.

    ``score`` serves as a `Source`'s verifier (the row is the training row) and in a benchmark (the row is the item's
    data).
    """

    @property
    def version(self) -> str:
        """Text that differs when the behaviour does: name, version of the code, settings."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that cannot be judged.

        Raises:
            ValueError: names the column, and what it must hold.
        """

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return how right the completion is, in [0, 1]."""

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the completion has the asked form, right or wrong."""


@runtime_checkable
class ConversationVerifier(Protocol):
    """A verifier that judges all of the assistant's turns of a conversation together."""

    def score_turns(self, row: Mapping[str, Any], turns: Sequence[str]) -> float:
        """Return how right the assistant's turns are, in [0, 1]."""


class Versioned:
    """Gives a frozen dataclass of settings its `version`."""

    code_version = "1"
    """Changes when the class judges otherwise."""

    @property
    def version(self) -> str:
        """Class, version of its code, and every setting."""
        settings = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.init)  # type: ignore[arg-type]
        return f"{type(self).__name__} {self.code_version} ({settings})"


def require_columns(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Refuse a row without some columns.

    Raises:
        ValueError: names the first that is missing.
    """
    for column in columns:
        if row.get(column) is None:
            raise ValueError(
                f"column {column!r} is missing, which the verifier reads; there are {', '.join(row) or 'none'}."
            )


def require_bool(setting: str, value: object) -> None:
    """Refuse a setting that is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{setting}: expected true or false, got {value!r}.")
