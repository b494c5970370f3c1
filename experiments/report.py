"""The report of a comparison: one HTML file that needs nothing else, with the figures as JSON and Parquet beside it."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..inner_trainers.files import write_atomically
from .comparison import FEW_UNITS, Comparison, EpisodeResult, Estimate, PolicySummary, RoundRecord
from .comparison_files import to_json, write_parquet
from .plots import plot_best_so_far, plot_intervals, plot_training

PACKAGES = ("torch", "trl", "transformers", "stable-baselines3", "gymnasium", "numpy")

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.quiet { color: #555; font-size: .9rem; }
.verdict { border-left: 5px solid #0072B2; background: #f1f6fa; padding: .7rem 1rem; margin: 1rem 0; }
.recorded { border-left: 5px solid #D55E00; background: #fdf3ec; padding: .7rem 1rem; margin: 1rem 0; }
.verdict p, .recorded p { margin: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td { padding: .35rem .45rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
td { font-variant-numeric: tabular-nums; } td .interval { color: #555; display: block; font-size: .78rem;
  white-space: nowrap; }
td.text, td:first-child { overflow-wrap: anywhere; } td.text { min-width: 9rem; } td:first-child { min-width: 7.5rem; }
pre { background: #f4f4f4; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
"""


def write_report(
    directory: str | os.PathLike[str],
    comparison: Comparison,
    training: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    command: str,
) -> Path:
    """Writes ``report.html`` and what it was made from into the directory, and returns the path of ``report.html``.

    Beside it go ``comparison.json``, ``run.json`` (command, settings, versions, training), ``episodes.parquet``,
    ``rounds.parquet`` and the plots. The HTML holds its plots and needs none of them. It is written last, so
    where it exists the others do too.

    Args:
        directory: made when it does not exist.
        comparison: from `posttrain_gym.experiments.comparison.summarise`.
        training: how the meta-policy was trained: ``rows`` for `posttrain_gym.experiments.plots.plot_training`, and
            any other entries, which are listed. None when no meta-policy was trained.
        settings: what a reader needs to run it again (seeds, budget, instances, versions, ``wall_seconds``, ...);
            nested mappings are listed one line per entry, and numbers under a key ending in ``_seconds`` as times.
        command: the command line that makes this report.

    Returns:
        The path of ``report.html``.
    """
    folder = Path(directory)
    training_rows: Sequence[Mapping[str, Any]] = list((training or {}).get("rows", ()))
    training_settings = {key: value for key, value in (training or {}).items() if key != "rows"}
    pictures = {"best_so_far": folder / "best_so_far.png", "intervals": folder / "intervals.png"}
    plot_best_so_far(comparison.episodes, pictures["best_so_far"], confidence=comparison.confidence)
    plot_intervals(comparison, pictures["intervals"])
    if training_rows:
        pictures["training"] = folder / "training.png"
        plot_training(training_rows, pictures["training"])
    write_parquet(comparison.episodes, folder)
    write_atomically(folder / "comparison.json", to_json(comparison).encode())
    run = {
        "command": command,
        "versions": _versions(),
        "settings": dict(settings),
        "training": None if training is None else {**training_settings, "rows": [dict(row) for row in training_rows]},
    }
    write_atomically(folder / "run.json", json.dumps(run, indent=2, default=_plain).encode())

    sections = [
        _head(comparison),
        _section("Policies", _policies(comparison)),
        _section("Plots", _plots(comparison, pictures)),
        _section("Best recipe found on each instance", _best_recipes(comparison)),
        _section("Failed rounds", _failures(comparison)),
        _section("What was run", _what_was_run(comparison, training_settings, settings, command)),
        _section("Words", _words(comparison)),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Comparison of {len(comparison.policies)} post-training policies</title>\n<style>{STYLE}</style>\n"
        f"</head>\n<body>\n{''.join(sections)}</body>\n</html>\n"
    )
    return write_atomically(folder / "report.html", page.encode())


def verdicts(comparison: Comparison) -> list[str]:
    """Returns what the figures allow to be said, as plain sentences: one summary, then one for each policy.

    A difference counts as shown when the interval of the paired difference to the reference excludes zero and rests
    on at least `FEW_UNITS` seeds per instance (or instances, where these are what the bootstrap redraws). With fewer
    the percentile bootstrap is too narrow and the difference is called a hint.
    """
    reference = comparison.policy(comparison.reference)
    others = [summary for summary in comparison.policies if summary.policy != comparison.reference]
    if not others:
        return [f"Only {reference.policy} was run: there is nothing to compare it with."]
    if comparison.resampling == "none":
        first = "Each policy ran a single episode: no interval can be given and no difference is shown either way."
        return [first, *_noise_sentences(comparison)]
    sentences = []
    counts = {"better": 0, "worse": 0, "hint": 0, "none": 0}
    for summary in others:
        outcome, sentence = _verdict(comparison, summary, reference)
        counts[outcome] += 1
        sentences.append(sentence)
    parts = [
        f"{counts['better']} shown better",
        f"{counts['worse']} shown worse",
        *([f"{counts['hint']} with a hint of a difference"] if counts["hint"] else []),
        f"{counts['none']} with no difference shown",
    ]
    policies = "1 policy" if len(others) == 1 else f"{len(others)} policies"
    first = f"Of {policies} held against {reference.policy} at the same budget: {', '.join(parts)}."
    if len(others) > 2:
        first += (
            f" These are {len(others)} comparisons at {100 * comparison.confidence:g}% each, not corrected for their "
            "number: one that only just excludes zero may be chance."
        )
    return [first, *sentences, *_noise_sentences(comparison)]


def _verdict(comparison: Comparison, summary: PolicySummary, reference: PolicySummary) -> tuple[str, str]:
    """Returns ``better``, ``worse``, ``hint`` or ``none`` and the sentence that says it with its figures."""
    difference = summary.gain_over_reference
    if difference is None:
        raise ValueError(f"Policy {summary.policy!r} is the reference; it has no difference to itself.")
    figures = (
        f"mean gain {summary.gain.value:.3f} against {reference.gain.value:.3f}, paired difference "
        f"{difference.value:+.3f}, {100 * comparison.confidence:g}% interval {_interval(difference, sign=True)}"
    )
    if (summary.recorded_episodes > 0) != (reference.recorded_episodes > 0):
        return "none", (
            f"{summary.policy}: not comparable with {reference.policy}, because one rests on recorded rounds and "
            f"the other does not ({figures})."
        )
    if difference.low <= 0.0 <= difference.high:
        return "none", (
            f"{summary.policy}: the interval of its difference to {reference.policy} includes zero, so no difference "
            f"is shown at this budget ({figures})."
        )
    direction = "better" if difference.value > 0.0 else "worse"
    if comparison.resampled_units < FEW_UNITS:
        unit = "seeds per instance" if comparison.resampling == "seeds" else "instances"
        return "hint", (
            f"{summary.policy}: looks {direction} than {reference.policy}, but {comparison.resampled_units} {unit} "
            f"are too few to show it; run at least {FEW_UNITS} ({figures})."
        )
    scope = "on these instances" if comparison.resampling == "seeds" else "over instances like these"
    return direction, f"{summary.policy}: {direction} than {reference.policy} {scope} ({figures})."


def _noise_sentences(comparison: Comparison) -> list[str]:
    """Returns a warning for the policies most of whose own gains are within the TEST split's noise."""
    noisy = [
        f"{summary.policy} {round(summary.within_noise_share * summary.episodes)} of {summary.episodes}"
        for summary in comparison.policies
        if summary.within_noise_share >= 0.5
    ]
    if not noisy:
        return []
    return [f"Episodes whose own TEST change is within noise, where that is half or more: {', '.join(noisy)}."]


def _head(comparison: Comparison) -> str:
    """Returns the title, the mark of recorded rounds and the verdict."""
    kind = "on recorded rounds" if comparison.recorded else "on real training rounds"
    parts = [
        "<h1>Which policy post-trains best?</h1>\n",
        f'<p class="quiet">{len(comparison.policies)} policies, {_count(len(comparison.instances), "instance")}, '
        f"{_count(comparison.seeds_per_instance, 'seed')} each, same budget, {kind}. "
        f"Written by posttrain-gym {_text(__version__)}.</p>\n",
    ]
    if comparison.recorded:
        count = sum(episode.recorded for episode in comparison.episodes)
        parts.append(
            '<div class="recorded"><p><strong>Recorded rounds.</strong> '
            f"{count} of {len(comparison.episodes)} episodes were answered from recorded rounds or a model fitted to "
            "them, not by training. Check their figures on real training before relying on them.</p></div>\n"
        )
    first, *rest = verdicts(comparison)
    parts.append(f'<div class="verdict"><p><strong>Verdict.</strong> {_text(first)}</p>')
    if rest:
        parts.append(f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in rest)}</ul>")
    parts.append("</div>\n")
    return "".join(parts)


def _what_was_run(
    comparison: Comparison, training: Mapping[str, Any], settings: Mapping[str, Any], command: str
) -> str:
    """Returns the command and the settings."""
    seeds = sorted({episode.seed for episode in comparison.episodes})
    rows: list[tuple[str, str]] = [
        ("policies", ", ".join(summary.policy for summary in comparison.policies)),
        ("reference", comparison.reference),
        ("instances", _listed(comparison.instances)),
        ("seeds", _listed(seeds)),
        ("episodes", str(len(comparison.episodes))),
        ("rounds", str(sum(episode.rounds for episode in comparison.episodes))),
        ("intervals", f"{comparison.interval_label}; {comparison.resamples} bootstrap samples"),
    ]
    known = {name for name, _ in rows}
    rows += [(name if name not in known else f"{name} (as asked)", value) for name, value in _flattened(settings)]
    rows += [(f"training: {name}", value) for name, value in _flattened(training)]
    rows.append(("versions", ", ".join(f"{name} {number}" for name, number in _versions().items())))
    return (
        "<p>Every policy ran on the same instances, with the same seeds and the same budget. "
        f"The command that makes this report:</p>\n<pre>{_text(command)}</pre>\n"
        + _table(("setting", "value"), [(_text(name), _text(value)) for name, value in rows], text_columns=(1,))
    )


def _policies(comparison: Comparison) -> str:
    """Returns the table of figures, best mean gain first."""
    heads = (
        "policy",
        "episodes",
        "mean gain",
        "interquartile mean gain",
        "mean regret",
        f"gain over {comparison.reference}",
        f"P(better than {comparison.reference})",
        "within noise",
        "rounds",
        "budget used",
    )
    rows = []
    for summary in sorted(comparison.policies, key=lambda entry: -entry.gain.value):
        marks = " (reference)" if summary.policy == comparison.reference else ""
        marks += " [recorded]" if summary.recorded_episodes else ""
        rows.append(
            (
                _text(summary.policy + marks),
                str(summary.episodes),
                _estimate(comparison, summary.gain),
                _estimate(comparison, summary.interquartile_gain),
                _estimate(comparison, summary.regret),
                _estimate(comparison, summary.gain_over_reference, sign=True),
                _estimate(comparison, summary.probability_over_reference),
                f"{100 * summary.within_noise_share:.0f}%",
                f"{summary.mean_rounds:.1f}",
                f"{100 * summary.mean_budget_used:.0f}%",
            )
        )
    caption = f"Gains are normalised and on TEST items. In brackets: {comparison.interval_label}."
    return f"<p>{_text(caption)}</p>\n" + _table(tuple(_text(head) for head in heads), rows)


def _plots(comparison: Comparison, pictures: Mapping[str, Path]) -> str:
    """Returns the plots, each with a sentence on how to read it."""
    reading = {
        "best_so_far": (
            "Best so far. Read from left to right: how much each policy has gained once that share of the budget is "
            "spent. A line that is higher earlier finds good recipes sooner; where bands overlap widely, the order of "
            "the lines means little."
        ),
        "intervals": (
            "Gain and regret. A point is the mean over a policy's episodes, the bar its interval. The bars are of "
            "each policy alone; the verdict above uses the difference on the same instance and seed, so bars that "
            "overlap can still go with a shown difference."
        ),
        "training": (
            "Meta-training. Each dot is one training episode of the meta-policy, the line the mean of the latest ones: "
            "if it does not rise, the policy has not learned from these rounds."
        ),
    }
    parts = []
    for name, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        alternative = reading[name].split(".", 1)[0]
        parts.append(
            f'<figure style="margin: 1rem 0"><img alt="{_text(alternative)}" src="data:image/png;base64,{data}">\n'
            f'<figcaption class="quiet">{_text(reading[name])}</figcaption></figure>\n'
        )
    return "".join(parts)


def _best_recipes(comparison: Comparison) -> str:
    """Returns, for each instance, the episode that is best on validation and the recipe of its best checkpoint."""
    rows = []
    for instance in comparison.instances:
        episode = max(
            (entry for entry in comparison.episodes if entry.instance == instance),
            key=lambda entry: entry.validation_gain,
        )
        best = _best_round(episode)
        recipe = "none improved on the base checkpoint" if best is None else best.recipe or "not recorded"
        where = "-" if best is None else f"{best.round} of {episode.rounds}"
        noise = " (within noise)" if episode.within_noise else ""
        rows.append(
            (
                str(instance),
                _text(recipe),
                _text(episode.policy),
                str(episode.seed),
                where,
                f"{episode.validation_gain:.3f}",
                f"{episode.normalised_gain:.3f}{noise}",
                f"{episode.base_score:.3f}&nbsp;→&nbsp;{episode.final_score:.3f}",
            )
        )
    heads = ("instance", "recipe", "policy", "seed", "round", "validation gain", "TEST gain", "TEST score")
    return (
        "<p>Chosen on validation, the split a policy sees, and reported on TEST. The recipe is that of the round whose "
        "checkpoint was handed over; rounds before it may have contributed. As the best of many, its validation gain "
        "is flattered; the TEST gain is not.</p>\n" + _table(heads, rows, text_columns=(1, 2))
    )


def _failures(comparison: Comparison) -> str:
    """Returns the failed rounds counted by policy and cause."""
    causes = sorted({cause for summary in comparison.policies for cause in summary.failures})
    if not causes:
        return "<p>No round failed.</p>\n"
    rows = []
    for summary in comparison.policies:
        rounds = round(summary.mean_rounds * summary.episodes)
        counts = [summary.failures.get(cause, 0) for cause in causes]
        rows.append((_text(summary.policy), str(rounds), str(sum(counts)), *(str(count) for count in counts)))
    heads = ("policy", "rounds", "failed", *(_text(cause) for cause in causes))
    return "<p>A failed round costs budget and is kept as data; its cause is the trainer's.</p>\n" + _table(heads, rows)


def _words(comparison: Comparison) -> str:
    """Returns the terms a newcomer needs."""
    terms = {
        "normalised gain": "(final - base) / (1 - base): the share of the room above the base checkpoint's score won; "
        "0 is no change, 1 a perfect score, and negative is worse than the base.",
        "interquartile mean": "the mean of the middle half of the episodes: less swayed by a single lucky one.",
        "regret": "the best gain any policy here reached on the same instance and seed, minus this one's; 0 is best.",
        f"gain over {comparison.reference}": "the difference to it on the same instance and seed, averaged.",
        f"P(better than {comparison.reference})": "the chance that a random episode of the policy beats a random one "
        "of the reference on the same instance; 0.5 is no difference.",
        "within noise": "the share of episodes whose TEST score moved by at most twice its standard error.",
        "budget used": "the mean share spent; policies may stop early. Only a budget in seconds can be passed.",
    }
    items = "".join(f"<li><strong>{_text(term)}</strong>: {_text(meaning)}</li>" for term, meaning in terms.items())
    return (
        f"<ul>{items}</ul>\n<p>Statistics as in Agarwal et al. (2021), Deep Reinforcement Learning at the Edge of the "
        "Statistical Precipice.</p>\n"
    )


def _best_round(episode: EpisodeResult) -> RoundRecord | None:
    """Returns the round that set the best validation score, or None when none beat the base checkpoint."""
    best, found = episode.base_validation_score, None
    for entry in episode.trajectory:
        if entry.best_validation_score > best:
            best, found = entry.best_validation_score, entry
    return found


def _estimate(comparison: Comparison, estimate: Estimate | None, *, sign: bool = False) -> str:
    """Returns a table cell with a figure and, where there is one, its interval."""
    if estimate is None:
        return "-"
    value = f"{estimate.value:+.3f}" if sign else f"{estimate.value:.3f}"
    if comparison.resampling == "none":
        return value
    return f'{value}<span class="interval">{_interval(estimate, sign=sign)}</span>'


def _interval(estimate: Estimate, *, sign: bool = False) -> str:
    """Returns the interval as ``[low, high]``."""
    return f"[{estimate.low:+.3f}, {estimate.high:+.3f}]" if sign else f"[{estimate.low:.3f}, {estimate.high:.3f}]"


def _section(heading: str, body: str) -> str:
    """Returns a headed section."""
    return f"<h2>{_text(heading)}</h2>\n{body}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = ()) -> str:
    """Returns a table of cells that are HTML already; ``text_columns`` are set flush left."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = [f'<{tag} class="text">' if index in text_columns else f"<{tag}>" for index in range(len(cells))]
        return f"<tr>{''.join(f'{start}{cell}</{tag}>' for start, cell in zip(marked, cells, strict=True))}</tr>\n"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>\n<thead>{line("th", heads)}</thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns the settings as rows of text, nested mappings with their keys joined by a dot."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _flattened(value, f"{name}.")
        elif name.endswith("_seconds") and isinstance(value, int | float) and math.isfinite(value):
            rows.append((name.removesuffix("_seconds") + " time", _duration(float(value))))
        elif isinstance(value, list | tuple):
            rows.append((name, _listed(value)))
        else:
            rows.append((name, str(value)))
    return rows


def _listed(values: Sequence[Any]) -> str:
    """Returns the values in a row, the middle of a long one left out."""
    shown = [str(value) for value in values]
    if len(shown) > 24:
        shown = [*shown[:10], "…", *shown[-3:], f"({len(values)} in all)"]
    return ", ".join(shown) if shown else "none"


def _duration(seconds: float) -> str:
    """Returns a length of time in the two units that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _count(number: int, noun: str) -> str:
    """Returns ``1 seed`` or ``3 seeds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages the figures depend on, where installed."""
    found = {"posttrain-gym": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """Returns a JSON form of what ``json`` does not know: NumPy scalars and arrays as numbers, the rest as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _text(value: object) -> str:
    """Returns the value as text that HTML shows as it is."""
    return html.escape(str(value), quote=True)
