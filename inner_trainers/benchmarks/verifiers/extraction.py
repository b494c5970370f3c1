"""Takes the answer out of a completion before it is judged; every way is total and looks at bounded text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import regex

from ...messages import did_you_mean, first_line

LONGEST = 100_000
"""Characters at the end of a completion that are looked at."""

REGEX_SECONDS = 1.0
"""What a pattern of a person's may take on one completion; it matches nothing when it takes longer."""

NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)[-+−]?(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?(?:[eE][-+]?\d++)?"
    r"|(?<![\w.])[-+−]?\.\d++"
)
"""A number in text: sign, thousands separators, fraction, exponent."""


class Extraction:
    r"""How an answer is found in a completion.

    Args:
        way: ``whole`` (the completion without white space at its ends), ``last_line``, ``last_number``,
            ``after:TEXT`` (what follows the last TEXT, to the end of its line), ``boxed`` (LaTeX's ``\boxed{…}``, the
            last), ``tag:NAME`` (``<NAME>…</NAME>``, the last) or ``regex:PATTERN`` (the first group, or the whole
            match, of the last match).

    Raises:
        ValueError: an unknown way, or a pattern that is none.
    """

    def __init__(self, way: str) -> None:
        name, _, argument = way.partition(":")
        if name in PLAIN_WAYS and not argument:
            self._find = PLAIN_WAYS[name]
        elif name == "after" and argument:
            self._find = lambda text: _after(text, argument)
        elif name == "tag" and re.fullmatch(r"[\w-]+", argument):
            self._find = lambda text: _tag(text, argument)
        elif name == "regex" and argument:
            pattern = compiled(argument, "extract")
            self._find = lambda text: _last_match(text, pattern)
        else:
            known = [*PLAIN_WAYS, "after:TEXT", "tag:NAME", "regex:PATTERN"]
            raise ValueError(f"extract: unknown way {way!r}.{did_you_mean(name, known)}")
        self.way = way

    def __call__(self, completion: str) -> str | None:
        """Return the answer; None when the completion has none of this form."""
        return self._find(completion[-LONGEST:])


def compiled(pattern: str, setting: str, flags: int = 0) -> regex.Pattern[str]:
    """Return a compiled pattern.

    Raises:
        ValueError: it is no pattern; says where.
    """
    try:
        return regex.compile(pattern, flags)
    except (regex.error, RecursionError, OverflowError) as error:
        position = getattr(error, "pos", None)
        place = "" if position is None else f" at character {position + 1}"
        raise ValueError(f"{setting}: {pattern!r} is no pattern ({first_line(error)}{place}).") from None


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else None


def last_number(text: str) -> str | None:
    """Return the last number in a text as it is written; None when there is none."""
    found = None
    for match in NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    number = found.group()
    # a hyphen between two things is no sign: in "3-4" the last number is 4
    before = text[found.start() - 1 : found.start()]
    return number[1:] if number[0] in "-+−" and before.strip() and (before.isalnum() or before in ")]}") else number


def _boxed(text: str) -> str | None:
    begin = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in ("\\boxed{", "\\fbox{"))
    if begin < 0:
        return None
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin:place].strip()
    return None


def _after(text: str, mark: str) -> str | None:
    place = text.rfind(mark)
    if place < 0:
        return None
    rest = text[place + len(mark) :].lstrip(" \t")
    return rest.splitlines()[0].strip() if rest.strip() else ""


def _tag(text: str, name: str) -> str | None:
    opening, closing = f"<{name}>", f"</{name}>"
    end = text.rfind(closing)
    begin = text.rfind(opening, 0, max(end, 0))
    return None if begin < 0 or end < 0 else text[begin + len(opening) : end].strip()


def _last_match(text: str, pattern: regex.Pattern[str]) -> str | None:
    found = None
    try:
        for match in pattern.finditer(text, timeout=REGEX_SECONDS):
            found = match
    except TimeoutError:
        return None
    if found is None:
        return None
    group: str | None = found.group(1) if pattern.groups else found.group()
    return group


PLAIN_WAYS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "whole": lambda text: text.strip(),
        "last_line": _last_line,
        "last_number": last_number,
        "boxed": _boxed,
    }
)
"""Ways without an argument: name -> how the answer is found."""
