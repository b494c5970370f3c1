"""Makes the tables of the documentation from what the code holds, so that neither is typed twice.

python -m posttrain_gym.experiments.doc_tables
"""

from __future__ import annotations

from ..inner_trainers.base import CAUSES
from ..inner_trainers.fault_kinds import FAULTS
from ..inner_trainers.trl.algorithms import ALGORITHMS


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


def main() -> None:
    """Print the tables."""
    print(algorithm_table(), fault_table(), sep="\n\n")


if __name__ == "__main__":
    main()
