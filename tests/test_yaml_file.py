"""Files that people write are read as they are meant or refused with their place: YAML's traps, one by one."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_gym.inner_trainers.yaml_file import MAX_BYTES, FileError, Place, YamlFile, parse_yaml, read_yaml
from posttrain_gym.inner_trainers.yaml_scalars import read_number, scalar_hint, shown


def value_of(text: str) -> Any:
    return parse_yaml(f"a: {text}\n", "file f.yaml").data["a"]


def refused(text: str, **settings: Any) -> str:
    with pytest.raises(FileError) as caught:
        parse_yaml(text, "file f.yaml", **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),
        ("1E-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("5e4", 50_000),
        ("5E+4", 50_000),
        ("15e-1", 1.5),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e300", 1e300),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("!!float 1e6", 1e6),
        ("!!int 5", 5),
        ("!!str 5", "5"),
        ("!!bool true", True),
        ("[1, 1e-6, no]", [1, 1e-6, "no"]),
        ("{x: 1e-6}", {"x": 1e-6}),
        ("'5'", "5"),
        ('"true"', "true"),
        ('"\\u00e9"', "é"),
        ("|\n  two\n  lines", "two\nlines\n"),
    ],
)
def test_numbers_truth_and_nothing_are_what_they_look_like(text: str, expected: Any) -> None:
    value = value_of(text)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "y",
        "n",
        "No",
        "YES",
        "True",
        "TRUE",
        "Null",
        "010",
        "0o17",
        "0x1F",
        "0b11",
        "1:30",
        "1_000",
        "2024-01-01",
        ".inf",
        "-.inf",
        ".nan",
        "NaN",
        "Infinity",
        "1e",
    ],
)
def test_what_yaml_would_turn_into_something_else_stays_text(text: str) -> None:
    assert value_of(text) == text


@pytest.mark.parametrize(
    ("text", "wanted", "hint"),
    [
        ("no", "truth", " Write false."),
        ("Yes", "truth", " Write true."),
        ("True", "truth", " Write true."),
        ("n", "truth", " Write false."),
        ("maybe", "truth", ""),
        (0, "truth", ""),
        ("010", "number", " Write 10, or 8 if it was meant in octal."),
        ("-010", "number", " Write -10, or 8 if it was meant in octal."),
        ("0o17", "number", " Write 15."),
        ("0x1F", "number", " Write 31."),
        ("0b11", "number", " Write 3."),
        ("0b7", "number", ""),
        ("1:30", "number", " YAML 1.1 reads it in base 60; write 90."),
        ("1_000", "number", " Write 1000."),
        ("1,000", "number", " Write 1000."),
        ("1_000.5", "number", " Write 1000.5."),
        ("00.5", "number", " Write 0.5."),
        (".inf", "number", " Write a finite number."),
        ("-.NaN", "number", " Write a finite number."),
        ("2024-01-01", "number", " It looks like a date."),
        ("50%", "number", " Write 0.5."),
        ("3B", "number", " Write 3000000000."),
        ("fast", "number", ""),
        ("", "number", ""),
    ],
)
def test_hints_say_what_to_write(text: object, wanted: str, hint: str) -> None:
    assert scalar_hint(text, wanted) == hint


def test_a_number_in_quotes_is_text_and_the_hint_says_so() -> None:
    file = parse_yaml("a: '5'\nb: 5\n", "file f.yaml")
    assert file.quoted == {("a",)}
    assert scalar_hint("5", "number", quoted=True) == " Write 5 without the quotes."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' is there twice, first in line 1; leave one out."),
        ("x:\n  a: 1\n  a: 3\n", "line 3, column 3: key 'a' is there twice in x, first in line 2; leave one out."),
        ("a:\n\tb: 1\n", "line 2, column 1: a tab indents the line; YAML indents with spaces."),
        ("a:\n  - 1\n \t- 2\n", "line 3, column 2: a tab indents the line; YAML indents with spaces."),
        ("a:\t1\n", "line 1, column 3: not readable as YAML (found character '\\t'"),
        ("a: &x 1\n", "line 1, column 4: anchors and aliases (& and *) are not read; write it out, or in quotes."),
        ("a: *x\n", "line 1, column 4: anchors and aliases (& and *) are not read"),
        ("<<: {a: 1}\n", "line 1, column 1: <<: merge keys (<<) are not read; write the keys out."),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1, column 4: the tag '!!python/object/apply:os.system'"),
        ("a: !mine 1\n", "line 1, column 4: the tag '!mine' is not read"),
        ("a: !!bool no\n", "line 1, column 4: a: 'no' does not fit its tag !!bool; leave the tag out."),
        ("a: !!int 3.5\n", "line 1, column 4: a: '3.5' does not fit its tag !!int"),
        ("a: !!map 3\n", "line 1, column 4: a: '3' does not fit its tag !!map"),
        ("a: !!seq {b: 1}\n", "line 1, column 4: a: the tag !!seq stands before a mapping."),
        ("%TAG ! tag:x,1:\n---\na: 1\n", "line 1, column 1: the directive %TAG is not read; leave it out."),
        ("a: 1\n---\nb: 1\n", "line 2, column 1: not readable as YAML (a second document begins here); keep one"),
        ("a: 1e999\n", "line 1, column 4: a: 1e999 is beyond 1.8e308, the largest number there is."),
        ("a: [0, 1" + "0" * 5000 + "]\n", "line 1, column 8: a[1]: a number of 5001 digits; at most 4000 are read."),
        ("a: 1\nb: x\x00y\n", "line 2, column 5: the control character U+0000; delete it."),
        ("a: x\x1b[31m\n", "line 1, column 5: the control character U+001B; delete it."),
        ('a: "\\0"\n', "line 1, column 4: a: the text holds the control character U+0000."),
        ('a: "\\ud800"\n', "line 1, column 4: a: the text holds the control character U+D800."),
        ('a: 1\nb: "\\UFFFFFFFF"\n', "line 2: not readable as YAML ("),
        ('"a\\nb": 1\n', "line 1, column 1: the key 'a\\nb' holds a control character."),
        ("", "line 1, column 1: expected keys with values, got nothing."),
        ("# only words\n", "line 1, column 1: expected keys with values, got nothing."),
        ("- a\n", "line 1, column 1: expected keys with values, got a list."),
        ("word\n", "line 1, column 1: expected keys with values, got a single value."),
        ("? [a]\n: b\n", "line 1, column 3: expected a key in words, got a list."),
        ("'': 1\n", "line 1, column 1: a key is missing before the colon."),
        ("a: b: c\n", "line 1, column 5: not readable as YAML (mapping values are not allowed here); check the indent"),
        ("a: [1, 2\n", "line 2, column 1: not readable as YAML (expected ',' or ']'"),
        ("a: 'x\n", "line 2, column 1: not readable as YAML (found unexpected end of stream); close the quotes."),
        ("a: @x\n", "line 1, column 4: not readable as YAML (found character '@' that cannot start any token); put"),
        ("a: " + "[" * 20 + "]" * 20, "line 1, column 19: nested more than 16 deep."),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1\n", "line 1: not readable as YAML ("),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(text: str, problem: str) -> None:
    assert refused(text).startswith(f"file f.yaml, {problem}")


def test_deep_nesting_is_refused_at_once() -> None:
    began = time.perf_counter()
    assert "nested more than 16 deep" in refused("a: " + "[" * 200_000)
    assert "nested more than 16 deep" in refused("".join(" " * n + "a:\n" for n in range(500)))
    assert time.perf_counter() - began < 2.0


def test_places_of_keys_and_values_are_those_of_an_editor() -> None:
    file = parse_yaml("a: 1\nlist:\n  - x\n  - {deep: é, 'b c': 2}\n", "file f.yaml")
    assert file.place(("a",)) == Place(1, 4)
    assert file.place(("a",), key=True) == Place(1, 1)
    assert file.place(("list", 1, "b c")) == Place(4, 22)
    assert file.place(("list", 1, "b c"), key=True) == Place(4, 15)
    assert file.place(("list", 1, "missing")) == Place(4, 5)  # what would hold it
    assert str(file.error(("list", 1, "deep"), "wrong.")) == "file f.yaml, line 4, column 12: list[1].deep: wrong."


def test_byte_order_marks_and_line_ends_of_other_systems_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    file = read_yaml(path, "file f.yaml")
    assert file.data == {"a": 1, "b": {"c": 2}}
    assert file.place(("b", "c")) == Place(3, 6)


def test_json_is_read_to_the_same_data(tmp_path: Path) -> None:
    data = {"a": [1, 0.5, True, None, "no", "5"], "b": {"c": "é: #", "d": {}}, "e": 1e-7}
    path = tmp_path / "f.json"
    for indent in (None, 2):
        path.write_text(json.dumps(data, indent=indent))
        assert read_yaml(path, "file f").data == data


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    def error_of(name: str, **settings: Any) -> str:
        with pytest.raises(FileError) as caught:
            read_yaml(tmp_path / name, f"file {name}", **settings)
        return str(caught.value)

    assert error_of("no.yaml") == "file no.yaml: no such file."
    (tmp_path / "folder").mkdir()
    assert error_of("folder") == "file folder: a folder; expected a YAML or JSON file."
    assert error_of("x" * 300).endswith("it cannot be read (File name too long).")
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: café\n".encode("latin-1"))
    assert error_of("latin.yaml") == (
        "file latin.yaml, line 2: not UTF-8 text (byte 0xe9, as in Latin-1 or another codec); save the file as UTF-8."
    )
    (tmp_path / "wide.yaml").write_bytes("a: 1\n".encode("utf-16"))
    assert "line 1: not UTF-8 text (byte 0xff, as in UTF-16)" in error_of("wide.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    assert error_of("large.yaml") == "file large.yaml: 1000001 bytes, at most 1000000 are read."
    assert error_of("large.yaml", max_bytes=10).endswith("at most 10 are read.")


def test_aliases_are_read_in_bounds_where_they_are_asked_for() -> None:
    text = "base: &b {rate: 1e-3, steps: 5}\nrun:\n  <<: *b\n  steps: 6\nagain: *b\n"
    file = parse_yaml(text, "file f.yaml", aliases=True)
    assert file.data == {
        "base": {"rate": 1e-3, "steps": 5},
        "run": {"steps": 6, "rate": 1e-3},
        "again": {"rate": 1e-3, "steps": 5},
    }
    lines = ["a0: &a0 [x, x]", *[f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]]
    assert "more than 20000 values, with what aliases stand for." in refused("\n".join(lines), aliases=True)
    assert "nested more than 16 deep, through an alias." in refused("a: &a [*a]\n", aliases=True)
    assert "what is merged must have no merge key itself" in refused("a: &a {<<: *a}\n", aliases=True)
    assert "<<: expected keys to merge, got a single value." in refused("a: {<<: 3}\n", aliases=True)


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**40), 10**40))
def test_numbers_as_python_writes_them_are_read_back(number: float) -> None:
    read = read_number(repr(number))
    assert read == number
    assert math.copysign(1, read) == math.copysign(1, number) or read == 0


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    try:
        file = parse_yaml(text, "file f.yaml")
    except FileError as error:
        assert str(error).startswith("file f.yaml, line ")
    else:
        assert isinstance(file, YamlFile) and isinstance(file.data, dict)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_json_is_read_back_or_holds_a_control_character(data: dict[str, Any]) -> None:
    try:
        read = parse_yaml(json.dumps(data), "file f.json").data
    except FileError as error:
        assert "control character" in str(error) or "\\u" in json.dumps(data)
    else:
        assert read == data


def test_values_are_shown_short() -> None:
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert (shown(True), shown(None), shown({"a": 1}), shown([1])) == ("true", "nothing", "keys (a)", "[1]")
