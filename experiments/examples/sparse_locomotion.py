"""The control problems of the sparse-reward example: a body, marks to reach, and starts that never meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import gymnasium
import numpy as np

from posttrain_gym.inner_trainers.messages import did_you_mean

START_POOL = 1_000_000
"""Reset seeds below this are starts of training and of benchmarks; each belongs to one of them."""


@dataclass(frozen=True)
class ControlProblem:
    """A body, and the marks that give it reward.

    Attributes:
        environment: Gymnasium id.
        options: keyword arguments of `gymnasium.make`.
        progress: how far the body is, from the unwrapped environment, in ``unit``.
        marks: progress at which reward 1 is given, once each in an episode; rising. The last ends the episode.
        max_steps: environment steps after which an episode is truncated.
        unit: what progress is measured in.
        extra: the extra of this package that brings what the environment needs; None for nothing more.
    """

    environment: str
    progress: Callable[[Any], float]
    marks: tuple[float, ...]
    max_steps: int
    unit: str
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None

    def __post_init__(self) -> None:
        """Check the marks.

        Raises:
            ValueError: there are none, or they do not rise.
        """
        if not self.marks or list(self.marks) != sorted(set(self.marks)):
            raise ValueError(f"marks: expected rising numbers, at least one, got {self.marks}.")

    def make(self) -> SparseMarks:
        """Return the environment.

        Raises:
            ValueError: what it needs is not installed; the message names the extra.
        """
        try:
            # no time limit and no checks of its own: the wrapper counts, and the spaces are known to fit
            inner = gymnasium.make(
                self.environment, max_episode_steps=-1, disable_env_checker=True, **self.options
            ).unwrapped
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            if self.extra is None:
                raise
            raise ValueError(
                f"{self.environment} needs what is not installed ({error}): pip install 'posttrain-gym[{self.extra}]', "
                "or take the problem 'mountain-car', which needs no more than Gymnasium."
            ) from error
        return SparseMarks(inner, self)


PROBLEMS: Mapping[str, ControlProblem] = {
    "hopper": ControlProblem(
        environment="Hopper-v5",
        progress=lambda environment: float(environment.data.qpos[0]),
        marks=(0.9, 1.4, 1.9),
        max_steps=200,
        unit="metres forward",
        extra="control",
    ),
    "mountain-car": ControlProblem(
        environment="MountainCarContinuous-v0",
        progress=lambda environment: float(environment.state[0]),
        marks=(-0.2, 0.1, 0.4),
        max_steps=200,
        unit="position, the goal at 0.45",
    ),
}
"""Problems by name."""


def problem_named(name: str) -> ControlProblem:
    """Return one of `PROBLEMS`.

    Raises:
        ValueError: an unknown name, with a did-you-mean.
    """
    if name not in PROBLEMS:
        raise ValueError(f"problem: unknown {name!r}.{did_you_mean(name, PROBLEMS)}")
    return PROBLEMS[name]


class SparseMarks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces the reward by 1 for each mark that is reached for the first time in the episode, 0 else.

    ``info["marks"]`` is how many were reached. An episode ends (terminated) with the last mark, or where the body's own
    environment ends it, and is truncated after the problem's ``max_steps``.

    Attributes:
        starts: reset seeds of the next episodes; None to take the seed that `reset` is given. With starts, a seed given
            to `reset` is not used: vector environments pass one of their own before the first episode.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], problem: ControlProblem) -> None:
        super().__init__(env)
        self.problem = problem
        self.starts: Iterator[int] | None = None
        self._steps = self._reached = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode at the next start."""
        self._steps = self._reached = 0
        if self.starts is not None:
            seed = next(self.starts)
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "marks": 0}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step; the body's own reward is dropped."""
        observation, _, terminated, _, info = self.env.step(action)
        self._steps += 1
        marks, before = self.problem.marks, self._reached
        progress = self.problem.progress(self.env)
        while self._reached < len(marks) and progress >= marks[self._reached]:
            self._reached += 1
        done = terminated or self._reached == len(marks)
        truncated = not done and self._steps >= self.problem.max_steps
        info = {**info, "marks": self._reached, "length": self._steps}
        return observation, float(self._reached - before), done, truncated, info


def shuffled_starts(starts: Sequence[int], seed: int) -> Iterator[int]:
    """Yield starts without end, each once before any comes again, in an order that ``seed`` decides."""
    rng = np.random.default_rng(seed)
    while True:
        for place in rng.permutation(len(starts)):
            yield starts[int(place)]
