"""Sources are read from files, checked row by row; splits never hold equal rows on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_gym.inner_trainers.data import sources
from posttrain_gym.inner_trainers.data.errors import DataError
from posttrain_gym.inner_trainers.data.sources import mixed_types, read_source, split_rows, without_repeats


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def right(row: Any, completion: str) -> float:
    return float(completion == row["answer"])


def test_a_source_of_demonstrations(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"q": "1+1=", "completion": "2", "id": 1}, {"q": "1+2=", "completion": "3", "id": 2}
    )
    source = read_source("sums", path, columns={"prompt": "q"})
    assert source.name == "sums"
    assert source.rows == {
        "demonstrations": [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    }
    assert source.verifier is None


def test_a_verifier_makes_prompts_of_what_has_a_prompt(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "completion": "It is 2", "answer": "2"}
    source = read_source("sums", write(tmp_path / "a.jsonl", row), verifier=right, verifier_version="1")
    assert source.rows == {"demonstrations": [{"prompt": "1+1=", "completion": "It is 2"}], "prompts": [row]}
    assert source.verifier is right
    assert source.verifier_version == "1"
    source = read_source("sums", write(tmp_path / "b.jsonl", {"prompt": "1+1=", "answer": "2"}), verifier=right)
    assert source.rows == {"prompts": [{"prompt": "1+1=", "answer": "2"}]}


def test_a_verifier_object_brings_its_version_and_checks_rows(tmp_path: Path) -> None:
    class NeedsAnswer:
        version = "needs-answer 2"

        def score(self, row: Any, completion: str) -> float:
            return right(row, completion)

        def well_formed(self, row: Any, completion: str) -> bool:
            return True

        def check_row(self, row: Any) -> None:
            if "answer" not in row:
                raise ValueError("column 'answer' is missing.")

    verifier: Any = NeedsAnswer()
    source = read_source("sums", write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "2"}), verifier=verifier)
    assert source.verifier_version == "needs-answer 2"
    path = write(tmp_path / "b.jsonl", {"prompt": "1", "answer": "2"}, {"prompt": "1"})
    with pytest.raises(DataError, match="column 'answer' is missing") as error:
        read_source("sums", path, verifier=verifier)
    assert error.value.line == 2


def test_answers_of_two_types_are_refused_with_counts_and_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "answer": 7},
        {"prompt": "b", "answer": "007"},
        {"prompt": "c", "answer": "7.50"},
    )
    with pytest.raises(DataError, match=r"answer mixes int \(1\) and string \(2\): row 1 is int, row 2 is string"):
        read_source("own", path, verifier=right)
    rows = [{"prompt": "a", "answer": "7"}, {"prompt": "b", "answer": "007"}, {"prompt": "c", "answer": "7.50"}]
    source = read_source("own", write(tmp_path / "b.jsonl", *rows), verifier=right)
    assert [row["answer"] for row in source.rows["prompts"]] == ["7", "007", "7.50"]


def test_numbers_and_nulls_are_no_mix() -> None:
    assert mixed_types([{"a": 1}, {"a": 7.5}, {"a": None}, {}], "a") == {}
    assert mixed_types([{"a": 1}, {"a": True}], "a") == {"int": [1], "bool": [2]}


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None})
    with pytest.raises(DataError) as error:
        read_source("own", path)
    assert str(error.value) == f"{path}, line 2: column 'completion' must be text, got None (NoneType)."
    path = write(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"}, {"text": "a"})
    with pytest.raises(DataError, match="line 2: the rows before are of the form prompt-completion"):
        read_source("own", path)
    path = write(tmp_path / "c.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match="prompts alone, which a verifier must judge"):
        read_source("own", path)


def test_a_sample_is_uniform_in_order_and_fixed_by_its_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(50)))

    def sample(seed: int) -> list[int]:
        return [int(row["text"]) for row in read_source("own", path, max_rows=10, seed=seed).rows["text"]]

    assert sample(3) == sample(3) == sorted(sample(3))
    counts = np.zeros(50)
    for seed in range(200):
        counts[sample(seed)] += 1
    assert counts.sum() == 2000
    assert abs(counts - 40).max() < 4 * np.sqrt(200 * 0.2 * 0.8)
    assert len(read_source("own", path, max_rows=80).rows["text"]) == 50


def test_rows_that_do_not_fit_into_memory_are_refused_with_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": "x" * 1000} for _ in range(1000)))
    monkeypatch.setattr(sources, "available_memory", lambda: 1_000_000.0)
    with pytest.raises(DataError, match=r"max_rows \d+ or fewer") as error:
        read_source("own", path)
    most = int(str(error.value).split("max_rows ")[1].split()[0])
    assert 100 < most < 250
    assert len(read_source("own", path, max_rows=most).rows["text"]) == most


ROWS = [{"prompt": name, "completion": "x"} for name in "abcadefagh"]  # rows 1, 4 and 8 are equal


def test_a_split_never_holds_equal_rows_on_both_sides() -> None:
    for seed in range(10):
        train, held_out = split_rows(ROWS, 0.2, seed)
        assert len(train) + len(held_out) == 10
        assert len(held_out) == 2
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
        assert split_rows(ROWS, 0.2, seed) == (train, held_out)
    assert len({tuple(row["prompt"] for row in split_rows(ROWS, 0.2, seed)[1]) for seed in range(10)}) > 3


def test_without_repeats() -> None:
    assert len(ROWS) == 10
    assert [row["prompt"] for row in without_repeats(ROWS)] == list("abcdefgh")
    train, held_out = split_rows(without_repeats(ROWS), 0.25, 0)
    assert (len(train), len(held_out)) == (6, 2)


def test_splits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 rows, 1 distinct"):
        split_rows(ROWS[:1] * 3, 0.5, 0)
    with pytest.raises(ValueError, match="held_out"):
        split_rows(ROWS, 0.0, 0)
    assert [len(side) for side in split_rows(ROWS[:2], 0.01, 0)] == [1, 1]
