"""The grammar of constraints, such as ``if base_model_size < 3B then exclude ppo``: read into a tree, never executed.

A constraint is ``if CONDITION then EFFECT``, or an effect alone. An effect is ``exclude NAME, ...`` (algorithms,
starting checkpoints or sources) or a condition that must hold. A condition says:

- numbers (``1e-4``, ``3B``; K, M, B, T stand for 10^3 to 10^12, KB, MB, GB, TB for bytes), knobs of the space,
  ``mix.SOURCE``, ``steps``, and the task's facts (`FACTS`; ``rows.SOURCE`` for one source);
- ``+ - * /``, ``min(x, y)``, ``max(x, y)``, parentheses, comparisons ``< <= > >= == !=`` (chains too);
- ``algorithm == grpo``, ``start != latest``, ``device == cpu``, ``schedule in [linear, cosine]``,
  ``batch_size in [16, 32]``;
- ``and``, ``or``, ``not``.

A name that holds something else than letters, digits, ``_`` and ``.`` is written in quotes. What a fact that is unknown
would decide is left undecided: the constraint then takes nothing away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.recipe import Recipe

FACTS = {
    "base_model_size": "parameters of the base model",
    "rows": "rows of all sources together; rows.NAME of one source",
    "sources": "number of sources",
    "has_teacher": "1 when the task has a teacher, else 0",
    "device": "cpu or cuda",
    "device_memory": "memory of the device, in bytes",
}
"""What a constraint can know of a task and its trainer."""
ALIASES = {"base_model_params": "base_model_size", "model_size": "base_model_size", "n_rows": "rows"}
"""Other spellings of facts."""
CHOSEN = ("algorithm", "start")
MAX_LENGTH = 500
MAX_DEPTH = 32
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "GIB": 2.0**30}
_WORDS = ("if", "then", "exclude", "and", "or", "not", "in", "min", "max", "true", "false")
_WORDED = frozenset({*(f.name for f in fields(Recipe) if f.type == "str"), "device"})
"""Settings and facts that hold a name."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<unit>[A-Za-z]+)?"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*(?:\.(?:[A-Za-z_][A-Za-z_0-9-]*|'[^']*'|\"[^\"]*\"))?)"
    r"|(?P<quoted>'[^']*'|\"[^\"]*\")"
    r"|(?P<symbol><=|>=|==|!=|[<>+\-*/()\[\],=]))"
)


class ConstraintError(ValueError):
    """A constraint that cannot be read; the message ends with the text and a caret under the place."""

    def __init__(self, text: str, column: int, problem: str) -> None:
        self.text, self.column, self.problem = text, column, problem
        start = max(0, column - 60)
        super().__init__(
            f"character {column + 1}: {problem}\n  {text[start : start + 110]}\n  {' ' * (column - start)}^"
        )


@dataclass(frozen=True)
class Node:
    """One part of a constraint.

    Attributes:
        kind: ``number``, ``text``, ``name``, ``not``, ``and``, ``or``, ``compare``, ``in``, ``arithmetic``,
            ``negative``, ``extreme`` or ``exclude``.
        value: the number, text or name, or the operator.
        parts: what it is made of.
        column: where it begins in the text, from 0.
    """

    kind: str
    value: str | float = ""
    parts: tuple[Node, ...] = ()
    column: int = field(default=0, compare=False)

    def names(self) -> Iterator[Node]:
        """Yield every name in it."""
        if self.kind == "name":
            yield self
        for part in self.parts:
            yield from part.names()


@dataclass(frozen=True)
class Constraint:
    """A constraint as it was read.

    Attributes:
        text: as given, blanks made single.
        condition: when it holds; None for always.
        effect: what must then hold.
    """

    text: str
    condition: Node | None
    effect: Node

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read a constraint.

        Raises:
            ConstraintError: it cannot be read; says where and why.
        """
        return _Parser(_checked_text(text)).constraint()

    @cached_property
    def names(self) -> tuple[Node, ...]:
        """Every name it mentions, those after ``exclude`` apart."""
        found = [] if self.condition is None else list(self.condition.names())
        return (*found, *self.effect.names())

    def require_names(self, known: Collection[str], excludable: Collection[str], texts: Collection[str] = ()) -> None:
        """Refuse names that mean nothing.

        Args:
            known: knobs, facts and the like.
            excludable: what can stand after ``exclude``.
            texts: what names may be compared with besides ``excludable``: choices of knobs that are names.

        Raises:
            ConstraintError: an unknown name, with a did-you-mean.
        """
        for part in (self.condition, self.effect):
            if part is not None:
                _require_names(self.text, part, known, excludable, {*excludable, *texts, "cpu", "cuda"})


def parse_condition(text: str) -> Node:
    """Read a condition alone, as after a knob's ``when``.

    Raises:
        ConstraintError: it cannot be read; says where and why.
    """
    return _Parser(_checked_text(text)).condition()


def _checked_text(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"expected a constraint such as 'if base_model_size < 3B then exclude ppo', got {text!r}.")
    line = re.sub(r"\s+", " ", text).strip()
    if len(line) > MAX_LENGTH:
        raise ConstraintError(line, 0, f"{len(line)} characters, at most {MAX_LENGTH} are read; make two of it.")
    return line


def _require_names(
    text: str, node: Node, known: Collection[str], excludable: Collection[str], texts: Collection[str]
) -> None:
    if node.kind == "exclude":
        for part in node.parts:
            if part.value not in excludable:
                hint = did_you_mean(str(part.value), excludable)
                if part.value in known:
                    hint = " It is no algorithm, start or source; to hold a knob at a value write NAME == VALUE."
                raise ConstraintError(text, part.column, f"cannot exclude {part.value!r}.{hint}")
        return
    if node.kind in ("compare", "in"):
        _require_same_kind(text, node, known, texts)
        for part in node.parts:
            if part.kind == "name" and (part.value in _WORDED or (part.value not in known and part.value in texts)):
                continue  # `algorithm == grpo`
            if part.kind == "name" and part.value not in known:
                named = any(other.kind == "name" and other.value in known for other in node.parts)
                everything = {*known, *texts} if named and str(node.value) in ("==", "!=", "in") else known
                problem = f"unknown name {part.value!r}.{did_you_mean(str(part.value), everything)}"
                raise ConstraintError(text, part.column, problem)
            if part.kind != "name":
                _require_names(text, part, known, excludable, texts)
        return
    if node.kind == "name" and node.value not in known:
        raise ConstraintError(text, node.column, f"unknown name {node.value!r}.{did_you_mean(str(node.value), known)}")
    if node.kind == "name" and node.value in _WORDED:
        raise ConstraintError(text, node.column, f"{node.value!r} holds a name; compare it with ==, != or in.")
    for part in node.parts:
        _require_names(text, part, known, excludable, texts)


def _require_same_kind(text: str, node: Node, known: Collection[str], texts: Collection[str]) -> None:
    """Refuse comparisons of a name with a number, of names by order, and of names that no setting holds."""
    held = [part for part in node.parts if part.kind == "name" and part.value in _WORDED]
    words = [
        part
        for part in node.parts
        if part.kind == "text" or (part.kind == "name" and part.value not in known and part.value in texts)
    ]
    if not (held or words) or any(part.kind == "name" and part.value not in {*known, *texts} for part in node.parts):
        return
    first = (words or held)[0]
    if node.value not in ("==", "!=", "in"):
        raise ConstraintError(text, first.column, f"{first.value!r} is a name, and names have no order; use == or !=.")
    if len(held) + len(words) < len(node.parts):
        raise ConstraintError(text, first.column, f"{first.value!r} is a name and is compared with a number.")
    if not held:
        raise ConstraintError(
            text,
            first.column,
            f"{first.value!r} is a name; compare a setting that holds one with it, as algorithm does.",
        )


@dataclass(frozen=True)
class _Token:
    kind: str
    value: str | float
    column: int


class _Parser:
    """Recursive descent over one line of text."""

    def __init__(self, text: str) -> None:
        self._text, self._depth, self._next = text, 0, 0
        self._tokens = list(self._tokenise())

    def _tokenise(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                column = position + len(self._text[position:]) - len(self._text[position:].lstrip())
                raise ConstraintError(self._text, column, f"{self._text[column]!r} has no meaning in a constraint.")
            position = match.end()
            kind = str(match.lastgroup if match.lastgroup != "unit" else "number")
            column = match.start(kind)
            value: str | float = match[kind]
            if kind == "number":
                value = self._number(match, column)
            elif kind == "quoted":
                kind, value = "text", match[kind][1:-1]
            elif kind == "name":
                head, dot, tail = match[kind].partition(".")
                value = ALIASES.get(head, head) + dot + tail.strip("'\"")
                if dot and head not in ("mix", "rows"):
                    raise ConstraintError(self._text, column, "only mix.SOURCE and rows.SOURCE have a dot.")
            yield _Token(kind, value, column)

    def _number(self, match: re.Match[str], column: int) -> float:
        unit = match["unit"]
        number = float(match["number"])
        if unit is not None:
            if unit.upper() not in _UNITS:
                problem = f"unknown unit {unit!r} after a number.{did_you_mean(unit, ('K', 'M', 'B', 'T', 'GB'))}"
                raise ConstraintError(self._text, column, problem)
            number *= _UNITS[unit.upper()]
        if number == float("inf"):
            raise ConstraintError(self._text, column, "the number is too large.")
        return number

    def constraint(self) -> Constraint:
        condition = None
        if self._take("if"):
            condition = self._boolean()
            if not self._take("then"):
                raise self._error("expected `then` after the condition")
        effect = self._effect()
        self._end()
        for part in (condition, effect):
            if part is not None and part.kind != "exclude":
                self._require_truth(part)
        return Constraint(self._text, condition, effect)

    def condition(self) -> Node:
        node = self._boolean()
        self._end()
        self._require_truth(node)
        return node

    def _require_truth(self, node: Node) -> None:
        """Refuse a number or text where something true or false is wanted, and the reverse within it."""
        if node.kind in ("and", "or", "not"):
            for part in node.parts:
                self._require_truth(part)
        elif node.kind in ("compare", "in"):
            for part in node.parts:
                self._require_value(part)
        elif node.kind != "name":
            raise ConstraintError(self._text, node.column, "expected a comparison, such as batch_size <= 64.")

    def _require_value(self, node: Node) -> None:
        if node.kind in ("and", "or", "not", "compare", "in"):
            raise ConstraintError(self._text, node.column, "expected a number or a name, not a condition.")
        for part in node.parts:
            if part.kind == "text":
                raise ConstraintError(self._text, part.column, "text cannot be calculated with.")
            self._require_value(part)

    def _effect(self) -> Node:
        column = self._column()
        if not self._take("exclude"):
            return self._boolean()
        names = [self._excluded()]
        while self._take(",") or self._take("and"):
            names.append(self._excluded())
        return Node("exclude", "exclude", tuple(names), column)

    def _excluded(self) -> Node:
        token = self._peek()
        if token is None or token.kind not in ("name", "text") or (token.kind == "name" and token.value in _WORDS):
            raise self._error("expected the name of an algorithm, a start or a source after `exclude`")
        self._next += 1
        return Node("text", token.value, (), token.column)

    def _boolean(self) -> Node:
        return self._chain("or", lambda: self._chain("and", self._negation))

    def _chain(self, word: str, part: Callable[[], Node]) -> Node:
        column = self._column()
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Node(word, word, tuple(parts), column)

    def _negation(self) -> Node:
        column = self._column()
        if self._take("not"):
            return self._deeper(lambda: Node("not", "not", (self._negation(),), column))
        return self._comparison()

    def _comparison(self) -> Node:
        column = self._column()
        left = self._sum()
        found = []
        while True:
            token = self._peek()
            if token is not None and token.kind == "symbol" and token.value == "=":
                raise self._error("one `=` compares nothing; write `==`")
            if token is not None and token.kind == "symbol" and token.value in ("<", "<=", ">", ">=", "==", "!="):
                self._next += 1
                right = self._sum()
                found.append(Node("compare", token.value, (left, right), column))
                left = right
                continue
            negated = self._is("not") and self._is("in", ahead=1)
            if negated or self._is("in"):
                self._next += 2 if negated else 1
                inside = Node("in", "in", (left, *self._list()), column)
                found.append(Node("not", "not", (inside,), column) if negated else inside)
            break
        if not found:
            return left
        return found[0] if len(found) == 1 else Node("and", "and", tuple(found), column)

    def _list(self) -> list[Node]:
        if not self._take("["):
            raise self._error("expected a list such as [grpo, ppo] after `in`")
        items = [self._sum()]
        while self._take(","):
            items.append(self._sum())
        if not self._take("]"):
            raise self._error("expected `]` after the list")
        return items

    def _sum(self) -> Node:
        return self._operators(("+", "-"), lambda: self._operators(("*", "/"), self._factor))

    def _operators(self, symbols: tuple[str, ...], part: Callable[[], Node]) -> Node:
        column = self._column()
        node: Node = part()
        while (token := self._peek()) is not None and token.kind == "symbol" and token.value in symbols:
            self._next += 1
            node = Node("arithmetic", token.value, (node, part()), column)
        return node

    def _factor(self) -> Node:
        token = self._peek()
        if token is None:
            raise self._error("expected a name or a number")
        self._next += 1
        if token.kind == "number":
            return Node("number", token.value, (), token.column)
        if token.kind == "text":
            return Node("text", token.value, (), token.column)
        if token.kind == "symbol" and token.value == "-":
            return self._deeper(lambda: Node("negative", "-", (self._factor(),), token.column))
        if token.kind == "symbol" and token.value == "(":
            inner = self._deeper(self._boolean)
            if not self._take(")"):
                raise self._error("expected `)`")
            return inner
        if token.kind == "name" and token.value in ("min", "max") and self._take("("):
            parts = [self._deeper(self._sum)]
            while self._take(","):
                parts.append(self._deeper(self._sum))
            if not self._take(")"):
                raise self._error("expected `)`")
            return Node("extreme", token.value, tuple(parts), token.column)
        if token.kind == "name" and token.value in ("true", "false"):
            return Node("number", float(token.value == "true"), (), token.column)
        if token.kind == "name" and token.value not in _WORDS:
            return Node("name", token.value, (), token.column)
        self._next -= 1
        raise self._error("expected a name or a number")

    def _deeper(self, part: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parts within parts; make two of it")
        node: Node = part()
        self._depth -= 1
        return node

    def _peek(self, ahead: int = 0) -> _Token | None:
        place = self._next + ahead
        return self._tokens[place] if place < len(self._tokens) else None

    def _is(self, word: str, ahead: int = 0) -> bool:
        token = self._peek(ahead)
        return token is not None and token.kind in ("name", "symbol") and token.value == word

    def _take(self, word: str) -> bool:
        if not self._is(word):
            return False
        self._next += 1
        return True

    def _column(self) -> int:
        token = self._peek()
        return len(self._text) if token is None else token.column

    def _error(self, problem: str) -> ConstraintError:
        token = self._peek()
        got = "the text ends" if token is None else f"got {self._text[token.column :].split(' ')[0]!r}"
        return ConstraintError(self._text, self._column(), f"{problem}; {got}.")

    def _end(self) -> None:
        if self._peek() is not None:
            raise self._error("expected the end, `and` or `or`")
