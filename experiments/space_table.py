"""Prints what a decision space comes to as tables that fit a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .cli_output import say, table_of
from .progress import console
from .space_summary import describe_size

_UNITS = {"device_seconds": "device seconds", "train_tokens": "train tokens", "flops": "FLOPs"}


def print_space(summary: Mapping[str, Any], title: str) -> None:
    """Print a summary as `summarise_space` returns it."""
    facts = summary["facts"]
    if facts is None:
        say(f"{title}, no task: its facts are unknown, see --task")
    else:
        say(f"{title}, task {summary['task']}")
        say(f"task: {_facts(facts)}")
    for name in ("budget", "evaluator", "reward"):
        if summary[name] is not None:
            say(f"{name}: {_TELL[name](summary[name])}")
    say("")
    rows = [_setting_row(setting) for setting in summary["settings"]]
    rows += [_fixed_row(name, value) for name, value in summary["fixed"].items()]
    if rows:
        console.print(table_of(["setting", "values", "scale", "default", "grid", "used"], rows))
        say("")
    bounds = [f"{name} {_weight(low, high)}" for name, (low, high) in summary["sources"].items()]
    say(f"mix: {', '.join(bounds)}")
    say(f"start: {', '.join(summary['starts'])}")
    say("")
    shown = [
        {
            "algorithm": entry["name"],
            "reachable": "yes" if entry["reachable"] else "no",
            "settings in use, or why not": ", ".join(entry["settings"]) if entry["reachable"] else entry["reason"],
        }
        for entry in summary["algorithms"]
    ]
    console.print(table_of(["algorithm", "reachable", "settings in use, or why not"], shown))
    for setting in summary["settings"]:
        if setting.get("unreachable"):
            say(f"{setting['name']}: never {', '.join(map(_value, setting['unreachable']))} on this task")
    if summary["constraints"]:
        say("")
        removed = [{"constraint": entry["text"], "removes": _removes(entry)} for entry in summary["constraints"]]
        console.print(table_of(["constraint", "removes"], removed))
    say("")
    if not any(entry["reachable"] for entry in summary["algorithms"]):
        say("size: 0; no algorithm can run")
        return
    kept = summary["kept"]
    undecided = any(entry["unknown"] for entry in summary["constraints"])
    say(f"size: {describe_size(summary['size'])}")
    if kept is not None and kept["samples"]:
        share = "all" if kept["share"] == 1.0 else _percent(kept)
        which = "decided constraints" if undecided else "constraints"
        say(f"of {kept['samples']:,} drawn with reachable algorithms, {which} keep {share}")


def _setting_row(setting: Mapping[str, Any]) -> dict[str, Any]:
    if setting["kind"] == "choices":
        values, scale = ", ".join(map(_value, setting["choices"])), "choices"
    else:
        values = f"{_value(setting['low'])} to {_value(setting['high'])}"
        scale = setting["scale"] + (" integer" if setting["integer"] else "")
    return {
        "setting": setting["name"],
        "values": values,
        "scale": scale,
        "default": _value(setting["default"]),
        "grid": f"{setting['values']:,}",
        "used": _used(setting["when"]),
    }


def _used(condition: str | None) -> str:
    """Return when a setting is used; of algorithms alone, their names."""
    if condition is None:
        return "always"
    named = re.fullmatch(r"algorithm (?:in \[([^\[\]]*)\]|== (\w+))", condition)
    return condition if named is None else named[1] or named[2]


def _fixed_row(name: str, value: Any) -> dict[str, Any]:
    return {
        "setting": name,
        "values": _value(value),
        "scale": "fixed",
        "default": _value(value),
        "grid": "1",
        "used": "always",
    }


def _removes(entry: Mapping[str, Any]) -> str:
    parts = []
    if entry["algorithms"]:
        parts.append(f"{', '.join(entry['algorithms'])} (exact)")
    if entry["unknown"]:
        parts.append(
            f"nothing while {', '.join(entry['unknown'])} {'is' if len(entry['unknown']) == 1 else 'are'} unknown"
        )
    elif entry["samples"] and (entry["share"] > 0 or not parts):
        rest = " of the other recipes" if entry["algorithms"] else ""
        parts.append(f"{_percent(entry)}{rest}" if entry["share"] > 0 else f"nothing in {entry['samples']:,} drawn")
    return "; ".join(parts) or "nothing"


def _percent(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['share']:.1%} ± {estimate['standard_error']:.1%}"


def _weight(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(facts: Mapping[str, Any]) -> str:
    rows = facts["rows"] or {}
    told = [f"{facts['base_model_size']:,.0f} parameters", f"{sum(rows.values()):,} rows"]
    told.append("a teacher" if facts["has_teacher"] else "no teacher")
    if facts["device"] is not None:
        memory = facts["device_memory"]
        told.append(facts["device"] + (f" of {memory / 2**30:.0f} GiB" if memory else ""))
    return ", ".join(told)


def _budget(budget: Mapping[str, Any]) -> str:
    amount = f"{budget['limit']:,.12g} {_UNITS[budget['unit']]}"
    if budget["unit"] == "device_seconds" and budget["limit"] >= 3600:
        amount += f" ({budget['limit'] / 3600:,.4g} hours)"
    return f"{amount}, at most {budget['max_rounds']} rounds, patience {budget['patience']}"


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in settings.items())


_TELL = {"budget": _budget, "evaluator": _pairs, "reward": _pairs}
