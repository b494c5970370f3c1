"""Every inner algorithm in the environment: which are legal on a task, and that no legal action is ever refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import posttrain_gym  # noqa: F401 (registers the ids)
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.tasks.letters import LettersTask
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS, OPTIONAL_FIELDS, check_recipe, usable_sources
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer()


def legal(env: Any) -> dict[str, bool]:
    names = env.unwrapped.space.algorithms
    return dict(zip(names, env.unwrapped.action_masks()[1 : 1 + len(names)].tolist(), strict=True))


@pytest.mark.parametrize(("base", "taught"), [("strong", False), ("gap", True)])
def test_a_task_without_teacher_masks_distillation_alone(trainer: TrlTrainer, base: str, taught: bool) -> None:
    env = gym.make("PostTrain/Recipe-v0", task=LettersTask(0, base=base), trainer=trainer)
    env.reset(seed=0)
    assert legal(env) == {name: taught or name != "distill" for name in ALGORITHMS}


def test_the_mask_follows_the_instance_and_not_the_first_one(trainer: TrlTrainer) -> None:
    """Instance 0 of letters is the strong base, which has no teacher; instance 1 has one."""
    env: Any = gym.make("PostTrain/Recipe-v0", instances=[0, 1], trainer=trainer)
    env.reset(seed=0, options={"instance": 0})
    assert not legal(env)["distill"]
    env.reset(seed=0, options={"instance": 1})
    assert legal(env)["distill"]
    recipe = env.unwrapped.space.recipe("distill", steps=10)
    assert env.unwrapped.space.decode(env.unwrapped.encode_recipe(recipe)) == recipe
    trainer.check(env.unwrapped.search.task, recipe)


def test_only_the_rows_a_task_has_are_legal(trainer: TrlTrainer, tmp_path: Path) -> None:
    task = TinyTask(write_tiny_checkpoint(tmp_path))
    env: Any = gym.make("PostTrain/Recipe-v0", task=task, trainer=trainer)
    env.reset(seed=0)
    prompts = {"grpo", "ppo", "rft", "rloo"}
    assert {name for name, there in legal(env).items() if there} == {"sft", *prompts}
    assert {name: usable_sources(task, ALGORITHMS[name]) for name in ("sft", "grpo", "dpo", "midtrain", "distill")} == {
        "sft": ("bad", "good"),
        "grpo": ("good",),
        "dpo": (),
        "midtrain": (),
        "distill": (),
    }
    illegal = env.unwrapped.action_space.sample() | {"algorithm": 1 + env.unwrapped.space.algorithms.index("dpo")}
    reward, info = env.step(illegal)[1], env.unwrapped.search.outcomes[-1].report
    assert info.failure is not None
    assert (info.failure.cause, info.failure.kind, info.cost.trained_tokens) == ("algorithm_mismatch", "no_data", 0)
    assert reward == pytest.approx(-0.1)


@pytest.mark.parametrize("base", ["strong", "messy"])
def test_a_thousand_sampled_actions_are_never_refused(trainer: TrlTrainer, base: str) -> None:
    env: Any = gym.make("PostTrain/Recipe-v0", task=LettersTask(0, base=base), trainer=trainer).unwrapped
    env.reset(seed=0)
    space, search, allowed = env.space, env.search, legal(env)
    env.action_space.seed(0)
    seen: set[str] = set()
    while len(seen) < 1000:
        recipe = space.decode(env.action_space.sample())
        if recipe is None or not allowed[recipe.algorithm]:
            continue
        trainer.check(search.task, search.fitted(recipe))
        seen.add(recipe.content_hash)
    assert allowed["distill"] == (base == "messy")


def test_each_algorithm_reads_optional_fields_only() -> None:
    for name, spec in ALGORITHMS.items():
        assert spec.name == name
        assert set(spec.reads) <= set(OPTIONAL_FIELDS)
        assert set(spec.reads) | set(spec.ignored) == set(OPTIONAL_FIELDS)
        assert spec.losses == tuple(dict.fromkeys(spec.losses))
        assert ("loss" in spec.reads) == (len(spec.losses) > 1)
        assert ("num_generations" in spec.reads) == spec.grouped
        assert spec.rows in ("demonstrations", "preferences", "prompts", "text")
    read = {name for spec in ALGORITHMS.values() for name in spec.reads}
    assert read == set(OPTIONAL_FIELDS)


def test_a_recipe_without_its_data_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from posttrain_gym.inner_trainers.recipe import Recipe
    from posttrain_gym.inner_trainers.trl import models

    def refuse(*_: Any) -> Any:
        raise AssertionError("a model was loaded")

    task = TinyTask(write_tiny_checkpoint(tmp_path))
    monkeypatch.setattr(models, "load_model", refuse)
    fresh = TrlTrainer()
    for algorithm, message in {
        "dpo": "mix: source 'good' has no preferences rows, which dpo trains on; sources that have: none.",
        "kto": "mix: source 'good' has no preferences rows, which kto trains on; sources that have: none.",
        "midtrain": "mix: source 'good' has no text rows, which midtrain trains on; sources that have: none.",
        "distill": "algorithm: distill needs a teacher, and task 'tiny' has none; "
        "`InnerTask.teacher_checkpoint` returns its folder.",
    }.items():
        with pytest.raises(ValueError) as caught:
            fresh.check(task, Recipe(algorithm, {"good": 1.0}))
        assert str(caught.value) == message
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"algorithm": "dpo", "loss": "hinge"},
            "loss: dpo has none called 'hinge'. Known: default, ipo, sigmoid, sigmoid+sft.",
        ),
        (
            {"algorithm": "sft", "loss": "ipo"},
            "loss: sft has none called 'ipo'. Known: default, dft, nll.",
        ),
        (
            {"algorithm": "kto", "batch_size": 1},
            "mix: source 'good' has no preferences rows, which kto trains on; sources that have: none.",
        ),
    )
    for changes, message in refusals:
        with pytest.raises(ValueError) as caught:
            fresh.check(task, Recipe(**{"mix": {"good": 1.0}, **changes}))
        assert str(caught.value) == message


def test_kto_needs_two_rows_in_a_batch_and_replay_needs_demonstrations(tmp_path: Path) -> None:
    from posttrain_gym.inner_trainers.recipe import Recipe

    class Pairs(TinyTask):
        def sources(self) -> list[Source]:
            return [
                Source("pairs", {"preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}),
                Source("raw", {"text": [{"text": "abc"}]}),
            ]

    task = Pairs(write_tiny_checkpoint(tmp_path))
    with pytest.raises(ValueError, match=r"^batch_size: kto .* needs at least 2, got 1\.$"):
        check_recipe(task, Recipe("kto", {"pairs": 1.0}, batch_size=1))
    assert check_recipe(task, Recipe("kto", {"pairs": 1.0}, batch_size=2)).name == "kto"
    with pytest.raises(ValueError, match=r"^replay_share: task 'tiny' has no demonstrations to replay; set it to 0\.$"):
        check_recipe(task, Recipe("midtrain", {"raw": 1.0}, replay_share=0.2))
    assert check_recipe(task, Recipe("midtrain", {"raw": 1.0})).name == "midtrain"


def test_masks_have_one_entry_for_each_algorithm(trainer: TrlTrainer) -> None:
    env: Any = gym.make("PostTrain/Recipe-v0", instances=[1], trainer=trainer).unwrapped
    assert env.action_space["algorithm"].n == 1 + len(ALGORITHMS)
    assert env.action_masks().shape == (1 + len(ALGORITHMS) + 3,)
    assert env.action_masks().dtype == np.bool_


def test_the_environment_takes_a_fault_policy_for_the_library_trainer_alone(tmp_path: Path) -> None:
    task = TinyTask(write_tiny_checkpoint(tmp_path))
    settings = {"responses": {"diverged": "retry"}, "max_round_seconds": 600}
    env: Any = gym.make("PostTrain/Recipe-v0", task=task, faults=settings).unwrapped
    policy = env.trainer.fault_policy
    assert (dict(policy.responses), policy.max_round_seconds, policy.max_retries) == ({"diverged": "retry"}, 600, 2)
    assert env.trainer.fingerprint["fault_policy"]["responses"] == {"diverged": "retry"}
    for bad, message in (
        ({"respnses": {}}, r"^fault policy: unknown key 'respnses'\. Did you mean 'responses'\?"),
        ({"responses": {"oom": "retry"}}, r"^responses\.oom: 'retry' does not fit: .*; what fits: stop, rollback\.$"),
        ({"responses": {"divergd": "stop"}}, r"^responses: unknown fault 'divergd'\. Did you mean 'diverged'\?"),
    ):
        with pytest.raises(ValueError, match=message):
            gym.make("PostTrain/Recipe-v0", task=task, faults=bad)
    with pytest.raises(ValueError, match=r"^faults: it configures the TRL trainer; with a trainer of your own"):
        gym.make("PostTrain/Recipe-v0", task=task, trainer=TrlTrainer(), faults={})


def test_a_rescued_round_in_the_environment_is_scored_and_says_so(tmp_path: Path) -> None:
    from posttrain_gym.envs.decision_space import DecisionSpace, Parameter

    task = TinyTask(write_tiny_checkpoint(tmp_path))
    space = DecisionSpace(
        ("sft",),
        ("bad", "good"),
        {"sft": ("bad", "good")},
        parameters={"learning_rate": Parameter(1e-3, 1e4, scale="log")},
        fixed={"steps": 6, "batch_size": 8},
    )
    found = {}
    for response, rate in (("stop", 5.0), ("retry", 5.0), ("rollback", 1.0)):
        faults = {"responses": {"diverged": response}}
        env: Any = gym.make("PostTrain/Recipe-v0", task=task, space=space, faults=faults).unwrapped
        env.reset(seed=0)
        _, reward, _, _, info = env.step(env.encode_recipe(space.recipe("sft", learning_rate=rate, start="base")))
        assert np.isfinite(reward)
        found[response] = info["round"], reward, env.search
    tokens_of_a_step = 8 * 6  # rows of a prompt of four, a letter and the end
    stopped, reward, search = found["stop"]
    assert (stopped["ended"], stopped["failure"]["kind"], stopped["failure"]["step"]) == ("failed", "diverged", 2)
    assert (stopped["score"], stopped["checkpoint"], stopped["charged"]) == (None, None, 2 * tokens_of_a_step)
    assert reward == pytest.approx(-0.1 - 0.1 * stopped["charged"] / 200_000)
    assert search.checkpoints["latest"].id == "base"
    retried, _, search = found["retry"]
    assert (retried["ended"], retried["failure"], retried["steps"]) == ("finished", None, 6)
    assert [(fault["kind"], fault["step"]) for fault in retried["rescued"]] == [("diverged", 2), ("diverged", 4)]
    assert [row["learning_rate"] for row in retried["curves"]] == [5.0, 5.0, 2.5, 2.5, 1.25, 1.25]
    assert retried["charged"] > 6 * tokens_of_a_step  # the steps that were lost, and the evaluation
    assert search.checkpoints["latest"].id == retried["checkpoint"]
    rolled, _, search = found["rollback"]
    assert (rolled["ended"], rolled["failure"], len(rolled["rescued"])) == ("rolled_back", None, 1)
    assert search.checkpoints["latest"].id == rolled["checkpoint"]
    assert rolled["score"] is not None


def test_arguments_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    task = TinyTask(write_tiny_checkpoint(tmp_path))
    wrong: dict[str, Any] = {"space": 3, "faults": "rollback", "evaluator": [1]}
    for name, value in wrong.items():
        settings: dict[str, Any] = {"task": task, name: value}
        with pytest.raises(ValueError, match=rf"^{name}: expected a "):
            gym.make("PostTrain/Recipe-v0", **settings)
