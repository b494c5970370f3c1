"""Rounds that were adjusted are taken from a journal decision by decision, and their weights made again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from posttrain_gym.envs.running import Moment
from posttrain_gym.envs.search import JournalMismatchError
from posttrain_gym.inner_trainers.adjustments import catalogue_index
from tests.adjustable_env import RECIPE, adjust, full, in_loop, play, random_actions


def test_finished_rounds_are_taken_from_the_journal_and_a_killed_one_is_run_again(tmp_path: Path) -> None:
    actions = random_actions(12, 3)
    whole = in_loop(interval=2, shaping=True)
    expected = [play(whole, actions, 0), play(whole, actions, 1)]
    first = in_loop(interval=2, shaping=True, journal=tmp_path)
    assert play(first, actions, 0) == expected[0]
    first.reset(seed=1)
    first.step(actions[0])  # killed here: the second round is in no journal
    first.close()
    second = in_loop(interval=2, shaping=True, journal=tmp_path)
    assert play(second, actions, 0) == expected[0]
    assert (second.trainer.launched, second.search.outcomes[0].replayed) == (0, True)  # type: ignore[attr-defined]
    assert play(second, actions, 1) == expected[1]
    assert (second.trainer.launched, second.search.outcomes[0].replayed) == (1, False)  # type: ignore[attr-defined]
    assert second.search.ledger.entries == whole.search.ledger.entries


def test_another_decision_than_the_one_written_down_is_a_mismatch(tmp_path: Path) -> None:
    first = in_loop(interval=5, journal=tmp_path)
    play(first, [catalogue_index("lr_half"), 0, 0])
    first.close()
    again = in_loop(interval=5, journal=tmp_path)
    again.reset(seed=0)
    with pytest.raises(
        ValueError, match=r"entry 0\.0: .*\(after step 5 it decided lr_scale 0.5, this one lr_scale 2\)"
    ):
        adjust(again, "lr_double")
    again.close()
    for settings in ({"interval": 4}, {"shaping": True}, {"recipe": {**RECIPE, "steps": 21}}):
        other = in_loop(journal=tmp_path, **settings)
        with pytest.raises(
            JournalMismatchError, match="it was written by a run with another task, seed, trainer or settings"
        ):
            other.reset(seed=0)
        other.close()


def test_a_moment_survives_json() -> None:
    env = in_loop(interval=5, shaping=True)
    env.reset(seed=0)
    assert env.running is not None
    moment = env.running.moments[-1]
    assert Moment.from_dict(json.loads(json.dumps(moment.to_dict(), allow_nan=False))) == moment
    odd = dataclasses.replace(moment, settings={"learning_rate": math.inf})
    assert Moment.from_dict(json.loads(json.dumps(odd.to_dict(), allow_nan=False))) == odd


def test_the_full_environment_repeats_from_a_journal_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    env = full(interval=5, journal=tmp_path, budget={"limit": 1e6, "max_rounds": 4, "patience": 4})
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(60)]
    for action in actions:
        action["algorithm"] = int(rng.integers(1, 3))
        action["adjustment"] = int(rng.integers(2, 37))
    expected = play(env, actions)
    env.close()
    again = full(interval=5, journal=tmp_path, budget={"limit": 1e6, "max_rounds": 4, "patience": 4})
    assert play(again, actions) == expected
    assert again.trainer.launched == 0  # type: ignore[attr-defined]
    assert all(outcome.replayed for outcome in again.search.outcomes) and again.search.rounds == 4


def test_a_checkpoint_of_an_adjusted_round_is_made_again_with_its_adjustments(tmp_path: Path) -> None:
    weights = []
    for lost in (False, True):
        env = in_loop(interval=4, journal=tmp_path, recipe={**RECIPE, "steps": 18})
        names = ("mix_toward_1", "lr_half", "snapshot", "rollback")
        play(env, [catalogue_index(name) for name in names])
        env.close()
        if lost:
            assert env.search.outcomes[0].replayed
        weights.append(env.search.weights_of("latest").weights["scores"])
        for path in tmp_path.glob("checkpoints-0/*"):
            path.unlink()
        env.search.records.kept.clear()
    assert np.array_equal(*weights)
