"""What a round hands to the algorithm that builds its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..recipe import Recipe
from ..tasks.base import InnerTask, Row, Source
from .data import TokenisedRows


@dataclass(frozen=True)
class RoundContext:
    """Inputs of one algorithm's ``build_trainer``.

    Attributes:
        task: the inner task.
        recipe: the checked recipe.
        model: a copy of the model that holds the starting weights; the trainer owns it.
        reference: returns another copy with the starting weights, frozen; called only when a reference is needed.
        tokenizer: the model's tokenizer.
        draw: (source, row index) pairs in training order, as many as the round will consume.
        sources: the sources of the mix, by name.
        tokenised: their tokenised demonstrations; empty for algorithms that train on other rows.
        seed: the trainer's seed.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        device: where training runs.
    """

    task: InnerTask
    recipe: Recipe
    model: PreTrainedModel
    reference: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    draw: Sequence[tuple[str, int]]
    sources: Mapping[str, Source]
    tokenised: Mapping[str, TokenisedRows]
    seed: int
    precision: str
    device: torch.device

    def row(self, source: str, index: int, kind: str) -> Row:
        """Return one raw row."""
        return self.sources[source].rows[kind][index]

    def peft_config(self) -> Any:
        """Return the LoRA configuration the recipe asks for, or None for full weights."""
        if self.recipe.lora_rank == 0:
            return None
        from peft import LoraConfig

        return LoraConfig(
            r=self.recipe.lora_rank,
            lora_alpha=2 * self.recipe.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
