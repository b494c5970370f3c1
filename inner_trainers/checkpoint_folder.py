"""Looks at a checkpoint folder's files before anything is loaded: is it a causal language model that can be trained?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the architecture names that write text from left to right, encoder-decoders apart."""

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHER_FRAMEWORKS = ("tf_model.h5", "flax_model.msgpack")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "*.model")
_POINTER = b"version https://git-lfs.github.com/spec/"
_SHOWN = 8


def require_checkpoint(folder: Path, role: str = "base checkpoint") -> None:
    """Refuse a folder that is not one `save_pretrained` wrote of a causal language model and its tokenizer.

    Reads the configuration and the headers of the weight files; no weights, and it imports no library for them.

    Args:
        folder: the folder.
        role: what messages call it.

    Raises:
        ValueError: says which file is missing or what the folder holds instead, and what to do.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist, so it has no config.json"
        raise ValueError(
            f"{role}: {folder} {what}; expected a folder written by save_pretrained, with config.json, weights and "
            "tokenizer."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(_without_config(folder, role))
    _require_trainable(_config(folder, role), folder, role)
    _require_weights(folder, role)
    if not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{role}: {folder} holds no tokenizer; save the model's own there with tokenizer.save_pretrained."
        )


def _without_config(folder: Path, role: str) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{role}: {folder} has no config.json, it holds adapters alone; merge them into their base model first "
            "(PeftModel.from_pretrained, merge_and_unload, then save_pretrained of model and tokenizer) and name that "
            "folder."
        )
    if any(folder.glob("*.gguf")):
        return (
            f"{role}: {folder} has no config.json, it holds a GGUF file; load it with transformers (gguf_file=...), "
            "copy its weights into a plain model, and name the folder that save_pretrained writes of that."
        )
    inside = sorted(entry.name for entry in folder.iterdir())
    below = [entry.parent.name for entry in sorted(folder.glob("*/config.json"))]
    shown = ", ".join(inside[:_SHOWN]) + (", …" if len(inside) > _SHOWN else "") if inside else "nothing"
    hint = f" Did you mean {folder / below[-1]}?" if below else ""
    return (
        f"{role}: {folder} has no config.json (it holds {shown}); expected a folder written by save_pretrained.{hint}"
    )


def _config(folder: Path, role: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{role}: {folder} has a config.json that cannot be read ({error}); copy the folder again."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"{role}: {folder} has a config.json that is no mapping; copy the folder again.")
    return config


def _require_trainable(config: dict[str, Any], folder: Path, role: str) -> None:
    kind, quantised = config.get("model_type", "unknown"), config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ValueError(
            f"{role}: {folder} holds quantised weights (method {method!r}), which rounds here cannot train, with LoRA "
            "neither; name the model they were made from, or load them, dequantise, and save the plain weights."
        )
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"{role}: {folder} holds an encoder-decoder model ({kind}); expected a causal language model, which "
            "continues its prompt."
        )
    architectures = [str(name) for name in config.get("architectures") or []]
    if architectures and not any(name.endswith(HEADS) for name in architectures):
        raise ValueError(
            f"{role}: {folder} holds {' and '.join(architectures)}, which writes no text; expected a causal language "
            "model, whose architecture ends in ForCausalLM or LMHeadModel. Save the model with its language-model "
            "head (AutoModelForCausalLM)."
        )


def _require_weights(folder: Path, role: str) -> None:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = _shards(index, folder, role)
    else:
        raise ValueError(_without_weights(folder, role))
    for file in files:
        _require_whole(file, role)


def _shards(index: Path, folder: Path, role: str) -> list[Path]:
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{role}: {folder} has a {index.name} that cannot be read ({type(error).__name__}: {error}); copy the "
            "folder again."
        ) from None
    strange = [name for name in named if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise ValueError(f"{role}: {folder}: {index.name} names {strange[0]!r}, which is no file of the folder.")
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{role}: {folder} lacks {len(missing)} of the {len(named)} weight files that {index.name} names, "
            f"for example {missing[0]}; copy the folder again."
        )
    return [folder / name for name in named]


def _without_weights(folder: Path, role: str) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        return (
            f"{role}: {folder} has its weights as {pickled[0]} alone, a pickle, which can run any code when it is "
            "opened and is not; where you trust it, load it with AutoModelForCausalLM and write it anew with "
            "save_pretrained, which makes safetensors."
        )
    others = [name for name in _OTHER_FRAMEWORKS if (folder / name).is_file()]
    if others:
        return (
            f"{role}: {folder} has its weights as {others[0]} alone; expected model.safetensors, as save_pretrained "
            "writes it from PyTorch."
        )
    return f"{role}: {folder} holds no weights (model.safetensors, or its shards with an index); copy the folder again."


def _require_whole(file: Path, role: str) -> None:
    """Compare a safetensors file's size with what its header says, which shows copies that were cut short."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
        if start == _POINTER:
            raise ValueError(
                f"{role}: {file.parent} has a Git LFS pointer in the place of {file.name}; run `git lfs pull` there."
            )
        length = int.from_bytes(start[:8], "little")
        said = -1
        if size >= 8 and length <= size - 8:
            opened.seek(8)
            try:
                header = json.loads(opened.read(length))
                said = (
                    8
                    + length
                    + max(
                        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
                        default=0,
                    )
                )
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                pass
        if said != size:
            raise ValueError(
                f"{role}: {file.parent} has a {file.name} that is cut short or damaged ({size:,} bytes); copy it again."
            )
