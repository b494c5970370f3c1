"""Reads a rule set from a YAML or JSON file, and says in which line something is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ...inner_trainers.messages import did_you_mean
from .damping import DAMPING_WINDOW
from .expressions import Condition
from .rules import Rule, RuleSet, adjustment_of, check_constant_name

DEFAULT = "default"
MAX_BYTES = 200_000
MAX_DEPTH = 16
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
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"rules {path}: {path.stat().st_size} bytes, at most {MAX_BYTES} are read.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"rules {path}, line {line}: not UTF-8 text; save the file as UTF-8.") from None
    return parse_rules(text, str(path), path.stem)


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
    top = _parsed(text, where)
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
        raise top.error(key if key in data else "", str(error).removeprefix(f"{key}: ")) from None


class _Block:
    """One mapping of the file, with the line of each key."""

    def __init__(self, where: str, line: int) -> None:
        self.where, self.line, self.title = where, line, ""
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}

    def error(self, key: str, problem: str) -> ValueError:
        """Return the error for what stands at a key; ``""`` for the whole block."""
        line = self.lines.get(key, self.line)
        parts = [f"rules {self.where}, line {line}", *([self.title] if self.title else []), *([key] if key else [])]
        return ValueError(f"{', '.join(parts)}: {problem}")

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
            values["action"] = adjustment_of(
                {key: _number(v) if key == "value" else v for key, v in action.values.items()}
            )
        except ValueError as error:
            raise action.error("", str(error).removeprefix("action: ")) from None
    if "confidence" in values:
        values["confidence"] = _number(values["confidence"])
    try:
        return Rule(**values)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise block.error(key if key in block.values else "", problem) from None


def _constants(block: Any, top: _Block) -> dict[str, float]:
    if block is None:
        return {}
    if not isinstance(block, _Block):
        raise top.error("constants", f"expected names with numbers, got {_shown(block)}.")
    block.title = "constants"
    numbers = {name: _number(value) for name, value in block.values.items()}
    for name, value in numbers.items():
        try:
            check_constant_name(name)
        except ValueError as error:
            raise block.error(name, str(error).removeprefix("constants: ")) from None
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            raise block.error(name, f"expected a finite number, got {_shown(value)}.")
        try:
            float(value)
        except OverflowError:
            raise block.error(name, "expected a finite number, got one beyond 1.8e308.") from None
    return {name: float(value) for name, value in numbers.items()}


def _parsed(text: str, where: str) -> _Block:
    try:
        _require_harmless(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ValueError(f"rules {where}, line {line}: not readable as YAML ({error.problem}).") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"rules {where}: not readable as YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(node, yaml.MappingNode):
        got = "nothing" if node is None else f"a {_kind(node)}"
        raise ValueError(f"rules {where}, line 1: expected keys like name and rules, got {got}.")
    block: _Block = _built(node, where)
    return block


def _require_harmless(text: str, where: str) -> None:
    """Refuse text whose structure takes long to read: anchors can stand for terabytes, nesting costs its square."""
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, _OPENS):
            depth += 1
        elif isinstance(token, _CLOSES):
            depth -= 1
        line = token.start_mark.line + 1
        if isinstance(token, yaml.AnchorToken | yaml.AliasToken):
            raise ValueError(f"rules {where}, line {line}: anchors and aliases (& and *) are not read; write it out.")
        if depth > MAX_DEPTH:
            raise ValueError(f"rules {where}, line {line}: not readable as rules (nested more than {MAX_DEPTH} deep).")


_OPENS = (
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
)
_CLOSES = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


def _built(node: yaml.Node, where: str) -> Any:
    """Return a node as blocks, lists and plain values."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_built(entry, where) for entry in node.value]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node, where, line)
    block = _Block(where, line)
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"rules {where}, line {key_line}: expected a key in words, got a {_kind(key_node)}.")
        key = str(key_node.value)
        if key in block.values:
            raise ValueError(
                f"rules {where}, line {key_line}: key {key!r} is there twice, first in line {block.lines[key]}; "
                "leave one out."
            )
        block.lines[key] = key_line
        block.values[key] = _built(value_node, where)
    return block


def _scalar(node: yaml.Node, where: str, line: int) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"rules {where}, line {line}: {' '.join(str(error).split())}.") from None


def _number(value: Any) -> Any:
    """Return the number that YAML 1.1 reads as text because it has no point, like ``1e-4``; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _kind(node: yaml.Node) -> str:
    return {yaml.SequenceNode: "list", yaml.ScalarNode: "single value"}.get(type(node), "mapping")


def _shown(value: Any) -> str:
    return "keys" if isinstance(value, _Block) else repr(value)
