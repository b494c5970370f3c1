"""Tokenises preference pairs once per source, for the algorithms that learn from a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..tasks.base import Row


def tokenise_preferences(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Any:
    """Tokenise prompt/chosen/rejected rows exactly as TRL's preference trainers do; cut nothing."""
    raise NotImplementedError
