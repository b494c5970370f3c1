"""Runs tests on code that a model wrote, in a process of its own with limits on time, memory, files and processes."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import require_integer, require_number
from .base import Versioned, require_bool, require_columns

LONGEST_CODE = 100_000
"""Characters of code that are run; a longer answer fails."""

LARGEST_OUTPUT = 1 << 16
"""Bytes of output that are read of a process; what it prints beyond is not kept, and no case may want more."""

MOST_TESTS = 1000
"""Tests that a row may have: their answers wait in a pipe, which holds 64 KiB."""

_FENCE = re.compile(r"```[ \t]*+([\w+-]*+)[ \t]*+\n(.*?)(?:\n[ \t]*+```|\Z)", re.DOTALL)
_HARNESS = """
def main():
    import json, os, sys
    out = os.fdopen({descriptor}, "w", buffering=1)
    with open({code!r}, encoding="utf-8") as file:
        source = file.read()
    names = {{"__name__": "__solution__"}}
    with open({tests!r}, encoding="utf-8") as file:
        tests = json.load(file)
    os.remove({tests!r})
    token = sys.stdin.readline().strip()
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    try:
        exec(compile(source, "solution.py", "exec"), names)
    except BaseException as error:
        out.write(token + " solution " + type(error).__name__ + "\\n")
        os._exit(0)
    for place, test in enumerate(tests):
        try:
            exec(compile(test, "test.py", "exec"), dict(names))
            passed = True
        except BaseException:
            passed = False
        if passed:
            out.write(token + " passed " + str(place) + "\\n")
    out.write(token + " end\\n")
    os._exit(0)
main()
"""
"""What runs the tests: the answers go through a pipe of their own, marked with a token that no text could guess."""


@dataclass(frozen=True)
class UnitTests(Versioned):
    """The share of a row's tests that the code in a completion passes, run in a limited process.

    A row has one of: ``tests``, a list of Python snippets (``assert add(1, 2) == 3``) that are run one by one after the
    code; ``test`` and ``entry_point``, as HumanEval has them (``check(candidate)``); or ``cases``, a list of
    ``{"input": …, "output": …}`` of a program that reads standard input and writes standard output. The code is the
    last fenced block of the completion, or else all of it; with ``prefix`` the row's prompt comes before it.

    The process gets its own interpreter without site packages, an empty folder, no environment, and limits on CPU and
    wall time, memory, file sizes, open files and processes; its whole process group is killed at the end. Where the
    kernel allows it, it has no network. This holds off accidents: endless loops, floods of output, full disks. It is no
    sandbox against code that means harm, which can read and write what the user can, and could find out how the tests
    answer: for that, run in a container.

    Attributes:
        seconds: wall time for all tests of a completion together, in (0, 600].
        megabytes: address space, in [64, 65536].
        processes: processes and threads beside its own, in [0, 1024].
        strict: whether only all tests together count.
        prefix: whether the row's prompt is put before the code, for completions of a given head.
    """

    seconds: float = 10.0
    megabytes: int = 512
    processes: int = 0
    strict: bool = False
    prefix: bool = False
    code_version = "1"
    _limits: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings, and that this system can limit a process.

        Raises:
            ValueError: a setting outside its range, or a system without resource limits.
        """
        object.__setattr__(self, "seconds", require_number("seconds", self.seconds, low=0, high=600, low_open=True))
        require_integer("megabytes", self.megabytes, low=64, high=65_536)
        require_integer("processes", self.processes, low=0, high=1024)
        require_bool("strict", self.strict)
        require_bool("prefix", self.prefix)
        try:
            import resource  # noqa: F401
        except ImportError:
            raise ValueError(
                "unit_tests: this system cannot limit a process (no resource module), and code of a model does not run "
                "without limits; use Linux or macOS."
            ) from None
        object.__setattr__(self, "_limits", (int(self.seconds) + 1, self.megabytes << 20, self.processes))

    @property
    def columns(self) -> tuple[str, ...]:
        """None that every row must have: see the class for the three forms."""
        return ()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without tests, or with tests that are no Python; see `Verifier.check_row`."""
        if row.get("cases") is not None:
            cases = row["cases"]
            if not isinstance(cases, list) or not cases:
                raise ValueError(f"column 'cases' must be a list of input and output, got {cases!r}.")
            for number, case in enumerate(cases, start=1):
                if not isinstance(case, Mapping) or not all(isinstance(case.get(k), str) for k in ("input", "output")):
                    raise ValueError(f"column 'cases', case {number}: input and output must be text, got {case!r}.")
                size = len(case["output"].encode("utf-8", "surrogatepass"))
                if size > LARGEST_OUTPUT:
                    raise ValueError(
                        f"column 'cases', case {number}: output has {size} bytes, and {LARGEST_OUTPUT} are read of a "
                        "program; shorten it."
                    )
            return
        tests = self._tests(row)
        if len(tests) > MOST_TESTS:
            raise ValueError(f"column 'tests' has {len(tests)} tests, and at most {MOST_TESTS} are run; join some.")
        for number, test in enumerate(tests, start=1):
            try:
                _parse(test, "test.py")
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"test {number} is no Python: {error}.") from None

    def score(self, row: Mapping[str, Any], completion: str) -> float:
        """Return the share of the tests that pass; with ``strict``, 1.0 when all do, else 0.0."""
        code = self.code_of(row, completion)
        if not code.strip() or len(code) > LONGEST_CODE or "\x00" in code:
            return 0.0
        if row.get("cases") is not None:
            passed = [self._case(code, case["input"], case["output"]) for case in row["cases"]]
        else:
            passed = self._run_tests(code, self._tests(row))
        return float(all(passed)) if self.strict else sum(passed) / len(passed)

    def well_formed(self, row: Mapping[str, Any], completion: str) -> bool:
        """Return whether the completion holds code that Python can read."""
        code = self.code_of(row, completion)
        if not code.strip() or len(code) > LONGEST_CODE:
            return False
        try:
            _parse(code, "solution.py")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    def code_of(self, row: Mapping[str, Any], completion: str) -> str:
        """Return the code in a completion: the last fenced block, or all of it; after the prompt with ``prefix``."""
        blocks = _FENCE.findall(completion[-4 * LONGEST_CODE :])
        code: str = blocks[-1][1] if blocks else completion
        return f"{row.get('prompt', '')}{code}" if self.prefix else code

    def _tests(self, row: Mapping[str, Any]) -> list[str]:
        if row.get("tests") is not None:
            tests = row["tests"]
            if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
                raise ValueError(f"column 'tests' must be a list of Python snippets, got {tests!r}.")
            return list(tests)
        require_columns(row, ("test", "entry_point"))
        if not re.fullmatch(r"[A-Za-z_]\w*", str(row["entry_point"])):
            raise ValueError(f"column 'entry_point' must be the name of a function, got {row['entry_point']!r}.")
        return [f"{row['test']}\n\ncheck({row['entry_point']})\n"]

    def _run_tests(self, code: str, tests: Sequence[str]) -> list[bool]:
        token = secrets.token_hex(16)
        with _folder() as folder:
            (folder / "solution.py").write_text(code, "utf-8", "surrogatepass")
            (folder / "tests.json").write_text(json.dumps(list(tests)))
            reading, writing = os.pipe()
            try:
                harness = _HARNESS.format(descriptor=writing, code="solution.py", tests="tests.json")
                _run(["-c", harness], folder, f"{token}\n".encode(), self.seconds, self._limits, keep=(writing,))
            finally:
                os.close(writing)
            said = _read_all(reading)
        passed = [False] * len(tests)
        for line in said.splitlines():
            words = line.split()
            if len(words) == 3 and words[:2] == [token, "passed"] and words[2].isdigit() and int(words[2]) < len(tests):
                passed[int(words[2])] = True
        return passed

    def _case(self, code: str, given: str, wanted: str) -> bool:
        with _folder() as folder:
            (folder / "solution.py").write_text(code, "utf-8", "surrogatepass")
            ended, out = _run(
                ["solution.py"], folder, given.encode("utf-8", "surrogatepass"), self.seconds, self._limits
            )
        lines = [line.rstrip() for line in out.decode("utf-8", "replace").rstrip().splitlines()]
        return ended == 0 and lines == [line.rstrip() for line in wanted.rstrip().splitlines()]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one run, removed at its end whatever is in it."""
    path = Path(tempfile.mkdtemp(prefix="posttrain-tests-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run(
    arguments: Sequence[str],
    folder: Path,
    given: bytes,
    seconds: float,
    limits: tuple[int, ...],
    keep: tuple[int, ...] = (),
) -> tuple[int | None, bytes]:
    """Run the interpreter with limits; return its exit status, None at the time limit, and what it printed."""
    source = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would hold the writer when nothing reads it
    source.write(given)
    source.seek(0)
    process = subprocess.Popen(
        [*_without_network(), sys.executable, "-I", "-S", "-B", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
        preexec_fn=_limiter(limits),  # sets limits and nothing else, which is safe beside threads
        pass_fds=keep,
    )
    kept: list[bytes] = []
    ended = threading.Event()
    reader = threading.Thread(target=_drain, args=(process.stdout, kept, ended), daemon=True)
    reader.start()
    try:
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
    finally:
        _kill_group(process)
        ended.set()
        reader.join()
        source.close()
        if process.stdout is not None:
            process.stdout.close()
    return status, b"".join(kept)


def _parse(code: str, name: str) -> None:
    """Parse code, without the warnings that compiling it would print."""
    compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)


def _limiter(limits: tuple[int, ...]) -> Callable[[], None]:
    import resource

    cpu, memory, processes = limits
    wanted = (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    )
    # the limit on processes counts all of the user's, so it is how many there are now, and those that are allowed
    own = processes + _processes_of_user() if os.geteuid() != 0 else None

    def limit() -> None:
        for name, value in wanted:
            _, most = resource.getrlimit(name)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(name, (value, value))
        if own is not None:
            _, most = resource.getrlimit(resource.RLIMIT_NPROC)
            value = own if most == resource.RLIM_INFINITY else min(own, most)
            resource.setrlimit(resource.RLIMIT_NPROC, (value, value))

    return limit


def _processes_of_user() -> int:
    """Return the threads of the user's processes, which is what the kernel counts; a guess where that is not told."""
    count, me = 0, os.getuid()
    try:
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if entry.stat().st_uid == me:
                        count += len(os.listdir(f"/proc/{entry.name}/task"))
                except OSError:
                    continue
    except OSError:
        return 512
    return count + 1


@cache
def _without_network() -> tuple[str, ...]:
    """Return the command that takes the network away from a process; empty where the kernel does not allow it."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    command = (tool, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    for wanted in (command, command[:4]):
        try:
            tried = subprocess.run([*wanted, "true"], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if tried.returncode == 0:
            return wanted
    return ()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _drain(stream: Any, kept: list[bytes], ended: threading.Event) -> None:
    """Read a stream, keeping its first bytes: a full pipe would hold the process.

    A process that left the group may hold the stream open, or write without end, after ``ended``: what is there then is
    read for a second at most, and no more is waited for.
    """
    size, last = 0, math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < last:
            over = ended.is_set()
            last = min(last, time.monotonic() + 1.0) if over else last
            if not selector.select(0.0 if over else 0.05):
                if over:
                    return
                continue
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return
            if size < LARGEST_OUTPUT:
                kept.append(chunk[: LARGEST_OUTPUT - size])
                size += len(kept[-1])


def _read_all(descriptor: int) -> str:
    """Return what was written into a pipe; at most what it holds, as nobody read while the process ran."""
    os.set_blocking(descriptor, False)
    parts = []
    try:
        while True:
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")
