"""Every finished round is in the file before its reward is returned, and can be read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from posttrain_gym.envs.journal import JournalInUseError
from posttrain_gym.envs.round_file import read_rounds
from posttrain_gym.inner_trainers.testing import ScriptedFamily
from posttrain_gym.wrappers import DiscretizeAction, RecordRounds

from .scripted_env import AMPLE, make, recipe_action


def recorded(path: Path, **settings: Any) -> Any:
    return RecordRounds(make(budget=AMPLE, **settings), path)


def test_each_round_is_a_line_with_what_it_was_played_in(tmp_path: Path) -> None:
    path = tmp_path / "rounds-first.jsonl"
    env = recorded(path)
    rewards = []
    for seed in (3, 4):
        env.reset(seed=seed)
        for algorithm in ("sft", "grpo", "sft"):
            action = recipe_action(env.unwrapped, algorithm, steps=12)
            _, reward, *_, info = env.step(action)
            rewards.append(reward)
            found = read_rounds(path)  # it is on disk before the reward is returned
            assert len(found) == len(rewards) == env.recorded
            assert found[-1].report == env.unwrapped.search.outcomes[-1].report
            assert found[-1].facts["charged"] == info["round"]["charged"]
    found = read_rounds(path)
    assert [entry.facts["reward"] for entry in found] == rewards
    assert [entry.facts["round"] for entry in found] == [1, 2, 3] * 2
    assert [entry.facts["episode"] for entry in found] == [0] * 3 + [1] * 3
    assert found[-1].facts["instance"] == info["instance"]
    assert found[0].facts["action_mask"] == [True] * 6
    assert found[0].facts["task"] == "scripted"
    env.step({**env.action_space.sample(), "algorithm": 0})
    assert len(read_rounds(path)) == 6  # `stop` is no round


def test_a_cut_line_is_set_aside_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "rounds-cut.jsonl"
    env = recorded(path)
    env.reset(seed=0)
    for _ in range(2):
        env.step(recipe_action(env.unwrapped, steps=10))
    env.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole), 97):
        path.write_bytes(whole[:length])
        assert len(read_rounds(path)) == 1
        again = recorded(path)
        again.reset(seed=1)
        again.step(recipe_action(again.unwrapped, steps=10))
        again.close()
        assert len(read_rounds(path)) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rounds-bad.jsonl"
    path.write_text('{"report": {"recipe": 3}}\n')
    with pytest.raises(ValueError, match=r"rounds-bad.jsonl, line 1: no round"):
        read_rounds(path)
    with pytest.raises(ValueError, match="no such file"):
        read_rounds(tmp_path / "rounds-none.jsonl")


@pytest.mark.parametrize("name", ["other.jsonl", "rounds-.jsonl", "rounds-x.json"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"path: expected a file called rounds-NAME.jsonl"):
        recorded(tmp_path / name)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rounds-x.jsonl").mkdir()
    with pytest.raises(ValueError, match="is a folder; expected a file"):
        recorded(tmp_path / "rounds-x.jsonl")


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    env = recorded(tmp_path / "rounds-x.jsonl")
    code = f"from posttrain_gym.envs.round_file import RoundFile; RoundFile({str(tmp_path / 'rounds-x.jsonl')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert JournalInUseError.__name__ in done.stderr
    env.close()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_environment_is_otherwise_as_it_was(tmp_path: Path) -> None:
    plain, env = make(budget=AMPLE), recorded(tmp_path / "rounds-x.jsonl")
    for made in (plain, env):
        made.reset(seed=5)
    action = recipe_action(plain, steps=10)
    ours, theirs = env.step(action), plain.step(action)
    assert ours[1:4] == theirs[1:4]
    assert set(ours[4]) == set(theirs[4])
    assert all(np.array_equal(ours[0][key], theirs[0][key]) for key in theirs[0])
    assert np.array_equal(env.get_wrapper_attr("action_masks")(), plain.action_masks())


def test_contract_and_spec(tmp_path: Path) -> None:
    made = gym.make("PostTrain/Recipe-v0", task=ScriptedFamily(), render_mode="ansi")
    env = RecordRounds(DiscretizeAction(made, 4), tmp_path / "rounds-x.jsonl")
    check_env(env)
    assert env.spec is not None
    again = gym.make(env.spec)
    assert isinstance(again, RecordRounds)
    assert again.action_space == env.action_space
