"""The built-in task ``calculator``: sums and products that a tiny model gets right by calling a tool."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import require_integer
from .base import Benchmark, Chat, InnerTask, Item, Row, Source

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "0123456789+-*[].?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""What the packaged tokenizer writes: a token for the role, the text, and the end token after the assistant's turns."""

DIMENSIONS = ("products", "sums")
MAX_NEW_TOKENS = 12
"""The longest call, ``[999+999]``, with its end token, and two to spare."""

MAX_TURNS = 2
"""A call and the answer after it."""

_OPERANDS: Mapping[str, tuple[str, int, int]] = {"products": ("*", 11, 99), "sums": ("+", 100, 999)}
_STREAM = 20_211
_EXPRESSION = re.compile(r"\d{1,9}(?:[-+*]\d{1,9}){0,8}")
_ANSWER = re.compile(r"\d{1,5}\.")


def calculate(expression: str) -> int | None:
    """Return the value of whole numbers joined by ``+``, ``-`` and ``*``, products first; None for anything else.

    At most nine numbers of at most nine digits: no text makes it work long.
    """
    if _EXPRESSION.fullmatch(expression) is None or not expression.isascii():
        return None
    total = 0
    for sign, product in re.findall(r"([-+]?)(\d+(?:\*\d+)*)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


def use_calculator(text: str) -> str | None:
    """Return the tool's answer to a turn that is a call, ``[37*12]``: the value, or ``?``; None when it is no call."""
    if len(text) < 2 or text[0] != "[" or text[-1] != "]":
        return None
    value = calculate(text[1:-1])
    return "?" if value is None else str(value)


def verify(row: Row, completion: str) -> float:
    """Return 1.0 when the conversation's last turn is the row's answer with its full stop, else 0.0."""
    return float(completion == row["answer"])


def worked(question: str) -> list[dict[str, str]]:
    """Return the turns of a question answered with the tool."""
    expression = question.removesuffix("?")
    answer = str(calculate(expression))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"[{expression}]"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"{answer}."},
    ]


def split_of(question: str) -> str:
    """Return the split a question's text puts it in: ``train`` for eight in ten, else ``validation`` or ``test``."""
    place = zlib.crc32(question.encode()) % 10
    return ("validation", "test")[place] if place < 2 else "train"


@cache
def questions(dimension: str, split: str) -> tuple[str, ...]:
    """Return every question of a dimension and split, in a fixed order; there are 648,000 sums to train on."""
    sign, low, high = _OPERANDS[dimension]
    numbers = range(low, high + 1)
    every = (f"{left}{sign}{right}?" for left in numbers for right in numbers)
    return tuple(question for question in every if split_of(question) == split)


def draw_questions(dimension: str, split: str, count: int, rng: np.random.Generator) -> list[str]:
    """Draw different questions of one dimension and split, without listing them all.

    Args:
        dimension: one of `DIMENSIONS`.
        split: ``train``, ``validation`` or ``test``.
        count: how many; at most a third of those there are, so that few draws are in vain.
        rng: decides which.
    """
    sign, low, high = _OPERANDS[dimension]
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        left, right = rng.integers(low, high + 1, 2).tolist()
        question = f"{left}{sign}{right}?"
        if split_of(question) == split:
            drawn[question] = None
    return list(drawn)


class CalculatorTask(InnerTask):
    """Sums of three-digit and products of two-digit numbers, over up to two assistant turns with a calculator between.

    The base model calls the tool now and then, sometimes wrongly, and guesses otherwise. Three sources: ``worked`` has
    conversations that use the tool, ``practice`` has verifiable prompts, and ``answers`` has right answers without a
    call, which a model of this size cannot learn to find.
    """

    name = "calculator"

    def __init__(self, rows_per_source: int = 512, items_per_dimension: int = 48) -> None:
        """Keep the sizes.

        Args:
            rows_per_source: rows of each source, half of each dimension, in [16, 4096].
            items_per_dimension: validation items, and as many test items, of each dimension, in [1, 256].
        """
        self._rows = require_integer("rows_per_source", rows_per_source, low=16, high=4096)
        self._items = require_integer("items_per_dimension", items_per_dimension, low=1, high=256)

    def base_checkpoint(self) -> Path:
        """Return the packaged folder of the base model."""
        return Path(__file__).parent / "calculator_base"

    def chat(self) -> Chat:
        """Return two turns with the calculator between, written as the tokenizer's own template says."""
        return Chat(tool=use_calculator, tool_version="1", max_turns=MAX_TURNS, max_tool_tokens=12)

    def facts(self) -> dict[str, Any]:
        """Return name, tool and row counts."""
        rows = {"answers": "demonstrations", "practice": "prompts", "worked": "demonstrations"}
        return {
            "name": self.name,
            "tool": "calculator",
            "assistant_turns": MAX_TURNS,
            "rows": {name: {kind: self._rows} for name, kind in rows.items()},
        }

    def sources(self) -> list[Source]:
        """Return the three sources, each drawn from a random stream of its own."""
        answers = [{"prompt": q, "completion": worked(q)[-1]["content"]} for q in self._drawn(0)]
        practice = [{"prompt": q, "answer": worked(q)[-1]["content"]} for q in self._drawn(1)]
        shown = [{"messages": worked(q)} for q in self._drawn(2)]
        return [
            Source("answers", {"demonstrations": answers}),
            Source("practice", {"prompts": practice}, verify, verifier_version="1"),
            Source("worked", {"demonstrations": shown}),
        ]

    def benchmark(self) -> Benchmark:
        """Return the benchmark: both dimensions weigh the same."""
        items: dict[str, list[Item]] = {}
        for number, split in enumerate(("validation", "test")):
            rng = np.random.default_rng([_STREAM, 100 + number])
            items[split] = [
                Item(question, dimension, {"answer": worked(question)[-1]["content"]})
                for dimension in DIMENSIONS
                for question in draw_questions(dimension, split, self._items, rng)
            ]
        return Benchmark(
            weights={"products": 0.5, "sums": 0.5},
            validation=items["validation"],
            test=items["test"],
            score=lambda item, text: verify(item.data, text),
            well_formed=lambda item, text: _ANSWER.fullmatch(text) is not None,
            max_new_tokens=MAX_NEW_TOKENS,
            scorer_version="1",
        )

    def _drawn(self, stream: int) -> list[str]:
        rng = np.random.default_rng([_STREAM, stream])
        half = self._rows // 2
        drawn = draw_questions("products", "train", half, rng) + draw_questions("sums", "train", self._rows - half, rng)
        return [drawn[i] for i in rng.permutation(len(drawn)).tolist()]
