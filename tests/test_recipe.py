"""Recipes and adjustments: ranges, wording of errors, hashes, and the way through JSON and pickle."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from posttrain_gym.inner_trainers.base import Cost, Limit
from posttrain_gym.inner_trainers.messages import did_you_mean, first_line, require_integer, require_number
from posttrain_gym.inner_trainers.recipe import Recipe

FULL: dict[str, Any] = {
    "algorithm": "grpo",
    "mix": {"math": 0.25, "code": 0.75},
    "start": "latest",
    "steps": 7,
    "batch_size": 12,
    "gradient_accumulation": 2,
    "learning_rate": 1.5e-4,
    "schedule": "cosine",
    "warmup_steps": 3,
    "kl_coef": 0.05,
    "num_generations": 4,
    "temperature": 0.7,
    "max_grad_norm": 0.5,
    "weight_decay": 0.01,
    "lora_rank": 8,
    "lora_adapter": "stack",
    "max_length": 256,
    "packing": True,
    "loss": "dr_grpo",
    "beta": 0.2,
    "entropy_coef": 0.01,
    "clip_range": 0.3,
    "num_iterations": 2,
    "gamma": 0.99,
    "gae_lambda": 0.9,
    "vf_coef": 0.25,
    "clip_range_vf": 0.4,
    "critic": "model",
    "min_reward": 0.5,
    "replay_share": 0.25,
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.from_dict({**FULL, **changes})


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("steps", [3, 100_000], [0, 100_001, -1, 2.0, True, "5", None]),
        ("batch_size", [1, 65_536], [0, 65_537, 1.5]),
        ("gradient_accumulation", [1, 1024], [0, 1025]),
        ("learning_rate", [1e-300, 1e6], [0, -1e-3, 1.1e6, float("nan"), float("inf"), "1e-3", True, 10**400]),
        ("warmup_steps", [0, 7], [-1, 8]),
        ("kl_coef", [0, 100], [-1e-9, 100.1, float("nan")]),
        ("num_generations", [1, 1024], [0, 1025]),
        ("temperature", [1e-6, 10], [0, 10.5]),
        ("max_grad_norm", [1e-6, 1e6], [0, 2e6]),
        ("weight_decay", [0, 10], [-0.1, 10.1]),
        ("lora_rank", [0, 1024], [-1, 1025]),
        ("max_length", [2, 1_048_576], [1, 1_048_577]),
        ("packing", [True, False], [1, "yes", None]),
        ("loss", ["ipo"], ["", None, 3]),
        ("beta", [1e-6, 100], [0, 101]),
        ("entropy_coef", [0, 10], [-0.1, 11]),
        ("clip_range", [1e-6, 10], [0, 11]),
        ("num_iterations", [1, 64], [0, 65, 1.0]),
        ("gamma", [0, 1], [-0.1, 1.1]),
        ("gae_lambda", [0, 1], [-0.1, 1.1]),
        ("vf_coef", [0, 100], [-1, 101]),
        ("clip_range_vf", [1e-6, 1e6], [0, 2e6]),
        ("min_reward", [-1e6, 1e6], [float("nan"), -2e6]),
        ("replay_share", [0, 0.99], [1, -0.1]),
    ],
)
def test_every_range_is_held_and_named(name: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        assert getattr(recipe(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
            recipe(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "bset"}, "start: no checkpoint is called 'bset'. Did you mean 'best'? Known: base, best, latest."),
        (
            {"schedule": "linaer"},
            "schedule: unknown 'linaer'. Did you mean 'linear'? Known: constant, cosine, linear.",
        ),
        ({"critic": "heads"}, "critic: unknown 'heads'. Did you mean 'head'? Known: head, model, none."),
        ({"lora_adapter": None}, "lora_adapter: unknown None. Known: merge, stack."),
        ({"algorithm": ""}, "algorithm: expected a name, got ''."),
        ({"mix": {}}, "mix: expected source names with weights, for example {'math': 1.0}, got {}."),
        ({"mix": [0.5, 0.5]}, "mix: expected source names with weights, for example {'math': 1.0}, got [0.5, 0.5]."),
        (
            {"mix": {"math": 0.5, "code": 0.25}},
            "mix: weights must sum to 1, but math 0.5 + code 0.25 = 0.75.",
        ),
        ({"mix": {"math": 1.5, "code": -0.5}}, "mix.math: expected a number in [0, 1], got 1.5."),
        ({"mix": {"math": float("nan")}}, "mix.math: expected a number in [0, 1], got nan."),
    ],
)
def test_messages_say_what_came_and_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        recipe(**changes)
    assert str(caught.value) == message


def test_unknown_and_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'learning_rat'. Did you mean 'learning_rate'\?"):
        Recipe.from_dict({**FULL, "learning_rat": 1e-3})
    with pytest.raises(ValueError, match="unknown key '_hash'"):
        Recipe.from_dict({**FULL, "_hash": "0" * 16})
    for key in ("algorithm", "mix"):
        with pytest.raises(ValueError, match=f"key '{key}' is missing"):
            Recipe.from_dict({k: v for k, v in FULL.items() if k != key})


def test_json_round_trip_keeps_every_field() -> None:
    made = recipe()
    assert made.to_dict() == FULL
    back = Recipe.from_dict(json.loads(json.dumps(made.to_dict())))
    assert back == made
    assert back.content_hash == made.content_hash
    assert hash(back) == hash(made)


def test_pickle_deepcopy_and_replace() -> None:
    made = recipe()
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), dataclasses.replace(made)):
        assert other == made
        assert other.content_hash == made.content_hash
        with pytest.raises(TypeError):
            other.mix["math"] = 1.0  # type: ignore[index]
    assert dataclasses.replace(made, steps=8).content_hash != made.content_hash


def test_hash_is_equal_in_another_process() -> None:
    code = (
        "import json, sys; from posttrain_gym.inner_trainers.recipe import Recipe;"
        "print(Recipe.from_dict(json.loads(sys.argv[1])).content_hash)"
    )
    turned = {**FULL, "mix": dict(reversed(FULL["mix"].items()))}  # the order of names is no content
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(turned)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert hashes == {recipe().content_hash}


def test_hash_changes_with_each_field() -> None:
    changed = {
        "algorithm": "sft",
        "mix": {"math": 0.75, "code": 0.25},
        "start": "base",
        "schedule": "linear",
        **{name: 5 for name in ("steps", "batch_size", "gradient_accumulation", "warmup_steps", "lora_rank")},
        **{name: 0.25 for name in ("learning_rate", "kl_coef", "temperature", "max_grad_norm", "weight_decay")},
        **{name: 0.125 for name in ("beta", "entropy_coef", "clip_range", "gamma", "gae_lambda", "vf_coef")},
        **{name: 0.125 for name in ("clip_range_vf", "min_reward", "replay_share")},
        "num_generations": 2,
        "num_iterations": 3,
        "max_length": 64,
        "packing": False,
        "loss": "dapo",
        "critic": "head",
        "lora_adapter": "merge",
    }
    assert changed.keys() == FULL.keys()
    hashes = [recipe(**{name: value}).content_hash for name, value in changed.items()]
    assert len({recipe().content_hash, *hashes}) == len(FULL) + 1


def test_the_training_hash_sees_what_is_trained_alone() -> None:
    made = recipe()
    assert recipe(start="base").training_hash() == made.training_hash()
    assert recipe(mix={**FULL["mix"], "web": 0.0}).training_hash() == made.training_hash()
    assert recipe(temperature=0.8).training_hash() != made.training_hash()
    assert recipe(temperature=0.8).training_hash(("temperature",)) == made.training_hash(("temperature",))
    assert made.training_hash(("temperature",)) != made.training_hash()
    others = {
        "mix": {"math": 0.75, "code": 0.25},
        "algorithm": "sft",
        "schedule": "linear",
        "max_length": 64,
        "steps": 5,
        "packing": False,
        "loss": "dapo",
        "critic": "head",
        "lora_adapter": "merge",
        "replay_share": 0.5,
        "gamma": 0.5,
    }
    for name in FULL.keys() - {"start"}:
        assert recipe(**{name: others.get(name, 1)}).training_hash() != made.training_hash(), name


def test_equal_values_of_other_types_are_the_same_recipe() -> None:
    plain = recipe(steps=5, warmup_steps=0, learning_rate=1.0, kl_coef=0.0)
    numpy = recipe(steps=np.int64(5), warmup_steps=np.int8(0), learning_rate=np.float32(1), kl_coef=-0.0)
    assert numpy == plain
    assert numpy.content_hash == plain.content_hash
    assert json.dumps(numpy.to_dict()) == json.dumps(plain.to_dict())


@pytest.mark.parametrize(
    "value", [np.array(3.5), torch.tensor(3.7), torch.tensor(True), np.bool_(True), 3.0, "3", None]
)
def test_an_integer_setting_never_cuts_a_fraction(value: object) -> None:
    with pytest.raises(ValueError, match="steps: expected an integer in"):
        require_integer("steps", value, low=0, high=10)


@pytest.mark.parametrize("value", [3, np.int32(3), np.array(3), torch.tensor(3)])
def test_integers_of_other_libraries_are_taken(value: object) -> None:
    taken = require_integer("steps", value, low=0, high=10)
    assert taken == 3
    assert type(taken) is int


def test_numbers_of_other_libraries_are_taken() -> None:
    assert require_number("x", torch.tensor(0.5)) == 0.5
    assert type(require_number("x", np.float64(0.5))) is float
    for refused in (np.bool_(True), torch.tensor([0.5]), np.array([0.5]), "0.5", None):
        with pytest.raises(ValueError, match="x: expected a number"):
            require_number("x", refused)


def test_did_you_mean_lists_what_is_known() -> None:
    assert did_you_mean("grop", ["sft", "grpo"]) == " Did you mean 'grpo'? Known: grpo, sft."
    assert did_you_mean("zzz", ["sft"]) == " Known: sft."
    assert did_you_mean("zzz", []) == " Known: none."


def test_first_line_of_an_exception_without_a_message() -> None:
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_limit_that_could_never_be_passed_is_refused() -> None:
    assert Limit("flops", 0).amount == 0.0
    for amount in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"limit\.amount: expected a number in"):
            Limit("flops", amount)
    with pytest.raises(ValueError, match=r"counted in 'tokens'. Did you mean 'train_tokens'\?"):
        Limit("tokens", 100)
    with pytest.raises(ValueError, match="counted in 'flop'"):
        Cost().in_unit("flop")


def test_costs_add_multiply_and_convert() -> None:
    cost = Cost(6, 3, 9, 100.0, 0.5) + Cost(1, 0, 3, 10.0, 0.25)
    assert cost == Cost(7, 3, 12, 110.0, 0.75)
    assert cost.times(2) == Cost(14, 6, 24, 220.0, 1.5)
    assert cost.in_unit("train_tokens") == 7 + 15 / 3
    assert cost.in_unit("flops") == 110.0
    assert cost.in_unit("device_seconds") == 0.75


def test_an_exception_that_cannot_say_what_it_is_gives_its_type() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert first_line(SilentError()) == "SilentError"
