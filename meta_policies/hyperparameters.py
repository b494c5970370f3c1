"""Hyperparameters of SB3 algorithms in rl-zoo3's format: read strictly, without evaluating anything.

An entry is a mapping of SB3's keyword arguments, with what rl-zoo3 adds to them: ``n_timesteps``, ``n_envs``,
``policy``, ``normalize``, schedules such as ``lin_3e-4``, and Python-like text such as ``"dict(net_arch=[64, 64])"``,
of which only literals, ``dict(...)`` and the names of activation functions are read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..envs.registration import FULL_ID, IN_LOOP_ID, RECIPE_ID
from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.yaml_file import FileError, YamlFile, parse_yaml, read_yaml

ENV_IDS = (RECIPE_ID, IN_LOOP_ID, FULL_ID)
ACTIVATIONS = ("ReLU", "Tanh", "ELU", "GELU", "LeakyReLU", "SiLU", "Sigmoid")
_FOLDER = "hyperparameters"
_RUN_KEYS = ("n_timesteps", "n_envs", "policy", "normalize", "noise_type", "noise_std")
_REFUSED = {
    "env_wrapper": "the wrappers follow from the algorithm and from --wrapper; leave it out",
    "vec_env_wrapper": "only VecNormalize is used, through normalize; leave it out",
    "frame_stack": "the observation has a history of rounds already (argument history); leave it out",
    "callback": "training saves its policy after each rollout; leave it out",
    "env_kwargs": "give the environment's arguments as options or in --space; leave it out",
    "monitor_kwargs": "episodes are monitored as they are; leave it out",
    "replay_buffer_class": "other buffers, such as HER's, need goals, which these environments have not; leave it out",
    "replay_buffer_kwargs": "the replay buffer is SB3's own; leave it out",
    "rollout_buffer_class": "the rollout buffer is SB3's own; leave it out",
    "tensorboard_log": "curves are written into the run folder; leave it out",
    "env": "it is what is trained in; leave it out",
    "seed": "give it as --seed; leave it out",
}
_POLICIES = ("MlpPolicy", "MultiInputPolicy", "MlpLstmPolicy", "MultiInputLstmPolicy", "LinearPolicy", "CnnPolicy")


@dataclass(frozen=True)
class Hyperparameters:
    """One entry, read.

    Attributes:
        arguments: SB3's keyword arguments; schedules are still text.
        n_timesteps: decisions in total; None where it does not say.
        n_envs: environments side by side; None where it does not say.
        normalize: arguments of `VecNormalize`; None for no normalising.
        noise_type: ``"normal"`` or ``"ornstein-uhlenbeck"``; None for none.
        noise_std: standard deviation of the action noise.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    n_timesteps: int | None = None
    n_envs: int | None = None
    normalize: Mapping[str, Any] | None = None
    noise_type: str | None = None
    noise_std: float | None = None


@cache
def packaged(algo: str) -> Hyperparameters:
    """Return the defaults of an algorithm, which suit few, costly rounds."""
    path = resources.files(__package__) / _FOLDER / f"{algo}.yml"
    file = parse_yaml(path.read_text(encoding="utf-8"), f"{algo}.yml", expected="environment ids", aliases=True)
    return read_entry(file, algo, RECIPE_ID)


def load_hyperparameters(path: Path, algo: str, env_id: str = RECIPE_ID) -> Hyperparameters:
    """Read a file of rl-zoo3's format: entries by environment id, or one entry alone.

    Args:
        path: the YAML file.
        algo: key of `SB3_ALGORITHMS`, whose keyword arguments count.
        env_id: which entry is wanted.

    Raises:
        ValueError: no such file or entry, or a key or value that is refused; names file, line and key.
    """
    return read_entry(
        read_yaml(path, f"hyperparameters {path}", expected="keys like learning_rate", aliases=True), algo, env_id
    )


def read_entry(file: YamlFile, algo: str, env_id: str) -> Hyperparameters:
    """Return the entry of an environment id, or the file itself where it is one entry.

    Raises:
        ValueError: as `load_hyperparameters`.
    """
    data: Mapping[str, Any] = file.data
    at: tuple[str, ...] = ()
    if any(isinstance(value, dict) for key, value in data.items() if key not in ("policy_kwargs", "normalize")):
        wanted = env_id if env_id in data else next((key for key in data if key in ENV_IDS), None)
        if wanted is None:
            if len(data) != 1:
                raise file.error((), f"it has entries for {', '.join(map(repr, data))}, none for {env_id!r}.")
            wanted = next(iter(data))
        if not isinstance(data[wanted], dict):
            raise file.error((wanted,), "expected keys like learning_rate.")
        data, at = data[wanted], (wanted,)
    known = _arguments_of(algo)
    arguments: dict[str, Any] = {}
    run: dict[str, Any] = {}
    for key, value in data.items():
        where = (*at, key)
        if key in _REFUSED:
            raise file.error(where, f"{_REFUSED[key]}.", key=True)
        if key not in _RUN_KEYS and key not in known:
            raise file.error(where, f"{algo} has no such argument.{did_you_mean(key, {*known, *_RUN_KEYS})}", key=True)
        try:
            read = literal(value) if isinstance(value, str) else value
            (run if key in _RUN_KEYS else arguments)[key] = _checked(key, read)
        except ValueError as error:
            raise file.error(where, str(error)) from None
    return Hyperparameters(
        arguments=arguments,
        n_timesteps=run.get("n_timesteps"),
        n_envs=run.get("n_envs"),
        normalize=run.get("normalize"),
        noise_type=run.get("noise_type"),
        noise_std=run.get("noise_std"),
    )


def merged(base: Hyperparameters, over: Hyperparameters) -> Hyperparameters:
    """Return ``base`` with everything that ``over`` says."""
    return Hyperparameters(
        {**base.arguments, **over.arguments},
        *(
            getattr(over, name) if getattr(over, name) is not None else getattr(base, name)
            for name in ("n_timesteps", "n_envs", "normalize", "noise_type", "noise_std")
        ),
    )


def override(text: str, algo: str) -> tuple[str, Any]:
    """Return key and value of an option such as ``learning_rate=lin_3e-4``.

    Raises:
        ValueError: no ``=``, an unknown argument, or a value that cannot be read.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"-P: expected KEY=VALUE, for example learning_rate=3e-4, got {text!r}.")
    if key not in _arguments_of(algo) or key in _REFUSED:
        raise ValueError(f"-P: {algo} has no argument {key!r} to set.{did_you_mean(key, _arguments_of(algo))}")
    return key, _checked(key, literal(value.strip()))


def read_hyperparameters(algo: str, env_id: str, path: Path | None, overrides: Iterable[str]) -> Hyperparameters:
    """Return what a command's options ask for: a file, if one is given, and single settings over it."""
    found = Hyperparameters() if path is None else load_hyperparameters(path, algo, env_id)
    return merged(found, Hyperparameters(dict(override(text, algo) for text in overrides)))


def schedule(value: Any) -> Any:
    """Return a linear schedule to zero for ``lin_X``; any other value as it is."""
    if not isinstance(value, str) or not value.startswith("lin_"):
        return value
    first = float(value.removeprefix("lin_"))
    return Linear(first)


class Linear:
    """A value that falls linearly from ``first`` to 0 as training goes on."""

    def __init__(self, first: float) -> None:
        self.first = first

    def __call__(self, progress_remaining: float) -> float:
        """Return the value where ``progress_remaining`` (1 to 0) of training is left."""
        return progress_remaining * self.first


def literal(text: str) -> Any:
    """Return what Python-like text stands for: literals, ``dict(...)`` and ``nn.ACTIVATION``; other text as it is.

    Raises:
        ValueError: text that calls or names anything else.
    """
    stripped = text.strip()
    if not any(mark in stripped for mark in "([{'\"") and not stripped.startswith("nn."):
        try:
            return ast.literal_eval(stripped)
        except (ValueError, SyntaxError):
            return stripped
    try:
        return _literal(ast.parse(stripped, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not readable: {text[:80]!r}.") from None


def _literal(node: ast.AST) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("`**` is not read; write the keys out.")
        return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if isinstance(node, ast.List | ast.Tuple):
        items = [_literal(item) for item in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn":
        if node.attr not in ACTIVATIONS:
            raise ValueError(f"unknown activation nn.{node.attr}.{did_you_mean(node.attr, ACTIVATIONS)}")
        return f"nn.{node.attr}"
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        shown = ast.unparse(node)[:60] if isinstance(node, ast.expr) else "that"
        raise ValueError(f"{shown!r} is not read; write literals, dict(...) or nn.ACTIVATION.") from None


def activations(value: Any) -> Any:
    """Return a value in which the names of activation functions are torch's classes."""
    if isinstance(value, Mapping):
        return {key: activations(entry) for key, entry in value.items()}
    if isinstance(value, str) and value.startswith("nn."):
        from torch import nn

        return getattr(nn, value.removeprefix("nn."))
    return value


def _checked(key: str, value: Any) -> Any:
    if key in ("n_timesteps", "n_envs"):
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return require_integer(key, whole, low=1, high=10**9)
    if key == "normalize":
        return _normalize(value)
    if key == "noise_type" and value not in (None, "normal", "ornstein-uhlenbeck"):
        raise ValueError(f"unknown noise {value!r}.{did_you_mean(str(value), ('normal', 'ornstein-uhlenbeck'))}")
    if key == "policy":
        if value not in _POLICIES:
            raise ValueError(f"unknown policy {value!r}.{did_you_mean(str(value), _POLICIES)}")
        return value  # which of them fits follows from the observation
    if key == "policy_kwargs" and not isinstance(value, Mapping):
        raise ValueError(f"expected dict(...), got {value!r}.")
    if isinstance(value, str) and value.startswith("lin_"):
        try:
            float(value.removeprefix("lin_"))
        except ValueError:
            raise ValueError(f"expected a schedule such as lin_3e-4, got {value!r}.") from None
    elif key in ("learning_rate", "clip_range") and isinstance(value, str | bool):
        raise ValueError(f"expected a number or a schedule such as lin_3e-4, got {value!r}.")
    return value


def _normalize(value: Any) -> dict[str, Any] | None:
    if value is False or value is None:
        return None
    if value is True:
        return {}
    known = ("norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")
    if not isinstance(value, Mapping):
        raise ValueError(f"expected true, false or dict(norm_obs=True, ...), got {value!r}.")
    for name in value:
        if name not in known:
            raise ValueError(f"unknown argument {name!r}.{did_you_mean(str(name), known)}")
    return dict(value)


@cache
def _arguments_of(algo: str) -> frozenset[str]:
    from .sb3 import sb3_algorithm

    names = set(inspect.signature(sb3_algorithm(algo).load_class().__init__).parameters)
    return frozenset(names - {"self", "policy", "env", "_init_setup_model"})


__all__ = ["FileError", "Hyperparameters", "Linear", "load_hyperparameters", "merged", "override", "packaged"]
