"""Every architecture passes the same tests: sampling, rounds with all weights and with LoRA, weights kept, costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.sampling import end_token_ids, sample_completions
from posttrain_gym.inner_trainers.testing import TINY_ARCHITECTURES, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.adapters import PREFIX, merge
from posttrain_gym.inner_trainers.trl.models import load_weights
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters
from tests.trl_fixtures import no_worker_left  # noqa: F401
from tests.trl_rounds import ROW, EveryKind, equal, graded, run, trained

TIED = {"llama": True, "qwen2": False, "qwen3": True, "gpt2": True, "gemma": True, "gemma2": True, "gemma3_text": True}
TIED |= {"mistral": False, "phi3": False, "gpt_neox": False}
STEPS, BATCH = 2, 8


class Case:
    """One architecture's folder, task and trainer."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = write_tiny_checkpoint(folder, architecture=name, initializer_range=0.3)
        self.task = EveryKind(self.folder, self.folder, graded)
        self.trainer = TrlTrainer()

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=TINY_ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


def recipe(algorithm: str, lora_rank: int = 0, **changes: Any) -> Recipe:
    settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-2, "num_generations": 4, **changes}
    return Recipe(algorithm, {"good": 1.0}, lora_rank=lora_rank, **settings)


def linear_weights(model: Any) -> set[str]:
    """Return the names of the matrices that LoRA adapts: all but embeddings and head."""
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }


def test_the_table_of_tied_weights_has_every_architecture() -> None:
    assert TIED.keys() == TINY_ARCHITECTURES.keys()


def test_padded_batches_have_the_greedy_tokens_of_each_prompt_alone(case: Case) -> None:
    """Prompts of 2 to 19 tokens with 12 more: longer than the window of the models that have one."""
    model, tokenizer = case.model(), AutoTokenizer.from_pretrained(case.folder)
    prompts = ["a=", "abcdefgh0123=", "abcabcabcabcabcabc=", "h>", "gg1=", "=" * 11]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, ids.shape[1] :].tolist()
        expected.append(tokenizer.decode(new, skip_special_tokens=True))
    for batch in (64, 4):
        drawn = sample_completions(
            model, tokenizer, prompts, samples=2, max_new_tokens=12, temperature=1e-4, seed=0, batch_sequences=batch
        )
        assert drawn.texts == [[text] * 2 for text in expected]
        assert drawn.prompt_tokens == 2 + 13 + 19 + 2 + 4 + 11


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_round_trains_counts_and_keeps_its_weights(
    case: Case, algorithm: str, lora_rank: int, tmp_path: Path
) -> None:
    trainer, task = case.trainer, case.task
    base = trainer.base(task)
    before = {name: value.clone() for name, value in base.weights.items()}
    asked = recipe(algorithm, lora_rank)
    report, checkpoint = run(trainer, task, asked)
    assert report.failure is None, report.failure
    assert checkpoint is not None
    assert (report.steps, report.ended) == (STEPS, "finished")
    assert equal(base.weights, before)  # a round changes its own copy

    # costs, by hand
    cost, sequences = report.training_cost, STEPS * BATCH
    parameters = sum(value.numel() for value in case.model().parameters())  # tied weights once
    assert trainer.parameters(task) == parameters
    if algorithm == "sft":
        assert (cost.trained_tokens, cost.generated_tokens, cost.scored_tokens) == (sequences * ROW, 0, 0)
        assert report.supervised_tokens == sequences * 2  # the letter and the end token
    elif algorithm == "dpo":
        assert cost.trained_tokens == sequences * (ROW + ROW + 1)  # the rejected side has two letters
        assert cost.scored_tokens == cost.trained_tokens  # by the reference
    else:
        assert sequences <= cost.generated_tokens <= sequences * 4
        assert cost.trained_tokens == sequences * 4 + cost.generated_tokens  # prompts of four tokens
    per_trained = 6 * parameters
    if lora_rank:
        per_trained = 4 * parameters + 6 * lora_parameters(case.model(), lora_rank)
    assert cost.flops == pytest.approx(
        per_trained * cost.trained_tokens + 2 * parameters * (cost.generated_tokens + cost.scored_tokens)
    )
    bound = trainer.step_cost_bound(task, asked)
    assert cost.flops <= STEPS * bound.flops

    # weights
    weights = merge(checkpoint.weights)
    changed = {name for name in before if not torch.equal(weights[name], before[name])}
    if lora_rank:
        assert changed == linear_weights(case.model())
    else:
        assert len(changed) > 0.9 * len(before)  # a few biases have no gradient
    model = case.model()
    load_weights(model, checkpoint.weights)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embeddings.data_ptr()) == TIED[case.name]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(case.folder).save_pretrained(tmp_path)
    again = TrlTrainer()
    assert equal(again.base(EveryKind(tmp_path, tmp_path, graded)).weights, weights)
    ids = torch.tensor([[3, 4, 5, 11]])
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reloaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_stacked_adapter_is_the_merged_one(case: Case) -> None:
    trainer, task = case.trainer, case.task
    merged = trained(trainer, task, recipe("sft", 2))
    stacked = trained(trainer, task, recipe("sft", 2, lora_adapter="stack"))
    factors = [value for name, value in stacked.items() if name.startswith(f"{PREFIX}.")]
    assert sum(factor.numel() for factor in factors) == lora_parameters(case.model(), 2)
    for name, value in merge(stacked).items():
        torch.testing.assert_close(value, merged[name], rtol=1e-5, atol=1e-6)


def test_packing_is_allowed_where_packed_rows_have_the_logits_they_have_alone(case: Case) -> None:
    """Rows longer than the window of the models that have one, unlike those the decision is made on."""
    model, rows = case.model(), [[3 + (7 * i + i * i) % 18 for i in range(size)] for size in (21, 15, 30)]
    with torch.no_grad():
        packed = model(
            input_ids=torch.tensor([[token for row in rows for token in row]]),
            position_ids=torch.tensor([[i for row in rows for i in range(len(row))]]),
            use_cache=False,
        ).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows])
    apart = bool((packed - alone).abs().max() <= 1e-4 * alone.abs().max())
    assert apart
    weights = trained(case.trainer, case.task, recipe("sft", packing=True, max_length=24))
    assert not equal(weights, case.trainer.base(case.task).weights)


def test_a_copy_of_the_model_stays_tied_when_it_is_trained(case: Case) -> None:
    case.trainer.base(case.task)
    loaded = case.trainer._load(case.task).model
    model = loaded.with_weights(loaded.base_weights)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
        with torch.no_grad():
            for value in one.parameters():
                value -= 0.1 * (0 if value.grad is None else value.grad)
        same = torch.equal(one.get_output_embeddings().weight, one.get_input_embeddings().weight)
        assert same == TIED[case.name]
    assert equal(case.trainer.base(case.task).weights, loaded.base_weights)


def test_several_end_tokens_end_a_completion(case: Case) -> None:
    model, tokenizer = case.model(), AutoTokenizer.from_pretrained(case.folder)
    model.generation_config.eos_token_id = [1, *range(3, 13)]
    assert end_token_ids(model, tokenizer) == [1, *range(3, 13)]
    drawn = sample_completions(model, tokenizer, ["abc=", "b="], samples=50, max_new_tokens=12, temperature=3.0, seed=0)
    letters = {tokenizer.decode([i]) for i in range(3, 13)}
    assert drawn.clipped < 100
    assert not any(set(text) & letters for texts in drawn.texts for text in texts)  # an end token is in no text
