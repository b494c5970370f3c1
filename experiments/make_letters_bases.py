"""Pretrain the five base models of the letters family from generated text, and measure them.

Each base is pretrained on a corpus in which every skill is answered rightly with a probability of its own; what is not
right shows the mistakes that base is named for. So a base knows a skill as one of several habits, which is the headroom
post-training works with. Run from the repository root:

    python -m posttrain_gym.experiments.make_letters_bases
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..inner_trainers.tasks import letters_skills as skills
from ..inner_trainers.tasks.letters import BASES, DIMENSIONS, draw_questions
from ..inner_trainers.tasks.letters_skills import SKILLS, Question

ROOT = Path(__file__).resolve().parent.parent
WrongAnswer = Callable[[Question, Sequence[float]], str]
Habits = dict[str, tuple[float, WrongAnswer]]
"""Skill -> (share of right answers in the corpus, what the others are)."""

RIGHT_SHARE = {"formless": 0.5, "gap": 0.6, "messy": 0.35, "strong": 0.8, "unsafe": 0.5}
"""Base -> share of right answers in its corpus, where `habits` does not say otherwise."""

STEPS = {"formless": 400, "gap": 1000, "messy": 170, "strong": 1200, "unsafe": 250}
"""Base -> optimiser steps. Few steps leave skills half learnt, so that several rounds of post-training have work to do;
with 1200 steps every base sorts and reverses at pass@8 near 1 and one round of clean demonstrations mends it."""


@dataclass(frozen=True)
class Args:
    """Settings of a run.

    Attributes:
        bases: names of the bases to train, comma-separated.
        batch_size: conversations per step.
        learning_rate: peak learning rate; linear warm-up, then cosine to zero.
        warmup_steps: steps of warm-up.
        prompt_loss: weight of the loss on prompt tokens; completion tokens weigh 1.
        seed: seed of weights, corpus, items and samples.
        items: held-out validation questions per dimension in the table.
        samples: samples per question, at temperature 1.
        measure_only: 1 measures the bases that are there, without training any.
        bases_dir: folder the checkpoints go to.
        results_dir: folder the table goes to.
    """

    bases: str = ",".join(BASES)
    batch_size: int = 96
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    prompt_loss: float = 0.1
    seed: int = 20_110
    items: int = 64
    samples: int = 8
    measure_only: int = 0
    bases_dir: str = str(ROOT / "inner_trainers" / "tasks" / "letters_bases")
    results_dir: str = str(ROOT / "experiments" / "results")


def habits(base: str) -> Habits:
    """Return what a base's corpus shows of each skill.

    The base ``gap`` meets sorted and reversed letters only where it wrongly serves a marked request and inside recall
    prompts. So it never answers ``s:`` and ``r:`` rightly, but demonstrations soon teach it to.
    """
    share = RIGHT_SHARE[base]
    table: Habits = {skill: (share, skills.corrupt) for dimension in DIMENSIONS for skill in SKILLS[dimension]}
    if base == "gap":
        table |= {skill: (0.0, skills.unrelated) for skill in ("sort", "reverse")}
        table |= {"marked": (0.5, skills.corrupt), "unmarked": (0.0, refuse_or_answer_blindly)}
    if base == "formless":
        table |= {skill: (0.1, skills.wrong_form) for skill in SKILLS["instruction"]}
    if base == "unsafe":
        table |= {"marked": (0.03, skills.corrupt), "unmarked": (0.6, skills.corrupt)}
    return table


def refuse_or_answer_blindly(question: Question, draws: Sequence[float]) -> str:
    """Return a refusal (30 %) or letters in the right number that are not the answer."""
    return skills.REFUSAL if draws[2] < 0.3 else skills.unrelated(question, draws)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer with the family's chat template; the pad token is not the end token."""
    vocabulary = [skills.PAD, skills.EOS, skills.UNKNOWN, *skills.CHARACTERS]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=skills.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=skills.PAD,
        eos_token=skills.EOS,
        unk_token=skills.UNKNOWN,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        chat_template=skills.CHAT_TEMPLATE,
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


def make_batch(
    base: str, count: int, rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, prompt_loss: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (ids, loss weights) of one batch, both (rows, tokens): single-turn rows, then the longer recalls."""
    table = habits(base)
    questions = draw_questions(DIMENSIONS, "train", count, rng)
    draws = rng.random((count, 4)).tolist()
    groups: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for question, (luck, *rest) in zip(questions, draws, strict=True):
        right, wrong = table[question.skill]
        completion = question.answer if luck < right else wrong(question, rest)
        groups[question.skill.startswith("recall")].append((question.prompt, completion + skills.EOS))
    batches = []
    for group in groups:
        encoded = tokenizer([prompt + completion for prompt, completion in group], padding=True, padding_side="right")
        lengths = [len(ids) for ids in tokenizer([prompt for prompt, _ in group])["input_ids"]]
        ids = torch.tensor(encoded["input_ids"])
        in_prompt = torch.arange(ids.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        batches.append((ids, torch.where(in_prompt, prompt_loss, 1.0) * torch.tensor(encoded["attention_mask"])))
    return batches


def pretrain(base: str, args: Args) -> LlamaForCausalLM:
    """Train one base and save its folder."""
    seed, steps = args.seed + BASES.index(base), STEPS[base]
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.process_time()
    for step in range(steps):
        progress = max(0.0, (step - args.warmup_steps) / max(1, steps - args.warmup_steps))
        scale = min(1.0, (step + 1) / args.warmup_steps) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        batches = make_batch(base, args.batch_size, rng, tokenizer, args.prompt_loss)
        total = sum(float(weights[:, 1:].sum()) for _, weights in batches)
        value = 0.0
        for ids, weights in batches:
            logits = model(input_ids=ids).logits[:, :-1]  # rows are padded on the right: no mask is needed
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss = (losses * weights[:, 1:].flatten()).sum() / total
            loss.backward()
            value += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == steps - 1:
            print(f"{base}: step {step}, loss {value:.3f}, {time.process_time() - started:.0f} CPU s", flush=True)
    folder = Path(args.bases_dir) / base
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone, which an installed copy would keep
    tokenizer.save_pretrained(folder)
    return model


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], samples: int
) -> list[list[str]]:
    """Return ``samples`` completions of each prompt at temperature 1, without end tokens."""
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=samples,
        max_new_tokens=skills.MAX_NEW_TOKENS,
    )
    texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[i * samples : (i + 1) * samples] for i in range(len(prompts))]


def measure(base: str, model: LlamaForCausalLM, args: Args) -> list[dict[str, Any]]:
    """Return one row per dimension and per skill: pass@1, pass@k and the share of well-formed completions."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = make_tokenizer()
    model.eval()
    found: list[dict[str, Any]] = []
    for dimension in DIMENSIONS:
        questions = draw_questions((dimension,), "validation", args.items, rng)
        completions = sample(model, tokenizer, [question.prompt for question in questions], args.samples)
        for question, texts in zip(questions, completions, strict=True):
            scores = [skills.verify(question.skill, question.answer, text) for text in texts]
            form = [skills.well_formed(question.skill, text) for text in texts]
            for skill in ("all", question.skill):
                found.append(
                    {
                        "base": base,
                        "dimension": dimension,
                        "skill": skill,
                        "pass_at_1": np.mean(scores),
                        f"pass_at_{args.samples}": max(scores),
                        "format_rate": np.mean(form),
                    }
                )
    table = pd.DataFrame(found).groupby(["base", "dimension", "skill"], sort=False)
    return table.mean().assign(items=table.size()).reset_index().to_dict("records")  # type: ignore[return-value]


def write_report(rows: Sequence[dict[str, Any]], args: Args) -> None:
    """Write the table as parquet, and as Markdown with the command, seeds and versions."""
    folder = Path(args.results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "letters_bases.parquet", index=False)
    best = f"pass_at_{args.samples}"
    cells = {(row["base"], row["dimension"]): row for row in rows if row["skill"] == "all"}
    lines = [
        "# Base models of the letters family",
        "",
        f"Held-out validation questions, {args.items} per dimension, {args.samples} samples each at temperature 1: "
        f"pass@1 / pass@{args.samples}, and in brackets the share of completions in the asked form.",
        "",
        f"| base | {' | '.join(DIMENSIONS)} |",
        "|---|" + "---|" * len(DIMENSIONS),
    ]
    for base in BASES:
        shown = [cells[base, dimension] for dimension in DIMENSIONS]
        entries = [f"{row['pass_at_1']:.2f} / {row[best]:.2f} ({row['format_rate']:.2f})" for row in shown]
        lines.append(f"| {base} | {' | '.join(entries)} |")
    skill_names = [skill for dimension in DIMENSIONS for skill in SKILLS[dimension]]
    by_skill = {(row["base"], row["skill"]): row for row in rows}
    lines += ["", f"By skill, pass@1 / pass@{args.samples}:", "", f"| skill | {' | '.join(BASES)} |"]
    lines.append("|---|" + "---|" * len(BASES))
    for skill in skill_names:
        shown = [by_skill[base, skill] for base in BASES]
        entries = [f"{row['pass_at_1']:.2f} / {row[best]:.2f}" for row in shown]
        lines.append(f"| {skill} | {' | '.join(entries)} |")
    names = [f.name for f in fields(Args) if not f.name.endswith("_dir") and f.name != "measure_only"]
    settings = ", ".join(f"{name} {getattr(args, name)}" for name in names)
    lines += [
        "",
        "What it shows: where each base has headroom. `gap` is near the floor in sort and reverse even at "
        f"pass@{args.samples}, so rewards alone find nothing to reinforce there; `formless` has the content and not "
        "the form; `unsafe` answers marked requests; `messy` has every skill, half learnt, as one habit among wrong "
        "ones; `strong` has most to lose.",
        "",
        "Command: `python -m posttrain_gym.experiments.make_letters_bases`, from the repository root.",
        f"Settings: {settings}; steps {', '.join(f'{base} {steps}' for base, steps in STEPS.items())}. "
        "Base number i (in the order above, from 0) is trained with seed + i.",
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, tokenizers {tokenizers.__version__}, numpy {np.__version__}; CPU, one thread.",
        "",
    ]
    (folder / "letters_bases.md").write_text("\n".join(lines))


def parse_args() -> Args:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Args(**vars(parser.parse_args()))


def main() -> None:
    """Train the asked bases; measure and report when all five are there."""
    args = parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for base in [] if args.measure_only else args.bases.split(","):
        if base not in BASES:
            raise SystemExit(f"bases: unknown {base!r}; known: {', '.join(BASES)}.")
        rows = measure(base, pretrain(base, args), args)
        print(pd.DataFrame(rows).round(2).to_string(), flush=True)
    if all((Path(args.bases_dir) / base / "model.safetensors").exists() for base in BASES):
        found: list[dict[str, Any]] = []
        for base in BASES:
            model = LlamaForCausalLM.from_pretrained(Path(args.bases_dir) / base, dtype=torch.float32)
            found += measure(base, model, args)
        write_report(found, args)
        print((Path(args.results_dir) / "letters_bases.md").read_text())


if __name__ == "__main__":
    main()
