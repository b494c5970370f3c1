"""Repaired copies: what goes and what stays, byte for byte; the list of changes; nothing is ever lost on the way."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.data.inspection import Inspection, InspectionSettings, inspect_data
from posttrain_gym.inner_trainers.data.inspection_findings import REPAIRED
from posttrain_gym.inner_trainers.data.repair import repair

LETTERS = "letters-messy"
LINES = [
    b'\xef\xbb\xbf{"prompt":  "one", "completion": "kept as it is"}\r\n',
    b'{"prompt": "two",   "completion": "spaces stay", "id": 12345678901234567890}\n',
    b'{"prompt": "two",   "completion": "spaces stay", "id": 3}\n',
    b'{"prompt": "three", "completion": ""}\n',
    b"\n",
    b'{"prompt": "four", "completion": \n',
    b'{"prompt": "caf\xe9", "completion": "latin"}\n',
    b'{"prompt": "five", "completion": "a\\r\\nb"}\n',
    b'{"prompt": "' + b"q" * 60 + b'", "completion": "cut off"}\n',
    b'{"prompt": "what is the item", "completion": "leaked"}\n',
    b'{"prompt": "six", "other": "not of the form"}\n',
    b'{"prompt": "seven", "completion": "no line feed at the end"}',
]


def settings(**more: Any) -> InspectionSettings:
    told: dict[str, Any] = {"model": LETTERS, "algorithm": "sft", "max_length": 40}
    return InspectionSettings(**{**told, **more}, benchmark=[("test item 1", "what is the item")])


def inspect(path: Path, **more: Any) -> Inspection:
    return inspect_data([path], settings(**more))


def write(path: Path) -> Path:
    path.write_bytes(b"".join(LINES))
    return path


def of_the_fixed_kinds(found: Inspection) -> set[str]:
    """Return what a copy must not have; a text whose line ends were mended may be odd otherwise."""
    return {finding.check for finding in found.findings} & set(REPAIRED)


def test_a_copy_keeps_what_is_well_byte_for_byte_and_has_none_of_the_faults(tmp_path: Path) -> None:
    path, copy = write(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    before = path.read_bytes()
    found = inspect(path)
    assert of_the_fixed_kinds(found) >= set(REPAIRED) - {"identical", "tool_arguments"}
    done = repair(found.files[0], copy)
    assert copy.read_bytes() == b"".join(
        [
            LINES[0].removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"),
            LINES[1],
            b'{"prompt": "five", "completion": "a\\nb"}\n',
            LINES[11] + b"\n",
        ]
    )
    assert path.read_bytes() == before
    assert of_the_fixed_kinds(inspect(copy)) == set()
    assert done == {
        "rows": 4,
        "byte_order_mark": 1,
        "line_ends": 2,
        "duplicate": 1,
        "empty": 1,
        "malformed": 2,
        "cut": 1,
        "overlap": 1,
        "form": 1,
    }


def test_every_change_is_listed_with_the_hash_of_what_was_there(tmp_path: Path) -> None:
    path, copy = write(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    repair(inspect(path).files[0], copy)
    listed = [json.loads(line) for line in (tmp_path / "b.jsonl.changes.jsonl").read_bytes().splitlines()]
    assert [(one["line"], one["what"], one["check"]) for one in listed] == [
        (1, "changed", "byte_order_mark"),
        (1, "changed", "line_ends"),
        (3, "dropped", "duplicate"),
        (4, "dropped", "empty"),
        (6, "dropped", "malformed"),
        (7, "dropped", "malformed"),
        (8, "changed", "line_ends"),
        (9, "dropped", "cut"),
        (10, "dropped", "overlap"),
        (11, "dropped", "form"),
    ]
    for one in listed[2:]:
        assert one["before"] == hashlib.sha256(LINES[one["line"] - 1]).hexdigest()
    assert "0xe9" in listed[5]["reason"]


def test_rows_that_become_equal_by_mending_are_one(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    call = {"name": "f", "arguments": {"city": "Graz"}}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [given]}]}
        for given in ({**call, "arguments": json.dumps(call["arguments"])}, call)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = inspect_data([path])
    assert repair(found.files[0], copy) == {"rows": 1, "tool_arguments": 1, "duplicate": 1}
    assert json.loads(copy.read_text()) == rows[1]
    assert of_the_fixed_kinds(inspect_data([copy])) == set()


def test_identical_sides_go(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = [{"prompt": "q", "chosen": "a", "rejected": other} for other in "abc"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert repair(inspect_data([path]).files[0], copy) == {"rows": 2, "identical": 1}


def rows_of(path: Path) -> list[dict[str, Any]]:
    from posttrain_gym.inner_trainers.data.reading import open_data

    return [row.value for row in open_data(path).rows()]


@pytest.mark.parametrize("suffix", [".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.xz"])
def test_copies_have_the_format_of_the_file(tmp_path: Path, suffix: str) -> None:
    import lzma

    rows = [
        {"prompt": "a", "completion": "x, y"},
        {"prompt": "a", "completion": "x, y"},
        {"prompt": "b", "completion": 'say "z"\r\nnow'},
        {"prompt": "c", "completion": ""},
    ]
    path, copy = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif suffix in (".parquet", ".arrow"):
        import pyarrow
        from pyarrow import ipc, parquet

        table = pyarrow.Table.from_pylist(rows)
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
    else:
        path.write_bytes((gzip if suffix.endswith("gz") else lzma).compress(lines))
    found = inspect_data([path])
    done = repair(found.files[0], copy)
    assert (done["rows"], done["duplicate"], done["empty"]) == (2, 1, 1)
    assert rows_of(copy) == [rows[0], {"prompt": "b", "completion": 'say "z"\nnow'}]
    again = inspect_data([copy])
    assert of_the_fixed_kinds(again) == set()
    assert again.files[0].file_format == found.files[0].file_format


def test_never_in_place_never_over_a_file_without_leave_never_half(tmp_path: Path) -> None:
    path, copy = write(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    before = path.read_bytes()
    found = inspect(path).files[0]
    with pytest.raises(ValueError, match="never changed in place"):
        repair(found, path, force=True)
    link = tmp_path / "link.jsonl"
    link.hardlink_to(path)
    with pytest.raises(ValueError, match="never changed in place"):
        repair(found, link, force=True)
    copy.write_text("precious")
    with pytest.raises(ValueError, match="there already"):
        repair(found, copy)
    assert copy.read_text() == "precious"
    repair(found, copy, force=True)
    assert copy.read_text() != "precious"
    with pytest.raises(ValueError, match="no folder"):
        repair(found, tmp_path / "none" / "b.jsonl")
    path.write_bytes(before + b'{"prompt": "new", "completion": "row"}\n')
    with pytest.raises(ValueError, match="changed since it was inspected"):
        repair(found, tmp_path / "c.jsonl")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "b.jsonl.changes.jsonl",
        "link.jsonl",
    ]


def test_a_copy_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "completion": ""}\n')
    with pytest.raises(ValueError, match="no row would be left"):
        repair(inspect_data([path]).files[0], tmp_path / "b.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
