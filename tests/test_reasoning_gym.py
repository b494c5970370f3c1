"""Questions of reasoning-gym: each in one split whatever the seed, judged by the data set's scorer."""

from __future__ import annotations

import sys

import pytest

from posttrain_gym.inner_trainers.benchmarks.reasoning_gym import (
    ReasoningGym,
    draw_questions,
    read_reasoning_source,
    split_of,
)

SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def test_splits_are_disjoint_whatever_the_seed() -> None:
    seen: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    for split, prompts in seen.items():
        for seed in (0, 10_000, 20_000):
            drawn = draw_questions("chain_sum", SETTINGS, split, 40, seed)
            assert len({question.prompt for question in drawn}) == 40
            assert {split_of(question.prompt) for question in drawn} == {split}
            prompts.update(question.prompt for question in drawn)
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(seen["train"]) > 80


def test_the_same_seed_draws_the_same_and_a_prefix() -> None:
    drawn = draw_questions("chain_sum", SETTINGS, "test", 10, 5)
    assert draw_questions("chain_sum", SETTINGS, "test", 10, 5) == drawn
    assert draw_questions("chain_sum", SETTINGS, "test", 10, 6) != drawn


def test_a_source_shows_and_asks() -> None:
    source = read_reasoning_source("chains", "chain_sum", SETTINGS, 20, 1, extract="last_number")
    shown, asked = source.rows["demonstrations"], source.rows["prompts"]
    assert len(shown) == len(asked) == 20
    assert source.verifier is not None
    for demonstration, prompt in zip(shown, asked, strict=True):
        assert demonstration["prompt"] == prompt["prompt"]
        assert source.verifier(prompt, demonstration["completion"]) == 1.0
        assert source.verifier(prompt, f"It is {prompt['answer']}.") == 1.0
        assert source.verifier(prompt, f"It is {int(prompt['answer']) + 1}.") == 0.0
    assert "of reasoning-gym" in source.verifier_version


def test_partial_credit_counts_for_nothing_unless_asked() -> None:
    (question,) = draw_questions("chain_sum", SETTINGS, "train", 1, 0)
    row = {"prompt": question.prompt, "answer": question.answer, "metadata": question.metadata}
    whole, partial = (ReasoningGym("chain_sum", extract="whole", partial=p) for p in (False, True))
    longer = f"The answer is {question.answer}"
    assert whole.score(row, longer) == 0.0
    assert 0.0 < partial.score(row, longer) < 1.0
    assert whole.score(row, question.answer) == partial.score(row, question.answer) == 1.0
    assert whole.score(row, "") == 0.0
    assert whole.well_formed(row, question.answer)
    assert not ReasoningGym("chain_sum", extract="last_number").well_formed(row, longer)
    assert whole.version != partial.version


@pytest.mark.parametrize(
    ("dataset", "settings", "size", "said"),
    [
        ("chain_sums", {}, 5, r"no data set is called 'chain_sums'\. Did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, 5, r"has no setting 'terms' .*Did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 0}, 5, "refuses .*min_terms must be positive"),
        ("chain_sum", {"seed": 1}, 5, "seed stands beside settings"),
        ("propositional_logic", {}, 5, "has no single right answer as text"),
        ("chain_sum", {**SETTINGS, "max_digits": 1}, 500, r"has only \d+ different questions for the test split"),
    ],
)
def test_what_cannot_be_drawn(dataset: str, settings: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw_questions(dataset, settings, "test", size, 0)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain-gym\[benchmarks\]'"):
        draw_questions("chain_sum", {}, "test", 1, 0)
