"""Loads a base model and its tokenizer once per process, and hands out copies with other weights."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # every TRL trainer reports home when it is built
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import huggingface_hub.constants
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..checkpoint_folder import require_checkpoint
from ..messages import first_line
from .adapters import Weights, unstack

huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # it may have read the environment before this module

_LEAK_TOLERANCE = 1e-5
"""Largest change of a logit, relative to the largest, when a later token changes: rounding."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is resident in memory.

    Attributes:
        template: the module evaluation runs on; its weights are whatever was loaded last.
        tokenizer: its tokenizer, as saved with the model.
        base_weights: the weights of the checkpoint folder, each storage once.
        parameters: number of parameters.
        unusable_tokens: special tokens of the tokenizer that the model has no embedding for.
    """

    template: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    base_weights: Weights
    parameters: int
    unusable_tokens: tuple[str, ...] = ()

    def with_weights(self, weights: Weights) -> PreTrainedModel:
        """Return a new, independent copy of the model that holds ``weights``."""
        model = copy.deepcopy(self.template)
        load_weights(model, weights)
        return model


def load_model(folder: Path, device: torch.device, dtype: torch.dtype, role: str = "base checkpoint") -> LoadedModel:
    """Load a folder written by `save_pretrained`; safetensors only, no remote code.

    Args:
        folder: the folder.
        device: where the model goes.
        dtype: type of its weights, whatever type they were saved in.
        role: what messages call the folder.

    Raises:
        ValueError: the folder lacks a file, or one is damaged; it holds something that is no causal language model in
            plain weights; the tokenizer is another model's. The message names the folder.
    """
    folder = Path(folder)
    require_checkpoint(folder, role)
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(folder, role)
    try:
        template, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # the hub library raises many types for one fact: this folder cannot be loaded
        raise _cannot_be_loaded(folder, error, role) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):  # the library fills gaps with random numbers
        names = sorted(map(str, loading.get(kind, ())))
        if names:
            raise ValueError(
                f"{role}: {folder} does not fit its config.json: {kind.replace('_', ' ')} "
                f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({len(names)} in all); "
                "write the folder anew with save_pretrained."
            )
    broken = [name for name, value in template.state_dict().items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(
            f"{role}: {folder} holds weights that are not finite numbers, for example {broken[0]}; "
            "copy the folder again."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{role}: the tokenizer of {folder} has no end token (eos_token), so no answer could ever end; "
            "set one and save the tokenizer again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    unusable = _unusable_tokens(template, tokenizer, folder, role)
    # what else a model says about sampling would change rollouts, not their log-probabilities nor evaluations
    said = template.generation_config
    template.generation_config = GenerationConfig(
        bos_token_id=said.bos_token_id, eos_token_id=said.eos_token_id, pad_token_id=said.pad_token_id
    )
    template.to(device).eval()
    _require_causal(template, folder, role)
    return LoadedModel(
        template=template,
        tokenizer=tokenizer,
        base_weights=copy_weights(template),
        parameters=sum(p.numel() for p in template.parameters()),
        unusable_tokens=unusable,
    )


def _unusable_tokens(model: Any, tokenizer: Any, folder: Path, role: str) -> tuple[str, ...]:
    """Return the special tokens that the model has no embedding for, as text models have them for images.

    More embeddings than tokens are common and harmless: they are padded to a round number.

    Raises:
        ValueError: other tokens lack an embedding too, or a special one that sequences are made with.
    """
    rows = model.get_input_embeddings().num_embeddings
    used = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} - used
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    needed = [(number, token) for number, token in beyond if number not in special]
    if not needed:
        return tuple(token for _, token in beyond)
    number, token = needed[0]
    way = "use the model's own tokenizer, or resize_token_embeddings and save the model anew"
    if number == tokenizer.pad_token_id:
        way = f"set tokenizer.pad_token = tokenizer.eos_token and save the tokenizer; or {way}"
    raise ValueError(
        f"{role}: the tokenizer of {folder} has {len(needed)} tokens beyond the model's {rows} embeddings, for example "
        f"{token!r} with id {number}, at which training and sampling would fail; {way}."
    )


@torch.no_grad()
def _require_causal(model: Any, folder: Path, role: str) -> None:
    """Refuse a model whose tokens see those after them: measured, as a configuration may say otherwise."""
    rows = model.get_input_embeddings().num_embeddings
    ids = torch.tensor([[1, 2, 1], [1, 2, 0]], device=next(model.parameters()).device) % rows  # the last one differs
    logits = model(input_ids=ids, use_cache=False).logits[:, :2].float()
    if float((logits[0] - logits[1]).abs().max()) > _LEAK_TOLERANCE * float(logits.abs().max()):
        raise ValueError(
            f"{role}: {folder} holds a {model.config.model_type} model in which tokens see those after them; expected "
            "a causal language model, which predicts each token from those before it."
        )


def load_tokenizer(folder: Path, role: str = "base checkpoint") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder; no remote code.

    Raises:
        ValueError: a file is missing or damaged; the message names the folder.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _cannot_be_loaded(folder, error, role) from error


def _cannot_be_loaded(folder: Path, error: Exception, role: str) -> ValueError:
    return ValueError(
        f"{role}: {folder} cannot be loaded ({first_line(error, 200)}). "
        "A file is missing or damaged; copy the folder again or write it anew with save_pretrained."
    )


def copy_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights as CPU copies, each shared storage once (tied weights are not doubled)."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


def load_weights(model: torch.nn.Module, weights: Weights) -> None:
    """Copy ``weights`` into the model in place, with every adapter that is stacked on them added.

    Raises:
        ValueError: a weight of another model (unknown name or shape), or one that is missing.
    """
    own = model.state_dict()
    plain, updates = unstack(weights)
    foreign = [name for name, value in plain.items() if name not in own or own[name].shape != value.shape]
    pointers = {own[name].data_ptr() for name in plain if name in own}
    missing = [name for name, value in own.items() if name not in plain and value.data_ptr() not in pointers]
    if foreign or missing:
        raise ValueError(
            f"weights do not fit the model: {len(foreign)} foreign (for example {foreign[:1]}), "
            f"{len(missing)} missing (for example {missing[:1]})."
        )
    with torch.no_grad():
        for name, value in plain.items():
            own[name].copy_(value)
        for update in updates:
            weight = own[update.name]
            weight += update.left.to(weight.device) @ update.right.to(weight.device)


def resolve_device(device: str) -> torch.device:
    """Return the device for ``"auto"`` (CUDA when there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises:
        ValueError: CUDA is asked for and absent, or an unknown name.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device: unknown {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} was asked for, but no CUDA device is visible; use 'auto' or 'cpu'.")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {device!r} was asked for, but {torch.cuda.device_count()} CUDA devices are visible.")
    return resolved


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``"auto"`` is bf16 where CUDA supports it, else fp32.

    Raises:
        ValueError: an unknown name, or half precision on a device without it.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: unknown {precision!r}; expected one of {', '.join(PRECISIONS)}.")
    if device.type != "cuda":
        if precision in ("bf16", "fp16"):
            raise ValueError(
                f"precision: {precision!r} needs a CUDA device, this run is on {device}; use 'fp32' or 'auto'."
            )
        if precision == "auto":
            _note_full_precision()
        return "fp32"
    if precision == "auto":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return precision


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Let CUDA matrix products and convolutions round their inputs to TF32, or not; set for the process.

    Raises:
        ValueError: it is asked for on another device.
    """
    if device.type != "cuda":
        if enabled:
            raise ValueError(f"tf32: it is a mode of CUDA devices, this run is on {device}; leave it False.")
        return
    precision = "tf32" if enabled else "ieee"
    # torch has two interfaces for one setting; each reads wrongly, or raises, when only the other was used
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    products.allow_tf32 = convolutions.allow_tf32 = enabled
    newer: list[Any] = [products, getattr(convolutions, "conv", None), getattr(convolutions, "rnn", None)]
    for setting in newer:
        if hasattr(setting, "fp32_precision"):
            setting.fp32_precision = precision


def require_vllm(device: torch.device) -> None:
    """Refuse vLLM where it cannot run.

    Raises:
        ValueError: no CUDA device, or no vLLM.
    """
    if device.type != "cuda":
        raise ValueError(f"vllm: it needs a CUDA device, this run is on {device}; leave it False.")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm: the package is not installed; run `pip install vllm`, or leave it False.")


@cache
def _note_full_precision() -> None:
    _LOG.info("no CUDA device: rounds train in fp32; TrlTrainer.fingerprint['precision'] says so too")


def quiet_libraries() -> None:
    """Silence progress bars and the two deprecation warnings that transformers raises for TRL's own arguments."""
    import datasets

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\..*")
    warnings.filterwarnings("ignore", message=r".*pin_memory.*")


def training_arguments(recipe: Any, seed: int, precision: str, device: torch.device) -> dict[str, Any]:
    """Return the arguments every TRL config shares for a recipe; nothing is written to disk and nothing reported."""
    return {
        "output_dir": tempfile.gettempdir(),  # made by nobody, written by nobody
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        # the library's "constant" schedule ignores `warmup_steps` without a word
        "lr_scheduler_type": (
            "constant_with_warmup" if recipe.schedule == "constant" and recipe.warmup_steps else recipe.schedule
        ),
        "warmup_steps": recipe.warmup_steps,
        "max_grad_norm": recipe.max_grad_norm,
        "weight_decay": recipe.weight_decay,
        "seed": seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": device.type == "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "dataloader_pin_memory": device.type == "cuda",
    }


def hold_to_device(arguments: Any, device: torch.device) -> Any:
    """Return the training arguments held to ``device``.

    Left alone, the library trains on the first visible GPU, and on all of them at once when several are visible,
    which would multiply the batch.
    """
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        arguments.device  # noqa: B018 - sets up what the next lines correct
        arguments._setup_devices = device  # a cached property
        arguments._n_gpu = 1
        arguments.distributed_state.device = device
    return arguments


@contextmanager
def trainable_tensors() -> Iterator[None]:
    """Let the block make tensors that can be trained, whatever ``no_grad`` or ``inference_mode`` the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
