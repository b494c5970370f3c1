"""Turns plain text into token ids that stay open: without the end token that some tokenizers put after every text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text; only what the text itself says ends it."""
    return without_added_end(tokenizer, texts, tokenizer(text=list(texts))["input_ids"])


def without_added_end(tokenizer: Any, texts: Sequence[str], ids: list[list[int]]) -> list[list[int]]:
    """Return the token ids of texts without the end token that the tokenizer adds by itself; most add none.

    An end token that stands in the text stays, also where the tokenizer adds none to such a text.
    """
    if not _adds_end(tokenizer):
        return ids
    end = tokenizer.eos_token_id
    return [
        row[:-1]
        if row and row[-1] == end and (not text.endswith(tokenizer.eos_token) or row[-2:] == [end, end])
        else row
        for text, row in zip(texts, ids, strict=True)
    ]


def _adds_end(tokenizer: Any) -> bool:
    if tokenizer.eos_token_id is None:
        return False
    probe: list[int] = tokenizer(text="a")["input_ids"]
    return len(probe) > 1 and probe[-1] == tokenizer.eos_token_id
