"""Ends Python code that runs too long: asks its thread to unwind, and gives it up when it does not answer.

Python threads cannot be killed. An exception can be set in them from outside, which they meet at their next line of
Python; code that is blocked in C meets it only when it comes back.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_ASK_AGAIN_SECONDS = 0.25
"""How often a thread that has not answered is asked again: other people's code may swallow the exception."""

_LOOK_AGAIN_SECONDS = 0.05

Result = TypeVar("Result")


class TimeLimitError(RuntimeError):
    """Something ran longer than it may.

    Attributes:
        ended: whether the code that was interrupted has ended; else its thread was given up and may still wake.
    """

    def __init__(self, what: str, seconds: float, ended: bool) -> None:
        self.ended = ended
        state = "its thread has ended" if ended else "its thread did not answer and was given up"
        super().__init__(f"{what} took longer than {seconds:g} seconds; {state}")


class InterruptedAtLimitError(BaseException):
    """Set in a thread whose time is over; not an `Exception`, so that verifiers and trainers do not catch it."""


def interrupt(thread: threading.Thread, answered: Callable[[], bool], grace_seconds: float) -> bool:
    """Ask a thread to unwind; return whether it answered or ended within the grace time.

    Args:
        thread: the thread; it meets `InterruptedAtLimitError` at its next line of Python.
        answered: whether the thread has come to rest.
        grace_seconds: how long to wait for that.
    """
    give_up = time.monotonic() + grace_seconds
    ask = 0.0
    while thread.is_alive() and not answered():
        now = time.monotonic()
        if now >= ask:
            _set_exception(thread)
            ask = now + _ASK_AGAIN_SECONDS
        if now >= give_up:
            return False
        time.sleep(min(0.005, max(0.0, give_up - now)))
    return True


def call_with_time_limit(
    function: Callable[[], Result], seconds: float | None, what: str, grace_seconds: float
) -> Result:
    """Return what ``function`` returns, and raise what it raises; it runs on a thread of its own when it has a limit.

    Raises:
        TimeLimitError: it ran longer than ``seconds``.
    """
    if seconds is None:
        return function()
    call = _Call(function)
    thread = threading.Thread(target=call.run, name="posttrain-limited", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    try:
        # in short waits: one that is interrupted at an outer limit meets that only when a wait comes back
        while not (in_time := call.over.wait(min(_LOOK_AGAIN_SECONDS, max(0.0, end - time.monotonic())))):
            if time.monotonic() >= end:
                break
    except BaseException:  # Ctrl-C: what runs must not go on behind the caller's back
        interrupt(thread, call.over.is_set, grace_seconds)
        raise
    if not in_time:
        raise TimeLimitError(what, seconds, interrupt(thread, call.over.is_set, grace_seconds))
    thread.join()
    return call.outcome()


class _Call(Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        self._function: Callable[[], Result] | None = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            assert self._function is not None
            self._results.append(self._function())
        except InterruptedAtLimitError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._function = None
            self.over.set()

    def outcome(self) -> Result:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._results[0]


def _set_exception(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(InterruptedAtLimitError)
        )
