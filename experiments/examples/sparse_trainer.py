"""The inner trainer of the sparse-reward example: rounds of PPO iterations, scored by episodes from held-out starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain_gym.inner_trainers.base import Cost
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.loop import LoopTrainer
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import InnerTask, Item

from .sparse_agent import ENVIRONMENTS, ROLLOUT, SparseAgent, Weights, iteration_cost, new_policy, play
from .sparse_control import SparseControl
from .sparse_locomotion import problem_named


class SparseTrainer(LoopTrainer):
    """Trains PPO agents on `SparseControl` tasks.

    A round is ``steps`` PPO iterations; each collects ``rollout`` environment steps and goes over them
    ``num_iterations`` times in minibatches of ``batch_size``. A checkpoint holds the policy alone (actor, critic, log
    standard deviation of actions), as plain tensors: a round that starts from it begins with an optimiser of its own.

    A round in which no episode was rewarded is no failure: it is what the problem is about.

    Args:
        rollout: environment steps of one iteration, a multiple of `sparse_agent.ENVIRONMENTS`.
    """

    algorithms = ("ppo",)
    reads = {
        "ppo": (
            "clip_range",
            "entropy_coef",
            "gae_lambda",
            "gamma",
            "max_grad_norm",
            "num_iterations",
            "vf_coef",
        )
    }
    adjustments = frozenset(
        {
            "batch_scale",
            "entropy_scale",
            "gamma_add",
            "grad_clip_scale",
            "lr_restart",
            "lr_scale",
            "rollback",
            "snapshot",
        }
    )
    on_policy = True
    fault_policy = FaultPolicy(no_signal_steps=None)

    def __init__(self, rollout: int = ROLLOUT) -> None:
        if rollout < 2 * ENVIRONMENTS or rollout % ENVIRONMENTS:
            raise ValueError(f"rollout: expected a multiple of {ENVIRONMENTS}, two at least, got {rollout}.")
        self._rollout = rollout

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Class, version and environment steps of an iteration."""
        return {**super().fingerprint, "rollout": self._rollout}

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse other tasks, minibatches larger than an iteration, and what every trainer refuses."""
        super().check(task, recipe)
        _control(task)
        if not 2 <= recipe.batch_size <= self._rollout:
            raise ValueError(
                f"batch_size: expected a minibatch of 2 to {self._rollout} environment steps, which are all of "
                f"an iteration, got {recipe.batch_size}."
            )
        if recipe.gradient_accumulation != 1:
            raise ValueError(
                f"gradient_accumulation: PPO here takes each minibatch at once; expected 1, got "
                f"{recipe.gradient_accumulation}."
            )

    def base_weights(self, task: InnerTask) -> Weights:
        """Return the untrained policy of the task's instance."""
        control = _control(task)
        return {name: value.detach().clone() for name, value in _policy(control).state_dict().items()}

    def build(self, task: InnerTask, recipe: Recipe, weights: Weights, seed: int) -> SparseAgent:
        """Return a learner whose episodes begin at the rows of the mix's sources."""
        rows = [
            row for name, share in recipe.mix.items() if share > 0 for row in task.built.sources[name].rows["records"]
        ]
        return SparseAgent(_control(task).problem, recipe, [row["start"] for row in rows], weights, seed, self._rollout)

    def score(self, task: InnerTask, weights: Weights, items: Sequence[Item]) -> NDArray[np.float64]:
        """Return the scores of one episode for each item, the policy taking its most likely action."""
        control = _control(task)
        policy = _policy(control)
        policy.load_state_dict(dict(weights))
        episodes = play(control.problem, policy, [item.data["start"] for item in items])
        score = task.built.benchmark.score
        return np.array(
            [[score(item, str(episode.marks))] for item, episode in zip(items, episodes, strict=True)], np.float64
        )

    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of actor and critic."""
        return _parameters(_control(task).problem_name)

    def step_cost(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the cost of one PPO iteration."""
        return iteration_cost(self.parameters(task), recipe.num_iterations, self._rollout)

    def evaluation_cost(self, task: InnerTask, items: int) -> Cost:
        """Return the cost of one episode for each item, each taken to run to its time limit."""
        steps = items * _control(task).problem.max_steps
        return Cost(generated_tokens=steps, flops=2.0 * self.parameters(task) * steps)


def _control(task: InnerTask) -> SparseControl:
    if not isinstance(task, SparseControl):
        raise ValueError(f"task {task.name!r}: SparseTrainer trains on SparseControl tasks, got {type(task).__name__}.")
    return task


@cache
def _parameters(problem: str) -> int:
    return sum(parameter.numel() for parameter in new_policy(problem_named(problem), 0).parameters())


def _policy(task: SparseControl) -> Any:
    return new_policy(task.problem, task.instance)
