"""The action wrappers keep the environment's contract, their masks and their arguments, and never act illegally."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FlattenObservation, RecordEpisodeStatistics, TimeLimit
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.env_checker import check_env as check_env_sb3
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from posttrain_gym.envs.decision_space import DecisionSpace, Parameter
from posttrain_gym.envs.journal import Journal
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.inner_trainers.base import Cost
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import InnerTask
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTrainer
from posttrain_gym.meta_policies.sb3 import make_model, wrap_for
from posttrain_gym.wrappers import DiscretizeAction, FlattenAction

AMPLE = {"limit": 1e7, "max_rounds": 100, "patience": 100}
WRAPPERS = [FlattenAction, DiscretizeAction]
SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"


class CostlyGrpo(ScriptedTrainer):
    """GRPO costs a hundred times as much, so that it is the first to become illegal."""

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        return super().step_cost_bound(task, recipe).times(100 if recipe.algorithm == "grpo" else 1)


def base(**settings: Any) -> PostTrainingEnv:
    return PostTrainingEnv(**{"task": ScriptedFamily(), "budget": AMPLE, **settings})


def masks_of(env: Any) -> np.ndarray:
    return np.asarray(env.get_wrapper_attr("action_masks")())


# Contracts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_both_checks_pass(wrapper: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told that it is wrapped, and of the shape of `history`
        env: Any = wrapper(gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), render_mode="ansi"))
        check_env(env)
        check_env_sb3(env)


def test_the_spec_rebuilds_the_stack_with_its_arguments() -> None:
    made = gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), price=0.3, history=2)
    for env, size in ((FlattenAction(made, stop_reluctance=0.25), 3 + 3 + 2 + 4), (DiscretizeAction(made, 7, 4), 8)):
        assert env.spec is not None
        again = gym.make(env.spec)
        assert type(again) is type(env)
        assert again.action_space == env.action_space
        assert again.action_space.shape == (size,)
        assert again.spec is not None and again.spec.additional_wrappers == env.spec.additional_wrappers
        rebuilt: Any = again.unwrapped
        assert (rebuilt.reward_settings.price, rebuilt.layout.history) == (0.3, 2)
    recorded = gym.make(FlattenAction(made, stop_reluctance=0.25).spec).get_wrapper_attr("_saved_kwargs")  # type: ignore[arg-type]
    assert recorded == {"stop_reluctance": 0.25}


def test_the_spec_copies_neither_an_open_journal_nor_its_rounds(tmp_path: Any) -> None:
    journal = Journal(tmp_path)
    env: Any = FlattenAction(
        gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), trainer=ScriptedTrainer(), journal=journal)
    )
    assert env.spec is not None
    assert env.spec.kwargs["journal"] is journal
    rebuilt: Any = gym.make(env.spec).unwrapped
    assert rebuilt._journal is journal
    assert rebuilt.trainer is not env.unwrapped.trainer  # Gymnasium copies arguments


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_environments_are_refused(wrapper: Any) -> None:
    with pytest.raises(ValueError, match="needs a PostTrain environment, got CartPoleEnv"):
        wrapper(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("wrapper", "settings", "message"),
    [
        (FlattenAction, {"stop_reluctance": -0.1}, "stop_reluctance: expected a number in"),
        (FlattenAction, {"stop_reluctance": float("nan")}, "stop_reluctance"),
        (DiscretizeAction, {"bins": 1}, "bins: expected an integer in"),
        (DiscretizeAction, {"bins": 2.5}, "bins"),
        (DiscretizeAction, {"mix_levels": 1}, "mix_levels: expected an integer in"),
    ],
)
def test_bad_arguments_are_refused(wrapper: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapper(base(), **settings)


@pytest.mark.parametrize(
    ("wrapper", "action"),
    [
        *[
            (FlattenAction, action)
            for action in (np.zeros(11), np.zeros((1, 12)), np.full(12, 1.1), np.full(12, np.nan), None, "x", {"a": 1})
        ],
        *[
            (DiscretizeAction, action)
            for action in (
                np.zeros(8),  # no integers
                np.zeros(7, int),
                np.zeros((1, 8), int),
                np.full(8, -1),
                np.full(8, 9),
                np.zeros(8, bool),
                None,
                "x",
                [[1], [1, 2]],
                {"a": 1},
            )
        ],
    ],
)
def test_bad_actions_are_refused_and_launch_nothing(wrapper: Any, action: Any) -> None:
    env: Any = wrapper(base())
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action: expected"):
        env.step(action)
    assert env.unwrapped.trainer.launched == 0 and env.unwrapped.search.rounds == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gymnasium_wrappers_on_top_keep_working(wrapper: Any) -> None:
    env = RecordEpisodeStatistics(TimeLimit(FlattenObservation(wrapper(base())), 3))
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert observation.dtype == np.float32 and observation.ndim == 1
    encode = env.get_wrapper_attr("encode_recipe")
    recipe = env.get_wrapper_attr("space").recipe("sft", start="latest")
    rewards = 0.0
    for step in range(1, 4):
        observation, reward, terminated, truncated, info = env.step(encode(recipe))
        rewards += float(reward)
        assert (terminated, truncated) == (False, step == 3)
    assert info["episode"]["l"] == 3
    assert info["episode"]["r"] == pytest.approx(rewards)


# Inverses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reluctance", [0.0, 1.0, 2.0])
def test_flatten_encodes_exactly(reluctance: float) -> None:
    env: Any = FlattenAction(base(), reluctance)
    env.reset(seed=0)
    space, rng = env.unwrapped.space, np.random.default_rng(0)
    for _ in range(1000):
        recipe = space.random_recipe(rng)
        action = env.encode_recipe(recipe)
        assert env.action_space.contains(action)
        assert space.decode(env.action(action)) == recipe
    assert space.decode(env.action(env.encode_recipe(None))) is None


def test_discretize_encodes_the_nearest_action() -> None:
    env: Any = DiscretizeAction(base(), bins=5, mix_levels=3)
    env.reset(seed=0)
    space: DecisionSpace = env.unwrapped.space
    env.action_space.seed(0)
    for _ in range(1000):  # what is on its grid comes back exactly
        action = env.action_space.sample()
        recipe = space.decode(env.action(action))
        assert recipe == space.decode(env.action(env.encode_recipe(recipe)))
    rng = np.random.default_rng(0)
    for _ in range(300):  # what is not goes to the nearest bin of each knob
        recipe = space.random_recipe(rng)
        found = space.decode(env.action(env.encode_recipe(recipe)))
        assert found is not None
        assert (found.algorithm, found.start) == (recipe.algorithm, recipe.start)
        assert (found.batch_size, found.num_generations) == (recipe.batch_size, recipe.num_generations)
        grid = [space.parameters["learning_rate"].decode(x) for x in (-1.0, -0.5, 0.0, 0.5, 1.0)]
        nearest = min(grid, key=lambda rate: abs(np.log(rate / recipe.learning_rate)))
        assert found.learning_rate == nearest
    assert space.decode(env.action(env.encode_recipe(None))) is None


@pytest.mark.parametrize(
    ("levels", "mix"),
    [([0, 0], (0.5, 0.5)), ([2, 2], (0.5, 0.5)), ([2, 1], (0.667, 0.333)), ([1, 0], (1.0, 0.0)), ([0, 2], (0.0, 1.0))],
)
def test_levels_are_relative_weights(levels: list[int], mix: tuple[float, float]) -> None:
    env: Any = DiscretizeAction(base())
    env.reset(seed=0)
    recipe = env.unwrapped.space.decode(env.action(np.array([2, 0, *levels, 0, 0, 0, 0])))
    assert tuple(recipe.mix.get(name, 0.0) for name in ("left", "right")) == mix


def test_levels_of_unusable_sources_do_not_count() -> None:
    space = DecisionSpace(("grpo", "sft"), ("left", "right"), {"grpo": ("right",), "sft": ("left", "right")})
    env: Any = DiscretizeAction(base(space=space))
    env.reset(seed=0)
    decoded = [space.decode(env.action(np.array([choice, 0, 2, 0, 0, 0, 0, 0]))) for choice in (1, 2)]
    assert [dict(recipe.mix) for recipe in decoded if recipe is not None] == [{"right": 1.0}, {"left": 1.0}]


def test_bins_reach_both_ends_and_every_choice() -> None:
    env: Any = DiscretizeAction(base(), bins=3)
    env.reset(seed=0)
    assert env.action_space.nvec.tolist() == [3, 3, 3, 3, 3, 3, 2, 3]
    seen = []
    for index in range(3):
        recipe = env.unwrapped.space.decode(env.action(np.array([2, 0, 0, 0, index, index, min(index, 1), index])))
        seen.append((recipe.batch_size, recipe.learning_rate, recipe.num_generations, recipe.steps))
    assert seen == [(16, 3e-5, 4, 10), (32, 5.477e-4, 8, 24), (64, 1e-2, 8, 60)]


def test_stop_needs_the_reluctance_over_every_legal_choice() -> None:
    for reluctance, stop, other, expected in (
        (1.0, 0.5, -0.4, 2),
        (1.0, 0.5, -0.5, 0),
        (1.0, 0.75, -0.5, 0),
        (0.0, 0.1, 0.2, 2),
        (0.0, 0.2, 0.1, 0),
        (2.0, 1.0, -0.9, 2),
        (2.0, 1.0, -1.0, 0),
    ):
        env: Any = FlattenAction(base(), reluctance)
        env.reset(seed=0)
        action = np.zeros(12)
        action[:3] = [stop, -1.0, other]
        assert env.action(action)["algorithm"] == expected, (reluctance, stop, other)


# Masks ----------------------------------------------------------------------------------------------------------------


def test_masks_survive_every_stack() -> None:
    expected = [True, False, True, True, True, True]  # GRPO is too dear
    settings: dict[str, Any] = {"budget": {"limit": 10_000}}
    plain: Any = DiscretizeAction(base(trainer=CostlyGrpo(), **settings))
    plain.reset(seed=0)
    whole = [*expected, *[True] * (3 * 2 + 3 + 5 + 2 + 5)]
    assert plain.action_masks().tolist() == whole
    assert len(whole) == int(plain.action_space.nvec.sum())

    monitored: Any = Monitor(DiscretizeAction(base(trainer=CostlyGrpo(), **settings)))
    monitored.reset(seed=0)
    assert masks_of(monitored).tolist() == whole
    assert get_action_masks(monitored).tolist() == whole

    makers: list[Callable[[], Any]] = [
        lambda: Monitor(DiscretizeAction(base(trainer=CostlyGrpo(), **settings))) for _ in range(2)
    ]
    dummy = DummyVecEnv(makers)
    dummy.reset()
    assert get_action_masks(dummy).tolist() == [whole, whole]

    vector = SyncVectorEnv(makers)
    vector.reset(seed=0)
    assert [mask.tolist() for mask in vector.call("action_masks")] == [whole, whole]


def scripted_worker(limit: float) -> Callable[[], Any]:
    import functools

    return functools.partial(_build, limit)


def _build(limit: float) -> Any:
    return DiscretizeAction(base(budget={"limit": limit}))


def test_masks_come_back_from_spawned_workers() -> None:
    vector = SubprocVecEnv([scripted_worker(1e6), scripted_worker(100.0)], start_method="spawn")
    try:
        vector.seed(0)
        vector.reset()
        masks = get_action_masks(vector)
        assert masks[:, :3].tolist() == [[True, True, True], [True, False, False]]
        assert masks.shape == (2, 6 + 3 * 2 + 3 + 5 + 2 + 5)
    finally:
        vector.close()


def bins_of(env: Any, name: str) -> list[bool]:
    """Returns the mask of one knob's bins."""
    names = list(env.unwrapped.space.parameters)
    first = int(env.action_space.nvec[: 4 + names.index(name)].sum())
    return [bool(legal) for legal in env.action_masks()[first : first + env.action_space.nvec[4 + names.index(name)]]]


@pytest.mark.parametrize(
    ("left", "expected"),
    [(640, [1, 1, 1]), (639, [1, 1, 0]), (320, [1, 1, 0]), (319, [1, 0, 0]), (160, [1, 0, 0]), (159, [1, 1, 1])],
)
def test_batches_that_cannot_be_paid_are_masked(left: int, expected: list[int]) -> None:
    env: Any = DiscretizeAction(base(budget={"limit": 100 + left + 100}))
    assert bins_of(env, "batch_size") == [True] * 3  # before the first reset
    env.reset(seed=0)
    assert bins_of(env, "batch_size") == list(map(bool, expected))
    assert all(bins_of(env, "learning_rate")) and all(bins_of(env, "steps"))
    assert env.action_masks()[1:3].all() == (left >= 160)


class CostlyKnobs(ScriptedTrainer):
    """A step's price grows with every knob that may change it, and with the source."""

    bounds = 0

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        self.bounds += 1
        longest = max({"left": 1, "right": 3}[name] for name, weight in recipe.mix.items() if weight > 0)
        factor = recipe.gradient_accumulation * longest * (2 if recipe.kl_coef and recipe.algorithm == "grpo" else 1)
        return super().step_cost_bound(task, recipe).times(factor)


def test_masked_actions_under_a_tight_budget_never_ask_for_what_cannot_be_paid() -> None:
    sources = ("left", "right")
    space = DecisionSpace(
        ("grpo", "sft"),
        sources,
        {"grpo": sources, "sft": sources},
        {
            "batch_size": Parameter(choices=(4, 6, 16, 64)),
            "gradient_accumulation": Parameter(choices=(1, 2, 4)),
            "kl_coef": Parameter(0.0, 0.1),
            "num_generations": Parameter(choices=(4, 6)),
            "steps": Parameter(choices=(1, 3)),
        },
    )
    trainer = CostlyKnobs()
    budget = {"limit": 3000, "max_rounds": 12, "patience": 12}
    env: Any = DiscretizeAction(base(trainer=trainer, space=space, budget=budget))
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    kinds, masked, episodes = set(), 0, 1
    for _ in range(1000):
        mask = env.action_masks()
        masked += not all(bins_of(env, "batch_size"))
        action, first = [], 0
        for size in env.action_space.nvec:
            action.append(int(rng.choice(np.flatnonzero(mask[first : first + size]))))
            first += size
        if action[0] == 0 and mask[1:3].any():
            action[0] = int(rng.choice(np.flatnonzero(mask[1:3]))) + 1
        _, _, terminated, _, info = env.step(np.array(action))
        kinds.add((info["round"]["failure"] or {}).get("kind") if "round" in info else "stop")
        assert env.unwrapped.search.ledger.spent <= 3000
        if terminated:
            env.reset()
            episodes += 1
    assert kinds == {None}
    assert masked > 100 and episodes > 50
    assert trainer.bounds < 100 * episodes  # each price is asked for once in an episode, not once in a mask


def test_maskable_ppo_picks_no_illegal_action() -> None:
    trainer = CostlyGrpo()
    env: Any = DiscretizeAction(base(trainer=trainer, budget={"limit": 60_000, "max_rounds": 12, "patience": 12}))
    model = MaskablePPO("MultiInputPolicy", env, n_steps=64, batch_size=64, seed=0, device="cpu")
    model.learn(128)
    observation, _ = env.reset(seed=0)
    illegal, masked = 0, 0
    for _ in range(200):
        mask = env.action_masks()
        masked += not mask[:3].all()
        action, _ = model.predict(observation, action_masks=mask)
        illegal += not mask[int(action[0])]
        observation, _, terminated, _, info = env.step(action)
        illegal += "round" in info and (info["round"]["failure"] or {}).get("kind") == "unaffordable"
        if terminated:
            observation, _ = env.reset()
    assert illegal == 0
    assert masked > 20  # the masks did bite


def test_flatten_never_yields_an_illegal_algorithm() -> None:
    env: Any = FlattenAction(base(trainer=CostlyGrpo(), budget={"limit": 60_000, "max_rounds": 12, "patience": 12}))
    env.reset(seed=0)
    illegal, masked = 0, 0
    for _ in range(1000):
        masked += not env.unwrapped.action_masks()[:3].all()
        _, _, terminated, _, info = env.step(env.action_space.sample())
        illegal += "round" in info and info["round"]["failure"] is not None  # nor a batch too large for what is left
        if terminated:
            env.reset()
    assert illegal == 0
    assert masked > 100


# Stable-Baselines3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "a2c", "sac", "td3", "maskable_ppo"])
def test_every_algorithm_learns(algo: str) -> None:
    env = Monitor(wrap_for(algo, base(budget={"limit": 1e5, "max_rounds": 8, "patience": 8})))
    model = make_model(algo, env, 0)
    model.learn(64)
    assert model.num_timesteps >= 64
    assert env.get_wrapper_attr("trainer").launched > 32
    action, _ = model.predict(env.reset(seed=0)[0])
    assert env.action_space.contains(action)


def test_devices_are_dealt_in_turn() -> None:
    settings = EnvSettings(devices=("cuda:0", "cuda:1"))
    assert [settings.device_of(worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert EnvSettings().device_of(3) == "auto"


def test_single_choice_knobs_have_one_bin() -> None:
    space = DecisionSpace(("sft",), ("left", "right"), {"sft": ("left",)}, {"steps": Parameter(choices=(20,))})
    env: Any = DiscretizeAction(base(space=space))
    env.reset(seed=0)
    assert env.action_space.nvec.tolist() == [2, 3, 3, 3, 1]
    assert env.step(np.array([1, 0, 0, 0, 0]))[4]["round"]["recipe"]["steps"] == 20


def test_reading_a_spec_copies_no_model() -> None:
    from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

    trainer = TrlTrainer()
    env = FlattenAction(gym.make("PostTrain/Recipe-v0", trainer=trainer, instances=[0]))
    assert env.spec is not None
    assert env.spec.kwargs["trainer"] is trainer
