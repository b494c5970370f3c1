"""A tiny model that writes conversations, and tasks on it, for the tests of chat formats and loss masks."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain_gym.inner_trainers.tasks.base import Benchmark, Chat, InnerTask, Item, Source

ROLES = ("system", "user", "assistant", "tool")
SPECIALS = ("<pad>", "<eos>", "<unk>", *(f"<{role}>" for role in ROLES))
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The end token closes an assistant's turn and nothing follows it."""

LINES = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set f = call.function or call %}"
    "{{ f.name }}{{ f.arguments | tojson }}{% endfor %}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A line break after every turn, the assistant's too, and tool calls."""


def chat_tokenizer(template: str | None = PLAIN, pad: str = "<pad>") -> Any:
    """Return a tokenizer with one token per character and per role."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *string.printable])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=pad,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        padding_side="left",
        model_max_length=256,
        chat_template=template,
    )


def write_chat_checkpoint(folder: Path, template: str | None = PLAIN, pad: str = "<pad>") -> Path:
    """Write a model of about 11,000 parameters with such a tokenizer and return its folder."""
    tokenizer = chat_tokenizer(template, pad)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def length_reward(row: Mapping[str, Any], completion: str) -> float:
    """A reward with spread on a model that has learnt nothing."""
    return sum(map(ord, completion)) % 7 / 7


class ChatTask(InnerTask):
    """A task of conversations whose rows, chat and verifier are given."""

    name = "chatty"

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Mapping[str, Any]] | None = None,
        chat: Chat | None = None,
        verifier: Callable[[Any, str], float] = length_reward,
        preferences: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._folder, self._rows, self._verifier = folder, rows, verifier
        self._chat, self._preferences = Chat() if chat is None else chat, preferences

    def base_checkpoint(self) -> Path:
        return self._folder

    def chat(self) -> Chat | None:
        return self._chat

    def sources(self) -> list[Source]:
        rows = self._rows or [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(32)]
        kinds: dict[str, Any] = {"demonstrations": rows, "prompts": [{"prompt": f"{i}?"} for i in range(32)]}
        if self._preferences is not None:
            kinds["preferences"] = self._preferences
        return [Source("talk", kinds, self._verifier)]

    def benchmark(self) -> Benchmark:
        return Benchmark(
            weights={"x": 1.0},
            validation=[Item("v1?", "x"), Item("v22?", "x")],
            test=[Item("t1?", "x")],
            score=lambda item, text: float(text == "yes"),
            max_new_tokens=4,
        )
