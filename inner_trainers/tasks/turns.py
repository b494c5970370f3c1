"""The turns of a conversation as rows hold them: what is well formed, and the one form that templates are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import did_you_mean

ROLES = ("system", "user", "assistant", "tool")


def check_turns(where: str, turns: object, *, answer_only: bool = False) -> None:
    """Refuse a conversation that cannot be trained on.

    Args:
        where: names the row in the message.
        turns: the row's value.
        answer_only: whether they are the answer to a prompt: the assistant's one turn, as losses over pairs of answers
            have no mask within one.

    Raises:
        ValueError: no list of turns, or a turn that is not well formed; the message numbers turns from 1.
    """
    if isinstance(turns, str | bytes) or not isinstance(turns, Sequence) or not turns:
        raise ValueError(f"{where}: messages must be a list of turns with role and content, got {turns!r}.")
    for number, turn in enumerate(turns, start=1):
        _check_turn(f"{where}, turn {number}", turn, first=number == 1)
    roles = [turn["role"] for turn in turns]
    if answer_only:
        if roles != ["assistant"]:
            raise ValueError(f"{where}: an answer is the assistant's one turn, got {', '.join(roles)}.")
        return
    opening = [role for role in roles if role != "system"]
    if opening[:1] != ["user"]:
        got = opening[0] if opening else "none"
        raise ValueError(f"{where}: the first turn after the system's must be the user's, got {got}.")
    if roles[-1] != "assistant":
        raise ValueError(
            f"{where}, turn {len(roles)}: the last turn must be the assistant's, which is what is learned, "
            f"got {roles[-1]}; leave out what follows it."
        )


def _check_turn(where: str, turn: object, first: bool) -> None:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{where}: expected role and content, got {turn!r}.")
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r}.{did_you_mean(str(role), ROLES)}")
    if role == "system" and not first:
        raise ValueError(f"{where}: a system turn can only be the first.")
    if calls and role != "assistant":
        raise ValueError(f"{where} ({role}): only the assistant calls tools; take tool_calls out.")
    if content is None and not calls:
        raise ValueError(
            f"{where} ({role}): content is null and there is no tool call; write the text, or drop the row."
        )
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where} ({role}): content must be text, got {content!r}.")
    if calls:
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
            raise ValueError(f"{where}: tool_calls must be a list, got {calls!r}.")
        for call in calls:
            _plain_call(where, call)


def plain_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns as a template is given them: null content as no text, tool-call arguments as an object.

    A template prints null as the word None, and arguments that are text already a second time in quotes.
    """
    plain = []
    for turn in turns:
        copy = {name: value for name, value in turn.items() if value is not None}
        copy["content"] = turn.get("content") or ""
        if turn.get("tool_calls"):
            copy["tool_calls"] = [_plain_call("tool call", call) for call in turn["tool_calls"]]
        plain.append(copy)
    return plain


def user_texts(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the user says in a conversation, turn by turn."""
    return [turn["content"] for turn in turns if turn["role"] == "user"]


def _plain_call(where: str, call: object) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, in its own form: flat, or inside ``function``."""
    if not isinstance(call, Mapping):
        raise ValueError(f"{where}: a tool call must have a name and arguments, got {call!r}.")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _plain_call(where, call["function"])}
    if not isinstance(call.get("name"), str):
        raise ValueError(f"{where}: a tool call must name its function, got {dict(call)!r}.")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: the arguments of {call['name']!r} are text that is no JSON ({error}): {arguments!r}."
            ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}: the arguments of {call['name']!r} must be an object, got {arguments!r}.")
    return {**call, "arguments": dict(arguments)}
