"""A worker thread that takes turns with its caller, each with random number generators of its own.

Exactly one of the two runs at any time, so what they share needs no locks while the worker is parked. The one
exception is a worker that passed its time limit and does not answer: it is given up, and unwinds when it wakes.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..time_limit import InterruptedAtLimitError, interrupt
from .random_state import caller_random_state_kept, random_state, restore_random_state


class WorkerClosedError(BaseException):
    """Unwinds a worker that is closed or given up; not an `Exception`, so no trainer code catches it."""


class Worker:
    """Runs one function on a thread that is parked between hand-overs.

    Args:
        work: the function; it calls `park` whenever it is the caller's turn.
        hurry: called when the caller is interrupted, so that the work parks soon.
        torch_threads: CPU threads torch may use, set when the worker starts; None leaves it alone.

    Attributes:
        parked: set while it is the caller's turn.
        running: whether the worker runs although its caller has gone on, after an interruption.
        ended: whether the function has returned or raised.
        given_up: whether the worker did not answer at a time limit. It may still wake.
        error: what the function raised; None when it returned, or was closed or interrupted.
        began: when the last hand-over began, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        work: Callable[[], None],
        hurry: Callable[[], None],
        torch_threads: int | None,
    ) -> None:
        self._work, self._hurry, self._torch_threads = work, hurry, torch_threads
        self.parked = threading.Event()
        self.running = self.ended = self.given_up = False
        self.error: BaseException | None = None
        self.began = 0.0
        self._resume, self._lock = threading.Semaphore(0), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._froze = False
        self._random_state = random_state()

    @property
    def started(self) -> bool:
        """Whether the function was begun."""
        return self._thread is not None

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Let the block draw from the worker's random number generators; the caller's are as they were after it."""
        caller = random_state()
        restore_random_state(self._random_state)
        self.began = time.perf_counter()
        try:
            yield
        finally:
            if not self.running:
                self._random_state = random_state()
            restore_random_state(caller)

    # The caller's side ------------------------------------------------------------------------------------------

    def hand_over(self, seconds: float | None, grace_seconds: float) -> bool:
        """Let the worker run until it parks or ends; return whether it did so in time.

        Args:
            seconds: how long it may run before it is interrupted; None for ever.
            grace_seconds: how long it may then take to unwind before it is given up.
        """
        if self.running:  # interrupted twice in one step: it ends that step before it is given another
            self._wait_until_parked()
            if self.ended:
                return True
        with self.own_random_state():
            self.parked.clear()
            self.running = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="posttrain-round", daemon=True)
                self._thread.start()
            else:
                self._resume.release()
            late_at = None if seconds is None else self.began + seconds
            try:
                self.parked.wait(_left(late_at))
            except BaseException:  # Ctrl-C: the worker finishes its step first, so that again one thread runs
                self._hurry()
                self.parked.wait(_left(late_at))  # a second Ctrl-C gets through; `close` waits then
                raise
            finally:
                self.running = not self.parked.is_set()
                late = self.running and late_at is not None and late_at - time.perf_counter() < 0.01
                if late:
                    self._interrupt(grace_seconds)
        return not late

    def close(self) -> None:
        """Wait until the worker parks, unwind it and end its thread; a worker that was given up is left alone."""
        if self._thread is None or self.given_up:
            self._let_go()
            return
        self._closing = True  # first: an interrupt in the wait below must not leave the worker parked for ever
        if self.running:  # the caller was interrupted while the worker ran
            self._wait_until_parked()
        self._resume.release()
        self._thread.join()
        self.error = None
        self._let_go()

    def _wait_until_parked(self) -> None:
        self._hurry()
        with caller_random_state_kept():
            self.parked.wait()
        self.running = False

    def _let_go(self) -> None:
        """Forget who is worked for, which holds the round's weights: else they wait for the cycle collector."""
        self._work = self._hurry = _nothing

    def _interrupt(self, grace_seconds: float) -> None:
        assert self._thread is not None
        answered = interrupt(self._thread, self.parked.is_set, grace_seconds)
        with self._lock:
            self.given_up = not answered and not self.parked.is_set()
        self.running, self.error = False, None  # an error may be what the interruption was turned into
        self.give_back_garbage()

    # The worker's side ------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Give the caller its turn; return when it is the worker's again.

        Raises:
            WorkerClosedError: there is nothing more to do.
        """
        with self._lock:
            self.require_not_given_up()
            self.parked.set()
        if not self._closing:
            self._resume.acquire()
        if self._closing:
            raise WorkerClosedError

    def require_not_given_up(self) -> None:
        """Raise `WorkerClosedError` in a worker that has woken too late."""
        if self.given_up:
            raise WorkerClosedError

    def give_back_garbage(self) -> None:
        """Give the collector back what was set aside when the worker began."""
        if self._froze:
            self._froze = False
            gc.unfreeze()

    def _run(self) -> None:
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        # `train` begins with a full garbage collection, a quarter of a second in a process that has TRL loaded. What
        # exists now is set aside for that moment; `on_train_begin` takes it back.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        try:
            self._work()
        except (WorkerClosedError, InterruptedAtLimitError):
            pass
        except BaseException as error:  # a `SystemExit` too would otherwise end the thread without a word
            if not self.given_up:
                self.error = error
        finally:
            self.give_back_garbage()
            with self._lock:
                self.ended = True
                self.parked.set()


def _nothing() -> None:
    """Do nothing."""


def _left(late_at: float | None) -> float | None:
    return None if late_at is None else max(0.0, late_at - time.perf_counter())
