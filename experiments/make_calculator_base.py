"""Pretrain the base model of the calculator task from text it generates itself, and measure it.

The corpus shows the tool used rightly now and then; otherwise an answer is guessed, the expression is miscopied, or the
tool's answer is misread. So calling the tool is one habit among others, which is the headroom post-training works with.
Run from the repository root:

    python -m posttrain_gym.experiments.make_calculator_base
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..inner_trainers.tasks import calculator

ROOT = Path(__file__).resolve().parent.parent
CALL_SHARE = {"products": 0.35, "sums": 0.45}
"""Dimension -> share of the corpus's questions in which the tool is called with the right expression."""

MISCOPIED_SHARE = 0.15
"""Share of questions in which the expression of the call has one wrong digit; the others are guesses."""

MISREAD_SHARE = 0.3
"""Share of the tool's answers that are misread by one digit or left without the full stop."""


@dataclass(frozen=True)
class Args:
    """Settings of a run.

    Attributes:
        steps: optimiser steps.
        batch_size: conversations per step.
        learning_rate: peak learning rate; linear warm-up, then cosine to zero.
        warmup_steps: steps of warm-up.
        other_loss: weight of the loss on what the assistant did not write; its own tokens weigh 1.
        seed: seed of weights and corpus.
        measure_only: 1 measures the base that is there, without training.
        base_dir: folder the checkpoint goes to.
        results_dir: folder the table goes to.
    """

    steps: int = 700
    batch_size: int = 96
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    other_loss: float = 0.05
    seed: int = 20_211
    measure_only: int = 0
    base_dir: str = str(ROOT / "inner_trainers" / "tasks" / "calculator_base")
    results_dir: str = str(ROOT / "experiments" / "results")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer with the task's chat template; each role is one special token."""
    roles = [f"<{role}>" for role in calculator.ROLES]
    vocabulary = [calculator.PAD, calculator.EOS, calculator.UNKNOWN, *roles, *calculator.CHARACTERS]
    numbered = {token: i for i, token in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(numbered, unk_token=calculator.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=calculator.PAD,
        eos_token=calculator.EOS,
        unk_token=calculator.UNKNOWN,
        additional_special_tokens=roles,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        chat_template=calculator.CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model, about 0.28 M parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = True
    return model


def make_conversation(dimension: str, question: str, rng: np.random.Generator) -> list[dict[str, str]]:
    """Return the turns of one corpus conversation: a right call, a miscopied one, or a guess."""
    turns = calculator.worked(question)
    luck, reading = rng.random(2).tolist()
    if luck >= CALL_SHARE[dimension] + MISCOPIED_SHARE:
        digits = len(turns[2]["content"])
        return [turns[0], {"role": "assistant", "content": f"{rng.integers(10 ** (digits - 1), 10**digits)}."}]
    if luck >= CALL_SHARE[dimension]:
        call = _one_digit_changed(turns[1]["content"], rng)
        value = str(calculator.use_calculator(call))
        turns = [turns[0], {"role": "assistant", "content": call}, {"role": "tool", "content": value}]
        turns.append({"role": "assistant", "content": f"{value}."})
    if reading < MISREAD_SHARE:
        last = turns[-1]["content"]
        turns[-1] = {
            "role": "assistant",
            "content": last.removesuffix(".") if reading < MISREAD_SHARE / 3 else _one_digit_changed(last, rng),
        }
    return turns


def _one_digit_changed(text: str, rng: np.random.Generator) -> str:
    places = [i for i, character in enumerate(text) if character.isdigit()]
    place = places[int(rng.integers(len(places)))]
    return text[:place] + str((int(text[place]) + int(rng.integers(1, 10))) % 10) + text[place + 1 :]


def make_batch(
    count: int, rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, other_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, loss weights) of one batch, both (rows, tokens), padded on the right."""
    rows: list[tuple[list[int], list[float]]] = []
    for number in range(count):
        dimension = calculator.DIMENSIONS[number % 2]
        pool = calculator.questions(dimension, "train")
        turns = make_conversation(dimension, pool[int(rng.integers(len(pool)))], rng)
        ids: list[int] = []
        weights: list[float] = []
        for turn in turns:
            own = turn["role"] == "assistant"
            text = turn["content"] + (calculator.EOS if own else "")
            part = tokenizer(f"<{turn['role']}>{text}")["input_ids"]
            ids += part
            weights += [other_loss] + [1.0 if own else other_loss] * (len(part) - 1)
        rows.append((ids, weights))
    width = max(len(ids) for ids, _ in rows)
    batch = torch.zeros((count, width), dtype=torch.long)
    weight = torch.zeros((count, width))
    for row, (ids, weights) in enumerate(rows):
        batch[row, : len(ids)], weight[row, : len(ids)] = torch.tensor(ids), torch.tensor(weights)
    return batch, weight


def pretrain(args: Args) -> None:
    """Train the base and save its folder."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.process_time()
    for step in range(args.steps):
        progress = max(0.0, (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps))
        scale = min(1.0, (step + 1) / args.warmup_steps) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        ids, weights = make_batch(args.batch_size, rng, tokenizer, args.other_loss)
        logits = model(input_ids=ids).logits[:, :-1]  # rows are padded on the right: no mask is needed
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == args.steps - 1:
            spent = time.process_time() - started
            print(f"step {step}, loss {float(loss.detach()):.3f}, {spent:.0f} CPU s", flush=True)
    folder = Path(args.base_dir)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone, which an installed copy would keep
    tokenizer.save_pretrained(folder)


def measure(args: Args) -> dict[str, Any]:
    """Return the base's scores on the test split, 8 samples per item at temperature 1."""
    from ..inner_trainers.trl.trainer import TrlTrainer

    trainer, task = TrlTrainer(device="cpu"), calculator.CalculatorTask()
    card, _ = trainer.evaluate(task, trainer.base(task), "test")
    return {"parameters": trainer.parameters(task), "scorecard": card.to_dict()}


def describe(found: dict[str, Any], args: Args) -> str:
    """Return the page that says how the base was made and what it can do."""
    card = found["scorecard"]
    rows = [
        f"| {name} | {entry['pass_at_1']:.3f} | {entry['pass_at_k']:.3f} | {entry['format_rate']:.3f} |"
        for name, entry in card["dimensions"].items()
    ]
    settings = ", ".join(
        f"{field.name} {getattr(args, field.name)}"
        for field in fields(Args)
        if not field.name.endswith("_dir") and field.name != "measure_only"
    )
    return "\n".join(
        [
            "# The base model of the calculator task",
            "",
            f"`LlamaForCausalLM`, {found['parameters']:,} parameters, one token per character and role. Test split, "
            f"{card['items']} items with {card['samples']} conversations each at temperature 1:",
            "",
            f"| dimension | pass@1 | pass@{card['k']} | ends in an answer |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Corpus: right calls {CALL_SHARE}, miscopied calls {MISCOPIED_SHARE}, the others guesses; of the tool's "
            f"answers {MISREAD_SHARE} are misread.",
            "",
            "Command: `python -m posttrain_gym.experiments.make_calculator_base`, from the repository root.",
            f"Settings: {settings}.",
            f"Versions: Python {platform.python_version()}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, tokenizers {tokenizers.__version__}, numpy {np.__version__}; "
            "CPU, one thread.",
            "",
        ]
    )


def parse_args() -> Args:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Args(**vars(parser.parse_args()))


def main() -> None:
    """Train the base, unless it is only to be measured, and write the page."""
    args = parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if not args.measure_only:
        pretrain(args)
    page = describe(measure(args), args)
    (Path(args.results_dir) / "calculator_base.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
