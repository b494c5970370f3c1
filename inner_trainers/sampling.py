"""Samples completions in batches: each prompt is read once, however many completions are drawn from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .chat import ChatFormat
from .conversations import Conversation, carry_on


@dataclass(frozen=True)
class Completions:
    """Sampled completions; of a conversation, the completion is the assistant's last turn.

    Attributes:
        texts: per prompt, one text per sample, without end and padding tokens.
        generated_tokens: tokens sampled, end tokens included, in all turns.
        prompt_tokens: prompt tokens read; a turn after a tool's answer reads the whole conversation before it.
        empty: completions whose first token was an end token.
        clipped: completions cut at the length limit.
        turns: per prompt and sample, the text of the assistant's answer to each of the user's turns; None when no
            conversation has more than one.
    """

    texts: list[list[str]]
    generated_tokens: int
    prompt_tokens: int
    empty: int
    clipped: int
    turns: list[list[list[str]]] | None = None


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a completion: the tokenizer's and those of the model's generation settings."""
    configured = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id}
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(i for i in ids if i is not None)


@torch.no_grad()
def sample_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_sequences: int = 1024,
    chat: ChatFormat | None = None,
    follow_ups: Sequence[Sequence[str]] | None = None,
) -> Completions:
    """Draw ``samples`` completions of every prompt from the full softmax.

    Random numbers come from a generator of its own, so the same seed gives the same texts and no global generator
    moves. A prompt's texts depend on the whole list of prompts, which share the generator.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        prompts: texts to continue.
        samples: completions per prompt.
        max_new_tokens: longest completion, in tokens; in a conversation, of each assistant turn.
        temperature: softmax temperature.
        seed: seed of the generator.
        batch_sequences: completions in one forward pass at most; a prompt's own completions stay together.
        chat: writes each prompt as a user's turn and answers calls of the task's tool; None for text to continue.
        follow_ups: per prompt, what the user says after the assistant's answers, one by one; needs ``chat``. A turn
            that was cut at the length limit is closed with an end token before the user goes on.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ends = torch.tensor(end_token_ids(model, tokenizer), dtype=torch.long, device=device)
    prompt_ids = _open_prompts(tokenizer, prompts) if chat is None else chat.prompts(prompts)
    for text, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise ValueError(f"sampling: prompt {text!r} has no tokens, so there is nothing to continue.")
    generated = read = 0

    def sample(sequences: Sequence[Sequence[int]], each: int) -> list[list[list[int]]]:
        nonlocal generated, read
        drawn = _sample_turns(
            model,
            sequences,
            each,
            max_new_tokens,
            temperature,
            generator,
            ends,
            pad=tokenizer.pad_token_id or 0,  # hidden by the attention mask, so any id does
            batch_sequences=batch_sequences,
        )
        read += sum(map(len, sequences))
        generated += sum(len(turn) for turns in drawn for turn in turns)
        return drawn

    last_turns = sample(prompt_ids, samples)
    answered: list[list[list[str]]] | None = None
    several = follow_ups is not None and any(follow_ups)
    if chat is not None and (chat.uses_tool or several):
        conversations = [
            [Conversation(ids, list(turn), [1] * len(turn), turn) for turn in turns]
            for ids, turns in zip(prompt_ids, last_turns, strict=True)
        ]

        def sample_once(sequences: list[list[int]]) -> list[list[int]]:
            return [turns[0] for turns in sample(sequences, 1)]

        carry_on(chat, [conversation for group in conversations for conversation in group], sample_once)
        if follow_ups is not None and several:
            answered = _follow_up(chat, conversations, follow_ups, sample_once)
        last_turns = [[conversation.last_turn for conversation in group] for group in conversations]
    end_ids = set(ends.tolist())
    flat = [turn for turns in last_turns for turn in turns]
    contents = [turn[:-1] if turn[-1] in end_ids else turn for turn in flat]
    decoded = tokenizer.batch_decode(contents, skip_special_tokens=True)
    return Completions(
        texts=[decoded[i : i + samples] for i in range(0, len(decoded), samples)],
        generated_tokens=generated,
        prompt_tokens=read,
        empty=sum(not content for content in contents),
        clipped=sum(turn[-1] not in end_ids for turn in flat),
        turns=answered,
    )


def _follow_up(
    chat: ChatFormat,
    conversations: Sequence[Sequence[Conversation]],
    follow_ups: Sequence[Sequence[str]],
    sample_once: Callable[[list[list[int]]], list[list[int]]],
) -> list[list[list[str]]]:
    """Let the user go on as scripted; return the assistant's answer to each of the user's turns, as text.

    Args:
        chat: writes the turns.
        conversations: per prompt, its samples, each answered once; changed in place.
        follow_ups: per prompt, what the user says next.
        sample_once: samples one turn after each of some token sequences.
    """
    answers = [[[chat.text(conversation.last_turn)] for conversation in group] for group in conversations]
    for place in range(max(map(len, follow_ups))):
        going = [number for number, said in enumerate(follow_ups) if len(said) > place]
        asked = [conversation for number in going for conversation in conversations[number]]
        for number in going:
            user_turn = chat.user_turn(follow_ups[number][place])
            for conversation in conversations[number]:
                end = chat.closed(conversation.last_turn)[len(conversation.last_turn) :]
                conversation.add_tool_turn([*end, *user_turn])
        turns = sample_once([conversation.prompt + conversation.tokens for conversation in asked])
        for conversation, turn in zip(asked, turns, strict=True):
            conversation.add_turn(turn)
        carry_on(chat, asked, sample_once)
        for number in going:
            for conversation, texts in zip(conversations[number], answers[number], strict=True):
                texts.append(chat.text(conversation.last_turn))
    return answers


def _open_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    prompt_ids: list[list[int]] = tokenizer(text=list(prompts))["input_ids"]
    if tokenizer.eos_token_id is None:
        return prompt_ids
    # some tokenizers end every text; a prompt must stay open
    return [ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids for ids in prompt_ids]


def _sample_turns(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    samples: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    ends: torch.Tensor,
    pad: int,
    batch_sequences: int,
) -> list[list[list[int]]]:
    """Return ``samples`` sampled sequences per prompt, each up to its end token or the length limit."""
    by_length = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    drawn: list[list[list[int]]] = [[] for _ in prompt_ids]
    per_batch = max(1, batch_sequences // samples)
    for first in range(0, len(by_length), per_batch):
        chosen = by_length[first : first + per_batch]
        tokens = _sample_batch(
            model, [prompt_ids[i] for i in chosen], samples, max_new_tokens, temperature, generator, ends, pad
        )  # (prompts * samples, new tokens)
        is_end = torch.isin(tokens, ends)
        lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, tokens.shape[1]).tolist()
        turns = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        for position, prompt in enumerate(chosen):
            drawn[prompt] = turns[position * samples : (position + 1) * samples]
    return drawn


def _sample_batch(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    samples: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    ends: torch.Tensor,
    pad: int,
) -> torch.Tensor:
    device = generator.device
    width = max(map(len, prompt_ids))
    ids = torch.full((len(prompt_ids), width), pad, dtype=torch.long)
    mask = torch.zeros((len(prompt_ids), width), dtype=torch.long)
    for row, prompt in enumerate(prompt_ids):  # padded on the left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    known = inspect.signature(model.forward).parameters
    # a trainer may have asked a mixture of experts for its balancing loss, which sampling has no use for
    quiet = {"output_router_logits": False} if "output_router_logits" in known else {}
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **quiet
    )
    cache_argument = "cache" if "cache" in known else "past_key_values"  # newer transformers call it `cache`
    cache: Any = getattr(output, cache_argument, None)
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in getattr(cache, "layers", [cache])):
        raise ValueError(
            f"sampling: models of type {model.config.model_type!r} keep no key-value cache that several completions of "
            "a prompt can share, which sampling here needs; use a transformer with attention in every layer."
        )
    cache.batch_repeat_interleave(samples)
    logits = output.logits[:, -1].repeat_interleave(samples, dim=0)
    mask = mask.repeat_interleave(samples, dim=0)
    position = positions[:, -1:].repeat_interleave(samples, dim=0)

    total = len(prompt_ids) * samples
    tokens = torch.full((total, max_new_tokens), pad, dtype=torch.long, device=device)
    alive = torch.arange(total, device=device)  # rows still being sampled
    for column in range(max_new_tokens):
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        chosen = torch.multinomial(probabilities, 1, generator=generator)
        tokens[alive, column] = chosen[:, 0]
        going = ~torch.isin(chosen[:, 0], ends)
        if column + 1 == max_new_tokens or not bool(going.any()):
            break
        if bool((~going).any()):  # drop finished rows from the batch
            kept = going.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            alive, mask, position, chosen = alive[kept], mask[kept], position[kept], chosen[kept]
        mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
        position = position + 1
        output = model(
            input_ids=chosen,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **{cache_argument: cache},
            **quiet,
        )
        logits = output.logits[:, -1]
    return tokens
