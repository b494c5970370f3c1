"""How the command line prints its results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .progress import console, plain

if TYPE_CHECKING:
    from .comparison import Comparison

SHOWN_ADJUSTMENTS = 6


def print_comparison(comparison: Comparison) -> None:
    """Print the table of a comparison and what it allows to be said."""
    from .report import verdicts

    rows = []
    for policy in comparison.policies:
        rows.append(
            {
                "policy": policy.policy,
                "episodes": policy.episodes,
                "gain (test)": _estimate(policy.gain),
                "regret": _estimate(policy.regret),
                "rounds": f"{policy.mean_rounds:.1f}",
                "budget": f"{policy.mean_budget_used:.0%}",
                "failed rounds": sum(policy.failures.values()),
            }
        )
    console.print(table_of(list(rows[0]), rows))
    for sentence in verdicts(comparison):
        console.print(plain(sentence), soft_wrap=True)


def _estimate(estimate: Any) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def print_json(comparison: Comparison) -> None:
    """Print a comparison as one JSON object."""
    from .comparison_files import to_json

    print(to_json(comparison))


def print_round(result: dict[str, Any]) -> None:
    """Print what came of one round, as `run_recipe` returns it."""
    read = {name: value for name, value in result["recipe"].items() if name not in result["ignored"]}
    console.print(f"recipe   {plain(json.dumps(read))}")
    console.print(f"ended    {result['ended']} after {result['steps']} steps")
    if result["failure"] is not None:
        console.print(f"failure  {plain(json.dumps(result['failure']))}")
    for split, scores in result["scores"].items():
        before = f"{scores['before']:.3f} ± {scores['before_error']:.3f}"
        console.print(f"{split:<11}{before} -> {scores['after']:.3f} ± {scores['after_error']:.3f}")
        for name, entry in scores["dimensions"].items() if len(scores["dimensions"]) > 1 else ():
            low, high = entry["interval"]
            console.print(
                plain(
                    f"  {name}: {entry['before']:.3f} -> {entry['mean']:.3f} [{low:.3f}, {high:.3f}], right form "
                    f"{entry['format_rate']:.0%}"
                ),
                soft_wrap=True,
            )
    if "control" in result:
        _print_control(result["control"])
    told = result["telemetry"]
    if told:
        card = f"{told['card']} ({told['reason']})" if "reason" in told else json.dumps(told)
        console.print(f"card     {plain(card)}", soft_wrap=True)
    for flag in result["flags"]:
        console.print(f"flag     {plain(flag)}")


def _print_control(control: dict[str, Any]) -> None:
    from ..inner_trainers.adjustments import Adjustment

    told = f"{control['controller']}: {control['decisions']} decisions, {control['applied']} adjustments"
    console.print(f"control  {plain(told)}")
    shown = [(step, str(Adjustment.from_dict(data))) for step, data in control["adjustments"][:SHOWN_ADJUSTMENTS]]
    more = len(control["adjustments"]) - len(shown)
    if shown:
        listed = ", ".join(f"{what} after step {step}" for step, what in shown) + (f", and {more} more" if more else "")
        console.print(f"         {plain(listed)}", soft_wrap=True)
    if control["log"] is not None:
        say(f"replay   posttrain-gym replay {shlex.quote(control['log'])}")


def say(text: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(plain(text), soft_wrap=True)


def table_of(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of some columns of rows."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[plain(str(row[column])) for column in columns])
    return table
