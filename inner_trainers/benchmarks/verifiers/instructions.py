"""Checks instructions that a program can check: lengths, words, forms. The kinds are those of IFEval.

The kinds and the names of their arguments follow Zhou et al. (2023), "Instruction-Following Evaluation for Large
Language Models", so that files of that benchmark work as they are; the checks are written anew and documented where
the paper leaves a choice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...messages import did_you_mean
from .base import Versioned, require_bool, require_columns

LONGEST = 100_000
"""Characters of a completion that are looked at."""

RELATIONS = ("less than", "at least")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)")
_ABBREVIATIONS = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|e\.g|i\.e|no|fig|inc|ltd|co|[a-z])\.$", re.IGNORECASE
)

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of instruction.

    Attributes:
        check: ``check(completion, arguments, prompt) -> bool``.
        required: arguments that it must have.
        optional: arguments that it may have.
        summary: what it asks.
    """

    check: Callable[[str, Arguments, str], bool]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    summary: str


# Counting -------------------------------------------------------------------------------------------------------------


def words_in(text: str) -> list[str]:
    """Return the words of a text: runs of letters, digits and underscores, apostrophes within."""
    return _WORD.findall(text)


def sentences_in(text: str) -> int:
    """Return how many sentences a text has: ends by ``.``, ``!`` or ``?`` before white space, some abbreviations aside.

    Text after the last end counts as one more.
    """
    count, begin = 0, 0
    for match in _SENTENCE_END.finditer(text):
        if _WORD.search(text, begin, match.end()) is None:
            begin = match.end()
            continue
        before = text[max(0, match.start() - 8) : match.start() + 1]
        if match.group()[0] == "." and _ABBREVIATIONS.search(before):
            continue
        count, begin = count + 1, match.end()
    return count + (_WORD.search(text, begin) is not None)


def _related(count: int, arguments: Arguments, number: str, relation: str = "relation") -> bool:
    wanted = int(arguments[number])
    return count < wanted if arguments.get(relation, "at least") == "less than" else count >= wanted


def _occurrences(text: str, word: str) -> int:
    """Return how often a word or phrase stands in a text as a whole, case aside."""
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


# Kinds ----------------------------------------------------------------------------------------------------------------


def _keywords_exist(text: str, arguments: Arguments, prompt: str) -> bool:
    return all(_occurrences(text, word) > 0 for word in _texts(arguments["keywords"]))


def _keyword_frequency(text: str, arguments: Arguments, prompt: str) -> bool:
    return _related(_occurrences(text, str(arguments["keyword"])), arguments, "frequency")


def _forbidden_words(text: str, arguments: Arguments, prompt: str) -> bool:
    return all(_occurrences(text, word) == 0 for word in _texts(arguments["forbidden_words"]))


def _letter_frequency(text: str, arguments: Arguments, prompt: str) -> bool:
    letter = str(arguments["letter"]).lower()
    return _related(text.lower().count(letter), arguments, "let_frequency", "let_relation")


def _sentences(text: str, arguments: Arguments, prompt: str) -> bool:
    return _related(sentences_in(text), arguments, "num_sentences")


def _number_words(text: str, arguments: Arguments, prompt: str) -> bool:
    return _related(len(words_in(text)), arguments, "num_words")


def _paragraphs(text: str, arguments: Arguments, prompt: str) -> bool:
    """Paragraphs stand between lines of ``***``."""
    parts = [part for part in text.split("***") if part.strip()]
    return len(parts) == int(arguments["num_paragraphs"])


def _nth_paragraph(text: str, arguments: Arguments, prompt: str) -> bool:
    """Paragraphs stand between empty lines; the nth begins with a word."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    place = int(arguments["nth_paragraph"])
    if len(parts) != int(arguments["num_paragraphs"]) or not 1 <= place <= len(parts):
        return False
    first = words_in(parts[place - 1])
    return bool(first) and first[0].lower() == str(arguments["first_word"]).strip(" '\".,?!").lower()


def _placeholders(text: str, arguments: Arguments, prompt: str) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(arguments["num_placeholders"])


def _postscript(text: str, arguments: Arguments, prompt: str) -> bool:
    marker = str(arguments.get("postscript_marker") or "P.S.").strip()
    letters = [re.escape(letter) for letter in marker if letter.isalpha()]
    pattern = r"\.?\s?".join(letters) + r"\.?" if marker.upper().startswith("P") else re.escape(marker)
    return re.search(rf"^[^\S\n]*{pattern}.*\S", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullet_lists(text: str, arguments: Arguments, prompt: str) -> bool:
    stars = re.findall(r"^[^\S\n]*\*(?!\*)[^\S\n]*\S", text, re.MULTILINE)
    hyphens = re.findall(r"^[^\S\n]*-(?!-)[^\S\n]*\S", text, re.MULTILINE)
    return len(stars) + len(hyphens) == int(arguments["num_bullets"])


CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The answers that ``detectable_format:constrained_response`` allows."""


def _constrained(text: str, arguments: Arguments, prompt: str) -> bool:
    allowed = _texts(arguments["options"]) if arguments.get("options") else list(CONSTRAINED)
    return any(option.lower() in text.lower() for option in allowed)


def _highlights(text: str, arguments: Arguments, prompt: str) -> bool:
    doubles = [found for found in re.findall(r"\*\*([^*\n]+)\*\*", text) if found.strip()]
    singles = [found for found in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text) if found.strip()]
    return len(doubles) + len(singles) >= int(arguments["num_highlights"])


def _sections(text: str, arguments: Arguments, prompt: str) -> bool:
    mark = re.escape(str(arguments["section_spliter"]).strip())
    return len(re.findall(rf"(?:^|(?<=\s)){mark}\s+\d+", text)) >= int(arguments["num_sections"])


def _json_format(text: str, arguments: Arguments, prompt: str) -> bool:
    inner = text.strip()
    if inner.startswith("```") and inner.endswith("```") and len(inner) >= 6:
        inner = inner[3:-3]
        inner = inner[4:] if inner[:4].lower() == "json" else inner
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, arguments: Arguments, prompt: str) -> bool:
    for line in text.splitlines():
        begin = line.find("<<")
        while begin >= 0 and (end := line.find(">>", begin + 2)) >= 0:
            if line[begin + 2 : end].strip(" <>"):
                return True
            begin = line.find("<<", end)
    return False


def _two_responses(text: str, arguments: Arguments, prompt: str) -> bool:
    """Two different answers with ``******`` between."""
    parts = [part.strip() for part in text.split("******")]
    parts = parts[1:] if parts and not parts[0] else parts
    parts = parts[:-1] if parts and not parts[-1] else parts
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(text: str, arguments: Arguments, prompt: str) -> bool:
    asked = str(arguments.get("prompt_to_repeat") or prompt).strip().lower()
    return bool(asked) and text.strip().lower().startswith(asked)


def _end_phrase(text: str, arguments: Arguments, prompt: str) -> bool:
    return text.strip().strip("\"'").lower().endswith(str(arguments["end_phrase"]).strip().lower())


def _quotation(text: str, arguments: Arguments, prompt: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == '"' and stripped[-1] == '"'


def _capital_words(text: str, arguments: Arguments, prompt: str) -> bool:
    count = sum(word.isupper() for word in words_in(text))
    return _related(count, arguments, "capital_frequency", "capital_relation")


def _all_capital(text: str, arguments: Arguments, prompt: str) -> bool:
    return text.isupper()


def _all_lowercase(text: str, arguments: Arguments, prompt: str) -> bool:
    return text.islower()


def _no_comma(text: str, arguments: Arguments, prompt: str) -> bool:
    return "," not in text


# Language -------------------------------------------------------------------------------------------------------------

SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "ar": r"[\u0600-\u06ff]",
        "bn": r"[\u0980-\u09ff]",
        "el": r"[\u0370-\u03ff]",
        "gu": r"[\u0a80-\u0aff]",
        "he": r"[\u0590-\u05ff]",
        "ja": r"[\u3040-\u30ff]",
        "kn": r"[\u0c80-\u0cff]",
        "ko": r"[\uac00-\ud7af]",
        "pa": r"[\u0a00-\u0a7f]",
        "ta": r"[\u0b80-\u0bff]",
        "te": r"[\u0c00-\u0c7f]",
        "th": r"[\u0e00-\u0e7f]",
        "zh": r"[\u4e00-\u9fff]",
    }
)
"""Languages that are known by a script nearly their own. (Japanese by its kana, Chinese by Han characters without.)"""


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


STOP_WORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "de": _word_set("der die das und ist nicht ein eine ich sie wir mit auf für von zu den dem auch als"),
        "en": _word_set("the of and to is in that it was for on are with as be this have at by not you"),
        "es": _word_set("el la los las que de y en un una es por con para del no se lo como más"),
        "fr": _word_set("le la les et des est une un du que pour dans ce il qui ne pas sur au avec"),
        "it": _word_set("il lo gli che di e un una è per con non del della sono nel alla anche come più"),
        "nl": _word_set("de het een en van is dat niet op te zijn voor met die ook aan er maar om bij"),
        "pt": _word_set("o os que de e um uma é para com não do da em no na se por mais como"),
    }
)
"""Languages that are known by their commonest words."""

LANGUAGES = tuple(sorted([*SCRIPTS, *STOP_WORDS]))


def guess_language(text: str) -> str | None:
    """Return the language of a text as an ISO 639-1 code of `LANGUAGES`; None when neither script nor words tell.

    A rule of thumb: the script that has more than half of the letters, or else the language whose stop words are the
    most among the words, at least one word in ten.
    """
    letters = sum(character.isalpha() for character in text)
    if not letters:
        return None
    shares = {code: len(re.findall(pattern, text)) / letters for code, pattern in SCRIPTS.items()}
    if shares["ja"] > 0.15:
        return "ja"
    code = max(shares, key=lambda name: shares[name])
    if shares[code] > 0.5:
        return code
    words = [word.lower() for word in words_in(text)]
    votes = {name: sum(word in stop for word in words) / max(1, len(words)) for name, stop in STOP_WORDS.items()}
    best = max(votes, key=lambda name: votes[name])
    return best if votes[best] >= 0.1 else None


def _language(text: str, arguments: Arguments, prompt: str) -> bool:
    return guess_language(text) == str(arguments["language"]).lower()


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "keywords:existence": Kind(_keywords_exist, ("keywords",), (), "holds all of some words"),
        "keywords:frequency": Kind(
            _keyword_frequency, ("keyword", "frequency"), ("relation",), "holds a word so often"
        ),
        "keywords:forbidden_words": Kind(_forbidden_words, ("forbidden_words",), (), "holds none of some words"),
        "keywords:letter_frequency": Kind(
            _letter_frequency, ("letter", "let_frequency"), ("let_relation",), "holds a letter so often"
        ),
        "language:response_language": Kind(_language, ("language",), (), "is in one language, as far as can be told"),
        "length_constraints:number_sentences": Kind(
            _sentences, ("num_sentences",), ("relation",), "has so many sentences"
        ),
        "length_constraints:number_paragraphs": Kind(
            _paragraphs, ("num_paragraphs",), (), "has so many paragraphs, with *** between"
        ),
        "length_constraints:number_words": Kind(_number_words, ("num_words",), ("relation",), "has so many words"),
        "length_constraints:nth_paragraph_first_word": Kind(
            _nth_paragraph,
            ("num_paragraphs", "nth_paragraph", "first_word"),
            (),
            "has so many paragraphs, with an empty line between, of which one begins with a word",
        ),
        "detectable_content:number_placeholders": Kind(_placeholders, ("num_placeholders",), (), "has [placeholders]"),
        "detectable_content:postscript": Kind(_postscript, (), ("postscript_marker",), "has a postscript"),
        "detectable_format:number_bullet_lists": Kind(_bullet_lists, ("num_bullets",), (), "has so many bullet points"),
        "detectable_format:constrained_response": Kind(_constrained, (), ("options",), "holds one of some answers"),
        "detectable_format:number_highlighted_sections": Kind(
            _highlights, ("num_highlights",), (), "has so many *highlighted* parts"
        ),
        "detectable_format:multiple_sections": Kind(
            _sections, ("section_spliter", "num_sections"), (), "has so many numbered sections"
        ),
        "detectable_format:json_format": Kind(_json_format, (), (), "is JSON, in a code fence or not"),
        "detectable_format:title": Kind(_title, (), (), "has a <<title>>"),
        "combination:two_responses": Kind(_two_responses, (), (), "gives two answers with ****** between"),
        "combination:repeat_prompt": Kind(_repeat_prompt, (), ("prompt_to_repeat",), "begins with the prompt"),
        "startend:end_checker": Kind(_end_phrase, ("end_phrase",), (), "ends with a phrase"),
        "startend:quotation": Kind(_quotation, (), (), "stands in double quotes"),
        "change_case:capital_word_frequency": Kind(
            _capital_words, ("capital_frequency",), ("capital_relation",), "has so many words in capitals"
        ),
        "change_case:english_capital": Kind(_all_capital, (), (), "is in capitals"),
        "change_case:english_lowercase": Kind(_all_lowercase, (), (), "is in lower case"),
        "punctuation:no_comma": Kind(_no_comma, (), (), "has no comma"),
    }
)
"""Kinds of instructions by name."""


@dataclass(frozen=True)
class Instructions(Versioned):
    """The share of a row's instructions that a completion follows.

    A row has ``instructions``, a list of ``{"kind": …, ARGUMENT: …}``; or, as IFEval's files have it,
    ``instruction_id_list`` and ``kwargs``, a list of as many mappings, in which null counts as left out.

    An empty completion follows nothing.

    Attributes:
        strict: whether only all of them together count.
    """

    strict: bool = False

    def __post_init__(self) -> None:
        """Check the setting."""
        require_bool("strict", self.strict)

    @property
    def columns(self) -> tuple[str, ...]:
        """None that every row must have: see the class for the two forms."""
        return ()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row with no, unknown or incomplete instructions; see `Verifier.check_row`."""
        for number, (kind, arguments) in enumerate(self._asked(row), start=1):
            where = f"instruction {number}"
            if not isinstance(kind, str) or kind not in KINDS:
                raise ValueError(f"{where}: unknown kind {kind!r}.{did_you_mean(str(kind), KINDS)}")
            known = (*KINDS[kind].required, *KINDS[kind].optional)
            for name in arguments:
                if name not in known:
                    raise ValueError(f"{where} ({kind}): no argument is called {name!r}.{did_you_mean(name, known)}")
            for name in KINDS[kind].required:
                if name not in arguments:
                    raise ValueError(f"{where} ({kind}): argument {name!r} is missing.")
            self._check_values(where, kind, arguments)

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return the share of the instructions that are followed; with ``strict``, 1.0 for all, else 0.0."""
        followed = self.followed(row, completion)
        if self.strict:
            return float(all(followed))
        return sum(followed) / len(followed)

    def followed(self, row: Mapping[str, Any], completion: str) -> list[bool]:
        """Return of each instruction whether it is followed."""
        text, prompt = completion[:LONGEST], str(row.get("prompt", ""))
        if not text.strip():
            return [False for _ in self._asked(row)]
        return [KINDS[kind].check(text, arguments, prompt) for kind, arguments in self._asked(row)]

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether all instructions are followed."""
        return all(self.followed(row, completion))

    def _asked(self, row: Mapping[str, Any]) -> list[tuple[str, Arguments]]:
        if row.get("instructions") is not None:
            given = row["instructions"]
            if not isinstance(given, list) or not given or not all(isinstance(each, Mapping) for each in given):
                raise ValueError(f"column 'instructions' must be a list of mappings with a kind, got {given!r}.")
            return [(each.get("kind", ""), {k: v for k, v in each.items() if k != "kind"}) for each in given]
        require_columns(row, ("instruction_id_list", "kwargs"))
        names, given = row["instruction_id_list"], row["kwargs"]
        if not isinstance(names, list) or not isinstance(given, list) or not names or len(names) != len(given):
            raise ValueError(
                f"instruction_id_list and kwargs must be lists of one length, got {names!r} and {given!r}."
            )
        if not all(arguments is None or isinstance(arguments, Mapping) for arguments in given):
            raise ValueError(f"kwargs must be a list of mappings, got {given!r}.")
        return [
            (name, {key: value for key, value in (arguments or {}).items() if value is not None})
            for name, arguments in zip(names, given, strict=True)
        ]

    @staticmethod
    def _check_values(where: str, kind: str, arguments: Arguments) -> None:
        for name, value in arguments.items():
            said = f"{where} ({kind}): {name}"
            if name.endswith("relation"):
                if value not in RELATIONS:
                    raise ValueError(f"{said} must be one of {', '.join(RELATIONS)}, got {value!r}.")
            elif name in ("keywords", "forbidden_words", "options"):
                _texts(value, said)
            elif name.startswith(("num_", "nth_")) or name.endswith("frequency"):
                whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if not whole or value != int(value) or value < 0:
                    raise ValueError(f"{said} must be a whole number of at least 0, got {value!r}.")
            elif not isinstance(value, str) or not value:
                raise ValueError(f"{said} must be text, got {value!r}.")
            elif name == "language" and value.lower() not in LANGUAGES:
                raise ValueError(
                    f"{said}: {value!r} cannot be told from others here; languages that can: {', '.join(LANGUAGES)}."
                )


def _texts(value: Any, said: str = "") -> Sequence[str]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"{said} must be a list of words, got {value!r}.")
    return list(value)
