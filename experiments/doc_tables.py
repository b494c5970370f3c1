"""Makes the tables of the documentation from what the code holds, so that neither is typed twice.

python -m posttrain_gym.experiments.doc_tables
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..envs.control import CONTROL, SIGNAL_COLUMNS
from ..inner_trainers.adjustments import CATALOGUE, KINDS
from ..inner_trainers.base import CAUSES
from ..inner_trainers.fault_kinds import FAULTS
from ..inner_trainers.signals import SIGNALS, Z_LIMIT
from ..inner_trainers.task_findings import CHECKS
from ..inner_trainers.trl.algorithms import ALGORITHMS, AlgorithmSpec


def _all(spec: AlgorithmSpec) -> bool:
    return True


def _rows_change(spec: AlgorithmSpec) -> bool:
    return not spec.samples_first


_NOTHING_NEW = "no step was taken since the start, the last snapshot or the last rollback"
_MIX = "rows are packed; a source without fitting rows"
_REFUSED: Mapping[str, tuple[Callable[[AlgorithmSpec], bool], str]] = MappingProxyType(
    {
        "none": (_all, ""),
        "stop": (_all, ""),
        "snapshot": (_all, _NOTHING_NEW),
        "rollback": (_all, _NOTHING_NEW),
        "log_more": (_all, "everything is measured already"),
        "log_less": (_all, "nothing more is measured than on a sample"),
        "lr_scale": (_all, "the peak would leave a recipe's range"),
        "lr_restart": (_all, "the next step's rate would not change: before the first step, or a flat schedule"),
        "batch_scale": (_rows_change, "rows are packed; no other size is legal; memory would not hold it"),
        "grad_clip_scale": (_all, "the norm would leave a recipe's range"),
        "kl_scale": (
            lambda spec: bool({"kl_coef", "beta"} & {*spec.reads}),
            "it is 0 and would be lowered, or raised without a reference: a round has one when it began with a "
            "`kl_coef` above 0, or with adapters",
        ),
        "entropy_scale": (lambda spec: "entropy_coef" in spec.reads, "it is 0 and would be lowered"),
        "gamma_add": (lambda spec: "gamma" in spec.reads, "it is at that end of [0, 1] already"),
        "temperature_scale": (
            lambda spec: "temperature" in spec.reads and not spec.samples_first,
            "it would leave [0.05, 5]",
        ),
        "generations_step": (
            lambda spec: spec.grouped and not spec.samples_first,
            "no other number from 2 on in that direction divides the completions of a step",
        ),
        "mix_toward": (_rows_change, f"{_MIX}; the source is the whole mix already"),
        "mix_away": (_rows_change, f"{_MIX}; the source has no weight, or is the only one"),
        "mix_reset": (_rows_change, "rows are packed; the recipe's mix is in force and no hard rows are preferred"),
        "hardest_rows": (
            lambda spec: _rows_change(spec) and (spec.on_policy or not spec.sampled),
            "rows are packed; no row was trained on yet; that share is drawn already",
        ),
        "lora_freeze": (lambda spec: spec.adapters, "`lora_rank` is 0; they are frozen already"),
        "lora_unfreeze": (lambda spec: spec.adapters, "`lora_rank` is 0; they are not frozen"),
    }
)
"""Kind of adjustment -> which algorithms can ever take it, and when it is refused besides."""


def adjustments_table() -> str:
    """Return the Markdown table of adjustments: one row for each kind, with its entries of the catalogue."""
    lines = [
        "| adjustment | in the catalogue | what it does | algorithms | refused when |",
        "|---|---|---|---|---|",
    ]
    for kind, (applies, refused) in _REFUSED.items():
        entries = ", ".join(
            f"`{entry.name}`" + ("" if KINDS[kind].low is None else f" ({entry.value:g})")
            for entry in CATALOGUE
            if entry.kind == kind
        )
        names = [name for name, spec in ALGORITHMS.items() if applies(spec)]
        algorithms = "all" if len(names) == len(ALGORITHMS) else ", ".join(f"`{name}`" for name in names)
        lines.append(f"| `{kind}` | {entries} | {KINDS[kind].summary} | {algorithms} | {refused} |")
    return "\n".join(lines)


def signal_table() -> str:
    """Return the Markdown table of signals, in the order of vectors."""
    lines = ["| group | signal | unit and range | what it says |", "|---|---|---|---|"]
    for name, kind in SIGNALS.items():
        clocked = " (clocked)" if kind.clocked else ""
        lines.append(f"| {kind.group} | `{name}` | {kind.unit} | {kind.summary}{clocked} |")
    return "\n".join(lines)


def algorithm_table() -> str:
    """Return the Markdown table of inner algorithms."""
    lines = ["| algorithm | what it is | trains on | losses | reads |", "|---|---|---|---|---|"]
    for spec in ALGORITHMS.values():
        rows = f"`{spec.rows}`" + (" and the task's teacher" if spec.needs_teacher else "")
        losses = ", ".join(f"`{loss}`" for loss in spec.losses) if len(spec.losses) > 1 else ""
        reads = ", ".join(f"`{name}`" for name in spec.reads)
        lines.append(f"| `{spec.name}` | {spec.summary} | {rows} | {losses} | {reads} |")
    return "\n".join(lines)


def fault_table() -> str:
    """Return the Markdown table of faults, in the order of causes."""
    lines = ["| cause | kind | meaning | responses |", "|---|---|---|---|"]
    for cause in CAUSES:
        for name, fault in FAULTS.items():
            if fault.cause == cause:
                lines.append(f"| `{cause}` | `{name}` | {fault.meaning} | {', '.join(fault.responses)} |")
    return "\n".join(lines)


def check_table() -> str:
    """Return the Markdown table of what `check-task` looks at."""
    lines = ["| check | what holds of a task that passes |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {meaning} |" for name, meaning in CHECKS.items())])


def in_loop_observation_table() -> str:
    """Return the Markdown table of what is observed besides, or otherwise, where rounds can be adjusted."""
    rows = [
        ("phase", "0", "`phase`", 0, "0: a recipe is asked for, or the round was settled; 1: an adjustment is"),
        ("recipe", "0 to R-1", "`recipe`", -1, "the running round's recipe, encoded; all 0 when none runs"),
    ]
    for index, (name, kind) in enumerate(SIGNALS.items()):
        clock = "; absent unless hardware signals are shown" if kind.clocked else ""
        rows.append(("signals", str(index), f"`{name}`", -1, f"z-score over {Z_LIMIT:g}: {kind.summary}{clock}"))
    first, last = len(SIGNALS), len(SIGNAL_COLUMNS) - 1
    rows.append(
        ("signals", f"{first} to {last}", "`has_SIGNAL`", 0, "per signal, in the same order: 1 when it was measured")
    )
    rows += [
        ("control", str(index), f"`{column.name}`", int(column.low), column.meaning)
        for index, column in enumerate(CONTROL)
    ]
    lines = ["| key | index | column | range | unit or meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{key}` | {index} | {name} | [{low}, 1] | {meaning} |" for key, index, name, low, meaning in rows]
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    tables = (algorithm_table, fault_table, signal_table, adjustments_table, in_loop_observation_table, check_table)
    print(*(table() for table in tables), sep="\n\n")


if __name__ == "__main__":
    main()
