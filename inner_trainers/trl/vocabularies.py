"""Compares the vocabularies of a model and its teacher by their tokenizers and settings; no weights are read."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from ..checkpoint_folder import require_checkpoint
from ..messages import first_line
from .models import load_tokenizer


def vocabulary_difference(model: Path, teacher: Path) -> str:
    """Return a sentence on how a teacher's vocabulary differs from the model's; empty when it does not.

    Distributions over the vocabulary are compared entry by entry, so each id must name the same token in both, and
    both models must have equally many entries, padding included. How text is cut into tokens plays no role.

    Args:
        model: checkpoint folder of the model.
        teacher: checkpoint folder of the teacher.

    Raises:
        ValueError: a folder is missing or damaged; the message names it.
    """
    own, other = _tokens(model, "base checkpoint"), _tokens(teacher, "teacher checkpoint")
    if own != other:
        token, here, there = _example(own, other)
        return (
            f"the model has {len(own)} tokens and the teacher {len(other)}, for example {token!r} is "
            f"{here} in the model and {there} in the teacher"
        )
    entries, taught = _entries(model, "base checkpoint"), _entries(teacher, "teacher checkpoint")
    if entries != taught:
        return (
            f"both tokenizers have the same {len(own)} tokens, but config.json says vocab_size {entries} for the model "
            f"and {taught} for the teacher"
        )
    return ""


def _tokens(folder: Path, role: str) -> dict[str, int]:
    require_checkpoint(folder, role)
    vocabulary: dict[str, int] = load_tokenizer(folder, role).get_vocab()
    return vocabulary


def _entries(folder: Path, role: str) -> int:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)
    except Exception as error:  # the library raises many types for one fact: this file cannot be read
        raise ValueError(
            f"{role}: config.json of {folder} cannot be read ({first_line(error, 200)}); copy the folder again."
        ) from error


def _example(own: dict[str, int], other: dict[str, int]) -> tuple[str, str, str]:
    """Return the differing token of the smallest id, and what it is in the model and in the teacher."""
    different = {token for token, _ in own.items() ^ other.items()}
    token = min(different, key=lambda token: (min(v[token] for v in (own, other) if token in v), token))
    here, there = (f"id {v[token]}" if token in v else "missing" for v in (own, other))
    return token, here, there
