"""Benchmarks from files: items that never move or leak, weights, pins, and errors with their place."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.benchmarks.benchmark_file import load_benchmark, split_of
from posttrain_gym.inner_trainers.benchmarks.sampling import smallest_hashes, stratified
from posttrain_gym.inner_trainers.tasks import Item
from posttrain_gym.inner_trainers.yaml_file import FileError

SUMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": "easy" if i % 3 else "hard"} for i in range(60)]
BASIC = """
max_new_tokens: 8
dimensions:
  sums: {file: sums.jsonl, verifier: {name: exact, extract: last_number}}
"""


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(folder: Path, text: str = BASIC) -> Any:
    path = folder / "bench.yaml"
    path.write_text(text)
    return load_benchmark(path)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(FileError) as error:
        load(folder, text)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "sums.jsonl", SUMS)
    return tmp_path


def test_one_file_is_split_by_its_prompts(folder: Path) -> None:
    benchmark = load(folder)
    assert benchmark.weights == {"sums": 1.0}
    assert benchmark.max_new_tokens == 8
    both = [*benchmark.validation, *benchmark.test]
    assert sorted(item.prompt for item in both) == sorted(row["prompt"] for row in SUMS)
    for split in ("validation", "test"):
        assert all(split_of(item.prompt, 0.5) == split for item in benchmark.items(split))
        assert 20 <= len(benchmark.items(split)) <= 40
    item = next(item for item in both if item.prompt == "3+3=")
    assert item.data == {"answer": "6", "level": "hard"}
    assert benchmark.score(item, "It is 6.") == 1.0
    assert benchmark.score(item, "It is 7.") == 0.0
    assert benchmark.well_formed(item, "none") is False


def test_a_prompt_keeps_its_split_in_any_form() -> None:
    for text in ("What is it?", "name a prime", "1+1="):
        assert len({split_of(form, 0.5) for form in (text, text.upper(), f"  {text}\n", text.replace(" ", "  "))}) == 1
    shares = Counter(split_of(f"question {i}", 0.25) for i in range(4000))
    assert 0.22 < shares["validation"] / 4000 < 0.28


def test_items_do_not_move_when_files_or_keys_are_reordered(folder: Path) -> None:
    first = load(folder)
    write(folder, "sums.jsonl", SUMS[::-1])
    second = load(folder)
    assert first.content_hash == second.content_hash
    assert [item.prompt for item in first.test] == [item.prompt for item in second.test]
    write(folder, "sums.jsonl", [*SUMS, {"prompt": "100+1=", "answer": "101"}])
    third = load(folder)
    assert third.content_hash != first.content_hash
    kept = [item.prompt for item in (*third.validation, *third.test) if item.prompt != "100+1="]
    assert kept == [item.prompt for item in (*first.validation, *first.test)]


def test_a_pin_refuses_a_benchmark_that_moved(folder: Path) -> None:
    pinned = f"content_hash: {load(folder).content_hash!r}\n{BASIC}"
    assert load(folder, pinned).content_hash == load(folder).content_hash
    rows = [dict(row) for row in SUMS]
    rows[5]["answer"] = "11"
    write(folder, "sums.jsonl", rows)
    said = refused(folder, pinned)
    assert "line 1, column 15: content_hash: the benchmark has moved" in said
    assert load(folder).content_hash in said
    assert "items of validation + test: sums" in said
    write(folder, "sums.jsonl", SUMS)
    assert "has moved" in refused(folder, pinned.replace("last_number", "whole"))
    assert "has moved" in refused(folder, pinned.replace("max_new_tokens: 8", "max_new_tokens: 9"))


def test_two_files_share_no_prompt(folder: Path) -> None:
    write(folder, "v.jsonl", [{"prompt": "Name a prime.", "answer": "7"}])
    write(folder, "t.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "  name a PRIME", "answer": "7"}])
    text = "dimensions:\n  x: {validation: v.jsonl, test: t.jsonl, verifier: exact}\n"
    said = refused(folder, text)
    assert "line 2" in said and "a prompt stands in both splits" in said
    assert "v.jsonl, line 1" in said and "t.jsonl, line 2" in said
    write(folder, "t.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    benchmark = load(folder, text)
    assert [item.prompt for item in benchmark.validation] == ["Name a prime."]
    assert [item.prompt for item in benchmark.test] == ["1+1="]


def test_dimensions_share_no_prompt_between_splits(folder: Path) -> None:
    write(folder, "v.jsonl", [{"prompt": "Name a prime.", "answer": "7"}])
    write(folder, "t.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    write(folder, "v2.jsonl", [{"prompt": "Name a city.", "answer": "Rome"}])
    write(folder, "t2.jsonl", [{"prompt": "name a PRIME", "answer": "7"}])
    text = """
dimensions:
  a: {validation: v.jsonl, test: t.jsonl, verifier: exact}
  b: {validation: v2.jsonl, test: t2.jsonl, verifier: exact}
"""
    said = refused(folder, text)
    assert "line 4" in said
    assert "'name a PRIME' is in test here, and 'Name a prime.' in validation of 'a'" in said
    write(folder, "t2.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    assert len(load(folder, text).test) == 2


def test_repeats_come_once_and_contradictions_not_at_all(folder: Path) -> None:
    write(folder, "sums.jsonl", [*SUMS, SUMS[3]])
    assert load(folder).content_hash == load(folder).content_hash
    assert len(load(folder).validation) + len(load(folder).test) == 60
    write(folder, "sums.jsonl", [*SUMS, {**SUMS[3], "answer": "9"}])
    said = refused(folder, BASIC)
    assert "sums.jsonl, line 61: the prompt '3+3=' stands at" in said
    assert "sums.jsonl, line 4 too, with other columns" in said


def test_sizes_and_strata(folder: Path) -> None:
    text = BASIC.replace("verifier:", "size: 9, sample_seed: 3, stratify_by: level, verifier:")
    benchmark = load(folder, text)
    assert len(benchmark.validation) == len(benchmark.test) == 9
    everything = [item for item in load(folder).test]
    for level, count in Counter(item.data["level"] for item in benchmark.test).items():
        assert abs(count - 9 * sum(item.data["level"] == level for item in everything) / len(everything)) < 1
    assert load(folder, text.replace("sample_seed: 3", "sample_seed: 4")).content_hash != benchmark.content_hash
    assert "has no column 'kind'" in refused(folder, text.replace("stratify_by: level", "stratify_by: kind"))
    assert "without a size" in refused(folder, text.replace("size: 9, ", ""))


def test_strata_get_their_share_with_largest_remainders() -> None:
    items = [
        Item(f"{name}{i}", "d", {"s": name}) for name, count in (("a", 50), ("b", 30), ("c", 20)) for i in range(count)
    ]
    for size in (1, 2, 7, 10, 33, 99, 100, 200):
        chosen = stratified(items, size, 0, lambda item: str(item.data["s"]))
        counts = Counter(item.data["s"] for item in chosen)
        assert len(chosen) == min(size, 100)
        for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(counts[name] - share * min(size, 100)) < 1
    assert Counter(i.data["s"] for i in stratified(items, 7, 0, lambda item: str(item.data["s"]))) == {
        "a": 4,
        "b": 2,
        "c": 1,
    }
    assert smallest_hashes(items, 5, 0) == smallest_hashes(items[::-1], 5, 0)
    smaller, larger = ([item.prompt for item in smallest_hashes(items, n, 0)] for n in (5, 6))
    assert larger[:5] == smaller


def test_several_dimensions_with_weights_and_generators(folder: Path) -> None:
    text = """
validation_share: 0.4
dimensions:
  sums: {weight: 0.75, file: sums.jsonl, verifier: {name: numeric}}
  chains: {weight: 0.25, reasoning_gym: chain_sum, settings: {min_terms: 2, max_terms: 2}, size: 5, seed: 3}
"""
    benchmark = load(folder, text)
    assert benchmark.weights == {"sums": 0.75, "chains": 0.25}
    assert benchmark.dimensions == ("chains", "sums")
    chains = [item for item in benchmark.validation if item.dimension == "chains"]
    assert len(chains) == 5
    assert benchmark.score(chains[0], f"so {chains[0].data['answer']}") == 1.0
    assert benchmark.score(chains[0], "so nothing") == 0.0
    again = pickle.loads(pickle.dumps(benchmark.score))  # workers get it
    assert again(chains[0], chains[0].data["answer"]) == 1.0
    assert load(folder, text.replace("weight: 0.75, ", "").replace("weight: 0.25, ", "")).weights == {
        "sums": 0.5,
        "chains": 0.5,
    }


def test_columns_can_be_called_otherwise(folder: Path) -> None:
    write(folder, "q.csv", [])
    (folder / "q.csv").write_text("question,gold\n" + "".join(f"{i}?,{i}\n" for i in range(20)))
    text = "dimensions:\n  q: {file: q.csv, columns: {prompt: question, answer: gold}, verifier: exact}\n"
    assert load(folder, text).test[0].data.keys() == {"answer"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dimensions: {}", "there is no dimension"),
        ("dimension: {}", "line 1, column 1: dimension: unknown key 'dimension'. Did you mean 'dimensions'"),
        (BASIC.replace("file:", "fiel:"), "expected one of the keys file, reasoning_gym and lm_eval"),
        (BASIC.replace("sums.jsonl", "summs.jsonl"), "there is no such file. Did you mean 'sums.jsonl'"),
        (BASIC.replace("exact", "exat"), "unknown 'exat'. Did you mean 'exact'"),
        (BASIC.replace("verifier: {name: exact, extract: last_number}", "size: 3"), "key 'verifier' is missing"),
        (BASIC.replace("extract", "extrakt"), "no setting is called 'extrakt'"),
        (BASIC.replace("file:", "weight: 0.5, file:"), "must sum to 1, they sum to 0.5"),
        (
            BASIC + "  more: {weight: 1, file: sums.jsonl, verifier: exact}\n",
            "key 'weight' is missing, which more have",
        ),
        (
            BASIC.replace("max_new_tokens: 8", "max_new_tokens: eight"),
            "line 2, column 17: max_new_tokens: expected an integer",
        ),
        (BASIC.replace("file:", "wieght: 1, file:"), "unknown key 'wieght'"),
        (BASIC.replace("file:", "size: 0, file:"), "size: expected an integer in [1,"),
        (
            BASIC.replace("exact, extract: last_number", "refusal"),
            "sums.jsonl, line 1: column 'should_refuse' is missing",
        ),
        (
            BASIC.replace("file:", "columns: {prompt: text}, file:"),
            "there is no column 'text', which is to be 'prompt'",
        ),
        ("validation_share: 0\n" + BASIC, "validation_share: expected a number in [0.05, 0.95]"),
    ],
)
def test_errors_have_their_place(folder: Path, text: str, said: str) -> None:
    message = refused(folder, text)
    assert said in message
    assert "bench.yaml, line" in message


def test_splits_without_items_are_refused(folder: Path) -> None:
    write(folder, "sums.jsonl", [SUMS[0]])
    assert "no item falls into the" in refused(folder, BASIC)
