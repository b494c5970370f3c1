"""What cannot be applied is refused with its reason, for every algorithm as the documentation's table says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.experiments.doc_tables import adjustments_table
from posttrain_gym.inner_trainers.adjustments import CATALOGUE, KINDS, Adjustment
from posttrain_gym.inner_trainers.testing import write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.adjusted_rounds import SOURCES, FourSources, recipe
from tests.trl_fixtures import *  # noqa: F403


@pytest.fixture(scope="module")
def four(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FourSources:
    return FourSources(folder, write_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), seed=1))


def begun(trainer: TrlTrainer, task: FourSources, algorithm: str, steps: int = 1, **changes: Any) -> TrlSession:
    session = trainer.begin(task, recipe(algorithm, **changes), trainer.base(task), 3)
    if steps:
        session.advance(steps)
    return session


def algorithms_in_table() -> dict[str, set[str]]:
    """Return for each entry of the catalogue the algorithms that the table names."""
    found = {}
    for line in adjustments_table().splitlines()[2:]:
        _, _, entries, _, algorithms, _, _ = (cell.strip() for cell in line.split("|"))
        listed = {name.strip("`") for name in algorithms.split(", ")}
        names = [entry.split("`")[1] for entry in entries.split(", ")]
        found.update(dict.fromkeys(names, {*ALGORITHMS} if listed == {"all"} else listed))
    return found


FAVOURABLE: dict[str, Any] = {
    "schedule": "linear",
    "batch_size": 8,
    "num_generations": 4,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "gamma": 0.9,
    "lora_rank": 2,
}
"""A round in which all that an algorithm can ever take is legal, but for what needs something applied before."""

FIRST = {
    "lora_unfreeze": Adjustment("lora_freeze"),
    "log_less": Adjustment("log_more"),
    "mix_reset": Adjustment("mix_toward", 0.2, SOURCES[0]),
}
"""What must be applied before some kinds are legal."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_table_says_which_algorithm_takes_what(algorithm: str, trainer: TrlTrainer, four: FourSources) -> None:
    session = begun(trainer, four, algorithm, **FAVOURABLE)
    taken = set()
    for entry in CATALOGUE:
        adjustment = entry.adjustment(SOURCES)
        assert adjustment is not None
        first = FIRST.get(entry.kind)
        if first is not None and session.refusal(first) is None:
            session.apply(first)
        reason = session.refusal(adjustment)
        if reason is None:
            taken.add(entry.name)
        else:
            assert reason and not reason.endswith(".") and "\n" not in reason
            with pytest.raises(ValueError, match=f"adjustment '{entry.kind}': "):
                session.apply(adjustment)
    session.close()
    assert taken == {name for name, algorithms in algorithms_in_table().items() if algorithm in algorithms}


def test_the_table_has_every_kind_once() -> None:
    table = adjustments_table()
    assert [line.split("`")[1] for line in table.splitlines()[2:]] == list(KINDS)
    assert set(algorithms_in_table()) == {entry.name for entry in CATALOGUE}


@pytest.mark.parametrize(
    ("algorithm", "steps", "changes", "adjustment", "reason"),
    [
        ("sft", 1, {}, Adjustment("lr_restart"), "the next step has the rate with which the schedule would begin anew"),
        ("sft", 0, {"schedule": "linear"}, Adjustment("lr_restart"), "the schedule has not begun"),
        ("sft", 1, {"learning_rate": 5e5}, Adjustment("lr_scale", 2.5), r"learning_rate would become 1.25e\+06"),
        ("sft", 1, {"max_grad_norm": 5e5}, Adjustment("grad_clip_scale", 4.0), r"max_grad_norm would become 2e\+06"),
        ("sft", 1, {}, Adjustment("grad_clip_scale", 1.0), "a factor of 1 changes nothing"),
        ("sft", 1, {}, Adjustment("kl_scale", 2.0), "sft has no KL coefficient"),
        ("grpo", 1, {}, Adjustment("kl_scale", 1.5), "the round holds no reference model to keep close to; begin"),
        ("ppo", 0, {}, Adjustment("kl_scale", 1.5), "the round holds no reference model"),
        ("rloo", 1, {"lora_rank": 2}, Adjustment("kl_scale", 0.5), "kl_coef is 0, so it cannot be lowered"),
        ("grpo", 1, {"kl_coef": 60.0}, Adjustment("kl_scale", 2.0), r"kl_coef would become 120, outside \[0, 100\]"),
        ("grpo", 1, {"kl_coef": 0.1}, Adjustment("kl_scale", 1.0), "a factor of 1 changes nothing"),
        ("dpo", 1, {"beta": 60.0}, Adjustment("kl_scale", 2.0), r"beta would become 120, outside \(0, 100\]"),
        ("grpo", 1, {}, Adjustment("entropy_scale", 0.5), "entropy_coef is 0, so it cannot be lowered"),
        ("ppo", 1, {"entropy_coef": 9.0}, Adjustment("entropy_scale", 2.0), r"entropy_coef would become 18, outside"),
        ("rloo", 1, {}, Adjustment("entropy_scale", 2.0), "rloo has no entropy coefficient"),
        ("ppo", 1, {}, Adjustment("gamma_add", 0.01), r"gamma stays 1; it is kept in \[0, 1\]"),
        ("ppo", 1, {"gamma": 0.0}, Adjustment("gamma_add", -0.01), r"gamma stays 0; it is kept in \[0, 1\]"),
        ("ppo", 1, {}, Adjustment("gamma_add", 0.0), "gamma stays 1"),
        ("grpo", 1, {}, Adjustment("gamma_add", -0.01), "grpo has no discount"),
        ("grpo", 1, {"temperature": 4.9}, Adjustment("temperature_scale", 1.1), "temperature would become 5.39"),
        ("rloo", 1, {"temperature": 0.05}, Adjustment("temperature_scale", 0.9), r"temperature would become 0.045"),
        ("rft", 1, {}, Adjustment("temperature_scale", 0.9), "rft samples all its completions before its first step"),
        ("sft", 1, {}, Adjustment("temperature_scale", 0.9), "sft samples nothing"),
        ("sft", 0, {}, Adjustment("snapshot"), "no step was taken yet"),
        ("sft", 0, {}, Adjustment("rollback"), "no step was taken yet"),
        ("sft", 1, {}, Adjustment("lora_freeze"), "the round trains full weights; it needs a lora_rank above 0"),
        ("sft", 1, {"lora_rank": 2}, Adjustment("lora_unfreeze"), "the adapters' down-projections are not frozen"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(
    algorithm: str,
    steps: int,
    changes: dict[str, Any],
    adjustment: Adjustment,
    reason: str,
    trainer: TrlTrainer,
    four: FourSources,
) -> None:
    session = begun(trainer, four, algorithm, steps, **changes)
    settings = dict(session.settings)
    with pytest.raises(ValueError, match=rf"^adjustment '{adjustment.kind}': {reason}.*\.$"):
        session.apply(adjustment)
    assert session.settings == settings
    session.close()
    assert session.result()[0].adjustments == ()


def test_what_was_done_since_the_last_step_is_not_done_again(trainer: TrlTrainer, four: FourSources) -> None:
    session = begun(trainer, four, "sft", schedule="linear", lora_rank=2)
    snapshot, rollback, restart = Adjustment("snapshot"), Adjustment("rollback"), Adjustment("lr_restart")
    session.apply(snapshot)
    settled = "no step was taken since the last snapshot or rollback"
    assert session.refusal(snapshot) == session.refusal(rollback) == settled
    session.advance(1)
    session.apply(rollback)
    assert session.refusal(snapshot) == session.refusal(rollback) == settled
    session.apply(restart)
    assert session.refusal(restart) == "the next step has the rate with which the schedule would begin anew"
    session.apply(Adjustment("lora_freeze"))
    assert session.refusal(Adjustment("lora_freeze")) == "the adapters' down-projections are frozen already"
    session.advance(1)
    assert session.refusal(snapshot) is None and session.refusal(rollback) is None and session.refusal(restart) is None
    session.close()


def test_asking_whether_something_is_legal_changes_nothing(trainer: TrlTrainer, four: FourSources) -> None:
    session = begun(trainer, four, "grpo", **FAVOURABLE)
    settings, row = dict(session.settings), math.nan
    for _ in range(3):
        for entry in CATALOGUE:
            adjustment = entry.adjustment(SOURCES)
            assert adjustment is not None
            session.refusal(adjustment)
    assert session.settings == settings
    row = session.advance(1)["loss"]
    session.close()
    plain = begun(trainer, four, "grpo", 2, **FAVOURABLE)
    assert plain._curves[1]["loss"] == row
    plain.close()
