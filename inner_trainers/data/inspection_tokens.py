"""Counts tokens of rows with the very code that trains on them, and judges which rows a length limit empties."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chat import ChatFormat
from ..tasks.base import Chat
from ..tokens import text_ids

Lengths = NDArray[np.int64]

NEVER = -1
"""Tokens needed by a row that has nothing to learn at any length."""

_EXPANDING = (
    "NFD",
    "NFKD",
    "NFC",
    "NFKC",
    "Lowercase",
    "Precompiled",
    "Strip",
    "StripAccents",
    "BertNormalizer",
    "Nmt",
)
_SINGLE = ("Prepend", "Replace")


@dataclass(frozen=True)
class CountedRows:
    """Tokens of rows.

    Attributes:
        prompt: tokens before what is learned.
        completion: tokens that are learned; of a preference those of the chosen side, 0 of prompts alone.
        whole: tokens of the row; of a preference those of its longer side.
        needed: the smallest ``max_length`` that keeps something to learn; `NEVER` where nothing does.
        supervised: tokens that carry a loss at the ``max_length`` asked for, of rows that are trained on.
        kept: tokens of those rows at that ``max_length``.
    """

    prompt: Lengths
    completion: Lengths
    whole: Lengths
    needed: Lengths
    supervised: Lengths
    kept: Lengths


class RowCounter:
    """Turns rows of one kind into token counts for one model.

    Args:
        folder: the model's folder, as `model_folder` returns it.
        name: what messages call the model.
        kind: the kind of rows, a key of `ROW_COLUMNS`.
        max_length: where rows are cut.
        chat: how prompts become turns; None for plain text, unless rows hold turns.
        turns: whether rows hold turns.

    Raises:
        ValueError: the tokenizer cannot be loaded, or it has no chat template and turns have to be written.
    """

    def __init__(
        self, folder: Path, name: str, kind: str, max_length: int, chat: Chat | None = None, turns: bool = False
    ) -> None:
        from transformers import GenerationConfig
        from transformers.utils import logging

        from ..sampling import end_token_ids
        from ..trl.models import load_tokenizer

        logging.set_verbosity_error()  # it warns of rows longer than the model's positions, which findings tell
        logging.disable_progress_bar()
        self.kind, self.max_length = kind, max_length
        self.tokenizer = load_tokenizer(folder, "model")
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"model: the tokenizer of {name} has no end token (eos_token), so no answer could ever end."
            )
        try:
            settings: Any = GenerationConfig.from_pretrained(folder)
        except OSError:
            settings = SimpleNamespace(eos_token_id=None)
        ends = end_token_ids(SimpleNamespace(generation_config=settings), self.tokenizer)
        chat = Chat() if chat is None and turns else chat
        self.chat = None if chat is None else ChatFormat(self.tokenizer, chat, name, ends)
        self.positions = _positions(folder)
        self._added = len(text_ids(self.tokenizer, [""])[0]) + 2  # an end token, and a mark that some put in front
        self._bounded, self._ascii_alone = _byte_bound(self.tokenizer)
        self._turn, self._opening = self._template_tokens()

    def count(self, rows: Sequence[Mapping[str, Any]], where: str) -> CountedRows:
        """Return the tokens of rows, as a round makes them.

        Raises:
            ValueError: the chat template refuses a row; rows are numbered from 1.
        """
        from ..trl import data, preferences

        if self.kind == "prompts":
            texts = [row["prompt"] for row in rows]
            ids = text_ids(self.tokenizer, texts) if self.chat is None else self.chat.prompts(texts)
            lengths = _array(map(len, ids))
            nothing = np.zeros_like(lengths)
            return CountedRows(lengths, nothing, lengths, nothing, nothing, lengths)
        if self.kind == "preferences":
            pairs = preferences.tokenise_preferences(self.tokenizer, rows, self.chat, where)
            return _of_pairs(pairs, self.max_length)
        if self.kind == "text":
            return _of_rows(data.tokenise_text(self.tokenizer, [row["text"] for row in rows]), self.max_length)
        if self.chat is None:
            return _of_rows(data.tokenise_demonstrations(self.tokenizer, rows), self.max_length)
        turns = [
            row["messages"] if "messages" in row else self.chat.turns(row["prompt"], row["completion"]) for row in rows
        ]
        return _of_rows(data.labelled_rows(*zip(*self.chat.encode(turns, where), strict=True)), self.max_length)

    def surely_learns(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row keeps something to learn, by its bytes alone: tokens are never more than bytes.

        False means that its tokens have to be counted. With a chat template what the template writes is added as
        measured on a short conversation, and counted twice.
        """
        if not self._bounded:
            return False
        if self.kind == "text":
            return row["text"] not in ("", self.tokenizer.eos_token)  # two tokens are enough, of which one is the end
        if self.kind == "prompts":
            return True
        written = self._written(row)
        if written is None:
            return False
        if self._ascii_alone and not written.isascii():
            return False
        count = len(written) if written.isascii() else len(written.encode())
        return count + self._added + self._overhead(row) + 1 <= self.max_length

    def _written(self, row: Mapping[str, Any]) -> str | None:
        """Return a text that is no shorter than what stands before the first token that is learned."""
        if self.kind == "preferences":
            chosen, rejected = row["chosen"], row["rejected"]
            if not (isinstance(chosen, str) and isinstance(rejected, str)) or not (chosen and rejected):
                return None
            if chosen == rejected:
                return None
            if self._ascii_alone:  # a normaliser may make equal what differs
                return str(row["prompt"]) + min(chosen, rejected, key=len)
            return str(row["prompt"]) + _common_beginning(chosen, rejected)
        if "messages" not in row:
            return str(row["prompt"])
        if any(turn.get("tool_calls") or turn["role"] == "tool" for turn in row["messages"]):
            return None
        return "".join(turn.get("content") or "" for turn in row["messages"])

    def _overhead(self, row: Mapping[str, Any]) -> int:
        if self.chat is None:
            return 0
        return 2 * (self._opening + self._turn * len(row.get("messages", ("", ""))))

    def _template_tokens(self) -> tuple[int, int]:
        """Return tokens that the template writes for one more turn, and for a conversation of one exchange."""
        if self.chat is None:
            return 0, 0
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            encoded = self.chat.encode([exchange, exchange * 2], "a probe of the chat template")
        except ValueError:
            self._bounded = False  # rows are written one by one, and told of there
            return 0, 0
        one, two = (len(ids) for ids, _ in encoded)
        return two - one, one


def _of_rows(rows: Any, max_length: int) -> CountedRows:
    whole = _array(map(len, rows.input_ids))
    learned = [sum(label != -100 for label in labels) for labels in rows.labels]
    first = [next((i for i, label in enumerate(labels) if label != -100), len(labels)) for labels in rows.labels]
    cut = rows.cut(max_length)
    trained = set(cut.trainable)
    supervised = [
        sum(label != -100 for label in labels[1:]) if i in trained else 0 for i, labels in enumerate(cut.labels)
    ]
    kept = [len(ids) if i in trained else 0 for i, ids in enumerate(cut.input_ids)]
    needed = [NEVER if length is None else length for length in rows.needed]
    return CountedRows(_array(first), _array(learned), whole, _array(needed), _array(supervised), _array(kept))


def _of_pairs(pairs: Any, max_length: int) -> CountedRows:
    prompt = _array(pairs.shared_prompt(i) for i in range(len(pairs.chosen)))
    chosen, rejected = _array(map(len, pairs.chosen)), _array(map(len, pairs.rejected))
    trained = np.zeros(len(prompt), np.bool_)
    trained[list(pairs.cut(max_length).trainable)] = True
    kept = np.minimum(chosen, max_length) + np.minimum(rejected, max_length)
    supervised = sum(
        np.maximum(np.minimum(side, max_length) - np.maximum(_array(alone), 1), 0)
        for side, alone in ((chosen, pairs.chosen_prompt), (rejected, pairs.rejected_prompt))
    )
    needed = _array(NEVER if length is None else length for length in pairs.needed)
    return CountedRows(
        prompt, chosen - prompt, np.maximum(chosen, rejected), needed, supervised * trained, kept * trained
    )


def _array(values: Any) -> Lengths:
    return np.fromiter(values, np.int64)


def _positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    found = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), None)
    return found if isinstance(found, int) else None


def _common_beginning(left: str, right: str) -> str:
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:shared]


def _byte_bound(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a text never has more tokens than bytes, and whether that holds of ASCII texts alone.

    Every token covers at least one byte of the normalised text. Normal forms of Unicode can make more bytes of a text,
    but leave ASCII as it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False, False
    normalizer = json.loads(backend.to_str())["normalizer"]
    if normalizer is None:
        return True, False
    parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    for part in parts:
        if part["type"] in _EXPANDING:
            continue
        if part["type"] in _SINGLE and len(part.get("content", part.get("prepend", ""))) <= 1:
            continue
        return False, False
    return True, True


def stacked(parts: Sequence[CountedRows]) -> CountedRows:
    """Return counts of rows that were counted in several blocks."""
    names = CountedRows.__dataclass_fields__
    return CountedRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
