"""One file describes the decision space: what it comes to, what wins over it, and how each mistake is told."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.decision_space import DEFAULT_PARAMETERS, DecisionSpace, Parameter
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.envs.reward import RewardSettings
from posttrain_gym.envs.space_file import SpaceFile, load_space_file, parse_space_file, resolve_space
from posttrain_gym.envs.task_facts import TaskFacts
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer
from posttrain_gym.inner_trainers.yaml_file import FileError

from .scripted_env import make
from .space_mutations import EXAMPLE, FULL, mutated

HEAD = "decision_space:\n  algorithm: [sft, grpo]\n"
SCRIPTED = """\
decision_space:
  algorithm: [sft, grpo]
  data_mix: {left: [0.2, 0.7], right: [0, 1]}
  hyperparams:
    learning_rate: [1e-4, 1e-2]
    steps: [5, 10]
    batch_size: {choices: [16, 32], default: 16}
budget: {limit: 12345, max_rounds: 3, patience: 2, price: 0.25}
reward: {failure_penalty: 0.5}
"""


def parsed(text: str) -> SpaceFile:
    return parse_space_file(text, "space f.yaml")


def space_of(text: str) -> DecisionSpace:
    return parsed(text).decision_space()


def refused(text: str) -> str:
    with pytest.raises(FileError) as caught:
        space_of(text)
    message = str(caught.value)
    assert message.startswith("space f.yaml, line ")
    return message.removeprefix("space f.yaml, ")


# What it comes to


def test_the_spelling_that_people_paste_comes_to_exact_values() -> None:
    file = parsed(EXAMPLE)
    assert file.decision_space() == DecisionSpace(
        algorithms=("sft", "dpo", "ppo", "grpo"),
        sources=("math", "code", "general"),
        usable=dict.fromkeys(("sft", "dpo", "ppo", "grpo"), ("math", "code", "general")),
        parameters={
            "learning_rate": Parameter(1e-6, 5e-5, "log"),
            "batch_size": Parameter(16, 128, "log", integer=True),
            "kl_coef": Parameter(0.01, 0.5, "log"),
            "epochs": Parameter(1, 5, integer=True),
        },
        mix_bounds={"math": (0.1, 0.5), "code": (0.1, 0.4), "general": (0.2, 0.6)},
        conditions={"kl_coef": "algorithm in [ppo, grpo]"},  # sft and dpo read none
        constraints=("if base_model_size < 3B then exclude ppo",),
    )
    assert file.budget() == Budget(48 * 3600, "device_seconds", max_rounds=20, patience=3)
    assert (file.evaluator_settings(), file.reward()) == (None, {})


def test_every_section_and_spelling_comes_to_exact_values() -> None:
    file = parsed(FULL)
    assert file.decision_space() == DecisionSpace(
        algorithms=("sft", "grpo", "rloo"),
        sources=("math", "code", "general"),
        usable=dict.fromkeys(("sft", "grpo", "rloo"), ("math", "code", "general")),
        parameters={
            "learning_rate": Parameter(1e-6, 5e-5, "log"),
            "batch_size": Parameter(16, 128, "log", integer=True),
            "gradient_accumulation": Parameter(choices=(1, 2, 4)),
            "lora_rank": Parameter(choices=(0, 8, 16)),
            "schedule": Parameter(choices=("constant", "cosine")),
            "packing": Parameter(choices=(False, True)),
            "steps": Parameter(10, 60, "log", integer=True),
            "num_generations": Parameter(choices=(4, 8)),
            "temperature": Parameter(0.7, 1.2),
        },
        fixed={"weight_decay": 0.01},
        mix_bounds={"math": (0.1, 0.5), "code": (0.2, 0.2)},
        conditions={
            "num_generations": "algorithm in [grpo, rloo]",
            "packing": "algorithm in [sft]",
            "temperature": "algorithm in [grpo, rloo]",
        },
        constraints=(
            "if device == cpu then exclude rloo",
            "batch_size * gradient_accumulation <= 256",
            "if algorithm == sft then learning_rate <= 2e-5",
        ),
        starts=("base", "best"),
        defaults={"learning_rate": 1e-5, "batch_size": 32, "lora_rank": 8},
    )
    assert file.budget() == Budget(200_000, "train_tokens", 8, 4)
    settings = file.evaluator_settings()
    assert settings == {
        "seeds": [0, 1, 2],
        "samples_per_seed": 2,
        "k": 4,
        "temperature": 0.9,
        "batch_sequences": 64,
        "stratified": False,
    }
    assert file.reward() == {"price": 0.2, "failure_penalty": 0.3}


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        ("learning_rate: [1e-6, 1e-4]", Parameter(1e-6, 1e-4, "log")),
        ("learning_rate: {low: 1e-6, high: 1e-4, scale: linear}", Parameter(1e-6, 1e-4)),
        ("kl_coef: [0, 0.5]", Parameter(0, 0.5)),  # a log scale cannot touch 0
        ("kl_coef: [0.01, 0.5]", Parameter(0.01, 0.5, "log")),
        ("temperature: [0.5, 1.5]", Parameter(0.5, 1.5)),
        ("steps: [10, 60]", Parameter(10, 60, "log", integer=True)),
        ("steps: {low: 10, high: 60, scale: linear}", Parameter(10, 60, integer=True)),
        ("steps: {low: 10, high: 60, scale: integer}", Parameter(10, 60, integer=True)),
        ("steps: {low: 1e1, high: 6e1}", Parameter(10, 60, "log", integer=True)),
        ("warmup_steps: [0, 5]", Parameter(0, 5, integer=True)),
        ("epochs: [1, 5]", Parameter(1, 5, integer=True)),
        ("epochs: 2", Parameter(choices=(2,))),
        ("lora_rank: [16, 0, 8]", Parameter(choices=(0, 8, 16))),
        ("lora_rank: {choices: [0, 8], scale: choice}", Parameter(choices=(0, 8))),
        ("lora_rank: [0, 8]", Parameter(0, 8, integer=True)),
        ("schedule: [cosine, constant]", Parameter(choices=("cosine", "constant"))),
        ("packing: [true, false]", Parameter(choices=(False, True))),
        ("clip_range: {low: 1, high: 3, integer: true}", Parameter(1, 3, integer=True)),
        ("temperature: {value: 0.9, when: algorithm == grpo}", Parameter(choices=(0.9,))),
        ("temperature: 0.9", 0.9),
        ("temperature: {value: 1}", 1.0),
        ("packing: false", False),
        ("schedule: cosine", "cosine"),
    ],
)
def test_a_setting_is_a_range_choices_or_one_value(spelt: str, expected: Any) -> None:
    space = space_of(f"{HEAD}  hyperparams:\n    {spelt}\n")
    name = spelt.partition(":")[0]
    found = space.parameters.get(name, space.fixed.get(name))
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("when", "condition"),
    [
        ("algorithm == grpo", "algorithm == grpo"),
        ("algorithm in [grpo]", "algorithm in [grpo]"),
        ("algorithm in [sft, grpo]", "(algorithm in [sft, grpo]) and algorithm in [grpo]"),
        ("algorithm != sft", "(algorithm != sft) and algorithm in [grpo]"),
        ("steps > 20 or start == base", "(steps > 20 or start == base) and algorithm in [grpo]"),
        ("", "algorithm in [grpo]"),
    ],
)
def test_a_setting_is_used_when_the_file_says_so_by_algorithms_that_read_it(when: str, condition: str) -> None:
    asked = f", when: {when}" if when else ""
    if "[" in when:
        asked = f", when: '{when}'"
    space = space_of(f"{HEAD}  hyperparams:\n    steps: [10, 60]\n    kl_coef: {{low: 0, high: 1{asked}}}\n")
    assert dict(space.conditions) == {"kl_coef": condition}


def test_what_is_left_out_has_the_default_of_the_default_space() -> None:
    space = space_of("decision_space: {algorithm: [grpo]}\n")
    assert dict(space.parameters) == dict(DEFAULT_PARAMETERS)
    assert (space.starts, dict(space.mix_bounds), space.constraints) == (("base", "best", "latest"), {}, ())
    file = parsed("decision_space: {algorithm: sft}\n")
    assert set(file.decision_space().parameters) == {"batch_size", "learning_rate", "steps"}  # sft has no generations
    assert (file.budget(), file.evaluator_settings(), file.reward()) == (None, None, {})
    sampled = space_of("decision_space: {algorithm: [grpo], exploration: {num_generations: [2, 4, 8]}}\n")
    assert sampled.parameters["num_generations"] == Parameter(choices=(2, 4, 8))
    assert set(sampled.parameters) == set(DEFAULT_PARAMETERS)


@pytest.mark.parametrize(
    ("spelt", "sources", "bounds"),
    [
        ("[math, code]", ("math", "code"), {}),
        ("{math: , code: }", ("math", "code"), {}),
        ("{math: 0.25, code: [0.5, 0.75]}", ("math", "code"), {"math": (0.25, 0.25), "code": (0.5, 0.75)}),
        ("{math: {low: 0.2}, code: {high: 0.8}}", ("math", "code"), {"math": (0.2, 1.0), "code": (0.0, 0.8)}),
        ("{math: 1, constraint: sum=1}", ("math",), {"math": (1.0, 1.0)}),
        (
            "{constraint: [0.3, 0.7], code: [0.3, 0.7]}",
            ("constraint", "code"),
            dict.fromkeys(("constraint", "code"), (0.3, 0.7)),
        ),
    ],
)
def test_a_mix_has_bounds_weights_or_names(spelt: str, sources: tuple[str, ...], bounds: dict[str, Any]) -> None:
    space = space_of(f"{HEAD}  data_mix: {spelt}\n")
    assert (space.sources, dict(space.mix_bounds)) == (sources, bounds)


def test_a_budget_is_in_hours_or_in_a_unit() -> None:
    def budget(text: str) -> Budget | None:
        return parsed(f"{HEAD}budget: {text}\n").budget()

    assert budget("{max_gpu_hours: 0.5}") == Budget(1800, "device_seconds")
    assert budget("{limit: 1e12, unit: flops}") == Budget(10**12, "flops")
    assert budget("{limit: 5000}") == Budget(5000)
    assert budget("{max_rounds: 20}") == Budget(max_rounds=20)
    assert budget("{early_stop_patience: 2}") == budget("{patience: 2}") == Budget(patience=2)
    assert parsed(f"{HEAD}budget:\n").budget() is None


def test_evaluations_repeat_over_sampling_seeds() -> None:
    def settings(text: str) -> dict[str, Any] | None:
        return parsed(f"{HEAD}evaluator: {text}\n").evaluator_settings()

    assert settings("{eval_repeats: 1}") == {"seeds": [0], "k": 4}  # 4 completions per item are all there are
    assert settings("{samples: 1}") == {"samples_per_seed": 1, "k": 2}
    assert settings("{eval_repeats: 5}") == {"seeds": [0, 1, 2, 3, 4], "k": 8}
    assert settings("{stratified_eval: true}") == {"stratified": True, "k": 8}


def test_it_is_written_as_plain_data_and_read_back() -> None:
    for text in (EXAMPLE, FULL, SCRIPTED, "decision_space: {algorithm: sft}\n"):
        file = parsed(text)
        data = json.loads(json.dumps(file.to_dict()))
        again = SpaceFile.from_dict(data)
        assert again.decision_space() == file.decision_space()
        assert again.to_dict() == data
        assert (again.budget(), again.evaluator_settings(), again.reward()) == (
            file.budget(),
            file.evaluator_settings(),
            file.reward(),
        )
    assert list(parsed(EXAMPLE).to_dict()["decision_space"]["data_mix"]) == ["math", "code", "general"]
    with pytest.raises(ValueError, match=r"^space: decision_space\.algorithm: expected at least one algorithm"):
        SpaceFile.from_dict({"decision_space": {"algorithm": []}})


def test_it_goes_to_other_processes_and_keeps_its_places() -> None:
    file = parsed(SCRIPTED.replace("sft, grpo", "sft, dpo"))
    for again in (pickle.loads(pickle.dumps(file)), copy.deepcopy(file)):
        assert again.decision_space() == file.decision_space()
        with pytest.raises(
            FileError, match=r"^space f\.yaml, line 2, column 20: decision_space\.algorithm\[1\]: the trainer"
        ):
            again.decision_space(ScriptedTask(), ScriptedTrainer())


def test_a_file_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parsed(EXAMPLE).space_section = None  # type: ignore[assignment]


# What is refused


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1, column 1: expected the key decision_space, got nothing."),
        ("- sft\n", "line 1, column 1: expected the key decision_space, got a list."),
        ("budget: {}\n", "line 1, column 1: key 'decision_space' is missing."),
        ("decision_space:\n", "line 1, column 16: decision_space: expected keys with values, got nothing."),
        ("decision_space: 3\n", "line 1, column 17: decision_space: expected keys with values, got 3."),
        ("decision_space: {start: best}\n", "line 1, column 17: decision_space: key 'algorithm' is missing."),
        ("algorithm: [sft]\n", "line 1, column 1: algorithm: it stands under decision_space; indent it below"),
        (
            "decision_space: {algoritm: [sft]}\n",
            "line 1, column 18: decision_space.algoritm: unknown key 'algoritm'. Did you mean 'algorithm'?",
        ),
        (
            "decision_space: {algorithm: {choice: [sft]}}\n",
            "line 1, column 30: decision_space.algorithm.choice: unknown key 'choice'. Did you mean 'choices'?",
        ),
        (HEAD + "budgt: {}\n", "line 3, column 1: budgt: unknown key 'budgt'. Did you mean 'budget'?"),
        (HEAD + "budget: {max_gpu_hour: 4}\n", "line 3, column 10: budget.max_gpu_hour: unknown key 'max_gpu_hour'."),
    ],
)
def test_keys_that_are_missing_or_unknown_are_named(text: str, problem: str) -> None:
    assert refused(text).startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "column 14: decision_space.algorithm: expected at least one algorithm, got []."),
        ("[sft, sft]", "column 20: decision_space.algorithm[1]: 'sft' is there twice; leave one out."),
        ("[sft, gpo]", "column 20: decision_space.algorithm[1]: there is no algorithm 'gpo'. Did you mean 'grpo'?"),
        ("{choices: [3]}", "column 25: decision_space.algorithm.choices[0]: expected a name, got 3."),
        ("{choices: {a: 1}}", "column 24: decision_space.algorithm.choices: expected a list, got keys (a)."),
        ("[sft]\n  start: [best, bse]", "column 17: decision_space.start[1]: no checkpoint is called 'bse'. Did you"),
        ("[sft]\n  start: []", "column 10: decision_space.start: expected at least one starting checkpoint, got []."),
    ],
)
def test_algorithms_and_starts_are_known(text: str, problem: str) -> None:
    assert refused(f"decision_space:\n  algorithm: {text}\n").partition(", ")[2].startswith(problem)


@pytest.mark.parametrize(
    ("spelt", "problem"),
    [
        ("learning_rat: [1, 2]", "column 5: {0}: no setting of a recipe. Did you mean 'learning_rate'?"),
        ("mix: [1, 2]", "column 5: {0}: no setting of a recipe."),
        ("learning_rate: [5e-5, 1e-6]", "column 20: {0}: low 5e-05 is above high 1e-06; swap them."),
        ("learning_rate: [0, 1]", "column 21: {0}[0]: expected a number in (0, 1e+06], got 0."),
        ("learning_rate: [1e-6, 1_0]", "column 27: {0}[1]: expected a number, got '1_0'. Write 10."),
        ("learning_rate: [1e-6, .inf]", "column 27: {0}[1]: expected a number, got '.inf'. Write a finite number."),
        ("learning_rate: {low: 010, high: 20}", "column 26: {0}.low: expected a number, got '010'. Write 10, or 8"),
        ("learning_rate: {low: '1', high: 2}", "column 26: {0}.low: expected a number, got '1'. Write 1 without"),
        (
            "learning_rate: 1:30",
            "column 20: {0}: expected a number, got '1:30'. YAML 1.1 reads it in base 60; write 90.",
        ),
        ("kl_coef: {low: 0, high: 1, scale: log}", "column 39: {0}.scale: a log scale needs low above 0, got 0; raise"),
        ("kl_coef: {low: 0, high: 1, scale: lgo}", "column 39: {0}.scale: unknown scale 'lgo'. Did you mean 'log'?"),
        ("kl_coef: {low: 0, high: 101}", "column 29: {0}.high: expected a number in [0, 100], got 101."),
        ("packing: no", "column 14: {0}: expected true or false, got 'no'. Write false."),
        ("packing: [true, off]", "column 21: {0}[1]: expected true or false, got 'off'. Write false."),
        ("packing: [0, 1]", "column 14: {0}: it takes true or false; list its choices."),
        ("batch_size: [16, 128.0]", "column 22: {0}[1]: expected an integer, got 128.0. Write 128."),
        ("batch_size: [1.5, 128]", "column 18: {0}[0]: expected an integer, got 1.5."),
        ("batch_size: [16, 16]", "column 17: {0}: low and high are both 16; write 16 alone."),
        ("batch_size: {low: 16, high: 64, integer: yes}", "column 46: {0}.integer: expected true or false, got 'yes'."),
        ("batch_size: {low: 16, high: 64, integer: false}", "column 46: {0}.integer: batch_size is an integer; leave"),
        ("batch_size: {low: 16, high: 64, default: 8}", "column 46: {0}.default: the default 8 is outside [16, 64]."),
        ("batch_size: {choices: [16, 64], default: 32}", "column 46: {0}.default: the default 32 is not among"),
        (
            "batch_size: {choices: [16, 64], scale: log}",
            "column 44: {0}.scale: choices have no scale, got 'log'; leave",
        ),
        ("batch_size: {choices: [16, 64], low: 1}", "column 17: {0}: expected a range (low and high), choices or one"),
        ("batch_size: {low: 16}", "column 17: {0}: key 'high' is missing: a range has low and high."),
        ("batch_size: {value: 16, default: 16}", "column 29: {0}.default: it has no meaning beside one value; leave"),
        ("batch_size: {min: 16, max: 64}", "column 18: {0}.min: unknown key 'min'."),
        ("batch_size:", "column 16: {0}: expected a range such as [1e-6, 5e-5], choices or one value, got nothing."),
        ("batch_size: []", "column 17: {0}: expected a range such as [1e-6, 5e-5], or choices, got []."),
        ("lora_rank: [8, 16, 8]", "column 24: {0}[2]: the choice 8 is there twice; leave one out."),
        ("lora_rank: [8, 16, x]", "column 24: {0}[2]: expected an integer, got 'x'."),
        ("schedule: [constant, cosin]", "column 26: {0}[1]: unknown 'cosin'. Did you mean 'cosine'?"),
        ("schedule: [1, 2]", "column 15: {0}: it takes names; list its choices."),
        ("epochs: [0, 5]", "column 14: {0}[0]: expected an integer in [1, 1000], got 0."),
        ("vf_coef: [0, 1]", "column 5: {0}: none of sft, grpo reads it; leave it out."),
        ("beta: {low: 1, high: 2, when: 'algoritm == sft'}", "column 5: {0}: none of sft, grpo reads it"),
        (
            "steps: {low: 1, high: 2, when: 'algoritm == sft'}",
            "column 36: {0}.when: character 1: unknown name 'algoritm'.",
        ),
        ("steps: {low: 1, high: 2, when: 'algorithm = sft'}", "column 36: {0}.when: character 11: one `=` compares"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_place(spelt: str, problem: str) -> None:
    name = spelt.partition(":")[0]
    message = refused(f"{HEAD}  hyperparams:\n    {spelt}\n")
    assert message.startswith("line 4, " + problem.replace("{0}", f"decision_space.hyperparams.{name}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "  hyperparams: {temperature: 1}\n  exploration:\n    temperature: 0.9\n",
            "line 5, column 5: decision_space.exploration.temperature: it stands under hyperparams too; keep one "
            "(the other is in line 3).",
        ),
        (
            "  hyperparams: {temperature: 1}\n  hyperparameters: {steps: 9}\n",
            "line 4, column 3: decision_space.hyperparameters: hyperparams and hyperparameters are the same section; "
            "keep one (the other is in line 3).",
        ),
        (
            "  hyperparams:\n    steps: 5\n    epochs: 2\n",
            "line 5, column 5: decision_space.hyperparams.epochs: epochs and steps say the same; keep one "
            "(the other is in line 4).",
        ),
        (
            "  exploration: {learning_rate: 1}\n",
            "line 3, column 17: decision_space.exploration.learning_rate: no setting of exploration, which has",
        ),
        (
            "budget: {price: 1}\nreward:\n  price: 2\n",
            "line 5, column 3: reward.price: it stands under budget too; keep one (the other is in line 3).",
        ),
        (
            "budget:\n  max_gpu_hours: 4\n  limit: 3\n",
            "line 5, column 3: budget.limit: max_gpu_hours says it already; keep one (the other is in line 4).",
        ),
        (
            "budget:\n  patience: 4\n  early_stop_patience: 3\n",
            "line 4, column 3: budget.patience: early_stop_patience says it already; keep one (the other "
            "is in line 5).",
        ),
    ],
)
def test_what_is_said_twice_is_refused_with_both_lines(text: str, problem: str) -> None:
    assert refused(HEAD + text).startswith(problem)


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        (
            "{math: 0.5, code: [0.1, 0.4]}",
            "column 13: {0}: the upper bounds math 0.5 + code 0.4 = 0.9 cannot reach 1; raise them by 0.1 in all.",
        ),
        (
            "{math: [0.5, 0.7], code: [0.6, 0.7]}",
            "column 13: {0}: the lower bounds math 0.5 + code 0.6 = 1.1 are above 1; lower them by 0.1 in all.",
        ),
        ("{math: [0.5, 0.2], code: }", "column 20: {0}.math: low 0.5 is above high 0.2; swap them."),
        (
            "{math: [0.1234, 1]}",
            "column 21: {0}.math[0]: 0.1234 has more than three decimals; weights are multiples of 0.001: write 0.123.",
        ),
        ("{math: [-1, 1]}", "column 21: {0}.math[0]: expected a weight in [0, 1], got -1."),
        ("{math: [0, 50%]}", "column 24: {0}.math[1]: expected a number, got '50%'. Write 0.5."),
        (
            "{math: [0, 1, 1]}",
            "column 20: {0}.math: expected two bounds such as [0.1, 0.5], or one weight, got [0, 1, 1].",
        ),
        ("{math: yes}", "column 20: {0}.math: expected a number, got 'yes'."),
        (
            "{math: 1, constraint: sum = 2}",
            "column 35: {0}.constraint: the weights of a mix sum to 1; write 'sum = 1.0'",
        ),
        ("[math, math]", "column 13: {0}: source 'math' is there twice; leave one out."),
        ("{}", "column 13: {0}: expected sources with their bounds, got none; leave it out for every source."),
        ("math", "column 13: {0}: expected keys with values, got 'math'."),
    ],
)
def test_mixes_that_cannot_be_are_refused_with_the_arithmetic(mix: str, problem: str) -> None:
    assert refused(f"{HEAD}  data_mix: {mix}\n").startswith(
        "line 3, " + problem.replace("{0}", "decision_space.data_mix")
    )


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        ("batch_size <", "character 13: expected a name or a number; the text ends.\n  batch_size <\n              ^"),
        ("if algorithm == grp then steps < 30", "character 17: unknown name 'grp'. Did you mean 'grpo'?"),
        ("batch_siz < 3", "character 1: unknown name 'batch_siz'. Did you mean 'batch_size'?"),
        ("if sft < 3B then exclude grpo", "character 4: 'sft' is a name, and names have no order; use == or !=."),
        ("if device <= 5 then steps < 30", "character 4: 'device' is a name, and names have no order; use == or !=."),
        ("if algorithm == 3 then steps < 30", "character 4: 'algorithm' is a name and is compared with a number."),
        ("steps in [grpo]", "character 11: 'grpo' is a name and is compared with a number."),
        ("sft == grpo", "character 1: 'sft' is a name; compare a setting that holds one with it, as algorithm does."),
        ("algorithm + 1 > 2", "character 1: 'algorithm' holds a name; compare it with ==, != or in."),
        (
            "learning_rate < 1e-9",
            "no recipe of any algorithm can meet it: \"no setting of its knobs keeps 'learning_rate",
        ),
        ("exclude sft, grpo", "no recipe of any algorithm can meet it: 'exclude sft, grpo'."),
        ("steps + ", "character 8: expected a name or a number; the text ends."),
    ],
)
def test_constraints_that_mean_nothing_or_leave_nothing_are_refused(constraint: str, problem: str) -> None:
    for key, path in (("constraints", "constraints"), ("algorithm", "algorithm.constraints")):
        text = (
            f"decision_space:\n  algorithm:\n    choices: [sft, grpo]\n  constraints:\n    - {json.dumps(constraint)}\n"
        )
        if key == "algorithm":
            text = text.replace("  constraints:", "    constraints:").replace("    - ", "      - ")
        column = 9 if key == "algorithm" else 7
        assert refused(text).startswith(f"line 5, column {column}: decision_space.{path}[0]: {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budget: {max_gpu_hours: 0}", "column 25: budget.max_gpu_hours: expected a number in (0, inf], got 0."),
        ("budget: {max_rounds: 1.5}", "column 22: budget.max_rounds: expected an integer, got 1.5."),
        (
            "budget: {early_stop_patience: 0}",
            "column 31: budget.early_stop_patience: expected an integer in [1, 100000]",
        ),
        ("budget: {unit: tokens, limit: 4}", "column 16: budget.unit: unknown 'tokens'. Did you mean 'train_tokens'?"),
        ("budget: {unit: flops}", "column 10: budget.unit: a unit needs a limit; write one, such as limit: 200000."),
        ("budget: {price: -1}", "column 17: budget.price: expected a number in [0, 100], got -1."),
        (
            "reward: {failure_penalty: 101}",
            "column 27: reward.failure_penalty: expected a number in [0, 100], got 101.",
        ),
        ("evaluator: {eval_repeats: 0}", "column 27: evaluator.eval_repeats: expected an integer in [1, 1000], got 0."),
        ("evaluator: {k: 9}", "column 16: evaluator.k: expected an integer in [1, 8], got 9."),
        ("evaluator: {samples: 0}", "column 22: evaluator.samples: expected an integer in [1, 100000], got 0."),
        ("evaluator: {stratified_eval: no}", "column 30: evaluator.stratified_eval: expected true or false, got 'no'."),
        ("evaluator: {temperature: 0}", "column 26: evaluator.temperature: expected a number in (0, 10], got 0."),
        ("evaluator: []", "column 12: evaluator: expected keys with values, got []."),
    ],
)
def test_budgets_rewards_and_evaluators_are_checked(text: str, problem: str) -> None:
    assert refused(f"{HEAD}{text}\n").startswith(f"line 3, {problem}")


def test_a_constraint_that_a_comma_cut_off_is_told_so() -> None:
    message = refused(HEAD + "  constraints: [if device == cpu then exclude sft, grpo]\n")
    assert message.startswith("line 3, column 52: decision_space.constraints[1]: character 1: unknown name 'grpo'.")
    assert message.endswith("Inside [ ] a comma begins a new entry; put a constraint that has commas in quotes.")


def test_groups_that_divide_no_batch_are_refused_where_they_stand() -> None:
    text = f"{HEAD}  hyperparams:\n    batch_size: [16, 20, 32]\n    num_generations: {{choices: [7]}}\n"
    message = refused(text)
    assert message.startswith("line 5, column 22: decision_space.hyperparams.num_generations: of num_generations [7]")


# With a task


def test_sources_and_algorithms_are_those_of_the_task_and_its_trainer() -> None:
    task, trainer = ScriptedTask(kinds=("demonstrations",)), ScriptedTrainer()
    space = parsed(SCRIPTED).decision_space(task, trainer)
    assert (space.sources, dict(space.usable)) == (("left", "right"), {"sft": ("left", "right"), "grpo": ("left",)})
    every = parsed(HEAD).decision_space(task, trainer)
    assert every.sources == ("left", "right")
    for text, problem in (
        (
            SCRIPTED.replace("right:", "rigth:"),
            r"line 3, column 32: decision_space\.data_mix\.rigth: task 'scripted' has no source 'rigth'\. Did you mean",
        ),
        (
            SCRIPTED.replace("[sft, grpo]", "[sft, dpo]"),
            r"line 2, column 20: decision_space\.algorithm\[1\]: the trainer has no algorithm 'dpo'\.",
        ),
        (
            HEAD + "  hyperparams: {beta: [0.1, 1], steps: 5}\n  constraints: [mix.wob < 0.5]\n",
            r"line 4, column 17: decision_space\.constraints\[0\]: character 1: unknown name 'mix\.wob'\.",
        ),
    ):
        with pytest.raises(FileError, match=problem):
            parsed(text).decision_space(task, trainer)


def test_without_a_task_constraints_may_name_any_source() -> None:
    space = space_of(HEAD + "  constraints: [mix.web <= 0.4, if rows.logs < 100 then exclude logs]\n")
    assert space.sources == ("web", "logs", "(every source)")


def test_epochs_are_steps_over_the_rows_of_the_mix() -> None:
    text = HEAD + "  data_mix: [left, right]\n  hyperparams: {epochs: [1, 5], batch_size: 4, num_generations: 2}\n"
    facts = TaskFacts(
        base_model_size=1000.0,
        rows={"left": 30, "right": 12},
        training_rows={"sft": {"left": 30, "right": 12}, "grpo": {"left": 30}},
        grouped=frozenset({"grpo"}),
    )
    space = space_of(text).bind(facts)
    assert space.recipe("sft", epochs=3, mix={"left": 0.5, "right": 0.5}).steps == 32  # 3 x 42 rows / 4 = 31.5
    assert space.recipe("sft", epochs=3, mix={"left": 1.0}).steps == 23  # 3 x 30 rows / 4 = 22.5
    assert space.recipe("grpo", epochs=3, mix={"left": 1.0}).steps == 45  # 3 x 30 prompts / (4 / 2) = 45


# In the environment


def test_what_is_given_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(SCRIPTED)
    own = resolve_space(path)
    assert own.budget == Budget(12345, max_rounds=3, patience=2)
    assert own.reward == RewardSettings(0.25, 0.5)
    given = resolve_space(str(path), budget=500, price=0.0, failure_penalty=0.0, evaluator={"k": 2})
    assert (given.budget, given.reward, given.evaluator) == (Budget(500), RewardSettings(0.0, 0.0), {"k": 2})
    nothing = resolve_space(None)
    assert (nothing.source, nothing.budget, nothing.evaluator) == (None, Budget(), None)
    assert nothing.reward == RewardSettings(0.1, 0.1)
    evaluated = parsed(FULL)
    assert Evaluator(**dict(resolve_space(evaluated).evaluator or {})) == Evaluator(
        (0, 1, 2), 2, 4, 0.9, 64, stratified=False
    )
    assert resolve_space(evaluated, own_evaluator=True).evaluator is None
    for value in (5, ["space.yaml"], Path):
        with pytest.raises(ValueError, match="space: expected a DecisionSpace, the name of a YAML file or its content"):
            resolve_space(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["path", "text", "mapping", "file", "space"])
def test_environments_take_the_file_by_any_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(SCRIPTED)
    file = load_space_file(path)
    task = ScriptedTask(0)
    given: Any = {
        "path": path,
        "text": str(path),
        "mapping": json.loads(json.dumps(file.to_dict())),
        "file": file,
        "space": file.decision_space(task, ScriptedTrainer()),
    }[kind]
    env = make(space=given)
    assert env.space.parameters == {
        "batch_size": Parameter(choices=(16, 32)),
        "learning_rate": Parameter(1e-4, 1e-2, "log"),
        "steps": Parameter(5, 10, "log", integer=True),
    }
    if kind == "space":
        assert (env.budget, env.reward_settings) == (Budget(), RewardSettings())
    else:
        assert (env.budget, env.reward_settings) == (Budget(12345, max_rounds=3, patience=2), RewardSettings(0.25, 0.5))
    env.reset(seed=0)
    for seed in range(20):
        env.action_space.seed(seed)
        recipe = env.space.decode({**env.action_space.sample(), "algorithm": 1 + seed % 2})
        assert recipe is not None and 0.2 <= recipe.mix.get("left", 0.0) <= 0.7 and recipe.batch_size in (16, 32)


@pytest.mark.parametrize("name", ["PostTrain/Recipe-v0", "PostTrain/Full-v0"])
def test_a_spec_with_a_file_makes_the_same_environment_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(SCRIPTED)
    task = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
    env = gym.make(name, task=task, space=str(path))
    assert env.spec is not None
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    one, other = env.unwrapped, again.unwrapped
    assert isinstance(one, PostTrainingEnv) and isinstance(other, PostTrainingEnv)
    assert (one.space, one.budget, one.reward_settings) == (other.space, other.budget, other.reward_settings)
    first, second = (made.reset(seed=3)[0] for made in (env, again))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_a_file_is_refused_where_the_recipe_is_given_and_where_the_trainer_evaluates_itself(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(SCRIPTED + "evaluator: {eval_repeats: 1}\n")
    with pytest.raises(ValueError, match="space: it follows from the recipe; leave it out"):
        gym.make(
            "PostTrain/InLoop-v0", task=ScriptedFamily(), recipe={"algorithm": "sft", "mix": {"left": 1.0}}, space=path
        )
    with pytest.raises(ValueError, match="evaluator: it configures the TRL trainer; the task brings its own trainer"):
        make(space=path)
    env = make(space=path, trainer=ScriptedTrainer())  # a trainer that is given has its evaluator
    assert env.space.starts == ("base", "best", "latest")
    with pytest.raises(ValueError, match=r"space no\.yaml: no such file"):
        make(space="no.yaml")


# Accidents


def test_a_thousand_accidents_end_in_a_located_error_or_a_space(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    loaded = 0
    places: set[str] = set()
    for seed in range(1000):
        rng = random.Random(seed)
        path.write_bytes(mutated(EXAMPLE if seed % 2 else FULL, rng))
        try:
            file = load_space_file(path)
            space = file.decision_space()
        except FileError as error:
            head = f"space {path}, line "
            assert str(error).startswith(head), seed
            places.add(str(error).removeprefix(head).partition(",")[0])
            continue
        loaded += 1
        assert SpaceFile.from_dict(file.to_dict()).decision_space() == space
        rows = dict.fromkeys(space.sources, 100)
        bound = space.bind(
            TaskFacts(
                base_model_size=rng.choice([1e9, 7e9]),
                rows=rows,
                training_rows=dict.fromkeys(space.algorithms, rows),
                grouped=frozenset({"grpo", "rloo"} & set(space.algorithms)),
                device="cpu",
            )
        )
        legal = [name for name in bound.algorithms if bound.problems[name] is None]
        for _ in range(3 if legal else 0):
            recipe = bound.random_recipe(np.random.default_rng(seed), legal)
            assert bound.decode(bound.encode(recipe)) == recipe
    assert loaded > 50 and len(places) > 20
