"""Each check of `check_task` finds the fault it is for, in words, and nothing in tasks that have none."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain_gym.experiments.cli import app
from posttrain_gym.experiments.doc_tables import check_table
from posttrain_gym.inner_trainers import task_checks
from posttrain_gym.inner_trainers.fresh_process import Examined, examine
from posttrain_gym.inner_trainers.item_checks import smallest_gain
from posttrain_gym.inner_trainers.task_checks import CHECKS, Finding, check_task
from posttrain_gym.inner_trainers.tasks import Benchmark, Chat, InnerTask, Item, Source, TaskFamily
from posttrain_gym.inner_trainers.testing import GivenTask, ScriptedTrainer, write_tiny_checkpoint

LETTERS = "abcdefgh"
WORDS = ["".join(word) for word in itertools.product(LETTERS, repeat=3)]
Scorer = Callable[[Item, str], Any]


def exact(item: Any, text: str) -> float:
    data = item.data if isinstance(item, Item) else item
    return float(text == data["answer"])


def items(dimension: str = "copy", *, first: int = 0, count: int = 32, **data: Any) -> list[Item]:
    return [Item(f"{word}=", dimension, {"answer": word[0], **data}) for word in WORDS[first : first + count]]


def benchmark(score: Scorer = exact, **settings: Any) -> Benchmark:
    given: dict[str, Any] = {
        "weights": {"copy": 1.0},
        "validation": items(),
        "test": items(first=32),
        "scorer_version": "1",
        "max_new_tokens": 4,
    }
    return Benchmark(score=score, **{**given, **settings})


def source(verifier: Any = exact, **rows: Any) -> Source:
    prompts = [{"prompt": f"{word}=", "answer": word[0]} for word in WORDS[100:140]]
    shown = [{"prompt": row["prompt"], "completion": row["answer"]} for row in prompts]
    given = rows or {"demonstrations": shown, "prompts": prompts}
    return Source("good", given, verifier, "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture
def fresh() -> None:
    """Asked for by tests of what only a process of its own shows."""


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine tasks in this process, which is quicker, unless a test asks for fresh ones."""

    def here(sent: Mapping[str, Any], *, seconds: float, thorough: bool = True, **_: Any) -> Examined:
        return examine(pickle.loads(bytes.fromhex(sent["pickled"])), seconds, thorough=thorough)

    if "fresh" not in request.fixturenames:
        monkeypatch.setattr(task_checks, "examine_in_fresh_process", here)


def found(task: Any, **settings: Any) -> dict[tuple[str, str], list[Finding]]:
    """Findings by severity and check."""
    by: dict[tuple[str, str], list[Finding]] = {}
    for finding in check_task(task, **{"call_seconds": 0.5, **settings}):
        assert finding.check in CHECKS
        assert finding.problem and finding.where
        by.setdefault((finding.severity, finding.check), []).append(finding)
    return by


def test_a_sound_task_has_no_findings(fresh: None, base: Path) -> None:
    assert check_task(GivenTask(base, [source()], benchmark())) == []


@pytest.mark.parametrize("name", ["calculator", "letters"])
def test_built_in_tasks_have_no_errors(fresh: None, name: str) -> None:
    assert [finding for finding in check_task(name) if finding.severity == "error"] == []


# Scoring


FAULTS: dict[str, tuple[Scorer, str, str]] = {
    "raises": (
        lambda item, text: float(text[0] == "a"),
        "raises",
        r"IndexError: string index out of range \(.*line \d+",
    ),
    "digits": (lambda item, text: float(text.isdigit() and int(text) == 7), "raises", "ValueError"),
    "exits": (lambda item, text: sys.exit(3) if text == "nan" else 0.0, "raises", "SystemExit"),
    "above": (lambda item, text: 2.0 if text == item.data["answer"] else 0.0, "range", r"it returned 2\.0"),
    "nan": (lambda item, text: float("nan") if "9" in text else exact(item, text), "range", "it returned nan"),
    "text": (lambda item, text: "yes" if text == item.data["answer"] else 0, "range", "it returned 'yes'"),
    "mutates": (lambda item, text: vars(item)["data"].update(seen=text) or 0.0, "mutates", "changed its data"),
    "generous": (lambda item, text: 1.0, "generous", "full marks to whatever is said"),
    "empty": (
        lambda item, text: float(item.data["answer"].startswith(text)),
        "generous",
        "the empty completion, on all",
    ),
    "hashes": (lambda item, text: hash(text) % 7 / 7, "deterministic", "in a process with another hash seed"),
}


def test_faults_of_scorers_are_found_each_in_its_dimension(fresh: None, base: Path) -> None:
    names = sorted(FAULTS)
    apart = {"validation": 0, "test": 32}
    split = {
        name: [
            Item(f"{word}{place:x}=", dimension, {"answer": word[0]})
            for place, dimension in enumerate(names)
            for word in WORDS[start : start + 32]
        ]
        for name, start in apart.items()
    }
    task = GivenTask(
        base,
        [source()],
        lambda: Benchmark(
            {name: 1 / len(names) for name in names},
            split["validation"],
            split["test"],
            score=lambda item, text: FAULTS[item.dimension][0](item, text),
            scorer_version="1",
        ),
    )
    told = found(task)
    for name, (_, check, words) in FAULTS.items():
        mine = [f for f in told[("error", check)] if f.where == f"benchmark.score, dimension {name!r}"]
        assert len(mine) == 1, (name, told)
        assert re.search(words, mine[0].problem), mine[0]
        assert mine[0].remedy


def test_a_scorer_that_hangs_ends_within_its_time_even_in_c(fresh: None, base: Path) -> None:
    pattern = re.compile(r"(a+)+$")  # stdlib's engine holds the interpreter while it backtracks
    python = GivenTask(base, [source()], benchmark(lambda item, text: time.sleep(60) if text == "" else 0.0))
    in_c = GivenTask(base, [source()], benchmark(lambda item, text: float(bool(pattern.match(text)))))
    for task, words in ((python, "ran longer than 0.5 seconds"), (in_c, "only the end of its process ended it")):
        began = time.monotonic()
        (finding,) = found(task)[("error", "hangs")]
        assert time.monotonic() - began < 40
        assert words in finding.problem
        assert "backtracks" in finding.remedy


def test_what_scorers_print_is_told_and_not_printed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def score(item: Item, text: str) -> float:
        print("scoring", len(text))
        return exact(item, text)

    (finding,) = found(GivenTask(base, [source()], benchmark(score)))[("warning", "prints")]
    assert "it printed 'scoring 0\\n'" in finding.problem
    assert capsys.readouterr() == ("", "")


def test_a_scorer_with_state_is_found_in_one_process(base: Path) -> None:
    def made() -> Benchmark:
        calls = itertools.count()
        return benchmark(lambda item, text: float(next(calls) % 2))

    (finding,) = found(GivenTask(base, [source()], made))[("error", "deterministic")]
    assert re.search(r"it gave [01], then [01], for the completion", finding.problem)


def test_a_process_that_a_scorer_ends_is_told(fresh: None, base: Path) -> None:
    task = GivenTask(base, [source()], benchmark(lambda item, text: os._exit(5) if text == "None" else 0.0))
    (finding,) = found(task)[("error", "raises")]
    assert "its process ended with code 5" in finding.problem
    assert "'None'" in finding.problem


def test_verifiers_are_tried_as_scorers_are(base: Path) -> None:
    (finding,) = found(GivenTask(base, [source(lambda row, text: float(text[0] == "x"))], benchmark()))[
        ("error", "raises")
    ]
    assert finding.where == "the verifier of source 'good'"


def test_a_scorer_that_pays_nothing_in_the_data_is_a_warning(base: Path) -> None:
    told = found(GivenTask(base, [source()], benchmark(lambda item, text: 0.0)))
    (finding,) = told[("warning", "pays")]
    assert "nothing in the data of 20 tried is paid" in finding.problem


# Demonstrations


def test_demonstrations_that_the_verifier_calls_wrong_are_counted(base: Path) -> None:
    rows = [{"prompt": f"{word}=", "answer": word[0]} for word in WORDS[100:140]]
    some = [
        {"prompt": row["prompt"], "completion": "h" if i in (3, 7) else row["answer"]} for i, row in enumerate(rows)
    ]
    told = found(GivenTask(base, [source(demonstrations=some, prompts=rows)], benchmark()))
    (finding,) = told[("warning", "demonstrations")]
    assert "calls 2 of 40 demonstrations wrong, rows 4, 8" in finding.problem
    none = [{"prompt": row["prompt"], "completion": "hh"} for row in rows]
    told = found(GivenTask(base, [source(demonstrations=none, prompts=rows)], benchmark()))
    (finding,) = told[("error", "demonstrations")]
    assert "full marks to none of its own 40 demonstrations" in finding.problem


def test_preferences_upside_down_are_counted(base: Path) -> None:
    rows = [{"prompt": f"{word}=", "answer": word[0]} for word in WORDS[100:110]]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "hh"} for row in rows]
    pairs[4] = {**pairs[4], "chosen": "hh", "rejected": rows[4]["answer"]}
    pairs[6] = {**pairs[6], "rejected": pairs[6]["chosen"]}
    told = found(GivenTask(base, [source(preferences=pairs, prompts=rows)], benchmark()))
    (finding,) = told[("warning", "demonstrations")]
    assert "pays the rejected answer more than the chosen one in 1 preferences, row 5" in finding.problem
    (finding,) = told[("warning", "rows")]
    assert "chosen and rejected are equal in 1 preferences, row 7" in finding.problem


# Items and rows


def test_too_few_items_are_told_with_the_error_expected(base: Path) -> None:
    told = found(GivenTask(base, [source()], benchmark(validation=items(count=4), test=items(first=32, count=16))))
    (error,) = told[("error", "items")]
    assert "its validation split has 4 items: the standard error of the mean can reach 0.25" in error.problem
    assert "a gain below 0.69" in error.problem
    (warning,) = told[("warning", "items")]
    assert "its test split has 16 items" in warning.problem
    assert "Bring 31 or more" in warning.remedy
    assert smallest_gain(31) < 0.25 < smallest_gain(30)
    assert smallest_gain(8) < 0.5 < smallest_gain(7)


def test_items_in_both_splits_in_another_form_are_errors(base: Path) -> None:
    validation = [*items(), Item("  What is A plus B? ", "copy", {"answer": "c"})]
    test = [*items(first=32), Item("what is a plus b", "copy", {"answer": "c"}), items(first=32)[0]]
    told = found(GivenTask(base, [source()], benchmark(validation=validation, test=test)))
    (error,) = told[("error", "splits")]
    assert error.problem.startswith("1 items stand in validation and in test in forms that differ only in case")
    (warning,) = told[("warning", "splits")]
    assert "1 prompts are there more than once in test" in warning.problem


def test_a_missing_split_is_told_in_the_benchmarks_words(base: Path) -> None:
    (error,) = examine(GivenTask(base, [source()], lambda: benchmark(test=[])), 1.0).findings
    assert error.where == "benchmark()"
    assert "the test split has items for []" in error.problem
    (error,) = examine(GivenTask(base, [source()], lambda: benchmark(weights={"copy": 0.5})), 1.0).findings
    assert "weights must sum to 1" in error.problem


def test_data_of_items_that_is_missing_or_of_two_types_is_told(base: Path) -> None:
    some = [*items(count=30), *items(first=30, count=2, answer=None), *items(first=80, count=3, answer=7)]
    told = found(GivenTask(base, [source()], benchmark(validation=some)))
    assert [f.problem for f in told[("warning", "rows")]] == [
        "'answer' is missing or None in 2 of 67 items.",
        "'answer' mixes int (3) and string (62).",
    ]


def test_leaked_rows_are_counted(base: Path) -> None:
    rows = [{"prompt": f"{word}=", "completion": word[0]} for word in WORDS[30:60]]
    (warning,) = found(GivenTask(base, [source(demonstrations=rows)], benchmark()))[("warning", "contamination")]
    assert warning.where == "source 'good'"
    assert warning.problem.startswith("30 rows ask a benchmark prompt") or "rows ask" in warning.problem


def test_a_source_that_no_algorithm_can_use_is_an_error(base: Path) -> None:
    shown = source()
    leaked = Source("leaked", {"demonstrations": [{"prompt": "aaa=", "completion": "a"}]})
    (error,) = found(GivenTask(base, [shown, leaked], benchmark()))[("error", "sources")]
    assert error.where == "source 'leaked'"
    assert "no algorithm can train on it: it has no rows that are left" in error.problem


def test_copies_of_rows_are_counted(base: Path) -> None:
    rows = [{"prompt": f"{word}=", "completion": word[0]} for word in WORDS[100:108]]
    told = found(GivenTask(base, [source(demonstrations=[*rows, rows[0], rows[3]])], benchmark()))
    (warning,) = told[("warning", "rows")]
    assert warning.problem == "10 demonstrations rows, 8 distinct."


def test_versions_are_asked_for(base: Path) -> None:
    plain = Source("good", {"prompts": [{"prompt": "hhh=", "answer": "h"}]}, exact)
    told = found(GivenTask(base, [plain], benchmark(scorer_version="")))
    assert [f.where for f in told[("warning", "version")]] == ["benchmark", "source 'good'"]


# Parts, repeats, processes


def test_parts_that_raise_or_are_something_else_are_told(base: Path) -> None:
    def raising() -> Any:
        return dict[str, Any]()["missing"]

    (error,) = found(GivenTask(base, raising, benchmark()))[("error", "parts")]
    assert error.where == "sources()"
    assert re.search(r"it raised KeyError: 'missing' \(.*line \d+\)", error.problem)
    (error,) = examine(GivenTask(base, [source()], lambda: "no benchmark"), 1.0).findings
    assert "it returned 'no benchmark', no Benchmark" in error.problem
    (error,) = examine(GivenTask(base, [], benchmark()), 1.0).findings
    assert "no source" in error.problem


def test_sources_that_differ_between_calls_or_hash_seeds_are_found(fresh: None, base: Path) -> None:
    calls = itertools.count()
    drifting = GivenTask(base, [source()], lambda: benchmark(validation=items(count=32, call=next(calls))))
    (error,) = found(drifting)[("error", "repeatable")]
    assert error.where == "benchmark, validation items"
    assert "another in two calls on one object, the first at about entry 1 of 32" in error.problem

    def shuffled() -> list[Source]:
        words = list({word for word in WORDS[100:130]})  # the order of a set of text follows the hash seed
        return [source(demonstrations=[{"prompt": f"{word}=", "completion": word[0]} for word in words])]

    (error,) = found(GivenTask(base, shuffled, benchmark()))[("error", "repeatable")]
    assert error.where == "source 'good', demonstrations"
    assert "another in two fresh processes" in error.problem


def test_facts_must_be_plain(base: Path) -> None:
    for facts, words in (({"x": float("nan")}, "not JSON compliant"), ({"x": (1, 2)}, "tuples"), ([], "no dictionary")):
        (error,) = examine(GivenTask(base, [source()], benchmark(), facts=facts), 1.0).findings
        assert error.check == "facts"
        assert words in error.problem


def test_what_cannot_be_sent_to_workers_is_an_error(base: Path) -> None:
    (error,) = found(GivenTask(base, [source()], benchmark(), facts=threading.Lock()))[("error", "pickles")]
    assert "it cannot be sent to workers: TypeError: cannot pickle" in error.problem


def test_names_that_lead_nowhere_are_errors(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = found("leters")[("error", "resolves")]
    assert "Did you mean 'letters'?" in error.problem
    (tmp_path / "my_broken_task.py").write_text("import missing_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    (error,) = found("my_broken_task:Task")[("error", "resolves")]
    assert "module 'missing_module' cannot be imported" in error.problem


def test_what_a_module_prints_is_told_and_kept_out_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from posttrain_gym.inner_trainers.tasks.calculator import CalculatorTask as Task\nprint('loading')\n"
    (tmp_path / "my_loud_task.py").write_text(code)
    command = [sys.executable, "-m", "posttrain_gym", "check-task", "my_loud_task:Task", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["error"], told["warning"]) == (0, 1)
    assert told["findings"][0]["problem"] == "importing or making it prints 'loading\\n'."


class Drifting(TaskFamily):
    """Draws another task each time, and tests where it trains."""

    name = "drifting"
    train_seeds = range(0, 10)
    test_seeds = range(9, 12)
    calls = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def instance(self, seed: int) -> InnerTask:
        Drifting.calls += 1
        sources = [source(demonstrations=[{"prompt": "hhh=", "completion": WORDS[self.calls]}])]
        return GivenTask(self.folder, sources, benchmark())


def test_families_that_drift_are_found(base: Path) -> None:
    told = [f.problem for f in found(Drifting(base))[("error", "family")]]
    assert "1 seeds are for meta-training and for meta-test, for example 9." in told
    assert "instance(0) gives another task each time it is called." in told


# The model


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    (error,) = found(GivenTask(tmp_path / "nowhere", [source()], benchmark()))[("error", "model")]
    assert "has no config.json" in error.problem


def test_answers_that_do_not_fit_are_told_with_the_number_that_does(base: Path) -> None:
    long, more = ([Item(item.prompt, "copy", {"answer": "abcdef"}) for item in items(first=at)] for at in (0, 32))
    told = found(GivenTask(base, [source()], benchmark(validation=long, test=more)))
    (error,) = told[("error", "length")]
    assert "it is 4, but 20 of 20 right answers need more tokens with their end token, up to 7" in error.problem
    assert error.remedy == "Set it to at least 7."
    rows = [{"prompt": "hhh=", "completion": "abcdef"}, {"prompt": "hhg=", "completion": "a"}]
    told = found(GivenTask(base, [source(demonstrations=rows)], benchmark()))
    (warning,) = told[("warning", "length")]
    assert (
        "1 of 2 demonstrations answer with more than the benchmark's 4 new tokens (up to 7), row 1." in warning.problem
    )


def test_prompts_beyond_the_models_positions_are_counted(base: Path) -> None:
    long = [*items(), Item("a" * 200, "copy", {"answer": "a"})]
    (error,) = found(GivenTask(base, [source()], benchmark(validation=long)))[("error", "positions")]
    assert "1 prompts with 4 new tokens do not fit the 128 positions of the model; the longest has 200" in error.problem


def test_text_that_the_tokenizer_does_not_know_is_told(base: Path) -> None:
    strange = [Item(f"Z{item.prompt}", "copy", item.data) for item in items()]
    (warning,) = found(GivenTask(base, [source()], benchmark(validation=strange)))[("warning", "vocabulary")]
    assert "32 of 64 texts have parts that the tokenizer does not know: 'Z'" in warning.problem
    unsayable = [Item(item.prompt, "copy", {"answer": "Z"}) for item in items()]
    told = found(GivenTask(base, [source()], benchmark(validation=unsayable)))
    (error,) = told[("error", "vocabulary")]
    assert error.where == "benchmark, right answers"


def test_turns_without_a_template_are_an_error(base: Path) -> None:
    (error,) = found(GivenTask(base, [source()], benchmark(), chat=Chat()))[("error", "template")]
    assert "chat template: the tokenizer of" in error.problem
    assert "Chat.template" in error.problem


def test_the_base_is_scored_when_asked(base: Path) -> None:
    never = benchmark(lambda item, text: 0.0)
    told = found(GivenTask(base, [source()], never), evaluate=True)
    (warning,) = told[("warning", "headroom")]
    assert "the base model never scores there" in warning.problem
    notes = [finding.problem for finding in told[("note", "headroom")]]
    assert any("the base model scores 0.000 ± 0.000 on validation" in note for note in notes)
    assert any(re.search(r"cost \d+ generated and \d+ scored tokens", note) for note in notes)


# Own trainers


class ForgetfulTrainer(ScriptedTrainer):
    """Says that it trains, and never changes anything."""

    def base(self, task: InnerTask) -> Any:
        raise RuntimeError("no base here")


def test_own_trainers_are_held_to_the_contract(base: Path) -> None:
    task = GivenTask(base, [source()], benchmark(), trainer=object())
    (error,) = found(task)[("error", "trainer")]
    assert "object is no InnerTrainer: algorithms, base, begin" in error.problem
    told = found(GivenTask(base, [source()], benchmark(), trainer=ForgetfulTrainer()), evaluate=True)
    problems = [finding.problem for finding in told[("error", "trainer")]]
    assert any("it raised RuntimeError: no base here" in problem for problem in problems)


# The command


def test_the_page_has_the_checks() -> None:
    assert check_table() in (Path(__file__).resolve().parent.parent / "docs" / "tasks.md").read_text()
    assert check_table().count("\n") == 1 + len(CHECKS)


def test_the_command_says_it_in_words_and_in_json(fresh: None) -> None:
    done = CliRunner().invoke(app, ["check-task", "calculator"])
    assert done.exit_code == 0, done.output
    assert "calculator: 0 errors, 0 warnings" in done.output
    command = [sys.executable, "-m", "posttrain_gym", "check-task", "calculater", "--json"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode == 1
    told = json.loads(failed.stdout)
    assert told["error"] == 1
    assert told["findings"][0]["check"] == "resolves"
    assert "Did you mean 'calculator'?" in told["findings"][0]["problem"]
