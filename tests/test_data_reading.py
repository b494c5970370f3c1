"""Files of rows are read from raw bytes with their types kept, and what is wrong is told with its place."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain_gym.inner_trainers.data.errors import DataError
from posttrain_gym.inner_trainers.data.reading import RawRow, open_data


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def rows(where: Path | str) -> list[RawRow]:
    return list(open_data(where).rows())


def values(where: Path | str) -> list[dict[str, Any]]:
    return [row.value for row in rows(where)]


def refused(where: Path | str) -> DataError:
    with pytest.raises(DataError) as error:
        rows(where)
    return error.value


def lines(*objects: Any) -> str:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)


# Encoding and line ends


def test_windows_files_load_as_if_they_were_none(tmp_path: Path) -> None:
    row = {"prompt": "café?", "completion": "oui"}
    data = b"\xef\xbb\xbf" + (json.dumps(row, ensure_ascii=False) + "\r\n").encode() * 2
    loaded = values(write(tmp_path / "a.jsonl", data))
    assert loaded == [row, row]
    assert next(iter(loaded[0])) == "prompt"
    assert not any("\r" in value for each in loaded for value in each.values())


def test_latin_1_is_refused_with_line_byte_and_cure(tmp_path: Path) -> None:
    text = '{"prompt": "a", "completion": "b"}\n{"prompt": "café?", "completion": "oui"}\n'
    error = refused(write(tmp_path / "a.jsonl", text.encode("latin-1")))
    assert (error.line, error.path) == (2, tmp_path / "a.jsonl")
    assert "byte 16 (0xe9) is not UTF-8" in str(error)
    assert "Latin-1 or Windows-1252" in str(error)
    assert "iconv" in str(error)
    error = refused(write(tmp_path / "a.csv", "prompt,completion\na,b\ncafé,oui\n".encode("latin-1")))
    assert error.line == 3
    error = refused(write(tmp_path / "a.json", '[{"a": "x"},\n{"a": "café"}]'.encode("latin-1")))
    assert error.line == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_utf_16_is_refused(tmp_path: Path, encoding: str, name: str) -> None:
    assert "UTF-16 or UTF-32" in str(refused(write(tmp_path / name, '{"a": 1}\n'.encode(encoding))))


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    text = '{"a": "x\u2028y\u2029z\x85"}\n\n  \n{"a": "last"}'
    found = rows(write(tmp_path / "a.jsonl", text))
    assert [(row.number, row.line, row.value["a"]) for row in found] == [(1, 1, "x\u2028y\u2029z\x85"), (2, 4, "last")]
    assert found[1].raw == b'{"a": "last"}'


# Types


def test_json_keeps_every_type_and_value(tmp_path: Path) -> None:
    text = (
        '{"i": 9223372036854775808, "j": 1000000000000000000000000000000, "f": 1.0, "k": 7, "s": "007", "t": "7.50",'
        ' "n": null, "b": true, "e": 1e3, "o": {"x": [1, "1"]}}\n'
    )
    (row,) = values(write(tmp_path / "a.jsonl", text))
    assert row == json.loads(text)
    assert [type(row[key]) for key in "ijfksbe"] == [int, int, float, int, str, bool, float]
    assert row["j"] == 10**30


def test_answers_of_two_types_stay_apart(tmp_path: Path) -> None:
    text = lines({"prompt": "a", "answer": 7}, {"prompt": "b", "answer": "007"}, {"prompt": "c", "answer": "7.50"})
    assert [row["answer"] for row in values(write(tmp_path / "a.jsonl", text))] == [7, "007", "7.50"]


def test_null_for_long_then_text(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "x" * 380, "system": None})
    text = f"{row}\n" * 60_000 + json.dumps({"prompt": "x", "system": "Be brief"}) + "\n"
    count, last = 0, None
    for found in open_data(write(tmp_path / "a.jsonl", text)).rows():
        count, last = count + 1, found.value
    assert count == 60_001
    assert last is not None and last["system"] == "Be brief"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": -Infinity}', "-Infinity is no JSON"),
        ('{"a": 1e999}', "1e999 is beyond"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' stands twice"),
        ("[1, 2]", "expected an object with columns, {…}, got [1, 2]"),
        ("null", "got null"),
        ('{"a": 1} {"a": 2}', "more than one value"),
        ("{'a': 1}", "Python literal"),
        ('{"a": "x', "no JSON: Unterminated string"),
        ("{", "Each object must stand on one line"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "a number cannot be read"),
    ],
)
def test_malformed_lines_are_told_with_their_number(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"a": 0}}\n{line}\n{{"a": 2}}\n')
    error = refused(path)
    assert error.line == 2
    assert said in str(error)
    assert str(path) in str(error)
    bad: list[DataError] = []
    kept = list(open_data(path).rows(bad))
    assert [(row.number, row.line) for row in kept] == [(1, 1), (3, 3)]
    assert [each.line for each in bad] == [2]


def test_lone_surrogates_of_escapes_are_kept_for_the_checks_of_rows(tmp_path: Path) -> None:
    assert values(write(tmp_path / "a.jsonl", '{"a": "\\ud800"}\n')) == [{"a": "\ud800"}]


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"a": "x" * 10_000_000}, {"a": "y"}))
    assert [len(row["a"]) for row in values(path)] == [10_000_000, 1]


# Arrays


def test_an_array_of_objects_is_read_in_pieces(tmp_path: Path) -> None:
    many = [{"i": i, "text": "é]}," * (i % 50)} for i in range(20_000)]
    path = write(tmp_path / "a.json", "\ufeff" + json.dumps(many, ensure_ascii=False, indent=1))
    assert path.stat().st_size > 2 << 20
    found = rows(path)
    assert [row.value for row in found] == many
    assert [row.line for row in found[:3]] == [2, 6, 10]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('[{"a": 1}', 1, "the end"),
        ('[\n{"a": 1}\n{"a": 2}]', 3, "expected a comma"),
        ('[\n{"a": 1},\n{"a": 2,}]', 3, "property name"),
        ('[\n{"a": 1}]\nx', 3, "something follows"),
        ('[\n{"a": 1},\n3]', 3, "expected an object"),
        ('[\n{"a": NaN}]', 2, "NaN is no JSON"),
        ("[]", None, "holds no rows"),
    ],
)
def test_malformed_arrays(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    error = refused(write(tmp_path / "a.json", text))
    assert said in str(error)
    assert error.line == line


# CSV


def test_csv_cells_stay_text(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfprompt,answer\r\n"a\r\nb, ""c""",007\r\nx,7.50\r\n,NA\r\n'
    found = rows(write(tmp_path / "a.csv", data))
    assert [row.value for row in found] == [
        {"prompt": 'a\nb, "c"', "answer": "007"},
        {"prompt": "x", "answer": "7.50"},
        {"prompt": "", "answer": "NA"},
    ]
    assert [row.line for row in found] == [2, 4, 5]
    assert values(write(tmp_path / "a.tsv", "a\tb\n1\t2,3\n")) == [{"a": "1", "b": "2,3"}]
    assert values(write(tmp_path / "b.csv", "a;b\n1;2,3\n")) == [{"a": "1", "b": "2,3"}]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a,b\n1,2\n3\n", 3, "1 cells where the header names 2"),
        ('a,b\n"x\ny",2\n1,2,3\n', 4, "3 cells where the header names 2"),
        ("a,a\n1,2\n", 1, "names column 'a' twice"),
        ("a,\n1,2\n", 1, "a column without a name"),
        ('a,b\n"x"y,2\n', 2, "no CSV"),
        ('a,b\n"x,2\n', 2, "no CSV"),
        ("a,b\n", None, "holds no rows"),
        ("", None, "holds no rows"),
    ],
)
def test_malformed_csv(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    error = refused(write(tmp_path / "a.csv", text))
    assert said in str(error)
    assert error.line == line


# Parquet, Arrow, folders


def test_parquet_types_as_stored(tmp_path: Path) -> None:
    table = pa.table(
        {
            "big": pa.array([2**63 - 1, None], pa.int64()),
            "money": pa.array(["7.50", "0.07"]).cast(pa.decimal128(10, 2)),
            "day": pa.array([datetime.date(2020, 1, 2), None]),
            "text": ["007", "7"],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [
        {"big": 2**63 - 1, "money": "7.50", "day": "2020-01-02", "text": "007", "map": {"k": 1}},
        {"big": None, "money": "0.07", "day": None, "text": "7", "map": []},
    ]


def test_tool_calls_keep_their_own_arguments_in_parquet(tmp_path: Path) -> None:
    def turn(name: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]}]

    table = pa.Table.from_pylist([{"messages": turn("f", {"city": "Graz"})}, {"messages": turn("g", {"zone": "UTC"})}])
    pq.write_table(table, tmp_path / "a.parquet")
    calls = [row["messages"][0]["tool_calls"][0] for row in values(tmp_path / "a.parquet")]
    assert calls == [{"name": "f", "arguments": {"city": "Graz"}}, {"name": "g", "arguments": {"zone": "UTC"}}]


def test_bytes_and_cut_parquet_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "a.parquet")
    error = refused(tmp_path / "a.parquet")
    assert error.column == "image"
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    assert "no whole Parquet file" in str(refused(write(tmp_path / "c.parquet", whole[:-30])))
    assert "does not begin as such a file" in str(refused(write(tmp_path / "d.parquet", "hello")))
    assert "it is empty" in str(refused(write(tmp_path / "e.parquet", "")))


def test_the_first_bytes_tell_a_format_whatever_the_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.jsonl")
    assert values(tmp_path / "a.jsonl") == [{"a": 1}]
    assert values(write(tmp_path / "b.jsonl", gzip.compress(b'{"a": 2}\n'))) == [{"a": 2}]
    assert values(write(tmp_path / "c.txt", '{"a": 3}\n')) == [{"a": 3}]
    assert values(write(tmp_path / "d.jsonl", '[{"a": 4}]')) == [{"a": 4}]


def test_what_datasets_saved_is_read(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_list([{"a": "1", "b": None}, {"a": "007", "b": None}])
    saved.save_to_disk(str(tmp_path / "one"))
    assert values(tmp_path / "one") == [{"a": "1", "b": None}, {"a": "007", "b": None}]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "both"))
    error = refused(tmp_path / "both")
    assert str(tmp_path / "both" / "train") in str(error)
    assert values(tmp_path / "both" / "train") == values(tmp_path / "one")


def test_shards_are_one_set_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", '{"a": 3}\nx\n{"a": 4}\n')
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    bad: list[DataError] = []
    for where in (tmp_path, f"{tmp_path}/*.jsonl"):
        bad.clear()
        found = list(open_data(where).rows(bad))
        assert [(row.number, row.line, row.value["a"]) for row in found] == [(1, 1, 1), (2, 2, 2), (3, 1, 3), (5, 3, 4)]
        assert [row.path for row in found][::2] == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        assert (bad[0].path, bad[0].line) == (tmp_path / "b.jsonl", 2)


def test_folders_that_hold_no_rows_are_told(tmp_path: Path) -> None:
    assert "without data files (it holds: nothing)" in str(refused(tmp_path))
    write(tmp_path / "README.md", "x")
    assert "it holds: README.md" in str(refused(tmp_path))
    write(tmp_path / "a.csv", "a\n1\n")
    write(tmp_path / "b.jsonl", '{"a": 1}\n')
    assert "several formats (a.csv is csv, b.jsonl is jsonl)" in str(refused(tmp_path))


# Compression and bad files


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")])
def test_compressed_files_and_cut_ones(tmp_path: Path, pack: Any, suffix: str) -> None:
    import random

    generator = random.Random(0)
    text = "".join(f'{{"a": {generator.random()}}}\n' for _ in range(60_000)).encode()
    path = write(tmp_path / f"a.jsonl.{suffix}", pack(text))
    assert len(rows(path)) == 60_000
    write(path, path.read_bytes()[: -len(path.read_bytes()) // 3])
    seen = []
    with pytest.raises(DataError, match="cut or damaged after") as error:
        for row in open_data(path).rows([]):
            seen.append(row)
    assert f"after {len(seen)} whole rows" in str(error.value)
    assert 0 < len(seen) < 60_000


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"a": 1}\n' * 1000))
    packed[-6] ^= 255  # the checksum
    assert "cut or damaged" in str(refused(write(tmp_path / "a.jsonl.gz", bytes(packed))))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\x03\x04rest", "zip"),
        (b"\x28\xb5\x2f\xfdrest", "zstd -d"),
        (b"SQLite format 3\x00", "SQLite"),
        (pickle.dumps([{"a": 1}]), "pickle, which is never opened"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"hello", "its format cannot be told"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in str(refused(write(tmp_path / "a.bin", data)))


@pytest.mark.parametrize("text", ["", "\n \n\r\n", "\ufeff"])
def test_empty_files(tmp_path: Path, text: str) -> None:
    assert "it holds no rows" in str(refused(write(tmp_path / "a.jsonl", text)))


def test_missing_files_devices_and_pipes(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    assert "Did you mean 'train.jsonl'?" in str(refused(tmp_path / "trian.jsonl"))
    assert "Neither is there a folder" in str(refused(tmp_path / "no" / "a.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "a device or a pipe" in str(refused(tmp_path / "pipe.jsonl"))
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "it cannot be read" in str(refused(tmp_path / "loop.jsonl"))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "train.jsonl")
    assert values(tmp_path / "link.jsonl") == [{}]


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", "{}")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert "you may not read it" in str(refused(path))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*({"a": i} for i in range(10))))
    with pytest.raises(DataError, match="changed while it was read"):
        for row in open_data(path).rows():
            if row.number == 5:
                with path.open("a") as file:
                    file.write('{"a": 10}\n')
    with pytest.raises(DataError, match="changed while it was read"):
        for row in open_data(path).rows():
            if row.number == 5:
                other = write(tmp_path / "b.jsonl", path.read_bytes())
                other.replace(path)


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert "no network" in str(refused("some-org/some-set@main:train"))
    asked: dict[str, Any] = {}

    def reached(name: str, **settings: Any) -> Any:
        asked.update(settings, name=name)
        return [{"a": 1}, {"a": 2}]

    monkeypatch.setattr(datasets, "load_dataset", reached)
    assert values("some-org/some-set@main:validation") == [{"a": 1}, {"a": 2}]
    assert asked == {"name": "some-org/some-set", "split": "validation", "revision": "main", "streaming": True}


# The hash


def test_the_hash_is_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": "x"}\n')
    before, state = open_data(path).content_hash, path.stat()
    assert len(before) == 16
    write(path, '{"a": "y"}\n')
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert open_data(path).content_hash != before
    assert values(path) == [{"a": "y"}]
    assert open_data(write(tmp_path / "b.jsonl", '{"a": "x"}\n')).content_hash == before


def test_errors_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(DataError(Path("a.jsonl"), "is wrong.", line=3, row=2, column="x")))
    assert str(error) == "a.jsonl, line 3, column 'x': is wrong."
    assert (error.line, error.row, error.column) == (3, 2, "x")


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.bz2", "a.csv.xz", "a.json.bz2", "a.jsonl.bz2", "a.jsonl.gz"])
def test_bytes_damaged_anywhere_in_compressed_data_give_rows_or_a_data_error(tmp_path: Path, name: str) -> None:
    several = [{"prompt": f"q {number}", "completion": "é"} for number in range(20)]
    text = {
        "csv": "prompt,completion\n" + "".join(f"q {number},é\n" for number in range(20)),
        "json": json.dumps(several),
        "jsonl": "".join(json.dumps(row) + "\n" for row in several),
    }[name.split(".")[1]]
    packers: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    packed = packers[name.split(".")[2]](text.encode())
    told = 0
    for place in range(0, len(packed), 3):
        damaged = bytearray(packed)
        damaged[place] ^= 0x55
        path = write(tmp_path / name, bytes(damaged))
        try:
            bad: list[DataError] = []
            read = list(open_data(path).rows(bad))
        except DataError as error:
            told += 1
            assert str(error).startswith(str(path))
        else:
            assert bad or len(read) == 20
    assert told > len(packed) // 6


def test_a_header_that_is_no_csv_is_told_with_its_line(tmp_path: Path) -> None:
    assert refused(write(tmp_path / "a.csv", 'a,"b"c\n1,2\n')).line == 1
    assert refused(write(tmp_path / "b.csv", "a\rb,c\n1,2\n")).line == 1


def test_parquet_values_that_python_cannot_hold_are_told_with_row_and_column(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    no_utf8 = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    far = pa.array([0, 2**60], pa.timestamp("ms"))
    for column in (no_utf8, far):
        pq.write_table(pa.table({"fine": [1, 2], "worse": column}), tmp_path / "a.parquet")
        error = refused(tmp_path / "a.parquet")
        assert (error.row, error.column) == (2, "worse")


def test_parquet_names_and_map_keys_that_stand_twice_are_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    pq.write_table(twice, tmp_path / "a.parquet")
    assert refused(tmp_path / "a.parquet").column == "a"
    keys = pa.array([[("k", "v"), ("k", "w")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"a": keys}), tmp_path / "b.parquet")
    error = refused(tmp_path / "b.parquet")
    assert (error.row, error.column) == (1, "a")


def test_damaged_arrow_data_is_told_and_never_ends_the_process(tmp_path: Path) -> None:
    table = pa.table({"text": [f"row {i}" for i in range(50)], "n": list(range(50)), "l": [["a", "b"]] * 50})
    with pa.OSFile(str(tmp_path / "whole.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)

    # in a process of its own: what is tested for is that damaged offsets do not take the interpreter with them
    code = """
import random, sys
from pathlib import Path
from posttrain_gym.inner_trainers.data.errors import DataError
from posttrain_gym.inner_trainers.data.reading import open_data

folder, generator = Path(sys.argv[1]), random.Random(0)
whole, told, read = (folder / "whole.arrow").read_bytes(), 0, 0
for number in range(400):
    data = bytearray(whole)
    for _ in range(3):
        data[generator.randrange(8, len(data))] = generator.randrange(256)
    path = folder / f"{number}.arrow"
    path.write_bytes(bytes(data))
    try:
        read += len(list(open_data(path).rows())) > 0
    except DataError:
        told += 1
    path.unlink()
print(told, read)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told, read = map(int, done.stdout.split())
    assert told + read == 400
    assert min(told, read) > 5
    assert [row.value["text"] for row in open_data(tmp_path / "whole.arrow").rows()][:2] == ["row 0", "row 1"]
