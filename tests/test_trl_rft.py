"""Rejection-sampling rounds train on exactly what passes, cost what they sample, and say so when nothing passes."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.base import Checkpoint, Limit
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.sampling import Completions, sample_completions
from posttrain_gym.inner_trainers.tasks.base import Chat
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import rft as rft_module
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import LINES, ChatTask, write_chat_checkpoint
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, by_hand, equal, grpo, run, trained

PROMPT = 4  # tokens of every tiny prompt


def rft(**changes: Any) -> Recipe:
    return grpo(**{"algorithm": "rft", "learning_rate": 1e-2, **changes})


def letters_pay(row: Mapping[str, Any], completion: str) -> float:
    """Pay for a letter at the beginning: about a third of what a model that has learnt nothing says."""
    return float(completion[:1] in tuple("abcdefgh"))


class Judge:
    """A verifier that remembers what it was shown."""

    def __init__(self, judge: Callable[[Mapping[str, Any], str], Any] = letters_pay) -> None:
        self.judge = judge
        self.seen: list[tuple[str, str, float]] = []

    def __call__(self, row: Mapping[str, Any], completion: str) -> Any:
        reward = self.judge(row, completion)
        self.seen.append((row["prompt"], completion, reward))
        return reward

    def passing(self, smallest: float = 1.0) -> list[tuple[str, str]]:
        return list(dict.fromkeys((p, text) for p, text, reward in self.seen if reward >= smallest and text))


def trained_rows(trainer: TrlTrainer, task: TinyTask, recipe: Recipe, **kwargs: Any) -> tuple[Any, list[str], Any]:
    """Return the report, the rows the round trained on as text, and the rows as columns."""
    session = trainer.begin(task, recipe, trainer.base(task), 3, **kwargs)
    session.advance(1)
    columns = session._trainer.train_dataset[:]
    texts = trainer._load(task).model.tokenizer.batch_decode(columns["input_ids"])
    session.advance()
    return session.result()[0], texts, columns


# What is trained on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_generations": 2}, {"batch_size": 4, "gradient_accumulation": 4}, {"lora_rank": 2}, {"steps": 2}],
    ids=str,
)
def test_exactly_what_passes_is_trained_on(changes: dict[str, Any], trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge()
    task, recipe = TinyTask(folder, verifier=judge), rft(**changes)
    count = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
    report, texts, columns = trained_rows(trainer, task, recipe)
    assert (report.failure, report.steps, report.ended) == (None, recipe.steps, "finished")
    assert len(judge.seen) == count  # as many as are trained on
    passing = judge.passing()
    assert 1 < len(passing) < count
    assert set(texts) == {f"{prompt}{answer}<eos>" for prompt, answer in passing}
    repeats = Counter(texts)
    assert len(texts) == count
    assert set(repeats.values()) <= {count // len(passing), -(-count // len(passing))}
    assert set(texts[: len(passing)]) == set(texts)  # none comes again before every other came
    for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
        assert labels == [-100] * PROMPT + ids[PROMPT:]
    assert report.supervised_tokens == sum(len(ids) - PROMPT for ids in columns["input_ids"])
    assert report.training_cost.trained_tokens == sum(map(len, columns["input_ids"]))
    passed = sum(reward >= 1 for *_, reward in judge.seen)
    assert report.flags[-1] == (
        f"rft: {passed} of {count} sampled completions passed (good {passed / count:.0%}), "
        f"{len(passing)} different ones"
    )


def test_the_prompts_are_the_drawn_ones_each_sampled_in_a_group(trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge()
    task = TinyTask(folder, verifier=judge)
    run(trainer, task, rft())
    rows = task.built.sources["good"].rows["prompts"]
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, 4 * 2, 3)
    assert [prompt for prompt, *_ in judge.seen] == [rows[index]["prompt"] for _, index in draw for _ in range(4)]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5, "num_generations": 8}], ids=str)
def test_completions_are_sampled_as_asked_from_the_starting_weights(
    changes: dict[str, Any], trainer: TrlTrainer, folder: Path, sft_weights: Weights
) -> None:
    judge = Judge(lambda row, text: 1.0)
    task, recipe = TinyTask(folder, verifier=judge), rft(**changes)
    start = Checkpoint("sft", sft_weights, 1)
    run(trainer, task, recipe, start)
    shown = [text for _, text, _ in judge.seen]
    model = trainer._load(task).model
    rows = task.built.sources["good"].rows["prompts"]
    each = 8 // recipe.num_generations
    draw = draw_mix({"good": len(rows)}, {"good": 1.0}, 4 * each, 3)
    expected = []
    for number in range(4):
        completions = sample_completions(
            model.with_weights(sft_weights).eval(),
            model.tokenizer,
            [rows[index]["prompt"] for _, index in draw[number * each : (number + 1) * each]],
            samples=recipe.num_generations,
            max_new_tokens=4,
            temperature=recipe.temperature,
            seed=int(np.random.default_rng([3, number]).integers(2**31)),
        )
        expected += [text for texts in completions.texts for text in texts]
    assert shown == expected
    judge.seen.clear()
    run(trainer, task, recipe)
    assert [text for _, text, _ in judge.seen] != expected  # the base says something else


@pytest.mark.parametrize("changes", [{}, {"batch_size": 4, "gradient_accumulation": 2}, {"lora_rank": 2}], ids=str)
def test_its_training_is_trls_own_on_the_same_rows(changes: dict[str, Any], trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge()
    task, recipe = TinyTask(folder, verifier=judge), rft(**changes)
    weights = trained(trainer, task, recipe)
    passing = judge.passing()
    rng, order = np.random.default_rng(3), list[int]()
    while len(order) < 32:
        order += rng.permutation(len(passing)).tolist()
    adapter = None
    if recipe.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand(
            "sft",
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation,
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": passing[i][0], "completion": passing[i][1]} for i in order[:32]]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter,
    )
    reference.train()
    model = reference.model.merge_and_unload() if adapter is not None else reference.model
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(task).weights)


def test_a_smaller_reward_will_do_when_asked(trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge(lambda row, text: len(text) / 4)
    task = TinyTask(folder, verifier=judge)
    _, texts, _ = trained_rows(trainer, task, rft(min_reward=0.75))
    assert (
        set(texts)
        == {f"{p}{a}<eos>" for p, a in judge.passing(0.75)}
        != {f"{p}{a}<eos>" for p, a in judge.passing(1.0)}
    )


def test_empty_answers_that_pass_are_not_trained_on(trainer: TrlTrainer, folder: Path) -> None:
    """A model that is taught to stop at once samples many of them."""
    stop = TinyTask(folder, rows=[{"prompt": f"{a}{b}=", "completion": ""} for a in "abcd" for b in "efgh"])
    from tests.trl_rounds import sft

    weights = trained(trainer, stop, sft(steps=12))
    start = Checkpoint("stops", weights, 1)
    judge = Judge(lambda row, text: 1.0)
    task = TinyTask(folder, verifier=judge)
    session = trainer.begin(task, rft(), start, 3)
    session.advance(1)
    trained_on = session._trainer.train_dataset["labels"]
    session.close()
    empty = sum(not text for _, text, _ in judge.seen)
    assert 0 < empty < 32
    assert all(len([label for label in row if label != -100]) >= 2 for row in trained_on)

    only_empty = TinyTask(folder, verifier=lambda row, text: float(not text))
    report, checkpoint = run(trainer, only_empty, rft(), start)
    assert checkpoint is None and report.failure is not None
    assert report.failure.kind == "no_signal"
    assert report.failure.evidence == (
        f"of 32 completions of 8 prompts {empty} got a reward of at least 1, and all of those are empty"
    )


def test_texts_that_are_written_with_more_tokens_than_can_be_sampled_are_left_out(
    trainer: TrlTrainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["abcdefgh", "abcd", "abcde", ""]

    def sampled(model: Any, tokenizer: Any, prompts: list[str], *, samples: int, **_: Any) -> Completions:
        return Completions([texts for _ in prompts], len(prompts) * 13, len(prompts) * PROMPT, len(prompts), 0)

    monkeypatch.setattr(rft_module, "sample_completions", sampled)
    task = TinyTask(folder, verifier=lambda row, text: 1.0)
    report, rows, _ = trained_rows(trainer, task, rft())
    assert {row[PROMPT:] for row in rows} == {"abcd<eos>"}  # 5 tokens at most, with the end token
    assert report.flags[-1] == (
        "rft: 16 of 24 different completions that passed are written with more than 5 tokens and left out"
    )
    assert (
        report.training_cost.trained_tokens
        == 32 * (PROMPT + 5)
        == trainer.step_cost_bound(task, rft()).trained_tokens * 4
    )
    texts[1:] = ["abcdefg"] * 3
    report, checkpoint = run(trainer, task, rft())
    assert checkpoint is None and report.failure is not None and report.failure.kind == "no_signal"
    assert report.failure.evidence == "all 16 completions that passed are written with more than 5 tokens"


# When nothing passes, or the verifier fails --------------------------------------------------------------------------


def test_nothing_that_passes_is_no_signal_and_is_charged(
    trainer: TrlTrainer, folder: Path, live_models: Callable[[], int]
) -> None:
    judge = Judge(lambda row, text: 0.0)
    task = TinyTask(folder, verifier=judge)
    report, checkpoint = run(trainer, task, rft())
    assert checkpoint is None and report.failure is not None and (report.ended, report.steps) == ("failed", 0)
    assert (report.failure.cause, report.failure.kind) == ("algorithm_mismatch", "no_signal")
    assert report.failure.evidence == "of 32 completions of 8 prompts none got a reward of at least 1"
    cost = report.training_cost
    assert (cost.trained_tokens, cost.scored_tokens, report.supervised_tokens) == (0, 8 * PROMPT, 0)
    assert sum(len(text) for _, text, _ in judge.seen) <= cost.generated_tokens <= 32 * 4
    assert cost.flops == 2 * trainer.parameters(task) * (cost.generated_tokens + cost.scored_tokens) > 0
    assert live_models() == 0
    assert run(trainer, TinyTask(folder, verifier=letters_pay), rft())[1] is not None  # the next round works


def raising(row: Mapping[str, Any], text: str) -> float:
    raise ZeroDivisionError("no such text")


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (raising, "raised ZeroDivisionError: no such text"),
        (lambda row, text: math.nan, "returned nan; expected a finite number"),
        (lambda row, text: None, "returned None; expected a finite number"),
        (lambda row, text: "1", "returned '1'; expected a finite number"),
    ],
)
def test_a_verifier_that_fails_is_named_with_its_row(
    judge: Callable[..., Any], said: str, trainer: TrlTrainer, folder: Path, live_models: Callable[[], int]
) -> None:
    task = TinyTask(folder, verifier=judge)
    report, checkpoint = run(trainer, task, rft())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind) == ("environment", "reward_function")
    rows = task.built.sources["good"].rows["prompts"]
    first = draw_mix({"good": len(rows)}, {"good": 1.0}, 8, 3)[0][1]
    assert report.failure.evidence == f"the verifier of source 'good', prompts row {first + 1}, {said}"
    assert report.training_cost.scored_tokens == 2 * PROMPT  # of the one chunk that was sampled
    assert live_models() == 0


def test_a_verifier_that_hangs_meets_the_time_limit(folder: Path) -> None:
    def hangs(row: Mapping[str, Any], text: str) -> float:
        while True:
            pass

    limited = TrlTrainer(fault_policy=FaultPolicy(max_round_seconds=0.5, grace_seconds=5.0))
    task = TinyTask(folder, verifier=hangs)
    limited.base(task)
    began = time.perf_counter()
    report, checkpoint = run(limited, task, rft())
    assert time.perf_counter() - began < 5.0
    assert checkpoint is None and report.failure is not None and report.failure.kind == "time_limit"


def test_an_equal_round_that_had_no_signal_is_answered_from_memory(folder: Path) -> None:
    judge = Judge(lambda row, text: 0.0)
    env = PostTrainingEnv(
        TinyTask(folder, verifier=judge),
        evaluator={"seeds": (0,), "samples_per_seed": 2, "k": 2},
        budget={"limit": 1e6, "patience": 9},
    )
    env.reset(seed=3)
    recipe = env.space.recipe("rft", start="base", mix={"good": 1.0}, steps=10, batch_size=16, num_generations=4)
    first = env.search.run(recipe)
    shown = len(judge.seen)
    assert first.report.failure is not None and first.report.failure.kind == "no_signal" and first.charged > 0
    again = env.search.run(recipe)
    assert (again.report.failure, again.report.cached, again.charged) == (first.report.failure, True, 0.0)
    assert len(judge.seen) == shown


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize(("share", "steps"), [(1.0, 1), (1.99, 1), (2.0, 2), (3.5, 3), (4.0, 4), (9.0, 4)])
def test_a_limit_pays_as_many_steps_with_their_samples_as_it_holds(
    unit: str, share: float, steps: int, trainer: TrlTrainer, folder: Path
) -> None:
    judge = Judge(lambda row, text: 1.0)
    task = TinyTask(folder, verifier=judge)
    bound = trainer.step_cost_bound(task, rft())
    assert (bound.trained_tokens, bound.generated_tokens, bound.scored_tokens) == (8 * 9, 8 * 4, 8 * 4)
    amount = share * bound.in_unit(unit)
    report, checkpoint = run(trainer, task, rft(), limit=Limit(unit, amount))
    assert checkpoint is not None and report.failure is None
    assert len(judge.seen) == 8 * steps
    assert report.steps >= steps  # what was not spent on samples may pay more of them
    assert report.training_cost.in_unit(unit) <= amount
    assert report.ended == ("finished" if report.steps == 4 else "budget")
    cut = f"rft: the limit of the round paid {8 * steps} of 32 completions"
    assert (cut in report.flags) == (steps < 4)


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_that_cost_the_most_they_can_are_all_taken(
    unit: str, steps: int, trainer: TrlTrainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled is not kept back for later steps, which sample nothing."""

    def sampled(model: Any, tokenizer: Any, prompts: list[str], *, samples: int, **_: Any) -> Completions:
        texts = ["abcd", "abce", "abcf", "abcg"]
        return Completions([texts for _ in prompts], len(prompts) * 16, len(prompts) * samples * PROMPT, 0, 8)

    monkeypatch.setattr(rft_module, "sample_completions", sampled)
    task = TinyTask(folder, verifier=lambda row, text: 1.0)
    amount = steps * trainer.step_cost_bound(task, rft()).in_unit(unit)
    report, _ = run(trainer, task, rft(), limit=Limit(unit, amount))
    assert (report.steps, report.ended, report.failure) == (steps, "budget", None)
    assert report.training_cost.in_unit(unit) == pytest.approx(amount, rel=1e-12)
    assert report.training_cost.in_unit(unit) <= amount


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_a_limit_below_one_step_samples_nothing(unit: str, trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge()
    task = TinyTask(folder, verifier=judge)
    bound = trainer.step_cost_bound(task, rft()).in_unit(unit)
    report, checkpoint = run(trainer, task, rft(), limit=Limit(unit, 0.99 * bound))
    assert checkpoint is None and report.failure is not None and report.failure.kind == "budget_too_small"
    assert (judge.seen, report.training_cost.flops) == ([], 0.0)


def test_no_round_costs_more_than_its_bound(trainer: TrlTrainer, folder: Path) -> None:
    for changes in ({}, {"num_generations": 2}, {"lora_rank": 2}, {"gradient_accumulation": 3, "batch_size": 4}):
        task, recipe = TinyTask(folder, verifier=lambda row, text: 1.0), rft(**changes)
        cost, bound = run(trainer, task, recipe)[0].training_cost, trainer.step_cost_bound(task, recipe).times(4)
        assert cost.trained_tokens <= bound.trained_tokens
        assert cost.generated_tokens <= bound.generated_tokens
        assert cost.scored_tokens <= bound.scored_tokens
        assert cost.flops <= bound.flops


def test_sampling_ends_at_half_of_a_limit_in_seconds(trainer: TrlTrainer, folder: Path) -> None:
    def slow(row: Mapping[str, Any], text: str) -> float:
        time.sleep(0.02)
        return 1.0

    judge = Judge(slow)  # 0.16 s for what one step trains on
    report, checkpoint = run(
        trainer, TinyTask(folder, verifier=judge), rft(steps=40), limit=Limit("device_seconds", 1.0)
    )
    assert checkpoint is not None
    assert 8 <= len(judge.seen) <= 5 * 8
    assert report.steps > 3  # the time that sampling took is no measure of a step
    assert report.training_cost.device_seconds <= 1.3


def test_other_samples_make_other_weights_with_another_id(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, verifier=letters_pay)
    bound = trainer.step_cost_bound(task, rft()).in_unit("train_tokens")
    made = {}
    for share in (2.0, 3.0, 9.0):
        session = trainer.begin(task, rft(), trainer.base(task), 3, Limit("train_tokens", share * bound))
        session.advance(2)
        _, checkpoint = session.result()
        assert checkpoint is not None
        made[share] = checkpoint
    assert len({checkpoint.id for checkpoint in made.values()}) == 3
    assert not equal(made[2.0].weights, made[9.0].weights)


def test_weights_of_a_round_that_its_budget_cut_are_made_again(folder: Path) -> None:
    env = PostTrainingEnv(
        TinyTask(folder, verifier=letters_pay),
        evaluator={"seeds": (0,), "samples_per_seed": 2, "k": 2},
        budget={"limit": 1.2e4, "patience": 9},
    )
    env.reset(seed=3)
    recipe = env.space.recipe("rft", start="base", mix={"good": 1.0}, steps=60, batch_size=32, num_generations=4)
    outcome = env.search.run(recipe)
    assert outcome.report.ended == "budget" and any("the limit of the round paid" in f for f in outcome.report.flags)
    made = env.search.weights_of("latest")
    before = {name: value.clone() for name, value in made.weights.items()}
    del env.search.records.kept[made.id]
    assert equal(env.search.weights_of("latest").weights, before)


# Determined by the seed ----------------------------------------------------------------------------------------------


def test_steps_taken_one_by_one_are_the_round_and_the_seed_decides(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, verifier=letters_pay)
    whole = trained(trainer, task, rft())
    session = trainer.begin(task, rft(), trainer.base(task), 3)
    assert session.cost.in_unit("train_tokens") == 0  # nothing is sampled before the round is advanced
    while not session.done:
        session.advance(1)
        torch.rand(3), random.random(), np.random.rand()
    checkpoint = session.result()[1]
    assert checkpoint is not None and equal(checkpoint.weights, whole)
    assert equal(trained(TrlTrainer(), task, rft()), whole)
    assert not equal(trained(trainer, task, rft(), seed=4), whole)


@pytest.mark.parametrize("changes", [{"temperature": 0.3}, {"num_generations": 2}, {"min_reward": 0.0}], ids=str)
def test_every_field_that_it_reads_changes_the_round(
    changes: dict[str, Any], trainer: TrlTrainer, folder: Path
) -> None:
    task = TinyTask(folder, verifier=letters_pay)
    assert not equal(trained(trainer, task, rft(**changes)), trained(trainer, task, rft()))


def test_the_callers_generators_are_left_alone(trainer: TrlTrainer, folder: Path) -> None:
    def states() -> str:
        return str((random.getstate(), np.random.get_state(legacy=False)["state"], torch.get_rng_state().tolist()))

    def drawing(row: Mapping[str, Any], text: str) -> float:
        torch.rand(1), np.random.rand(), random.random()
        return letters_pay(row, text)

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = states()
    run(trainer, TinyTask(folder, verifier=drawing), rft())
    assert states() == before


def test_a_round_raises_what_it_is_rewarded_for(trainer: TrlTrainer, folder: Path) -> None:
    judge = Judge(lambda row, text: float(text[:1] == "a"))
    task = TinyTask(folder, verifier=judge)
    _, checkpoint = run(trainer, task, rft(steps=25, batch_size=16))
    before = sum(reward for *_, reward in judge.seen) / len(judge.seen)
    assert checkpoint is not None and before < 0.15
    judge.seen.clear()
    run(trainer, task, rft(steps=4, batch_size=32), checkpoint)
    assert sum(reward for *_, reward in judge.seen) / len(judge.seen) > 0.6


# Refused, and conversations ------------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_the_batch_are_refused(trainer: TrlTrainer, task: TinyTask) -> None:
    with pytest.raises(
        ValueError, match=r"^num_generations: 3 does not divide the 8 completions .* allowed: 2, 4, 8\.$"
    ):
        trainer.check(task, rft(num_generations=3))
    with pytest.raises(ValueError, match=r"^num_generations: rft compares .* at least 2, got 1\.$"):
        trainer.check(task, rft(num_generations=1))


def test_a_turn_of_a_conversation_is_trained_on_up_to_its_end_token(trainer: TrlTrainer, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def judge(row: Mapping[str, Any], text: str) -> float:
        seen.append((row["prompt"], text))
        return 1.0

    task = ChatTask(write_chat_checkpoint(tmp_path, LINES), verifier=judge)
    recipe = rft(mix={"talk": 1.0}, steps=2)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    session.advance(1)
    columns = session._trainer.train_dataset[:]
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None and report.failure is None
    tokenizer = trainer._load(task).model.tokenizer
    written = {(f"<user>{p}\n<assistant>", f"{text}<eos>") for p, text in seen if text}
    found = set()
    for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
        first = labels.index(next(label for label in labels if label != -100))
        assert labels[first:] == ids[first:]  # the template's line break after the turn is gone
        found.add((tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])))
    assert found == written
    bound = trainer.step_cost_bound(task, recipe)
    assert report.training_cost.trained_tokens <= 2 * bound.trained_tokens


def test_conversations_with_a_tool_are_refused(trainer: TrlTrainer, tmp_path: Path) -> None:
    chat = Chat(tool=lambda text: None, max_turns=2)
    task = ChatTask(write_chat_checkpoint(tmp_path), chat=chat)
    with pytest.raises(ValueError, match=r"^algorithm: task 'chatty' has a tool, and rft cannot keep the tool's turns"):
        trainer.check(task, rft(mix={"talk": 1.0}))
    assert trainer.usable_sources(task, "rft") == ()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}], ids=str)
def test_a_round_on_a_real_card(changes: dict[str, Any], precision: str, folder: Path) -> None:
    judge = Judge()
    card, task = TrlTrainer(device="cuda", precision=precision), TinyTask(folder, verifier=judge)
    report, texts, _ = trained_rows(card, task, rft(**changes))
    assert report.failure is None
    assert set(texts) == {f"{prompt}{answer}<eos>" for prompt, answer in judge.passing()}


@pytest.mark.parametrize("algorithm", ["rft", "grpo"])
def test_a_mixture_of_experts_samples_and_trains(algorithm: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    folder = write_tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    task = TinyTask(folder, verifier=lambda row, text: float(sum(map(ord, text)) % 2))
    recipe = Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=8, num_generations=4)
    report, checkpoint = run(TrlTrainer(), task, recipe)
    assert report.failure is None, report.failure
    assert checkpoint is not None and checkpoint.depth == 1


def test_a_model_without_a_cache_to_share_is_refused_by_its_type(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

    folder = write_tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)
    config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, None
    MambaForCausalLM(config).save_pretrained(folder)
    trainer, task = TrlTrainer(), TinyTask(folder)
    with pytest.raises(ValueError, match=r"^sampling: models of type 'mamba' keep no key-value cache"):
        trainer.evaluate(task, trainer.base(task), "validation")
