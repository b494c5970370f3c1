"""Evaluation: the statistics by hand, and samples that are drawn from the model's own distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from posttrain_gym.inner_trainers.base import DimensionScore, Scorecard, student_t
from posttrain_gym.inner_trainers.evaluation import (
    Evaluator,
    completion_flags,
    smaller_benchmark,
    summarise_dimension,
    unbiased_pass_at_k,
)
from posttrain_gym.inner_trainers.faults import ScorerFault
from posttrain_gym.inner_trainers.sampling import end_token_ids, sample_completions
from posttrain_gym.inner_trainers.tasks.base import Benchmark, Item
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters

PROMPTS = ["a=", "abcdefgh0123=", "=", "bb=", "h0>h0>h0>h0>="]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def benchmark(score: Callable[[Item, str], Any] = lambda item, text: 0.0, **changes: Any) -> Benchmark:
    return Benchmark(
        **{
            "weights": {"x": 0.25, "y": 0.75},
            "validation": [Item("a=", "x"), Item("ab=", "y"), Item("b=", "x")],
            "test": [Item("c=", "x"), Item("d=", "y")],
            "score": score,
            "max_new_tokens": 3,
            **changes,
        }
    )


# Statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_the_enumeration_of_all_subsets(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([1] * right + [0] * (samples - right), k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert unbiased_pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12)


def test_a_dimension_by_hand() -> None:
    scores = np.array([[1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    formed = np.array([[True, True, True, False], [False] * 4, [True] * 4])
    entry = summarise_dimension(scores, formed, k=2)
    means = [0.625, 0.0, 1.0]
    mean = sum(means) / 3
    assert entry.mean == pytest.approx(mean)
    deviation = math.sqrt(sum((m - mean) ** 2 for m in means) / 2)
    assert entry.standard_error == pytest.approx(deviation / math.sqrt(3))
    assert entry.pass_at_1 == pytest.approx(6 / 12)  # 0.5 is no full score
    assert entry.pass_at_k == pytest.approx((5 / 6 + 0 + 1) / 3)  # of the 6 pairs of (1, 0, 0, 1), one has no 1
    assert entry.format_rate == pytest.approx(7 / 12)


def test_one_item_does_not_claim_to_be_certain() -> None:
    entry = summarise_dimension(np.array([[1.0, 1.0]]), np.array([[True, True]]), k=1)
    assert (entry.mean, entry.standard_error) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": ()}, "evaluator.seeds: expected at least one seed."),
        ({"seeds": (3, 3)}, "evaluator.seeds: (3, 3) repeats a seed, which would draw the same samples twice."),
        (
            {"seeds": (0.5,), "k": 1},
            "evaluator.seeds: expected an integer in [0, 9223372036854775807], got 0.5 (float).",
        ),
        ({"k": 9}, "evaluator.k: expected an integer in [1, 8], got 9."),
        ({"samples_per_seed": 0}, "evaluator.samples_per_seed: expected an integer in [1, 100000], got 0."),
        ({"temperature": 0}, "evaluator.temperature: expected a number in (0, 10], got 0."),
        ({"batch_sequences": 0}, "evaluator.batch_sequences: expected an integer in [1, 1e+06], got 0."),
    ],
)
def test_evaluator_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Evaluator(**settings)
    assert str(caught.value).replace("1000000]", "1e+06]") == message


# Sampling ------------------------------------------------------------------------------------------------------------


def drawn(model: Any, tokenizer: Any, prompts: list[str] = PROMPTS, **changes: Any) -> Any:
    settings = {"samples": 4, "max_new_tokens": 6, "temperature": 1.0, "seed": 0, **changes}
    return sample_completions(model, tokenizer, prompts, **settings)


def test_sampling_is_decided_by_its_seed_and_moves_no_global_generator(model: Any, tokenizer: Any) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    )
    first = drawn(model, tokenizer)
    torch.rand(7)
    torch.manual_seed(3)
    assert (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ) == before
    assert drawn(model, tokenizer) == first
    assert drawn(model, tokenizer, seed=1).texts != first.texts


def tiny_llama(folder: Path) -> Path:
    write_tiny_checkpoint(folder)
    config = LlamaConfig.from_pretrained(folder, initializer_range=0.3)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_gpt2(folder: Path) -> Path:
    write_tiny_checkpoint(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def tiny_qwen2(folder: Path) -> Path:
    write_tiny_checkpoint(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


ARCHITECTURES = [tiny_llama, tiny_gpt2, tiny_qwen2]


@pytest.mark.parametrize("build", ARCHITECTURES)
def test_padding_and_dropped_rows_change_no_prompts_greedy_completion(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = build(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = [1, *range(3, 9)]  # many ends, so that rows finish at different times
    ends = end_token_ids(model, tokenizer)
    assert ends == [1, *range(3, 9)]
    prompts = [*PROMPTS, *(f"{a}{b}>" for a, b in itertools.product("aceg", "0123456789"))]
    expected, lengths = [], set()
    for prompt in prompts:  # each alone, by the library's own greedy search
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, ids.shape[1] :].tolist()
        length = next((i for i, token in enumerate(new) if token in ends), len(new))
        lengths.add(length)
        expected.append(tokenizer.decode(new[:length], skip_special_tokens=True))
    assert len(lengths) >= 3
    for batch in (1024, 7):
        texts = drawn(model, tokenizer, prompts, samples=3, temperature=1e-4, batch_sequences=batch).texts
        assert texts == [[text] * 3 for text in expected]


@pytest.mark.parametrize("build", ARCHITECTURES)
def test_a_padded_prompt_is_sampled_from_its_own_softmax(build: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = build(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer("a=", return_tensors="pt")).logits[0, -1]
    probabilities = torch.softmax(logits / 0.7, dim=-1)
    texts = drawn(
        model, tokenizer, ["abcdefgh0123=", "a="], samples=4000, max_new_tokens=1, temperature=0.7, batch_sequences=8000
    ).texts[1]
    for token in "abcdefgh=0123456789>":
        p = float(probabilities[tokenizer.convert_tokens_to_ids(token)])
        assert texts.count(token) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000) + 1e-4)


def test_tokens_are_counted_by_hand(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    letter = {c: tokenizer.convert_tokens_to_ids(c) for c in "abcdefgh"}
    end = tokenizer.eos_token_id
    # the shorter prompt comes first in the batch; finished rows leave it
    script = iter(
        [
            [end, letter["a"], letter["b"], letter["c"]],
            [end, letter["a"], letter["a"]],
            [end, letter["d"]],
        ]
    )
    monkeypatch.setattr(torch, "multinomial", lambda *args, **kwargs: torch.tensor(next(script))[:, None])
    result = drawn(model, tokenizer, ["abc=", "a="], samples=2, max_new_tokens=3)
    assert result.texts == [["ba", "cad"], ["", "a"]]
    assert result.generated_tokens == 1 + 2 + 3 + 3  # end tokens are sampled too
    assert result.prompt_tokens == 4 + 2
    assert (result.empty, result.clipped) == (1, 1)


def test_a_prompt_without_tokens_is_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="prompt '' has no tokens"):
        drawn(model, tokenizer, ["a=", ""])


def test_a_model_without_an_end_token_runs_to_the_limit(tiny: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)
    tokenizer.eos_token = tokenizer.pad_token = None
    model.generation_config.eos_token_id = None
    assert end_token_ids(model, tokenizer) == []
    result = drawn(model, tokenizer)
    assert result.clipped == len(PROMPTS) * 4
    assert result.generated_tokens == len(PROMPTS) * 4 * 6


# Scorecards ----------------------------------------------------------------------------------------------------------


def test_a_scorecard_by_hand(model: Any, tokenizer: Any) -> None:
    evaluator = Evaluator(seeds=(3, 8), samples_per_seed=2, k=2)
    marks: dict[str, list[Any]] = {
        "a=": [1.0, 0.0, 0.0, 0.0],
        "ab=": [1.0, True, 0.5, np.float32(0.5)],
        "b=": [1.0] * 4,
    }
    queue = {prompt: iter(values) for prompt, values in marks.items()}
    seen: list[str] = []

    def score(item: Item, text: str) -> Any:
        seen.append(item.prompt)
        return next(queue[item.prompt])

    card, generated, scored = evaluator.evaluate(
        model, tokenizer, benchmark(score, well_formed=lambda item, text: item.dimension == "y"), "validation"
    )
    assert sorted(seen) == ["a="] * 4 + ["ab="] * 4 + ["b="] * 4  # no test item is ever shown to it
    assert list(card.dimensions) == ["x", "y"]
    assert card.dimensions["x"].mean == pytest.approx((0.25 + 1.0) / 2)
    assert card.dimensions["x"].pass_at_k == pytest.approx((0.5 + 1.0) / 2)
    assert card.dimensions["x"].format_rate == 0.0
    assert card.dimensions["y"].mean == pytest.approx(0.75)
    assert card.dimensions["y"].pass_at_k == pytest.approx(5 / 6)
    assert card.dimensions["y"].format_rate == 1.0
    assert card.score == pytest.approx(0.25 * 0.625 + 0.75 * 0.75)
    error_x = 0.75 / math.sqrt(2) / math.sqrt(2)  # standard deviation of (0.25, 1.0) over root 2
    assert card.dimensions["x"].standard_error == pytest.approx(error_x)
    assert card.standard_error == pytest.approx(math.sqrt((0.25 * error_x) ** 2 + (0.75 * 0.5) ** 2))
    assert (card.split, card.k, card.items, card.samples) == ("validation", 2, 3, 4)
    assert scored == 2 * (2 + 3 + 2)  # each prompt is read once per seed
    assert 12 <= generated <= 36
    assert Scorecard.from_dict(card.to_dict()) == card


def test_validation_and_test_never_meet(model: Any, tokenizer: Any) -> None:
    for split, prompts in (("validation", {"a=", "ab=", "b="}), ("test", {"c=", "d="})):
        seen: list[str] = []

        def score(item: Item, text: str, seen: list[str] = seen) -> float:
            seen.append(item.prompt)
            return 0.0

        card, _, _ = Evaluator().evaluate(model, tokenizer, benchmark(score), split)
        assert set(seen) == prompts
        assert (card.split, card.items) == (split, len(prompts))
    with pytest.raises(ValueError, match=r"Did you mean 'test'\?"):
        Evaluator().evaluate(model, tokenizer, benchmark(), "tests")


@pytest.mark.parametrize("value", [2.0, -0.1, float("nan"), float("inf"), None, "1"])
def test_a_scorer_outside_its_range_is_an_error_that_names_the_prompt(value: Any, model: Any, tokenizer: Any) -> None:
    def score(item: Item, text: str) -> Any:
        return value if item.prompt == "ab=" else 1.0

    with pytest.raises(ValueError, match=r"benchmark score for prompt 'ab=': expected a number in \[0, 1\], got"):
        Evaluator().evaluate(model, tokenizer, benchmark(score), "validation")


def test_the_trainer_charges_what_was_sampled_and_keeps_the_bases_score(tiny: Path) -> None:
    task, trainer = TinyTask(tiny), TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))
    base = trainer.base(task)
    card, cost = trainer.evaluate(task, base, "validation")
    assert trainer.evaluate(task, base, "validation") == (card, cost)  # the clock's entry too: it was not run again
    assert cost.trained_tokens == 0
    assert cost.scored_tokens == 16 * 4
    assert 16 * 2 <= cost.generated_tokens <= 16 * 2 * 4
    assert cost.flops == 2.0 * trainer.parameters(task) * (cost.generated_tokens + cost.scored_tokens)
    bound = trainer.evaluation_cost_bound(task, "validation")
    assert (bound.generated_tokens, bound.scored_tokens) == (16 * 2 * 4, 16 * 4)
    assert bound.flops == 2.0 * trainer.parameters(task) * (16 * 2 * 4 + 16 * 4)
    other = replace(base, id="other", weights={name: value * 9 for name, value in base.weights.items()})
    changed, _ = trainer.evaluate(task, other, "validation")
    assert changed != card
    assert trainer.evaluate(task, replace(base, id="again"), "validation")[0] == card


@pytest.mark.parametrize(("always", "empty", "clipped"), [(0, 1.0, 0.0), (1, 1.0, 0.0), (3, 0.0, 1.0)])
def test_a_model_that_only_pads_or_never_ends_is_flagged(
    always: int, empty: float, clipped: float, tmp_path: Path
) -> None:
    """A generation config that lists the pad id among the end ids stops a model that emits padding at once."""
    task = TinyTask(write_tiny_checkpoint(tmp_path, eos_ids=[1, 0]))
    trainer = TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))
    base = trainer.base(task)
    resident = trainer._load(task)

    def only(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -1e4)
        forced[..., always] = 0.0
        return forced

    resident.model.template.lm_head.register_forward_hook(only)
    card, _ = trainer.evaluate(task, base, "validation")
    assert (card.empty_share, card.clipped_share) == (empty, clipped)
    flags = completion_flags(card)
    assert len(flags) == 1
    assert flags[0].startswith("100 % of the evaluated completions " + ("are empty" if empty else "reach the length"))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft corrects it by itself
def test_lora_parameters_of_another_architecture_equal_pefts_count(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for build in ARCHITECTURES:
        model = AutoModelForCausalLM.from_pretrained(build(tmp_path / build.__name__))
        counted = lora_parameters(model, 4)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        assert counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert counted > 0


@pytest.mark.parametrize(("fault", "said"), [(KeyError("x"), "KeyError: 'x'"), (SystemExit(0), "SystemExit: 0")])
@pytest.mark.parametrize("part", ["score", "well_formed"])
def test_a_scorer_that_raises_or_exits_is_one_fault_that_names_item_and_line(
    model: Any, tokenizer: Any, fault: BaseException, said: str, part: str
) -> None:
    def broken(item: Item, text: str) -> Any:
        raise fault

    with pytest.raises(ScorerFault, match=rf"{part} raised {said} \(test_evaluation\.py, line \d+\) for prompt 'a='"):
        Evaluator(seeds=(0,), samples_per_seed=1, k=1).evaluate(
            model, tokenizer, benchmark(**{part: broken}), "validation"
        )


def test_quick_items_are_drawn_from_all_alike_where_they_are_not_stratified() -> None:
    names = ["a"] * 90 + ["b"] * 9 + ["c"]
    items = [Item(f"q{place}", name) for place, name in enumerate(names)]
    whole = Benchmark(
        {"a": 0.5, "b": 0.25, "c": 0.25}, items, [Item(f"t{name}", name) for name in "abc"], lambda item, text: 0.0
    )
    in_turn = Evaluator().quick_benchmark(whole, 10)
    assert [item.dimension for item in in_turn.validation] == ["a", "b", "c", "a", "b", "a", "b", "a", "b", "a"]
    drawn = Evaluator(stratified=False).quick_benchmark(whole, 10)
    assert len(drawn.validation) == 10
    assert [item.prompt for item in drawn.validation] == [
        items[place].prompt for place in sorted(np.random.default_rng(0).choice(100, size=10, replace=False))
    ]
    assert Evaluator(stratified=False, seeds=(5,), k=4).quick_benchmark(whole, 10).validation != drawn.validation
    shares = np.mean(
        [
            [item.dimension == "a" for item in smaller_benchmark(whole, 10, seed).validation].count(True)
            for seed in range(200)
        ]
    )
    assert shares == pytest.approx(9.0, abs=0.2)  # 90 of 100 items, where taking turns gives 4
    everything = smaller_benchmark(whole, 1000, 0)
    assert (list(everything.validation), dict(everything.weights)) == (items, dict(whole.weights))


def test_dimensions_of_which_no_quick_item_is_drawn_leave_their_weight_to_the_others() -> None:
    items = [Item(f"q{place}", "a" if place < 99 else "b") for place in range(100)]
    whole = Benchmark({"a": 0.2, "b": 0.8}, items, [Item("ta", "a"), Item("tb", "b")], lambda item, text: 0.0)
    seed = next(s for s in range(100) if 99 not in np.random.default_rng(s).choice(100, size=3, replace=False))
    smaller = smaller_benchmark(whole, 3, seed)
    assert dict(smaller.weights) == {"a": 1.0}
    assert [item.prompt for item in smaller.test] == ["ta"]


def test_the_settings_of_an_evaluator_name_only_what_was_chosen_since() -> None:
    assert Evaluator().settings == {
        "seeds": [0, 1],
        "samples_per_seed": 4,
        "k": 8,
        "temperature": 1.0,
        "batch_sequences": 1024,
    }
    assert Evaluator(stratified=False).settings["stratified"] is False
    with pytest.raises(ValueError, match=r"evaluator\.stratified: expected true or false, got 'no'"):
        Evaluator(stratified="no")  # type: ignore[arg-type]


def test_intervals_are_students_t_over_items() -> None:
    from scipy import stats

    for degrees in (1, 2, 3, 4, 7, 15, 31, 127, 10_000):
        assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)
    entry = DimensionScore(0.5, 0.1, 0.5, 0.5, 1.0)
    assert entry.interval(16) == pytest.approx((0.5 - 2.1314 * 0.1, 0.5 + 2.1314 * 0.1), abs=1e-4)
    assert entry.interval(1) == (0.0, 1.0)
    assert DimensionScore(0.95, 0.1, 0.5, 0.5, 1.0).interval(16)[1] == 1.0
    assert DimensionScore(0.0, 0.0, 0.0, 0.0, 1.0).interval(9) == (0.0, 0.0)
