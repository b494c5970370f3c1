"""Adjustments of the data reach the very next step: what the model is really given, and what is refused."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Limit
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Chat, Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.apportionment import Apportionment
from posttrain_gym.inner_trainers.trl.session import TrlSession
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from posttrain_gym.inner_trainers.trl.value import trunk_of
from tests.adjusted_rounds import SOURCES, FourSources, adjusted, recipe
from tests.chat_rounds import ChatTask, length_reward, write_chat_checkpoint
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import equal, graded, run

UP, DOWN = Adjustment("batch_scale", 1.25), Adjustment("batch_scale", 0.5)
MORE, FEWER = Adjustment("generations_step", 1.0), Adjustment("generations_step", -1.0)
ROWS = ("sft", "midtrain", "dpo", "kto")
PROMPTS = ("grpo", "rloo", "ppo", "distill")


def toward(source: str, share: float = 0.5) -> Adjustment:
    return Adjustment("mix_toward", share, source)


def away(source: str, share: float = 1.0) -> Adjustment:
    return Adjustment("mix_away", share, source)


@pytest.fixture(scope="module", name="task")
def task_of_four_sources(folder: Path) -> TinyTask:
    return FourSources(folder, folder)


class Watched:
    """A round, and the prompts of the rows that its model was given with a gradient: step -> prompts, pass by pass."""

    def __init__(self, trainer: TrlTrainer, task: TinyTask, asked: Recipe, **arguments: Any) -> None:
        self.session: TrlSession = trainer.begin(task, asked, trainer.base(task), 3, **arguments)
        self.passes: dict[int, list[list[str]]] = defaultdict(list)
        self._inner, self._sides = self.session._trainer, 2 if asked.algorithm == "dpo" else 1
        self._source = {
            row["prompt"]: name for name, source in task.built.sources.items() for row in source.rows.get("prompts", ())
        }
        trunk_of(self._inner.model).register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, arguments: Any, given: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        texts = self._inner.processing_class.batch_decode(given["input_ids"], skip_special_tokens=True)
        prompts = [text[:4] for text in texts]
        self.passes[self.session.step + 1].append(prompts[: len(prompts) // self._sides])

    def prompts(self, step: int) -> list[str]:
        return [prompt for one_pass in self.passes[step] for prompt in one_pass]

    def sizes(self, step: int) -> list[int]:
        return [len(one_pass) for one_pass in self.passes[step]]

    def sources(self, step: int) -> Counter[str]:
        return Counter(self._source[prompt] for prompt in self.prompts(step))

    def after(self, steps: int, *adjustments: Adjustment) -> Watched:
        """Advance to ``steps`` steps and apply adjustments."""
        if steps > self.session.step:
            self.session.advance(steps - self.session.step)
        for adjustment in adjustments:
            self.session.apply(adjustment)
        return self

    def refusal(self, adjustment: Adjustment) -> str:
        reason = self.session.refusal(adjustment)
        assert reason is not None
        with pytest.raises(ValueError, match="adjustment"):
            self.session.apply(adjustment)
        return reason

    def finish(self) -> Any:
        self.session.advance()
        report, checkpoint = self.session.result()
        assert report.failure is None and checkpoint is not None, report.failure
        return report

    def close(self) -> None:
        self.session.close()


# Batch size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*ROWS, *PROMPTS])
def test_the_next_step_trains_on_a_larger_and_then_on_a_smaller_batch(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    watched = Watched(trainer, task, recipe(algorithm)).after(1, UP)
    larger = 12 if algorithm in ("grpo", "rloo") else 10  # groups of 4 stay whole
    assert watched.session.settings["batch_size"] == larger
    watched.after(2, DOWN)
    smaller = 8 if larger == 12 else 5
    report = watched.finish()
    assert [watched.sizes(step) for step in (1, 2, 3, 4)] == [[8], [larger], [smaller], [smaller]]
    assert [str(adjustment) for _, adjustment in report.adjustments] == ["batch_scale 1.25", "batch_scale 0.5"]


@pytest.mark.parametrize("algorithm", ["sft", "kto", "grpo", "distill"])
def test_every_pass_of_an_accumulated_step_has_the_new_size(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe(algorithm, batch_size=4, gradient_accumulation=2, num_generations=8, steps=3)
    watched = Watched(trainer, task, asked).after(1, Adjustment("batch_scale", 1.5))
    watched.finish()
    size = 8 if algorithm == "grpo" else 6
    assert [watched.sizes(step) for step in (1, 2, 3)] == [[4, 4], [size, size], [size, size]]


def test_a_size_may_change_before_the_first_step_but_not_grow(trainer: TrlTrainer, task: TinyTask) -> None:
    for algorithm in ("sft", "grpo"):
        watched = Watched(trainer, task, recipe(algorithm, steps=2))
        assert watched.refusal(UP).startswith("no step has shown yet what memory one takes")
        watched.after(0, DOWN)
        watched.finish()
        assert [watched.sizes(step) for step in (1, 2)] == [[4], [4]]


@pytest.mark.parametrize(
    ("settings", "factor", "size"),
    [
        ({"batch_size": 1}, 1.25, 2),
        ({"batch_size": 8}, 1.01, 9),
        ({"batch_size": 8}, 0.99, 7),
        ({"batch_size": 8}, 1000.0, 8000),
        ({"batch_size": 8}, 0.001, 1),
        ({"algorithm": "kto", "batch_size": 8}, 0.001, 2),
        ({"algorithm": "grpo", "batch_size": 8}, 0.8, 4),
        ({"algorithm": "grpo", "batch_size": 6, "num_generations": 3}, 1.25, 9),
        ({"algorithm": "grpo", "batch_size": 4, "gradient_accumulation": 2, "num_generations": 8}, 1.25, 8),
        ({"algorithm": "grpo", "batch_size": 3, "gradient_accumulation": 4, "num_generations": 4}, 1.25, 4),
        ({"batch_size": 1}, 0.8, None),
        ({"algorithm": "grpo", "batch_size": 4}, 0.8, None),
        ({"algorithm": "kto", "batch_size": 2}, 0.8, None),
    ],
)
def test_the_size_taken_is_the_nearest_other_one_that_is_legal(
    settings: dict[str, Any], factor: float, size: int | None, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe(**{"algorithm": "sft", "steps": 2, **settings})
    watched = Watched(trainer, task, asked)
    watched.session._trainer.live_rows.fitted.append(asked.batch_size)  # as if a step had shown that it fits
    if size is None:
        assert watched.refusal(Adjustment("batch_scale", factor)).startswith("no batch size smaller than")
    else:
        watched.after(0, Adjustment("batch_scale", factor))
        assert watched.session.settings["batch_size"] == size
    assert watched.refusal(Adjustment("batch_scale", 1.0)) == "a factor of 1 changes nothing"
    watched.close()


def test_growth_that_memory_would_not_hold_is_refused_with_the_arithmetic(task: TinyTask) -> None:
    most = 2**40
    watched = Watched(TrlTrainer(fault_policy=FaultPolicy(max_memory_bytes=most)), task, recipe("sft")).after(1)
    memory = watched.session._trainer.live_rows.memory
    assert list(memory.peaks) == [8] and 0 < memory.level <= memory.peaks[8]
    memory.level = most // 2
    memory.observe(8, most - 1000)
    assert watched.refusal(UP).startswith("a batch of 10 would take about ")
    memory.observe(9, most - 1000)  # a second size says that nothing grows
    watched.after(1, UP)
    watched.finish()
    assert watched.sizes(2) == [10]


def test_every_size_that_a_step_had_is_seen_by_the_memory_model(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", steps=9)).after(5, UP).after(6, UP).after(7, DOWN).after(8)
    assert list(watched.session._trainer.live_rows.memory.peaks) == [8, 10, 13]
    watched.close()


def test_a_budget_is_never_passed_by_a_batch_that_has_grown(trainer: TrlTrainer, task: TinyTask) -> None:
    asked = recipe("sft", steps=6)
    cost = trainer.step_cost_bound(task, asked).trained_tokens
    watched = Watched(trainer, task, asked, limit=Limit("train_tokens", 4 * cost)).after(
        1, Adjustment("batch_scale", 2.0)
    )
    report = watched.finish()  # 1 step of 8, then at most 1 of 16 before the next would pass it
    assert (report.ended, report.steps, report.training_cost.trained_tokens) == ("budget", 2, 3 * cost)


@pytest.mark.parametrize(
    ("algorithm", "factor"), [("sft", 4.0), ("sft", 32.0), ("dpo", 8.0), ("grpo", 8.0), ("ppo", 8.0)]
)
def test_a_step_that_an_adjustment_made_too_dear_is_not_begun(
    algorithm: str, factor: float, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe(algorithm, steps=6)
    limit = Limit("train_tokens", 2.5 * trainer.step_cost_bound(task, asked).in_unit("train_tokens"))
    session = trainer.begin(task, asked, trainer.base(task), 3, limit)
    session.advance(1)
    session.apply(Adjustment("batch_scale", factor))
    session.advance()
    report, checkpoint = session.result()
    assert (report.ended, report.steps, report.failure) == ("budget", 1, None)
    assert report.training_cost.in_unit("train_tokens") <= limit.amount
    assert checkpoint is not None


# Completions per prompt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_next_step_samples_another_number_of_completions_of_each_prompt(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    watched = Watched(trainer, task, recipe(algorithm)).after(1, FEWER).after(2, MORE, MORE)
    watched.finish()
    assert [sorted(Counter(watched.prompts(step)).values()) for step in (1, 2, 3)] == [[4, 4], [2, 2, 2, 2], [8]]


def test_completions_left_from_before_are_not_used_again(trainer: TrlTrainer, task: TinyTask) -> None:
    asked = recipe("grpo", num_iterations=3, steps=4)
    for adjustment in (FEWER, UP, toward("ash"), Adjustment("hardest_rows")):
        watched = Watched(trainer, task, asked).after(1, adjustment)
        calls: list[int] = []
        inner = watched.session._trainer
        sample = inner._generate_single_turn

        def counted(ids: Any, *rest: Any, at: Any = watched, calls: Any = calls, sample: Any = sample) -> Any:
            calls.append(at.session.step + 1)
            return sample(ids, *rest)

        inner._generate_single_turn = counted
        watched.finish()
        assert calls[0] == 2, adjustment


def test_each_completion_of_a_conversation_is_judged_by_its_own_last_turn(trainer: TrlTrainer, tmp_path: Path) -> None:
    judged: list[str] = []

    def verifier(row: Mapping[str, Any], completion: str) -> float:
        judged.append(completion)
        return length_reward(row, completion)

    chat = Chat(tool=lambda text: "on", max_turns=2)
    task = ChatTask(write_chat_checkpoint(tmp_path), chat=chat, verifier=verifier)
    asked = Recipe("grpo", {"talk": 1.0}, steps=2, batch_size=8, num_generations=4)
    session = trainer.begin(task, asked, trainer.base(task), 3)
    session.advance(1)
    session.apply(UP)
    inner, turns = session._trainer, list[str]()
    sample = inner.rollout_func

    def noted(*arguments: Any) -> Any:
        found = sample(*arguments)
        turns.extend(found["last_turn"])
        return found

    inner.rollout_func = noted
    judged.clear()
    session.advance()
    assert session.result()[0].failure is None
    assert len(turns) == 12 and len(set(turns)) > 3 and judged == turns


def test_only_divisors_of_at_least_two_are_taken(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("grpo", batch_size=6, num_generations=3))  # allowed: 2, 3, 6
    watched.after(0, FEWER)
    assert watched.session.settings["num_generations"] == 2
    number = "no number of completions per prompt"
    assert watched.refusal(FEWER) == f"{number} fewer than 2 and at least 2 divides the 6 of a step"
    watched.after(0, MORE, MORE)
    assert watched.session.settings["num_generations"] == 6
    assert watched.refusal(MORE) == f"{number} more than 6 divides the 6 of a step"
    assert watched.refusal(Adjustment("generations_step", 0.0)) == "a step of 0 changes nothing"
    watched.close()


# Mix ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*ROWS, *PROMPTS])
def test_the_next_step_draws_by_the_new_mix_from_a_source_that_was_left_out_too(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    watched = (
        Watched(trainer, task, recipe(algorithm, mix={"ash": 1.0})).after(1, toward("cedar")).after(2, away("ash"))
    )
    assert watched.session.settings["mix.cedar"] == 1.0
    watched.finish()
    assert [dict(watched.sources(step)) for step in (1, 2, 3, 4)] == [
        {"ash": 8},
        {"ash": 4, "cedar": 4},
        {"cedar": 8},
        {"cedar": 8},
    ]


def test_shares_are_met_to_within_a_row_over_the_steps_to_come(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", steps=9)).after(1, toward("ash", 0.1))
    watched.finish()
    total: Counter[str] = Counter()
    for step in range(2, 10):
        total += watched.sources(step)
        for name in SOURCES:
            share = 0.325 if name == "ash" else 0.225
            assert abs(total[name] - share * 8 * (step - 1)) < 1


def test_rows_are_apportioned_to_within_a_row_at_any_time() -> None:
    for shares in ({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.97, "b": 0.01, "c": 0.01, "d": 0.01}, {"a": 1.0}):
        apportionment, given = Apportionment(shares), Counter[str]()
        for count in (1, 7, 2, 30, 1, 1, 5) * 5:
            given += Counter(apportionment.next(count))
            assert all(abs(given[n] - s * given.total()) < 1 for n, s in shares.items())
        before = apportionment.next(13)
        apportionment.undo(before)
        assert apportionment.next(13) == before


def test_what_a_source_is_owed_outlives_a_change_of_shares() -> None:
    """Shares that move a little after every few rows: no source starves."""
    apportionment, given, wanted = (
        Apportionment({"a": 0.4, "b": 0.4, "c": 0.1, "d": 0.1}),
        Counter[str](),
        dict.fromkeys("abcd", 0.0),
    )
    for step in range(400):
        shift = 0.001 * (step % 2)
        shares = {"a": 0.4 + shift, "b": 0.4 - shift, "c": 0.1, "d": 0.1}
        apportionment.change(shares)
        given += Counter(apportionment.next(4))
        wanted = {name: wanted[name] + 4 * share for name, share in shares.items()}
        assert all(abs(given[name] - wanted[name]) < 1.5 for name in shares)
    apportionment.change({"a": 1.0, "b": 0.0})
    assert apportionment.next(3) == {"a": 3}
    apportionment.change({"b": 0.5, "c": 0.5})
    assert apportionment.next(10) == {"b": 5, "c": 5}


def test_weight_moves_to_the_others_by_their_weights(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", mix={"ash": 0.5, "birch": 0.3, "cedar": 0.2}))
    watched.after(0, away("ash", 0.2))
    mix = {name: watched.session.settings[f"mix.{name}"] for name in ("ash", "birch", "cedar")}
    assert mix == pytest.approx({"ash": 0.4, "birch": 0.36, "cedar": 0.24})
    watched.after(0, toward("ash", 0.5))
    assert watched.session.settings["mix.ash"] == pytest.approx(0.7)
    watched.close()


def test_after_a_reset_the_loaders_rows_come_as_if_nothing_had_been(trainer: TrlTrainer, task: TinyTask) -> None:
    plain = Watched(trainer, task, recipe("sft", steps=5))
    plain.finish()
    watched = Watched(trainer, task, recipe("sft", steps=5)).after(1, toward("ash"), Adjustment("hardest_rows"))
    watched.after(3, Adjustment("mix_reset"))
    assert watched.refusal(Adjustment("mix_reset")).startswith("the recipe's mix is in force already")
    watched.finish()
    same = [watched.prompts(step) == plain.prompts(step) for step in range(1, 6)]
    assert same == [True, False, False, True, True]


def test_no_row_comes_again_before_the_others(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", mix={"ash": 1.0}, batch_size=4)).after(2, DOWN)  # 16 rows
    watched.finish()
    seen = [prompt for step in (1, 2, 3, 4) for prompt in watched.prompts(step)]
    assert len(seen) == len(set(seen)) == 12


def test_sources_that_cannot_change_the_mix_are_refused(trainer: TrlTrainer, task: TinyTask, folder: Path) -> None:
    watched = Watched(trainer, task, recipe("sft", mix={"ash": 1.0}))
    assert watched.refusal(toward("ash")) == "source 'ash' is the whole mix already"
    assert watched.refusal(away("birch")) == "source 'birch' has no weight in the mix"
    assert watched.refusal(toward("beech")).startswith("no source 'beech' has demonstrations rows, which sft trains on")
    watched.close()
    tiny = TinyTask(folder, verifier=graded)  # only ``good`` has prompts
    alone = trainer.begin(tiny, recipe("grpo", mix={"good": 1.0}), trainer.base(tiny), 3)
    assert alone.refusal(away("good")) == "'good' is the only source with prompts rows"
    assert "no source 'bad' has prompts rows" in str(alone.refusal(toward("bad")))
    alone.close()


class LongSource(TinyTask):
    """Two sources: one of short rows, one of rows with prompts of so many letters; every other of those is longer."""

    name = "long"

    def __init__(self, folder: Path, lengths: Sequence[int]) -> None:
        super().__init__(folder)
        self._lengths = lengths

    def sources(self) -> list[Source]:
        rows = [{"prompt": "a" * length + "=", "completion": "b"} for length in self._lengths]
        short = [{"prompt": f"{letter}=", "completion": "b"} for letter in "abcdefgh"]
        return [Source("long", {"demonstrations": rows}), Source("short", {"demonstrations": short})]


def test_a_source_that_comes_into_the_mix_is_held_to_what_the_recipe_asks(trainer: TrlTrainer, folder: Path) -> None:
    task = LongSource(folder, [5, 40] * 4)
    asked = recipe("sft", mix={"short": 1.0}, max_length=16)
    watched = Watched(trainer, task, asked).after(1, toward("long", 1.0))
    report = watched.finish()
    assert [flag for flag in report.flags if "'long'" in flag] == [
        "4 of 8 rows of source 'long' keep no completion token at max_length 16: rows 2, 4, 6, 8"
    ]
    assert watched.prompts(2) == ["aaaa"] * 8  # none of the rows that keep nothing
    task = LongSource(folder, [40] * 8)
    watched = Watched(trainer, task, asked)
    assert "at 16 all 8 rows of source 'long' keep no completion token" in watched.refusal(toward("long"))
    watched.close()
    task = LongSource(folder, [200] * 8)  # the model has 128 positions
    watched = Watched(trainer, task, recipe("sft", mix={"short": 1.0}, max_length=256))
    assert "do not fit the 128 positions of the model" in watched.refusal(toward("long"))
    watched.close()


def test_replayed_rows_keep_their_share(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("midtrain", mix={"ash": 1.0}, replay_share=0.5)).after(1, away("ash"))
    report = watched.finish()
    replayed = {f"loss/{name} (replayed)" for name in SOURCES}
    assert {"loss/birch", "loss/cedar", "loss/dogwood"} < report.curves[1].keys() | report.curves[2].keys()
    assert "loss/ash" in report.curves[0] and "loss/ash" not in report.curves[1]
    assert replayed <= report.curves[0].keys() | report.curves[1].keys()


# Hard rows ------------------------------------------------------------------------------------------------------------


def test_half_of_the_next_batch_are_the_prompts_that_earned_least(trainer: TrlTrainer, folder: Path) -> None:
    rewards: dict[str, list[float]] = defaultdict(list)

    def judged(row: Mapping[str, Any], completion: str) -> float:
        rewards[row["prompt"]].append(graded(row, completion))
        return rewards[row["prompt"]][-1]

    task = OneSource(folder, verifier=judged)
    watched = Watched(trainer, task, recipe("grpo", mix={"good": 1.0}, batch_size=32)).after(1)
    mean = {prompt: sum(found) / len(found) for prompt, found in rewards.items()}
    hardest = set(sorted(mean, key=lambda prompt: mean[prompt])[: math.ceil(len(mean) / 4)])
    assert len(mean) == 8 and len(hardest) == 2
    watched.after(1, Adjustment("hardest_rows", 0.25)).after(2)
    assert hardest <= set(watched.prompts(2))
    assert len(set(watched.prompts(2)) & set(mean)) == 2  # the other six were not seen before
    watched.close()


class OneSource(TinyTask):
    """The tiny task without rows that are answered wrongly."""

    name = "one"

    def sources(self) -> Any:
        return super().sources()[1:]


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_half_of_the_next_batch_are_the_rows_with_the_largest_loss(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe(algorithm, mix={"ash": 1.0}, steps=3, beta=1.0, learning_rate=3e-2)
    watched = Watched(trainer, task, asked)
    losses: dict[str, float] = {}
    scores: list[torch.Tensor] = []
    inner = watched.session._trainer

    def note(module: Any, arguments: Any, outputs: Any) -> None:
        """Note what a row's loss grows with: its negative log-likelihood, or minus the margin to the reference."""
        scores.append(outputs.log_probs.detach().sum(dim=1))
        if algorithm == "sft" or not torch.is_grad_enabled():
            found = scores[-1] if algorithm == "sft" else scores[-2] - scores[-1]  # the policy reads first
            margins = found if algorithm == "sft" else found[:8] - found[8:]
            losses.update(zip(watched.passes[watched.session.step + 1][-1], (-margins).tolist(), strict=True))

    inner.model.register_forward_hook(note)
    if algorithm == "dpo":
        inner.ref_model.register_forward_hook(note)
    watched.after(2)
    hardest = sorted(losses, key=lambda prompt: -losses[prompt])[: math.ceil(len(losses) / 4)]
    assert len(losses) > 8 and len(hardest) >= 3
    watched.after(2, Adjustment("hardest_rows", 0.5))
    watched.finish()
    assert sum(prompt in hardest for prompt in watched.prompts(3)) == 4


def test_hardness_that_is_not_known_is_refused(trainer: TrlTrainer, task: TinyTask) -> None:
    hard = Adjustment("hardest_rows", 0.5)
    watched = Watched(trainer, task, recipe("sft"))
    assert watched.refusal(hard) == "no row was trained on yet, so none is known to be hard"
    watched.after(1, hard)
    assert watched.refusal(hard) == "the share of 0.5 is drawn from the hardest rows already"
    watched.close()
    taught = Watched(trainer, task, recipe("distill")).after(1)
    assert taught.refusal(hard).startswith("distill asks for no reward")
    taught.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "rft"}, "all of its rows are sampled before the first step"),
        ({"algorithm": "sft", "packing": True, "max_length": 16}, "rows are packed before the round begins"),
    ],
)
def test_rows_that_are_fixed_cannot_be_adjusted(
    changes: dict[str, Any], reason: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    session = trainer.begin(task, recipe(**changes), trainer.base(task), 3)
    session.advance(1)
    for adjustment in (UP, toward("ash"), away("ash"), Adjustment("mix_reset"), Adjustment("hardest_rows")):
        assert session.refusal(adjustment) == f"the rows of this round cannot change: {reason}"
    session.close()


# Reproducing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sft", "kto", "grpo"])
def test_equal_adjusted_rounds_are_equal_however_they_are_parked(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    changes = [(1, UP), (1, toward("ash", 0.3)), (2, Adjustment("hardest_rows")), (3, DOWN)]
    asked = recipe(algorithm, steps=5)
    report, weights, _ = adjusted(trainer, task, asked, *changes)
    session = trainer.begin(task, asked, trainer.base(task), 3)
    while not session.done:
        session.advance(1)
        for after, adjustment in changes:
            if after == session.step:
                session.apply(adjustment)
    other, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(checkpoint.weights, weights) and checkpoint.id == report.checkpoint
    assert [row["loss"] for row in other.curves] == [row["loss"] for row in report.curves]
    plain, _ = run(trainer, task, asked)
    assert plain.checkpoint != report.checkpoint
    others, _, _ = adjusted(trainer, task, asked, *changes, seed=4)
    assert others.curves[2] != report.curves[2]


def test_what_is_undone_before_a_step_leaves_the_round_as_it_was(trainer: TrlTrainer, task: TinyTask) -> None:
    for algorithm in ("sft", "grpo"):
        asked = recipe(algorithm, steps=3)
        _, plain = run(trainer, task, asked)
        undone = [toward("ash"), Adjustment("mix_reset"), DOWN, Adjustment("batch_scale", 2.0)]
        _, weights, _ = adjusted(trainer, task, asked, *((1, adjustment) for adjustment in undone))
        assert plain is not None and equal(weights, plain.weights)


# The curve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("algorithm", ROWS)
def test_the_loss_of_each_source_adds_up_to_the_steps(
    algorithm: str, lora_rank: int, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe(algorithm, lora_rank=lora_rank, steps=3, mix={"ash": 0.5, "dogwood": 0.5}, learning_rate=3e-2)
    watched = Watched(trainer, task, asked)
    report = watched.finish()
    for step, row in enumerate(report.curves, start=1):
        counts = watched.sources(step)  # all rows have as many tokens
        assert {name for name in row if name.startswith("loss/")} == {f"loss/{name}" for name in counts}
        mean = sum(row[f"loss/{name}"] * count for name, count in counts.items()) / 8
        assert mean == pytest.approx(row["loss"], rel=1e-5)
    assert report.curves[-1]["loss/ash"] != report.curves[-1]["loss/dogwood"]


@pytest.mark.parametrize("loss", ["ipo", "sigmoid+sft"])
def test_the_loss_of_a_pair_is_that_of_the_variant(loss: str, trainer: TrlTrainer, task: TinyTask) -> None:
    report = Watched(trainer, task, recipe("dpo", loss=loss, mix={"ash": 1.0}, learning_rate=3e-2)).finish()
    for row in report.curves:
        assert row["loss/ash"] == pytest.approx(row["loss"], rel=1e-5)


def test_the_loss_of_a_source_is_over_all_passes_and_absent_without_rows(trainer: TrlTrainer, task: TinyTask) -> None:
    asked = recipe("sft", batch_size=4, gradient_accumulation=2, mix={"ash": 1.0})
    report = Watched(trainer, task, asked).after(1, away("ash")).finish()
    assert report.curves[0]["loss/ash"] == pytest.approx(report.curves[0]["loss"], rel=1e-5)
    assert "loss/birch" not in report.curves[0] and "loss/ash" not in report.curves[1]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_the_reward_of_each_source_is_what_its_verifier_gave(algorithm: str, trainer: TrlTrainer, folder: Path) -> None:
    given: list[tuple[str, float]] = []

    def judged(row: Mapping[str, Any], completion: str) -> float:
        given.append((row["prompt"], graded(row, completion)))
        return given[-1][1]

    task = FourSources(folder, folder, verifier=judged)
    asked = recipe(algorithm, steps=3, num_iterations=2, mix={"ash": 0.5, "birch": 0.5}, num_generations=2)
    watched = Watched(trainer, task, asked)
    report = watched.finish()
    assert len(given) == 16  # sampled for the first step and the third
    for step, rewards in ((1, given[:8]), (2, given[:8]), (3, given[8:])):
        for name in ("ash", "birch"):
            own = [reward for prompt, reward in rewards if watched._source[prompt] == name]
            assert own and report.curves[step - 1][f"reward/{name}"] == pytest.approx(sum(own) / len(own))
        assert "reward/cedar" not in report.curves[step - 1]


# Running out of memory ------------------------------------------------------------------------------------------------


def fails(watched: Watched, where: str, too_many: Callable[[Any], bool], pass_number: int = 1) -> None:
    """Let a method of the trainer run out of memory at its ``pass_number``-th call with too many rows."""
    inner, calls = watched.session._trainer, [0]
    original = getattr(inner, where)

    def short_of_memory(*arguments: Any, **more: Any) -> Any:
        if any(too_many(argument) for argument in arguments):
            calls[0] += 1
            if calls[0] >= pass_number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*arguments, **more)

    setattr(inner, where, short_of_memory)


def more_rows_than(most: int) -> Callable[[Any], bool]:
    def too_many(argument: Any) -> bool:
        if isinstance(argument, Mapping):
            rows = argument.get("input_ids", argument.get("prompt_ids"))
            return rows is not None and len(rows) > most
        return isinstance(argument, Sequence) and len(argument) > most

    return too_many


@pytest.mark.parametrize("algorithm", [*ROWS, *PROMPTS])
def test_a_step_that_runs_out_of_memory_at_a_grown_batch_is_done_again_smaller(
    algorithm: str, trainer: TrlTrainer, task: TinyTask
) -> None:
    watched = Watched(trainer, task, recipe(algorithm)).after(2, UP)
    grown = int(watched.session.settings["batch_size"])
    sides = 2 if algorithm == "dpo" else 1
    fails(watched, "compute_loss", more_rows_than(8 * sides))
    report = watched.after(3).session
    assert report.settings["batch_size"] == 8
    assert watched.refusal(UP).startswith(f"a batch of {grown} ran out of memory in this round")
    end = watched.finish()
    assert (end.ended, end.steps, end.rescued) == ("finished", 4, ())
    flags = [flag for flag in end.flags if "memory" in flag]
    assert len(flags) == 1 and flags[0].startswith(f"memory ran out at a batch of {grown} in step 3 (OutOfMemoryError")
    assert "done again at 8" in flags[0]
    assert [watched.sizes(step)[-1] for step in (1, 2, 3, 4)] == [8, 8, 8, 8]
    assert all(math.isfinite(row["loss"]) for row in end.curves)
    names = [name for name in end.curves[2] if name.startswith(("loss/", "reward/"))]
    assert bool(names) is (algorithm != "distill")


@pytest.mark.parametrize("where", [1, 2])
def test_a_step_done_again_begins_from_clean_gradients_and_counts(
    where: int, trainer: TrlTrainer, task: TinyTask
) -> None:
    """Whichever pass fails, the weights are those of the step at the smaller size alone."""
    asked = recipe("sft", batch_size=4, gradient_accumulation=2, steps=3, mix={"ash": 0.5, "birch": 0.5})
    watched = Watched(trainer, task, asked).after(1, Adjustment("batch_scale", 2.0))
    fails(watched, "compute_loss", more_rows_than(4), where)
    report = watched.finish()
    first = Watched(trainer, task, asked).after(1, Adjustment("batch_scale", 2.0))
    fails(first, "compute_loss", more_rows_than(4))
    assert first.finish().curves == report.curves
    assert watched.sizes(2) == [8] * (where - 1) + [4, 4] and watched.sizes(3) == [4, 4]
    assert report.supervised_tokens == 3 * 8 * 2  # letter and end of each row, the failed pass left out
    row = report.curves[1]  # 4 rows of each source
    assert row["loss"] == pytest.approx((row["loss/ash"] + row["loss/birch"]) / 2, rel=1e-5)
    tokens = [6 * len(one_pass) for step in (1, 2, 3) for one_pass in watched.passes[step]]
    counted = sum(tokens)  # a pass that failed before the model was asked has not been paid, the one before it has
    assert report.training_cost.trained_tokens >= counted


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"batch_size": 4, "gradient_accumulation": 2}])
def test_sampling_that_runs_out_of_memory_is_done_again_too(
    changes: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe("grpo", **changes)
    watched = Watched(trainer, task, asked).after(2, Adjustment("batch_scale", 2.0))
    fails(watched, "_generate_single_turn", more_rows_than(8))
    report = watched.finish()
    assert (report.ended, report.steps) == ("finished", 4)
    passes = asked.gradient_accumulation
    assert all(watched.sizes(step) == [8 // passes] * passes for step in (1, 2, 3, 4))
    assert sum("memory ran out" in flag for flag in report.flags) == 1


def test_a_critic_trains_on_after_memory_ran_out(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("ppo", critic="model", batch_size=4, gradient_accumulation=2, kl_coef=0.1))
    watched.after(1, UP)
    fails(watched, "_compute_loss", more_rows_than(4), 2)
    report = watched.finish()
    assert report.steps == 4 and all(math.isfinite(row["value_loss"]) for row in report.curves)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_cannot_be_paid_twice_is_not_done_again(
    accumulation: int, trainer: TrlTrainer, task: TinyTask
) -> None:
    asked = recipe("sft", batch_size=8 // accumulation, gradient_accumulation=accumulation, steps=4)
    one = trainer.step_cost_bound(task, asked).in_unit("train_tokens")
    limit = Limit("train_tokens", 3 * one)  # one step, and one of twice its size
    watched = Watched(trainer, task, asked, limit=limit).after(1, Adjustment("batch_scale", 2.0))
    inner = watched.session._trainer
    loss = inner.compute_loss

    def short_of_memory(*arguments: Any, **more: Any) -> Any:
        found = loss(*arguments, **more)  # what was computed has been paid
        if len(arguments[1]["input_ids"]) > 8 // accumulation:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    inner.compute_loss = short_of_memory
    watched.session.advance()
    report, checkpoint = watched.session.result()
    # of two passes only the first was spent, so that a step of the old size is still paid
    assert (report.ended, report.steps, report.failure) == ("budget", accumulation, None)
    assert report.training_cost.in_unit("train_tokens") <= limit.amount
    assert checkpoint is not None
    if accumulation == 2:
        return
    alone = Watched(trainer, task, asked)
    alone.session.advance(1)
    alone.session.apply(Adjustment("stop"))
    stopped = alone.session.result()[1]
    assert stopped is not None and equal(checkpoint.weights, stopped.weights)


def test_rows_of_a_step_done_again_are_counted_once(trainer: TrlTrainer, task: TinyTask) -> None:
    for algorithm in ("sft", "dpo", "kto", "ppo"):
        watched = Watched(trainer, task, recipe(algorithm, steps=2)).after(1, UP)
        fails(watched, "compute_loss", more_rows_than(8 * (2 if algorithm == "dpo" else 1)))
        rows = watched.session._trainer.live_rows
        before = sum(rows._times)
        times = rows._times
        watched.finish()
        assert sum(times) - before == 8, algorithm


def test_it_goes_back_to_the_last_size_that_fitted(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", steps=6)).after(1, UP).after(2, UP).after(3, UP)
    assert watched.session.settings["batch_size"] == 16  # 8, 10, 13, 16
    fails(watched, "compute_loss", more_rows_than(13))
    watched.after(4)
    assert watched.session.settings["batch_size"] == 13
    watched.finish()
    assert [watched.sizes(step) for step in range(1, 7)] == [[8], [10], [13], [13], [13], [13]]


def test_it_goes_down_to_the_recipes_own_size_where_it_must(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft", steps=5)).after(1, UP).after(2, UP)
    fails(watched, "compute_loss", more_rows_than(8))  # 10 had fitted before
    report = watched.finish()
    assert [watched.sizes(step) for step in range(1, 6)] == [[8], [10], [8], [8], [8]]
    assert sum("memory ran out" in flag for flag in report.flags) == 2


def test_memory_that_the_recipes_own_batch_lacks_ends_the_round_as_ever(trainer: TrlTrainer, task: TinyTask) -> None:
    for most in (0, 8):
        watched = Watched(trainer, task, recipe("sft")).after(1, UP if most == 0 else DOWN)
        fails(watched, "compute_loss", more_rows_than(0))
        watched.session.advance()
        report, checkpoint = watched.session.result()
        assert checkpoint is None and report.failure is not None and report.failure.kind == "oom"


def test_an_error_of_another_kind_is_not_tried_again(trainer: TrlTrainer, task: TinyTask) -> None:
    watched = Watched(trainer, task, recipe("sft")).after(1, UP)
    inner, calls = watched.session._trainer, []

    def broken(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        raise RuntimeError("shapes do not match")

    inner.compute_loss = broken
    watched.session.advance()
    report, _ = watched.session.result()
    assert len(calls) == 1 and report.failure is not None and report.failure.kind == "trainer_raised"


def test_the_checkpoint_of_a_round_that_ran_out_of_memory_has_an_id_of_its_own(
    trainer: TrlTrainer, task: TinyTask
) -> None:
    ids = set()
    for most in (8, 100):
        watched = Watched(trainer, task, recipe("sft")).after(2, UP)
        fails(watched, "compute_loss", more_rows_than(most))
        ids.add(watched.finish().checkpoint)
    ids.add(run(trainer, task, recipe("sft"))[0].checkpoint)
    assert len(ids) == 3


@pytest.mark.gpu
def test_a_card_that_is_full_takes_the_grown_batch_back(task: TinyTask) -> None:
    watched = Watched(TrlTrainer(device="cuda"), task, recipe("sft", steps=3)).after(1)
    memory = watched.session._trainer.live_rows.memory
    assert list(memory.peaks) == [8]
    memory.level = memory.peaks[8]  # so that the model foresees no growth and the card itself must say no
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        watched.after(1, Adjustment("batch_scale", 1000.0))  # 8,000 rows of 6 tokens take far more than 16 MB
        report = watched.finish()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (report.ended, report.steps) == ("finished", 3)
    assert watched.sizes(2)[-1] == 8 and watched.sizes(3) == [8]
    assert sum("memory ran out at a batch of 8000" in flag for flag in report.flags) == 1
