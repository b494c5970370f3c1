"""What a round hands to the algorithm that builds its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat import ChatFormat
from ..recipe import Recipe
from ..tasks.base import InnerTask, Row, Source
from .metering import Meter
from .row_pools import RowPools


@dataclass(frozen=True)
class RoundContext:
    """Inputs of one algorithm's ``build_trainer``.

    Attributes:
        task: the inner task.
        recipe: the checked recipe.
        model: a copy of the model that holds the starting weights; the trainer owns it.
        reference: returns another copy with the starting weights, frozen; called only when a reference is needed.
        teacher: returns the task's teacher, frozen; called only by algorithms that need one.
        tokenizer: the model's tokenizer.
        draw: (pool, row index) pairs in training order, as many as the round will consume; for algorithms that sample,
            the pool is a source and the row one of its prompts, else it is a key of ``tokenised``.
        sources: the sources of the mix, by name.
        tokenised: pool -> rows of the kind the algorithm trains on (`data.TokenisedRows` or
            `preferences.TokenisedPairs`); a pool is a source, or what else the algorithm mixes in. Empty for algorithms
            that sample.
        loss: variant of the algorithm's loss.
        steps: optimiser steps that the round's limit pays for, at most the recipe's; it may still end earlier.
        seed: the trainer's seed.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        device: where training runs.
        meter: what the algorithm counts into, from before its trainer is built.
        vllm: whether completions are sampled with vLLM.
        packs: the rows of each packed sequence, in training order; empty when rows are not packed.
        seconds: the round's limit in seconds; None when it is counted otherwise.
        chat: how the task's prompts become turns; None for plain text.
        pools: what the round may draw from when its mix is adjusted.
    """

    task: InnerTask
    recipe: Recipe
    model: PreTrainedModel
    reference: Callable[[], PreTrainedModel]
    teacher: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    draw: Sequence[tuple[str, int]]
    sources: Mapping[str, Source]
    tokenised: Mapping[str, Any]
    loss: str
    steps: int
    seed: int
    precision: str
    device: torch.device
    meter: Meter
    pools: RowPools
    vllm: bool = False
    packs: Sequence[Sequence[tuple[str, int]]] = ()
    seconds: float | None = None
    chat: ChatFormat | None = None

    def row(self, source: str, index: int, kind: str) -> Row:
        """Return one raw row."""
        return self.sources[source].rows[kind][index]

    def sampling_arguments(self) -> dict[str, Any]:
        """Return what the configs of all algorithms that sample while they train share."""
        engine: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"} if self.vllm else {}
        return {
            "max_completion_length": self.task.built.benchmark.max_new_tokens,
            "temperature": self.recipe.temperature,
            **engine,
        }

    def peft_config(self) -> Any:
        """Return the LoRA configuration the recipe asks for, or None for full weights."""
        if self.recipe.lora_rank == 0:
            return None
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2 and its kin

        return LoraConfig(
            r=self.recipe.lora_rank,
            lora_alpha=2 * self.recipe.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in self.model.modules()),
        )
