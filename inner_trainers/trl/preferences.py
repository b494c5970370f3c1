"""Tokenises preference pairs once per source, for the algorithms that learn from a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from ..chat import ChatFormat
from ..tasks.base import Row
from ..tokens import text_ids
from .data import common_prefix_length


@dataclass(frozen=True)
class TokenisedPairs:
    """Preference rows of one source as token ids; a length limit decides what is trained on, and cuts no ids.

    Attributes:
        chosen: token ids per row, prompt then better answer then end token.
        rejected: the same with the worse answer.
        chosen_prompt: per row, how many of the chosen ids belong to the prompt when that side stands alone.
        rejected_prompt: the same for the rejected ids.
        longest: length of the longer side of the longest row, in tokens.
        trainable: indices of the rows whose sides differ within the limit, both with a completion token, in order.
        unsupervised: the other rows, numbered from 1.
        needed: per row, the smallest ``max_length`` that leaves a preference; None when a side is empty or both are
            equal.
    """

    lost_by_cutting: ClassVar[str] = "keep no token in which their sides differ"
    lost_anyway: ClassVar[str] = "have an empty side or two equal ones"

    chosen: list[list[int]]
    rejected: list[list[int]]
    chosen_prompt: list[int]
    rejected_prompt: list[int]
    longest: int
    trainable: tuple[int, ...]
    unsupervised: tuple[int, ...]
    needed: tuple[int | None, ...]

    @property
    def smallest_max_length(self) -> int | None:
        """The smallest ``max_length`` at which some pair still has a preference; None when none ever has."""
        return min((length for length in self.needed if length is not None), default=None)

    def shared_prompt(self, index: int) -> int:
        """Return how many tokens of a row are the prompt of both sides."""
        return min(self.chosen_prompt[index], self.rejected_prompt[index])

    def cut(self, max_length: int) -> TokenisedPairs:
        """Return the pairs of which ``max_length`` tokens a side are trained on; themselves when none is longer.

        The ids stay whole: the collators cut them, after a mismatched answer has been put to a prompt where an
        algorithm wants that.
        """
        if max_length >= self.longest:
            return self
        kept = [length is not None and length <= max_length for length in self.needed]
        return replace(
            self,
            longest=max_length,
            trainable=tuple(i for i, there in enumerate(kept) if there),
            unsupervised=tuple(i for i, there in enumerate(kept, 1) if not there),
        )


def tokenise_preferences(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], chat: ChatFormat | None = None, where: str = "preferences"
) -> TokenisedPairs:
    """Tokenise prompt/chosen/rejected rows exactly as TRL's preference trainers do; cut nothing.

    Args:
        tokenizer: the model's tokenizer.
        rows: the rows.
        chat: writes prompts and answers as turns; None for text.
        where: names the rows in the messages of ``chat``.
    """
    eos = tokenizer.eos_token or ""
    texts = [row["prompt"] for row in rows]
    prompts = text_ids(tokenizer, texts) if chat is None else chat.prompts(texts)
    sides: dict[str, list[list[int]]] = {}
    for side in ("chosen", "rejected"):
        if chat is not None:
            sides[side] = chat.answers(texts, [row[side] for row in rows], where)
            continue
        answers = [row[side] if eos and row[side].endswith(eos) else row[side] + eos for row in rows]
        wholes = [row["prompt"] + answer for row, answer in zip(rows, answers, strict=True)]
        sides[side] = text_ids(tokenizer, wholes)
    chosen, rejected = sides["chosen"], sides["rejected"]
    chosen_prompt = [common_prefix_length(p, whole) for p, whole in zip(prompts, chosen, strict=True)]
    rejected_prompt = [common_prefix_length(p, whole) for p, whole in zip(prompts, rejected, strict=True)]
    needed = [
        None if any(row[side] in ("", eos) for side in ("chosen", "rejected")) else _needed(better, worse, max(alone))
        for row, better, worse, *alone in zip(rows, chosen, rejected, chosen_prompt, rejected_prompt, strict=True)
    ]
    return TokenisedPairs(
        chosen=chosen,
        rejected=rejected,
        chosen_prompt=chosen_prompt,
        rejected_prompt=rejected_prompt,
        longest=max(map(len, chosen + rejected)),
        trainable=tuple(i for i, length in enumerate(needed) if length is not None),
        unsupervised=tuple(i for i, length in enumerate(needed, 1) if length is None),
        needed=tuple(needed),
    )


def _needed(chosen: Sequence[int], rejected: Sequence[int], prompt: int) -> int | None:
    """Return the length at which both sides have a predicted completion token and some token differs."""
    if chosen == rejected or min(len(chosen), len(rejected)) <= max(prompt, 1):
        return None
    # no token predicts the first one, so a difference there is no preference by itself
    return max(common_prefix_length(chosen, rejected), prompt, 1) + 1
