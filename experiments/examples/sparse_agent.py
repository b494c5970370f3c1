"""Stable-Baselines3's PPO as an inner learner that is taken one iteration at a time, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from posttrain_gym.inner_trainers.base import Cost
from posttrain_gym.inner_trainers.loop import Loop, LoopSettings, LoopStep
from posttrain_gym.inner_trainers.monitor import reward_sparsity
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.trl.random_state import caller_random_state_kept

from .sparse_locomotion import ControlProblem, shuffled_starts

ENVIRONMENTS = 8
"""Environments that one process steps in turn."""

_NEVER = 10**9
"""Iterations between two lines of the library's own log."""

ROLLOUT = 2048
"""Environment steps of one PPO iteration, all environments together; Stable-Baselines3's own number."""

Weights = Mapping[str, torch.Tensor]


def iteration_cost(parameters: int, passes: int, rollout: int) -> Cost:
    """Return what one PPO iteration costs: a token is an environment step.

    The steps are generated (one forward pass each, 2·N FLOPs), then trained on ``passes`` times (6·N each).

    Args:
        parameters: N, of actor and critic together.
        passes: passes over the steps.
        rollout: environment steps of the iteration.
    """
    trained = rollout * passes
    return Cost(
        trained_tokens=trained,
        generated_tokens=rollout,
        flops=6.0 * parameters * trained + 2.0 * parameters * rollout,
    )


class SparseAgent(Loop):
    """One PPO learner with environments of its own; a step is one PPO iteration.

    Random numbers are the global generators': whoever calls keeps them apart, as `LoopSession` does.

    Args:
        problem: what it learns.
        recipe: its hyperparameters; see `SparseTrainer.reads`.
        starts: reset seeds of its episodes.
        weights: what the policy starts from.
        seed: decides actions, minibatches and the order of starts.
        rollout: environment steps of one iteration, a multiple of `ENVIRONMENTS`.
    """

    def __init__(
        self,
        problem: ControlProblem,
        recipe: Recipe,
        starts: Sequence[int],
        weights: Weights,
        seed: int,
        rollout: int = ROLLOUT,
    ) -> None:
        self._rate, self._rollout = recipe.learning_rate, rollout
        environments = [problem.make() for _ in range(ENVIRONMENTS)]
        order = shuffled_starts(starts, seed)  # one for all: each start is used once before any is used again
        for environment in environments:
            environment.starts = order
        self.model = PPO(
            "MlpPolicy",
            DummyVecEnv([lambda one=one: one for one in environments]),  # type: ignore[misc]
            learning_rate=lambda _: self._rate,
            n_steps=rollout // ENVIRONMENTS,
            batch_size=recipe.batch_size,
            n_epochs=recipe.num_iterations,
            gamma=recipe.gamma,
            gae_lambda=recipe.gae_lambda,
            clip_range=recipe.clip_range,
            ent_coef=recipe.entropy_coef,
            vf_coef=recipe.vf_coef,
            max_grad_norm=recipe.max_grad_norm,
            seed=seed,
            device="cpu",
        )
        self.model.policy.load_state_dict(dict(weights))
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        self._norms = _GradientNorms(self.model.policy)
        self._episodes = 0
        self._first: dict[str, float] = {}

    def step(self, settings: LoopSettings) -> LoopStep:
        """Put the settings in force, collect environment steps with the policy as it is, and update it."""
        self.use(settings)
        episodes = _Episodes()
        self.model.learn(self._rollout, callback=episodes, log_interval=_NEVER, reset_num_timesteps=False)
        row = self._row(episodes)
        parameters = sum(parameter.numel() for parameter in self.model.policy.parameters())
        cost = iteration_cost(parameters, self.model.n_epochs, self._rollout)
        return LoopStep(row.pop("loss"), row, cost, samples=cost.trained_tokens)

    def use(self, settings: LoopSettings) -> None:
        """Put a rate and the settings that adjustments can change in force, from the next iteration on."""
        recipe, model = settings.recipe, self.model
        self._rate = settings.learning_rate
        model.ent_coef, model.max_grad_norm = recipe.entropy_coef, recipe.max_grad_norm
        model.batch_size = recipe.batch_size
        # the model's discounts the value with which a truncated episode goes on, the buffer's everything else
        model.gamma = model.rollout_buffer.gamma = recipe.gamma

    def _row(self, episodes: _Episodes) -> dict[str, float]:
        """Return the curves of the iteration that was just done."""
        logged = {name.removeprefix("train/"): value for name, value in self.model.logger.name_to_value.items()}
        self.model.logger.name_to_value.clear()
        returns, lengths = episodes.returns, episodes.lengths
        if not self._first and episodes.first_success is not None:
            place, steps = episodes.first_success
            self._first = {"first_success_episode": float(self._episodes + place), "first_success_steps": float(steps)}
        self._episodes += len(returns)
        policy_loss, value_loss = float(logged["policy_gradient_loss"]), float(logged["value_loss"])
        entropy = -float(logged["entropy_loss"])
        row = {
            "loss": policy_loss - self.model.ent_coef * entropy + self.model.vf_coef * value_loss,
            "grad_norm": self._norms.mean(),
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "explained_variance": float(logged["explained_variance"]),
            "entropy": entropy,
            "action_std": float(logged["std"]),
            "kl": float(logged["approx_kl"]),
            "clip_ratio/region_mean": float(logged["clip_fraction"]),
            "entropy_coef": float(self.model.ent_coef),
            "gamma": float(self.model.gamma),
            "episodes": float(len(returns)),
            "episodes_total": float(self._episodes),
            **self._first,
        }
        if returns:
            row["reward"], row["reward_std"] = float(np.mean(returns)), float(np.std(returns))
            row["success"] = float(np.mean([marks > 0 for marks in returns]))
            row["completions/mean_length"] = float(np.mean(lengths))
            row["completions/clipped_ratio"] = episodes.truncated / len(returns)
            sparsity = reward_sparsity(returns)
            if sparsity is not None:
                row["reward_sparsity"] = sparsity
        return row

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the policy's weights: actor, critic and log standard deviation of actions."""
        return {name: value.detach().clone() for name, value in self.model.policy.state_dict().items()}

    def load(self, weights: Weights) -> None:
        """Put weights in, and forget the optimiser's moments."""
        self.model.policy.load_state_dict(dict(weights))
        self.model.policy.optimizer.state.clear()

    def close(self) -> None:
        """Close the environments."""
        if self.model.env is not None:
            self.model.env.close()


class _Episodes(BaseCallback):
    """Notes the episodes that end in one iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[int] = []
        self.lengths: list[int] = []
        self.truncated = 0
        self.first_success: tuple[int, int] | None = None  # which episode of the iteration, environment steps so far

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                self.returns.append(int(info["marks"]))
                if self.first_success is None and info["marks"] > 0:
                    self.first_success = len(self.returns), int(self.num_timesteps)
                self.lengths.append(int(info["length"]))
                self.truncated += bool(info["TimeLimit.truncated"])
        return True


class _GradientNorms:
    """Measures the norm of each minibatch's gradient before it is clipped, which PPO does not tell."""

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self._squares: list[torch.Tensor] = []
        self._norms: list[float] = []
        for parameter in policy.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)
        policy.optimizer.register_step_pre_hook(self._add)

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None  # the hook is called when there is one
        self._squares.append(parameter.grad.detach().square().sum())

    def _add(self, *_: Any) -> None:
        self._norms.append(float(torch.stack(self._squares).sum().sqrt()))
        self._squares.clear()

    def mean(self) -> float:
        """Return the mean norm since the last call."""
        mean = float(np.mean(self._norms))
        self._norms.clear()
        return mean


def new_policy(problem: ControlProblem, seed: int) -> ActorCriticPolicy:
    """Return an untrained policy, as Stable-Baselines3 makes it: two layers of 64 for the actor and for the critic."""
    environment = problem.make()
    try:
        with caller_random_state_kept():
            torch.manual_seed(seed)
            return ActorCriticPolicy(
                environment.observation_space,
                environment.action_space,
                lambda _: 1e-3,
                activation_fn=torch.nn.Tanh,
            )
    finally:
        environment.close()


@dataclass(frozen=True)
class Episode:
    """One episode of an evaluation: marks that were reached, and its environment steps."""

    marks: int
    length: int


def play(problem: ControlProblem, policy: ActorCriticPolicy, starts: Sequence[int]) -> list[Episode]:
    """Return one episode for each start, the policy taking its most likely action; the same for the same policy."""
    environments = [problem.make() for _ in starts]
    try:
        seen = np.stack([one.reset(seed=start)[0] for one, start in zip(environments, starts, strict=True)])
        episodes: list[Episode | None] = [None] * len(starts)
        running = list(range(len(starts)))
        while running:
            actions, _ = policy.predict(seen, deterministic=True)  # all of them: a batch of one size rounds alike
            for place in list(running):
                seen[place], _, terminated, truncated, info = environments[place].step(actions[place])
                if terminated or truncated:
                    episodes[place] = Episode(info["marks"], info["length"])
                    running.remove(place)
        return [episode for episode in episodes if episode is not None]
    finally:
        for environment in environments:
            environment.close()
