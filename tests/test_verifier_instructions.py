"""Every kind of instruction, followed and not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain_gym.inner_trainers.benchmarks.verifiers.instructions import (
    KINDS,
    Instructions,
    guess_language,
    sentences_in,
    words_in,
)

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sea", "blue sky"]}, "The SEA under a blue sky.", "The season, a blue sky."),
    "keywords:frequency": ({"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea, sea.", "Sea, seas."),
    "keywords:forbidden_words": ({"forbidden_words": ["sea"]}, "The season.", "A sea."),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        "Eel",
        "Eels eat",
    ),
    "language:response_language": (
        {"language": "de"},
        "Das ist ein Haus und der Garten ist nicht klein.",
        "This is a house and the garden is not small.",
    ),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "One. Two!", "Only Dr. Who."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "don't stop", "one two three"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "however"},
        "First.\n\nHowever, second.",
        "First.\n\nSecond.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name], [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Hi\nP.S. bye", "Hi, bye"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and b"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nx\nSection 2\ny",
        "Section 1\nx",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    "detectable_format:title": ({}, "<<A title>>\ntext", "<<>> text"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "Say it. Now: yes", "Yes. Say it."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, 'So. "any questions?"', "Any questions? No."),
    "startend:quotation": ({}, ' "all of it" ', '"only" this'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA",
        "NASA and Esa",
    ),
    "change_case:english_capital": ({}, "ALL OF IT, 7.", "All of it"),
    "change_case:english_lowercase": ({}, "all of it, 7.", "All of it"),
    "punctuation:no_comma": ({}, "none at all", "one, here"),
}


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(KINDS)
    assert len(KINDS) == 25


@pytest.mark.parametrize("kind", sorted(CASES))
def test_kinds(kind: str) -> None:
    arguments, right, wrong = CASES[kind]
    row = {"instructions": [{"kind": kind, **arguments}]}
    verifier = Instructions()
    verifier.check_row(row)
    assert verifier.score(row, right) == 1.0
    assert verifier.score(row, wrong) == 0.0
    assert verifier.score(row, "") == 0.0


def test_files_of_ifeval_work_as_they_are() -> None:
    row = {
        "prompt": "Write without commas, in two words at least.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [
            {"num_words": None, "relation": None, "keywords": None},
            {"num_words": 2, "relation": "at least", "keywords": None},
        ],
    }
    verifier = Instructions()
    verifier.check_row(row)
    assert verifier.score(row, "two words") == 1.0
    assert verifier.score(row, "one") == 0.5
    assert verifier.followed(row, "one, two") == [False, True]
    assert Instructions(strict=True).score(row, "one") == 0.0
    assert not verifier.well_formed(row, "one")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "'instruction_id_list' is missing"),
        ({"instructions": []}, "must be a list of mappings"),
        ({"instructions": [{"kind": "punctuation:no_coma"}]}, "Did you mean 'punctuation:no_comma'"),
        ({"instructions": [{"kind": "keywords:existence"}]}, "argument 'keywords' is missing"),
        ({"instructions": [{"kind": "keywords:existence", "keywords": "sea"}]}, "must be a list of words"),
        ({"instructions": [{"kind": "punctuation:no_comma", "x": 1}]}, "no argument is called 'x'"),
        (
            {"instructions": [{"kind": "length_constraints:number_words", "num_words": 2, "relation": "about"}]},
            "must be one of less than, at least",
        ),
        ({"instructions": [{"kind": "length_constraints:number_words", "num_words": 2.5}]}, "must be a whole number"),
        (
            {"instructions": [{"kind": "language:response_language", "language": "xx"}]},
            "cannot be told from others here",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "lists of one length"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, "kwargs must be a list of mappings"),
        ({"instructions": [{"kind": ["a"]}]}, "unknown kind"),
    ],
)
def test_rows_that_cannot_be_judged(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Instructions().check_row(row)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("detectable_format:title", "<<" * 50_000),
        ("detectable_content:postscript", "a" + "\n" * 99_999),
        ("detectable_format:number_bullet_lists", "a" + "\n" * 99_990 + "b"),
        ("detectable_format:json_format", "```" + "\n" * 50_000 + "a"),
        ("length_constraints:number_sentences", "." * 99_999 + "x"),
        ("length_constraints:number_sentences", ". " * 50_000),
        ("detectable_content:number_placeholders", "[a" * 50_000),
        ("detectable_format:number_highlighted_sections", "**a\n" * 30_000),
        ("detectable_format:multiple_sections", "Section" + " " * 90_000),
    ],
)
def test_texts_that_repeat_take_no_longer_than_others(kind: str, text: str) -> None:
    began = time.monotonic()
    assert Instructions().score({"instructions": [{"kind": kind, **CASES[kind][0]}]}, text) == 0.0
    assert time.monotonic() - began < 10  # seconds of seconds: minutes before


def test_counting() -> None:
    assert words_in("Don't stop - it's 7.50!") == ["Don't", "stop", "it's", "7", "50"]
    assert sentences_in("Dr. Who came. He left! Why? No end") == 4
    assert sentences_in("It costs 7.50 here.") == 1
    assert sentences_in("...") == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The house is not far from the sea and it is old.", "en"),
        ("La maison est dans la rue et elle ne est pas grande.", "fr"),
        ("El perro es más grande que el gato y no lo ve.", "es"),
        ("これは日本語の文です。", "ja"),
        ("这是一个句子。", "zh"),
        ("이것은 문장입니다.", "ko"),
        ("Это предложение.", None),
        ("12345", None),
        ("xyzzy plugh", None),
    ],
)
def test_languages(text: str, code: str | None) -> None:
    assert guess_language(text) == code


@pytest.mark.parametrize(
    ("instruction", "text", "followed"),
    [
        ({"kind": "length_constraints:number_sentences", "num_sentences": 2}, "mr. " * 25_000, 0.0),
        ({"kind": "length_constraints:number_paragraphs", "num_paragraphs": 1}, "a" + "\n" * 99_999, 1.0),
    ],
)
def test_text_that_repeats_is_counted_at_once(instruction: dict[str, Any], text: str, followed: float) -> None:
    began = time.monotonic()
    assert Instructions().score({"instructions": [instruction]}, text) == followed
    assert time.monotonic() - began < 5
