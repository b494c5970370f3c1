"""Probes the learning rate or the batch size of one recipe from the base checkpoint, and shows what it found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ..inner_trainers.base import Cost, Limit
from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.probes import BatchSizeProbe, LearningRateProbe, batch_size_probe, learning_rate_probe
from ..inner_trainers.recipe_file import load_recipe
from ..inner_trainers.tasks import resolve_task
from .progress import plain

KINDS = ("learning-rate", "batch-size")


def run_probe(
    path: Path, task: str, what: str, instance: int, seed: int, limit: Limit | None, **settings: Any
) -> LearningRateProbe | BatchSizeProbe:
    """Probe a recipe from the base checkpoint.

    Args:
        path: recipe file.
        task: built-in family, ``module:Class`` or a task file.
        what: one of `KINDS`.
        instance: instance seed.
        seed: seed of the rounds.
        limit: what the probe may cost; None for any amount.
        **settings: settings of the probe; those that are None keep its default.

    Raises:
        ValueError: an unknown kind, a setting that it does not have, or whatever the probe refuses.
    """
    if what not in KINDS:
        raise ValueError(f"--what: unknown {what!r}.{did_you_mean(what, KINDS)}")
    given = {name: value for name, value in settings.items() if value is not None}
    own = ("low", "high", "points", "steps_per_point") if what == KINDS[0] else ("candidates", "memory_bytes")
    for name in given:
        if name not in own:
            raise ValueError(f"{name}: a {what} probe has no such setting.{did_you_mean(name, own)}")
    drawn = resolve_task(task).instance(instance)
    recipe = replace(load_recipe(path, drawn.recipe_defaults()), start="base")
    trainer: Any = drawn.trainer()
    if trainer is None:
        from ..inner_trainers.trl.trainer import TrlTrainer

        trainer = TrlTrainer()
    trainer.check(drawn, recipe)
    common = (trainer, drawn, recipe, trainer.base(drawn), seed)
    if what == KINDS[0]:
        return learning_rate_probe(*common, limit=limit, **given)
    return batch_size_probe(*common, limit=limit, **given)


def found_something(probe: LearningRateProbe | BatchSizeProbe) -> bool:
    """Return whether there is a suggestion."""
    return (probe.suggested_rate if isinstance(probe, LearningRateProbe) else probe.proposed) is not None


def probe_table(probe: LearningRateProbe | BatchSizeProbe) -> Table:
    """Return what each round of a probe did, one row each; a star marks what is suggested."""
    return _rates(probe) if isinstance(probe, LearningRateProbe) else _batches(probe)


def probe_lines(probe: LearningRateProbe | BatchSizeProbe) -> list[str]:
    """Return the suggestion, the cost and the notes, one sentence each."""
    lines = []
    if isinstance(probe, LearningRateProbe):
        if probe.suggested_range is not None:
            low, high = probe.suggested_range
            lines.append(f"range    {low:.3g} to {high:.3g}; begin with {probe.suggested_rate:.3g}")
        if probe.hurts_from is not None:
            lines.append(f"hurts    from {probe.hurts_from:.3g}")
    elif probe.proposed is not None:
        lines.append(f"batch    {probe.proposed}; the largest that fits is {probe.largest}")
    if isinstance(probe, BatchSizeProbe) and probe.memory_bytes is not None:
        lines.append(f"memory   at most {_mebibytes(probe.memory_bytes)}")
    lines.append(f"cost     {_tokens(probe.cost)}, {probe.cost.flops:.3g} FLOPs, {probe.cost.device_seconds:.1f} s")
    return lines + [f"note     {note}" for note in probe.notes]


def _rates(probe: LearningRateProbe) -> Table:
    table = _table("learning rate", probe.signal, "gain", "±", "verdict", "fault", "train tokens", "")
    if probe.control is not None:
        table.add_row("control", f"{probe.control:.4g}", "", "", "", "", "", "")
    for point in probe.points:
        inside = probe.suggested_range is not None and (
            probe.suggested_range[0] <= point.learning_rate <= probe.suggested_range[1]
        )
        table.add_row(
            f"{point.learning_rate:.3g}",
            _number(point.signal),
            _number(point.gain, "+"),
            _number(point.error),
            point.verdict,
            "" if point.failure is None else plain(point.failure.kind),
            f"{point.cost.in_unit('train_tokens'):.0f}",
            "*" if inside else "",
        )
    return table


def _batches(probe: BatchSizeProbe) -> Table:
    table = _table("batch", "peak memory", "seconds", "fits", "fault", "")
    for point in probe.points:
        table.add_row(
            str(point.batch_size),
            "unknown" if point.peak_memory_bytes is None else _mebibytes(point.peak_memory_bytes),
            "not tried" if point.foreseen else f"{point.seconds:.2f}",
            "yes" if point.fits else "no",
            "" if point.failure is None else plain(point.failure.kind),
            "*" if point.batch_size == probe.proposed else "",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("verdict", "fault", "fits", "") else "right")
    return table


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.3g}"


def _mebibytes(amount: int) -> str:
    return f"{amount / 2**20:.0f} MiB"


def _tokens(cost: Cost) -> str:
    return f"{cost.in_unit('train_tokens'):.0f} train tokens"
