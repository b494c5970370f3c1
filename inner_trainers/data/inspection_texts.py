"""What is odd about the characters of texts, and which scripts and languages they seem to have."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from .inspection_findings import DataFinding, Places

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CONTROL_BEYOND = re.compile(r"[\x80-\x9f\ue000-\uf8ff]")
_MOJIBAKE = re.compile("[ÂÃ][\u0080-\u00bf]|â€.|ï»¿|Ã[ƒ‚]")
_ZERO_WIDTH = re.compile("[\u200b\u2060\u00ad]|\ufeff")
# a joiner belongs between letters of scripts that need it, and into emoji
_LEAST_VOTES = 2

_STOP_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in (
        ("English", "the of and to in is that it for was with as are this be what how"),
        ("German", "der die das und ist nicht ein eine zu den mit von für auf wie was"),
        ("French", "le la les des est et une un dans que qui pour pas sur avec quel"),
        ("Spanish", "el la los las es y una un en que por para con del como qué"),
        ("Italian", "il lo gli è e una un in che per con del della non come"),
        ("Portuguese", "o os as é e uma um em que por para com do da não como"),
        ("Dutch", "de het een en is niet van met op voor dat wat hoe zijn"),
    )
}
_LETTERS = re.compile(r"[^\W\d_]+")

_TOLD: Mapping[str, tuple[str, str, str]] = {
    "line_ends": (
        "warning",
        "hold carriage returns",
        "A model would learn to write them; `--fix` writes line feeds.",
    ),
    "replacement": (
        "warning",
        "hold the replacement character U+FFFD",
        "Characters were lost in an earlier conversion, for good; take the source again, or drop the rows.",
    ),
    "mojibake": (
        "warning",
        "look decoded with the wrong codec (as Ã© for é)",
        "Convert the file they come from again, from its real encoding.",
    ),
    "control": (
        "warning",
        "hold control or private-use characters",
        "Take them out, unless the model is to learn them.",
    ),
    "zero_width": (
        "note",
        "hold characters that cannot be seen (zero-width space, soft hyphen, byte order mark)",
        "Texts that look equal differ; take them out.",
    ),
}


class TextChecks:
    """Counts rows with odd characters."""

    def __init__(self) -> None:
        self._found: dict[str, Places] = {}

    def take(self, text: str, number: int, line: int | None) -> None:
        """Look at the whole text of one row."""
        if "\r" in text:
            self._add("line_ends", number, line)
        if _CONTROL.search(text):
            self._add("control", number, line)
        if text.isascii():
            return
        if "\ufffd" in text:
            self._add("replacement", number, line)
        if _MOJIBAKE.search(text):
            self._add("mojibake", number, line)
        elif not _CONTROL.search(text) and _CONTROL_BEYOND.search(text):
            self._add("control", number, line)
        if _ZERO_WIDTH.search(text):
            self._add("zero_width", number, line)

    def findings(self, path: str, rows: int) -> list[DataFinding]:
        """Return what was found in a file of so many rows."""
        found = []
        for check, (severity, problem, remedy) in _TOLD.items():
            if check in self._found:
                places = self._found[check]
                found.append(places.finding(severity, check, path, f"{places.count} of {rows} rows {problem}", remedy))
        return found

    def _add(self, check: str, number: int, line: int | None) -> None:
        self._found.setdefault(check, Places()).add(number, line)


def scripts_of(texts: Iterable[str]) -> dict[str, float]:
    """Return script -> share of the letters, the commonest first: the first word of each letter's Unicode name."""
    counts: Counter[str] = Counter()
    for text in texts:
        if text.isascii():
            counts["LATIN"] += sum(map(str.isalpha, text))
            continue
        counts.update(character for character in text if character.isalpha())
    named: Counter[str] = Counter()
    for character, count in counts.items():
        name = character if len(character) > 1 else unicodedata.name(character, "unnamed").split()[0]
        named[name] += count
    total = sum(named.values())
    return {name.title(): count / total for name, count in named.most_common()} if total else {}


def languages_of(texts: Iterable[str]) -> dict[str, float]:
    """Return language -> share of the texts, by a vote of stop words: an estimate, for texts in Latin script alone.

    A text with fewer than two stop words, or as many of two languages, is ``"unclear"``.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        words = Counter(_LETTERS.findall(text[:2000].lower()))
        votes = sorted(
            ((sum(words[word] for word in stops), name) for name, stops in _STOP_WORDS.items()), reverse=True
        )
        clear = votes[0][0] >= _LEAST_VOTES and votes[0][0] > votes[1][0]
        counts[votes[0][1] if clear else "unclear"] += 1
    total = sum(counts.values())
    return {name: count / total for name, count in counts.most_common()} if total else {}
