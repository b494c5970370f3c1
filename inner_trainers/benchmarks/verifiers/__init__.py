"""Verifiers by name: functions of a row and a completion that say how right the completion is."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from ...messages import did_you_mean
from .base import ConversationVerifier, Verifier

VERIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "consistency": "consistency:Consistency",
        "exact": "exact:Exact",
        "instructions": "instructions:Instructions",
        "numeric": "numeric:Numeric",
        "refusal": "refusal:Refusal",
        "regex": "pattern:Pattern",
        "unit_tests": "unit_tests:UnitTests",
    }
)
"""Verifier -> module and class of this package."""


def verifier_class(name: str) -> type[Any]:
    """Return the class of a verifier.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in VERIFIERS:
        raise ValueError(f"verifier: unknown {name!r}.{did_you_mean(str(name), VERIFIERS)}")
    module, _, attribute = VERIFIERS[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return found


def make_verifier(name: str, **settings: Any) -> Verifier:
    """Return a verifier.

    Args:
        name: a key of `VERIFIERS`.
        settings: the attributes of its class; lists are taken for tuples.

    Raises:
        ValueError: an unknown name or setting, or a setting of another type or range.
    """
    kind = verifier_class(name)
    known = [each.name for each in fields(kind) if each.init]
    for setting, value in settings.items():
        if setting not in known:
            raise ValueError(f"verifier {name}: no setting is called {setting!r}.{did_you_mean(setting, known)}")
        default = next(each.default for each in fields(kind) if each.name == setting)
        if isinstance(default, str) and not isinstance(value, str):
            raise ValueError(f"verifier {name}: {setting} must be text, got {value!r} ({type(value).__name__}).")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        made: Verifier = kind(**plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"verifier {name}: {error}") from None
    return made


def parse_verifier(text: str) -> Verifier:
    """Return the verifier of a command-line text such as ``numeric:tolerance=1e-6,extract=last_number``.

    Values are read as JSON where they are JSON, and else taken as text; nothing is evaluated.

    Raises:
        ValueError: as `make_verifier`, or a setting without a value.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, mark, value = part.partition("=")
        if not mark or not key.strip():
            raise ValueError(f"verifier {name}: expected SETTING=VALUE, got {part!r}.")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value.strip()
    return make_verifier(name.strip(), **settings)


__all__ = ["VERIFIERS", "ConversationVerifier", "Verifier", "make_verifier", "parse_verifier", "verifier_class"]
