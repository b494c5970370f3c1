"""Reads a rule set from a YAML or JSON file, and says in which line something is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from ...inner_trainers.messages import did_you_mean
from ...inner_trainers.yaml_file import FileError, Keys, YamlFile, parse_yaml, read_yaml
from ...inner_trainers.yaml_scalars import scalar_hint
from .damping import DAMPING_WINDOW
from .expressions import Condition
from .rules import Rule, RuleSet, adjustment_of, check_constant_name

DEFAULT = "default"
MAX_BYTES = 200_000
_EXPECTED = "keys like name and rules"
_SETS = "rule_sets"
_KEYS = ("name", "constants", "damping", "log_only", "rules")
_RULE_KEYS = tuple(f.name for f in fields(Rule))
_ACTION_KEYS = ("kind", "value", "source")


def shipped_rule_sets() -> tuple[str, ...]:
    """Return the names of the rule sets that come with the package, sorted."""
    folder = resources.files(__package__) / _SETS
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_rules(name: str | Path = DEFAULT) -> RuleSet:
    """Read a rule set: one that comes with the package by its name, or a YAML or JSON file.

    Raises:
        ValueError: no such file or set, or something wrong in it; names file, line, rule and key.
    """
    if str(name) in shipped_rule_sets():
        text = (resources.files(__package__) / _SETS / f"{name}.yaml").read_text(encoding="utf-8")
        return parse_rules(text, f"{name}.yaml", str(name))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"rules {path}: no such file, and no rule set of that name.{_sets_hint(str(name))}")
    return _rule_set(read_yaml(path, f"rules {path}", expected=_EXPECTED, max_bytes=MAX_BYTES), path.stem)


def _sets_hint(name: str) -> str:
    return did_you_mean(name, shipped_rule_sets())


def parse_rules(text: str, where: str, name: str = "rules") -> RuleSet:
    """Read a rule set from YAML or JSON text.

    Args:
        text: the file's content.
        where: how messages call the file.
        name: the set's name when the text gives none.

    Raises:
        ValueError: as `load_rules`.
    """
    return _rule_set(parse_yaml(text, f"rules {where}", expected=_EXPECTED), name)


def _rule_set(file: YamlFile, name: str) -> RuleSet:
    top = _Block(file, (), file.data)
    top.require_keys(_KEYS, "")
    data = top.values
    constants = _constants(data.get("constants"), top)
    entries = data.get("rules")
    if not isinstance(entries, list) or not entries:
        raise top.error("rules", f"expected a list of rules, got {_shown(entries)}.")
    rules: list[Rule] = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, _Block):
            raise top.error("rules", f"rule {number}: expected keys like name, when and action, got {_shown(entry)}.")
        rules.append(_rule(entry, number, constants))
        if rules[-1].name in [rule.name for rule in rules[:-1]]:
            raise entry.error("name", f"another rule is called {rules[-1].name!r} too; give each a name of its own.")
    try:
        return RuleSet(
            name=data.get("name", name),
            rules=tuple(rules),
            constants=constants,
            damping=data.get("damping", DAMPING_WINDOW),
            log_only=data.get("log_only", False),
        )
    except ValueError as error:
        key = str(error).partition(":")[0]
        hint = top.hint(key, "truth") if key == "log_only" else ""
        raise top.error(key if key in data else "", str(error).removeprefix(f"{key}: ") + hint) from None


class _Block:
    """One mapping of the file, with the place of each key."""

    def __init__(self, file: YamlFile, at: Keys, values: dict[str, Any]) -> None:
        self._file, self._at, self.title = file, at, ""
        self.values = {name: self._inside((*at, name), value) for name, value in values.items()}

    def _inside(self, at: Keys, value: Any) -> Any:
        if isinstance(value, dict):
            return _Block(self._file, at, value)
        if isinstance(value, list):
            return [self._inside((*at, place), entry) for place, entry in enumerate(value)]
        return value

    def error(self, key: str, problem: str) -> ValueError:
        """Return the error for what stands at a key; ``""`` for the whole block."""
        known = key in self.values
        place = self._file.place((*self._at, key) if known else self._at, key=known)
        parts = [
            f"{self._file.title}, line {place.line}",
            *([self.title] if self.title else []),
            *([key] if key else []),
        ]
        return FileError(f"{', '.join(parts)}: {problem}")

    def hint(self, key: str, wanted: str) -> str:
        """Return what to write instead of what stands at a key; see `scalar_hint`."""
        return scalar_hint(self.values[key], wanted, quoted=(*self._at, key) in self._file.quoted)

    def require_keys(self, known: Collection[str], title: str) -> None:
        """Refuse keys that are not known."""
        self.title = title
        for key in self.values:
            if key not in known:
                raise self.error(key, f"unknown key {key!r}.{did_you_mean(key, known)}")


def _rule(block: _Block, number: int, constants: Mapping[str, float]) -> Rule:
    name = block.values.get("name")
    block.require_keys(_RULE_KEYS, f"rule {name!r}" if isinstance(name, str) else f"rule {number}")
    for key in ("name", "when", "action", "reason"):
        if block.values.get(key) is None:
            raise block.error("", f"key {key!r} is missing.")
    values = dict(block.values)
    for key in ("when", "until"):
        if key in values:
            try:
                Condition(values[key], constants)
            except ValueError as error:
                raise block.error(key, str(error)) from None
    action = values["action"]
    if isinstance(action, _Block):
        action.require_keys(_ACTION_KEYS, f"{block.title}, action")
        try:
            values["action"] = adjustment_of(action.values)
        except ValueError as error:
            raise action.error("", str(error).removeprefix("action: ")) from None
    try:
        return Rule(**values)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        hint = block.hint(key, "truth") if key == "danger" and key in block.values else ""
        raise block.error(key if key in block.values else "", problem + hint) from None


def _constants(block: Any, top: _Block) -> dict[str, float]:
    if block is None:
        return {}
    if not isinstance(block, _Block):
        raise top.error("constants", f"expected names with numbers, got {_shown(block)}.")
    block.title = "constants"
    for name, value in block.values.items():
        try:
            check_constant_name(name)
        except ValueError as error:
            raise block.error(name, str(error).removeprefix("constants: ")) from None
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            hint = block.hint(name, "number")
            raise block.error(name, f"expected a finite number, got {_shown(value)}.{hint}")
        try:
            float(value)
        except OverflowError:
            raise block.error(name, "expected a finite number, got one beyond 1.8e308.") from None
    return {name: float(value) for name, value in block.values.items()}


def _shown(value: Any) -> str:
    return "keys" if isinstance(value, _Block) else repr(value)
