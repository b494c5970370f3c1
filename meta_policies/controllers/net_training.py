"""Makes a policy net: reads decision logs, clones their decisions, fine-tunes on live rounds, writes the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from ...inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, Adjustment
from .cloning import CloningReport, CloningSettings, LoggedRound, clone, gather
from .log_reader import LoggedDecision, read_log
from .net import PolicyNet


@dataclass(frozen=True)
class NetTraining:
    """What came of making a net.

    Attributes:
        net: the net, as it is in the file.
        path: the file.
        cloning: how well it did what the logs did, before any fine-tuning.
        rounds: rounds in the logs.
    """

    net: PolicyNet
    path: Path
    cloning: CloningReport
    rounds: int


def read_rounds(folders: Iterable[str | Path]) -> list[LoggedRound]:
    """Return the decisions of every round logged in the folders or below them, in the order of their names.

    What a controller was asked before the first step, what the session refused, and rounds without decisions are left
    out. Of a round whose rules only said what they would do, that is taken as done.

    Raises:
        ValueError: a folder without a decision log, or a damaged log; names folder, file and line.
    """
    rounds: list[LoggedRound] = []
    for folder in map(Path, folders):
        found = sorted(path.parent for path in folder.rglob("decisions.jsonl"))
        if not found:
            raise ValueError(f"log {folder}: no decisions.jsonl in it or below; give folders of decision logs.")
        for place in found:
            for number, log in enumerate(read_log(place)):
                said = bool(log.facts.get("log_only"))
                decisions = tuple(
                    (decision.state, wanted)
                    for decision in log.decisions
                    if decision.step > 0 and decision.refused is None
                    if (wanted := _wanted(decision, log.sources, said)) is not None
                )
                if decisions:
                    rounds.append(LoggedRound(f"{place}, round {number}", log.recipe, log.sources, decisions))
    return rounds


def train_net(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    seed: int = 0,
    cloning: CloningSettings | None = None,
    actions: Sequence[str] | None = None,
    hardware: bool = False,
    envs: Sequence[Callable[[], gym.Env[Any, Any]]] = (),
    decisions: int = 0,
    fine_tuning: Any = None,
) -> NetTraining:
    """Make a policy net from decision logs, fine-tune it on live rounds where ``envs`` are given, and write its file.

    Equal logs, environments, seeds and settings give equal bytes.

    Args:
        folders: folders of decision logs, or folders above them.
        out: the file to write, ``.safetensors``.
        seed: decides everything drawn.
        cloning: settings of the cloning; None for the defaults.
        actions: catalogue names the net may choose; None for those in the logs.
        hardware: whether it shall see signals that a clock decides.
        envs: builders of `PostTrain/InLoop-v0` environments to fine-tune on; empty to only clone.
        decisions: decisions of the fine-tuning, in all.
        fine_tuning: a `FineTuningSettings`; None for the defaults.

    Raises:
        ValueError: no log, no decision in the logs, or what `clone` and `fine_tune` refuse.
    """
    rounds = read_rounds(folders)
    net, report = clone(gather(rounds, hardware=hardware), seed=seed, settings=cloning, actions=actions)
    net = replace(net, facts={**net.facts, "seed": seed, "rounds": len(rounds)})
    if envs:
        from .fine_tuning import fine_tune  # loads SB3, which cloning does without

        net, _ = fine_tune(net, envs, decisions=decisions, seed=seed, settings=fine_tuning)
    return NetTraining(net, net.save(out), report, len(rounds))


def _wanted(decision: LoggedDecision, sources: Sequence[str], said: bool) -> Adjustment | None:
    """Return what was done, or would have been where it was only said; None when that is not in the catalogue."""
    if not said:
        return decision.adjustment
    for candidate in decision.candidates:
        if decision.held_back.get(candidate.by) == "log only":
            if candidate.what not in CATALOGUE_NAMES:
                return None
            return CATALOGUE[CATALOGUE_NAMES.index(candidate.what)].adjustment(sources)
    return Adjustment()
