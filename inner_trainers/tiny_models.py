"""Writes tiny language models with random weights, of several architectures, for tests here and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .messages import did_you_mean

TINY_CHARACTERS = "abcdefgh=0123456789>"

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
)
_SHARED_HEADS: Mapping[str, Any] = MappingProxyType({**_SIZES, "num_key_value_heads": 1, "head_dim": 16})

TINY_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _SIZES,
        "qwen2": {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
        "qwen3": _SHARED_HEADS,
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
        "gemma": _SHARED_HEADS,
        # windows shorter than the tests' longest sequences
        "gemma2": {**_SHARED_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "gemma3_text": {
            **_SHARED_HEADS,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "mistral": {**_SHARED_HEADS, "sliding_window": 8, "tie_word_embeddings": False},
        "phi3": {**_SIZES, "tie_word_embeddings": False},
        "gpt_neox": {**_SIZES, "tie_word_embeddings": False},
    }
)
"""Model type of transformers -> settings of a model with two layers."""


def write_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    pad_is_eos: bool = False,
    eos_ids: Any = None,
    architecture: str = "llama",
    adds_bos: bool = False,
    **settings: Any,
) -> Path:
    """Write a random two-layer character model of 14,000 to 30,000 parameters and return its folder.

    Args:
        folder: where `save_pretrained` writes.
        seed: seed of the weights.
        pad_is_eos: whether the end token doubles as padding.
        eos_ids: end-token ids for the generation settings; None for the tokenizer's own.
        architecture: a key of `TINY_ARCHITECTURES`.
        adds_bos: whether the tokenizer puts a beginning token before every text.
        settings: settings of the model's configuration that replace the tiny ones.

    Raises:
        ValueError: an unknown architecture.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in TINY_ARCHITECTURES:
        raise ValueError(
            f"architecture: unknown {architecture!r}; expected one of {', '.join(TINY_ARCHITECTURES)}."
            f"{did_you_mean(architecture, TINY_ARCHITECTURES)}"
        )
    tokenizer = _character_tokenizer(pad_is_eos, adds_bos)
    config: Any = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            **TINY_ARCHITECTURES[architecture],
            **settings,
        },
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    torch.set_rng_state(state)
    if eos_ids is not None:
        model.generation_config.eos_token_id = eos_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _character_tokenizer(pad_is_eos: bool, adds_bos: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>", *(["<bos>"] if adds_bos else [])]
    vocabulary = {token: i for i, token in enumerate([*specials, *TINY_CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    if adds_bos:
        inner.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=128,
        **({"bos_token": "<bos>"} if adds_bos else {}),
    )
