"""Packed rows do not see each other, packs never pass their capacity, and packed rounds cost what they say."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from posttrain_gym.inner_trainers.base import Limit
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl import packing
from posttrain_gym.inner_trainers.trl.data import TokenisedRows, draw_mix, labelled_rows
from posttrain_gym.inner_trainers.trl.models import load_weights
from posttrain_gym.inner_trainers.trl.packing import PackCollator, draw_packs, pack, packed_columns, rows_stay_apart
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import ROW, Weights, by_hand, equal, run, sft, trained

SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
SHARED: dict[str, Any] = {**SMALL, "num_key_value_heads": 1, "head_dim": 16}
ROWS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14, 15], [16, 17, 18, 19, 3]]


def made(kind: str, attention: str = "eager", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def rows_of(*lengths: int) -> TokenisedRows:
    """Return rows of these lengths with a loss on all but the first token; row i is made of token 3 + i."""
    ids = [[3 + number % 20] * length for number, length in enumerate(lengths)]
    return labelled_rows(ids, [[-100, *row[1:]] for row in ids])


def collated(packs: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    flat = [[token for row in rows for token in row] for rows in packs]
    lengths = [[len(row) for row in rows] for rows in packs]
    examples = [{"input_ids": ids, "labels": ids, "seq_lengths": each} for ids, each in zip(flat, lengths, strict=True)]
    return PackCollator(0)(examples)


def logits(model: Any, packs: list[list[list[int]]]) -> torch.Tensor:
    batch = collated(packs)
    output: torch.Tensor = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    return output


def row_loss(scores: torch.Tensor, row: list[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores[: len(row) - 1], torch.tensor(row[1:]))


# Rows stay apart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "shape"), [("llama", SMALL), ("gpt2", GPT2)])
def test_a_packed_row_has_the_loss_and_the_gradients_it_has_alone(
    kind: str, shape: dict[str, Any], attention: str
) -> None:
    model = made(kind, attention, **shape)
    packs = [ROWS[:2], ROWS[2:]]  # of 11 and 7 tokens: the second is padded
    packed_losses, alone_losses = [], []
    scores = logits(model, packs)
    for number, rows in enumerate(packs):
        at = 0
        for row in rows:
            packed_losses.append(row_loss(scores[number, at : at + len(row)], row))
            at += len(row)
    torch.stack(packed_losses).sum().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    for rows in packs:
        for row in rows:
            alone_losses.append(row_loss(model(input_ids=torch.tensor([row]), use_cache=False).logits[0], row))
    torch.stack(alone_losses).sum().backward()
    assert [loss.item() for loss in packed_losses] == pytest.approx([loss.item() for loss in alone_losses], abs=1e-5)
    assert len(gradients) > 10
    for name, value in model.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "shape"), [("llama", SMALL), ("gpt2", GPT2)])
def test_another_row_in_the_pack_changes_no_other_row(kind: str, shape: dict[str, Any], attention: str) -> None:
    model = made(kind, attention, **shape)
    changed = [20, 21, 22, 23, 3, 4, 5, 6]
    with torch.no_grad():
        before = logits(model, [ROWS])[0]
        after = logits(model, [[ROWS[0], changed, *ROWS[2:]]])[0]
    torch.testing.assert_close(after[:3], before[:3], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[11:], before[11:], rtol=0, atol=1e-6)
    assert float((after[3:11] - before[3:11]).abs().max()) > 1e-3


def test_a_pack_of_one_row_and_rows_of_one_token_are_plain_rows() -> None:
    model = made("llama", **SMALL)
    with torch.no_grad():
        alone = logits(model, [[ROWS[1]]])[0]
        between = logits(model, [[[5], ROWS[1], [7], [8]]])[0]
    torch.testing.assert_close(between[1:9], alone, rtol=0, atol=1e-6)


ARCHITECTURES: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("llama", "eager", True, SMALL),
    ("llama", "sdpa", True, SMALL),
    ("gpt2", "eager", True, GPT2),
    ("gpt2", "sdpa", True, GPT2),
    ("qwen2", "eager", True, {**SMALL, "num_key_value_heads": 1}),
    ("qwen2", "sdpa", True, {**SMALL, "num_key_value_heads": 1}),
    ("gemma", "eager", True, SHARED),
    ("gemma", "sdpa", True, SHARED),
    ("mistral", "eager", True, {**SMALL, "num_key_value_heads": 1, "sliding_window": 3}),
    ("mistral", "sdpa", True, {**SMALL, "num_key_value_heads": 1, "sliding_window": 3}),
    ("gemma2", "eager", True, {**SHARED, "sliding_window": 4}),
    ("gemma3_text", "sdpa", True, {**SHARED, "sliding_window": 4}),
    ("gpt_neox", "sdpa", True, SMALL),
    ("falcon", "eager", True, {**SMALL, "alibi": True}),
    ("opt", "eager", False, {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    ("opt", "sdpa", False, {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    ("bloom", "eager", False, {"vocab_size": 24, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    ("mpt", "eager", False, {"vocab_size": 24, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 128}),
    ("mamba", "eager", False, {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    (  # its convolution leaks no more than a ten-thousandth of a logit into the next row
        "lfm2",
        "sdpa",
        False,
        {**SMALL, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
    ),
]


@pytest.mark.parametrize(
    ("kind", "attention", "apart", "shape"), ARCHITECTURES, ids=[f"{kind}-{how}" for kind, how, *_ in ARCHITECTURES]
)
def test_the_probe_knows_which_architectures_keep_rows_apart(
    kind: str, attention: str, apart: bool, shape: dict[str, Any]
) -> None:
    model = made(kind, attention, **shape).train()
    assert rows_stay_apart(model) is apart
    assert model.training
    model.eval()
    worst, at = 0.0, 0
    with torch.no_grad():  # what the probe says is what happens to other rows than its own
        packed = logits(model, [ROWS, ROWS[::-1]])[0]
        for row in ROWS:
            alone = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            worst = max(worst, float((packed[at : at + len(row)] - alone).abs().max() / alone.abs().max()))
            at += len(row)
    assert (worst < 1e-5) is apart, worst


def test_a_model_that_takes_no_positions_is_refused_without_a_pass() -> None:
    class Model:
        def forward(self, input_ids: Any) -> Any:
            raise AssertionError("a pass was made")

    assert not rows_stay_apart(Model())


def test_packing_is_refused_where_rows_would_see_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]

    def leaky(model: Any) -> bool:
        asked[0] += 1
        return False

    monkeypatch.setattr(packing, "rows_stay_apart", leaky)
    fresh, task = TrlTrainer(), TinyTask(folder)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            fresh.begin(task, sft(packing=True, max_length=16), fresh.base(task), 3)
        assert str(caught.value) == (
            "packing: in a llama model with attention 'sdpa' packed rows would see each other; set packing to false."
        )
    assert asked == [1]  # a model is asked once
    assert run(fresh, task, sft())[0].failure is None


def test_ruined_weights_that_were_evaluated_last_do_not_decide(folder: Path) -> None:
    fresh, task = TrlTrainer(), TinyTask(folder)
    ruined = {name: torch.full_like(value, math.nan) for name, value in fresh.base(task).weights.items()}
    load_weights(fresh._load(task).model.template, ruined)
    assert run(fresh, task, packed_sft())[0].failure is None


# Packs ---------------------------------------------------------------------------------------------------------------


def test_rows_fill_packs_in_order() -> None:
    assert pack([3, 3, 3, 3], capacity=7, packs=2) == [[0, 1], [2, 3]]
    assert pack([3, 3, 3, 3], capacity=6, packs=1) == [[0, 1]]
    assert pack([5, 2, 3, 5], capacity=5, packs=3) == [[0], [1, 2], [3]]
    assert pack([2, 2], capacity=2, packs=5) == [[0], [1]]
    assert pack([], capacity=4, packs=2) == []


@given(lengths=st.lists(st.integers(1, 20), max_size=60), extra=st.integers(0, 20), packs=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_packs_hold_as_many_rows_as_fit(lengths: list[int], extra: int, packs: int) -> None:
    capacity = max(lengths, default=1) + extra
    made_packs = pack(lengths, capacity, packs)
    flat = [index for rows in made_packs for index in rows]
    assert flat == list(range(len(flat)))  # order kept, none twice, none skipped
    assert len(made_packs) <= packs
    assert all(rows and sum(lengths[i] for i in rows) <= capacity for rows in made_packs)
    for rows, following in itertools.pairwise(made_packs):
        assert sum(lengths[i] for i in rows) + lengths[following[0]] > capacity
    if len(flat) < len(lengths):
        assert len(made_packs) == packs
        assert sum(lengths[i] for i in made_packs[-1]) + lengths[len(flat)] > capacity


@given(
    sizes=st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=5), min_size=1, max_size=3),
    capacity=st.integers(2, 40),
    packs=st.integers(1, 12),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_number_of_packs_is_exact_whatever_the_rows(
    sizes: list[list[int]], capacity: int, packs: int, seed: int
) -> None:
    pools = {f"pool{number}": rows_of(*lengths).cut(capacity) for number, lengths in enumerate(sizes)}
    mix = {name: 1 / len(pools) for name in pools}
    drawn = draw_packs(pools, mix, capacity, packs, seed)
    assert len(drawn) == packs
    lengths = [[len(pools[name].input_ids[index]) for name, index in rows] for rows in drawn]
    assert all(each and sum(each) <= capacity for each in lengths)
    longest = max(len(ids) for rows in pools.values() for ids in rows.input_ids)
    assert all(sum(each) + longest > capacity for each in lengths)  # none is left with room for any row
    assert drawn == draw_packs(pools, mix, capacity, packs, seed)


def test_one_row_fills_every_pack_and_a_row_as_long_as_the_capacity_is_alone_in_its_pack() -> None:
    one = {"one": rows_of(3)}
    assert draw_packs(one, {"one": 1.0}, capacity=10, packs=2, seed=0) == [[("one", 0)] * 3] * 2
    full = {"full": rows_of(10, 10)}
    drawn = draw_packs(full, {"full": 1.0}, capacity=10, packs=4, seed=0)
    assert [len(rows) for rows in drawn] == [1] * 4
    assert {index for rows in drawn for _, index in rows} == {0, 1}
    cut = {"cut": rows_of(50, 40).cut(8)}  # longer than the capacity before they are cut
    assert [len(rows) for rows in draw_packs(cut, {"cut": 1.0}, 8, 3, 0)] == [1, 1, 1]


def test_the_mix_is_met_by_rows_and_no_seed_is_like_another() -> None:
    pools = {"long": rows_of(*[9] * 40), "short": rows_of(*[3] * 40)}
    drawn = draw_packs(pools, {"long": 0.25, "short": 0.75}, capacity=64, packs=40, seed=0)
    counts = Counter(name for rows in drawn for name, _ in rows)
    assert counts["long"] / counts.total() == pytest.approx(0.25, abs=0.03)
    assert counts.total() == pytest.approx(40 * 64 / (0.25 * 9 + 0.75 * 3), rel=0.1)
    assert drawn != draw_packs(pools, {"long": 0.25, "short": 0.75}, capacity=64, packs=40, seed=1)
    alone = draw_packs(pools, {"long": 0.0, "short": 1.0}, capacity=64, packs=3, seed=0)
    assert {name for rows in alone for name, _ in rows} == {"short"}


def test_only_trainable_rows_are_packed_and_no_first_token_has_a_label() -> None:
    ids = [[3, 4, 5], [6, 7], [8, 9, 10]]
    rows = labelled_rows(ids, [[3, 4, 5], [-100, -100], [-100, -100, 10]])
    packs = draw_packs({"a": rows}, {"a": 1.0}, capacity=6, packs=5, seed=0)
    assert {index for each in packs for _, index in each} == {0, 2}
    assert packed_columns({"a": rows}, [[("a", 0), ("a", 2)], [("a", 2)]]) == {
        "input_ids": [[3, 4, 5, 8, 9, 10], [8, 9, 10]],
        "labels": [[-100, 4, 5, -100, -100, 10], [-100, -100, 10]],
        "seq_lengths": [[3, 3], [3]],
    }


def test_the_batch_says_where_rows_begin_and_pads_with_rows_of_one_token() -> None:
    batch = PackCollator(0)(
        [
            {"input_ids": [3, 4, 5, 6, 7], "labels": [-100, 4, -100, 6, 7], "seq_lengths": [2, 3]},
            {"input_ids": [8, 9], "labels": [-100, 9], "seq_lengths": [2]},
        ]
    )
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7], [8, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 4, -100, 6, 7], [-100, 9, -100, -100, -100]]
    assert int(batch["tokens"]) == 7 and "attention_mask" not in batch


# Rounds --------------------------------------------------------------------------------------------------------------


UNEVEN = [{"prompt": "abcd"[:n] + "=", "completion": "h" * m} for n, m in ((1, 1), (2, 5), (3, 2), (4, 9), (1, 3))]


def packed_sft(**changes: Any) -> Recipe:
    return sft(**{"packing": True, "max_length": 24, "batch_size": 2, "steps": 3, "learning_rate": 3e-3, **changes})


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation": 2}, {"lora_rank": 2}, {"loss": "dft"}], ids=str)
def test_a_packed_round_counts_exactly_what_is_in_its_packs(
    changes: dict[str, Any], trainer: TrlTrainer, folder: Path
) -> None:
    task, recipe = TinyTask(folder, rows=UNEVEN), packed_sft(**changes)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    rows = trainer._load(task).rows.tokenised(_spec(), "good").cut(24)
    sequences = 3 * 2 * recipe.gradient_accumulation
    packs = draw_packs({"good": rows}, {"good": 1.0}, 24, sequences, 3)
    session.advance()
    report, checkpoint = session.result()
    assert checkpoint is not None and report.ended == "finished"
    tokens = sum(len(rows.input_ids[index]) for each in packs for _, index in each)
    assert report.training_cost.trained_tokens == tokens <= sequences * 24
    assert report.supervised_tokens == sum(len(UNEVEN[i]["completion"]) + 1 for each in packs for _, i in each)
    bound = trainer.step_cost_bound(task, recipe)
    assert bound.trained_tokens == sequences // 3 * 24
    assert report.training_cost.flops <= bound.times(3).flops
    assert session._meter.sequences == sequences


def _spec() -> Any:
    from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS

    return ALGORITHMS["sft"]


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
@pytest.mark.parametrize("share", [0.4, 0.67, 1.0])
def test_a_packed_round_ends_before_its_limit(unit: str, share: float, trainer: TrlTrainer, folder: Path) -> None:
    task, recipe = TinyTask(folder, rows=UNEVEN), packed_sft()
    bound = trainer.step_cost_bound(task, recipe).in_unit(unit)
    amount = 3 * share * bound
    report, _ = run(trainer, task, recipe, limit=Limit(unit, amount))
    spent = report.training_cost.in_unit(unit)
    assert report.failure is None and report.steps >= math.floor(3 * share)
    assert spent <= amount
    assert report.ended == ("finished" if report.steps == 3 else "budget")
    if report.steps < 3:
        assert spent + bound > amount


def test_a_packed_round_in_seconds_is_cut_after_a_step(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=UNEVEN)
    report, _ = run(trainer, task, packed_sft(steps=2000), limit=Limit("device_seconds", 0.8))
    assert report.ended == "budget" and 1 <= report.steps < 2000
    assert report.training_cost.device_seconds <= 0.8 + max(0.3, report.wall_seconds / report.steps)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_packed_step_is_the_unpacked_step_on_the_same_rows(
    accumulation: int, trainer: TrlTrainer, folder: Path
) -> None:
    """One step on packs moves the weights as TRL's own step on the rows, one to a sequence, moves them.

    Not bit for bit: the same sums are taken in another order, and TRL's own packing cuts rows in two or orders them by
    length. AdamW's first step moves each weight by the learning rate, however small its gradient, so the weights are
    compared where the gradient is not rounding alone.
    """
    task = TinyTask(folder, rows=UNEVEN)
    recipe = packed_sft(steps=1, batch_size=2, gradient_accumulation=accumulation, learning_rate=1e-3)
    rows = trainer._load(task).rows.tokenised(_spec(), "good").cut(24)
    packs = draw_packs({"good": rows}, {"good": 1.0}, 24, 2 * accumulation, 3)
    used = [index for each in packs for _, index in each]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = SFTTrainer(
        model=model,
        args=by_hand("sft", max_steps=1, per_device_train_batch_size=len(used), learning_rate=1e-3, logging_steps=1),
        train_dataset=datasets.Dataset.from_list([dict(UNEVEN[index]) for index in used]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    gradients: dict[str, torch.Tensor] = {}
    for name, value in reference.model.named_parameters():
        value.register_hook(lambda gradient, name=name: gradients.__setitem__(name, gradient.clone()))
    reference.train()
    report, checkpoint = run(trainer, task, recipe)
    assert checkpoint is not None
    assert report.curves[0]["loss"] == pytest.approx(reference.state.log_history[0]["loss"], rel=1e-4)
    assert report.curves[0]["grad_norm"] == pytest.approx(reference.state.log_history[0]["grad_norm"], rel=1e-4)
    state, compared = reference.model.state_dict(), 0
    for name, value in checkpoint.weights.items():
        large = gradients[name].abs() > 1e-5
        compared += int(large.sum())
        torch.testing.assert_close(value[large], state[name][large], rtol=0, atol=2e-6)
    assert compared > 0.7 * sum(value.numel() for value in checkpoint.weights.values())


def test_packs_of_one_row_each_are_trls_own_round(trainer: TrlTrainer, task: TinyTask, folder: Path) -> None:
    """With no room for a second row, a packed round draws rows as an unpacked one does, and differs by rounding."""
    recipe = sft(packing=True, max_length=ROW, steps=3, learning_rate=1e-3)
    demonstrations = task.built.sources["good"].rows["demonstrations"]
    draw = draw_mix({"good": len(demonstrations)}, {"good": 1.0}, 3 * 8 + 24, 3)[:24]
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", max_steps=3, learning_rate=1e-3),
        train_dataset=datasets.Dataset.from_list([dict(demonstrations[index]) for _, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    state, weights = reference.model.state_dict(), trained(trainer, task, recipe)
    for name, value in weights.items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-4)


def test_lora_packs_too_and_packing_changes_the_round(trainer: TrlTrainer, task: TinyTask) -> None:
    adapted = trained(trainer, task, packed_sft(lora_rank=2))
    assert not equal(adapted, trainer.base(task).weights)
    assert not equal(trained(trainer, task, packed_sft()), trained(trainer, task, packed_sft(packing=False)))
    assert equal(trained(trainer, task, packed_sft()), trained(trainer, task, packed_sft()))


def test_a_pool_whose_rows_do_not_fit_is_refused_as_without_packing(trainer: TrlTrainer, folder: Path) -> None:
    task = TinyTask(folder, rows=[{"prompt": "abcdefgh=", "completion": "a"}])
    for packs in (True, False):
        with pytest.raises(ValueError, match=r"^max_length: at 4 all 1 rows of source 'good' keep no completion token"):
            trainer.begin(task, packed_sft(max_length=4, packing=packs), trainer.base(task), 3)


# The dft loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("changes", [{}, {"batch_size": 4, "gradient_accumulation": 2}], ids=str)
def test_both_losses_are_trls_own(
    loss: str, changes: dict[str, Any], trainer: TrlTrainer, task: TinyTask, folder: Path, sft_weights: Weights
) -> None:
    demonstrations = task.built.sources["good"].rows["demonstrations"]
    draw = draw_mix({"good": len(demonstrations)}, {"good": 1.0}, 32, 3)
    names = {"batch_size": "per_device_train_batch_size", "gradient_accumulation": "gradient_accumulation_steps"}
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft", loss_type=loss, **{names[name]: value for name, value in changes.items()}),
        train_dataset=datasets.Dataset.from_list([dict(demonstrations[index]) for _, index in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    state, weights = reference.model.state_dict(), trained(trainer, task, sft(loss=loss, **changes))
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    if not changes:
        assert equal(weights, sft_weights) == (loss == "nll")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changes", [{}, {"loss": "dft"}, {"lora_rank": 2}], ids=str)
def test_a_packed_round_on_a_real_card(changes: dict[str, Any], precision: str, task: TinyTask) -> None:
    card = TrlTrainer(device="cuda", precision=precision)
    weights = trained(card, task, packed_sft(**changes))
    assert card._load(task).packs is True
    assert not equal(weights, card.base(task).weights)


def test_packs_longer_than_the_models_positions_are_refused(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = sft(packing=True, max_length=100_000)
    message = (
        "max_length: packs of up to 100000 tokens are longer than the 128 positions of the model; set it to at most "
        "128, or lower for short rows."
    )
    with pytest.raises(ValueError) as caught:
        trainer.begin(task, recipe, trainer.base(task), 0)
    assert str(caught.value) == message
