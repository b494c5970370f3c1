"""Decision-space files with one to three accidents each: what happens to text between two editors."""

from __future__ import annotations

import random
from collections.abc import Callable

EXAMPLE = """\
decision_space:
  algorithm:
    choices: [sft, dpo, ppo, grpo]
    constraints:
      - if base_model_size < 3B then exclude ppo
  data_mix:
    math: [0.1, 0.5]
    code: [0.1, 0.4]
    general: [0.2, 0.6]
    constraint: sum = 1.0
  hyperparams:
    learning_rate: [1e-6, 5e-5]
    batch_size: [16, 128]
    kl_coef: [0.01, 0.5]
    epochs: [1, 5]
budget:
  max_gpu_hours: 48
  max_rounds: 20
  early_stop_patience: 3
"""
"""The spelling that people paste."""

FULL = """\
# everything that a file can say
decision_space:
  algorithm: {choices: [sft, grpo, rloo], constraints: ["if device == cpu then exclude rloo"]}
  start: [base, best]
  data_mix:
    math: [0.1, 0.5]
    code: 0.2
    general:
  hyperparams:
    learning_rate: {low: 1e-6, high: 5e-5, scale: log, default: 1e-5}
    batch_size: {low: 16, high: 128, scale: log, integer: true, default: 32}
    gradient_accumulation: {choices: [1, 2, 4]}
    lora_rank: {choices: [0, 8, 16], default: 8}
    schedule: {choices: [constant, cosine]}
    packing: [true, false]
    weight_decay: 0.01
    steps: {low: 10, high: 60}
  exploration:
    num_generations: {choices: [4, 8], when: "algorithm in [grpo, rloo]"}
    temperature: [0.7, 1.2]
  constraints:
    - batch_size * gradient_accumulation <= 256
    - if algorithm == sft then learning_rate <= 2e-5
budget: {limit: 200000, unit: train_tokens, max_rounds: 8, patience: 4}
evaluator: {eval_repeats: 3, stratified_eval: false, samples: 2, k: 4, temperature: 0.9, batch_sequences: 64}
reward: {price: 0.2, failure_penalty: 0.3}
"""
"""One file with every section and spelling."""

ODD = "\x00\x1b\x7f\x85\u2028\ufeff\ud7ff\ue000\U0001f600é\u200b\xa0٣½"


def mutated(text: str, rng: random.Random) -> bytes:
    """Return the bytes of a text after one to three accidents, most often one."""
    content = text
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = rng.choice(TEXT_ACCIDENTS)(content, rng)
    raw = content.encode("utf-8")
    if rng.random() < 0.1 and raw:
        place = rng.randrange(len(raw))
        raw = raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    return raw


def _line_accident(change: Callable[[list[str], random.Random], None]) -> Callable[[str, random.Random], str]:
    def apply(text: str, rng: random.Random) -> str:
        lines = text.split("\n")
        change(lines, rng)
        return "\n".join(lines)

    return apply


def _delete(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def _repeat(lines: list[str], rng: random.Random) -> None:
    place = rng.randrange(len(lines))
    lines.insert(place, lines[place])


def _swap(lines: list[str], rng: random.Random) -> None:
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]


def _tab(lines: list[str], rng: random.Random) -> None:
    place = rng.randrange(len(lines))
    lines[place] = lines[place].replace("  ", "\t", 1)


def _indent(lines: list[str], rng: random.Random) -> None:
    place = rng.randrange(len(lines))
    lines[place] = " " + lines[place] if rng.random() < 0.5 else lines[place].removeprefix(" ")


def _number(text: str, rng: random.Random) -> str:
    places = [place for place, character in enumerate(text) if character.isdigit()]
    if not places:
        return text
    place = rng.choice(places)
    new = rng.choice(
        [
            "",
            "0",
            "1",
            "7",
            "9",
            "-",
            "9" * 400,
            "1e999",
            ".nan",
            "_",
            ":",
            "e",
            "no",
            "~",
            "true",
            "1.5",
            "e-3",
            "0" * 9,
            "B",
        ]
    )
    return text[:place] + new + text[place + rng.randint(0, 1) :]


def _character(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(ODD + "{}[]:,&*!|>%@`'\"#-?\\<= \t\n") + text[place + rng.randint(0, 1) :]


def _word(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    words[rng.randrange(len(words))] = rng.choice(
        [
            "&a",
            "*a",
            "<<: *a",
            "!!python/object:os.system",
            "no",
            "exclude",
            "if",
            "log",
            "null",
            "sft",
            "(" * 50,
            "x" * 2000,
        ]
    )
    return " ".join(words)


def _truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


TEXT_ACCIDENTS: list[Callable[[str, random.Random], str]] = [
    *map(_line_accident, (_delete, _repeat, _swap, _tab, _indent)),
    *[_number] * 5,
    *[_character] * 2,
    _word,
    _truncate,
]
