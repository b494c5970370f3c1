"""`RecordRounds`: every finished round is written to a JSON-lines file before its reward is returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym

from ..envs.round_file import RoundFile
from ..inner_trainers.telemetry import machine_name
from .checks import base_env


class RecordRounds(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Appends one line per finished round to ``rounds-NAME.jsonl``; `read_rounds` reads them back.

    A line holds the round's whole report and what it was played in: task, instance, seeds, episode, reward as it was at
    this layer, what was charged, best score before and after, and the mask before it. Unlike a journal, from which a
    killed run goes on, the file is a record: rounds are appended whatever is in it, cached and replayed ones too, and
    their report says so. A round that goes over several steps is written when it ends.

    Args:
        env: a PostTrain environment, wrapped or not.
        path: the file; one process at a time may write to it, so environments side by side need one each.

    Raises:
        ValueError: another environment, or a path that cannot be such a file.
        JournalInUseError: another process writes to it.
    """

    def __init__(self, env: gym.Env[Any, Any], path: str | Path) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, path=str(path))
        gym.Wrapper.__init__(self, env)
        base_env(env)
        self._file = RoundFile(path)
        self._episode = -1
        self._mask: Any = None

    @property
    def recorded(self) -> int:
        """Rounds in the file."""
        return len(self._file)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        observation, info = super().reset(seed=seed, options=options)
        self._episode += 1
        self._mask = info.get("action_mask")
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step; write down the round that ended in it, if one did."""
        base = base_env(self.env)
        before = len(base.search.outcomes)
        observation, reward, terminated, truncated, info = self.env.step(action)
        for number, outcome in enumerate(base.search.outcomes[before:], start=before + 1):
            self._file.append(
                outcome.report,
                {
                    "task": base.family.name,
                    "instance": info["instance"],
                    "search_seed": base.search.seed,
                    "episode": self._episode,
                    "round": number,
                    "reward": float(reward),
                    "charged": outcome.charged,
                    "unit": base.budget.unit,
                    "best_before": outcome.best_before,
                    "best_after": outcome.best_after,
                    "base_model_size": base.trainer.parameters(base.search.task),
                    "action_mask": self._mask,
                    "machine": None if outcome.replayed else machine_name(),
                },
            )
        self._mask = info.get("action_mask")
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment and let go of the file."""
        super().close()
        self._file.close()
