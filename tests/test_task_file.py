"""Tasks of one YAML file: what it says comes about, what is wrong is told with its place, and every way in takes it."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from typer.testing import CliRunner

from posttrain_gym.experiments.cli import app
from posttrain_gym.experiments.run_recipe import run_recipe
from posttrain_gym.experiments.settings import EnvSettings
from posttrain_gym.inner_trainers.tasks import InnerTask, SingleTask, resolve_task
from posttrain_gym.inner_trainers.tasks.task_file import FileTask
from posttrain_gym.inner_trainers.testing import write_tiny_checkpoint

EXAMPLES = Path(__file__).resolve().parent.parent / "experiments" / "examples"
ROWS = [{"prompt": f"{a}{b}{c}=", "answer": a} for a in "abcdefgh" for b in "abcdefgh" for c in "abc"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A folder with a model, data and a task file that uses them."""
    (tmp_path / "model").symlink_to(tiny)
    jsonl(tmp_path / "train.jsonl", [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS[:64]])
    jsonl(tmp_path / "early.jsonl", ROWS[64:128])
    jsonl(tmp_path / "late.jsonl", ROWS[128:])
    write(tmp_path / "task.yaml", plain())
    return tmp_path


def plain(**changes: Any) -> dict[str, Any]:
    data = {
        "model": "model",
        "sources": {"words": {"file": "train.jsonl"}},
        "benchmark": {
            "max_new_tokens": 4,
            "dimensions": {
                "early": {"weight": 0.25, "file": "early.jsonl", "verifier": "exact"},
                "late": {"weight": 0.75, "file": "late.jsonl", "verifier": {"name": "exact"}},
            },
        },
    }
    return {name: value for name, value in {**data, **changes}.items() if value is not ...}


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


# What it says comes about


def test_a_file_says_all_of_a_task(folder: Path) -> None:
    family = resolve_task(str(folder / "task.yaml"))
    assert isinstance(family, SingleTask)
    task = family.instance(7)
    built = task.built
    assert (family.name, task.name) == ("task", "task")
    base = task.base_checkpoint()
    assert base is not None and base.samefile(folder / "model")
    assert task.facts() == {"name": "task", "model": "model", "rows": {"words": {"demonstrations": 64}}}
    assert [dict(row) for row in built.sources["words"].rows["demonstrations"]][:2] == [
        {"prompt": "aaa=", "completion": "a"},
        {"prompt": "aab=", "completion": "a"},
    ]
    bench = built.benchmark
    assert dict(bench.weights) == {"early": 0.25, "late": 0.75}
    assert bench.max_new_tokens == 4
    assert len(bench.validation) + len(bench.test) == len(ROWS) - 64
    assert {item.prompt for item in bench.validation} & {item.prompt for item in bench.test} == set()
    item = bench.validation[0]
    assert bench.score(item, item.data["answer"]) == 1.0
    assert bench.score(item, "h" + item.data["answer"]) == 0.0
    assert task.chat() is None and task.teacher_checkpoint() is None and task.recipe_defaults() == {}


def test_paths_and_objects_lead_to_the_same_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = resolve_task(folder / "task.yaml").instance(0).built.content_hash
    monkeypatch.chdir(folder)
    assert resolve_task("task.yaml").instance(0).built.content_hash == whole
    assert resolve_task(FileTask("task.yaml")).instance(0).built.content_hash == whole
    task = pickle.loads(pickle.dumps(resolve_task(folder / "task.yaml").instance(0)))
    assert task.built.content_hash == whole
    moved = folder / "elsewhere"
    moved.mkdir()
    data = plain(model=str(folder / "model"), sources={"words": {"file": "../train.jsonl"}})
    data["benchmark"]["dimensions"]["early"]["file"] = str(folder / "early.jsonl")
    data["benchmark"]["dimensions"]["late"]["file"] = "../late.jsonl"
    (moved / "task.json").write_text(json.dumps(data))
    assert resolve_task(moved / "task.json").instance(0).built.content_hash == whole


def test_an_edited_data_file_is_another_task(folder: Path) -> None:
    before = resolve_task(folder / "task.yaml").instance(0).built.content_hash
    text = (folder / "train.jsonl").read_text()
    (folder / "train.jsonl").write_text(text.replace('"completion": "a"', '"completion": "b"', 1))
    assert resolve_task(folder / "task.yaml").instance(0).built.content_hash != before


def test_sources_have_columns_verifiers_samples_and_kinds(folder: Path) -> None:
    jsonl(folder / "asked.jsonl", [{"q": row["prompt"], "right": row["answer"]} for row in ROWS[:64]])
    words = {
        "file": "asked.jsonl",
        "columns": {"prompt": "q", "completion": "right"},
        "verifier": {"name": "exact", "answer": "completion"},
        "max_rows": 10,
        "seed": 3,
    }
    write(folder / "task.yaml", plain(sources={"words": words}))
    source = resolve_task(folder / "task.yaml").instance(0).built.sources["words"]
    assert {kind: len(rows) for kind, rows in source.rows.items()} == {"demonstrations": 10, "prompts": 10}
    row = source.rows["prompts"][0]
    assert source.verifier is not None
    assert (source.verifier(row, row["completion"]), source.verifier(row, "zz")) == (1.0, 0.0)
    assert source.verifier_version.startswith("Exact")
    assert resolve_task(folder / "task.yaml").instance(0).built.sources["words"].rows == source.rows


def test_generated_questions_are_a_source(folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    sums = {"reasoning_gym": "chain_sum", "settings": {"min_terms": 2, "max_terms": 2}, "size": 12, "seed": 5}
    write(folder / "task.yaml", plain(sources={"sums": sums}))
    source = resolve_task(folder / "task.yaml").instance(0).built.sources["sums"]
    assert {kind: len(rows) for kind, rows in source.rows.items()} == {"demonstrations": 12, "prompts": 12}
    row = source.rows["prompts"][0]
    assert source.verifier is not None and source.verifier(row, f"It is {row['answer']}") == 1.0


def test_chat_teacher_recipe_and_a_benchmark_of_its_own(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    (folder / "plain.jinja").write_text(template)
    (folder / "bench").mkdir()
    own = plain()["benchmark"]
    for name in ("early", "late"):
        own["dimensions"][name]["file"] = f"../{name}.jsonl"
    write(folder / "bench" / "mine.yaml", own)
    changes = {
        "name": "mine",
        "teacher": "./model",
        "chat": {"system": "h", "template": "plain.jinja"},
        "benchmark": "bench/mine.yaml",
        "recipe": {"lora_rank": 4, "learning_rate": 1e-3},
    }
    task = resolve_task(write(folder / "task.yaml", plain(**changes))).instance(0)
    assert task.name == "mine"
    assert task.recipe_defaults() == {"lora_rank": 4, "learning_rate": 0.001}
    assert task.built.chat is not None
    assert (task.built.chat.system, task.built.chat.template) == ("h", template)
    assert task.built.teacher is not None and task.built.teacher.samefile(folder / "model")
    assert task.built.benchmark.dimensions == ("early", "late")
    write(folder / "task.yaml", plain(chat={}))
    assert resolve_task(folder / "task.yaml").instance(0).built.chat is not None


# What is wrong is told with its place

WRONG: list[tuple[str, str, str]] = [
    ("file: train.jsonl", f"file: {'x' * 300}.jsonl", r"line 4, column 11: sources.words.file: there is no file"),
    ("model: model", "modle: model", r"line 1, column 1: modle: unknown key 'modle'\. Did you mean 'model'\?"),
    ("model: model", "teacher: model", r"line 1, column 1: key 'model' is missing"),
    ("model: model", "model: 3", r"line 1, column 8: model: expected text, got 3"),
    ("model: model", "model: [a]", r"line 1, column 8: model: expected text"),
    (
        "file: train.jsonl",
        "flie: train.jsonl",
        r"line 4, column 5: .*unknown key 'flie'\. Did you mean 'file'",
    ),
    (
        "file: train.jsonl",
        "file: trian.jsonl",
        r"line 4, column 11: .*there is no file .*Did you mean 'train",
    ),
    ("file: train.jsonl", "file: train.jsonl\n    kinds: text", r"line 5, column 5: sources.words.kinds: unknown key"),
    ("file: train.jsonl", "file: train.jsonl\n    max_rows: 1k", r"line 5, column 15: .*max_rows: expected an integer"),
    (
        "file: train.jsonl",
        "file: train.jsonl\n    columns: {prompt: 3}",
        r"line 5, column 23: .*: expected text, got 3",
    ),
    ("file: train.jsonl", "file: train.jsonl\n    columns: {prompt: q}", r"line 4, column 11: sources.words.file: .*q"),
    (
        "file: train.jsonl",
        "file: train.jsonl\n    verifier: exat",
        r"line 5, column 15: .*'exat'\. Did you mean 'exact'",
    ),
    (
        "file: train.jsonl",
        "file: train.jsonl\n    verifier: {name: exact, stirp: true}",
        r"line 5, column 15: .*no setting is called 'stirp'\. Did you mean 'strip'",
    ),
    ("file: train.jsonl", "reasoning_gym: chain_sums", r"line 4, column 20: .*Did you mean 'chain_sum'"),
    (
        "weight: 0.25",
        "weight: 0.5",
        r"dimensions: the weights of the dimensions must sum to 1, they sum to 1\.25",
    ),
    ("weight: 0.25", "weight: -1", r"line 9, column 15: .*weight: expected a number in \(0, 1\], got -1"),
    ("weight: 0.25", "weight: 25%", r"line 9, column 15: .*weight: expected a number in \(0, 1\]"),
    ("verifier: exact", "verifier: exactly", r"line 11, column 17: .*unknown 'exactly'"),
    (
        "file: early.jsonl",
        "file: nowhere.jsonl",
        r"line 10, column 13: .*early.file: .*nowhere.jsonl",
    ),
    ("sources:\n  words:\n    file: train.jsonl\n", "sources: {}\n", r"line 2, column 10: sources: there is no source"),
    ("sources:\n  words:\n    file: train.jsonl\n", "", r"line 1, column 1: key 'sources' is missing"),
    ("model: model", "model: model\nchat:", r"line 2, column 1: chat: expected keys, got nothing; write \{\}"),
    ("model: model", "model: model\nchat: {sytem: x}", r"line 2, column 8: chat.sytem: unknown key .*'system'"),
    ("model: model", "model: model\nchat: {template: x.jinja}", r"line 2, column 18: chat.template: there is no file"),
    (
        "model: model",
        "model: model\nrecipe: {lora_rang: 8}",
        r"line 2, column 10: recipe.lora_rang: unknown key",
    ),
    (
        "model: model",
        "model: model\nrecipe: {steps: 0}",
        r"line 2, column 17: recipe.steps: expected an integer in",
    ),
    ("model: model", "model: model\nrecipe: {algorithm: sft}", r"line 2, column 10: recipe.algorithm: unknown key"),
    ("model: model", "model: model\nmodel: other", r"line 2, column 1: key 'model' is there twice"),
    ("model: model", "model: !!python/object/apply:os.system [ls]", r"line 1, column 8: the tag .*is not read"),
    ("model: model", "model: nowhere/at/all", r"line 1, column 8: model: there is neither a folder .*at/all"),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG, ids=[new.replace("\n", " ")[:40] for _, new, _ in WRONG])
def test_what_is_wrong_is_refused_with_its_place(folder: Path, old: str, new: str, words: str) -> None:
    path = folder / "task.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"task .*task\.yaml, .*{words}"):
        resolve_task(path).instance(0).built  # noqa: B018
    assert not (folder / "pwned").exists()


def test_a_benchmark_file_names_itself(folder: Path) -> None:
    write(folder / "task.yaml", plain(benchmark="bench.yaml"))
    with pytest.raises(ValueError, match=r"task\.yaml, line 5, column 12: benchmark: there is no file .*bench.yaml"):
        resolve_task(folder / "task.yaml")
    write(folder / "bench.yaml", {"dimensions": {}})
    with pytest.raises(ValueError, match=r"benchmark .*bench.yaml, line 1, column 13: dimensions: there is no dim"):
        resolve_task(folder / "task.yaml")


def test_files_that_are_no_tasks_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"task .*missing.yaml: no such file"):
        resolve_task(folder / "missing.yaml")
    (folder / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"list.yaml, line 1, column 1: expected keys like model and sources"):
        resolve_task(folder / "list.yaml")
    with pytest.raises(ValueError, match="a folder; expected a YAML or JSON file"):
        resolve_task(folder)
    (folder / "latin.yaml").write_bytes("model: caf\u00e9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.yaml, line 1: not UTF-8"):
        resolve_task(folder / "latin.yaml")


def test_a_moved_benchmark_is_refused(folder: Path) -> None:
    bench = plain()["benchmark"]
    pinned = resolve_task(folder / "task.yaml").instance(0).built.benchmark.content_hash
    write(folder / "task.yaml", plain(benchmark={**bench, "content_hash": pinned}))
    assert resolve_task(folder / "task.yaml").instance(0).built.benchmark.content_hash == pinned
    text = (folder / "late.jsonl").read_text()
    (folder / "late.jsonl").write_text(text.replace('"answer": "h"', '"answer": "g"', 1))
    with pytest.raises(ValueError, match=rf"task\.yaml, line \d+, .*content_hash: the benchmark has moved: {pinned}"):
        resolve_task(folder / "task.yaml").instance(0).built  # noqa: B018


# Every way in takes it


def test_environments_and_workers_take_a_file(folder: Path) -> None:
    name = str(folder / "task.yaml")
    with gym.make("PostTrain/Recipe-v0", task=name) as env:
        observation, _ = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        assert env.spec is not None and env.spec.kwargs["task"] == name
    settings = pickle.loads(pickle.dumps(EnvSettings(task=name)))
    assert settings.family().instance(0).built.benchmark.dimensions == ("early", "late")
    assert json.loads(json.dumps(settings.to_dict()))["task"] == name
    vector = gym.make_vec("PostTrain/Recipe-v0", num_envs=1, vectorization_mode="async", task=name)
    try:
        observations, _ = vector.reset(seed=0)
        assert vector.observation_space.contains(observations)
    finally:
        vector.close()


def test_commands_take_a_file(folder: Path) -> None:
    name, run = str(folder / "task.yaml"), CliRunner().invoke
    shown = run(app, ["tasks", name])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["sources"] == {"words": {"demonstrations": 64}}
    listed = run(app, ["algorithms", "--task", name, "--json"])
    usable = {row["name"]: row["sources"] for row in json.loads(listed.output)}
    assert (usable["sft"], usable["grpo"]) == (["words"], [])
    (folder / "space.yaml").write_text("decision_space:\n  algorithm: [sft]\n")
    assert run(app, ["space", str(folder / "space.yaml"), "--task", name]).exit_code == 0
    (folder / "recipe.yaml").write_text("algorithm: sft\nmix: {words: 1.0}\nsteps: 2\n")
    assert run(app, ["predict-cost", str(folder / "recipe.yaml"), "--task", name]).exit_code == 0
    checked = run(app, ["check-task", name, "--json"])
    assert json.loads(checked.output)["error"] == 0, checked.output


def test_a_wrong_file_ends_a_command_with_one_paragraph(folder: Path) -> None:
    (folder / "task.yaml").write_text("modle: x\n")
    command = [sys.executable, "-m", "posttrain_gym", "algorithms", "--task", "task.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: task task.yaml, line 1, column 1: modle: unknown key 'modle'.")
    assert len(done.stderr.splitlines()) == 1


# The examples


def test_the_example_in_code_is_short() -> None:
    lines = (EXAMPLES / "own_data.py").read_text().splitlines()
    assert len(lines) <= 40


@pytest.mark.parametrize(
    "name", ["posttrain_gym.experiments.examples.own_data:OwnData", str(EXAMPLES / "own_task.yaml")]
)
def test_the_examples_train_with_a_real_gain(name: str) -> None:
    done = run_recipe(EXAMPLES / "words_sft.yaml", name, 0, 0, None)
    assert done["ended"] == "finished"
    test = done["scores"]["test"]
    gain, error = test["after"] - test["before"], (test["after_error"] ** 2 + test["before_error"] ** 2) ** 0.5
    assert gain > 0.25 and gain > 8 * error, test


def test_the_yaml_example_says_what_recipes_leave_out() -> None:
    task: InnerTask = resolve_task(EXAMPLES / "own_task.yaml").instance(0)
    assert task.recipe_defaults() == {"steps": 30, "learning_rate": 5e-4}
    assert {name: len(rows) for name, rows in task.built.sources["words"].rows.items()} == {
        "demonstrations": 384,
        "prompts": 384,
    }
    assert task.built.flags == ()


def test_the_file_of_the_documentation_is_read(tmp_path: Path, tiny: Path) -> None:
    page = (EXAMPLES.parent.parent / "docs" / "tasks.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    shutil.copytree(EXAMPLES / "own_data", tmp_path / "own_data")
    (tmp_path / "stronger").symlink_to(tiny)
    (tmp_path / "file.jinja").write_text("{{ messages }}")
    (tmp_path / "task.yaml").write_text(text)
    task = FileTask(tmp_path / "task.yaml")
    assert sorted(source.name for source in task.sources()) == ["sums", "words"]
    assert task.benchmark().dimensions == ("reversing", "sorting")
    assert task.recipe_defaults() == {"lora_rank": 8}


def test_an_example_copied_elsewhere_is_the_same_task(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "own_data", tmp_path / "own_data")
    shutil.copy(EXAMPLES / "own_task.yaml", tmp_path / "own_task.yaml")
    one, other = (resolve_task(place / "own_task.yaml").instance(0).built for place in (EXAMPLES, tmp_path))
    assert one.content_hash == other.content_hash
