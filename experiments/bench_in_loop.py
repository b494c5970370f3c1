"""What in-loop control costs: our own code per optimiser step by part, throughput and memory beside plain TRL."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..inner_trainers.adjustments import CATALOGUE_NAMES, Adjustment
from ..meta_policies.controllers.decision_log import DecisionLog
from .statistics import stratified_bootstrap_interval

ALGORITHM, STEPS = "sft", 80
PAIRS = 10
"""Interleaved pairs unless told otherwise."""
PARTS = ("gradients", "rows", "monitor", "decide", "apply")
"""Our own code of an optimiser step: gradient statistics, losses per row and source, z-scores, deciding, applying.

Handing over to the worker is in the throughput alone.
"""
OWN_TARGET_MS, SHARE_TARGET, FORWARD_TARGET_MS, MEMORY_TARGET = 0.15, 0.004, 0.05, 1.02
_FORWARDS = 2000
_MEMORY_RUNS = 3


def bench_in_loop(repeats: int) -> dict[str, Any]:
    """Own code per step, throughput and memory of an SFT round of the 0.28 M letters model under the default rules.

    Everything but the memory is measured in this process; peaks of memory need fresh ones.

    Args:
        repeats: interleaved pairs of a controlled round and the plain TRL run, after one of warm-up.
    """
    setup = _Setup()
    own = _own_code(setup)
    return {
        **own,
        **_throughput(setup, repeats),
        **_forward(),
        "net_decide_ms": _net_decision(setup),
        **_memory(setup, min(repeats, _MEMORY_RUNS)),
    }


class _Setup:
    """The round, and the same training as a person writes it with TRL."""

    def __init__(self) -> None:
        from ..inner_trainers.trl.trainer import TrlTrainer
        from .bench_rounds import SEED, _Plain, _recipe, _task

        self.task, self.trainer, self.recipe, self.seed = _task(), TrlTrainer(), _recipe(ALGORITHM, steps=STEPS), SEED
        where: Any = SimpleNamespace(search=SimpleNamespace(task=self.task), trainer=self.trainer)
        self.plain = _Plain(where, self.recipe)

    def begin(self) -> Any:
        """Return a session, parked before its first step."""
        return self.trainer.begin(self.task, self.recipe, self.trainer.base(self.task), self.seed)

    def controlled(self, log: DecisionLog | None = None) -> tuple[float, float]:
        """Run the round with monitor and rules that change nothing; return seconds of the whole and of its steps."""
        from ..meta_policies.controllers.catalogue import make_controller
        from ..meta_policies.controllers.drive import drive_round

        began = time.perf_counter()
        session = self.begin()
        try:
            training = time.perf_counter()
            drive_round(session, self.recipe, make_controller("rules", log_only=True), log=log)
            trained = time.perf_counter() - training
            report, _ = session.result()
        finally:
            session.close()
        if report.failure is not None or report.steps != self.recipe.steps or report.adjustments:
            raise RuntimeError(f"the round was not the plain one: {report.ended}, {report.steps} steps.")
        return time.perf_counter() - began, trained

    def uncontrolled(self) -> tuple[float, float]:
        """Run the same training with TRL alone; return seconds of the whole and of its steps."""
        from transformers import PrinterCallback

        began = time.perf_counter()
        trainer = getattr(self.plain, f"_{ALGORITHM}")()
        trainer.remove_callback(PrinterCallback)
        training = time.perf_counter()
        trainer.train()
        ended = time.perf_counter()
        return ended - began, ended - training


class _Timings(DecisionLog):
    """Keeps where each step's time went, and writes nothing."""

    level = "timings"

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def timings(self, step: int, seconds: Mapping[str, float]) -> None:
        """Keep a step's times."""
        self.rows.append(dict(seconds))

    def _ignore(self, *arguments: Any, **options: Any) -> None:
        """Write nothing."""

    begin = step = remember = decision = failed = finish = end = close = _ignore


def _own_code(setup: _Setup) -> dict[str, Any]:
    """Return the medians of our own code per step, by part, and their share of the step's time."""
    timings = _Timings()
    setup.controlled()  # warm
    setup.controlled(timings)
    rows = [row for row in timings.rows if all(part in row for part in PARTS)]
    parts = {part: 1e3 * statistics.median(row[part] for row in rows) for part in PARTS}
    parts["apply"] = 1e3 * _apply_seconds(setup)  # at most steps nothing is applied: what a change of the rate takes
    step = 1e3 * statistics.median(row["advance"] for row in rows)
    total = sum(parts.values())
    return {
        "steps": len(rows),
        "own_ms": total,
        "target_own_ms": OWN_TARGET_MS,
        "own_ms_by_part": parts,
        "step_ms": step,
        "own_share": total / step,
        "target_own_share": SHARE_TARGET,
    }


def _apply_seconds(setup: _Setup, times: int = 200) -> float:
    """Return the median time of asking for and applying a changed learning rate in a live round."""
    session = setup.begin()
    spent = []
    try:
        session.advance(2)
        for number in range(times):
            change = Adjustment("lr_scale", 2.0 if number % 2 else 0.5)
            began = time.perf_counter()
            if session.refusal(change) is None:
                session.apply(change)
            spent.append(time.perf_counter() - began)
    finally:
        session.close()
    return statistics.median(spent)


def _throughput(setup: _Setup, pairs: int) -> dict[str, Any]:
    """Return what a controlled round keeps of the plain run's throughput, with 95 % intervals over pairs."""
    whole, steps = [], []
    for number in range(1 + pairs):
        sides: list[Callable[[], tuple[float, float]]] = [setup.controlled, setup.uncontrolled]
        first, second = (sides[i]() for i in ((0, 1), (1, 0))[number % 2])  # neither side always comes second
        ours, theirs = (first, second) if number % 2 == 0 else (second, first)
        if number > 0:
            whole.append(theirs[0] / ours[0])
            steps.append(theirs[1] / ours[1])
    return {
        "pairs": pairs,
        "throughput_ratio": _median(whole),
        "throughput_ratio_interval": _interval(whole),
        "throughput_ratio_of_steps": _median(steps),
        "throughput_ratio_of_steps_interval": _interval(steps),
    }


def _forward() -> dict[str, Any]:
    """Return the median time of a policy net's forward pass with its masked softmax; features are timed elsewhere."""
    from ..meta_policies.controllers.features import FEATURE_COUNT
    from ..meta_policies.controllers.net import _SHAPES, PolicyNet

    rng = np.random.default_rng(0)
    net = PolicyNet({name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in _SHAPES.items()})
    features = rng.uniform(-1, 1, (_FORWARDS, FEATURE_COUNT)).astype(np.float32)
    legal = rng.uniform(size=(_FORWARDS, len(CATALOGUE_NAMES))) < 0.7
    legal[:, 0] = True
    spent = []
    for row, mask in zip(features, legal.tolist(), strict=True):
        began = time.perf_counter()
        net.probabilities(row, mask)
        spent.append(time.perf_counter() - began)
    return {
        "net_forward_ms": 1e3 * statistics.median(spent),
        "target_net_forward_ms": FORWARD_TARGET_MS,
        "net_parameters": net.parameters,
    }


def _net_decision(setup: _Setup) -> float:
    """Return the median time, in ms, of the packaged net's whole decision between the steps of a live round."""
    from ..meta_policies.controllers.catalogue import make_controller
    from ..meta_policies.controllers.drive import drive_round

    timings, session = _Timings(), setup.begin()
    try:
        drive_round(session, setup.recipe, make_controller("net:letters"), log=timings)
    finally:
        session.close()
    return 1e3 * _median([row["decide"] for row in timings.rows if "decide" in row])


def _memory(setup: _Setup, runs: int) -> dict[str, Any]:
    """Return peak memory with us over without: allocated on a CUDA device, else resident in fresh processes."""
    import torch

    sides: dict[str, Callable[[], Any]] = {"with": setup.controlled, "without": setup.uncontrolled}
    peaks: dict[str, list[float]] = {name: [] for name in sides}
    if torch.cuda.is_available():
        for _ in range(runs):
            for name, run in sides.items():
                torch.cuda.reset_peak_memory_stats()
                run()
                peaks[name].append(torch.cuda.max_memory_allocated() / 2**20)
        what = "allocated on the device"
    else:
        for _ in range(runs):
            for name in sides:
                peaks[name].append(_peak_of_fresh_process(name))
        what = "resident in a fresh process"
    medians = {name: _median(values) for name, values in peaks.items()}
    return {
        "memory_ratio": medians["with"] / medians["without"],
        "target_memory_ratio": MEMORY_TARGET,
        "peak_memory_mb": medians,
        "memory_is": what,
    }


def _peak_of_fresh_process(side: str) -> float:
    code = f"from posttrain_gym.experiments.bench_in_loop import print_peak; print_peak({side!r})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peak: float = json.loads(done.stdout.splitlines()[-1])
    return peak


def print_peak(side: str) -> None:
    """Run one side once and print the process's peak of resident memory in MiB. What a fresh process is started on."""
    setup = _Setup()
    setup.controlled() if side == "with" else setup.uncontrolled()
    print(json.dumps(_own_peak() / 2**20))


def _own_peak() -> float:
    """Return the most bytes this process has had resident.

    On Linux ``ru_maxrss`` is at least the peak of the process that started this one, so the kernel's own count is read.
    """
    import resource

    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 2**10


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % bootstrap interval of the median over pairs."""
    column = np.asarray(values)[:, None]
    return list(stratified_bootstrap_interval(column, lambda drawn: float(np.median(np.asarray(drawn)))))
