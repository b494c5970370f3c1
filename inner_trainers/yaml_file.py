"""Reads the YAML and JSON files that people write: plain data, each value with its line and column, nothing guessed.

YAML 1.1 turns ``no`` into false, ``1e-6`` into text and ``1:30`` into 90. Here ``true`` and ``false`` alone are truth
values, ``null``, ``~`` and nothing are None, numbers are decimal (``5``, ``0.1``, ``1e-6``, ``5e4``); the rest is text,
of which `scalar_hint` says what may have been meant where something else is expected. Keys are text.

Refused with their place: keys that are there twice, keys that are no text, anchors, aliases and merge keys (unless they
are asked for, and then in bounds), tags but those of plain values, a second document, control characters, tabs that
indent, numbers beyond what a float holds, more than `MAX_DEPTH` levels, more than `MAX_BYTES`, what is not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .yaml_scalars import read_number, shown

MAX_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_VALUES = 20_000
"""Keys and values of a file with aliases, which can stand for terabytes."""
Keys = tuple[str | int, ...]
"""Where a value stands: the keys, and positions in lists, that lead to it."""

_TAGS = ("str", "int", "float", "bool", "null", "map", "seq")
_PLAIN = "plain"
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNPLACED = re.compile(r"\\U(?!000[0-9A-Fa-f]|0010)[0-9A-Fa-f]{8}|^%YAML", re.M)
_OPENS = (
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
)
_CLOSES = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)
_HINTS = {
    "mapping values are not allowed": "check the indentation; text that holds ': ' stands in quotes",
    "could not find expected ':'": "expected `key: value`",
    "expected <block end>": "check the indentation, and that brackets and quotes are closed",
    "expected ',' or": "check that brackets are closed and entries have commas between them",
    "found unexpected end of stream": "close the quotes",
    "cannot start any token": "put the text in quotes",
    "found unknown escape character": "in double quotes write \\\\ for a backslash, or use single quotes",
    "expected the node content": "put the text in quotes",
}


class FileError(ValueError):
    """An error that names its file and, where there is one, the line."""


@dataclass(frozen=True)
class Place:
    """Where something stands in a file; lines and columns count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class YamlFile:
    """What a file says, and where.

    Attributes:
        title: how messages call it, such as ``"recipe mine.yaml"``.
        data: dictionaries, lists, text, numbers, truth values and None.
        keys: where each key stands, by the keys that lead to its value.
        values: where each value stands; the file itself is ``()``.
        quoted: the values that stand in quotes.
    """

    title: str
    data: Any
    keys: Mapping[Keys, Place]
    values: Mapping[Keys, Place]
    quoted: frozenset[Keys]

    def place(self, at: Keys, *, key: bool = False) -> Place:
        """Return where a value, or its key, stands; where it is missing, what would hold it."""
        places = self.keys if key else self.values
        while at not in places and at:
            at, places = at[:-1], self.values
        return places[at]

    def error(self, at: Keys, problem: str, *, key: bool = False) -> FileError:
        """Return the error about a value or, with ``key``, about its key: ``TITLE, line 3, column 5: a.b: PROBLEM``."""
        place = self.place(at, key=key)
        name = f"{key_path(at)}: " if at else ""
        return FileError(f"{self.title}, line {place.line}, column {place.column}: {name}{problem}")


def key_path(at: Keys) -> str:
    """Return keys as messages spell them: ``a.b[0]``."""
    text = ""
    for part in at:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part, quotes=False)}"
    return text.removeprefix(".")


def read_yaml(
    path: Path, title: str, *, expected: str = "keys with values", max_bytes: int = MAX_BYTES, aliases: bool = False
) -> YamlFile:
    """Read a file of keys with values.

    Args:
        path: the file.
        title: how messages call it.
        expected: what stands at its top, for messages.
        max_bytes: the largest file that is read.
        aliases: as in `parse_yaml`.

    Raises:
        FileError: no such file, one that is none, too large or not UTF-8, or as `parse_yaml`.
    """
    try:
        if path.is_dir():
            raise FileError(f"{title}: a folder; expected a YAML or JSON file.")
        if not path.is_file():
            raise FileError(f"{title}: no such file.")
        size = path.stat().st_size
        if size > max_bytes:
            raise FileError(f"{title}: {size} bytes, at most {max_bytes} are read.")
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{title}: it cannot be read ({error.strerror}).") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        codec = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "Latin-1 or another codec"
        raise FileError(
            f"{title}, line {line}: not UTF-8 text (byte {content[error.start]:#04x}, as in {codec}); "
            "save the file as UTF-8."
        ) from None
    return parse_yaml(text, title, expected=expected, aliases=aliases)


def parse_yaml(text: str, title: str, *, expected: str = "keys with values", aliases: bool = False) -> YamlFile:
    """Read text of keys with values.

    Args:
        text: YAML or JSON.
        title: how messages call it.
        expected: what stands at its top, for messages.
        aliases: whether anchors, aliases and merge keys are read; what they stand for counts towards `MAX_VALUES`.

    Raises:
        FileError: text that is no YAML, or holds what the module's first lines list; says where.
    """
    text = text.removeprefix("\ufeff")
    found = _UNPRINTABLE.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - (text.rfind("\n", 0, found.start()) + 1) + 1
        raise FileError(
            f"{title}, line {line}, column {column}: the control character U+{ord(found[0]):04X}; delete it."
        )
    try:
        _require_harmless(text, title, aliases)
        node = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(text, title, error) from None
    except FileError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML leaves escapes beyond Unicode and versions of too many digits to Python's own errors, without a place
        cause = _UNPLACED.search(text)
        line = 1 if cause is None else text.count("\n", 0, cause.start()) + 1
        raise FileError(f"{title}, line {line}: not readable as YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(node, yaml.MappingNode):
        got = "nothing" if node is None else _kind(node)
        place = Place(1, 1) if node is None else _place(node)
        raise FileError(f"{title}, line {place.line}, column {place.column}: expected {expected}, got {got}.")
    return _Builder(title, aliases).built(node)


class _Composer(yaml.SafeLoader):
    """PyYAML's parser up to its tree of nodes; what plain text means is decided here, not by its rules."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Return the tag of a node that has none."""
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return tag


def _require_harmless(text: str, title: str, aliases: bool) -> None:
    """Refuse what takes long to read, as nesting costs its square, and what would make other things than plain data."""
    depth = 0
    for token in yaml.scan(text, Loader=_Composer):
        depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
        problem = None
        if isinstance(token, yaml.AnchorToken | yaml.AliasToken) and not aliases:
            problem = "anchors and aliases (& and *) are not read; write it out, or in quotes."
        elif isinstance(token, yaml.TagToken):
            handle, suffix = token.value
            if handle != "!!" or suffix not in _TAGS:
                written = f"{handle or ''}{suffix}"
                problem = f"the tag {shown(written)} is not read; leave it out and write the plain value."
        elif isinstance(token, yaml.DirectiveToken) and token.name != "YAML":
            problem = f"the directive %{token.name} is not read; leave it out."
        elif depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep."
        if problem is not None:
            mark = token.start_mark
            raise FileError(f"{title}, line {mark.line + 1}, column {mark.column + 1}: {problem}")


def _syntax_error(text: str, title: str, error: yaml.MarkedYAMLError) -> FileError:
    mark = error.problem_mark or error.context_mark
    line, column = (0, 0) if mark is None else (mark.line, mark.column)
    first = line if error.context_mark is None else min(line, error.context_mark.line)
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    for number in range(first, min(line + 1, len(lines))):
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        if "\t" in indent:
            place = f"line {number + 1}, column {indent.index(chr(9)) + 1}"
            return FileError(f"{title}, {place}: a tab indents the line; YAML indents with spaces.")
    problem = str(error.problem or error.context or "unknown")
    hint = next((hint for start, hint in _HINTS.items() if start in problem), "")
    if "'\\t'" in problem:
        hint = "a tab stands where a space is expected; replace it"
    if "expected a single document" in str(error.context):
        problem, hint = "a second document begins here", "keep one and leave out the line `---`"
    told = f"{problem}); {hint}." if hint else f"{problem})."
    return FileError(f"{title}, line {line + 1}, column {column + 1}: not readable as YAML ({told}")


class _Builder:
    """Turns a tree of nodes into plain data with places."""

    def __init__(self, title: str, aliases: bool) -> None:
        self._title, self._aliases = title, aliases
        self._keys: dict[Keys, Place] = {}
        self._values: dict[Keys, Place] = {}
        self._quoted: set[Keys] = set()

    def built(self, node: yaml.MappingNode) -> YamlFile:
        data = self._value(node, ())
        return YamlFile(self._title, data, self._keys, self._values, frozenset(self._quoted))

    def _error(self, node: yaml.Node, problem: str) -> FileError:
        place = _place(node)
        return FileError(f"{self._title}, line {place.line}, column {place.column}: {problem}")

    def _value(self, node: yaml.Node, at: Keys) -> Any:
        self._values[at] = _place(node)
        if len(at) > MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} deep, through an alias.")
        if len(self._values) > MAX_VALUES and self._aliases:
            raise self._error(node, f"more than {MAX_VALUES} values, with what aliases stand for.")
        if isinstance(node, yaml.SequenceNode):
            self._require_kind(node, at, "seq")
            return [self._value(entry, (*at, place)) for place, entry in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node, at)
        self._require_kind(node, at, "map")
        data: dict[str, Any] = {}
        for key, value, own in self._entries(node, at):
            name = self._key(key, at)
            inner = (*at, name)
            if name in data:
                if not own:
                    continue  # what a merge key brings stands behind what the mapping says itself
                first = self._keys[inner].line
                inside = f" in {key_path(at)}" if at else ""
                raise self._error(
                    key, f"key {shown(name)} is there twice{inside}, first in line {first}; leave one out."
                )
            self._keys[inner] = _place(key)
            data[name] = self._value(value, inner)
        return data

    def _entries(self, node: yaml.MappingNode, at: Keys) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """Yield a mapping's keys and values, and whether they are its own; those of merge keys come last."""
        merged: list[yaml.MappingNode] = []
        for key, value in node.value:
            if not (isinstance(key, yaml.ScalarNode) and key.tag == _PLAIN and key.value == "<<"):
                yield key, value, True
                continue
            if not self._aliases:
                raise self._error(key, f"{key_path((*at, '<<'))}: merge keys (<<) are not read; write the keys out.")
            for entry in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(entry, yaml.MappingNode):
                    raise self._error(value, f"<<: expected keys to merge, got {_kind(entry)}.")
                merged.append(entry)
        if merged and len(at) >= MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} deep, through an alias.")
        for entry in merged:
            for key, value in entry.value:
                if isinstance(key, yaml.ScalarNode) and key.value == "<<":
                    raise self._error(key, "<<: what is merged must have no merge key itself; write the keys out.")
                yield key, value, False

    def _key(self, node: yaml.Node, at: Keys) -> str:
        inside = f" in {key_path(at)}" if at else ""
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"expected a key in words{inside}, got {_kind(node)}.")
        name = str(node.value)
        if not name.strip():
            raise self._error(node, f"a key is missing before the colon{inside}.")
        if _UNPRINTABLE.search(name) or "\n" in name or "\t" in name:
            raise self._error(node, f"the key {shown(name)}{inside} holds a control character.")
        return name

    def _require_kind(self, node: yaml.Node, at: Keys, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise self._error(
                node, f"{key_path(at)}: the tag !!{node.tag.rpartition(':')[2]} stands before {_kind(node)}."
            )

    def _scalar(self, node: yaml.Node, at: Keys) -> Any:
        text, tag = str(node.value), node.tag.rpartition(":")[2]
        name = f"{key_path(at)}: "
        found = _UNPRINTABLE.search(text)
        if found is not None:
            raise self._error(node, f"{name}the text holds the control character U+{ord(found[0]):04X}.")
        if getattr(node, "style", None) is not None:
            self._quoted.add(at)
        if tag == _PLAIN:
            return self._plain(text, node, name)
        if tag == "str":
            return text
        value = self._plain(text, node, name)
        right = {"bool": isinstance(value, bool), "null": value is None}.get(tag)
        if right is None:
            right = isinstance(value, int | float) and not isinstance(value, bool)
            value = float(value) if right and tag == "float" else value
            right = right and (tag != "int" or isinstance(value, int))
        if not right or tag in ("map", "seq"):
            raise self._error(node, f"{name}{shown(text)} does not fit its tag !!{tag}; leave the tag out.")
        return value

    def _plain(self, text: str, node: yaml.Node, name: str) -> Any:
        if text in ("", "~", "null"):
            return None
        if text in ("true", "false"):
            return text == "true"
        try:
            return read_number(text)
        except ValueError as error:
            raise self._error(node, f"{name}{error}") from None


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
