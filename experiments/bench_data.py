"""Measures `inspect-data` on a generated file of a million rows: seconds, rows per second, peak resident memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..inner_trainers.base_models import BUILT_IN_MODELS

ROWS = 1_000_000
EXACT_ROWS = 20_000
MODELS = ("letters-messy", "smollm2-135m-instruct")
TARGET_SECONDS, TARGET_MEBIBYTES = 60.0, 1024.0
VOCABULARY = 5_000


def bench_inspect_data(repeats: int, rows: int = ROWS, exact_rows: int = EXACT_ROWS) -> dict[str, Any]:
    """Inspect a file of a million rows, and every token of a smaller one, each in a fresh process.

    Rows are a prompt of 5 to 20 made-up words and a number, and a completion of 3 to 15 words: about 175 bytes. Seconds
    hold the start of the process and the loading of the tokenizer. Models that are not installed are left out.

    Args:
        repeats: unused; one pass over so many rows repeats itself.
        rows: rows of the file that is inspected as usual.
        exact_rows: rows of the file that is inspected with ``--exact``.
    """
    result: dict[str, Any] = {"target_seconds": TARGET_SECONDS, "target_peak_mebibytes": TARGET_MEBIBYTES}
    with tempfile.TemporaryDirectory() as folder:
        many, few = Path(folder) / "many.jsonl", Path(folder) / "few.jsonl"
        write_rows(many, rows)
        write_rows(few, exact_rows)
        for model in MODELS:
            if BUILT_IN_MODELS[model].available():
                continue
            result[model] = {
                "sampled": _inspected(many, rows, ["--model", model]),
                "exact": _inspected(few, exact_rows, ["--model", model, "--exact"]),
            }
    return result


def write_rows(path: Path, rows: int, seed: int = 0) -> None:
    """Write so many different prompt-completion rows as JSONL."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(VOCABULARY)]
    with path.open("w") as file:
        for number in range(rows):
            prompt = f"{' '.join(draw.choices(words, k=draw.randint(5, 20)))} {number}?"
            completion = " ".join(draw.choices(words, k=draw.randint(3, 15)))
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def _inspected(path: Path, rows: int, options: Sequence[str]) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "posttrain_gym",
        "inspect-data",
        str(path),
        "--algorithm",
        "sft",
        "--json",
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"bench: inspect-data ended with exit code {process.returncode}.")
    return {
        "rows": rows,
        "bytes": path.stat().st_size,
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "rows_per_second": rows / seconds,
        "peak_mebibytes": used.ru_maxrss / 1024,
    }
