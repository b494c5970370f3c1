"""Shows what an inspection of data found: lines for a terminal, a figure of lengths, a page that stands alone."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..inner_trainers.data.inspection import FileInspection, Inspection
from ..inner_trainers.data.inspection_findings import SEVERITIES
from ..inner_trainers.files import write_atomically
from .plots import DOTS_PER_INCH, PALETTE

BAR = 40
"""Characters of the longest bar in a terminal."""

PARTS = ("prompt", "completion", "whole", "words")
"""Lengths that are shown, in this order."""

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.3rem .6rem;text-align:left;"
    "vertical-align:top}img{max-width:100%}.error{color:#b00020}.warning{color:#8a5300}.note{color:#555}"
)


def lines_of(inspection: Inspection) -> Iterator[str]:
    """Yield what a terminal shows: facts of each file, bars of its lengths, then findings, the gravest first."""
    for file in inspection.files:
        yield from facts_of(file)
        for name in PARTS:
            if name in file.lengths:
                yield from _bars(name, file.lengths)
        for finding in file.findings:
            yield str(finding)
    counts = [_counted(inspection.count(severity), severity) for severity in SEVERITIES]
    yield f"{_counted(len(inspection.files), 'file')}: {', '.join(counts)}"


def facts_of(file: FileInspection) -> Iterator[str]:
    """Yield what is known of a file besides findings."""
    counts = f"{file.rows} rows, {file.distinct} distinct, {file.malformed} malformed"
    yield f"{file.path}: {file.file_format}, {counts}, content hash {file.content_hash}"
    if file.form:
        used = f"rows for {', '.join(file.algorithms)}" if file.algorithms else "no algorithm here trains on it"
        yield f"  form        {file.form} ({used})"
    for name, types in file.columns.items():
        yield f"  column      {name}: {', '.join(f'{kind} ({count})' for kind, count in types.items())}"
    if file.supervised_share is not None:
        sample = ", on a sample" if file.lengths.get("sample") else ""
        yield f"  supervised  {file.supervised_share:.1%} of the tokens that are trained on{sample}"
    if file.scripts:
        yield f"  scripts     {_shares(file.scripts)} (estimate)"
    if file.languages:
        yield f"  languages   {_shares(file.languages)} (estimate, by stop words)"
    for name, told in file.rewards.items():
        if told["rows"]:
            yield (
                f"  verifier    {name:<6} answers: mean {told['mean']:.3f}, {told['least']:g} to {told['greatest']:g}, "
                f"deviation {told['deviation']:.3f}, {told['rows']} rows"
            )


def plot_lengths(inspection: Inspection, path: Path) -> Figure:
    """Draw the histograms of lengths, a row of them for each file, and write them as PNG."""
    figure = _figure(inspection.files)
    write_atomically(path, _png(figure))
    return figure


def write_report(inspection: Inspection, path: Path) -> Path:
    """Write everything as one HTML page that needs no other file."""
    return write_atomically(path, page_of(inspection).encode())


def page_of(inspection: Inspection) -> str:
    """Return the page: of each file its facts, findings and histograms."""
    settings = inspection.settings
    asked = [f"model {settings.model or 'none'}", f"algorithm {settings.algorithm or 'any'}"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Data inspection</title>",
        f"<style>{_STYLE}</style><h1>Data inspection</h1>",
        f"<p>{html.escape(', '.join([*asked, f'max_length {settings.limit}']))}</p>",
    ]
    for file in inspection.files:
        parts.append(f"<h2>{html.escape(file.path)}</h2><pre>{html.escape(chr(10).join(facts_of(file)))}</pre>")
        if file.findings:
            parts.append("<table><tr><th>severity<th>check<th>what<th>rows<th>lines<th>what to do</tr>")
            parts += [
                f"<tr class={one.severity}><td>{one.severity}<td>{one.check}<td>{html.escape(one.problem)}"
                f"<td>{_numbers(one.rows, one.count)}<td>{_numbers(one.lines, one.count)}<td>{html.escape(one.remedy)}"
                for one in file.findings
            ]
            parts.append("</table>")
        else:
            parts.append("<p>Nothing was found.</p>")
        if file.lengths:
            picture = base64.b64encode(_png(_figure([file]))).decode()
            parts.append(f'<img alt="histograms of lengths" src="data:image/png;base64,{picture}">')
    return "\n".join([*parts, "</html>\n"])


def _figure(files: Sequence[FileInspection]) -> Figure:
    shown = [file for file in files if file.lengths] or list(files)
    figure = Figure(figsize=(9, 2.6 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(shown), 3, squeeze=False)
    for row, file in zip(axes, shown, strict=True):
        for axis, name, colour in zip(row, PARTS[:3], PALETTE, strict=False):
            told = file.lengths.get(name)
            if told is None:
                axis.set_axis_off()
                continue
            edges = told["edges"]
            axis.bar(edges[:-1], told["counts"], width=edges[1] - edges[0], align="edge", color=colour)
            axis.yaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_xlabel(f"{name}, {file.lengths['unit']}")
            axis.set_ylabel("rows of the sample" if file.lengths["sample"] else "rows")
        row[0].set_title(Path(file.path).name, loc="left", fontsize=9)
    return figure


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return out.getvalue()


def _bars(name: str, lengths: dict[str, Any]) -> Iterator[str]:
    told = lengths[name]
    unit = "words" if name == "words" else lengths["unit"]
    of = f"{lengths['rows']} rows{' (sample)' if lengths['sample'] else ''}"
    yield (
        f"  {'whole' if name == 'words' else name} in {unit}, {of}: {told['least']} to {told['greatest']}, median "
        f"{told['median']:g}, mean {told['mean']:.1f}, 95 % below {told['p95']:g}, 99 % below {told['p99']:g}"
    )
    most, empty = max(told["counts"]), 0
    for low, high, count in zip(told["edges"], told["edges"][1:], told["counts"], strict=False):
        empty = 0 if count else empty + 1
        if empty > 1:  # of several empty bars in a row the first is shown
            continue
        last = high - 1
        span = f"{low}" if last == low else f"{low}-{last}"
        yield f"  {span:>13} {'█' * max(bool(count), round(BAR * count / most))} {count}"


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:5])


def _numbers(numbers: Sequence[int], count: int) -> str:
    return ", ".join(map(str, numbers)) + (", …" if count > len(numbers) > 0 else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
