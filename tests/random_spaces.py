"""Random decision spaces, with knobs, conditions, constraints and bounds drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.task_facts import TaskFacts

ALGORITHMS = ("dpo", "grpo", "ppo", "rft", "sft")
SOURCES = ("code", "general", "math", "web")
_KNOBS: dict[str, list[Parameter]] = {
    "batch_size": [
        Parameter(4, 128, "log", integer=True),
        Parameter(choices=(8, 16, 24, 64)),
        Parameter(5, 40, integer=True),
    ],
    "gradient_accumulation": [Parameter(choices=(1, 2, 4)), Parameter(1, 6, integer=True)],
    "num_generations": [Parameter(choices=(2, 4, 8)), Parameter(choices=(3, 4))],
    "learning_rate": [Parameter(1e-6, 5e-4, "log"), Parameter(choices=(1e-5, 1e-4))],
    "kl_coef": [Parameter(0.0, 0.5), Parameter(0.01, 0.5, "log")],
    "lora_rank": [Parameter(choices=(0, 8, 16))],
    "schedule": [Parameter(choices=("constant", "linear", "cosine"))],
    "packing": [Parameter(choices=(False, True))],
    "temperature": [Parameter(0.3, 1.7)],
    "warmup_steps": [Parameter(0, 20, integer=True)],
}
_CONDITIONS = {
    "kl_coef": "algorithm in [grpo, ppo]",
    "num_generations": "algorithm == grpo or algorithm == rft",
    "packing": "algorithm == sft",
    "schedule": "lora_rank > 0",
    "temperature": "not algorithm in [sft, dpo] and batch_size > 10",
}
_CONSTRAINTS = (
    "if base_model_size < 3B then exclude ppo",
    "if algorithm == dpo then learning_rate <= 2e-5",
    "if lora_rank == 0 then learning_rate < 1e-4",
    "batch_size * gradient_accumulation <= 96",
    "batch_size * gradient_accumulation >= 20",
    "if mix.math > 0.4 then kl_coef >= 0.05",
    "if algorithm == grpo then mix.web <= 0.2",
    "if start == base then mix.math >= 0.3",
    "if algorithm == sft then exclude latest",
    "schedule != linear or packing == false",
    "steps >= warmup_steps * 2",
    "if device == cpu then batch_size <= 64",
    "if rows.web < 100 then exclude web",
    "temperature in [0.7, 1.0]",
    "kl_coef * temperature <= 0.3",
    "if gradient_accumulation > 2 then exclude rft",
)


def random_space(seed: int) -> DecisionSpace:
    """Returns a space of which at least one algorithm is legal."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            space = _drawn(rng)
        except ValueError as error:
            known = ("none that is at least 2 divides", "unknown name", "bounds one source", "data_mix: ", "steps and")
            assert any(text in str(error) for text in known), error
            continue
        if any(problem is None for problem in space.problems.values()):
            return space


def _drawn(rng: np.random.Generator) -> DecisionSpace:
    algorithms = tuple(rng.permutation(ALGORITHMS)[: rng.integers(1, 6)].tolist())
    sources = tuple(rng.permutation(SOURCES)[: rng.integers(1, 5)].tolist())
    names = [name for name in _KNOBS if rng.random() < 0.6]
    parameters = {name: _KNOBS[name][int(rng.integers(len(_KNOBS[name])))] for name in names}
    steps = str(rng.choice(["steps", "epochs", "fixed"]))
    if steps == "steps":
        parameters["steps"] = Parameter(5, 60, "log", integer=True)
    elif steps == "epochs":
        parameters["epochs"] = Parameter(1, 4, integer=True)
    bounds = {}
    for name in sources:
        if rng.random() < 0.5:
            low = round(float(rng.uniform(0, 0.3)), 2)
            bounds[name] = (low, round(float(rng.uniform(low, 1)), 2))
    usable = {a: tuple(s for s in sources if rng.random() < 0.8) or sources for a in algorithms}
    rows = {name: int(rng.choice([20, 300, 2000])) for name in sources}
    facts = TaskFacts(
        base_model_size=float(rng.choice([1e9, 7e9])),
        rows=rows,
        training_rows={a: {s: rows[s] for s in usable[a]} for a in algorithms},
        grouped=frozenset({"grpo", "rft"} & set(algorithms)),
        has_teacher=bool(rng.random() < 0.5),
        device=str(rng.choice(["cpu", "cuda"])),
        device_memory=None,
    )
    fixed: dict[str, Any] = {"steps": 30} if steps == "fixed" else {}
    chosen = [text for text in _CONSTRAINTS if rng.random() < 0.3]
    conditions = {n: t for n, t in _CONDITIONS.items() if n in parameters and rng.random() < 0.7}
    starts = [("base", "best", "latest"), ("base", "best"), ("best",)][int(rng.integers(3))]
    kept = []
    for text in chosen:  # a constraint may name what this space has not
        try:
            DecisionSpace(algorithms, sources, usable, parameters, fixed, {}, {}, (text,))
        except ValueError as error:
            if "character" not in str(error):
                raise
            continue
        kept.append(text)
    return DecisionSpace(
        algorithms, sources, usable, parameters, fixed, bounds, conditions, tuple(kept), starts, facts=facts
    )
