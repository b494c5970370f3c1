"""Rejection-sampling fine-tuning: sample, verify, deduplicate, and train on what passes, all in one round.

Completions are sampled with the starting weights when training begins, as many as the round's steps will train on.
What they cost is charged as it is spent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import datasets
import numpy as np

from ..faults import NothingPassedError
from ..sampling import sample_completions
from .context import RoundContext
from .data import TokenisedRows, labelled_rows, tokenise_demonstrations
from .on_policy import verified_reward
from .sft import MeteredSFTTrainer, supervised_trainer

SAMPLING_SHARE = 0.5
"""Share of a limit in seconds after which sampling ends; in other units its cost is known and planned for."""

Columns = dict[str, list[list[int]]]


class RejectionSamplingTrainer(MeteredSFTTrainer):
    """`MeteredSFTTrainer` that makes its rows when training begins, so that sampling is a part of the round."""

    sample: Callable[[], Columns]
    rows_fixed = "all of its rows are sampled before the first step"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, then train on what passed.

        Raises:
            NothingPassedError: no completion got the recipe's ``min_reward``.
        """
        self.train_dataset = datasets.Dataset.from_dict(self.sample())
        return super().train(*args, **kwargs)


def build_trainer(context: RoundContext) -> RejectionSamplingTrainer:
    """Return the trainer for a recipe whose prompts are drawn; it has no rows before it trains."""
    placeholder = [[context.tokenizer.eos_token_id]]
    trainer: RejectionSamplingTrainer = supervised_trainer(
        context, {"input_ids": placeholder, "labels": placeholder}, kind=RejectionSamplingTrainer
    )
    trainer.sample = lambda: _sampled_columns(context)
    return trainer


def _sampled_columns(context: RoundContext) -> Columns:
    """Return rows that passed, in training order: each comes again only after all others came."""
    rows = _tokenised(context, _passing(context))
    recipe = context.recipe
    count = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
    rng = np.random.default_rng(context.seed)
    order: list[int] = []
    while len(order) < count:
        order += rng.permutation(rows.trainable).tolist()
    return {
        "input_ids": [rows.input_ids[i] for i in order[:count]],
        "labels": [rows.labels[i] for i in order[:count]],
    }


def _passing(context: RoundContext) -> list[Mapping[str, str]]:
    """Return each different (prompt, completion) that got the smallest reward asked for, in the order of the draw."""
    recipe, meter = context.recipe, context.meter
    chunk = recipe.batch_size * recipe.gradient_accumulation // recipe.num_generations
    prompts = context.draw[: context.steps * chunk]
    began = time.perf_counter()
    sampled: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    found: dict[tuple[str, str], None] = {}
    model = context.model.eval()
    for number, first in enumerate(range(0, len(prompts), chunk)):
        if context.seconds is not None and time.perf_counter() - began > SAMPLING_SHARE * context.seconds:
            break
        drawn = prompts[first : first + chunk]
        texts = [context.row(source, index, "prompts")["prompt"] for source, index in drawn]
        completions = sample_completions(
            model,
            context.tokenizer,
            texts,
            samples=recipe.num_generations,
            max_new_tokens=context.task.built.benchmark.max_new_tokens,
            temperature=recipe.temperature,
            seed=int(np.random.default_rng([context.seed, number]).integers(2**31)),
            chat=context.chat,
        )
        meter.scored_tokens += completions.prompt_tokens
        meter.generated_tokens += completions.generated_tokens
        for (source, index), prompt, answers in zip(drawn, texts, completions.texts, strict=True):
            sampled[source] += len(answers)
            for answer in answers:
                if verified_reward(context.sources[source], index, answer, meter.flags) >= recipe.min_reward:
                    passed[source] += 1
                    if answer:  # an empty answer has nothing to learn but its end
                        found[prompt, answer] = None
    model.train()
    whole = recipe.steps * chunk * recipe.num_generations
    if sampled.total() < whole:  # other rows than those of the whole round
        meter.history.append(f"sampled {sampled.total()} of {whole}")
        meter.flags.append(f"rft: the limit of the round paid {sampled.total()} of {whole} completions")
    if not found:
        raise NothingPassedError(
            f"of {sampled.total()} completions of {sampled.total() // recipe.num_generations} prompts "
            f"{passed.total() or 'none'} got a reward of at least {recipe.min_reward:g}"
            + (", and all of those are empty" if passed else "")
        )
    rates = ", ".join(f"{name} {passed[name] / total:.0%}" for name, total in sorted(sampled.items()))
    meter.flags.append(
        f"rft: {passed.total()} of {sampled.total()} sampled completions passed ({rates}), {len(found)} different ones"
    )
    return [{"prompt": prompt, "completion": answer} for prompt, answer in found]


def _tokenised(context: RoundContext, rows: list[Mapping[str, str]]) -> TokenisedRows:
    """Return the rows up to the end token of each answer, those left out that are longer than what can be sampled.

    The tokens that were sampled may be others than those that their text is written with: half a character, say, is
    decoded to a replacement character.

    Raises:
        NothingPassedError: all are longer.
    """
    if context.chat is None:
        rendered = tokenise_demonstrations(context.tokenizer, rows)
    else:
        turns = [context.chat.turns(row["prompt"], row["completion"]) for row in rows]
        rendered = labelled_rows(*zip(*context.chat.encode(turns, "sampled completions"), strict=True))
    longest = context.task.built.benchmark.max_new_tokens + 1  # a completion that was cut gets an end token
    input_ids, labels = [], []
    for ids, row in zip(rendered.input_ids, rendered.labels, strict=True):
        supervised = [position for position, label in enumerate(row) if label != -100]
        if supervised and supervised[-1] - supervised[0] < longest:
            input_ids.append(ids[: supervised[-1] + 1])
            labels.append(row[: supervised[-1] + 1])
    if len(input_ids) < len(rows):
        context.meter.flags.append(
            f"rft: {len(rows) - len(input_ids)} of {len(rows)} different completions that passed are written with more "
            f"than {longest} tokens and left out"
        )
    kept = labelled_rows(input_ids, labels) if input_ids else None
    if kept is None or not kept.trainable:
        raise NothingPassedError(f"all {len(rows)} completions that passed are written with more than {longest} tokens")
    return kept
