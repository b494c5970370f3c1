"""Behaviour cloning: a policy net that decides as the logged decisions of rounds did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from ...inner_trainers.adjustments import CATALOGUE, CATALOGUE_NAMES, NONE, Adjustment
from ...inner_trainers.messages import require_integer, require_number
from ...inner_trainers.recipe import Recipe
from .base import ControlState
from .features import FEATURE_COUNT, Features, nearest_action
from .net import HIDDEN, LAYERS, PolicyNet, checked_actions


@dataclass(frozen=True)
class LoggedRound:
    """The decisions of one round, in order.

    Attributes:
        name: where it is from, for messages.
        recipe: what the round was asked to do.
        sources: its sources, sorted.
        decisions: what was seen, and what was done then.
    """

    name: str
    recipe: Recipe
    sources: tuple[str, ...]
    decisions: tuple[tuple[ControlState, Adjustment], ...]


@dataclass(frozen=True)
class Examples:
    """Decisions as arrays.

    Attributes:
        features: (n, FEATURE_COUNT) float32.
        legal: (n, 37) bool.
        actions: (n,) int64, indices into the catalogue.
        rounds: (n,) int64, which round each is from.
        steps: (n,) int64, optimiser steps done then.
        approximated: decisions outside the catalogue, taken as the entry nearest to them.
        left_out: decisions that no legal entry is near to.
        hardware: whether the features show signals that a clock decides.
    """

    features: np.ndarray
    legal: np.ndarray
    actions: np.ndarray
    rounds: np.ndarray
    steps: np.ndarray
    approximated: int = 0
    left_out: int = 0
    hardware: bool = False

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class CloningReport:
    """How well a net does what the logs did.

    Attributes:
        train_examples: decisions learned from.
        held_out_examples: decisions it is judged by, of other rounds (of one round's end when there are too few).
        held_out_rounds: rounds they are from; 0 when they are the ends of rounds learned from.
        accuracy: share of held-out decisions it repeats.
        nothing_accuracy: the same for always choosing ``none``.
        balanced_accuracy: mean of ``recall``.
        recall: entry -> share of the held-out decisions for it that the net repeats.
        precision: entry -> share of the net's held-out choices of it that are right; None where it chose it never.
        counts: entry -> its decisions in the logs.
        approximated: see `Examples`.
        left_out: see `Examples`.
    """

    train_examples: int
    held_out_examples: int
    held_out_rounds: int
    accuracy: float
    nothing_accuracy: float
    balanced_accuracy: float
    recall: dict[str, float] = field(default_factory=dict)
    precision: dict[str, float | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    approximated: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class CloningSettings:
    """How a net is cloned.

    Attributes:
        updates: gradient steps.
        batch_size: examples per gradient step.
        learning_rate: of Adam, falling to 0 as a cosine.
        sparsity: what the sizes of the first layer's weights, summed, add to the loss: rules look at few features.
        balance: in [0, 1]: examples of an entry weigh as its count to the power ``-balance``; 0 takes the logs as they
            are, in which ``none`` is nearly everything, 1 gives every entry the same weight in all.
        smoothing: share of the target in [0, 1) that is spread over the legal entries; it leaves a fine-tuning
            something to explore with.
        held_out: share of the rounds, in (0, 1), that is kept for the report.
        threshold: see `PolicyNet`.
    """

    updates: int = 600
    batch_size: int = 128
    learning_rate: float = 5e-3
    sparsity: float = 1e-3
    balance: float = 0.3
    smoothing: float = 0.01
    held_out: float = 0.2
    threshold: float = 0.5

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            ValueError: one outside its range.
        """
        require_integer("updates", self.updates, low=1, high=1_000_000)
        require_integer("batch_size", self.batch_size, low=1, high=1_000_000)
        require_number("learning_rate", self.learning_rate, low=0, high=1, low_open=True)
        require_number("sparsity", self.sparsity, low=0, high=10)
        require_number("balance", self.balance, low=0, high=1)
        require_number("smoothing", self.smoothing, low=0, high=0.5)
        require_number("held_out", self.held_out, low=0, high=0.9, low_open=True)
        require_number("threshold", self.threshold, low=0, high=1)


def gather(rounds: Iterable[LoggedRound], *, hardware: bool = False) -> Examples:
    """Return logged decisions as arrays.

    A decision that is no entry of the catalogue is taken as the nearest one of its kind, when that was legal.

    Args:
        rounds: the logs.
        hardware: whether the net shall see signals that a clock decides.

    Raises:
        ValueError: there is no decision to learn from.
    """
    features = Features(hardware=hardware)
    rows: list[np.ndarray] = []
    legal: list[Sequence[bool]] = []
    actions: list[int] = []
    numbers: list[int] = []
    steps: list[int] = []
    approximated = left_out = 0
    for number, logged in enumerate(rounds):
        features.begin(logged.recipe, logged.sources)
        for state, adjustment in logged.decisions:
            action, exact = _action_of(adjustment, logged.sources)
            if action is None or not state.legal[action]:
                left_out += 1
            else:
                rows.append(features.vector(state).copy())
                legal.append(state.legal)
                actions.append(action)
                numbers.append(number)
                steps.append(state.step)
                approximated += not exact
            features.note(adjustment, state.step)
    if not rows:
        raise ValueError(f"cloning: the logs hold no decision to learn from ({left_out} were left out).")
    return Examples(
        np.stack(rows),
        np.asarray(legal, dtype=bool),
        np.asarray(actions, dtype=np.int64),
        np.asarray(numbers, dtype=np.int64),
        np.asarray(steps, dtype=np.int64),
        approximated,
        left_out,
        hardware,
    )


def clone(
    examples: Examples,
    *,
    seed: int = 0,
    settings: CloningSettings | None = None,
    actions: Sequence[str] | None = None,
) -> tuple[PolicyNet, CloningReport]:
    """Return a net that decides as the examples do, and how well it does on rounds it has not seen.

    The same examples, seed and settings give the same weights; neither torch's nor numpy's global random state is
    touched. Held-out rounds stay out of the training. The net may do nothing sooner again or more often in a round
    than the logs did, see `limits_of`.

    Args:
        examples: what to imitate.
        seed: decides initial weights, batches, and which rounds are held out.
        settings: None for the defaults.
        actions: catalogue names the net may choose; None for those in the logs.

    Raises:
        ValueError: too few examples, or an action in the logs that is not among ``actions``.
    """
    settings = CloningSettings() if settings is None else settings
    used = [CATALOGUE_NAMES[index] for index in sorted(set(examples.actions.tolist()))]
    allowed = checked_actions(used if actions is None else actions)
    missing = [name for name in used if name not in allowed]
    if missing:
        raise ValueError(f"actions: the logs hold {missing[0]!r}, which is not among {', '.join(allowed)}.")
    held_out, whole_rounds = _held_out(examples, settings.held_out, seed)
    module = _train(examples, ~held_out, allowed, seed, settings)
    net = from_torch(module, actions=allowed, hardware=examples.hardware, threshold=settings.threshold)
    report = _report(net, examples, held_out, whole_rounds)
    return replace(net, limits=limits_of(examples), facts={"cloning": report.to_dict()}), report


def limits_of(examples: Examples) -> dict[str, tuple[int, int]]:
    """Return for each entry but ``none`` the fewest steps between two times in a round, and the most times in one."""
    limits: dict[str, tuple[int, int]] = {}
    for action in sorted(set(examples.actions.tolist()) - {NONE}):
        rest, times = 0, 1
        for number in np.unique(examples.rounds):
            steps = examples.steps[(examples.rounds == number) & (examples.actions == action)]
            if len(steps) > 1:
                gap = int(np.diff(steps).min())
                rest, times = gap if times == 1 else min(rest, gap), max(times, len(steps))
        limits[CATALOGUE_NAMES[action]] = (rest, times)
    return limits


def make_module(rng: np.random.Generator) -> torch.nn.Sequential:
    """Return the net's torch twin with fresh weights: uniform in ±1/sqrt(inputs), as torch itself begins."""
    widths = (FEATURE_COUNT, *HIDDEN, len(CATALOGUE_NAMES))
    with torch.random.fork_rng(devices=[]):  # a `Linear` draws its weights before they are replaced
        linears = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    with torch.no_grad():
        for linear in linears:
            bound = 1.0 / math.sqrt(linear.in_features)
            for parameter in (linear.weight, linear.bias):
                parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, tuple(parameter.shape))))
    return torch.nn.Sequential(linears[0], torch.nn.Tanh(), linears[1], torch.nn.Tanh(), linears[2])


def to_torch(net: PolicyNet) -> torch.nn.Sequential:
    """Return the net as a torch module from features (n, FEATURE_COUNT) to unmasked logits (n, 37)."""
    module = make_module(np.random.default_rng(0))
    with torch.no_grad():
        for name, parameter in zip(LAYERS, module.parameters(), strict=True):
            parameter.copy_(torch.from_numpy(net.weights[name]))
    return module


def from_torch(module: torch.nn.Sequential, *, actions: Sequence[str], hardware: bool, threshold: float) -> PolicyNet:
    """Return a torch module of `make_module`'s shape as a net."""
    weights = {
        name: parameter.detach().cpu().numpy().astype(np.float32, copy=True)
        for name, parameter in zip(LAYERS, module.parameters(), strict=True)
    }
    return PolicyNet(weights, tuple(actions), hardware, threshold)


def _train(
    examples: Examples, chosen: np.ndarray, allowed: Sequence[str], seed: int, settings: CloningSettings
) -> torch.nn.Sequential:
    """Return a module fitted to the chosen examples."""
    rng = np.random.default_rng(seed)
    module = make_module(rng)
    features = torch.from_numpy(examples.features[chosen])
    may = np.isin(CATALOGUE_NAMES, allowed)
    legal = torch.from_numpy(examples.legal[chosen] & may)
    actions = torch.from_numpy(examples.actions[chosen])
    weights = torch.from_numpy(_weights(examples.actions[chosen], settings.balance))
    spread = legal / legal.sum(dim=1, keepdim=True)
    inputs = next(module.parameters())  # the first layer's weights
    optimizer = torch.optim.Adam(module.parameters(), lr=settings.learning_rate, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.updates)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more add up in another order, and equal runs would differ
    try:
        with torch.enable_grad():
            for batch in islice(_batches(len(actions), settings.batch_size, rng), settings.updates):
                logits = module(features[batch]).masked_fill(~legal[batch], -1e9)
                log_odds = torch.log_softmax(logits, dim=1)
                own = log_odds.gather(1, actions[batch, None])[:, 0]
                rest = (log_odds * spread[batch]).sum(dim=1)
                loss = -((1 - settings.smoothing) * own + settings.smoothing * rest) * weights[batch]
                optimizer.zero_grad()
                (loss.mean() + settings.sparsity * inputs.abs().sum()).backward()
                optimizer.step()
                schedule.step()
    finally:
        torch.set_num_threads(threads)
    return module


def _batches(count: int, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Yield indices, pass after pass over all of them, each in an order of its own."""
    while True:
        yield from torch.from_numpy(rng.permutation(count)).split(size)


def _weights(actions: np.ndarray, balance: float) -> np.ndarray:
    """Return each example's weight, (n,) float32 with mean 1."""
    counts = np.bincount(actions, minlength=len(CATALOGUE_NAMES)).astype(np.float64)
    weights = counts[actions] ** -balance
    return np.asarray(weights / weights.mean(), dtype=np.float32)


def _held_out(examples: Examples, share: float, seed: int) -> tuple[np.ndarray, int]:
    """Return which examples are held out, (n,) bool, and the number of whole rounds they are.

    Whole rounds when there are at least five, as neighbouring decisions of one round are nearly the same; else the end
    of each round, and 0.

    Raises:
        ValueError: too few examples to hold any out.
    """
    numbers = np.unique(examples.rounds)
    if len(numbers) >= 5:
        count = max(1, round(share * len(numbers)))
        chosen = np.random.default_rng([seed, 1]).permutation(numbers)[:count]
        return np.isin(examples.rounds, chosen), count
    held_out = np.zeros(len(examples), dtype=bool)
    for number in numbers:
        rows = np.flatnonzero(examples.rounds == number)
        held_out[rows[len(rows) - round(share * len(rows)) :]] = True
    if not held_out.any() or held_out.all():
        raise ValueError(f"cloning: {len(examples)} decisions are too few to learn from some and judge by others.")
    return held_out, 0


def _report(net: PolicyNet, examples: Examples, held_out: np.ndarray, rounds: int) -> CloningReport:
    rows = np.flatnonzero(held_out)
    right = examples.actions[rows]
    chosen = np.array([int(net.probabilities(examples.features[row], examples.legal[row]).argmax()) for row in rows])
    recall, precision = {}, {}
    for action in sorted(set(right.tolist()) | set(chosen.tolist())):
        name, asked, given = CATALOGUE_NAMES[action], right == action, chosen == action
        if asked.any():
            recall[name] = float(np.mean(chosen[asked] == action))
        precision[name] = float(np.mean(right[given] == action)) if given.any() else None
    counts = Counter(examples.actions.tolist())
    return CloningReport(
        train_examples=len(examples) - len(rows),
        held_out_examples=len(rows),
        held_out_rounds=rounds,
        accuracy=float(np.mean(chosen == right)),
        nothing_accuracy=float(np.mean(right == NONE)),
        balanced_accuracy=float(np.mean(list(recall.values()))),
        recall=recall,
        precision=precision,
        counts={CATALOGUE_NAMES[action]: count for action, count in sorted(counts.items())},
        approximated=examples.approximated,
        left_out=examples.left_out,
    )


def _action_of(adjustment: Adjustment, sources: Sequence[str]) -> tuple[int | None, bool]:
    """Return the catalogue entry of an adjustment, and whether it is that exactly."""
    for index, entry in enumerate(CATALOGUE):
        if entry.kind == adjustment.kind and entry.adjustment(sources) == adjustment:
            return index, True
    return nearest_action(adjustment, sources), False
