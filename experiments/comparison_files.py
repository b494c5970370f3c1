"""Writes comparisons to JSON and Parquet, and reads them back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..inner_trainers.files import write_atomically
from .comparison import Comparison, EpisodeResult, Estimate, PolicySummary, RoundRecord, build_record

FORMAT = 1
ESTIMATES = ("gain", "interquartile_gain", "regret", "gain_over_reference", "probability_over_reference")


def to_json(comparison: Comparison) -> str:
    """Returns the comparison as JSON text that `from_json` reads back to an equal object."""
    return json.dumps({"format": FORMAT, **asdict(comparison)}, indent=2, allow_nan=False)


def from_json(text: str) -> Comparison:
    """Returns the comparison that `to_json` wrote.

    Raises:
        ValueError: not JSON, another format, or keys that are missing or unknown.
    """
    values = json.loads(text)
    found = values.pop("format", None) if isinstance(values, dict) else None
    if found != FORMAT:
        raise ValueError(f"Expected a comparison in format {FORMAT}, got format {found!r}.")
    values["episodes"] = tuple(EpisodeResult.from_mapping(row) for row in values.get("episodes", ()))
    values["instances"] = tuple(values.get("instances", ()))
    summaries = []
    for row in values.get("policies", ()):
        estimates = {name: build_record(Estimate, row[name]) for name in ESTIMATES if row.get(name) is not None}
        summaries.append(build_record(PolicySummary, row | estimates))
    values["policies"] = tuple(summaries)
    return build_record(Comparison, values)


def write_parquet(results: Sequence[EpisodeResult], directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes ``episodes.parquet`` (a row per episode) and ``rounds.parquet`` (a row per round); returns their paths.

    Each file is written beside its target and moved over it, so a reader never sees half a file.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    def schema(**columns: Any) -> Any:
        return pa.schema([("policy", pa.string()), ("instance", pa.int64()), ("seed", pa.int64()), *columns.items()])

    number, count, text = pa.float64(), pa.int64(), pa.string()
    episode_schema = schema(
        base_score=number,
        final_score=number,
        base_error=number,
        final_error=number,
        base_validation_score=number,
        validation_gain=number,
        normalised_gain=number,
        within_noise=pa.bool_(),
        budget_used=number,
        rounds=count,
        failures=pa.map_(text, count),
        recorded=pa.bool_(),
    )
    round_schema = schema(
        recorded=pa.bool_(),
        round=count,
        budget_fraction=number,
        best_validation_score=number,
        best_test_score=number,
        recipe=text,
        gain=number,
        ended=text,
        failure=text,
    )
    episode_rows: list[dict[str, Any]] = []
    round_rows: list[dict[str, Any]] = []
    for episode in results:
        row = {entry.name: getattr(episode, entry.name) for entry in fields(episode) if entry.name != "trajectory"}
        row |= {"normalised_gain": episode.normalised_gain, "within_noise": episode.within_noise}
        episode_rows.append(row | {"failures": list(episode.failures.items())})
        key = {name: row[name] for name in ("policy", "instance", "seed", "recorded")}
        round_rows.extend(key | asdict(entry) for entry in episode.trajectory)
    written = []
    for name, rows, row_schema in (
        ("episodes.parquet", episode_rows, episode_schema),
        ("rounds.parquet", round_rows, round_schema),
    ):
        buffer = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_pylist(rows, schema=row_schema), buffer)
        written.append(write_atomically(Path(directory) / name, buffer.getvalue().to_pybytes()))
    return written[0], written[1]


def read_parquet(directory: str | os.PathLike[str]) -> tuple[EpisodeResult, ...]:
    """Returns the episodes, with their rounds, that `write_parquet` wrote."""
    import pyarrow.parquet as parquet

    trajectories: dict[tuple[str, int, int], list[RoundRecord]] = {}
    for row in parquet.read_table(Path(directory) / "rounds.parquet").to_pylist():
        key = (row.pop("policy"), row.pop("instance"), row.pop("seed"))
        row.pop("recorded")
        trajectories.setdefault(key, []).append(build_record(RoundRecord, row))
    episodes = []
    for row in parquet.read_table(Path(directory) / "episodes.parquet").to_pylist():
        row.pop("within_noise")
        row["failures"] = dict(row["failures"])
        row["trajectory"] = trajectories.get((row["policy"], row["instance"], row["seed"]), [])
        episodes.append(EpisodeResult.from_mapping(row))
    return tuple(episodes)
