"""Refuses what would not fit into the positions of a model, before time is spent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..chat import ChatFormat
    from ..recipe import Recipe
    from ..tasks.base import Benchmark
    from .algorithms import AlgorithmSpec
    from .step_tokens import Lengths


def require_positions(config: Any, spec: AlgorithmSpec, recipe: Recipe, lengths: Lengths) -> None:
    """Refuse sequences that are longer than the model has positions; beyond them it fails, or reads noise."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not positions:
        return
    if recipe.packing and "packing" in spec.reads and recipe.max_length > positions:
        raise ValueError(
            f"max_length: packs of up to {recipe.max_length} tokens are longer than the {positions} positions of the "
            f"model; set it to at most {positions}, or lower for short rows."
        )
    if max(lengths.row, lengths.whole if spec.sampled else 0) <= positions:
        return
    if spec.sampled:
        raise ValueError(
            f"prompts of up to {lengths.prompt} tokens with completions of up to {lengths.generated} do not fit the "
            f"{positions} positions of the model; leave long prompts out, or lower the benchmark's max_new_tokens."
        )
    raise ValueError(
        f"max_length: rows of up to {lengths.row} tokens do not fit the {positions} positions of the model; "
        f"set max_length to at most {positions}."
    )


def require_conversation_positions(config: Any, chat: ChatFormat | None, benchmark: Benchmark, split: str) -> None:
    """Refuse items whose scripted conversation can grow longer than the model has positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    items = [item for item in benchmark.items(split) if item.follow_ups]
    if not positions or not items or chat is None:
        return
    answers = chat.chat.max_turns if chat.uses_tool else 1  # the assistant's, after each of the user's turns
    turn = answers * benchmark.max_new_tokens + (answers - 1) * chat.longest_tool_turn
    for item, prompt in zip(items, chat.prompts([item.prompt for item in items]), strict=True):
        # a turn that was cut is closed with an end token before the user goes on
        said = sum(len(chat.user_turn(text)) + 1 for text in item.follow_ups)
        longest = len(prompt) + said + turn * (1 + len(item.follow_ups))
        if longest > positions:
            raise ValueError(
                f"{split} item {item.prompt!r}: with its {len(item.follow_ups)} follow_ups the conversation can grow "
                f"to {longest} tokens, and the model has {positions} positions; give it fewer follow_ups, or lower the "
                "benchmark's max_new_tokens."
            )
