"""Checkpoint folders as people have them: what can be trained loads rightly, the rest is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from posttrain_gym.inner_trainers.checkpoint_folder import require_checkpoint
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TINY_ARCHITECTURES, TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl.models import load_model
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_fixtures import no_worker_left  # noqa: F401
from tests.trl_rounds import EveryKind, equal, graded, run, sft

CPU = torch.device("cpu")
BERT: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


def configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def without(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def sharded(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    without(folder, "model.safetensors")


# Refused before anything loads ---------------------------------------------------------------------------------------


def adapters_alone(folder: Path) -> None:
    without(folder, "config.json", "model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def pickle_alone(folder: Path) -> None:
    torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    without(folder, "model.safetensors")


def shard_missing(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def shard_elsewhere(folder: Path) -> None:
    sharded(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00002', '"../model-00002'))


def empty_index(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def gguf_alone(folder: Path) -> None:
    without(folder, "config.json", "model.safetensors")
    (folder / "weights.gguf").write_bytes(b"GGUF")


def one_below(folder: Path) -> None:
    below = folder / "checkpoint-500"
    below.mkdir()
    for file in list(folder.iterdir()):
        if file.is_file():
            file.rename(below / file.name)


def encoder_decoder(folder: Path) -> None:
    without(folder, "*.safetensors", "config.json")
    T5ForConditionalGeneration(
        T5Config(vocab_size=23, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(folder)


def masked(folder: Path) -> None:
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(folder)


def headless(folder: Path) -> None:
    LlamaModel(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


def classifier(folder: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapters": (
        adapters_alone,
        "has no config.json, it holds adapters alone; merge them into their base model first "
        "(PeftModel.from_pretrained, merge_and_unload, then save_pretrained of model and tokenizer)",
    ),
    "gguf": (
        gguf_alone,
        "has no config.json, it holds a GGUF file",
    ),
    "below": (
        one_below,
        "has no config.json (it holds checkpoint-500); expected a folder written by save_pretrained. Did",
    ),
    "nothing": (lambda folder: without(folder, "*"), "has no config.json (it holds nothing)"),
    "no mapping": (lambda folder: (folder / "config.json").write_text("[]"), "config.json that is no mapping"),
    "broken": (lambda folder: (folder / "config.json").write_text("{"), "has a config.json that cannot be read"),
    "quantised": (
        lambda folder: configured(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "holds quantised weights (method 'bitsandbytes'), which rounds here cannot train, with LoRA neither; name the "
        "model they were made from",
    ),
    "encoder-decoder": (encoder_decoder, "holds an encoder-decoder model (t5); expected a causal language model"),
    "masked": (masked, "holds BertForMaskedLM, which writes no text; expected a causal language model"),
    "headless": (headless, "holds LlamaModel, which writes no text; expected a causal language model"),
    "classifier": (classifier, "holds LlamaForSequenceClassification, which writes no text"),
    "pickle": (
        pickle_alone,
        "has its weights as pytorch_model.bin alone, a pickle, which can run any code when it is opened and is not; "
        "where you trust it, load it with AutoModelForCausalLM and write it anew with save_pretrained",
    ),
    "other framework": (
        lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"),
        "has its weights as tf_model.h5 alone; expected model.safetensors",
    ),
    "no weights": (
        lambda folder: without(folder, "*.safetensors"),
        "holds no weights (model.safetensors, or its shards",
    ),
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        ),
        "has a Git LFS pointer in the place of model.safetensors; run `git lfs pull` there",
    ),
    "cut": (cut, "has a model.safetensors that is cut short or damaged"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cut short or damaged (0 bytes)"),
    "huge header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 40),
        "cut short or damaged (40 bytes)",
    ),
    "shard missing": (
        shard_missing,
        "lacks 1 of the 5 weight files that model.safetensors.index.json names, for example",
    ),
    "shard elsewhere": (shard_elsewhere, "names '../model-00002-of-00005.safetensors', which is no file of the folder"),
    "no index": (
        empty_index,
        "has a model.safetensors.index.json that cannot be read (KeyError: 'weight_map')",
    ),
    "no tokenizer": (lambda folder: without(folder, "tokenizer*"), "holds no tokenizer; save the model's own there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_of_another_kind_is_refused_with_the_reason(name: str, folder: Path) -> None:
    change, message = REFUSED[name]
    require_checkpoint(folder)  # as it is, it is right
    change(folder)
    with pytest.raises(ValueError) as caught:
        require_checkpoint(folder)
    assert str(caught.value).startswith(f"base checkpoint: {folder}")
    assert message in str(caught.value)
    with pytest.raises(ValueError) as loading:
        TrlTrainer().base(TinyTask(folder))
    assert str(loading.value) == str(caught.value)


def test_a_file_and_nothing_are_no_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is a file; expected a folder written by save_pretrained"):
        require_checkpoint(folder / "config.json")
    with pytest.raises(ValueError, match=r"teacher checkpoint: .* does not exist, so it has no config\.json"):
        require_checkpoint(folder / "nowhere", "teacher checkpoint")


# Refused when it is loaded -------------------------------------------------------------------------------------------


def test_a_model_whose_tokens_see_later_ones_is_refused(folder: Path) -> None:
    """Bert saved with its language-model head: by name it writes text, by its settings every token sees all."""
    BertLMHeadModel(BertConfig(**BERT)).save_pretrained(folder)
    require_checkpoint(folder)
    with pytest.raises(ValueError, match="holds a bert model in which tokens see those after them; expected a causal"):
        load_model(folder, CPU, torch.float32)
    BertLMHeadModel(BertConfig(**BERT, is_decoder=True)).save_pretrained(folder)
    assert load_model(folder, CPU, torch.float32).template.config.model_type == "bert"


def test_code_of_the_folder_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('was run')")
    configured(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ValueError, match=f"base checkpoint: {folder} cannot be loaded"):
        load_model(folder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("tokens", "found", "way"),
    [
        (
            ["x", "y"],
            "has 2 tokens beyond the model's 23 embeddings, for example 'x' with id 23,",
            "; use the model's own",
        ),
        (
            "[PAD]",
            "has 1 tokens beyond the model's 23 embeddings, for example '[PAD]' with id 23,",
            "; set tokenizer.pad_t",
        ),
    ],
)
def test_tokens_without_an_embedding_are_refused(tokens: Any, found: str, way: str, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(tokens, list):
        tokenizer.add_tokens(tokens)
    else:
        tokenizer.add_special_tokens({"pad_token": tokens})
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError) as caught:
        load_model(folder, CPU, torch.float32)
    assert found in str(caught.value)
    assert way in str(caught.value)


def test_a_special_token_without_an_embedding_is_refused_only_where_a_text_has_it(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    assert load_model(folder, CPU, torch.float32).unusable_tokens == ("<image>",)
    report, _ = run(TrlTrainer(), TinyTask(folder), sft())
    assert report.failure is None
    rows = [{"prompt": "a=", "completion": "a"}, {"prompt": "<image>=", "completion": "a"}]
    with pytest.raises(ValueError, match=r"source 'good', demonstrations row 2 holds '<image>', a special token of"):
        run(TrlTrainer(), TinyTask(folder, rows=rows), sft())


# Loaded rightly ------------------------------------------------------------------------------------------------------


def test_more_embeddings_than_tokens_are_padding(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, vocab_size=64, initializer_range=0.3)
    task, trainer = TinyTask(folder), TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=4, k=4))
    card, _ = trainer.evaluate(task, trainer.base(task), "validation")  # ids without a token are sampled, too
    assert card.items == 16
    graded_task = TinyTask(folder, verifier=graded)
    for recipe in (sft(), Recipe("grpo", {"good": 1.0}, steps=1, batch_size=8, num_generations=4)):
        report, _ = run(trainer, graded_task, recipe)
        assert report.failure is None


def test_shards_are_one_model(folder: Path) -> None:
    whole = load_model(folder, CPU, torch.float32).base_weights
    sharded(folder)
    assert len(list(folder.glob("model-*.safetensors"))) == 5
    assert equal(load_model(folder, CPU, torch.float32).base_weights, whole)


def test_half_precision_files_are_trained_in_full(folder: Path) -> None:
    exact = load_file(folder / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    weights = load_model(folder, CPU, torch.float32).base_weights
    for name, value in exact.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], value.to(torch.bfloat16).float())
    _, checkpoint = run(TrlTrainer(), TinyTask(folder), sft(learning_rate=1e-4, steps=1))
    assert checkpoint is not None
    change = max(float((checkpoint.weights[name] - weights[name]).abs().max()) for name in exact)
    assert 0 < change <= 2e-4  # less than bf16 keeps of a weight of 0.05


def test_a_head_that_the_file_lacks_is_tied_only_where_the_settings_say_so(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in weights
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit its config\.json: missing keys lm_head\.weight \(1 in all\)"):
        load_model(folder, CPU, torch.float32)
    configured(folder, tie_word_embeddings=True)
    loaded = load_model(folder, CPU, torch.float32)
    head, embeddings = loaded.template.get_output_embeddings(), loaded.template.get_input_embeddings()
    assert head.weight.data_ptr() == embeddings.weight.data_ptr()


def test_settings_without_padding_take_the_end_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    configured(folder, pad_token_id=None)
    loaded = load_model(folder, CPU, torch.float32)
    assert (loaded.template.config.pad_token_id, loaded.tokenizer.pad_token_id) == (None, loaded.tokenizer.eos_token_id)
    # what pads, on which side, changes no round: both are masked
    plain = write_tiny_checkpoint(folder.parent / "plain")
    configured(plain, pad_token_id=None)
    for algorithm in ("sft", "dpo", "grpo"):
        recipe = Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=8, learning_rate=1e-2, num_generations=4)
        found = []
        for each in (folder, plain):
            report, checkpoint = run(TrlTrainer(), EveryKind(each, each, graded), recipe)
            assert report.failure is None, report.failure
            assert checkpoint is not None
            found.append((checkpoint.weights, report.supervised_tokens, report.training_cost.trained_tokens))
        (weights, *counts), (others, *other_counts) = found
        assert counts == other_counts
        assert equal(weights, others)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo", "distill"])
def test_how_a_model_says_to_sample_changes_no_rollout(algorithm: str, folder: Path) -> None:
    """Its log-probabilities and evaluations are of the plain softmax; the library would follow some of these."""
    recipe = Recipe(algorithm, {"good": 1.0}, steps=2, batch_size=16, learning_rate=1e-2, num_generations=4)
    plain = shutil.copytree(folder, folder.parent / "plain")
    settings = folder / "generation_config.json"
    said = {"no_repeat_ngram_size": 1, "suppress_tokens": [4, 5, 6], "min_new_tokens": 3, "top_k": 2}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **said, "eos_token_id": [1, 7]}))
    ends = plain / "generation_config.json"
    ends.write_text(json.dumps({**json.loads(ends.read_text()), "eos_token_id": [1, 7]}))
    found = []
    for each in (folder, plain):
        report, checkpoint = run(TrlTrainer(), EveryKind(each, each, graded), recipe)
        assert report.failure is None, report.failure
        assert checkpoint is not None
        found.append((checkpoint.weights, report.training_cost.generated_tokens))
    assert found[0][1] == found[1][1]
    assert equal(found[0][0], found[1][0])


def test_a_model_with_images_is_trained_on_text_and_its_image_part_stays(folder: Path) -> None:
    text = {**TINY_ARCHITECTURES["gemma3_text"], "vocab_size": 23, "pad_token_id": 0, "eos_token_id": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    trainer = TrlTrainer()
    for changes in ({"algorithm": "sft"}, {"algorithm": "sft", "lora_rank": 2}, {"algorithm": "grpo"}):
        recipe = sft(num_generations=4, **changes)
        task = TinyTask(folder, verifier=graded)
        report, checkpoint = run(trainer, task, recipe)
        assert report.failure is None, report.failure
        assert checkpoint is not None
        before = trainer.base(task).weights
        changed = {name for name, value in checkpoint.weights.items() if not torch.equal(value, before[name])}
        assert changed
        assert not [name for name in changed if "vision" in name or "projector" in name]
        assert len([name for name in before if "vision" in name]) > 10
