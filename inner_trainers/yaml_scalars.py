"""What a single value in a file means: decimal numbers, and what was meant by text that only looks like one."""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:[_,' ][0-9]{3})+(?:\.[0-9]+)?|[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?")
_BASED = re.compile(r"([-+]?)0([xXoObB])([0-9a-fA-F_]+)")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9]+(?::[0-5]?[0-9])+")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*", re.S)
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
_MAX_DIGITS = 4000
_TRUTH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
MAX_SHOWN = 60


def read_number(text: str) -> Any:
    """Return the number that plain text is, or the text itself; ``5e4`` is the integer 50000.

    Raises:
        ValueError: a number beyond what a float holds, or of more digits than are read.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return text
    if match[1] is None and match[2] is None:
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits; at most {_MAX_DIGITS} are read.")
        return int(text)
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{shown(text, quotes=False)} is beyond 1.8e308, the largest number there is.")
    return int(number) if match[2] is not None and number.is_integer() and abs(number) < 2**53 else number


def scalar_hint(value: object, wanted: str, *, quoted: bool = False) -> str:
    """Return what to write instead of text that stands where something else is expected; empty where nothing is clear.

    Args:
        value: what stands there.
        wanted: ``"number"`` or ``"truth"``.
        quoted: whether it stands in quotes.

    Returns:
        A sentence with a blank before it, such as ``" write false."``.
    """
    if not isinstance(value, str):
        return ""
    text = value.strip()
    if wanted == "truth":
        meant = _TRUTH.get(text.lower(), text.lower() if text.lower() in ("true", "false") else "")
        return f" Write {meant}." if meant else ""
    if quoted and _NUMBER.fullmatch(text):
        return f" Write {text} without the quotes."
    lower = text.lower().lstrip("+-")
    if lower in (".inf", "inf", "infinity", ".nan", "nan"):
        return " Write a finite number."
    if text.endswith("%") and _NUMBER.fullmatch(text[:-1].strip()):
        return f" Write {float(text[:-1]) / 100:.12g}."
    based = _BASED.fullmatch(text)
    if based is not None:
        try:
            return f" Write {based[1]}{int(based[3].replace('_', ''), {'x': 16, 'o': 8, 'b': 2}[based[2].lower()])}."
        except ValueError:
            return ""
    if _GROUPED.fullmatch(text) and len(text) <= MAX_SHOWN:
        digits = re.sub(r"[_,' ]", "", text)
        sign = "-" if digits.startswith("-") else ""
        plain = digits.lstrip("+-").lstrip("0") or "0"
        plain = f"0{plain}" if plain.startswith(".") else plain
        octal = digits.lstrip("+-")
        other = f", or {int(octal, 8)} if it was meant in octal" if re.fullmatch("0[0-7]*[1-7][0-7]*", octal) else ""
        return f" Write {sign}{plain}{other}."
    if _SEXAGESIMAL.fullmatch(text) and len(text) <= MAX_SHOWN:
        total = 0
        for part in text.lstrip("+-").split(":"):
            total = 60 * total + int(part)
        return f" YAML 1.1 reads it in base 60; write {total}."
    if _DATE.fullmatch(text):
        return " It looks like a date."
    unit = _UNITS.get(text[-1:].lower())
    if unit is not None and _NUMBER.fullmatch(text[:-1].strip()):
        return f" Write {float(text[:-1]) * unit:.12g}."
    return ""


def shown(value: object, *, quotes: bool = True) -> str:
    """Return a value as messages show it, at most about 60 characters."""
    if isinstance(value, dict):
        return f"keys ({', '.join(map(str, value))[:MAX_SHOWN]})" if value else "keys without any"
    text = str(value) if isinstance(value, str) and not quotes else repr(value)
    if not isinstance(value, str):
        text = {"True": "true", "False": "false", "None": "nothing"}.get(text, text)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
