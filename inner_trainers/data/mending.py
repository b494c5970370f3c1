"""What a repair changes within a row: line ends, byte order marks, tool-call arguments that are text."""

from __future__ import annotations

import json
from typing import Any

_MARK = "\ufeff"


def mended_row(row: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a row with what can be mended without loss, and the names of what was; the row itself when nothing was.

    Names are keys of `inspection_findings.INSPECTIONS`: ``"line_ends"`` (carriage returns in texts become line feeds),
    ``"byte_order_mark"`` (at the beginning of a text) and ``"tool_arguments"`` (JSON text becomes the object it says).
    """
    done: dict[str, None] = {}
    mended = _mended(row, done)
    return (mended, tuple(done)) if done else (row, ())


def _mended(value: Any, done: dict[str, None]) -> Any:
    if isinstance(value, str):
        if "\r" in value:
            done["line_ends"] = None
            value = value.replace("\r\n", "\n").replace("\r", "\n")
        if value.startswith(_MARK):
            done["byte_order_mark"] = None
            value = value.lstrip(_MARK)
        return value
    if isinstance(value, dict):
        copy = {key: _mended(inner, done) for key, inner in value.items()}
        calls = copy.get("tool_calls")
        if isinstance(calls, list):
            copy["tool_calls"] = [_call(call, done) for call in calls]
        return copy
    if isinstance(value, list):
        return [_mended(inner, done) for inner in value]
    return value


def _call(call: Any, done: dict[str, None]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], done)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            return call  # no JSON: the row is refused where it is read as a conversation
        if isinstance(read, dict):
            done["tool_arguments"] = None
            return {**call, "arguments": read}
    return call
