"""The sparse-reward example: marks and starts, PPO as a round, adjustments that reach it, the figures of its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import posttrain_gym  # noqa: F401 - registers the environments
from posttrain_gym.experiments import make_sparse_control as make
from posttrain_gym.experiments import sparse_control_page as page
from posttrain_gym.experiments.examples.sparse_agent import SparseAgent, iteration_cost
from posttrain_gym.experiments.examples.sparse_control import SparseControl, SparseControlFamily, SparseMountainCar
from posttrain_gym.experiments.examples.sparse_locomotion import ControlProblem, SparseMarks, shuffled_starts
from posttrain_gym.experiments.examples.sparse_trainer import SparseTrainer
from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Limit
from posttrain_gym.inner_trainers.conformance import TaskConformance, TrainerConformance
from posttrain_gym.inner_trainers.recipe import Recipe

RESULTS = Path(make.__file__).resolve().parent / "results"
SMALL = {"num_iterations": 2, "batch_size": 64, "steps": 4}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe(task: SparseControl, **changes: Any) -> Recipe:
    return Recipe.from_dict({**task.recipe_defaults(), **make.ASKED, **SMALL, **changes})


class Track(gymnasium.Env[Any, Any]):
    """Stands where it is told to be, step by step; ends where it is told None."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, places: list[float | None]) -> None:
        self.places, self.seeds, self.step_number, self.place = places, list[int | None](), 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.step_number = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        place = self.places[self.step_number]
        self.step_number += 1
        self.place = self.place if place is None else place
        return np.zeros(1), 77.0, place is None, False, {}


def walked(places: list[float | None], max_steps: int = 10) -> list[tuple[float, bool, bool, int]]:
    problem = ControlProblem("none", lambda environment: environment.place, (1.0, 2.0, 3.0), max_steps, "metres")
    environment = SparseMarks(Track(places), problem)
    environment.reset()
    steps = []
    for _ in places:
        _, reward, terminated, truncated, info = environment.step(0)
        steps.append((float(reward), terminated, truncated, info["marks"]))
        if terminated or truncated:
            break
    return steps


def test_a_mark_is_rewarded_once_and_nothing_else_is() -> None:
    assert walked([0.5, 1.0, 0.2, 1.5, 2.5, 3.0, 9.0]) == [
        (0.0, False, False, 0),
        (1.0, False, False, 1),
        (0.0, False, False, 1),
        (0.0, False, False, 1),
        (1.0, False, False, 2),
        (1.0, True, False, 3),
    ]
    assert walked([2.7]) == [(2.0, False, False, 2)]  # a leap over two marks
    assert walked([1.0, None]) == [(1.0, False, False, 1), (0.0, True, False, 1)]  # the body fell
    assert walked([0.0, 0.0, 1.0], max_steps=3)[-1] == (1.0, False, True, 1)
    assert walked([0.0, 0.0, 3.0], max_steps=3)[-1] == (3.0, True, False, 3)  # reached, so not cut short


def test_marks_must_rise() -> None:
    for marks in ((), (1.0, 1.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="rising numbers"):
            ControlProblem("none", lambda environment: 0.0, marks, 5, "metres")


def test_starts_come_once_each_and_replace_the_seed_of_vector_environments() -> None:
    order = shuffled_starts([5, 6, 7], seed=1)
    drawn = [next(order) for _ in range(9)]
    assert [sorted(drawn[i : i + 3]) for i in (0, 3, 6)] == [[5, 6, 7]] * 3
    again = shuffled_starts([5, 6, 7], seed=1)
    assert drawn == [next(again) for _ in range(9)]
    track = Track([0.0])
    environment = SparseMarks(track, ControlProblem("none", lambda e: 0.0, (1.0,), 5, "metres"))
    environment.starts = iter([41, 42])
    environment.reset(seed=3)
    environment.reset()
    environment.starts = None
    environment.reset(seed=3)
    assert track.seeds == [41, 42, 3]


def test_no_start_is_in_two_splits() -> None:
    for task in (SparseControl(), SparseMountainCar()):
        built = task.built
        rows = {row["start"] for row in built.sources["starts"].rows["records"]}
        splits = [{item.data["start"] for item in built.benchmark.items(split)} for split in ("validation", "test")]
        assert (len(rows), *map(len, splits)) == (8192, 48, 48)
        assert not (rows & splits[0] or rows & splits[1] or splits[0] & splits[1])
        assert (dict(built.leaked), built.contaminated) == ({}, ())
    assert SparseControl(instance=1).built.content_hash != SparseControl(instance=2).built.content_hash
    family = SparseControlFamily()
    assert not set(family.train_seeds) & set(family.test_seeds)
    assert set(make.Args().seeds) <= set(family.test_seeds)
    assert set(make.Args().tuning_seeds) <= set(family.train_seeds)


def test_scores_are_marks() -> None:
    task = SparseControl()
    benchmark = task.built.benchmark
    items = {item.dimension: item for item in benchmark.validation}
    scores = {name: [benchmark.score(item, text) for text in ("0", "1", "3", "", "x")] for name, item in items.items()}
    assert scores == {"success": [0, 1, 1, 0, 0], "marks": [0, 1 / 3, 1, 0, 0]}


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed")

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(ValueError, match=r"pip install 'posttrain-gym\[control\]'.*'mountain-car'"):
        SparseControl().trainer().base(SparseControl())
    with pytest.raises(ValueError, match="Did you mean 'hopper'"):
        SparseControl("hoper")


def test_adjustments_reach_the_learner() -> None:
    task, trainer = SparseMountainCar(), SparseTrainer(rollout=512)
    session = trainer.begin(task, recipe(task), trainer.base(task), seed=0)
    agent: SparseAgent = session._loop
    model = agent.model
    first = session.advance(1)
    assert (first["entropy_coef"], first["gamma"], model.ent_coef, model.gamma) == (0.0, 0.99, 0.0, 0.99)
    assert advantages_follow(model, 0.99) and not advantages_follow(model, 0.97)
    for adjustment in (
        Adjustment("entropy_scale", 0.5),
        Adjustment("gamma_add", -0.02),
        Adjustment("grad_clip_scale", 2.0),
        Adjustment("batch_scale", 2.0),
        Adjustment("lr_scale", 0.5),
    ):
        session.apply(adjustment)
    row = session.advance(1)
    assert (row["entropy_coef"], row["gamma"], row["learning_rate"]) == (0.005, 0.97, 1.5e-4)
    used = model.ent_coef, model.gamma, model.rollout_buffer.gamma, model.max_grad_norm, model.batch_size
    assert used == (0.005, 0.97, 0.97, 1.0, 128)
    assert model.policy.optimizer.param_groups[0]["lr"] == 1.5e-4
    assert advantages_follow(model, 0.97) and not advantages_follow(model, 0.99)
    # the loss that was descended holds the entropy with its new weight
    assert row["loss"] == pytest.approx(row["policy_loss"] - 0.005 * row["entropy"] + 0.5 * row["value_loss"])
    assert session.refusal(Adjustment("temperature_scale", 2.0)) is not None
    session.close()


def advantages_follow(model: Any, gamma: float) -> bool:
    """Whether the advantages in the buffer are those of a discount: generalised advantage estimation, term by term."""
    buffer = model.rollout_buffer
    steps, count = model.n_steps, model.n_envs
    # the buffer is flat after a pass, environment by environment
    shaped = {n: np.reshape(getattr(buffer, n), (count, steps)).T for n in ("values", "advantages")}
    rewards, starts = buffer.rewards, buffer.episode_starts  # (steps, environments); they are not flattened
    values, advantages = shaped["values"], shaped["advantages"]
    going_on = 1.0 - starts[1:]
    delta = rewards[:-1] + gamma * values[1:] * going_on - values[:-1]
    wanted = delta + gamma * model.gae_lambda * going_on * advantages[1:]
    return bool(np.allclose(wanted, advantages[:-1], atol=1e-5))


def test_a_round_costs_its_environment_steps() -> None:
    task, trainer = SparseMountainCar(), SparseTrainer(rollout=256)
    asked = recipe(task)
    parameters = trainer.parameters(task)
    # two layers of 64 for actor and critic, on two observations and one action; one log standard deviation
    assert parameters == 2 * (2 * 64 + 64 + 64 * 64 + 64) + 2 * (64 + 1) + 1
    step = trainer.step_cost_bound(task, asked)
    assert step == iteration_cost(parameters, 2, 256)
    assert (step.generated_tokens, step.trained_tokens) == (256, 512)
    assert step.flops == parameters * (6.0 * 512 + 2.0 * 256)
    session = trainer.begin(
        task, asked, trainer.base(task), 0, Limit("train_tokens", 2.5 * step.in_unit("train_tokens"))
    )
    session.advance()
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.supervised_tokens) == ("budget", 2, 1024)
    assert report.training_cost.generated_tokens == 512
    assert checkpoint is not None
    assert all(isinstance(value, torch.Tensor) and not value.requires_grad for value in checkpoint.weights.values())
    evaluated = trainer.evaluate(task, checkpoint, "test")
    assert evaluated[1].generated_tokens == 48 * 200
    assert evaluated[0] == trainer.evaluate(task, checkpoint, "test")[0]


def test_recipes_that_cannot_run_are_refused() -> None:
    task, trainer = SparseMountainCar(), SparseTrainer()
    for field, value in (("batch_size", 4096), ("batch_size", 1), ("gradient_accumulation", 2)):
        with pytest.raises(ValueError, match=field):
            trainer.check(task, recipe(task, **{field: value}))
    with pytest.raises(ValueError, match="multiple of 8"):
        SparseTrainer(rollout=100)


def test_signals_tell_how_sparse_reward_is() -> None:
    task, trainer = SparseMountainCar(), SparseTrainer()
    session = trainer.begin(task, recipe(task, steps=2), trainer.base(task), seed=0)
    row = session.advance(1)
    values = session.signals.values
    # 256 steps in each of 8 environments, episodes of 200 where the last mark is far: one each has ended
    assert (row["episodes"], row["completions/mean_length"], values["completion_truncated"]) == (8.0, 200.0, 1.0)
    assert values["reward_sparsity"] == 1.0 - row["success"]
    assert values["entropy"] == pytest.approx(0.5 * np.log(2 * np.pi * np.e) + np.log(row["action_std"]), abs=0.02)
    session.close()


class TestTask(TaskConformance):
    task = SparseMountainCar


class TestTrainer(TrainerConformance):
    task = SparseMountainCar(items=2)
    trainer = SparseTrainer(rollout=64)
    recipe = {"num_iterations": 1, "batch_size": 32}
    steps = 3


@pytest.mark.parametrize("name", ["PostTrain/Recipe-v0", "PostTrain/InLoop-v0"])
def test_environments_pass_their_checker(name: str) -> None:
    task = SparseMountainCar(items=2)
    settings: dict[str, Any] = {"task": task, "trainer": SparseTrainer(rollout=64), "budget": 1e9}
    if name == "PostTrain/InLoop-v0":
        settings |= {"recipe": recipe(task, steps=6, num_iterations=1, batch_size=32), "interval": 1}
    check_env(gymnasium.make(name, **settings).unwrapped, skip_render_check=True)


# The page ------------------------------------------------------------------------------------------------------------


def row(first: int | None, episodes: int, steps: int | None = None, **changes: Any) -> dict[str, Any]:
    made = {
        "first_success_episode": first,
        "first_success_steps": steps,
        "episodes": episodes,
        "environment_steps": 1000,
        "iteration_episodes": [1, 0, 2, 1],
        "iteration_reward": [0.0, 0.0, 1.5, 3.0],
        "iteration_reward_std": [0.0, 0.0, 0.5, 0.0],
        "iteration_success": [0.0, 0.0, 1.0, 1.0],
    }
    return {**made, **changes}


def test_figures_are_exact() -> None:
    # the episodes were rewarded 0, 1, 2 and 3
    assert page.reward_moments(row(1, 4)) == (1.5, 1.25)
    assert page.reward_moments(row(1, 4), last=2) == pytest.approx((2.0, 2 / 3))
    assert page.late_success(row(1, 4)) == 1.0
    runs = [row(30, 100, 400), row(None, 80), row(90, 120, 999), row(None, 300)]
    assert page.horizon(runs) == 80
    assert [page.restricted(one, 80) for one in runs] == [30, 80, 80, 80]
    assert [page.restricted(one, 1000, "first_success_steps") for one in runs] == [400, 1000, 999, 1000]
    assert page.horizon([row(30, 100), row(90, 120)]) == 90
    assert page.censored_median([30, None, 90]) == 90
    assert page.censored_median([30, None, None]) is None
    assert page.censored_median([30, 90, None, None]) is None
    assert page.mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 3**-0.5))
    assert page.paired([1.0, 3.0], [2.0, 4.0], page.difference) == (-1.0, -1.0, -1.0)
    assert page.sign_flip([0.0, 0.0, 0.0], [1.0, 2.0, 3.0]) == 2 / 8  # all signs alike, either way
    assert page.sign_flip([0.0, 0.0], [3.0, -1.0]) == 1.0  # sums of -2, 2, 4 and -4: none is smaller
    assert page.sign_flip([1.0], [1.0]) == 1.0
    assert page.paired([31.0, 31.0], [100.0, 100.0], page.saved) == pytest.approx((0.69, 0.69, 0.69))


def test_the_committed_page_is_that_of_the_committed_runs() -> None:
    rows = make.read_results()
    args = make.Args()
    chosen = make.best_of_grid(rows, args)
    assert (RESULTS / "sparse_control.md").read_text() == page.describe(rows, chosen, args)
    assert len({(one["phase"], one["arm"], one["seed"]) for one in rows}) == len(rows)
    arms = page.arms_of(rows)
    assert all([one["seed"] for one in found] == list(args.seeds) for found in arms.values())
    assert {one["environment_steps"] for one in rows} == {args.steps * 2048}
    tried = {(one["arm"], one["seed"]) for one in rows if one["phase"] == "tuning"}
    assert tried == {(name, seed) for name in make.grid(args) for seed in args.tuning_seeds}
    for one in arms["best fixed"]:
        settings = json.loads(one["recipe"])
        assert {name: settings[name] for name in ("entropy_coef", "gamma")} == make.grid(args)[chosen]


def test_a_sample_comes_out_as_committed() -> None:
    kept = next(one for one in make.read_results() if (one["phase"], one["arm"], one["seed"]) == ("test", "rules", 1))
    if kept["versions"] != make.versions():
        pytest.skip(f"made with {kept['versions']}, here are {make.versions()}")
    made = make.run(make.Args(steps=4), "test", "rules", 1, {}, f"rules:{make.RULES}")
    assert made["content_hash"] == kept["content_hash"]
    assert made["controller"] == kept["controller"]
    # the first iterations of a run do not depend on how many follow
    for name in ("episodes", "reward", "reward_std", "success", "entropy_coef", "gamma"):
        assert made[f"iteration_{name}"] == kept[f"iteration_{name}"][:4]
    assert max(made["iteration_entropy_coef"]) > 0  # the rules had a say by then
