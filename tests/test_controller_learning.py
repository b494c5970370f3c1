"""Cloning a net from logged decisions, and fine-tuning it by policy gradient on rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from posttrain_gym.inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, Adjustment, catalogue_index
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.signals import Signals
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask, ScriptedTrainer
from posttrain_gym.meta_policies.controllers.base import ControlState
from posttrain_gym.meta_policies.controllers.catalogue import make_controller
from posttrain_gym.meta_policies.controllers.cloning import (
    CloningSettings,
    LoggedRound,
    clone,
    from_torch,
    gather,
    limits_of,
    make_module,
)
from posttrain_gym.meta_policies.controllers.control_view import ControlView, Outcome, objective_of
from posttrain_gym.meta_policies.controllers.decision_log import DecisionLog
from posttrain_gym.meta_policies.controllers.drive import drive_round
from posttrain_gym.meta_policies.controllers.features import FEATURE_COUNT, FEATURE_NAMES, Features
from posttrain_gym.meta_policies.controllers.fine_tuning import (
    VALUE_HIDDEN,
    FineTuningSettings,
    ImprovementReturns,
    _model,
    _Round,
    fine_tune,
)
from posttrain_gym.meta_policies.controllers.net import LAYERS, PARAMETER_LIMIT, PolicyNet
from posttrain_gym.meta_policies.controllers.net_controller import NetController
from posttrain_gym.meta_policies.controllers.net_training import read_rounds, train_net
from posttrain_gym.meta_policies.controllers.rules import Rule, RulesController, RuleSet

from .controller_states import RECIPE, SOURCES, legal, random_state, settings, signals, state

# ----------------------------------------------------------------------------------------------------------- cloning


def known_rule(seen: ControlState) -> str:
    """A rule on a z-score, one on a raw value and one on a setting; ``none`` in about four of five states."""
    values, z = seen.signals.values, seen.signals.z
    if z["loss"] > 2.0 and seen.legal[catalogue_index("lr_half")]:
        return "lr_half"
    if (values["kl"] or 0.0) > 1.0 and seen.legal[catalogue_index("kl_up")]:
        return "kl_up"
    return "none"


def synthetic_log(rounds: int, steps: int = 100, seed: int = 0) -> list[LoggedRound]:
    rng = np.random.default_rng(seed)
    logs = []
    for number in range(rounds):
        decisions = []
        for step in range(1, steps + 1):
            seen = random_state(rng, step)
            adjustment = CATALOGUE[catalogue_index(known_rule(seen))].adjustment(SOURCES)
            assert adjustment is not None
            decisions.append((seen, adjustment))
        logs.append(LoggedRound(f"round {number}", RECIPE, SOURCES, tuple(decisions)))
    return logs


def test_cloning_learns_a_known_rule() -> None:
    net, report = clone(gather(synthetic_log(40)), seed=0, settings=CloningSettings(updates=500))
    assert report.accuracy > 0.95 > report.nothing_accuracy
    assert min(report.recall.values()) > 0.85 and set(report.recall) == {"none", "lr_half", "kl_up"}
    assert (report.held_out_rounds, report.held_out_examples, report.train_examples) == (8, 800, 3200)
    assert net.actions == ("none", "lr_half", "kl_up") and net.facts["cloning"] == report.to_dict()
    controller = NetController(net)
    rng, right = np.random.default_rng(99), []
    for number in range(400):
        step = number % 100 + 1
        if step == 1:
            controller.begin(RECIPE, SOURCES)
        seen = random_state(rng, step)
        chosen = controller.decide(seen).chosen.action
        assert chosen is not None and seen.legal[chosen]
        right.append(CATALOGUE_NAMES[chosen] == known_rule(seen))
    assert np.mean(right) > 0.93  # in rounds of its own, where it sees its own adjustments


def test_equal_logs_and_seeds_give_equal_nets_and_leave_random_states_alone() -> None:
    examples = gather(synthetic_log(6, 30))
    quick = CloningSettings(updates=30)
    torch.manual_seed(7)
    before = (torch.get_rng_state().clone(), np.random.get_state()[1].copy(), torch.get_num_threads())  # type: ignore[index]
    first, _ = clone(examples, seed=1, settings=quick)
    with torch.no_grad():  # a caller's grad mode does not disturb it
        again, _ = clone(examples, seed=1, settings=quick)
    other, _ = clone(examples, seed=2, settings=quick)
    assert all((first.weights[name] == again.weights[name]).all() for name in LAYERS)
    assert any((first.weights[name] != other.weights[name]).any() for name in LAYERS)
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[2]
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]


def test_gathering_approximates_what_is_not_in_the_catalogue_and_leaves_out_what_was_not_legal() -> None:
    decisions = (
        (state(1), Adjustment("lr_scale", 0.3)),  # nearest: lr_half
        (state(2), Adjustment("lr_scale", 0.8)),
        (state(3, mask=legal("kl_scale")), Adjustment("kl_scale", 1.5)),
        (state(4), Adjustment()),
    )
    examples = gather([LoggedRound("x", RECIPE, SOURCES, decisions)])
    assert [CATALOGUE_NAMES[a] for a in examples.actions] == ["lr_half", "lr_down", "none"]
    assert (examples.approximated, examples.left_out, len(examples)) == (1, 1, 3)
    assert examples.features.shape == (3, FEATURE_COUNT) and examples.legal.dtype == bool
    with pytest.raises(ValueError, match=r"no decision to learn from \(0 were left out\)"):
        gather([])
    with pytest.raises(ValueError, match="the logs hold 'lr_half', which is not among none, stop"):
        clone(examples, actions=["stop"])
    with pytest.raises(ValueError, match="balance"):
        CloningSettings(balance=2.0)


def test_a_net_does_nothing_sooner_again_or_more_often_than_the_logs() -> None:
    names = ["lr_up", "none", "lr_up", "none", "none", "none", "lr_up", "kl_up"]

    def logged(number: int, count: int) -> LoggedRound:
        done = [CATALOGUE[catalogue_index(name)].adjustment(SOURCES) for name in names[:count]]
        decisions = tuple((state(step), a) for step, a in enumerate(done, start=1) if a is not None)
        return LoggedRound(str(number), RECIPE, SOURCES, decisions)

    examples = gather([logged(0, 8), logged(1, 3)])
    assert limits_of(examples) == {"lr_up": (2, 3), "kl_up": (0, 1)}
    net, _ = clone(examples, settings=CloningSettings(updates=2))
    assert net.limits == limits_of(examples)


def test_few_rounds_are_judged_by_their_ends() -> None:
    examples = gather(synthetic_log(2, 50))
    _, report = clone(examples, settings=CloningSettings(updates=5))
    assert (report.held_out_rounds, report.held_out_examples, report.train_examples) == (0, 20, 80)
    with pytest.raises(ValueError, match="1 decisions are too few"):
        clone(gather([LoggedRound("x", RECIPE, SOURCES, ((state(1), Adjustment()),))]))


# -------------------------------------------------------------------------------------------------------- from logs


def write_log(folder: Path, controller: Any, rounds: int, steps: int = 40) -> None:
    """Drive scripted rounds with a controller and log its decisions."""
    task, trainer = ScriptedTask(3), ScriptedTrainer()
    with DecisionLog(folder) as log:
        for number in range(rounds):
            recipe = Recipe("sft", {"left": 0.5, "right": 0.5}, steps=steps, learning_rate=1e-3)
            session = trainer.begin(task, recipe, trainer.base(task), number)
            drive_round(session, recipe, controller, log=log)
            log.end(session.result()[0])


EARLY = RuleSet(
    "early", (Rule("early", "progress < 0.3 and setting.learning_rate_factor < 3", "lr_up", "x", cooldown=4),)
)


def test_a_net_is_made_from_the_logs_of_driven_rounds(tmp_path: Path) -> None:
    write_log(tmp_path / "runs" / "a", RulesController(EARLY), 4)
    write_log(tmp_path / "runs" / "b", RulesController(EARLY), 2)
    quick = CloningSettings(updates=400, batch_size=64)
    made = train_net([tmp_path / "runs"], tmp_path / "net.safetensors", seed=1, cloning=quick)
    assert (made.rounds, made.cloning.counts) == (6, {"none": 6 * 36, "lr_up": 6 * 3})
    assert made.cloning.accuracy > 0.95 and made.cloning.recall["lr_up"] > 0.6
    again = train_net(
        [tmp_path / "runs" / "a", tmp_path / "runs" / "b"], tmp_path / "again.safetensors", seed=1, cloning=quick
    )
    assert again.path.read_bytes() == made.path.read_bytes()
    assert PolicyNet.load(made.path).facts["rounds"] == 6
    controller = make_controller(f"net:{made.path}")
    task, trainer = ScriptedTask(3), ScriptedTrainer()
    recipe = Recipe("sft", {"left": 0.5, "right": 0.5}, steps=40, learning_rate=1e-3)
    session = trainer.begin(task, recipe, trainer.base(task), 9)
    driven = drive_round(session, recipe, controller)
    assert driven.failure is None and driven.refused == 0
    assert {adjustment.value for _, adjustment in session.result()[0].adjustments} == {1.25}


def test_rules_that_only_said_what_they_would_do_can_be_cloned(tmp_path: Path) -> None:
    write_log(tmp_path, RulesController(EARLY, log_only=True), 1)
    (logged,) = read_rounds([tmp_path])
    assert sum(adjustment == Adjustment("lr_scale", 1.25) for _, adjustment in logged.decisions) == 3
    assert logged.sources == ("left", "right") and logged.recipe.steps == 40


def test_folders_without_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no decisions\.jsonl in it or below"):
        train_net([tmp_path], tmp_path / "net.safetensors")
    (tmp_path / "decisions.jsonl").write_text('{"row": "decision"}\n')
    with pytest.raises(ValueError, match=r"decisions\.jsonl, line 1"):
        train_net([tmp_path], tmp_path / "net.safetensors")


# ------------------------------------------------------------------------------------------------------- fine-tuning


@dataclass(frozen=True)
class Moment:
    """What `ControlView` reads of a pause."""

    step: int
    signals: Signals
    settings: dict[str, float]
    legal: list[bool]


class RateRound(gym.Env[np.ndarray, int]):
    """A round whose reward climbs only while the rate is four times what the recipe asks; it diverges above eight.

    Doubling twice and then doing nothing is right.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(len(CATALOGUE))  # type: ignore[assignment]
    steps = 20

    def __init__(self) -> None:
        self.played: list[tuple[str, bool]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.factor, self.level = 1.0, 0.0
        self.running = SimpleNamespace(recipe=replace(RECIPE, steps=self.steps), sources=SOURCES, moments=[])
        self._pause()
        return np.zeros(1, np.float32), {}

    def _pause(self) -> None:
        step = len(self.running.moments) + 1
        self.level += max(0.0, 1.0 - abs(math.log2(self.factor) - 2.0) / 2.0)
        noise = float(self.np_random.normal()) * 0.05
        mask = legal("stop" if step % 2 else "snapshot")
        now = settings(learning_rate_factor=self.factor, learning_rate=1e-3 * self.factor)
        self.running.moments.append(Moment(step, signals(step, reward=self.level / self.steps + noise), now, mask))

    def action_masks(self) -> np.ndarray:
        return np.array(self.running.moments[-1].legal)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.played.append((CATALOGUE_NAMES[action], bool(self.action_masks()[action])))
        adjustment = CATALOGUE[action].adjustment(SOURCES)
        assert adjustment is not None
        if adjustment.kind == "lr_scale":
            self.factor *= adjustment.number
        failed = self.factor > 8.0
        if adjustment.kind != "stop" and not failed:
            self._pause()
        ended = failed or adjustment.kind == "stop" or len(self.running.moments) >= self.steps
        reward = (-1.0 if failed else self.level / self.steps) if ended else 0.0
        round_facts = {"round": {"failure": {"kind": "diverged"} if failed else None}} if ended else {}
        return np.zeros(1, np.float32), reward, ended, False, round_facts


def untrained(seed: int) -> PolicyNet:
    return from_torch(
        make_module(np.random.default_rng(seed)),
        actions=("none", "stop", "snapshot", "lr_half", "lr_double"),
        hardware=False,
        threshold=0.0,
    )


def played(net: PolicyNet) -> tuple[float, list[str]]:
    """Return the reward of one round under the net, and what it did."""
    env = RateRound()
    env.reset(seed=123)
    controller = NetController(net)
    controller.begin(env.running.recipe, SOURCES)
    while True:
        now = env.running.moments[-1]
        chosen = controller.decide(
            ControlState(now.step, env.steps, now.signals, now.settings, SOURCES, now.legal)
        ).chosen.action
        assert chosen is not None
        _, reward, ended, _, _ = env.step(chosen)
        if ended:
            return reward, [name for name, _ in env.played]


QUICK = FineTuningSettings(rollout=57, batch_size=57, softening=1.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fine_tuning_raises_the_return_and_keeps_masks(seed: int) -> None:
    envs: list[RateRound] = []

    def build() -> RateRound:
        envs.append(RateRound())
        return envs[-1]

    net = untrained(seed)
    many = replace(QUICK, rollout=19, batch_size=76)  # eight rounds in each rollout
    tuned, report = fine_tune(net, [build] * 8, decisions=3040, seed=seed, settings=many)
    before, after = played(net)[0], played(tuned)[0]
    assert after > before + 0.4 and after > 0.6  # doing nothing gives 0, the best 0.9
    moves = [move for env in envs for move in env.played]
    assert len(moves) == report.decisions == 3040
    assert all(was_legal for _, was_legal in moves)
    assert {name for name, _ in moves} <= set(net.actions)
    first, last = report.rollouts[0]["improvement"], report.rollouts[-1]["improvement"]
    assert first is not None and last is not None and last > first + 0.2
    assert tuned.actions == net.actions and tuned.facts["fine_tuning"]["rollouts"] == report.rollouts


def test_fine_tuning_is_repeatable_and_puts_random_states_back() -> None:
    short = replace(QUICK, rollout=19)
    random.seed(5), torch.manual_seed(5), np.random.seed(5)
    states = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy())  # type: ignore[index]
    nets = [fine_tune(untrained(0), [RateRound], decisions=38, seed=seed, settings=short)[0] for seed in (3, 3, 4)]
    assert all((nets[0].weights[name] == nets[1].weights[name]).all() for name in LAYERS)
    assert any((nets[0].weights[name] != nets[2].weights[name]).any() for name in LAYERS)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert (np.random.get_state()[1] == states[2]).all()  # type: ignore[index]


def test_softening_is_undone_in_what_comes_out() -> None:
    net, still = untrained(0), replace(QUICK, rollout=19, learning_rate=1e-12, softening=4.0)
    tuned, _ = fine_tune(net, [RateRound], decisions=19, settings=still)
    assert all(np.allclose(tuned.weights[name], net.weights[name], atol=1e-6) for name in LAYERS)


def test_the_benchmark_reward_can_be_what_is_learned_from() -> None:
    settings = replace(QUICK, rollout=19, objective="benchmark")
    _, report = fine_tune(untrained(0), [RateRound], decisions=57, seed=0, settings=settings)
    assert [row["improvement"] for row in report.rollouts] == [None] * 3
    assert all(row["reward"] is not None for row in report.rollouts)


def test_the_sb3_actor_is_the_net_and_all_of_it_has_at_most_15_000_parameters() -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv

    net = untrained(0)
    vector = DummyVecEnv([lambda: ControlView(RateRound(), actions=net.actions)])
    model = _model(net, vector, 0, replace(QUICK, softening=1.0))
    value_head = FEATURE_COUNT * VALUE_HIDDEN + VALUE_HIDDEN + VALUE_HIDDEN + 1
    assert sum(p.numel() for p in model.policy.parameters()) == net.parameters + value_head <= PARAMETER_LIMIT
    observation = vector.reset()
    assert isinstance(observation, np.ndarray)
    mask = vector.env_method("action_masks")[0]
    with torch.no_grad():
        odds = model.policy.get_distribution(torch.from_numpy(observation), mask).distribution.probs[0]  # type: ignore[union-attr]
    np.testing.assert_allclose(odds.numpy(), net.probabilities(observation[0], mask), atol=1e-6)
    assert (odds.numpy()[~mask] == 0.0).all()


# ---------------------------------------------------------------------------------------------- the real environment


def in_loop(**more: Any) -> gym.Env[Any, Any]:
    recipe = Recipe("sft", {"left": 0.5, "right": 0.5}, steps=20, learning_rate=1e-3)
    return gym.make("PostTrain/InLoop-v0", task=ScriptedFamily(), recipe=recipe, interval=2, **more)


def test_a_view_of_the_in_loop_environment_shows_what_a_controller_sees() -> None:
    view = ControlView(in_loop(), actions=["lr_double", "kl_up"])
    seen, _ = view.reset(seed=0)
    running: Any = view.unwrapped.running  # type: ignore[attr-defined]
    assert view.observation_space.contains(seen)
    assert [CATALOGUE_NAMES[i] for i in np.flatnonzero(view.action_masks())] == ["none", "lr_double"]  # sft has no KL
    loss = running.moments[-1].signals.values["loss"]
    seen, _, ended, _, info = view.step(catalogue_index("lr_double"))
    outcome: Outcome = info["control"]
    assert (outcome.decided_at, outcome.step, outcome.kind, outcome.ended) == (2, 4, "loss", False) and not ended
    assert outcome.before == -loss and outcome.after == -running.moments[-1].signals.values["loss"]

    features = Features()
    features.begin(running.recipe, running.sources)
    for moment in running.moments:
        now = ControlState(moment.step, 20, moment.signals, moment.settings, running.sources, moment.legal)
        expected = features.vector(now).copy()
        if moment.step == 2:
            features.note(Adjustment("lr_scale", 2.0), 2)
    np.testing.assert_array_equal(seen, expected)
    assert seen[FEATURE_NAMES.index("setting.learning_rate_factor")] == pytest.approx(1 / 6)
    view.close()


def test_a_failed_round_counts_the_steps_it_lost() -> None:
    view = ControlView(in_loop(trainer=ScriptedTrainer(faults={0: [1.0, 1.0, 1.0, 1.0, math.nan]})))
    view.reset(seed=0)
    assert not view.step(0)[2]
    _, _, ended, _, info = view.step(0)
    assert ended and info["round"]["failure"]["kind"] == "diverged"
    assert info["control"].ended and info["control"].steps_lost == 15  # it failed in step 5 of 20
    view.close()


def test_a_round_that_fails_before_its_first_step_has_nothing_to_say() -> None:
    view = ControlView(in_loop(trainer=ScriptedTrainer(faults={0: RuntimeError("out of luck")})))
    seen, _ = view.reset(seed=0)
    assert view.observation_space.contains(seen) and np.flatnonzero(view.action_masks()).tolist() == [0]
    _, _, ended, _, info = view.step(0)
    outcome = info["control"]
    assert ended and (outcome.kind, outcome.before, outcome.after, outcome.steps_lost) == (None, None, None, 20)
    running = _Round(outcome.kind)
    running.add(outcome.decided_at, outcome.before)
    running.add(outcome.step, outcome.after)
    assert running.worth(0, 100, 10, 2.0) == 0.0
    view.close()


def test_a_view_can_be_made_again_from_its_spec() -> None:
    view = ControlView(in_loop(), actions=["lr_double"], hardware=True)
    assert view.spec is not None and view.spec.additional_wrappers[-1].kwargs == {
        "actions": ["lr_double"],
        "hardware": True,
        "limits": None,
    }
    again = gym.make(view.spec)
    again.reset(seed=0)
    assert np.flatnonzero(again.get_wrapper_attr("action_masks")()).tolist() == [0, catalogue_index("lr_double")]
    view.close()
    again.close()


def test_fine_tuning_runs_on_the_in_loop_environment() -> None:
    net = untrained(0)
    tuned, report = fine_tune(net, [in_loop], decisions=36, seed=0, settings=replace(QUICK, rollout=18))
    assert report.decisions == 36 and report.rounds >= 2 and len(report.rollouts) == 2
    assert any((tuned.weights[name] != net.weights[name]).any() for name in LAYERS)
    controller = NetController(tuned)
    task, trainer = ScriptedTask(3), ScriptedTrainer()
    recipe = Recipe("sft", {"left": 0.5, "right": 0.5}, steps=20)
    driven = drive_round(trainer.begin(task, recipe, trainer.base(task), 0), recipe, controller)
    assert driven.failure is None and driven.refused == 0


# -------------------------------------------------------------------------------------------------- improvement worth


def test_a_decision_is_worth_the_mean_improvement_over_the_next_steps() -> None:
    running = _Round("reward")
    for step, value in enumerate([1.0, 3.0, 2.0, 4.0, 6.0, 5.0], start=1):
        running.add(step, value)
    assert running.worth(3, horizon=2, before=2, penalty=0.0) == pytest.approx((4 + 6) / 2 - (3 + 2) / 2)
    assert running.worth(3, horizon=100, before=100, penalty=0.0) == pytest.approx(5.0 - 2.0)  # fewer at the end
    assert running.worth(6, horizon=100, before=1, penalty=0.0) == 0.0  # nothing came after
    running.steps_lost, running.last = 4, 6  # a failure kept steps 7 to 10 from being taken
    assert running.worth(5, horizon=3, before=1, penalty=2.0) == pytest.approx((5.0 + 4.0 + 4.0) / 3 - 6.0)
    assert running.worth(5, horizon=100, before=1, penalty=2.0) == pytest.approx((5.0 + 4 * 4.0) / 5 - 6.0)
    assert running.worth(5, horizon=3, before=1, penalty=0.0) == pytest.approx(-1.0)


def test_pauses_count_by_the_steps_they_stand_for() -> None:
    running = _Round("loss")
    for step, value in [(5, -2.0), (10, -1.0), (12, 0.0)]:
        running.add(step, value)
    assert running.worth(5, horizon=100, before=10, penalty=0.0) == pytest.approx((5 * -1.0 + 2 * 0.0) / 7 + 2.0)


def test_rewards_come_before_losses_as_the_objective() -> None:
    assert objective_of(signals(loss=2.0, reward=0.25)) == ("reward", 0.25)
    assert objective_of(signals(loss=2.0)) == ("loss", -2.0)
    assert objective_of(signals()) == (None, None)


def test_worths_are_in_spreads_and_go_into_the_buffer_with_the_value_head_as_baseline() -> None:
    watch = ImprovementReturns(FineTuningSettings(horizon=1, before=1))
    watch.model = SimpleNamespace(get_env=lambda: SimpleNamespace(num_envs=1))  # type: ignore[assignment]
    watch._on_training_start()
    watch._on_rollout_start()
    objective = [0.0, 1.0, 3.0, 3.0, 2.0]  # worths 1, 2, 0, -1: three quarters are at most 1.25 in size
    for step in range(1, 5):
        outcome = Outcome(step, step + 1, "reward", objective[step - 1], objective[step], ended=step == 4)
        watch.locals = {"infos": [{"control": outcome}], "rewards": np.array([0.5])}
        watch._on_step()
    buffer = SimpleNamespace(
        returns=np.zeros((4, 1), np.float32),
        advantages=np.zeros((4, 1), np.float32),
        values=np.full((4, 1), 0.25, np.float32),
        actions=np.array([[0], [9], [0], [0]]),
    )
    watch.locals = {"rollout_buffer": buffer}
    watch._on_rollout_end()
    np.testing.assert_allclose(buffer.returns[:, 0], np.array([1.0, 2.0, 0.0, -1.0]) / 1.25, atol=1e-6)
    np.testing.assert_allclose(buffer.advantages, buffer.returns - 0.25, atol=1e-6)
    assert watch.rounds == 1
    assert watch.rollouts == [{"improvement": pytest.approx(0.4), "reward": 2.0, "nothing": 0.75}]


# --------------------------------------------------------------------------------------------------------- bad input


class OtherEnv(gym.Env[np.ndarray, int]):
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fine_tune(untrained(0), [], decisions=1), "envs: expected at least one"),
        (
            lambda: fine_tune(untrained(0), [OtherEnv], decisions=1),
            r"expected actions Discrete\(37\).*got Discrete\(3\)",
        ),
        (lambda: fine_tune(untrained(0), [RateRound], decisions=0), "decisions"),
        (lambda: FineTuningSettings(objective="benchmrk"), "objective: unknown 'benchmrk'.*benchmark"),
        (lambda: FineTuningSettings(softening=0.5), "softening"),
        (lambda: ControlView(RateRound(), actions=["lr_hlf"]), "unknown adjustment 'lr_hlf'.*lr_half"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
