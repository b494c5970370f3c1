"""Code of a model is run within limits: it passes or fails its tests, and whatever else it does comes to an end."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from posttrain_gym.inner_trainers.benchmarks.verifiers import unit_tests
from posttrain_gym.inner_trainers.benchmarks.verifiers.unit_tests import UnitTests

ROW = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 1", "assert add('a', 'b') == 'ab'"]}
RIGHT = "def add(a, b):\n    return a + b\n"


def score(code: str, row: dict[str, Any] = ROW, **settings: Any) -> float:
    return UnitTests(**{"seconds": 5.0, **settings}).score(row, code)


def test_the_share_of_tests_that_pass() -> None:
    assert score(RIGHT) == pytest.approx(2 / 3)
    assert score(RIGHT, strict=True) == 0.0
    assert score(f"Sure!\n```text\nnot this\n```\n```python\n{RIGHT}```\nDone.") == pytest.approx(2 / 3)
    assert score("def add(a, b):\n    return 0") == 0.0
    assert score("no code at all") == score("") == 0.0
    assert score("def add(a, b): return a + b\x00") == 0.0


def test_a_test_does_not_see_what_another_left() -> None:
    row = {"tests": ["x = 1\nassert True", "assert 'x' not in globals()"]}
    assert score("pass", row) == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "x = [0] * 10**10",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); x = [0] * 10**10",
        "def add(a, b):\n    import os; os._exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "open('big', 'w').write('x' * 10**8)\n" + RIGHT,
        "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)\n" + RIGHT,
    ],
)
def test_ends_that_are_no_passes(code: str) -> None:
    assert score(code) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "def add(a, b):\n    while True: pass",
        "input()" + "\nwhile 1: 0",
    ],
)
def test_what_does_not_end_is_ended(code: str) -> None:
    began = time.monotonic()
    assert score(code, seconds=1.0) == 0.0
    assert time.monotonic() - began < 10


def test_processes_it_starts_end_with_it() -> None:
    marker = Path(tempfile.gettempdir()) / f"posttrain-alive-{os.getpid()}"
    code = f"""
import os, time
for _ in range(3):
    if os.fork() == 0:
        while True:
            try:
                open({str(marker)!r}, "w").close()
            except OSError:
                pass
            time.sleep(0.05)
{RIGHT}"""
    score(code, seconds=2.0, processes=8)
    time.sleep(0.3)
    marker.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not marker.exists()


def test_output_is_bounded_and_cannot_pass_for_a_result() -> None:
    flood = "import sys\nfor _ in range(2000): sys.stdout.write('x' * 10000)\n"
    assert score(flood + RIGHT) == pytest.approx(2 / 3)
    forged = """
import os
for descriptor in range(3, 40):
    try:
        os.write(descriptor, b"token passed 1\\npassed 1\\n" + b"0" * 32 + b" passed 1\\n")
    except OSError:
        pass
"""
    assert score(forged + RIGHT) == pytest.approx(2 / 3)


def test_input_that_nobody_reads_holds_nothing_up() -> None:
    row = {"cases": [{"input": "x" * 1_000_000, "output": "3"}]}
    assert score("print(3)", row) == 1.0


def test_spaces_after_a_fence_take_no_time() -> None:
    began = time.monotonic()
    assert score("```" + " " * 100_000) == 0.0
    assert time.monotonic() - began < 10


def test_the_token_is_no_global_of_the_harness() -> None:
    code = "import __main__\nassert not hasattr(__main__, 'token')\n"
    assert score(code + RIGHT) == pytest.approx(2 / 3)


def test_the_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    row = {"tests": ["import os\nassert 'SECRET_OF_THE_USER' not in os.environ", "assert os_name() == []"]}
    assert (
        score(
            "import os\ndef os_name():\n    return [n for n in os.listdir() if n not in ('solution.py',)]",
            row,
        )
        == 1.0
    )


def test_the_form_of_humaneval() -> None:
    row = {
        "prompt": "def double(x):\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4",
        "entry_point": "double",
    }
    assert score("    return 2 * x", row, prefix=True) == 1.0
    assert score("    return x", row, prefix=True) == 0.0
    assert score("def double(x):\n    return 2 * x", row) == 1.0


def test_programs_that_read_and_write() -> None:
    row = {"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}]}
    assert score("print(sum(map(int, input().split())))", row) == 1.0
    assert score("print(3)", row) == 0.5
    assert score("print(3); raise ValueError", row) == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "'test' is missing"),
        ({"tests": []}, "must be a list of Python snippets"),
        ({"tests": ["assert ("]}, "test 1 is no Python"),
        ({"test": "x", "entry_point": "a b"}, "must be the name of a function"),
        ({"cases": [{"input": 1, "output": "x"}]}, "case 1: input and output must be text"),
    ],
)
def test_rows_that_cannot_be_run(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        UnitTests().check_row(row)


def test_well_formed_is_code_that_python_reads() -> None:
    verifier = UnitTests()
    assert verifier.well_formed(ROW, RIGHT)
    assert not verifier.well_formed(ROW, "def add(")
    assert not verifier.well_formed(ROW, "")


def test_no_folder_is_left_behind() -> None:
    before = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("posttrain-tests-")}
    score(RIGHT)
    after = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("posttrain-tests-")}
    assert after <= before


@pytest.mark.parametrize("then", ["time.sleep(8)", "[os.write(1, b'x' * 60000) for _ in iter(int, 1)]"])
def test_a_process_that_left_the_group_holds_nobody(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without namespaces it outlives its parent, here for as long as it sleeps, or its pipe stands."""
    monkeypatch.setattr(unit_tests, "_without_network", lambda: ())
    code = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {then}\n"
    began = time.monotonic()
    score(code, {"cases": [{"input": "", "output": ""}]}, seconds=0.5, processes=8)
    assert time.monotonic() - began < 6


def test_rows_beyond_the_limits_are_refused() -> None:
    assert score("x = 1", {"tests": ["assert x == 1"] * 999 + ["assert x == 2"]}) == 0.999
    with pytest.raises(ValueError, match="'tests' has 1001 tests, and at most 1000 are run"):
        UnitTests().check_row({"tests": ["pass"] * 1001})
    with pytest.raises(ValueError, match="case 1: output has 65537 bytes, and 65536 are read"):
        UnitTests().check_row({"cases": [{"input": "", "output": "x" * 65_537}]})
    assert score("print('x' * 65_535)", {"cases": [{"input": "\ud800", "output": "x" * 65_535}]}) == 1.0


def test_reading_code_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert UnitTests().well_formed({}, "x = 1 is 1")
