"""LLM post-training as a Gymnasium environment."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("posttrain-gym")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]

from posttrain_gym.envs.registration import register as _register

_register()
