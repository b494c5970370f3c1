"""Keeps what other people's code prints, per thread, so that it neither mixes with results nor floods a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

LONGEST_LINE = 160
"""Characters of the first line that are kept."""


class Printed:
    """What was printed in a block.

    Attributes:
        lines: lines that were begun.
        first: the first line that is not empty, cut at `LONGEST_LINE`.
    """

    def __init__(self) -> None:
        self.lines, self.first = 0, ""
        self._open = ""

    def __bool__(self) -> bool:
        return bool(self.first)

    def write(self, text: str) -> int:
        """Take in text."""
        self.lines += text.count("\n")
        if not self.first:
            self._open = (self._open + text)[: 4 * LONGEST_LINE]
            line = next((line.strip() for line in self._open.splitlines() if line.strip()), "")
            if line and ("\n" in self._open.lstrip() or len(self._open) >= LONGEST_LINE):
                self.first = line[:LONGEST_LINE]
        return len(text)

    def close(self) -> None:
        """Take a line that was not ended as one."""
        if not self.first and self._open.strip():
            self.first = self._open.strip()[:LONGEST_LINE]
            self.lines += 1

    def __str__(self) -> str:
        return f"{self.lines} line{'s' if self.lines != 1 else ''}, which are not shown; the first: {self.first!r}"


class _Switch:
    """A stream that sends what some threads write elsewhere; everything else goes to the stream it stands for."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.kept: dict[int, Printed | TextIO] = {}

    def write(self, text: str) -> int:
        kept = self.kept.get(threading.get_ident())
        return self.stream.write(text) if kept is None else kept.write(text)

    def flush(self) -> None:
        if threading.get_ident() not in self.kept:
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_LOCK = threading.Lock()


@contextlib.contextmanager
def prints_kept() -> Iterator[Printed]:
    """Keep what this thread prints in the block, on standard output and error; other threads print as ever.

    What code writes past Python's streams (in C, or by a process of its own) is not kept.
    """
    printed = Printed()
    try:
        with _sent({"stdout": printed, "stderr": printed}):
            yield printed
    finally:
        printed.close()


@contextlib.contextmanager
def prints_aside() -> Iterator[None]:
    """Show on standard error what this thread prints in the block, so that standard output holds results alone."""
    with _sent({"stdout": sys.stderr}):
        yield


@contextlib.contextmanager
def _sent(places: Mapping[str, Printed | TextIO]) -> Iterator[None]:
    """Send what this thread writes to the standard streams that are named to other places."""
    me = threading.get_ident()
    with _LOCK:
        switches = {name: _installed(name) for name in places}
        outer = {name: switch.kept.get(me) for name, switch in switches.items()}
        for name, switch in switches.items():
            switch.kept[me] = places[name]
    try:
        yield
    finally:
        with _LOCK:
            for name, switch in switches.items():
                before = outer[name]
                if before is None:
                    del switch.kept[me]
                else:
                    switch.kept[me] = before
                if not switch.kept and getattr(sys, name) is switch:
                    setattr(sys, name, switch.stream)


def _installed(name: str) -> _Switch:
    """Return the switch in place of a standard stream, put there if need be."""
    stream = getattr(sys, name)
    if not isinstance(stream, _Switch):
        stream = _Switch(stream)
        setattr(sys, name, stream)
    return stream
