"""`PostTrain/InLoop-v0`: what a step does, costs and shows; masks, shaping, refusals, repeatability, bad numbers."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from posttrain_gym.envs.control import CONTROL, OPTIONAL, SIGNAL_COLUMNS, control_row, signal_row
from posttrain_gym.envs.in_loop import InLoopEnv
from posttrain_gym.envs.observation import RunningInputs, observe_running
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.envs.running import Moment
from posttrain_gym.experiments.doc_tables import in_loop_observation_table
from posttrain_gym.inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, catalogue_index
from posttrain_gym.inner_trainers.base import Cost, InnerTrainer
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import SIGNALS, Signals
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTrainer
from tests.adjustable_env import RECIPE, adjust, in_loop, play, random_actions

NAMES = [column.name for column in CONTROL]


def control(observation: dict[str, np.ndarray], name: str) -> float:
    return float(observation["control"][NAMES.index(name)])


# Gymnasium and Stable-Baselines3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shaping", [False, True])
@pytest.mark.parametrize(("name", "settings"), [("InLoop", {"recipe": RECIPE}), ("Full", {})])
def test_both_checks_pass(name: str, settings: dict[str, Any], shaping: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SB3 has no Dict actions and would flatten `history`
        env: Any = gym.make(
            f"PostTrain/{name}-v0", task=ScriptedFamily(), shaping=shaping, render_mode="ansi", **settings
        )
        check_env(env.unwrapped)
        check_env_sb3(env)


def test_the_spec_rebuilds_pickles_and_copies_the_environment() -> None:
    env = gym.make("PostTrain/InLoop-v0", task=ScriptedFamily(), recipe=Recipe.from_dict(RECIPE), interval=3)
    assert env.spec is not None
    for spec in (env.spec, copy.deepcopy(env.spec), pickle.loads(pickle.dumps(env.spec))):
        again: Any = gym.make(spec).unwrapped
        assert isinstance(again, InLoopEnv)
        assert again.recipe == Recipe.from_dict(RECIPE)
        assert again.reset(seed=0)[1]["running"]["step"] == 3


@pytest.mark.parametrize(
    ("settings", "clocked"),
    [({}, False), ({"hardware_signals": True}, True), ({"budget": {"limit": 500, "unit": "device_seconds"}}, True)],
)
def test_what_a_clock_decides_makes_the_spec_nondeterministic(settings: dict[str, Any], clocked: bool) -> None:
    env = gym.make("PostTrain/InLoop-v0", task=ScriptedFamily(), recipe=RECIPE, **settings)
    assert env.spec is not None and env.spec.nondeterministic is clocked


# A round --------------------------------------------------------------------------------------------------------------


def test_reset_takes_the_first_steps_and_the_last_step_settles_the_round() -> None:
    env = in_loop(interval=5)
    observation, info = env.reset(seed=0)
    assert (info["running"]["step"], observation["phase"][0], info["ended"]) == (5, 1.0, None)
    assert control(observation, "progress") == np.float32(0.25)
    left = 200_000 - 100 - 5 * 160  # the base evaluation, and five steps of 16 sequences
    assert observation["budget"][0] == np.float32(left / 200_000)
    steps = adjust(env, "none", "none", "none")
    assert [step[4].get("running", {}).get("step") for step in steps] == [10, 15, None]
    assert [step[2] for step in steps] == [False, False, True]
    assert [step[1] for step in steps[:2]] == [0.0, 0.0]
    last = steps[-1]
    assert (last[4]["ended"], last[0]["phase"][0], last[0]["signals"].any()) == ("rounds", 0.0, False)
    assert (last[4]["round"]["steps"], last[4]["round"]["charged"]) == (20, 3300.0)
    assert env.search.ledger.entries == [("evaluation of the base checkpoint", 100.0), ("round 1", 3300.0)]
    with pytest.raises(ValueError, match=r"the episode is over \(rounds\); call reset\(\)"):
        env.step(0)


def test_without_adjustments_it_is_the_round_and_the_reward_of_the_recipe_environment() -> None:
    for seed in range(3):
        env = in_loop(interval=7)
        env.reset(seed=seed)
        adjusted = adjust(env, "none", "none")[-1]
        whole = PostTrainingEnv(ScriptedFamily(), space=env.space, budget={"max_rounds": 1, "patience": 1})
        whole.reset(seed=seed)
        expected = whole.step(whole.encode_recipe(env.recipe))
        assert adjusted[1:4] == expected[1:4]
        assert {k: v for k, v in adjusted[4]["round"].items() if k != "adjustments"} == expected[4]["round"]
        assert env.search.outcomes == whole.search.outcomes
        for name in ("budget", "history", "last", "scores", "task"):
            assert np.array_equal(adjusted[0][name], expected[0][name]), name


def test_an_adjustment_reaches_the_next_steps_and_the_record() -> None:
    env = in_loop(interval=5)
    env.reset(seed=0)
    observation = adjust(env, "lr_half")[0][0]
    assert control(observation, "learning_rate_factor") == pytest.approx(math.log10(0.5) / 3)
    assert control(observation, "learning_rate") == pytest.approx((math.log10(5e-4) + 4) / 4)
    info = adjust(env, "none", "lr_double")[-1][4]
    rates = [row["learning_rate"] for row in info["round"]["curves"]]
    assert rates == [1e-3] * 5 + [5e-4] * 10 + [1e-3] * 5
    assert info["round"]["adjustments"] == [[5, "lr_scale 0.5"], [15, "lr_scale 2"]]
    assert info["adjustment"] == "lr_double"


def test_every_setting_in_force_is_seen_relative_to_the_recipe() -> None:
    env = in_loop(recipe={**RECIPE, "algorithm": "grpo", "num_generations": 4, "kl_coef": 0.1}, interval=2)
    first, _ = env.reset(seed=0)
    assert [control(first, name) for name in ("batch_size", "temperature", "kl_coef", "mix_shift_1")] == [0.0] * 4
    assert [control(first, f"has_{name}") for name in OPTIONAL] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    names = ("batch_up", "temperature_down", "kl_up", "grad_clip_up", "generations_up", "mix_toward_2")
    observation = adjust(env, *names)[-1][0]
    expected = {
        "batch_size": math.log10(20 / 16),
        "temperature": math.log10(0.9),
        "kl_coef": math.log10((0.15 + 1e-4) / (0.1 + 1e-4)) / 2,
        "max_grad_norm": math.log10(2) / 2,
        "num_generations": math.log10(5 / 4),
        "mix_2": 0.6,
        "mix_shift_2": 0.1,
        "mix_shift_1": -0.1,
        "asked_steps": math.log10(20) / 5,
        "asked_batch_size": math.log10(16) / 5,
    }
    assert {name: control(observation, name) for name in expected} == pytest.approx(expected, abs=1e-4)


def test_stop_ends_the_round_and_its_checkpoint_is_scored() -> None:
    env = in_loop(interval=5)
    env.reset(seed=0)
    _, _, terminated, _, info = adjust(env, "stop")[0]
    assert terminated
    assert (info["round"]["ended"], info["round"]["steps"], info["round"]["charged"]) == ("stopped", 5, 900.0)
    assert info["round"]["score"] is not None


def test_an_adjusted_round_makes_another_checkpoint_than_the_plain_one() -> None:
    made = {}
    for name in ("none", "lr_up", "mix_toward_1", "batch_up", "snapshot"):
        env = in_loop(interval=10)
        env.reset(seed=0)
        made[name] = adjust(env, name)[0][4]["round"]["checkpoint"]
    assert made["snapshot"] == made["none"]  # it changes no weight
    assert len(set(made.values())) == 4


def test_the_signals_are_z_scores_with_presence_flags() -> None:
    env = in_loop(interval=5)
    observation, info = env.reset(seed=0)
    shown = dict(zip(SIGNAL_COLUMNS, observation["signals"].tolist(), strict=True))
    running = env.running
    assert running is not None
    moment = running.moments[-1]
    for name, kind in SIGNALS.items():
        value = None if kind.clocked else moment.signals.values[name]
        assert shown[f"has_{name}"] == float(value is not None), name
        assert shown[name] == (0.0 if value is None else np.float32(moment.signals.z[name] / 5)), name
    assert info["running"]["signals"]["loss"] == 0.2  # the fifth step's
    assert shown["has_loss"] == 1.0 and shown["has_reward"] == 0.0 and shown["loss"] < 0
    assert not any(SIGNALS[name].clocked for name in info["running"]["signals"])


def test_clocked_signals_are_shown_only_where_they_are_asked_for() -> None:
    values = {**dict.fromkeys(SIGNALS), "step_seconds": 0.5, "loss": 1.0}
    z = {**dict.fromkeys(SIGNALS, 0.0), "step_seconds": 2.5, "loss": -5.0}
    moment = Moment(1, False, Signals(1, values, z), {}, (None,) * 37, Cost())
    columns = SIGNAL_COLUMNS.index("step_seconds"), SIGNAL_COLUMNS.index("has_step_seconds")
    assert [signal_row(moment, clocked=False)[c] for c in columns] == [0.0, 0.0]
    assert [signal_row(moment, clocked=True)[c] for c in columns] == [0.5, 1.0]
    assert signal_row(moment, clocked=False)[SIGNAL_COLUMNS.index("loss")] == -1.0
    assert not signal_row(None, clocked=True).any()


def test_the_table_of_the_documentation_is_the_layout() -> None:
    env = in_loop()
    pattern = r"^\| `(\w+)` \| (\S+)(?: to (\S+))? \| `(\w+)` \| \[(\S+), 1\]"
    rows = re.findall(pattern, in_loop_observation_table(), re.MULTILINE)
    assert len(rows) == in_loop_observation_table().count("\n") - 1
    sizes = {"R-1": env.space.width - 1}
    spaces: Any = env.observation_space
    indices: dict[str, list[int]] = {}
    for key, first, last, name, low in rows:
        covered = range(int(first), sizes.get(last, int(last) if last.isdigit() else int(first)) + 1)
        indices.setdefault(key, []).extend(covered)
        bound = -1.0 if name.startswith("has_SIGNAL") else float(low)
        assert (spaces[key].low[list(covered)] == bound).all(), (key, name)
    assert {key: len(found) for key, found in indices.items()} == {k: spaces[k].shape[0] for k in indices}
    assert all(found == list(range(len(found))) for found in indices.values())
    recipe_env: Any = PostTrainingEnv(ScriptedFamily()).observation_space
    assert set(spaces) == set(recipe_env) | {"control", "recipe"}


# Costs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100 + 100 + 160 * n + extra for n in (1, 3, 7) for extra in (0, 159)])
def test_the_budget_is_a_hard_limit(limit: int) -> None:
    env = in_loop(interval=2, budget=limit)
    env.reset(seed=0)
    trace = play(env, [0] * 20)
    info = json.loads(trace[-1][3])
    steps = (limit - 200) // 160
    assert (info["round"]["ended"], info["round"]["steps"], env.search.ledger.spent) == (
        "budget",
        steps,
        200 + 160 * steps,
    )
    assert env.search.ledger.spent <= limit


@pytest.mark.parametrize("limit", range(300, 1000, 37))
def test_a_larger_batch_and_quick_evaluations_never_pass_the_limit(limit: int) -> None:
    env = in_loop(interval=1, budget=limit, shaping=True)
    play(env, [catalogue_index("batch_up")] * 40)
    assert env.search.ledger.spent <= limit


def test_a_round_that_ended_in_its_first_steps_is_settled_by_the_first_step() -> None:
    env = in_loop(interval=5, budget=100 + 100 + 2 * 160)
    observation, info = env.reset(seed=0)
    assert env.action_masks().tolist() == [name == "none" for name in CATALOGUE_NAMES]
    assert (info["running"]["step"], info["illegal"]) == (2, False)
    assert env.observation_space.contains(observation)
    _, _, terminated, _, info = adjust(env, "none")[0]
    assert terminated and (info["round"]["ended"], info["round"]["steps"]) == ("budget", 2)


def test_a_budget_that_pays_no_step_is_a_failed_round_that_costs_nothing() -> None:
    env = in_loop(budget=300)
    _, info = env.reset(seed=0)
    assert info["running"]["step"] == 0
    _, reward, terminated, _, info = adjust(env, "none")[0]
    assert (reward, terminated, info["round"]["failure"]["kind"]) == (-0.1, True, "unaffordable")
    assert (env.search.ledger.spent, env.trainer.launched) == (100.0, 0)  # type: ignore[attr-defined]


# Shaping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_shaping_adds_up_to_minus_the_first_potential(discount: float) -> None:
    choices = ["lr_half", "none", "lr_double", "mix_toward_1", "none", "none"]
    plain, shaped = in_loop(interval=3), in_loop(interval=3, shaping=True, discount=discount)
    plain.reset(seed=4)
    _, first = shaped.reset(seed=4)
    base = first["base_score"]
    potential = (first["running"]["quick_score"] - base) / (1 - base)
    assert potential > 0
    without, withal = adjust(plain, *choices), adjust(shaped, *choices)
    assert [step[2] for step in withal] == [step[2] for step in without] == [False] * 5 + [True]
    quick = 10.0  # two items of 15 generated tokens
    price = 0.1 * 6 * quick / 200_000  # at reset, and at the five pauses that follow
    rewards = [s[1] - w[1] + (price if s[2] else 0.0) for s, w in zip(withal, without, strict=True)]
    assert math.fsum(discount**t * reward for t, reward in enumerate(rewards)) == pytest.approx(-potential, abs=1e-12)
    assert [entry for entry in shaped.search.ledger.entries if "quick" in entry[0]] == [
        ("quick evaluation in round 1", quick)
    ] * 6
    assert shaped.search.ledger.spent == plain.search.ledger.spent + 6 * quick
    assert withal[-1][4]["round"]["checkpoint"] == without[-1][4]["round"]["checkpoint"]


@pytest.mark.parametrize(("left", "paid", "steps"), [(100, 1, 6), (79, 0, 7), (160, 2, 8)])
def test_quick_evaluations_get_half_of_what_is_left_and_then_repeat_their_score(
    left: int, paid: int, steps: int
) -> None:
    class Dear(ScriptedTrainer):
        def quick_cost_bound(self, task: Any, items: int) -> Cost:
            return super().quick_cost_bound(task, items).times(4)

    recipe = {**RECIPE, "batch_size": 1}  # a step costs 10, a quick evaluation 40
    env = in_loop(interval=1, budget=100 + 100 + left, shaping=True, discount=1.0, recipe=recipe, trainer=Dear())
    _, info = env.reset(seed=0)
    scores = []
    while "running" in info:
        scores.append(info["running"]["quick_score"])
        info = env.step(0)[4]
    assert (info["round"]["ended"], info["round"]["steps"], len(scores)) == ("budget", steps, steps - 1)
    assert len(set(scores)) == max(1, paid) and (scores[0] is None) == (paid == 0)
    assert [entry[1] for entry in env.search.ledger.entries if "quick" in entry[0]] == [40.0] * paid
    assert env.search.ledger.spent == 200 + 40 * paid + 10 * steps <= 200 + left


def test_shaping_needs_a_trainer_that_can_score_a_parked_round() -> None:
    class Without(ScriptedTrainer):
        quick_score = None  # type: ignore[assignment]

        @property
        def quick_cost_bound(self) -> Any:
            raise AttributeError

    assert isinstance(Without(), InnerTrainer)
    in_loop(trainer=Without())
    with pytest.raises(ValueError, match=r"shaping: Without cannot score .* `quick_score`.*or leave shaping False"):
        in_loop(trainer=Without(), shaping=True)


def test_a_quick_evaluation_that_raises_repeats_the_score_and_is_flagged_once() -> None:
    class Failing(ScriptedTrainer):
        asked = 0

        def quick_score(self, task: Any, session: Any, items: int) -> tuple[float, Cost]:
            self.asked += 1
            if self.asked in (2, 3):
                raise RuntimeError("no")
            return super().quick_score(task, session, items)

    env = in_loop(interval=4, shaping=True, discount=1.0, trainer=Failing())
    _, info = env.reset(seed=0)
    first = info["running"]["quick_score"]
    steps = adjust(env, "none", "none")
    assert [(step[1], step[4]["running"]["quick_score"]) for step in steps] == [(0.0, first), (0.0, first)]
    flags = adjust(env, "none", "none")[-1][4]["round"]["flags"]
    assert sum("a quick evaluation raised RuntimeError" in flag for flag in flags) == 1


# Masks and legality ---------------------------------------------------------------------------------------------------


def test_masks_are_what_the_session_refuses() -> None:
    """Case C03: at least one choice is always legal."""
    env = in_loop(recipe={**RECIPE, "lora_rank": 4})
    assert env.action_masks().all()
    env.reset(seed=0)
    running = env.running
    assert running is not None and running.session is not None
    for index, entry in enumerate(CATALOGUE):
        adjustment = entry.adjustment(running.sources)
        allowed = adjustment is not None and running.session.refusal(adjustment) is None
        assert env.action_masks()[index] == allowed, entry.name
    legal = {name for name, allowed in zip(CATALOGUE_NAMES, env.action_masks(), strict=True) if allowed}
    assert {"none", "stop", "lr_up", "mix_toward_2", "lora_freeze"} <= legal
    assert not {"kl_up", "temperature_up", "gamma_up", "mix_toward_3", "lora_unfreeze"} & legal
    adjust(env, "stop")
    assert env.action_masks().tolist() == [name == "none" for name in CATALOGUE_NAMES]


@pytest.mark.parametrize(
    ("name", "setting", "most"),
    [
        ("grad_clip_up", "max_grad_norm", 2.0**19),
        ("temperature_up", "temperature", 1.1**24),
        ("kl_up", "kl_coef", 0.01 * 1.5**22),
        ("batch_down", "batch_size", 4.0),
    ],
)
def test_a_setting_that_would_leave_its_range_is_masked(name: str, setting: str, most: float) -> None:
    recipe = {**RECIPE, "algorithm": "grpo", "num_generations": 4, "steps": 60}
    env = in_loop(recipe=recipe, interval=1, budget=1e9)
    env.reset(seed=0)
    for _ in range(58):
        info = env.step(catalogue_index(name))[4]
    assert info["running"]["settings"][setting] == pytest.approx(most)
    assert not env.action_masks()[catalogue_index(name)]
    assert info["illegal_count"] > 30


def test_an_illegal_adjustment_becomes_none_flagged_and_counted() -> None:
    env, other = in_loop(interval=5), in_loop(interval=5)
    env.reset(seed=0)
    other.reset(seed=0)
    for number, name in enumerate(("kl_up", "mix_toward_4", "lora_freeze"), start=1):
        (got,), (expected,) = adjust(env, name), adjust(other, "none")
        assert (got[4]["illegal"], got[4]["illegal_count"], got[4]["adjustment"]) == (True, number, "none")
        assert expected[4]["illegal"] is False
        assert got[1] == expected[1]
        if not got[2]:
            assert control(got[0], "was_refused") == 1.0
            same = [i for i, column in enumerate(NAMES) if column != "was_refused"]
            assert np.array_equal(got[0]["control"][same], expected[0]["control"][same])
    assert env.search.outcomes == other.search.outcomes


def test_an_illegal_adjustment_is_refused_before_anything_happens_where_that_is_asked_for() -> None:
    env = in_loop(interval=5, illegal="raise")
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action: 'kl_up' cannot be applied now \(sft samples nothing"):
        adjust(env, "kl_up")
    assert env.running is not None and env.running.moments[-1].step == 5
    assert adjust(env, "none")[0][4]["illegal"] is False


@pytest.mark.parametrize("action", [37, -1, 1.0, None, "none", np.array([1, 2]), True])
def test_actions_outside_the_space_are_refused_whatever_illegal_says(action: Any) -> None:
    env = in_loop()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action: expected an integer"):
        env.step(action)
    assert env.running is not None and env.running.moments[-1].step == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": None}, "recipe: expected a Recipe, a mapping of its fields or the name of a file, got None"),
        ({"recipe": {"algorithm": "sft"}}, "recipe: key 'mix' is missing"),
        ({"recipe": {**RECIPE, "algorithm": "sff"}}, "algorithm: unknown 'sff'. Did you mean 'sft'"),
        ({"recipe": {**RECIPE, "mix": {"lef": 1.0}}}, "mix: no source 'lef'. Did you mean 'left'"),
        ({"recipe": "no/such.yaml"}, "recipe no/such.yaml: no such file"),
        ({"interval": 0}, "interval: expected an integer"),
        ({"illegal": "ignore"}, "illegal: unknown 'ignore'"),
        ({"shaping": 1}, "shaping: expected True or False, got 1"),
        ({"hardware_signals": "yes"}, "hardware_signals: expected True or False"),
        ({"discount": 1.5}, "discount: expected a number"),
        ({"quick_items": 0}, "quick_items: expected an integer"),
        ({"space": None}, "space: it follows from the recipe"),
        ({"intervall": 3}, "unknown argument 'intervall'"),
        ({"prise": 0.2}, "unknown argument 'prise'. Did you mean 'price'"),
    ],
)
def test_bad_settings_are_refused_when_the_environment_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_loop(**settings)


def test_a_recipe_comes_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("algorithm: sft\nmix: {left: 1.0}\nsteps: 7\n")
    env = in_loop(recipe=str(tmp_path / "recipe.yaml"), interval=3)
    assert env.recipe == Recipe("sft", {"left": 1.0}, steps=7)
    env.reset(seed=0)
    assert adjust(env, "none", "none")[-1][2]


# Repeatability --------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_episodes_in_one_process_and_in_two() -> None:
    """Case C09."""
    actions = random_actions(12, 7)
    env = in_loop(interval=2, shaping=True)
    first, second = play(env, actions, 7), play(env, actions, 7)
    assert first == second == play(in_loop(interval=2, shaping=True), actions, 7)
    assert play(env, actions, 8) != first
    code = (
        "import zlib\nfrom tests.adjustable_env import in_loop, play\n"
        f"print(zlib.crc32(repr(play(in_loop(interval=2, shaping=True), {actions}, 7)).encode()))"
    )
    root = Path(__file__).parents[1]
    told = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(told.stdout) == zlib.crc32(repr(first).encode())


def test_the_action_space_is_seeded_by_reset() -> None:
    env = in_loop()
    samples = []
    for _ in range(2):
        env.reset(seed=3)
        samples.append([int(env.action_space.sample()) for _ in range(8)])
    assert samples[0] == samples[1]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_ignored_step_of_a_vector_launches_nothing(mode: AutoresetMode) -> None:
    """Case C07: an episode of this recipe is one round and three steps."""
    trainers = [ScriptedTrainer(), ScriptedTrainer()]
    vector = SyncVectorEnv(
        [lambda t=t: in_loop(trainer=t, interval=5) for t in trainers],  # type: ignore[misc]
        autoreset_mode=mode,
    )
    vector.reset(seed=7)
    ends = 0
    for _ in range(12):
        ends += int(vector.step(np.zeros(2, np.int64))[2].sum())
    # 3 steps an episode; in next-step mode a fourth that only resets
    rounds = {AutoresetMode.NEXT_STEP: (6, 4), AutoresetMode.SAME_STEP: (8, 5)}[mode]
    assert ends == rounds[0]
    assert [trainer.launched for trainer in trainers] == [rounds[1]] * 2
    vector.close()


def test_close_and_reset_end_the_running_round() -> None:
    env = in_loop(interval=5)
    env.reset(seed=0)
    first = env.running
    assert first is not None and first.session is not None and not first.session.done
    env.reset(seed=1)
    assert first.session.done
    second = env.running
    assert second is not None and second.session is not None and not second.session.done
    assert env.search.rounds == 0
    with pytest.raises(ValueError, match="options"):
        env.reset(options={"x": 1})
    assert env.running is second and not second.session.done  # a failed reset leaves it alone
    env.close()
    assert second.session.done
    env.close()


def test_render_says_where_the_round_is() -> None:
    env = in_loop(interval=5, render_mode="ansi")
    env.reset(seed=0)
    assert (env.render() or "").splitlines()[1] == "round 1: step 5/20, loss 0.2, lr 0.001"
    adjust(env, "none", "none", "none")
    assert "round 1: sft from best, lr 0.001, 20 steps" in (env.render() or "")


# Numbers that are none ------------------------------------------------------------------------------------------------


def test_broken_signals_and_settings_are_shown_as_zero_with_a_flag() -> None:
    """Case C05."""
    recipe = Recipe.from_dict(RECIPE)
    for broken, settings in (
        (("loss",), {"learning_rate": 1e-3}),
        ((), {"learning_rate": math.nan}),
        ((), {"learning_rate": 1e-3, "kl_coef": math.inf}),
        ((), {"learning_rate": 1e9, "batch_size": 1e12, "mix.left": -math.inf}),
    ):
        values = {**dict.fromkeys(SIGNALS), "grad_norm": 1e300}
        z = {**dict.fromkeys(SIGNALS, 0.0), "grad_norm": 5.0}
        moment = Moment(3, False, Signals(3, values, z, broken), settings, (None,) * 37, Cost())
        inputs = RunningInputs(
            phase=np.ones((1, 1)),
            signals=signal_row(moment, clocked=True)[None],
            control=control_row(moment, recipe, ("left", "right"), refused=False)[None],
            recipe=np.array([[math.nan, 2.0]]),
        )
        blocks = observe_running(inputs)
        for name, block in blocks.items():
            assert block.dtype == np.float32 and np.isfinite(block).all() and np.abs(block).max() <= 1, name
        assert blocks["control"][0, NAMES.index("was_not_finite")] == 1.0
        assert in_loop().observation_space["control"].contains(blocks["control"][0])  # type: ignore[index]


@pytest.mark.parametrize("losses", [[1, 1, math.nan], [1, 1, 1, 1, math.inf], [1] * 6 + [1e9] * 9])
def test_every_observation_of_a_round_that_breaks_is_inside_the_space(losses: list[float]) -> None:
    """Case C05."""
    env = in_loop(interval=1, trainer=ScriptedTrainer(faults=dict.fromkeys(range(50), losses)))
    observation, _ = env.reset(seed=0)
    for _ in range(50):
        assert env.observation_space.contains(observation)
        assert all(np.isfinite(values).all() and values.dtype == np.float32 for values in observation.values())
        observation, reward, terminated, _, info = env.step(0)
        assert math.isfinite(reward)
        if terminated:
            assert env.observation_space.contains(observation)
            broken = not math.isfinite(losses[-1])
            assert (observation["last"][-1] == 1.0) == broken
            assert (info["round"]["failure"] is not None) == broken
            observation, _ = env.reset()
