"""Tasks: what is refused when one is built, what leaks are taken out, and what its content hash sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.tasks import SingleTask, resolve_task
from posttrain_gym.inner_trainers.tasks.base import (
    Benchmark,
    InnerTask,
    Item,
    Source,
    TaskFamily,
    always_well_formed,
)
from posttrain_gym.inner_trainers.testing import ScriptedFamily, ScriptedTask

ROWS = [{"prompt": "a=", "completion": "a"}, {"prompt": "b=", "completion": "b"}]


def score(item: Item, completion: str) -> float:
    return float(completion == item.data.get("answer"))


def reward(row: Mapping[str, Any], completion: str) -> float:
    return 0.0


BENCHMARK = Benchmark(
    weights={"x": 0.25, "y": 0.75},
    validation=[Item("v1", "x", {"answer": "1"}), Item("v2", "y")],
    test=[Item("t1", "x"), Item("t2", "y")],
    score=score,
)


class Task(InnerTask):
    name = "mine"

    def __init__(
        self, sources: Sequence[Source], benchmark: Benchmark = BENCHMARK, folder: Path = Path("nowhere")
    ) -> None:
        self._sources, self._benchmark, self._folder = sources, benchmark, folder

    def base_checkpoint(self) -> Path:
        return self._folder

    def sources(self) -> Sequence[Source]:
        return self._sources

    def benchmark(self) -> Benchmark:
        return self._benchmark


def source(rows: Sequence[Any] = ROWS, kind: str = "demonstrations", name: str = "letters") -> Source:
    return Source(name, {kind: rows}, reward if kind == "prompts" else None)


# Sources -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "verifier", "message"),
    [
        (
            {"demonstratons": ROWS},
            None,
            "source 's': unknown kind 'demonstratons'. Did you mean 'demonstrations'? "
            "Known: demonstrations, preferences, prompts, records, text.",
        ),
        ({"text": []}, None, "source 's': no text rows; leave the kind out instead."),
        ({"prompts": [{"prompt": "a="}]}, None, "source 's': prompts rows need a verifier."),
        (
            {"demonstrations": [*ROWS, {"prompt": "c="}]},
            None,
            "source 's', demonstrations row 3: column 'completion' must be text, got None (NoneType).",
        ),
        (
            {"demonstrations": [*ROWS, {"prompt": "c=", "completion": 7}]},
            None,
            "source 's', demonstrations row 3: column 'completion' must be text, got 7 (int).",
        ),
        (
            {"preferences": [{"prompt": "c=", "chosen": "c", "reject": "d"}]},
            None,
            "source 's', preferences row 1: column 'rejected' must be text, got None (NoneType).",
        ),
        ({"text": ["abc"]}, None, "source 's', text row 1: expected columns with values, got 'abc'."),
    ],
)
def test_a_source_names_what_is_wrong(rows: Any, verifier: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Source("s", rows, verifier)
    assert str(caught.value) == message


# Benchmarks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"x": 0.5, "y": 0.25}}, "benchmark: weights must sum to 1, got {'x': 0.5, 'y': 0.25}."),
        ({"weights": {"x": 1.0, "y": 0.0}}, "benchmark.weights.y: expected a number in (0, 1], got 0.0."),
        ({"weights": {}}, "benchmark: weights must sum to 1, got {}."),
        (
            {"weights": {"x": 0.5, "z": 0.5}},
            "benchmark: the validation split has items for ['x', 'y'], the weights name ['x', 'z'].",
        ),
        (
            {"test": [Item("t1", "x")]},
            "benchmark: the test split has items for ['x'], the weights name ['x', 'y'].",
        ),
        (
            {"test": [Item("t1", "x"), Item("v2", "x"), Item("v1", "y")]},
            "benchmark: 2 prompts stand in both splits, for example 'v1'.",
        ),
        ({"max_new_tokens": 0}, "benchmark.max_new_tokens: expected an integer in [1, 1048576], got 0."),
    ],
)
def test_a_benchmark_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(BENCHMARK, **changes)
    assert str(caught.value) == message


def test_splits_and_dimensions() -> None:
    assert BENCHMARK.dimensions == ("x", "y")
    assert [item.prompt for item in BENCHMARK.items("validation")] == ["v1", "v2"]
    assert [item.prompt for item in BENCHMARK.items("test")] == ["t1", "t2"]
    assert always_well_formed(Item("v1", "x"), "") is True
    with pytest.raises(ValueError, match=r"no split is called 'tset'. Did you mean 'test'\?"):
        BENCHMARK.items("tset")


# Built tasks ---------------------------------------------------------------------------------------------------------


def test_sources_are_sorted_and_named_once() -> None:
    built = Task([source(name="b"), source(name="a")]).built
    assert list(built.sources) == ["a", "b"]
    assert built.leaked == {}
    with pytest.raises(ValueError, match="task 'mine': two sources are called 'a'"):
        _ = Task([source(name="a"), source(name="a")]).built
    with pytest.raises(ValueError, match="task 'mine': it has no sources"):
        _ = Task([]).built


def test_rows_that_repeat_a_benchmark_prompt_are_taken_out_and_counted() -> None:
    leaky = Source(
        "leaky",
        {
            "demonstrations": [*ROWS, {"prompt": "v1", "completion": "1"}, {"prompt": "t2", "completion": "2"}],
            "prompts": [{"prompt": "v2"}, {"prompt": "c="}],
            "preferences": [{"prompt": "t1", "chosen": "1", "rejected": "2"}],
            "text": [{"text": "a story of v1", "prompt": "an extra column"}, {"text": "a story"}],
        },
        reward,
    )
    built = Task([leaky, source(name="clean")]).built
    assert built.leaked == {"leaky": 5}
    assert built.sources["leaky"].rows == {
        "demonstrations": ROWS,
        "prompts": [{"prompt": "c="}],
        "text": [{"text": "a story"}],
    }  # a kind whose rows all leak is gone, and so are its algorithms
    assert built.sources["leaky"].verifier is reward


def test_the_content_hash_sees_one_letter_anywhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "runs").mkdir()  # folders beside the weights are no part of them
    (tmp_path / "runs" / "events").write_bytes(b"1")
    made = Task([source()], folder=tmp_path).built
    same = Task([source([dict(reversed(row.items())) for row in ROWS])], folder=tmp_path).built
    assert same.content_hash == made.content_hash
    edited = [
        Task([source([ROWS[0], {"prompt": "b=", "completion": "c"}])], folder=tmp_path),
        Task([source(ROWS[::-1])], folder=tmp_path),
        Task([source([ROWS[0], {**ROWS[1], "level": 7}])], folder=tmp_path),
        Task([source([ROWS[0], {**ROWS[1], "level": "7"}])], folder=tmp_path),
        Task([source(name="lettres")], folder=tmp_path),
        Task([source()], replace(BENCHMARK, validation=[Item("v1", "x", {"answer": "2"}), Item("v2", "y")]), tmp_path),
        Task([source()], replace(BENCHMARK, test=[Item("t1", "x"), Item("t3", "y")]), tmp_path),
        Task([source()], replace(BENCHMARK, weights={"x": 0.5, "y": 0.5}), tmp_path),
        Task([source()], replace(BENCHMARK, max_new_tokens=17), tmp_path),
    ]
    hashes = {task.built.content_hash for task in edited} | {made.content_hash}
    assert len(hashes) == len(edited) + 1
    assert {task.built.checkpoint_hash for task in edited} == {made.checkpoint_hash}

    (tmp_path / "model.safetensors").write_bytes(b"weighty")  # same size
    other = Task([source()], folder=tmp_path).built
    assert other.content_hash != made.content_hash
    assert other.checkpoint_hash != made.checkpoint_hash


def test_the_content_hash_is_equal_in_any_process() -> None:
    code = (
        "from tests.test_tasks_base import *;"
        "item = Item('v1', 'x', {'words': {'one', 'two', 'three'}, 'path': Path('a')});"
        "print(Task([source()], replace(BENCHMARK, validation=[item, Item('v2', 'y')])).built.content_hash)"
    )
    root = Path(__file__).resolve().parent.parent
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(hashes) == 1  # a set's own order differs between processes


def test_data_that_has_no_stable_hash_is_refused() -> None:
    class Opaque:
        pass

    task = Task([source([{**ROWS[0], "extra": Opaque()}])])
    with pytest.raises(ValueError, match=r"a Opaque cannot be hashed.*keep plain values"):
        _ = task.built


def test_facts_and_trainer_have_defaults() -> None:
    task = Task([source()])
    assert task.facts() == {"name": "mine"}
    assert task.trainer() is None


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "leters",
            "task: no built-in task is called 'leters'. Did you mean 'letters'? "
            "Known: calculator, letters, smol-reasoning. "
            "A task of your own is given as 'module:Class', or as the name of a file such as task.yaml.",
        ),
        (
            "no_such_module:Task",
            "task 'no_such_module:Task': module 'no_such_module' cannot be imported; "
            "run from its folder or put it on PYTHONPATH.",
        ),
        (
            "posttrain_gym.inner_trainers.faults:FaultWach",
            "module 'posttrain_gym.inner_trainers.faults' has no 'FaultWach'. Did you mean 'FaultWatch'?",
        ),
        ("posttrain_gym.inner_trainers.faults:", "module 'posttrain_gym.inner_trainers.faults' has no ''."),
        (":Task", "task ':Task': expected 'module:Class'."),
        ("math:pi", "task: expected a name, an InnerTask or a TaskFamily, got float."),
        ("tests.test_tasks_base:Task", "task 'tests.test_tasks_base:Task': Task() cannot be built without arguments"),
        (7, "task: expected a name, an InnerTask or a TaskFamily, got int."),
    ],
)
def test_resolve_task_says_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_task(given)
    assert message in str(caught.value)


def test_resolve_task_takes_names_classes_and_objects() -> None:
    family = resolve_task("posttrain_gym.inner_trainers.testing:ScriptedFamily")
    assert isinstance(family, ScriptedFamily)
    assert isinstance(resolve_task(ScriptedFamily), ScriptedFamily)
    assert resolve_task(family) is family
    single = resolve_task(ScriptedTask)
    assert isinstance(single, SingleTask)
    assert (single.name, single.train_seeds, single.test_seeds) == ("scripted", range(1), range(1))
    task = Task([source()])
    assert resolve_task(task).instance(5) is task
    assert resolve_task("letters").name == "letters"


class Broken(ScriptedTask):
    """A task whose one method is replaced by the test."""


@pytest.mark.parametrize(
    ("part", "does", "said"),
    [
        (
            "benchmark",
            lambda self: dict[str, int]()["missing"],
            r"benchmark\(\) raised KeyError: 'missing' \(test_tasks_base\.py, line \d+\)",
        ),
        ("benchmark", lambda self: None, r"benchmark\(\) returned None"),
        ("sources", lambda self: None, r"sources\(\) returned None"),
        ("sources", lambda self: ["math"], r"sources\(\) must return Source objects, got 'math'"),
        ("base_checkpoint", lambda self: None, r"base_checkpoint\(\) returned None"),
    ],
)
def test_a_fault_in_a_persons_task_names_task_method_and_line(
    monkeypatch: pytest.MonkeyPatch, part: str, does: Any, said: str
) -> None:
    monkeypatch.setattr(Broken, part, does)
    with pytest.raises(ValueError, match=rf"task 'scripted': {said}"):
        Broken().built  # noqa: B018


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", r"importing 'mine' failed with ZeroDivisionError: division by zero \(mine\.py, line 1\)"),
        ("def f(:\n", r"importing 'mine' failed with SyntaxError: .*\(mine\.py, line 1\)"),
        ("raise SystemExit(3)\n", r"importing 'mine' failed with SystemExit: 3"),
        (
            "class Task:\n    def __init__(self):\n        1 + 'a'\n",
            r"Task\(\) failed with TypeError: .*\(mine\.py, line 3\)",
        ),
        (
            "class Task:\n    def __init__(self, x): ...\n",
            r"Task\(\) cannot be built without arguments \(missing a required",
        ),
    ],
)
def test_a_fault_in_a_persons_module_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match=said):
        resolve_task("mine:Task")


def test_a_family_needs_seeds() -> None:
    class Seedless(TaskFamily):
        name = "seedless"
        train_seeds = range(0)

        def instance(self, seed: int) -> InnerTask:
            raise AssertionError

    with pytest.raises(ValueError, match=r"train_seeds must be a range with at least one seed, got range\(0, 0\)"):
        resolve_task(Seedless)


def test_a_scorers_version_is_part_of_the_content_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ScriptedTask().built
    whole = ScriptedTask.benchmark
    monkeypatch.setattr(ScriptedTask, "benchmark", lambda self: replace(whole(self), scorer_version="2"))
    assert ScriptedTask().built.content_hash != plain.content_hash


def test_text_that_was_decoded_wrongly_is_refused_with_its_row() -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "caf\udce9", "completion": "b"}]
    with pytest.raises(ValueError, match=r"^source 's', demonstrations row 2: column 'prompt' holds a lone surrogate"):
        Source("s", {"demonstrations": rows})
