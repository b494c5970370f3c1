"""Plots of a comparison, of meta-training and of a controlled round, as PNG files drawn without a display.

Every function returns the figure it wrote, so that a caller can look inside or draw on.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ..inner_trainers.files import write_atomically
from .comparison import Comparison, EpisodeResult, Estimate, episode_grid, normalised
from .statistics import FloatArray, bootstrap_samples

if TYPE_CHECKING:
    from .replay import RoundStory

# Okabe and Ito (2008), "Color universal design": eight colours told apart with every common colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
LINE_STYLES = ("-", "--", "-.", ":")
DOTS_PER_INCH = 150
GRID_POINTS = 201
LISTED_CHANGES = 24


def plot_best_so_far(
    results: Sequence[EpisodeResult],
    path: str | os.PathLike[str],
    *,
    confidence: float = 0.95,
    resamples: int = 500,
    seed: int = 0,
) -> Figure:
    """Plots the mean best-so-far normalised gain against the share of budget used, a line and a band per policy.

    The gain is the TEST one when every round of every episode carries a TEST score, else the validation one; the
    axis label says which. A curve steps up where a round ended and keeps its value after the episode's last round.
    The band is a bootstrap interval of the mean, over seeds, or over instances when each has one seed.

    Raises:
        ValueError: the results do not form a full grid.
    """
    by_policy, shape = episode_grid(results)
    rounds = [entry for episode in results for entry in episode.trajectory]
    on_test = bool(rounds) and all(entry.best_test_score is not None for entry in rounds)
    end = max([1.0, *(entry.budget_fraction for entry in rounds)]) + 0.03  # shows the level after the last step
    budget = np.linspace(0.0, end, GRID_POINTS)
    curves = {}
    for name, episodes in by_policy.items():
        values = np.stack([_curve(episode, budget, on_test) for episode in episodes])
        curves[name] = values.reshape(*shape, budget.size).swapaxes(0, 1)  # (n_seeds, n_instances, n_grid)

    figure, axes = _figure(8.4, max(4.6, 1.6 + 0.3 * len(curves)))
    single = shape[1] == 1
    alpha = 0.15 if len(curves) <= 4 else 0.07
    handles, labels = [], []
    for name in sorted(curves, key=lambda key: -float(curves[key][..., -1].mean())):
        colour, style = _look(list(curves).index(name))
        mean = curves[name].mean(axis=(0, 1))
        (line,) = axes.plot(budget, mean, color=colour, linestyle=style, linewidth=1.8, drawstyle="steps-post")
        if shape != (1, 1):
            samples = bootstrap_samples(
                curves[name], _mean_curve, resamples=resamples, seed=seed, resample_tasks=single
            )
            low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
            axes.fill_between(budget, low, high, step="post", color=colour, alpha=alpha, linewidth=0)
        line.set_gid(f"policy:{name}")
        handles.append(line)
        labels.append(f"{_literal(name)}  {mean[-1]:.3f}")
    axes.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    axes.set_xlim(0.0, end)
    axes.set_xlabel("share of the budget used")
    split = "TEST" if on_test else "validation"
    axes.set_ylabel(f"mean normalised {split} gain\nof the best checkpoint so far")
    band = f"band: {100 * confidence:g}% over {f'{shape[0]} instances' if single else f'{shape[1]} seeds per instance'}"
    if shape == (1, 1):
        band = "no band: one episode each"
    recorded = any(episode.recorded for episode in results)
    _title(axes, "Best so far", f"n = {shape[0] * shape[1]} episodes per policy; {band}", recorded)
    figure.legend(
        handles,
        labels,
        title="policy, final value",
        loc="outside right upper",
        alignment="left",
        frameon=False,
        fontsize=9,
    )
    return _save(figure, path)


def plot_intervals(comparison: Comparison, path: str | os.PathLike[str]) -> Figure:
    """Plots each policy's mean normalised TEST gain and mean regret as a point with its interval, best gain on top."""
    ranked = sorted(comparison.policies, key=lambda summary: summary.gain.value)
    figure = _empty_figure(9.0, 1.6 + 0.42 * len(ranked))
    left, right = figure.subplots(1, 2, sharey=True)
    order = [summary.policy for summary in comparison.policies]
    for height, summary in enumerate(ranked):
        colour, _ = _look(order.index(summary.policy))
        _point(left, height, summary.gain, colour)
        _point(right, height, summary.regret, colour)
    names = [
        _literal(summary.policy) + (" (reference)" if summary.policy == comparison.reference else "")
        for summary in ranked
    ]
    left.set_yticks(range(len(ranked)), names)
    left.set_ylim(-0.6, len(ranked) - 0.4)
    for axes in (left, right):
        axes.axvline(0.0, color="0.6", linewidth=0.8, zorder=0)
        axes.grid(axis="x", color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
    left.set_xlabel("mean normalised TEST gain (higher is better)")
    right.set_xlabel("mean regret (lower is better)")
    right.set_xlim(left=min(0.0, right.get_xlim()[0]))
    n_episodes = comparison.policies[0].episodes
    heading = f"Gain and regret, n = {n_episodes} episodes per policy"
    if comparison.recorded:
        heading += ", recorded rounds"
    inches = figure.get_figheight()
    figure.text(0.01, 1 - 0.1 / inches, heading, fontsize=12, va="top")
    figure.text(0.01, 1 - 0.36 / inches, comparison.interval_label, fontsize=9, color="0.35", va="top")
    layout = figure.get_layout_engine()
    if isinstance(layout, ConstrainedLayoutEngine):
        layout.set(rect=(0.0, 0.0, 1.0, 1 - 0.58 / inches))
    return _save(figure, path)


def plot_training(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Figure:
    """Plots the meta-policy's reward, and gain where given, of each training episode against rounds run so far.

    Args:
        rows: one mapping per episode, in order, with ``rounds`` (all rounds run when it ended), ``reward`` (sum over
            the episode), and optionally ``gain`` (normalised validation gain) and ``recorded``.
        path: where the PNG goes.

    Raises:
        ValueError: no rows, a missing key, or a figure that is not finite.
    """
    if not rows:
        raise ValueError("A training plot needs at least one episode, got none.")
    panels = {"reward": "episode reward"}
    if all(row.get("gain") is not None for row in rows):
        panels["gain"] = "normalised validation gain"
    columns: dict[str, FloatArray] = {}
    for key in ("rounds", *panels):
        missing = [index for index, row in enumerate(rows) if key not in row]
        if missing:
            raise ValueError(f"Training row {missing[0]} has no {key!r}; it has {sorted(rows[missing[0]])}.")
        columns[key] = np.asarray([row[key] for row in rows], dtype=np.float64)
        if not np.isfinite(columns[key]).all():
            index = int(np.flatnonzero(~np.isfinite(columns[key]))[0])
            raise ValueError(f"Training row {index}: {key} must be finite, got {columns[key][index]!r}.")
    window = min(len(rows), max(5, len(rows) // 20))
    figure = _empty_figure(8.4, 1.2 + 2.5 * len(panels))
    stacked = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for index, (key, label) in enumerate(panels.items()):
        axes, values = stacked[index], columns[key]
        axes.plot(columns["rounds"], values, ".", color=PALETTE[0], alpha=0.3, markersize=5, label="one episode")
        sums = np.concatenate([[0.0], np.cumsum(values)])
        trailing = (sums[window:] - sums[:-window]) / window
        axes.plot(
            columns["rounds"][window - 1 :],
            trailing,
            color=PALETTE[1],
            linewidth=1.8,
            marker="o" if trailing.size == 1 else None,
            label=f"mean of the last {window} episodes",
        )
        axes.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
        axes.set_ylabel(label)
        _bare(axes)
    stacked[-1].set_xlabel("training rounds run so far")
    recorded = sum(bool(row.get("recorded")) for row in rows)
    _title(stacked[0], "Meta-training", f"n = {len(rows)} episodes", recorded > 0)
    figure.legend(*stacked[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return _save(figure, path)


def plot_round(story: RoundStory, path: str | os.PathLike[str]) -> Figure:
    """Plots a controlled round: its loss or reward, the learning rate of each step, and a numbered mark per change.

    The reasons stand under the panels, by number; of very many changes the first `LISTED_CHANGES`.

    Raises:
        ValueError: the log shows neither loss nor reward.
    """
    if not story.curve:
        raise ValueError("The log shows neither loss nor reward, so there is nothing to plot.")
    notes = _change_notes(story)
    lines = [line for _, note in notes for line in note.splitlines()]
    figure = _empty_figure(9.0, 5.2 + 0.17 * len(lines))
    below = (0.3 + 0.17 * len(lines)) / figure.get_figheight()
    layout = figure.get_layout_engine()
    if isinstance(layout, ConstrainedLayoutEngine):
        layout.set(rect=(0.0, below, 1.0, 1.0 - below))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps, values = zip(*story.curve, strict=True)
    top.plot(steps, values, color=PALETTE[0], linewidth=1.2, gid="objective")
    top.set_ylabel(story.objective)
    if story.rates:
        at, rates = zip(*story.rates, strict=True)
        bottom.step(at, rates, where="mid", color=PALETTE[6], linewidth=1.5, gid="rate")
        if min(rates) > 0:
            bottom.set_yscale("log")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("optimiser step")
    actors = list(dict.fromkeys(change.by for change in story.changes))
    for number, change in enumerate(story.changes, start=1):
        colour, _ = _look(1 + actors.index(change.by))
        for axes in (top, bottom):
            if change.last > change.first:
                axes.axvspan(change.first + 0.5, change.last + 0.5, color=colour, alpha=0.12, linewidth=0)
            axes.axvline(change.first + 0.5, color=colour, linewidth=1.0, alpha=0.8)
        height = 1.01 + 0.05 * (number % 3)  # neighbours stand at three heights
        top.annotate(
            str(number), (change.first + 0.5, height), xycoords=("data", "axes fraction"), ha="center", fontsize=8,
            color=colour, annotation_clip=False,
        )  # fmt: skip
    for axes in (top, bottom):
        _bare(axes)
        axes.set_xlim(0.5, max(story.log.recipe.steps, steps[-1]) + 0.5)
    top.set_title(_literal_line(story.heading), loc="left", fontsize=11, pad=26)
    inches = figure.get_figheight()
    height = below - 0.1 / inches
    for colour, note in notes:
        figure.text(0.02, height, _literal_line(note), fontsize=8, color=colour, va="top", linespacing=1.3)
        height -= 0.17 * len(note.splitlines()) / inches
    return _save(figure, path)


def _change_notes(story: RoundStory) -> list[tuple[str, str]]:
    """Returns the colour and the words of each change, wrapped to the figure's width."""
    actors = list(dict.fromkeys(change.by for change in story.changes))
    notes = []
    for number, change in enumerate(story.changes[:LISTED_CHANGES], start=1):
        what = change.what if change.count == 1 else f"{change.what} ×{change.count}"
        text = f"{number}  step {change.steps}  {what}  ({change.by}: {change.reason})"
        wrapped = textwrap.wrap(text, 150, subsequent_indent="      ", break_long_words=True)
        notes.append((_look(1 + actors.index(change.by))[0], "\n".join(wrapped)))
    left = len(story.changes) - LISTED_CHANGES
    return [*notes, ("0.35", f"and {left} more")] if left > 0 else notes


def _literal_line(text: str) -> str:
    """Returns text that Matplotlib draws as it is written."""
    return text.replace("\\", "\\\\").replace("$", r"\$")


def _curve(episode: EpisodeResult, budget: FloatArray, on_test: bool) -> FloatArray:
    """Returns the best-so-far gain at each share of the budget, 0 before the first round ended."""
    gains = [0.0]
    for entry in episode.trajectory:
        if on_test:
            gains.append(normalised(episode.base_score, float(entry.best_test_score or 0.0)))
        else:
            gains.append(normalised(episode.base_validation_score, entry.best_validation_score))
    ends = np.asarray([entry.budget_fraction for entry in episode.trajectory], dtype=np.float64)
    finished = np.searchsorted(ends, budget + 1e-9, side="right")
    return np.asarray(gains, dtype=np.float64)[finished]


def _mean_curve(scores: Any) -> FloatArray:
    """Returns the mean over runs and tasks at each grid point."""
    return np.asarray(np.mean(scores, axis=(0, 1)), dtype=np.float64)


def _look(index: int) -> tuple[str, str]:
    """Returns the colour and line style of the policy at this place; styles change when the colours are used up."""
    return PALETTE[index % len(PALETTE)], LINE_STYLES[(index // len(PALETTE)) % len(LINE_STYLES)]


def _literal(name: str) -> str:
    """Returns a name that Matplotlib draws as it is written and that fits a legend."""
    short = name if len(name) <= 34 else f"{name[:16]}…{name[-16:]}"
    return short.replace("\\", "\\\\").replace("$", r"\$").replace("\n", " ")


def _point(axes: Axes, height: float, estimate: Estimate, colour: str) -> None:
    """Draws one estimate with its interval and its figure."""
    axes.plot([estimate.low, estimate.high], [height, height], color=colour, linewidth=2.2, solid_capstyle="butt")
    axes.plot([estimate.value], [height], "o", color=colour, markersize=6)
    axes.annotate(
        f"{estimate.value:.3f}", (estimate.value, height), xytext=(0, 6), textcoords="offset points",
        ha="center", va="bottom", fontsize=8,
    )  # fmt: skip
    _bare(axes)


def _bare(axes: Axes) -> None:
    """Takes away the frame lines that carry nothing."""
    axes.spines[["top", "right"]].set_visible(False)


def _title(axes: Axes, heading: str, detail: str, recorded: bool) -> None:
    """Sets a left title with a smaller line under it; recorded rounds are named in the title itself."""
    heading = f"{heading}, recorded rounds" if recorded else heading
    axes.set_title(f"{heading}\n", loc="left", fontsize=12)
    axes.annotate(
        detail, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", fontsize=9, color="0.35"
    )


def _empty_figure(width: float, height: float) -> Figure:
    """Returns a figure of that many inches on the Agg canvas."""
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure with one pair of axes."""
    figure = _empty_figure(width, height)
    axes = figure.add_subplot()
    _bare(axes)
    return figure, axes


def _save(figure: Figure, path: str | os.PathLike[str]) -> Figure:
    """Writes the figure as PNG and returns it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    write_atomically(Path(path), buffer.getvalue())
    return figure
