"""What an inspection tells of files: exact counts, rows and lines, figures that equal a round's, and exit codes."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain_gym.experiments.cli import app
from posttrain_gym.experiments.data_report import lines_of, page_of
from posttrain_gym.inner_trainers.base_models import model_folder
from posttrain_gym.inner_trainers.data.errors import DataError
from posttrain_gym.inner_trainers.data.inspection import DataFinding, Inspection, InspectionSettings, inspect_data
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.models import load_tokenizer
from posttrain_gym.inner_trainers.trl.rows import TaskRows, truncation_flags

LETTERS = "letters-messy"
A01 = [{"prompt": "q" * 60 if number <= 3 else "q", "completion": "yes"} for number in range(1, 9)]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def inspect(path: Path, **settings: Any) -> Inspection:
    return inspect_data([path], InspectionSettings(**settings))


def only(found: Inspection, check: str) -> DataFinding:
    (one,) = [finding for finding in found.findings if finding.check == check]
    return one


def checks(found: Inspection) -> set[str]:
    return {finding.check for finding in found.findings}


def test_rows_that_keep_no_completion_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{**row, "completion": f"yes{number}"} for number, row in enumerate(A01)]
    one = only(inspect(write(tmp_path / "a.jsonl", rows), model=LETTERS, algorithm="sft", max_length=20), "cut")
    assert one.problem == "3 of 8 rows keep no completion token at max_length 20"
    assert (one.severity, one.count, one.rows, one.lines) == ("warning", 3, (1, 2, 3), (1, 2, 3))


def test_when_all_are_cut_the_smallest_length_that_works_is_named(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "a.jsonl", A01[:3]), model=LETTERS, algorithm="sft", max_length=20)
    one = only(found, "cut")
    assert (one.severity, one.problem) == ("error", "all 3 rows keep no completion token at max_length 20")
    assert one.remedy == "The smallest max_length that works is 61."
    longer = inspect(write(tmp_path / "b.jsonl", A01[:3]), model=LETTERS, algorithm="sft", max_length=61)
    assert "cut" not in checks(longer)


def test_a_sample_changes_no_verdict_on_single_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "q" * (number % 40 + 1), "completion": f"{number}"} for number in range(400)]
    path = write(tmp_path / "a.jsonl", rows)
    told = {"model": LETTERS, "algorithm": "sft", "max_length": 30}
    sampled, exact = inspect(path, sample_rows=20, **told), inspect(path, exact=True, **told)
    assert only(sampled, "cut") == only(exact, "cut")
    assert only(exact, "cut").count == 110  # prompts of 30 to 40 characters: 11 of every 40
    assert sampled.files[0].lengths["rows"] == 20
    assert exact.files[0].lengths["rows"] == 400
    assert "a uniform sample of 20 of 400 rows" in only(sampled, "sampled").problem
    assert "sampled" not in checks(exact)


@pytest.mark.parametrize("max_length", [20, 9, 5, 1024])
def test_figures_are_those_of_a_round(tmp_path: Path, max_length: int) -> None:
    folder = model_folder(LETTERS)
    rows = [{"prompt": "q" * (3 * number + 1), "completion": "yes"[: number % 4]} for number in range(12)]
    found = inspect(write(tmp_path / "a.jsonl", rows), model=LETTERS, algorithm="sft", max_length=max_length)

    class OwnRows(TinyTask):
        def sources(self) -> list[Source]:
            return [Source("mine", {"demonstrations": rows})]

    tokenised = TaskRows(OwnRows(folder), load_tokenizer(folder)).tokenised(ALGORITHMS["sft"], "mine").cut(max_length)
    lost, flags = truncation_flags({"mine": tokenised}, max_length)
    cut = [finding for finding in found.findings if finding.check == "cut"]
    assert sum(finding.count for finding in cut) == lost
    for finding, flag in zip(cut, flags, strict=True):
        assert finding.problem == flag.partition(":")[0].replace(" of source 'mine'", "")
    learned = sum(label != -100 for i in tokenised.trainable for label in tokenised.labels[i][1:])
    assert found.files[0].supervised_share == learned / sum(len(tokenised.input_ids[i]) for i in tokenised.trainable)


def test_preferences_are_judged_as_a_round_judges_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": "same", "rejected": "same"},
        {"prompt": "q", "chosen": "", "rejected": "no"},
        {"prompt": "q", "chosen": "no", "rejected": "yes"},
        {"prompt": "q", "chosen": "a" * 30 + "b", "rejected": "a" * 30 + "c"},
    ]
    found = inspect(write(tmp_path / "a.jsonl", rows), model=LETTERS, algorithm="dpo", max_length=20)
    assert only(found, "identical").rows == (2,)
    assert only(found, "empty").rows == (3,)
    assert only(found, "contradiction").rows == (1, 4)
    told = {finding.problem: finding.rows for finding in found.findings if finding.check == "cut"}
    assert told == {
        "2 of 5 rows have an empty side or two equal ones": (2, 3),
        "1 of 5 rows keep no token in which their sides differ at max_length 20": (5,),
    }


def test_a_model_without_chat_template_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder(LETTERS), model)
    (model / "chat_template.jinja").unlink()
    turns = [{"role": "user", "content": "Name a prime."}, {"role": "assistant", "content": "7"}]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}])
    one = only(inspect(path, model=str(model), algorithm="sft"), "template")
    assert one.severity == "error"
    assert f"the tokenizer of {model} has none" in one.problem
    assert "Either set tokenizer.chat_template" in one.problem and "Chat.template" in one.problem


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system turn') }}", "raised TemplateError: no system turn"),
        (
            "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{{ '<eos>' }}{% endif %}"
            "{% endfor %}",
            "differently once later ones follow",
        ),
    ],
)
def test_templates_that_cannot_write_a_row_are_named_with_the_row(tmp_path: Path, template: str, said: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder(LETTERS), model)
    (model / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}, {"messages": turns * 2}])
    errors = [one for one in inspect(path, model=str(model), algorithm="sft").findings if one.check == "template"]
    assert any(said in one.problem and 2 in one.rows for one in errors)


def test_windows_files_load_and_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"prompt": "café?", "completion": "oui"}\r\n{"prompt": "b", "completion": "c"}\r\n'.encode()
    )
    found = inspect(path)
    assert found.files[0].rows == 2
    assert list(found.files[0].columns) == ["prompt", "completion"]
    assert only(found, "byte_order_mark").severity == "note"
    assert only(found, "line_ends").lines == (1, 2)
    path.write_bytes('{"prompt": "café?", "completion": "oui"}\n{"prompt": "b", "completion": "c"}\n'.encode("latin-1"))
    one = only(inspect(path), "malformed")
    assert (one.severity, one.count, one.lines) == ("error", 1, (1,))
    assert "0xe9" in one.remedy and "Latin-1" in one.remedy


def test_mixed_types_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": 7},
        {"prompt": "b", "answer": "007"},
        {"prompt": "c", "answer": "7.50"},
    ]
    found = inspect(write(tmp_path / "a.jsonl", rows), algorithm="grpo")
    one = only(found, "types")
    assert one.problem.startswith("answer mixes int (1) and string (2)")
    assert (one.severity, one.rows) == ("error", (1, 2))
    assert found.files[0].columns["answer"] == {"int": 1, "string": 2}


def test_null_content_is_named_and_both_forms_of_arguments_are_one_row(tmp_path: Path) -> None:
    def row(calls: Any) -> dict[str, Any]:
        said = {"role": "assistant", "content": None, **({"tool_calls": calls} if calls else {})}
        return {"messages": [{"role": "user", "content": "hi"}, said]}

    rows: list[dict[str, Any]] = [
        row([{"name": "f", "arguments": {"city": "Graz"}}]),
        row([{"name": "g", "arguments": {"zone": "UTC"}}]),
        row([{"name": "f", "arguments": '{"city": "Graz"}'}]),
        row(None),
    ]
    found = inspect(write(tmp_path / "a.jsonl", rows), algorithm="sft")
    assert only(found, "form").rows == (4,)
    assert "content is null and there is no tool call" in only(found, "form").problem
    assert only(found, "duplicate").rows == (1, 3)
    assert only(found, "tool_arguments").rows == (3,)


def test_repeats_are_counted_as_rounds_count_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{0 if n in (1, 4, 8) else n}", "completion": f"{0 if n in (1, 4, 8) else n}"}
        for n in range(1, 11)
    ]
    one = only(inspect(write(tmp_path / "a.jsonl", rows)), "duplicate")
    assert one.problem.startswith("10 rows, 8 distinct")
    assert one.rows == (1, 4, 8)


def test_near_repeats_and_several_answers(tmp_path: Path) -> None:
    story = "the quick brown fox jumps over the lazy dog and runs through the dark forest until it comes to a river"
    rows = [
        {"prompt": story, "completion": "yes"},
        {"prompt": story.replace("lazy", "crazy"), "completion": "yes"},
        {"prompt": "What is 12 + 7?", "completion": "19"},
        {"prompt": "What is 12 + 8?", "completion": "20"},
        {"prompt": "What is 12 + 8?", "completion": "twenty"},
    ]
    found = inspect(write(tmp_path / "a.jsonl", rows))
    assert only(found, "near_duplicate").rows == (2,)
    assert (only(found, "contradiction").severity, only(found, "contradiction").rows) == ("note", (4, 5))


def test_overlap_names_row_line_item_and_the_shared_words(tmp_path: Path) -> None:
    head = "Solve the following task with care and answer with one word only please: "
    own = (
        "which of the three sisters walked along the old harbour wall that night",
        "how many lamps were lit when the last ferry came in from the islands",
        "why did nobody ever ask the miller where his second donkey had gone to",
        "what did the clockmaker find inside the oldest tower clock of the town",
        "where had the two travellers from the north hidden their silver coins",
    )
    items = [head + text for text in own]
    rows = [
        {"prompt": items[0], "completion": "one"},
        {"prompt": items[1].upper() + "  ?", "completion": "two"},
        {
            "prompt": f"so, {own[2]}, and when?",
            "completion": "three",
        },
        {"prompt": head + "what is the colour of the sky", "completion": "four"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))  # lines are not rows
    found = inspect(path, benchmark=[(f"test item {n}", item) for n, item in enumerate(items, start=1)])
    told = [finding for finding in found.findings if finding.check == "overlap"]
    assert {finding.rows: finding.lines for finding in told} == {(1,): (2,), (2,): (3,), (3,): (4,)}
    assert "row 1 and test item 1" in told[0].problem
    assert "row 3 and test item 3: 'why did nobody ever ask" in told[2].problem


def test_rows_of_one_file_in_another_are_told(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": f"q{n}", "completion": "a"} for n in range(6)])
    held = write(
        tmp_path / "held.jsonl",
        [{"prompt": "q9", "completion": "a"}, {"prompt": "q3", "completion": "a"}, {"prompt": "q4", "completion": "b"}],
    )
    found = inspect_data([train, held])
    first, second = [finding for finding in found.findings if finding.check == "leak"]
    assert (first.rows, first.severity) == ((2,), "warning")
    assert first.problem == f"1 of 3 rows stand in {train} too (row 2 is its row 4)"
    assert (second.rows, second.severity) == ((3,), "note")


@pytest.mark.parametrize(
    ("body", "said", "severity"),
    [
        ("return 0.5", "gives 0.5 to own and to other rows' answers alike", "error"),
        ("return 0.0", "gives no credit to the own answer", "error"),
        ("return float('nan')", "returned nan", "error"),
        ("return 1 / len(completion)", "raised ZeroDivisionError", "error"),
        ("print('hi'); return float(completion == row['answer'])", "it printed", "warning"),
        ("while True: pass", "ran longer than 0.3 seconds", "error"),
    ],
)
def test_verifiers_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str, severity: str
) -> None:
    module = f"judge_{abs(hash(body))}"
    (tmp_path / f"{module}.py").write_text(f"def score(row, completion):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"q{n}", "answer": f"a{n}"} for n in range(6)]
    found = inspect(write(tmp_path / "a.jsonl", rows), verifier=f"{module}:score", call_seconds=0.3)
    assert any(one.severity == severity and said in one.problem for one in found.findings if one.check == "verifier")


def test_a_good_verifier_is_summed_up(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "answer": f"a{n}"} for n in range(6)]
    found = inspect(write(tmp_path / "a.jsonl", rows), verifier="exact")
    assert [found.files[0].rewards[name]["mean"] for name in ("own", "empty", "other")] == [1.0, 0.0, 0.0]
    assert found.count("error") == 0


def test_odd_characters_scripts_and_languages(tmp_path: Path) -> None:
    texts = [
        "caf\u00c3\u00a9",
        "a\ufffdb",
        "a\x07b",
        "a\u200bb",
        "the cat is in the house",
        "la casa es de los padres",
        "это дом",
    ]
    found = inspect(write(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    assert "near_duplicate" not in checks(found)
    told = {one.check: one.rows for one in found.findings if one.count}
    assert told == {"mojibake": (1,), "replacement": (2,), "control": (3,), "zero_width": (4,)}
    assert set(found.files[0].scripts) == {"Latin", "Cyrillic"}
    assert found.files[0].languages == {
        "unclear": pytest.approx(5 / 7),
        "English": pytest.approx(1 / 7),
        "Spanish": pytest.approx(1 / 7),
    }


def test_an_algorithm_that_cannot_use_the_rows_is_told_with_those_that_can(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a"}])
    one = only(inspect(path, algorithm="dpo"), "algorithm")
    assert one.severity == "error"
    assert one.remedy == ("dpo cannot train on these rows; algorithms that can: distill, grpo, ppo, rft, rloo, sft.")
    unpaired = write(tmp_path / "b.jsonl", [{"prompt": "q", "completion": "a", "label": True}])
    assert "kto train on pairs" in only(inspect(unpaired), "algorithm").remedy


def test_what_was_not_looked_at_is_said(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "abc"}]))
    assert "without --model" in only(found, "skipped").problem
    assert found.files[0].lengths["unit"] == "characters"
    assert found.files[0].lengths["completion"]["greatest"] == 3


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect-data", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        if isinstance(result.exception, (ValueError, OSError)):
            return 2, str(result.exception)
        raise result.exception
    return result.exit_code, result.output


def test_exit_codes_and_json(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [{"prompt": "q", "completion": "a"}])
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "q", "completion": ""}, {"prompt": "q", "completion": "b"}])
    assert run(str(good))[0] == 0
    assert run(str(good), "--fail-on", "note")[0] == 1
    code, out = run(str(bad), "--json")
    told = json.loads(out)
    assert (code, told["errors"], told["files"][0]["rows"]) == (1, 1, 2)
    assert told["files"][0]["findings"][0]["rows"] == [1]
    assert run(str(good), "--fail-on", "never")[0] == 2
    assert run(str(good), "--algorithm", "dpoo")[0] == 2
    assert run(str(good), "--column", "prompt")[0] == 2


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "cut gzip", "binary"])
def test_what_cannot_be_read_is_one_paragraph(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut gzip":
        path.write_bytes(gzip.compress(b'{"prompt": "q", "completion": "a"}\n' * 999)[:-20])
    elif kind == "binary":
        path.write_bytes(b"\x80\x04\x95pickled")
    with pytest.raises(DataError, match=r"a\.jsonl"):
        inspect(path)
    code, said = run(str(path))
    assert code == 2 and "a.jsonl" in said and "\n" not in said.strip()


def test_a_line_of_ten_megabytes_is_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "word " * 2_000_000}, *A01])
    found = inspect(path)
    assert (found.files[0].rows, found.files[0].lengths["completion"]["greatest"]) == (9, 10_000_000)


def test_the_page_stands_alone_and_shows_what_the_terminal_shows(tmp_path: Path) -> None:
    path = write(tmp_path / "a<b>.jsonl", A01)
    found = inspect(path, model=LETTERS, algorithm="sft", max_length=20)
    page = page_of(found)
    assert "data:image/png;base64," in page and "http" not in page
    assert "a&lt;b&gt;.jsonl" in page and "<b>" not in page
    assert "3 of 8 rows keep no completion token at max_length 20" in page
    shown = list(lines_of(found))
    assert sum("█" in line for line in shown) == 2 + 1 + 2  # bars of prompts, completions and whole rows
    assert Recipe.max_length == 1024  # what a file without --max-length is held to


def test_raw_text_that_holds_an_item_is_told_as_tasks_leave_it_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "abc >s:ba< ab"}, {"text": "abc"}])
    one = only(inspect(path, benchmark=[("test item 1", ">s:ba<")]), "overlap")
    assert one.rows == (1,)
    assert "row 1 and test item 1: '>s:ba<'" in one.problem


def test_a_tasks_benchmark_and_a_file_of_items_are_compared_with(tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"question": "one?"}, {"question": "two?"}])
    path = write(tmp_path / "a.jsonl", [{"question": "TWO", "answer": "2"}, {"question": "three?", "answer": "3"}])
    columns = ("--column", "prompt=question", "--column", "completion=answer")
    code, out = run(str(path), "--benchmark", str(items), *columns, "--json")
    (finding,) = [one for one in json.loads(out)["files"][0]["findings"] if one["check"] == "overlap"]
    assert (code, finding["rows"]) == (1, [1])
    assert f"row 1 and {items}, line 2: 'TWO'" in finding["problem"]
    assert run(str(path), "--task", "letters", *columns)[0] == 0
    assert run(str(path), "--task", "lettres", *columns)[0] == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("side", ["completion", "chosen"])
def test_turns_among_texts_are_named(tmp_path: Path, first: int, side: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "q", side: "a"},
        {"prompt": "q", side: [{"role": "assistant", "content": "b"}]},
    ]
    whole = [{**row, **({"rejected": "c"} if side == "chosen" else {})} for row in (rows[first], rows[1 - first])]
    found = inspect(write(tmp_path / "a.jsonl", whole), model=LETTERS)
    assert only(found, "form").rows == (2,)
    assert "write all of them in one way" in only(found, "form").problem


def test_rows_that_are_nothing_are_told_and_never_raise(tmp_path: Path) -> None:
    odd = [
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "zz"}]}',
        '{"messages": "text"}',
        '{"messages": [5]}',
        '{"messages": []}',
        '{"messages": null}',
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "y"}]}',
        "{}",
        "7",
        "null",
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(odd) + "\n")
    found = inspect(path, model=LETTERS, algorithm="sft", verifier="exact")
    told = {
        row for finding in found.findings if finding.check in ("form", "malformed", "template") for row in finding.rows
    }
    lines = {line for finding in found.findings if finding.check == "malformed" for line in finding.lines}
    assert told == {2, 3, 4, 5, 6, 7, 8}
    assert lines == {9, 10}
    assert found.files[0].rows == 10
