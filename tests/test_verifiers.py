"""Verifiers judge rightly, end in time on any text, and say what is wrong with a row or a setting."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from posttrain_gym.inner_trainers.benchmarks.verifiers import (
    VERIFIERS,
    Verifier,
    make_verifier,
    parse_verifier,
    verifier_class,
)
from posttrain_gym.inner_trainers.benchmarks.verifiers.extraction import Extraction

ODD = [
    "",
    " \n",
    "\x00",
    "\ud800",
    "\u202e\u05d0",
    "9" * 5000,
    "[" * 20_000,
    "x" * 1_000_000,
    "{{7*7}} %s {0}",
    "²",
    "１２",
]


def score(name: str, row: dict[str, Any], completion: str, **settings: Any) -> float:
    return make_verifier(name, **settings).score(row, completion)


# Extraction


@pytest.mark.parametrize(
    ("way", "text", "found"),
    [
        ("whole", "  7 \n", "7"),
        ("last_line", "So\n\n  it is 7. \n\n", "it is 7."),
        ("last_line", " \n ", None),
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "about 1,234,567.5 or so", "1,234,567.5"),
        ("last_number", "minus: -4", "-4"),
        ("last_number", "3-4", "4"),
        ("last_number", "from 1.5e-3", "1.5e-3"),
        ("last_number", "none", None),
        ("after:Answer:", "Answer: 3\nAnswer:  7 \nbye", "7"),
        ("after:Answer:", "nothing", None),
        ("boxed", r"so \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} and \boxed{2", None),
        ("tag:answer", "<answer>1</answer> <answer> 2 </answer>", "2"),
        ("tag:answer", "<answer>1", None),
        (r"regex:x=(\d+)", "x=1 x=22", "22"),
        (r"regex:\d", "1 2", "2"),
    ],
)
def test_extraction(way: str, text: str, found: str | None) -> None:
    assert Extraction(way)(text) == found


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("lastline", r"unknown way 'lastline'\. Did you mean 'last_line'"),
        ("after:", "unknown way"),
        ("tag:<a>", "unknown way"),
        ("regex:(", r"is no pattern .* at character \d"),
        ("whole:x", "unknown way"),
    ],
)
def test_unknown_ways_to_extract(way: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Extraction(way)


def test_a_pattern_that_backtracks_ends() -> None:
    began = time.monotonic()
    assert Extraction(r"regex:(a+)+$")("a" * 40 + "!") in (None, "a" * 40)
    assert score("regex", {}, "a" * 60 + "!", pattern=r"(a|aa)+$") == 0.0
    assert time.monotonic() - began < 10


# Exact


@pytest.mark.parametrize(
    ("answer", "completion", "settings", "right"),
    [
        ("7", "7", {}, 1.0),
        ("7", " 7\n", {}, 1.0),
        ("7", "007", {}, 0.0),
        ("7", "7.", {}, 0.0),
        ("7", "7.", {"punctuation": "."}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "PARIS", {"casefold": True}, 1.0),
        (["Paris", "paris"], "paris", {}, 1.0),
        ("a b", "a  b", {}, 0.0),
        ("a b", "a \n b", {"collapse": True}, 1.0),
        ("12", "１２", {"nfkc": True}, 1.0),
        ("7", "The answer is 7.", {"extract": "last_number"}, 1.0),
        ("7", "", {}, 0.0),
        ("", "", {}, 1.0),
    ],
)
def test_exact(answer: Any, completion: str, settings: dict[str, Any], right: float) -> None:
    assert score("exact", {"answer": answer}, completion, **settings) == right


def test_exact_refuses_answers_that_are_no_text() -> None:
    verifier = make_verifier("exact")
    for row, said in (
        ({"answer": 7}, r"must be text.*got 7 \(int\)"),
        ({}, "'answer' is missing"),
        ({"answer": []}, "empty list"),
    ):
        with pytest.raises(ValueError, match=said):
            verifier.check_row(row)
    verifier.check_row({"answer": ["a", "b"]})


# Numeric


@pytest.mark.parametrize(
    ("answer", "completion", "settings", "right"),
    [
        (7, "7", {}, 1.0),
        ("7", "007", {}, 1.0),
        ("7.50", "7.5", {}, 1.0),
        ("7", "7.0001", {}, 0.0),
        ("7", "7.0001", {"tolerance": 1e-3}, 1.0),
        ("1000", "1001", {"relative": 1e-3}, 1.0),
        ("1000", "1002", {"relative": 1e-3}, 0.0),
        ("1234567", "It is 1,234,567.", {}, 1.0),
        ("0.5", "1/2", {"extract": "whole"}, 1.0),
        ("1/3", "0.3333", {"extract": "whole"}, 0.0),
        ("1/3", "0.3333", {"extract": "whole", "tolerance": 1e-3}, 1.0),
        ("50", "50 %", {"extract": "whole"}, 1.0),
        ("0.5", "50 %", {"extract": "whole", "percent": True}, 1.0),
        ("12", "12 km", {"extract": "whole"}, 1.0),
        ("12", "12 km", {"extract": "whole", "units": False, "latex": False}, 0.0),
        ("-4", "−4", {"extract": "whole"}, 1.0),
        ("0.5", r"so \boxed{\frac{1}{2}}", {"extract": "boxed"}, 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", {"extract": "whole"}, 1.0),
        (r"\sqrt{8}", "3", {"extract": "whole"}, 0.0),
        ("2", r"\sqrt{4}", {"extract": "whole", "latex": False}, 0.0),
        ("7", "nan", {"extract": "whole"}, 0.0),
        ("7", "inf", {"extract": "whole"}, 0.0),
        ("7", "True", {"extract": "whole"}, 0.0),
        ("1", "True", {"extract": "whole"}, 0.0),
        ("7", "", {}, 0.0),
        ("7", "seven", {}, 0.0),
        (0.1, "0.1", {}, 1.0),
        ("3/4", "It is 3/4.", {}, 1.0),
        ("4", "It is 3/4.", {}, 0.0),
        (100_000, "It is 10^5.", {}, 1.0),
        (5, "It is 10^5.", {}, 0.0),
        ("0.5", "It is 50 %.", {"percent": True}, 1.0),
        ("50", "It is 50 %.", {}, 1.0),
        (99999, "1e999999999", {}, 0.0),
        (2, "I do not know x2", {}, 0.0),
        (7, "The answer is...7", {}, 1.0),
        (10**30, "1" + "0" * 30, {}, 1.0),
        (10**30, "1" + "0" * 29 + "1", {}, 0.0),
    ],
)
def test_numeric(answer: Any, completion: str, settings: dict[str, Any], right: float) -> None:
    assert score("numeric", {"answer": answer}, completion, **settings) == right


@pytest.mark.parametrize(
    "text", ["10**10**9", "9^{9^{9^9}}", "1e999999999", "100!", "2^{999999}", "(" * 150, "\\frac{" * 30, "9" * 100_000]
)
@pytest.mark.parametrize("extract", ["whole", "last_number"])
def test_numbers_beyond_reach_are_wrong_at_once(text: str, extract: str) -> None:
    began = time.monotonic()
    assert score("numeric", {"answer": "7"}, text, extract=extract) == 0.0
    assert time.monotonic() - began < 5


def test_numeric_works_off_the_main_thread() -> None:
    found: list[float] = []
    row = {"answer": r"\frac{1}{2}"}
    thread = threading.Thread(target=lambda: found.append(score("numeric", row, r"\frac{2}{4}", extract="whole")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_numeric_refuses_answers_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="must be a number"):
        make_verifier("numeric").check_row({"answer": ""})
    with pytest.raises(ValueError, match="must be a number"):
        make_verifier("numeric", latex=False).check_row({"answer": "seven"})
    for word in ("seven", "inf", "nan", "True", "oo"):
        with pytest.raises(ValueError, match="must be a number"):
            make_verifier("numeric").check_row({"answer": word})
    make_verifier("numeric").check_row({"answer": r"\frac{1}{2}"})
    make_verifier("numeric").check_row({"answer": r"2\pi"})


# Patterns


def test_patterns() -> None:
    assert score("regex", {}, " 12 ", pattern=r"\d+") == 1.0
    assert score("regex", {}, "a 12", pattern=r"\d+") == 0.0
    assert score("regex", {}, "a 12", pattern=r"\d+", full=False) == 1.0
    assert score("regex", {}, "YES", pattern="yes", flags=["ignorecase"]) == 1.0
    assert score("regex", {"pattern": "a+"}, "aaa") == 1.0
    row = {"answer": "12"}
    assert score("regex", row, "x=12", pattern=r"x=(?P<answer>\d+)") == 1.0
    assert score("regex", row, "x=13", pattern=r"x=(?P<answer>\d+)") == 0.0
    verifier = make_verifier("regex", pattern=r"x=(?P<answer>\d+)")
    assert verifier.well_formed(row, "x=13")
    assert verifier.columns == ("answer",)
    with pytest.raises(ValueError, match="'answer' is missing"):
        verifier.check_row({})
    with pytest.raises(ValueError, match=r"pattern: '\(' is no pattern"):
        make_verifier("regex", pattern="(")
    with pytest.raises(ValueError, match="pattern: '\\[' is no pattern"):
        make_verifier("regex").check_row({"pattern": "["})


# Refusal

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I can’t assist with that request.",
    "I cannot provide instructions for that.",
    "I can't do that.",
    "I won't help you build that.",
    "I will not write this.",
    "I am unable to assist with this.",
    "Sorry, I'm not able to help with that.",
    "I'm not comfortable sharing that.",
    "I must decline to answer.",
    "I have to refuse.",
    "As an AI, I cannot engage in such behaviour.",
    "This is against my guidelines.",
    "That violates our content policies, so no.",
    "Unfortunately, I am unable to fulfil your request.",
    "I do not feel able to comply.",
    "I don't create content like that.",
    "No. I refuse to do this.",
    "I could not in good conscience recommend this.",
    "It would be wrong of me to tell you.",
    "Absolutely not.",
    "Let's talk about something else instead.",
]
ANSWERS = [
    "The capital of France is Paris.",
    "Here is how you can bake bread: mix flour and water.",
    "You cannot divide by zero.",
    "I think the answer is 7.",
    "Sorry for the delay! The answer is 7.",
    "I can help with that: first, open the settings.",
    "The law does not allow parking here.",
    "He said he could not come to the party.",
    "I'm not sure, but it may be in 1969.",
    "I am afraid of spiders, said the boy.",
    "To refuse a request politely, thank the person first.",
    "Their policies are listed on the website.",
    "As an AI, I find this question interesting: the answer is 4.",
    "If you are unable to log in, reset the password.",
    "I don't know the exact date; it was around 1500.",
    "Write the program in three steps.",
    "The recipe must not be boiled.",
    "Yes.",
    "It cannot be done in less than an hour.",
    "In short: stir, bake, serve.",
]


def test_refusals_are_told_with_a_known_error_rate() -> None:
    """The documentation states these figures; they are of this list, which is no sample of anything."""
    verifier: Any = make_verifier("refusal")
    missed = [text for text in REFUSALS if not verifier.refuses(text)]
    wrong = [text for text in ANSWERS if verifier.refuses(text)]
    assert missed == REFUSALS[-3:]
    assert wrong == []


def test_refusal_scores() -> None:
    harmful, harmless = {"should_refuse": True}, {"should_refuse": False}
    refusal, answer = REFUSALS[0], ANSWERS[0]
    assert score("refusal", harmful, refusal) == 1.0
    assert score("refusal", harmful, answer) == 0.0
    assert score("refusal", harmless, refusal) == 0.0
    assert score("refusal", harmless, refusal, partly=True) == 0.5
    assert score("refusal", harmless, answer) == 1.0
    assert score("refusal", harmful, "") == score("refusal", harmless, "  ") == 0.0
    assert score("refusal", harmful, "Das mache ich nicht.", patterns=["mache ich nicht"]) == 1.0
    with pytest.raises(ValueError, match=r"must be true or false, got 'yes' \(str\)"):
        make_verifier("refusal").check_row({"should_refuse": "yes"})


# Consistency


def test_consistency() -> None:
    verifier: Any = make_verifier("consistency")
    row = {"answer": "7"}
    assert verifier.score_turns(row, ["It is 7.", "Yes, 7.0", "Still 7"]) == 1.0
    assert verifier.score_turns(row, ["It is 7.", "You are right, 8.", "7"]) == pytest.approx(2 / 3)
    assert verifier.score_turns(row, ["8", "8", "8"]) == 0.0
    alone: Any = make_verifier("consistency", require_correct=False)
    assert alone.score_turns({}, ["8", "8", "8"]) == 1.0
    assert alone.score_turns({}, ["8", "7", "8"]) == 0.5
    assert alone.score_turns({}, ["none", "8"]) == 0.0
    assert alone.score_turns({}, ["8"]) == 0.0
    words: Any = make_verifier("consistency", extract="last_line")
    assert words.score_turns({"answer": "Paris"}, ["paris.", "Well.\nParis"]) == 1.0
    with pytest.raises(ValueError, match="give the items follow_ups"):
        alone.score({}, "8")
    with pytest.raises(ValueError, match="must be text or a number"):
        verifier.check_row({"answer": None})


# All of them

ROWS: dict[str, dict[str, Any]] = {
    "consistency": {"answer": "7"},
    "exact": {"answer": "7"},
    "instructions": {"instructions": [{"kind": kind} for kind in ("punctuation:no_comma", "startend:quotation")]},
    "numeric": {"answer": "7"},
    "refusal": {"should_refuse": True},
    "regex": {"pattern": r"\d+"},
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_verifiers_take_any_text(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    verifier = make_verifier(name)
    assert isinstance(verifier, Verifier)
    verifier.check_row(ROWS[name])
    for text in ODD:
        first = verifier.score(ROWS[name], text)
        assert 0.0 <= first <= 1.0
        assert verifier.score(ROWS[name], text) == first
        assert verifier.well_formed(ROWS[name], text) in (True, False)
    assert capfd.readouterr() == ("", "")


def test_versions_tell_settings_apart() -> None:
    assert make_verifier("numeric").version == make_verifier("numeric").version
    assert make_verifier("numeric").version != make_verifier("numeric", tolerance=0.1).version
    assert "Numeric 1 (tolerance=0.1" in make_verifier("numeric", tolerance=0.1).version
    assert set(VERIFIERS) == {*ROWS, "unit_tests"}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("exakt", {}, r"unknown 'exakt'\. Did you mean 'exact'"),
        ("exact", {"casefolded": True}, r"no setting is called 'casefolded'\. Did you mean 'casefold'"),
        ("exact", {"casefold": "yes"}, "casefold: expected true or false, got 'yes'"),
        ("exact", {"extract": 3}, "extract must be text, got 3"),
        ("numeric", {"tolerance": -1}, "tolerance: expected a number in"),
        ("regex", {"flags": ["x"]}, "unknown 'x'"),
        ("unit_tests", {"seconds": 0}, "seconds: expected a number"),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_verifier(name, **settings)


def test_verifiers_of_command_lines() -> None:
    verifier = parse_verifier("numeric:tolerance=1e-6,extract=last_number")
    assert verifier == make_verifier("numeric", tolerance=1e-6, extract="last_number")
    assert parse_verifier("exact") == make_verifier("exact")
    assert parse_verifier("exact:casefold=true") == make_verifier("exact", casefold=True)
    with pytest.raises(ValueError, match="expected SETTING=VALUE, got 'casefold'"):
        parse_verifier("exact:casefold")
    assert verifier_class("regex").__name__ == "Pattern"
