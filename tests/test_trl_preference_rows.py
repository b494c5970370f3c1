"""Preferences become the tokens TRL makes of them, what teaches nothing is left out, KTO shows both sides evenly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.kto import balanced_sides
from posttrain_gym.inner_trainers.trl.preferences import TokenisedPairs, tokenise_preferences
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.preference_rounds import PairTask, arguments, preference
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import run


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letter pairs, whose tokens may begin in a prompt and end in an answer."""
    letters = "abcd="
    words = [*letters, *(a + b for a in letters for b in letters)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S][\s\S]?"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_tokens_and_prompts_are_the_ones_trl_finds(folder: Path) -> None:
    rows = [
        {"prompt": "ab=", "chosen": "ab", "rejected": "b"},
        {"prompt": "ab", "chosen": "ab<eos>", "rejected": "b"},
        {"prompt": "abc", "chosen": "<eos>", "rejected": "dd"},
        {"prompt": "", "chosen": "a", "rejected": "bcd"},
    ]
    for tokenizer in (AutoTokenizer.from_pretrained(folder), merging_tokenizer()):
        made = tokenise_preferences(tokenizer, rows)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        recipe = preference("dpo")
        theirs = DPOTrainer(
            model=model,
            ref_model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=arguments(DPOConfig, recipe),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        ).train_dataset
        for index, row in enumerate(theirs):
            prompt = made.shared_prompt(index)
            assert row["prompt_ids"] == made.chosen[index][:prompt] == made.rejected[index][:prompt]
            assert (row["chosen_ids"], row["rejected_ids"]) == (
                made.chosen[index][prompt:],
                made.rejected[index][prompt:],
            )
        answers = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ]
        theirs = KTOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            ref_model=model,
            args=arguments(KTOConfig, recipe),
            train_dataset=datasets.Dataset.from_list(answers),
            processing_class=tokenizer,
        ).train_dataset
        for index in range(len(rows)):
            for offset, (ids, prompts) in enumerate(
                ((made.chosen, made.chosen_prompt), (made.rejected, made.rejected_prompt))
            ):
                row = theirs[2 * index + offset]
                split = prompts[index]
                assert (row["prompt_ids"], row["completion_ids"]) == (ids[index][:split], ids[index][split:])
    assert made.chosen_prompt[0] == 1 and made.rejected_prompt[0] == 1  # "=" goes into a token with the answer
    assert [len(ids) for ids in made.chosen] == [4, 3, 3, 2]


def test_the_length_a_pair_needs_is_where_its_sides_part(folder: Path) -> None:
    rows = [
        {"prompt": "ab=", "chosen": "c", "rejected": "d"},
        {"prompt": "ab=", "chosen": "cc", "rejected": "cd"},
        {"prompt": "ab=", "chosen": "c", "rejected": "cc"},
        {"prompt": "", "chosen": "c", "rejected": "d"},
        {"prompt": "ab=", "chosen": "c", "rejected": "c<eos>"},
        {"prompt": "ab=", "chosen": "", "rejected": "c"},
        {"prompt": "ab=", "chosen": "c", "rejected": "<eos>"},
    ]
    made = tokenise_preferences(AutoTokenizer.from_pretrained(folder), rows)
    assert made.needed == (4, 5, 5, 2, None, None, None)
    assert (made.longest, made.smallest_max_length) == (6, 2)
    assert (made.trainable, made.unsupervised) == ((0, 1, 2, 3), (5, 6, 7))
    assert made.cut(6) is made
    short = made.cut(4)
    assert (short.longest, short.trainable, short.unsupervised) == (4, (0, 3), (2, 3, 5, 6, 7))
    assert short.cut(3).trainable == (3,)
    assert short.chosen == made.chosen  # the collator cuts
    assert isinstance(short, TokenisedPairs)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_pairs_without_a_preference_are_left_out_and_told_by_reason(
    algorithm: str, trainer: TrlTrainer, folder: Path
) -> None:
    rows = [
        {"prompt": "a=", "chosen": "a", "rejected": "b"},
        {"prompt": "b=", "chosen": "cccb", "rejected": "ccca"},
        {"prompt": "c=", "chosen": "c", "rejected": "c"},
        {"prompt": "d=", "chosen": "d", "rejected": "a"},
        {"prompt": "e=", "chosen": "", "rejected": "a"},
    ]
    task = PairTask(folder, rows)
    report, checkpoint = run(trainer, task, preference(algorithm, max_length=4, steps=2))
    assert report.failure is None and checkpoint is not None
    assert report.rows_without_supervision == 3
    assert report.flags == (
        "1 of 5 rows of source 'pairs' keep no token in which their sides differ at max_length 4: rows 2",
        "2 of 5 rows of source 'pairs' have an empty side or two equal ones: rows 3, 5",
    )
    sides = 2 if algorithm == "dpo" else 1
    assert report.supervised_tokens == sides * 2 * 4 * 2  # answer and end of each
    with pytest.raises(ValueError) as caught:
        trainer.begin(PairTask(folder, rows[1:2]), preference(algorithm, max_length=4), trainer.base(task), 3)
    assert str(caught.value) == (
        "max_length: at 4 all 1 rows of source 'pairs' keep no token in which their sides differ; "
        "the smallest max_length that works is 6."
    )
    with pytest.raises(ValueError) as caught:
        trainer.begin(PairTask(folder, rows[2:3]), preference(algorithm), trainer.base(task), 3)
    assert str(caught.value) == (
        "source 'pairs': all 1 rows have an empty side or two equal ones, so there is nothing to learn."
    )


# Sides ---------------------------------------------------------------------------------------------------------------


def test_both_labels_are_balanced_in_every_batch_and_over_the_passes() -> None:
    draw = draw_mix({"pairs": 24}, {"pairs": 1.0}, 24 * 6, 0)
    sides = balanced_sides(draw, 8)
    assert all(sum(sides[first : first + 8]) == 4 for first in range(0, len(sides), 8))
    shown = Counter((pair, good) for pair, good in zip(draw, sides, strict=True))
    assert sorted({pair for pair, _ in shown}) == [("pairs", index) for index in range(24)]
    assert all(shown[("pairs", index), True] in (2, 3, 4) for index in range(24))
    assert balanced_sides(draw, 8) == sides
    odd = balanced_sides(draw[:12], 3)
    assert [sum(odd[first : first + 3]) for first in range(0, 12, 3)] == [2, 1, 2, 1]
    assert balanced_sides([("pairs", 0)] * 4, 2) in ([True, False] * 2, [False, True] * 2)
