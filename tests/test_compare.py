"""Running comparisons: equal terms for every policy, resumable, refusing what would not be comparable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.experiments.compare import compare
from posttrain_gym.experiments.comparison import EpisodeResult, read_parquet
from posttrain_gym.experiments.episodes import run_episode, run_named_episode
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.experiments.train import TrainSettings, train
from posttrain_gym.meta_policies.heuristics import FixedPolicy

SCRIPTED = "posttrain_gym.inner_trainers.testing:ScriptedFamily"
SETTINGS = EnvSettings(task=SCRIPTED, split="test", budget=Budget(limit=60_000, max_rounds=4, patience=4))


def test_an_episode_is_scored_on_test_items_outside_the_budget() -> None:
    env = SETTINGS.build()
    result = run_episode(env, FixedPolicy(env), name="fixed", instance=101, seed=5)
    search = env.unwrapped.search  # type: ignore[attr-defined]
    base, best = search.scorecards["base"].score, search.scorecards["best"].score
    assert result.base_validation_score == base
    # the scripted trainer's test scores are its validation scores less 0.01, clipped at 0
    assert result.base_score == pytest.approx(base - 0.01)
    assert result.final_score == pytest.approx(best - 0.01)
    assert result.validation_gain == pytest.approx((best - base) / (1 - base))
    assert result.budget_used == pytest.approx(sum(amount for _, amount in search.ledger.entries) / 60_000)
    assert not any("test" in purpose for purpose, _ in search.ledger.entries)
    assert [entry.round for entry in result.trajectory] == list(range(1, result.rounds + 1))


def test_equal_seeds_give_every_policy_the_same_start_and_the_same_policy_the_same_result() -> None:
    first = run_named_episode(SETTINGS, "random", 100, 0)
    assert run_named_episode(SETTINGS, "random", 100, 0) == first
    assert run_named_episode(SETTINGS, "random", 100, 1) != first
    assert run_named_episode(SETTINGS, "fixed", 100, 0).base_score == first.base_score


def test_a_comparison_resumes_and_its_workers_change_nothing(tmp_path: Path) -> None:
    done: list[EpisodeResult] = []

    def note(number: int, total: int, result: EpisodeResult) -> None:
        assert total == 8
        done.append(result)

    names = ["fixed", "greedy-sft-then-grpo"]
    alone = compare(SETTINGS, names, [100, 101], [0, 1], tmp_path / "a", on_episode=note)
    assert len(done) == 8
    assert alone.reference == "fixed"
    stored = sorted((tmp_path / "a" / "episodes").iterdir())
    assert len(stored) == 8
    stored[0].unlink()
    done.clear()
    assert compare(SETTINGS, names, [100, 101], [0, 1], tmp_path / "a", on_episode=note) == alone
    assert len(done) == 1
    assert compare(SETTINGS, names, [100, 101], [0, 1], tmp_path / "b", workers=2) == alone
    assert read_parquet(tmp_path / "a") == alone.episodes


def test_a_trained_policy_is_compared_by_its_file(tmp_path: Path) -> None:
    training = EnvSettings(task=SCRIPTED, budget=SETTINGS.budget)
    policy, _ = train(TrainSettings(training, "ppo", 32), tmp_path / "mine")
    result = compare(SETTINGS, ["random", str(policy)], [100], [0, 1], tmp_path / "out")
    assert [summary.policy for summary in result.policies] == ["random", "trained (mine)"]
    policy, _ = train(TrainSettings(training, "ppo", 64), tmp_path / "mine", resume=True)
    with pytest.raises(ValueError, match=r"made with other settings; trained\.trained \(mine\)"):
        compare(SETTINGS, ["random", str(policy)], [100], [0, 1], tmp_path / "out")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy: unknown 'rondom'\. Did you mean 'random'"):
        compare(SETTINGS, ["rondom"], [100], [0], tmp_path)
    with pytest.raises(ValueError, match="each policy once"):
        compare(SETTINGS, ["random", "random"], [100], [0], tmp_path)
    with pytest.raises(ValueError, match="each seed once"):
        compare(SETTINGS, ["random"], [100], [], tmp_path)
    assert not list(tmp_path.iterdir())
    compare(SETTINGS, ["random"], [100], [0], tmp_path)
    other = EnvSettings(task=SCRIPTED, split="test", budget=Budget(limit=50_000, max_rounds=4, patience=4))
    with pytest.raises(ValueError, match=r"budget\.limit: 60000 there, 50000 now"):
        compare(other, ["random"], [100], [0], tmp_path)
    episode = next((tmp_path / "episodes").iterdir())
    episode.write_text(json.dumps({"policy": "random"}))
    with pytest.raises(ValueError, match=r"random-100-0\.json: damaged .*delete the file"):
        compare(SETTINGS, ["random"], [100], [0], tmp_path)


def test_workers_take_devices_in_turn() -> None:
    """Case C11: 4 workers on 2 devices get 0, 1, 0, 1."""
    settings = EnvSettings(devices=("cuda:0", "cuda:1"))
    assert [settings.device_of(worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert EnvSettings().device_of(3) == "auto"
