"""A training loop of one's own runs as rounds do: limits, adjustments, signals, faults, seeds; in every environment."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import posttrain_gym  # noqa: F401 - registers the environments
from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Cost, InnerTrainer, Limit
from posttrain_gym.inner_trainers.loop import LoopStep
from posttrain_gym.inner_trainers.loop_session import LoopSession, all_finite
from posttrain_gym.inner_trainers.recipe import Recipe

from .loop_task import Descent, DescentTask

RECIPE = Recipe("descent", {"left": 0.5, "right": 0.5}, learning_rate=2e-3, steps=20, batch_size=4)


def begin(task: DescentTask, recipe: Recipe = RECIPE, seed: int = 0, limit: Limit | None = None) -> Any:
    trainer = task.trainer()
    session = trainer.begin(task, recipe, trainer.base(task), seed, limit)
    assert isinstance(session, LoopSession)
    return session


def global_states() -> Any:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tolist(), torch.get_rng_state().tolist()


def run(recipe: Recipe = RECIPE, seed: int = 0, limit: Limit | None = None) -> Any:
    session = begin(DescentTask(), recipe, seed, limit)
    session.advance()
    return session.result()


def test_a_round_learns_and_is_told_in_full() -> None:
    task = DescentTask()
    trainer = task.trainer()
    assert isinstance(trainer, InnerTrainer)
    session = begin(task)
    assert (session.step, session.done, session.cost) == (0, False, Cost())
    session.advance(5)
    assert (session.step, session.cost.trained_tokens, session.cost.flops) == (5, 20, 240.0)
    session.advance()
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.supervised_tokens, report.failure) == ("finished", 20, 80, None)
    assert report.curves[0]["loss"] == 2.5
    assert report.curves[-1]["loss"] < 0.1
    assert session.result() == (report, checkpoint)
    assert task.made.loops[0].closed >= 1
    base, after = (trainer.evaluate(task, each, "test")[0] for each in (trainer.base(task), checkpoint))
    assert base.score == pytest.approx((np.exp(-1) + np.exp(-2)) / 2)
    assert after.score > 0.8
    assert (after.items, after.samples, after.k) == (4, 1, 1)


def test_equal_seeds_give_equal_rounds_however_they_are_interleaved() -> None:
    alone = run(seed=3)
    first, second = begin(DescentTask(), seed=3), begin(DescentTask(), seed=4)
    before = global_states()
    while not first.done:
        first.advance(3)
        second.advance(2)
    after = global_states()
    assert before == after
    assert first.result()[1].weights == alone[1].weights
    assert first.result()[1].id == alone[1].id
    assert second.result()[1].weights != alone[1].weights
    assert run(seed=4)[1].id != alone[1].id


@pytest.mark.parametrize(("amount", "steps", "ended"), [(80, 20, "finished"), (79, 19, "budget"), (4, 1, "budget")])
def test_no_step_passes_the_limit(amount: float, steps: int, ended: str) -> None:
    report, checkpoint = run(limit=Limit("train_tokens", amount))
    assert (report.steps, report.ended) == (steps, ended)
    assert report.training_cost.trained_tokens <= amount
    assert checkpoint is not None


def test_a_limit_below_one_step_is_a_labelled_failure() -> None:
    report, checkpoint = run(limit=Limit("train_tokens", 3))
    assert checkpoint is None
    assert (report.failure.kind, report.failure.cause, report.steps) == ("budget_too_small", "resources", 0)


def test_adjustments_reach_the_next_step() -> None:
    task = DescentTask()
    session = begin(task, Recipe("descent", {"left": 0.5, "right": 0.5}, learning_rate=1e-3, steps=10, gamma=0.9))
    session.advance(2)
    for adjustment in (
        Adjustment("lr_scale", 0.5),
        Adjustment("entropy_scale", 2.0),
        Adjustment("gamma_add", 0.05),
        Adjustment("mix_toward", 0.5, "left"),
        Adjustment("batch_scale", 0.5),
    ):
        assert session.refusal(adjustment) is None
        session.apply(adjustment)
    settings = session.settings
    session.advance(1)
    used = task.made.loops[0].used[-1]
    assert used.learning_rate == settings["learning_rate"] == 5e-4
    assert used.recipe.entropy_coef == 0.02
    assert used.recipe.gamma == pytest.approx(0.95)
    assert used.recipe.mix == {"left": 0.75, "right": 0.25}
    assert (settings["mix.left"], settings["batch_size"]) == (0.75, 16.0)
    assert settings["gamma"] == pytest.approx(0.95)
    assert task.made.loops[0].used[1].recipe.gamma == 0.9
    session.advance()
    report, checkpoint = session.result()
    assert [kind.kind for _, kind in report.adjustments][:2] == ["lr_scale", "entropy_scale"]
    plain = begin(DescentTask(), report.recipe)
    plain.advance()
    assert plain.result()[1].id != checkpoint.id


def test_what_cannot_be_applied_is_refused_with_the_reason() -> None:
    session = begin(DescentTask())
    for adjustment, reason in (
        (Adjustment("temperature_scale", 2.0), "descent has nothing that temperature_scale could change"),
        (Adjustment("gamma_add", 0.5), "gamma"),
        (Adjustment("mix_toward", 0.5, "nowhere"), "source 'nowhere' has no rows that descent trains on"),
        (Adjustment("lora_freeze"), "has nothing"),
    ):
        found = session.refusal(adjustment)
        assert found is not None and reason in found
        with pytest.raises(ValueError, match=adjustment.kind):
            session.apply(adjustment)
    session.apply(Adjustment("stop"))
    assert session.done
    assert "the round has ended (stopped)" in str(session.refusal(Adjustment("lr_scale", 2.0)))


def test_rollback_puts_the_snapshot_back() -> None:
    task = DescentTask()
    session = begin(task)
    session.advance(5)
    session.apply(Adjustment("snapshot"))
    kept = task.made.loops[0].weights()
    session.advance(5)
    assert task.made.loops[0].weights() != kept
    session.apply(Adjustment("rollback"))
    assert task.made.loops[0].weights() == kept


@pytest.mark.parametrize(
    ("does", "kind"),
    [
        (lambda: LoopStep(float("nan")), "diverged"),
        (lambda: LoopStep(1e6), "diverged"),
        (lambda: LoopStep(0.1, {"grad_norm": float("inf")}), "diverged"),
        (lambda: 1 / 0, "trainer_raised"),
        (lambda: (_ for _ in ()).throw(MemoryError()), "oom"),
    ],
)
def test_faults_end_the_round_with_their_label(monkeypatch: pytest.MonkeyPatch, does: Any, kind: str) -> None:
    plain = Descent.step

    def step(self: Descent, settings: Any) -> LoopStep:
        return does() if len(self.used) == 3 else plain(self, settings)

    monkeypatch.setattr(Descent, "step", step)
    if kind == "oom":

        def raising(self: Descent, settings: Any) -> LoopStep:
            if len(self.used) == 3:
                raise MemoryError
            return plain(self, settings)

        monkeypatch.setattr(Descent, "step", raising)
    report, checkpoint = run()
    assert checkpoint is None
    assert report.ended == "failed"
    assert (report.failure.kind, report.failure.step) == (kind, 4)


def test_ruined_weights_make_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Descent, "weights", lambda self: {"left": float("nan")})
    report, checkpoint = run()
    assert checkpoint is None
    assert report.failure.kind == "diverged"
    assert all_finite({"a": [torch.ones(2), np.zeros(2)], "b": 3})
    assert not all_finite([np.array([np.inf])])


def test_recipes_that_cannot_run_are_refused() -> None:
    task = DescentTask()
    with pytest.raises(ValueError, match="unknown 'sft'"):
        task.trainer().check(task, Recipe("sft", {"left": 1.0}))
    with pytest.raises(ValueError, match=r"no source 'lef'.*Did you mean 'left'"):
        task.trainer().check(task, Recipe("descent", {"lef": 1.0}))
    assert "entropy_coef" not in task.trainer().ignored_settings("descent")
    assert "kl_coef" in task.trainer().ignored_settings("descent")


def test_scores_outside_their_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = DescentTask()
    monkeypatch.setattr(type(task.made), "score", lambda self, task, weights, items: np.full((len(items), 1), 1.5))
    with pytest.raises(ValueError, match=r"scores in \[0, 1\], got 1.5"):
        task.made.evaluate(task, task.made.base(task), "test")
    monkeypatch.setattr(type(task.made), "score", lambda self, task, weights, items: np.ones(3))
    with pytest.raises(ValueError, match="expected an array"):
        task.made.evaluate(task, task.made.base(task), "test")


@pytest.mark.parametrize("name", ["Recipe-v0", "InLoop-v0", "Full-v0"])
def test_every_environment_takes_it(name: str) -> None:
    recipe: Any = {"recipe": RECIPE.to_dict()} if name == "InLoop-v0" else {}
    env = gym.make(f"PostTrain/{name}", task=DescentTask(), budget={"limit": 5000, "max_rounds": 4}, **recipe)
    check_env(env.unwrapped, skip_render_check=True)
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    steps = 0
    ended = False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert np.isfinite(float(reward))
        steps, ended = steps + 1, terminated or truncated
    assert steps >= 1
