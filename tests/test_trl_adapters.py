"""LoRA adapters, merged or stacked: one function, the right start of the next round, and the trained part counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from posttrain_gym.envs.budget import Budget
from posttrain_gym.envs.decision_space import DecisionSpace
from posttrain_gym.envs.journal import Journal
from posttrain_gym.envs.search import Search
from posttrain_gym.experiments import run_recipe as run_recipe_module
from posttrain_gym.experiments.run_recipe import run_recipe
from posttrain_gym.inner_trainers.base import Checkpoint
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import SingleTask
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.adapters import merge, unstack
from posttrain_gym.inner_trainers.trl.models import load_weights
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters
from tests.preference_rounds import PairTask, preference
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, equal, grpo, run, sft, trained

LINEAR_LAYERS = 2 * 7  # of the tiny model: four of attention and three of the MLP in each of two layers
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def pairs(folder: Path) -> PairTask:
    return PairTask(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> PairTask:
    """A task whose model holds its linear weights as (inputs, outputs), some of them square."""
    made = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, **ids)
    ).save_pretrained(made)
    torch.set_rng_state(state)
    tokenizer.save_pretrained(made)
    return PairTask(made)


def logits(trainer: TrlTrainer, task: TinyTask, weights: Weights) -> torch.Tensor:
    model = trainer._load(task).model.with_weights(weights).eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


def stacked(recipe: Recipe) -> Recipe:
    return Recipe.from_dict({**recipe.to_dict(), "lora_adapter": "stack"})


@pytest.mark.parametrize(
    "recipe",
    [
        sft(lora_rank=3),
        preference("dpo", lora_rank=3),
        preference("kto", lora_rank=3),
        grpo(lora_rank=3),
        grpo(lora_rank=3, algorithm="rloo"),
        grpo(lora_rank=3, algorithm="ppo"),
    ],
    ids=lambda recipe: recipe.algorithm,
)
def test_a_stacked_adapter_is_the_merged_model(
    recipe: Recipe, trainer: TrlTrainer, task: TinyTask, pairs: PairTask
) -> None:
    used = pairs if "pairs" in recipe.mix else task
    base = trainer.base(used).weights
    merged, kept = trained(trainer, used, recipe), trained(trainer, used, stacked(recipe))
    assert len(kept) == len(base) + 2 * LINEAR_LAYERS
    assert all(kept[name] is base[name] for name in base)  # the same tensors, not copies
    factors = {name: value for name, value in kept.items() if name not in base}
    assert sum(value.numel() for value in factors.values()) == 2 * 3 * (4 * (32 + 32) + 3 * (32 + 48))
    assert all(value.device.type == "cpu" and not value.requires_grad for value in factors.values())
    assert merge(kept).keys() == merged.keys() == base.keys()
    for name, value in merge(kept).items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-7)
        assert (value is base[name]) == (not name.endswith("_proj.weight"))
    torch.testing.assert_close(logits(trainer, used, kept), logits(trainer, used, merged), rtol=1e-5, atol=1e-6)
    assert float((logits(trainer, used, kept) - logits(trainer, used, base)).abs().max()) > 1e-4


def test_rounds_stack_on_what_is_there_and_start_from_the_sum(trainer: TrlTrainer, pairs: PairTask) -> None:
    first = trained(trainer, pairs, sft(lora_rank=2, lora_adapter="stack"))
    start, same = Checkpoint("one", first, 1), Checkpoint("one", merge(first), 1)
    recipe = preference("dpo", lora_rank=3, lora_adapter="stack")
    second, from_sum = (trained(trainer, pairs, recipe, begin) for begin in (start, same))
    assert all(second[name] is first[name] for name in first)
    assert len(second) == len(first) + 2 * LINEAR_LAYERS
    plain, updates = unstack(second)
    assert len(plain) == len(trainer.base(pairs).weights)
    ranks = [update.left.shape[1] for update in updates]
    assert ranks == [2] * LINEAR_LAYERS + [3] * LINEAR_LAYERS
    assert equal(merge(second), merge(from_sum))
    for later in (sft(), sft(lora_rank=2), preference("kto")):  # plain weights again, from the same sum
        whole = trained(trainer, pairs, later, start)
        assert whole.keys() == plain.keys()
        assert equal(whole, trained(trainer, pairs, later, same))
        assert not equal(whole, trained(trainer, pairs, later))


def test_a_stacked_checkpoint_is_evaluated_as_its_sum(trainer: TrlTrainer, pairs: PairTask) -> None:
    base = trainer.base(pairs)
    kept = trained(trainer, pairs, sft(lora_rank=4, lora_adapter="stack", steps=12))
    before, _ = trainer.evaluate(pairs, base, "validation")
    card, cost = trainer.evaluate(pairs, Checkpoint("kept", kept, 1), "validation")
    again, merged_cost = trainer.evaluate(pairs, Checkpoint("sum", merge(kept), 1), "validation")
    assert card == again != before
    assert (cost.flops, cost.scored_tokens) == (merged_cost.flops, merged_cost.scored_tokens)
    trainer._load(pairs).base_scores.clear()
    assert trainer.evaluate(pairs, base, "validation")[0] == before  # nothing of the adapter stays behind


def test_the_journal_keeps_stacked_weights(trainer: TrlTrainer, pairs: PairTask, tmp_path: Path) -> None:
    recipe = preference("dpo", lora_rank=2, lora_adapter="stack")
    _, checkpoint = run(trainer, pairs, recipe)
    assert checkpoint is not None
    journal = Journal(tmp_path)
    journal.save_weights(checkpoint)
    read = journal.weights(checkpoint.id)
    assert read is not None and equal(read, checkpoint.weights)
    later = preference("dpo", lora_rank=2, lora_adapter="stack", steps=2)
    after = trained(trainer, pairs, later, Checkpoint(checkpoint.id, read, 1))
    assert equal(after, trained(trainer, pairs, later, checkpoint))
    journal.close()


def test_a_search_that_was_killed_goes_on_from_stacked_weights(
    trainer: TrlTrainer, pairs: PairTask, tmp_path: Path
) -> None:
    fixed = {"lora_adapter": "stack", "lora_rank": 2, "batch_size": 4, "gradient_accumulation": 1, "steps": 3}
    space = DecisionSpace(("dpo",), ("pairs",), {"dpo": ("pairs",)}, parameters={}, fixed=fixed)
    recipes = [Recipe.from_dict({"algorithm": "dpo", "mix": {"pairs": 1.0}, "start": "latest", **fixed})] * 3

    def search(folder: str) -> Search:
        budget = Budget(1e9, max_rounds=5, patience=5)
        return Search(pairs, trainer, space, budget, seed=3, journal=Journal(tmp_path / folder))

    whole = search("whole")
    for recipe in recipes:
        whole.run(recipe)
    killed = search("killed")
    for recipe in recipes[:2]:
        killed.run(recipe)
    del killed
    again = search("killed")
    assert [again.run(recipe).replayed for recipe in recipes] == [True, True, False]
    last = again.weights_of("latest")
    assert (last.depth, len(unstack(last.weights)[1])) == (3, 3 * LINEAR_LAYERS)
    assert last.id == whole.weights_of("latest").id
    assert equal(last.weights, whole.weights_of("latest").weights)


def test_the_reference_of_a_lora_round_is_the_sum_it_starts_from(trainer: TrlTrainer, pairs: PairTask) -> None:
    start = Checkpoint("one", trained(trainer, pairs, sft(lora_rank=2, lora_adapter="stack")), 1)
    report, _ = run(trainer, pairs, preference("dpo", lora_rank=2), start)
    whole, _ = run(trainer, pairs, preference("dpo"), start)
    assert report.curves[0]["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert report.curves[0]["logps/chosen"] == pytest.approx(whole.curves[0]["logps/chosen"], rel=1e-6)
    from_base, _ = run(trainer, pairs, preference("dpo"))
    assert abs(from_base.curves[0]["logps/chosen"] - whole.curves[0]["logps/chosen"]) > 0.01


def test_adapters_train_in_a_model_that_holds_its_weights_transposed(trainer: TrlTrainer, gpt2: PairTask) -> None:
    template = trainer._load(gpt2).model.template
    layer = (16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)  # attention in and out, MLP in and out
    by_hand = 2 * 3 * layer  # layers x rank x (inputs + outputs)
    assert lora_parameters(template, 3) == by_hand
    recipe = preference("dpo", lora_rank=3)
    session = trainer.begin(gpt2, stacked(recipe), trainer.base(gpt2), 3)
    session.advance()
    adapted = session._trainer.model
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == by_hand
    with torch.no_grad():
        expected = adapted.eval()(input_ids=IDS).logits
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
    cost, n = report.training_cost, trainer.parameters(gpt2)
    assert cost.flops == (4 * n + 6 * by_hand) * cost.trained_tokens + 2 * n * cost.scored_tokens
    kept, merged = checkpoint.weights, trained(trainer, gpt2, recipe)
    _, updates = unstack(kept)
    assert {tuple(kept[u.name].shape) for u in updates} == {(16, 48), (16, 16), (16, 64), (64, 16)}
    torch.testing.assert_close(logits(trainer, gpt2, kept), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(trainer, gpt2, merged), expected, rtol=1e-4, atol=1e-5)
    assert float((expected - logits(trainer, gpt2, trainer.base(gpt2).weights)).abs().max()) > 1e-4
    twice = trained(trainer, gpt2, stacked(recipe), Checkpoint("one", kept, 1))
    torch.testing.assert_close(logits(trainer, gpt2, twice), logits(trainer, gpt2, merge(twice)))
    assert not torch.equal(logits(trainer, gpt2, twice), logits(trainer, gpt2, kept))
    whole = trained(trainer, gpt2, preference("kto"), Checkpoint("one", kept, 1))
    assert equal(whole, trained(trainer, gpt2, preference("kto"), Checkpoint("one", merge(kept), 1)))


def test_a_saved_recipe_run_holds_the_sum(
    trainer: TrlTrainer, pairs: PairTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the model's weights alone, as any loader takes them."""
    recipe = preference("dpo", lora_rank=2, lora_adapter="stack", steps=2)
    path, saved = tmp_path / "recipe.yaml", tmp_path / "model.safetensors"
    path.write_text(json.dumps(recipe.to_dict()))  # YAML reads JSON
    monkeypatch.setattr(run_recipe_module, "resolve_task", lambda name: SingleTask(pairs))
    done = run_recipe(path, "pairs", 0, 3, saved)
    assert done["failure"] is None
    assert equal(load_file(saved), merge(trained(trainer, pairs, recipe)))


def test_weights_that_do_not_fit_together_are_refused(trainer: TrlTrainer, pairs: PairTask) -> None:
    kept = trained(trainer, pairs, sft(lora_rank=2, lora_adapter="stack", steps=1))
    template = trainer._load(pairs).model.template
    left = next(name for name in kept if ".left." in name)
    right, weight = left.replace(".left.", ".right."), left.split(".", 3)[3]
    cases: list[tuple[dict[str, Any], str]] = [
        ({n: v for n, v in kept.items() if n != right}, "stacked adapter 0: expected both factors and the weight"),
        ({n: v for n, v in kept.items() if n != weight}, "and no such weight"),
        ({**kept, left: kept[left][:-1]}, r"has shape \(32, 32\), its factors \(31, 2\) and \(2, 32\)"),
    ]
    for weights, message in cases:
        with pytest.raises(ValueError, match=message):
            load_weights(template, weights)


def test_without_an_adapter_the_two_ways_are_one(trainer: TrlTrainer, task: TinyTask, sft_weights: Weights) -> None:
    assert equal(trained(trainer, task, sft(lora_adapter="stack")), sft_weights)
