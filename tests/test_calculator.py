"""The calculator task: its tool, its splits and rows, its packaged base, and rounds that raise its score."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import posttrain_gym
from posttrain_gym.experiments import make_calculator_base as making
from posttrain_gym.experiments.run_recipe import run_recipe
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks import calculator, resolve_task
from posttrain_gym.inner_trainers.tasks.calculator import (
    DIMENSIONS,
    CalculatorTask,
    calculate,
    draw_questions,
    questions,
    split_of,
    use_calculator,
    worked,
)
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer

ROOT = Path(posttrain_gym.__file__).resolve().parent.parent
PAGE = ROOT / "experiments" / "results" / "calculator_base.md"


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer()


# The tool -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*12", 444),
        ("371+512", 883),
        ("2+3*4", 14),
        ("2*3+4*5-6", 20),
        ("7-9", -2),
        ("10-4-3", 3),
        ("007+1", 8),
        ("5", 5),
        ("1*2*3*4", 24),
        ("999999999*999999999", 999999998000000001),
        ("", None),
        ("+", None),
        ("1+", None),
        ("-1+2", None),
        ("1**9", None),
        ("1//2", None),
        ("1 + 2", None),
        ("1.5+1", None),
        ("1+2\n", None),
        ("9999999999+1", None),
        ("+".join("1" * 10), None),
        ("٣+٤", None),
        ("__import__('os')", None),
        ("2*(3+4)", None),
    ],
)
def test_the_calculator_knows_whole_numbers_and_nothing_else(expression: str, value: int | None) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[37*12]", "444"),
        ("[1+1", None),
        ("1+1]", None),
        ("444.", None),
        ("", None),
        ("[", None),
        ("[]", "?"),
        ("[1+]", "?"),
        ("[[1+1]]", "?"),
        ("so [1+1]", None),
        ("[2-9]", "-7"),
    ],
)
def test_a_turn_in_brackets_calls_it(text: str, answer: str | None) -> None:
    assert use_calculator(text) == answer


# Rows and items -------------------------------------------------------------------------------------------------------


def test_no_question_is_in_two_splits_and_every_one_is_in_one() -> None:
    splits = [set(questions("products", split)) for split in ("train", "validation", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 89 * 89
    assert [round(len(split) / 89**2, 1) for split in splits] == [0.8, 0.1, 0.1]
    for dimension, shape in (("products", r"\d\d\*\d\d\?"), ("sums", r"\d{3}\+\d{3}\?")):
        for split in ("train", "validation", "test"):
            drawn = draw_questions(dimension, split, 250, np.random.default_rng(1))
            assert len(set(drawn)) == 250 and drawn == draw_questions(dimension, split, 250, np.random.default_rng(1))
            assert {split_of(question) for question in drawn} == {split}
            assert all(re.fullmatch(shape, question) for question in drawn)


def test_rows_are_right_and_drawn_alike_in_every_process() -> None:
    built = CalculatorTask().built
    assert {name: {kind: len(r) for kind, r in s.rows.items()} for name, s in built.sources.items()} == {
        "answers": {"demonstrations": 512},
        "practice": {"prompts": 512},
        "worked": {"demonstrations": 512},
    }
    assert built.leaked == {}
    for row in built.sources["worked"].rows["demonstrations"]:
        user, call, tool, last = row["messages"]
        assert use_calculator(call["content"]) == tool["content"] == last["content"].removesuffix(".")
        assert call["content"] == f"[{user['content'].removesuffix('?')}]"
    verifier = built.sources["practice"].verifier
    assert verifier is not None
    for row in built.sources["practice"].rows["prompts"]:
        answer = str(calculate(row["prompt"].removesuffix("?")))
        assert [verifier(row, text) for text in (f"{answer}.", answer, f"[{answer}]", "", f"{answer}..")] == [
            1,
            0,
            0,
            0,
            0,
        ]
    program = (
        "from posttrain_gym.inner_trainers.tasks.calculator import CalculatorTask; "
        "print(CalculatorTask().built.content_hash)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == built.content_hash


def test_the_benchmark_has_both_dimensions_and_scores_the_last_turn() -> None:
    benchmark = CalculatorTask(items_per_dimension=5).built.benchmark
    assert benchmark.dimensions == DIMENSIONS and dict(benchmark.weights) == {"products": 0.5, "sums": 0.5}
    for split in ("validation", "test"):
        items = benchmark.items(split)
        assert [item.dimension for item in items] == ["products"] * 5 + ["sums"] * 5
        for item in items:
            right = f"{calculate(item.prompt.removesuffix('?'))}."
            assert (benchmark.score(item, right), benchmark.well_formed(item, right)) == (1.0, True)
            assert (benchmark.score(item, "1."), benchmark.well_formed(item, "1.")) == (0.0, True)
            assert (benchmark.score(item, right[:-1]), benchmark.well_formed(item, right[:-1])) == (0.0, False)
            assert len(worked(item.prompt)[1]["content"]) + 1 <= benchmark.max_new_tokens


@pytest.mark.parametrize("size", [{"rows_per_source": 15}, {"items_per_dimension": 0}, {"items_per_dimension": 257}])
def test_sizes_outside_their_range_are_refused(size: dict[str, int]) -> None:
    (name,) = size
    with pytest.raises(ValueError, match=rf"{name}: expected an integer in"):
        CalculatorTask(**size)


def test_it_is_built_in_and_has_no_hidden_facts() -> None:
    family = resolve_task("calculator")
    task = family.instance(0)
    assert (family.name, task.name, task.teacher_checkpoint()) == ("calculator", "calculator", None)
    facts = json.loads(json.dumps(task.facts()))
    assert facts["rows"] == {n: {k: len(r) for k, r in s.rows.items()} for n, s in task.built.sources.items()}
    program = (
        "import sys; from posttrain_gym.inner_trainers.tasks import resolve_task; "
        "resolve_task('calculator').instance(0).built; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "False"


# The packaged base ----------------------------------------------------------------------------------------------------


def test_the_base_is_small_and_its_page_is_what_it_scores() -> None:
    folder = CalculatorTask().base_checkpoint()
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 1_200_000
    assert (folder / "chat_template.jinja").read_text() == calculator.CHAT_TEMPLATE
    assert making.make_tokenizer().get_vocab() == json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    found = making.measure(making.Args())
    page, made = PAGE.read_text(), making.describe(found, making.Args())
    figure = re.compile(r"\d\.\d{3}")
    assert figure.sub("", page).split("Versions")[0] == figure.sub("", made).split("Versions")[0]
    committed, now = ([float(x) for x in figure.findall(text.split("Corpus")[0])] for text in (page, made))
    assert len(now) == 6 and now == pytest.approx(committed, abs=0.03)  # other machines round sums differently
    assert 100_000 <= found["parameters"] <= 300_000


def test_the_corpus_has_the_stated_habits() -> None:
    rng = np.random.default_rng(0)
    for dimension in DIMENSIONS:
        kinds = {"right call": 0, "other call": 0, "guess": 0}
        for question in draw_questions(dimension, "train", 2000, rng):
            turns = making.make_conversation(dimension, question, rng)
            assert [turn["role"] for turn in turns] in (
                ["user", "assistant"],
                ["user", "assistant", "tool", "assistant"],
            )
            if len(turns) == 4:
                assert use_calculator(turns[1]["content"]) == turns[2]["content"]
            right = turns[1]["content"] == worked(question)[1]["content"]
            kinds["guess" if len(turns) == 2 else "right call" if right else "other call"] += 1
        assert kinds["right call"] / 2000 == pytest.approx(making.CALL_SHARE[dimension], abs=0.04)
        assert kinds["other call"] / 2000 == pytest.approx(making.MISCOPIED_SHARE, abs=0.03)


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "gain"),
    [
        (Recipe("sft", {"worked": 1.0}, steps=12, batch_size=16, learning_rate=5e-4), 0.3),
        (Recipe("grpo", {"practice": 1.0}, steps=12, batch_size=32, num_generations=8, learning_rate=5e-4), 0.15),
        (Recipe("sft", {"answers": 1.0}, steps=12, batch_size=16, learning_rate=5e-4), -0.2),
    ],
    ids=["sft, worked", "grpo", "sft, answers"],
)
def test_rounds_move_the_test_score(recipe: Recipe, gain: float, trainer: TrlTrainer) -> None:
    """Learning to call the tool helps; right answers without a call only teach to guess."""
    task = CalculatorTask()
    before = trainer.evaluate(task, trainer.base(task), "test")[0].score
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    after = trainer.evaluate(task, checkpoint, "test")[0].score
    assert after - before > gain if gain > 0 else after - before < gain


def test_it_runs_in_the_environment(trainer: TrlTrainer) -> None:
    evaluator = {"seeds": (0,), "samples_per_seed": 2, "k": 2}
    made: Any = gym.make("PostTrain/Recipe-v0", task="calculator", evaluator=evaluator)
    env = made.unwrapped
    env.reset(seed=3)
    names = env.space.algorithms
    legal = dict(zip(names, env.action_masks()[1 : 1 + len(names)].tolist(), strict=True))
    assert {name for name, there in legal.items() if there} == {"grpo", "ppo", "sft"}
    for algorithm, source in (("sft", "worked"), ("grpo", "practice")):
        recipe = env.space.recipe(
            algorithm, mix={source: 1.0}, learning_rate=1e-3, steps=10, batch_size=16, num_generations=4
        )
        *_, info = env.step(env.encode_recipe(recipe))
        assert (info["round"]["ended"], info["round"]["failure"]) == ("finished", None)
        assert info["round"]["recipe"]["algorithm"] == algorithm
    env.action_space.seed(0)
    checked = 0
    while checked < 100:
        sampled = env.space.decode(env.action_space.sample())
        if sampled is not None and legal[sampled.algorithm]:
            trainer.check(env.search.task, env.search.fitted(sampled))
            checked += 1
    made.close()


def test_run_recipe_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: sft\nmix: {worked: 1.0}\nsteps: 10\nbatch_size: 16\nlearning_rate: 5.0e-4\n")
    shown = run_recipe(path, "calculator", instance=0, seed=0, save=None)
    assert shown["failure"] is None
    assert shown["scores"]["test"]["after"] > shown["scores"]["test"]["before"] + 0.2


@pytest.mark.gpu
def test_conversations_run_on_a_gpu() -> None:
    trainer, task = TrlTrainer(device="cuda"), CalculatorTask(16, 4)
    recipe = Recipe("grpo", {"practice": 1.0}, steps=2, batch_size=16, num_generations=4, learning_rate=1e-4)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    assert report.supervised_tokens == report.training_cost.generated_tokens > 0
    card, cost = trainer.evaluate(task, checkpoint, "test")
    bound = trainer.evaluation_cost_bound(task, "test")
    assert 0 < cost.generated_tokens <= bound.generated_tokens and 0 < cost.scored_tokens <= bound.scored_tokens
    assert 0.0 < card.score <= 1.0
