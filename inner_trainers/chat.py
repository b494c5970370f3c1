"""Writes conversations as token ids with a chat template; only what the assistant wrote carries a label.

Templates are rendered by the transformers library's sandbox; nothing else of a task or a checkpoint is executed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .messages import first_line
from .tasks.base import Chat
from .tasks.turns import plain_turns

LONGEST_TOKEN = 256
"""Characters that no token is longer than."""

IGNORED = -100
"""Label of a token that carries no loss."""


def require_template(tokenizer: Any, chat: Chat, model: str) -> str:
    """Return the Jinja template a task's conversations are written with.

    Args:
        tokenizer: the model's tokenizer.
        chat: how the task's prompts become turns.
        model: names the model in the message.

    Raises:
        ValueError: neither the task nor the tokenizer has one.
    """
    if chat.template is not None:
        return chat.template
    if not tokenizer.chat_template:
        raise ValueError(
            f"chat template: the tokenizer of {model} has none, so its conversations have no written form. Either set "
            "tokenizer.chat_template and save the tokenizer with the model, or state one in Chat.template of the "
            "task, which is stored with the task's content hash."
        )
    template: str = tokenizer.get_chat_template()
    return template


class ChatFormat:
    """How one model writes the conversations of a task.

    Args:
        tokenizer: the model's tokenizer; it is not changed.
        chat: how the task's prompts become turns.
        model: names the model in messages.
        ends: token ids that end an assistant's turn; None for the tokenizer's end token.

    Attributes:
        chat: as given.
        ends: as given.
        longest_tool_turn: most tokens between two assistant turns: the tool's turn with what the template writes
            around it.

    Raises:
        ValueError: there is no template, or it cannot write a tool's turn for a task that has a tool.
    """

    def __init__(self, tokenizer: Any, chat: Chat, model: str, ends: Collection[int] | None = None) -> None:
        self.chat, self.ends = chat, frozenset([tokenizer.eos_token_id] if ends is None else ends)
        self._tokenizer, self._model = tokenizer, model
        self._template = require_template(tokenizer, chat, model)
        self.longest_tool_turn = 0
        if self.uses_tool:
            self.longest_tool_turn = len(self._tool_turn("")) + chat.max_tool_tokens

    @property
    def uses_tool(self) -> bool:
        """Whether a sampled conversation can go on after a tool's answer."""
        return self.chat.tool is not None and self.chat.max_turns > 1

    # Writing ----------------------------------------------------------------------------------------------------

    def turns(self, prompt: str, answer: str | Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return the turns of a text prompt, with the assistant's answer (text, or turns of its own) after it."""
        turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        if isinstance(answer, str):
            turns.append({"role": "assistant", "content": answer})
        elif answer is not None:
            turns += [dict(turn) for turn in answer]
        return turns

    def prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return each prompt as token ids, up to where the assistant begins."""
        return self._ids([self._render(self.turns(prompt), f"prompt {prompt!r}", open_turn=True) for prompt in prompts])

    def encode(self, conversations: Sequence[Sequence[Mapping[str, Any]]], where: str) -> list[_Encoded]:
        """Return (token ids, labels) of each conversation, which must end with the assistant's turn.

        Labels are the ids of what the assistant wrote, its end-of-turn token included, and `IGNORED` elsewhere.

        Args:
            conversations: turns of each row.
            where: names the rows in messages, which number them from 1.

        Raises:
            ValueError: the template refuses a row, writes earlier turns differently once later ones follow, or writes
                no end token after the assistant's turn.
        """
        texts: list[str] = []
        counts = []
        for number, turns in enumerate(conversations, start=1):
            said = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
            for i in said:
                texts.append(self._render(turns[:i], f"{where} row {number}", open_turn=True))
                texts.append(self._render(turns[: i + 1], f"{where} row {number}", open_turn=False))
            counts.append(2 * len(said))
        ids = iter(self._ids(texts))
        return [
            self._labelled([next(ids) for _ in range(count)], f"{where} row {number}")
            for number, count in enumerate(counts, start=1)
        ]

    def answers(
        self, prompts: Sequence[str], answers: Sequence[str | Sequence[Mapping[str, Any]]], where: str
    ) -> list[list[int]]:
        """Return each prompt with one answer, up to the answer's end token; see `encode`."""
        turns = [self.turns(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        return [ids[: self._end(ids, 0, where)] for ids, _ in self.encode(turns, where)]

    def tool_turn(self, answer: str) -> list[int]:
        """Return the token ids between an assistant's end token and its next turn: the tool's answer.

        An answer that would be longer than the task allows (`Chat.max_tool_tokens`) is cut at its end.
        """
        answer = answer[: LONGEST_TOKEN * self.longest_tool_turn]  # text without end would take as long to tokenise
        ids = self._tool_turn(answer)
        words = self._tokenizer(text=answer, add_special_tokens=False)["input_ids"]
        while len(ids) > self.longest_tool_turn:
            words = words[: max(0, len(words) - (len(ids) - self.longest_tool_turn))]
            ids = self._tool_turn(self._tokenizer.decode(words))
        return ids

    def user_turn(self, text: str) -> list[int]:
        """Return the token ids between an assistant's end token and its next turn: what the user says then."""
        turns = self.turns("1", "1")
        where = f"user turn {text!r}"
        before, after = self._ids(
            [
                self._render(turns, where, open_turn=False),
                self._render([*turns, {"role": "user", "content": text}], where, open_turn=True),
            ]
        )
        if after[: len(before)] != before:
            raise ValueError(self._not_prefix_preserving(where, 2))
        return after[self._end(before, 0, where) :]

    def closed(self, turn: Sequence[int]) -> list[int]:
        """Return a sampled turn with an end token, which one that was cut at the length limit lacks."""
        return list(turn) if self.ended(turn) else [*turn, int(self._tokenizer.eos_token_id)]

    def text(self, turn: Sequence[int]) -> str:
        """Return the text of a sampled turn, without its end token."""
        text: str = self._tokenizer.decode(list(turn[:-1] if self.ended(turn) else turn), skip_special_tokens=True)
        return text

    def ended(self, turn: Sequence[int]) -> bool:
        """Return whether a sampled turn came to its end token; it was cut at the length limit otherwise."""
        return bool(turn) and turn[-1] in self.ends

    # Parts ------------------------------------------------------------------------------------------------------

    def _tool_turn(self, answer: str) -> list[int]:
        turns = self.turns("1", "1")
        before, after = self._ids(
            [
                self._render(turns, "the tool's turn", open_turn=False),
                self._render([*turns, {"role": "tool", "content": answer}], "the tool's turn", open_turn=True),
            ]
        )
        if after[: len(before)] != before:
            raise ValueError(self._not_prefix_preserving("the tool's turn", 2))
        return after[self._end(before, 0, "the tool's turn") :]

    def _labelled(self, parts: list[list[int]], where: str) -> _Encoded:
        """Return ids and labels from what was written (before, after) each assistant turn."""
        for number, (shorter, longer) in enumerate(itertools.pairwise(parts)):
            if longer[: len(shorter)] != shorter:
                raise ValueError(self._not_prefix_preserving(where, number // 2 + 1))
        ids = parts[-1]
        labels = [IGNORED] * len(ids)
        for before, after in zip(parts[::2], parts[1::2], strict=True):
            end = self._end(after, len(before), where)
            labels[len(before) : end] = after[len(before) : end]
        return ids, labels

    def _end(self, ids: Sequence[int], start: int, where: str) -> int:
        """Return the position after the last end token from ``start`` on: what follows it is the template's."""
        for position in range(len(ids), start, -1):
            if ids[position - 1] in self.ends:
                return position
        raise ValueError(
            f"{where}: the chat template of {self._model} writes no end token (id {sorted(self.ends)}) after an "
            "assistant turn, so no answer would ever end; let the template write it, or make the token that it "
            "writes the tokenizer's eos_token."
        )

    def _not_prefix_preserving(self, where: str, turn: int) -> str:
        return (
            f"{where}: the chat template of {self._model} writes the turns around assistant turn {turn} differently "
            "once later ones follow, so a mask of what the assistant wrote would be wrong; use a template that only "
            "ever appends."
        )

    def _render(self, turns: Sequence[Mapping[str, Any]], where: str, open_turn: bool) -> str:
        whole = plain_turns(turns)
        if self.chat.system is not None and whole[0]["role"] != "system":
            whole.insert(0, {"role": "system", "content": self.chat.system})
        try:
            text: str = self._tokenizer.apply_chat_template(
                whole, chat_template=self._template, tokenize=False, add_generation_prompt=open_turn
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"{where}: the chat template of {self._model} raised {first_line(error)}") from error
        return text

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(text=list(texts), add_special_tokens=False)["input_ids"]
        return ids


_Encoded = tuple[list[int], list[int]]
