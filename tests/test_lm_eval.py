"""Tasks of lm-eval from local files: prompts and scores worked out by hand, and what is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.benchmarks.benchmark_file import load_benchmark
from posttrain_gym.inner_trainers.benchmarks.lm_eval import read_lm_eval

MATH = r"""
task: own_math
dataset_path: json
dataset_kwargs: {data_files: {test: test.jsonl, train: train.jsonl}}
output_type: generate_until
test_split: test
fewshot_split: train
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{answer}}"
num_fewshot: 2
metric_list:
  - metric: exact_match
    ignore_case: true
    regexes_to_ignore: [",", "(?s).*#### "]
generation_kwargs: {until: ["Question:"], do_sample: false}
filter_list:
  - name: strict
    filter:
      - {function: regex, regex_pattern: '#### (\-?[0-9\.\,]+)'}
      - {function: take_first}
  - name: flexible
    filter:
      - {function: regex, group_select: -1, regex_pattern: '(-?[$0-9.,]{2,})|(-?[0-9]+)'}
"""
CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: test.jsonl}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{labels.index(key)}}"
doc_to_choice: "{{texts}}"
metric_list: [{metric: acc}]
"""


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def math(tmp_path: Path) -> Path:
    write(tmp_path / "test.jsonl", [{"question": f"{i}+1?", "answer": f"So {i + 1}. #### {i + 1}"} for i in range(3)])
    write(tmp_path / "train.jsonl", [{"question": f"{i}+5?", "answer": f"#### {i + 5}"} for i in range(3)])
    (tmp_path / "math.yaml").write_text(MATH)
    return tmp_path


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_lm_eval(path, "d")
    return str(error.value)


def test_prompts_with_worked_examples(math: Path) -> None:
    task = read_lm_eval(math / "math.yaml", "sums")
    assert [item.prompt for item in task.items][1] == (
        "Question: 0+5?\nAnswer: #### 5\n\nQuestion: 1+5?\nAnswer: #### 6\n\nQuestion: 1+1?\nAnswer:"
    )
    assert {item.dimension for item in task.items} == {"sums"}
    assert task.items[0].data == {"answers": ["So 1. #### 1"]}
    assert task.notes == ("few-shot examples are the first of their split, where the harness may draw them",)


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        (" I see. #### 1", 1.0, 1.0),
        (" #### 1\nQuestion: 9+9? #### 18", 1.0, 1.0),
        (" #### 2", 0.0, 0.0),
        (" the answer is 1", 0.0, 1.0),
        (" 1 or 2", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_exact_match_behind_a_filter(math: Path, completion: str, strict: float, flexible: float) -> None:
    for name, right in (("", strict), ("flexible", flexible)):
        task = read_lm_eval(math / "math.yaml", "sums", filter_name=name)
        assert task.verifier.score(task.items[0].data, completion) == right


def test_the_text_between_examples_ends_a_completion(math: Path) -> None:
    text = MATH.replace('generation_kwargs: {until: ["Question:"], do_sample: false}', 'fewshot_delimiter: "\\n---\\n"')
    (math / "math.yaml").write_text(text)
    task = read_lm_eval(math / "math.yaml", "sums")
    assert "#### 5\n---\nQuestion: 1+5?" in task.items[0].prompt
    assert task.verifier.score(task.items[0].data, "so\n\n#### 1") == 1.0
    assert task.verifier.score(task.items[0].data, "so\n---\n#### 1") == 0.0


def test_choices_are_generated_and_compared(tmp_path: Path) -> None:
    write(
        tmp_path / "test.jsonl", [{"question": "Best?", "texts": ["A cat", "a dog"], "labels": ["A", "B"], "key": "B"}]
    )
    (tmp_path / "c.yaml").write_text(CHOICE)
    task = read_lm_eval(tmp_path / "c.yaml", "d")
    row = dict(task.items[0].data)
    assert row == {"answers": ["a dog"], "choices": ["A cat", "a dog"]}
    assert task.verifier.score(row, " A dog.\nmore") == 1.0
    assert task.verifier.score(row, "a cat") == 0.0
    assert task.verifier.well_formed(row, "a cat")
    assert not task.verifier.well_formed(row, "a bird")
    assert "log-likelihoods: scores differ" in task.notes[0]


def test_a_task_can_include_another(math: Path) -> None:
    (math / "more.yaml").write_text("include: math.yaml\nnum_fewshot: 0\ndescription: 'Work it out. '\n")
    task = read_lm_eval(math / "more.yaml", "d")
    assert task.items[0].prompt == "Work it out. Question: 0+1?\nAnswer:"
    (math / "loop.yaml").write_text("include: loop.yaml\n")
    with pytest.raises(ValueError, match="includes itself"):
        read_lm_eval(math / "loop.yaml", "d")


def test_it_is_a_dimension_of_a_benchmark(math: Path) -> None:
    write(math / "test.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(30)])
    (math / "bench.yaml").write_text("dimensions:\n  sums: {lm_eval: math.yaml, filter: flexible, size: 4}\n")
    benchmark = load_benchmark(math / "bench.yaml")
    assert len(benchmark.test) == len(benchmark.validation) == 4
    item = benchmark.test[0]
    assert benchmark.score(item, item.data["answers"][0]) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dataset_path: json", "dataset_path: openai/gsm8k", "with data_files, it is one of json, csv"),
        (
            "dataset_kwargs: {data_files: {test: test.jsonl, train: train.jsonl}}",
            "",
            "'json' is no file or folder beside",
        ),
        ("generate_until", "loglikelihood", "scores by log-likelihood, and completions are generated here"),
        ("task: own_math", "task: own_math\nprocess_docs: utils", "no code of files is run here"),
        ("task: own_math", "task: own_math\nproces: x", "unknown key 'proces'"),
        ("task: own_math", "task: own_math\ngen_prefix: It is", "a text that the answer begins with is not read here"),
        ("num_fewshot: 2", "num_fewshot: 2\nfewshot_config: {doc_to_text: x}", "'doc_to_text' is not read here"),
        ("exact_match", "bleu", "metrics that can be computed here: exact_match"),
        ("{{question}}", "{{qestion}}", "example 1: the template raised UndefinedError: 'qestion' is undefined"),
        ("{{question}}", "{{question.__class__.__mro__}}", "example 1: the template raised SecurityError"),
        ("num_fewshot: 2", "num_fewshot: 9", "9 examples are asked, 3 are there"),
        ("train: train.jsonl", "train: test.jsonl", "example 1 is a document that is scored"),
        ("function: take_first", "function: majority_vote", "no filter is called 'majority_vote' here"),
        ("#### (\\-?[0-9\\.\\,]+)'", "('", "is no pattern"),
    ],
)
def test_what_is_refused_says_why(math: Path, old: str, new: str, said: str) -> None:
    assert old in MATH
    message = refused(math / "math.yaml", MATH.replace(old, new))
    assert said in message
    assert "math.yaml" in message


def test_code_tags_are_refused(math: Path) -> None:
    assert "the tag '!function' is not read" in refused(
        math / "math.yaml", MATH + "process_results: !function utils.f\n"
    )
