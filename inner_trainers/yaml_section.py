"""Takes values out of one mapping of a file, each of the type that is asked for; errors name the place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .messages import did_you_mean, require_integer, require_number
from .yaml_file import FileError, Keys, YamlFile
from .yaml_scalars import scalar_hint, shown


@dataclass(frozen=True)
class YamlSection:
    """One mapping of a file.

    Attributes:
        file: the file.
        at: the keys that lead to the mapping; ``()`` for the file itself.
    """

    file: YamlFile
    at: Keys = ()

    @property
    def data(self) -> dict[str, Any]:
        """The mapping as plain data.

        Raises:
            FileError: something else stands there.
        """
        value: Any = self.file.data
        for part in self.at:
            value = value[part]
        if not isinstance(value, dict):
            raise self.file.error(self.at, f"expected keys with values, got {shown(value)}.")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def error(self, name: str | None, problem: str, *, key: bool = False) -> FileError:
        """Return an error about the value of ``name``, or about the mapping itself when it is None.

        With ``key`` it is about the key. A name that is missing has the place of what would hold it.
        """
        return self.file.error(self.at if name is None else (*self.at, name), problem, key=key)

    def only(self, known: Iterable[str]) -> None:
        """Refuse keys that are not known.

        Raises:
            FileError: the first such key.
        """
        names = list(known)
        for name in self.data:
            if name not in names:
                raise self.error(name, f"unknown key {shown(name)}.{did_you_mean(name, names)}", key=True)

    def value(self, name: str) -> Any:
        """Return whatever stands under a key.

        Raises:
            FileError: the key is missing.
        """
        if name not in self.data:
            raise self.error(None, f"key {name!r} is missing.")
        return self.data[name]

    def text(self, name: str, default: str | None = None) -> str:
        """Return text that is not empty; a key that is missing needs a ``default``.

        Raises:
            FileError: the key is missing without a default, or holds something else.
        """
        if name not in self.data and default is not None:
            return default
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, f"expected text, got {shown(value)}.")
        return value

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
        """Return a whole number in [low, high]; a key that is missing needs a ``default``.

        Raises:
            FileError: the key is missing without a default, or holds something else.
        """
        if name not in self.data and default is not None:
            return default
        value = self.value(name)
        try:
            return require_integer(name, value, low=low, high=high)
        except ValueError as error:
            raise self._number_error(name, value, error) from None

    def number(
        self, name: str, default: float | None = None, *, low: float, high: float, low_open: bool = False
    ) -> float:
        """Return a finite number in [low, high]; a key that is missing needs a ``default``.

        Raises:
            FileError: the key is missing without a default, or holds something else.
        """
        if name not in self.data and default is not None:
            return default
        value = self.value(name)
        try:
            return require_number(name, value, low=low, high=high, low_open=low_open)
        except ValueError as error:
            raise self._number_error(name, value, error) from None

    def section(self, name: str) -> YamlSection:
        """Return the mapping under a key.

        Raises:
            FileError: the key is missing, or something else stands there.
        """
        self.value(name)
        inner = YamlSection(self.file, (*self.at, name))
        inner.data  # noqa: B018 - refuses what is no mapping
        return inner

    def _number_error(self, name: str, value: object, error: ValueError) -> FileError:
        hint = scalar_hint(value, "number", quoted=(*self.at, name) in self.file.quoted)
        problem = str(error).removeprefix(f"{name}: ")
        return self.error(name, problem + hint)
