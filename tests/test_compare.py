"""Running comparisons: equal terms for every policy, resumable, refusing what would not be comparable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.envs.budget import Budget
from posttrain_gym.experiments.compare import compare
from posttrain_gym.experiments.comparison import EpisodeResult
from posttrain_gym.experiments.comparison_files import read_parquet
from posttrain_gym.experiments.episodes import episode_seed, policy_labels, run_episode, run_named_episode
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.experiments.train import TrainSettings, train
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import ScriptedTask, ScriptedTrainer
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
    with pytest.raises(ValueError, match=r"made with other settings; trained\.trained \(mine\): '"):
        compare(SETTINGS, ["random", str(policy)], [100], [0, 1], tmp_path / "out")


def test_a_fixed_recipe_is_compared_by_its_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("algorithm: grpo\nmix: {left: 1}\nlearning_rate: 1e-3\nsteps: 40\n")
    result = compare(
        SETTINGS, ["fixed", f"fixed:{recipe}"], [100], [0, 1], tmp_path / "out", reference=f"fixed:{recipe}"
    )
    assert [summary.policy for summary in result.policies] == ["fixed", "fixed (mine)"]
    assert result.reference == "fixed (mine)"
    rounds = [entry.recipe for episode in result.episodes if episode.policy != "fixed" for entry in episode.trajectory]
    assert rounds and all(text == "grpo from best, lr 0.001, 40 steps, batch 32, left 100%" for text in rounds)
    recipe.write_text("algorithm: sft\nmix: {left: 1}\n")
    with pytest.raises(ValueError, match=r"trained\.fixed \(mine\)"):
        compare(SETTINGS, ["fixed", f"fixed:{recipe}"], [100], [0, 1], tmp_path / "out")
    recipe.write_text("algorithm: sft\nmix: {middle: 1}\n")
    with pytest.raises(ValueError, match="'middle'"):
        compare(SETTINGS, [f"fixed:{recipe}"], [100], [0], tmp_path / "other")


def test_a_trained_policy_samples_unless_asked_not_to(tmp_path: Path) -> None:
    training = EnvSettings(task=SCRIPTED, budget=SETTINGS.budget)
    policy, _ = train(TrainSettings(training, "maskable_ppo", 16), tmp_path / "mine")

    def first_recipes(deterministic: bool) -> list[str]:
        results = [run_named_episode(SETTINGS, str(policy), 100, s, deterministic=deterministic) for s in range(5)]
        return [result.trajectory[0].recipe for result in results if result.trajectory]

    assert len(set(first_recipes(True))) == 1  # one instance, one first observation
    assert len(set(first_recipes(False))) > 1
    assert first_recipes(False) == first_recipes(False)


def test_files_are_told_apart_by_as_much_path_as_it_takes(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a/train/policy.zip", "b/train/policy.zip", "p/x.zip", "p/y.zip")]
    assert policy_labels(["random", *names]) == [
        "random",
        "trained (a/train)",
        "trained (b/train)",
        "trained (x)",
        "trained (y)",
    ]
    assert policy_labels([names[0]]) == ["trained (train)"]


def test_random_plays_other_recipes_on_another_instance() -> None:
    """Repetitions are independent units only if a seed's draws differ between instances."""
    first, second = (run_named_episode(SETTINGS, "random", instance, 0) for instance in (100, 101))
    assert [entry.recipe for entry in first.trajectory] != [entry.recipe for entry in second.trajectory]
    assert len({episode_seed(instance, seed) for instance in range(50) for seed in range(50)}) == 2500


def test_an_edited_data_file_is_another_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D03: nothing stale is served."""
    compare(SETTINGS, ["random"], [100], [0], tmp_path)
    whole = ScriptedTask.sources

    def edited(self: ScriptedTask) -> list[Source]:
        left, right = whole(self)
        rows = [{**row, "completion": row["completion"] + "x"} for row in left.rows["demonstrations"]]
        return [replace(left, rows={**left.rows, "demonstrations": rows}), right]

    monkeypatch.setattr(ScriptedTask, "sources", edited)
    with pytest.raises(ValueError, match=r"made with other settings; content\.100: '\w+' there, '\w+' now"):
        compare(SETTINGS, ["random"], [100], [0], tmp_path)


def test_a_broken_off_episode_goes_on_from_its_finished_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(SETTINGS, ["random"], [100], [0], tmp_path / "whole")
    begin, launched = ScriptedTrainer.begin, []

    def break_off(self: ScriptedTrainer, *arguments: Any) -> Any:
        launched.append(1)
        if len(launched) == 3:
            raise KeyboardInterrupt
        return begin(self, *arguments)

    monkeypatch.setattr(ScriptedTrainer, "begin", break_off)
    with pytest.raises(KeyboardInterrupt):
        compare(SETTINGS, ["random"], [100], [0], tmp_path / "broken")
    assert compare(SETTINGS, ["random"], [100], [0], tmp_path / "broken") == whole
    assert len(launched) == 1 + len(whole.episodes[0].trajectory)  # the broken-off one again, no other
    assert not list((tmp_path / "broken" / "running").iterdir())


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy: unknown 'rondom'\. Did you mean 'random'"):
        compare(SETTINGS, ["rondom"], [100], [0], tmp_path)
    with pytest.raises(
        ValueError, match=r"reference: 'rondom' is not among the compared policies\. Did you mean 'random'"
    ):
        compare(SETTINGS, ["random"], [100], [0], tmp_path, reference="rondom")
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
    with pytest.raises(ValueError, match=r"random-\w+-100-0\.json: damaged .*delete the file"):
        compare(SETTINGS, ["random"], [100], [0], tmp_path)


def test_workers_take_devices_in_turn() -> None:
    """Case C11: 4 workers on 2 devices get 0, 1, 0, 1."""
    settings = EnvSettings(devices=("cuda:0", "cuda:1"))
    assert [settings.device_of(worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert EnvSettings().device_of(3) == "auto"
