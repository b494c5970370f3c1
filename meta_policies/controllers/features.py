"""What the policy net sees of a running round: a `ControlState` as one float32 vector in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType

import numpy as np

from ...inner_trainers.adjustments import CATALOGUE, SOURCE_SLOTS, Adjustment
from ...inner_trainers.recipe import Recipe
from ...inner_trainers.signals import SIGNALS, Z_LIMIT
from .base import ControlState

LEVEL_SCALES: Mapping[str, float] = MappingProxyType(
    {
        "grad_norm_ratio": 10.0,
        "grad_variance": 1e-4,
        "grad_clip_ratio": 0.5,
        "loss_slope": 0.01,
        "loss_curvature": 0.001,
        "reward_sparsity": 0.5,
        "groups_without_spread": 0.5,
        "reward": 0.5,
        "reward_std": 0.5,
        "kl": 0.1,
        "clip_ratio": 0.1,
        "completion_length": 32.0,
        "completion_truncated": 0.5,
        "step_seconds": 1.0,
        "tokens_per_second": 1000.0,
        "memory_share": 0.5,
        "utilisation": 0.5,
    }
)
"""Value at which a signal's level is 1/2, where it is not 1."""

_LOG_SETTINGS: Mapping[str, float] = MappingProxyType(
    {
        "learning_rate_factor": 6.0,
        "batch_size": 4.0,
        "max_grad_norm": 6.0,
        "temperature": 2.0,
        "num_generations": 4.0,
        "kl_coef": 6.0,
        "beta": 6.0,
        "entropy_coef": 6.0,
    }
)
"""Setting -> doublings, up or down from the recipe, that its feature reaches 1 or -1 at."""

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "lr_scale": "rate",
        "lr_restart": "rate",
        "batch_scale": "batch",
        "grad_clip_scale": "clip",
        "kl_scale": "kl",
        "entropy_scale": "entropy",
        "gamma_add": "gamma",
        "temperature_scale": "temperature",
        "generations_step": "generations",
        "mix_toward": "mix",
        "mix_away": "mix",
        "mix_reset": "mix",
        "hardest_rows": "rows",
        "snapshot": "weights",
        "rollback": "weights",
        "log_more": "log",
        "log_less": "log",
        "lora_freeze": "adapters",
        "lora_unfreeze": "adapters",
    }
)
"""Kind of adjustment -> whose recency it counts toward; ``none`` and ``stop`` leave nothing to remember."""

FOLLOWED: Mapping[str, float] = MappingProxyType(
    {
        "loss": 0.01,
        "reward": 0.05,
        "grad_norm": 0.01,
        "grad_cosine": 0.25,
        "kl": 0.02,
        "entropy": 0.05,
        "reward_sparsity": 0.25,
        "groups_without_spread": 0.25,
    }
)
"""Signal -> smallest size its change is held against, of the signals whose means and changes are followed."""

_FAST, _SLOW = 1 / 4, 1 / 12
_HALF_CHANGE, _HALF_GAIN = 0.05, 0.5
_RECENT_STEPS, _EARLY_STEPS = 4.0, 8.0
_SIGNAL_NAMES = tuple(SIGNALS)
_GROUP_NAMES = tuple(dict.fromkeys(GROUPS.values()))
_SLOTS = range(1, SOURCE_SLOTS + 1)

FEATURE_NAMES: tuple[str, ...] = (
    *(f"z.{name}" for name in _SIGNAL_NAMES),
    *(f"present.{name}" for name in _SIGNAL_NAMES),
    *(f"level.{name}" for name in _SIGNAL_NAMES),
    "setting.learning_rate",
    *(f"setting.{name}" for name in _LOG_SETTINGS),
    "setting.gamma",
    *(f"mix.{slot}" for slot in _SLOTS),
    *(f"mix_change.{slot}" for slot in _SLOTS),
    *(f"recent.{group}" for group in _GROUP_NAMES),
    *(f"mean.{name}" for name in FOLLOWED),
    *(f"change.{name}" for name in FOLLOWED),
    *(f"gain.{name}" for name in FOLLOWED),
    "progress",
    "length",
    "early",
    "broken",
)
"""The vector's entries, in order; `describe_features` says what each is."""

FEATURE_COUNT = len(FEATURE_NAMES)

_COUNT = len(_SIGNAL_NAMES)
_of_signals = itemgetter(*_SIGNAL_NAMES)
_SCALES = tuple(LEVEL_SCALES.get(name, 1.0) for name in _SIGNAL_NAMES)
_FACTORS = np.ones(FEATURE_COUNT, dtype=np.float32)
_FACTORS[:_COUNT] = 1.0 / Z_LIMIT
_UNCLOCKED = np.ones(FEATURE_COUNT, dtype=np.float32)
_UNCLOCKED[: 3 * _COUNT] = [0.0 if kind.clocked else 1.0 for kind in SIGNALS.values()] * 3
_FOLLOWED = tuple((name, smallest, LEVEL_SCALES.get(name, 1.0)) for name, smallest in FOLLOWED.items())
_LARGEST = 1e30


def describe_features() -> list[tuple[str, str]]:
    """Return (entries, what they are with their range), for the documentation's table."""
    return [
        ("z.SIGNAL", f"z-score over {Z_LIMIT:g}, in [-1, 1]; 0 where the signal is absent"),
        ("present.SIGNAL", "1 where the signal was measured, else 0"),
        ("level.SIGNAL", "x / (|x| + scale) of the raw value x, in (-1, 1); the scale is in LEVEL_SCALES, else 1"),
        ("setting.learning_rate", "(log10 of the next step's rate + 4) / 3, clipped to [-1, 1]; -1 for a rate of 0"),
        ("setting.NAME", "log2 of the setting over the recipe's, divided by its range in doublings, in [-1, 1]"),
        ("setting.gamma", "10 times the discount less the recipe's, in [-1, 1]"),
        ("mix.SLOT", "weight of the source in that slot, in [0, 1]"),
        ("mix_change.SLOT", "that weight less the recipe's, in [-1, 1]"),
        (
            "recent.GROUP",
            f"{_RECENT_STEPS:g} / ({_RECENT_STEPS:g} + steps since the group's last adjustment), negative for one "
            "that lowered; 0 when there was none",
        ),
        ("mean.SIGNAL", "level of an exponential moving average over the looks, weight 1/12; 0 before the first value"),
        (
            "change.SIGNAL",
            "c / (|c| + 0.05), where c is a moving average of weight 1/4 less that of 1/12, over the latter's size; in "
            "(-1, 1)",
        ),
        (
            "gain.SIGNAL",
            "c / (|c| + 0.5), where c is the moving average of weight 1/4 less the round's first value, over the size "
            "of that; in (-1, 1)",
        ),
        ("progress", "share of the recipe's steps that are done, in [0, 1]"),
        ("length", "log10 of the recipe's steps over 5, in [0, 1]"),
        ("early", f"{_EARLY_STEPS:g} / ({_EARLY_STEPS:g} + steps done), in (0, 1]"),
        ("broken", "1 when a signal of the step was not finite, else 0"),
    ]


class Features:
    """Turns the states of one round into vectors; remembers past adjustments, and averages of some signals.

    Args:
        hardware: whether signals that a clock decides are shown; when not they are absent, and equal rounds give equal
            vectors.
    """

    def __init__(self, *, hardware: bool = False) -> None:
        self.hardware = hardware
        self._vector = np.zeros(FEATURE_COUNT, dtype=np.float32)
        self._factors = _FACTORS if hardware else _FACTORS * _UNCLOCKED
        self._asked: tuple[tuple[str, float, float], ...] = ()
        self._mix_names: tuple[str, ...] = ()
        self._mix_asked: tuple[float, ...] = (0.0,) * SOURCE_SLOTS
        self._gamma = 1.0
        self._last: dict[str, tuple[int, float]] = {}
        self._averages: dict[str, tuple[float, float, float]] = {}
        self._seen = 0

    def begin(self, recipe: Recipe, sources: Sequence[str]) -> None:
        """Forget the last round.

        Args:
            recipe: what the round was asked to do.
            sources: its sources, sorted.
        """
        self._asked = tuple(
            (name, doublings, 1.0 if name == "learning_rate_factor" else float(getattr(recipe, name)))
            for name, doublings in _LOG_SETTINGS.items()
        )
        self._gamma = recipe.gamma
        slots = list(sources[:SOURCE_SLOTS])
        self._mix_names = tuple(f"mix.{name}" for name in slots)
        weights = [recipe.mix.get(name, 0.0) for name in slots]
        self._mix_asked = tuple(weights + [0.0] * (SOURCE_SLOTS - len(weights)))
        self._last = {}
        self._averages = {}
        self._seen = 0

    def vector(self, state: ControlState) -> np.ndarray:
        """Return the state's features, (FEATURE_COUNT,) float32 in [-1, 1]; the next call overwrites them."""
        vector, signals = self._vector, state.signals
        values = _of_signals(signals.values)
        vector[:] = [  # one list and one copy: an array is slow to write to piece by piece
            *_of_signals(signals.z),
            *[value is not None for value in values],
            *[
                0.0 if value is None else value / (scale + value if value >= 0.0 else scale - value)
                for value, scale in zip(values, _SCALES, strict=True)
            ],
            *self._rest(state),
        ]
        vector *= self._factors
        return vector

    def note(self, adjustment: Adjustment, step: int) -> None:
        """Remember what was applied after ``step`` steps."""
        group = GROUPS.get(adjustment.kind)
        if group is not None:
            self._last[group] = (step, -1.0 if _lowers(adjustment) else 1.0)

    def _rest(self, state: ControlState) -> list[float]:
        """Return what follows the signals, in the order of `FEATURE_NAMES`."""
        settings, step = state.settings, state.step
        rate = settings.get("learning_rate", 0.0)
        rest = [_clipped((math.log10(rate) + 4.0) / 3.0) if rate > 0.0 else -1.0]
        for name, doublings, asked in self._asked:
            now = settings.get(name)
            rest.append(0.0 if now is None or now == asked else _clipped(_doublings(now, asked) / doublings))
        rest.append(_clipped(10.0 * (settings.get("gamma", self._gamma) - self._gamma)))
        weights = [settings.get(name, 0.0) for name in self._mix_names]
        weights += [0.0] * (SOURCE_SLOTS - len(weights))
        rest += weights
        rest += [now - before for now, before in zip(weights, self._mix_asked, strict=True)]
        last = self._last
        rest += [
            last[group][1] * _RECENT_STEPS / (_RECENT_STEPS + step - last[group][0]) if group in last else 0.0
            for group in _GROUP_NAMES
        ]
        rest += self._followed(state)
        rest += [
            min(1.0, step / state.steps),
            math.log10(state.steps) / 5.0,
            _EARLY_STEPS / (_EARLY_STEPS + step),
            1.0 if state.signals.broken else 0.0,
        ]
        return rest

    def _followed(self, state: ControlState) -> list[float]:
        """Return means, changes and gains of the followed signals; a step that was seen does not count again."""
        averages, values, new = self._averages, state.signals.values, state.step != self._seen
        self._seen = state.step
        means, changes, gains = [], [], []
        for name, smallest, scale in _FOLLOWED:
            value = values[name]
            if value is not None and new:
                value = min(_LARGEST, max(-_LARGEST, value))  # so that no average can overflow
                fast, slow, first = averages.get(name, (value, value, value))
                averages[name] = (fast + _FAST * (value - fast), slow + _SLOW * (value - slow), first)
            if name not in averages:
                means.append(0.0)
                changes.append(0.0)
                gains.append(0.0)
                continue
            fast, slow, first = averages[name]
            size = abs(slow)
            means.append(slow / (size + scale))
            change = (fast - slow) / max(size, smallest)
            changes.append(change / (abs(change) + _HALF_CHANGE))
            gain = (fast - first) / max(abs(first), smallest)
            gains.append(gain / (abs(gain) + _HALF_GAIN))
        return means + changes + gains


def nearest_action(adjustment: Adjustment, sources: Sequence[str]) -> int | None:
    """Return the catalogue entry most like an adjustment: same kind, source and direction, nearest value.

    None when the catalogue has no such entry.
    """
    best, distance = None, math.inf
    for index, entry in enumerate(CATALOGUE):
        if entry.kind != adjustment.kind:
            continue
        own = entry.adjustment(sources)
        if own is None or own.source != adjustment.source or _lowers(own) != _lowers(adjustment):
            continue
        away = abs(math.log(own.number / adjustment.number)) if _is_factor(own) else abs(own.number - adjustment.number)
        if away < distance:
            best, distance = index, away
    return best


def _is_factor(adjustment: Adjustment) -> bool:
    return adjustment.kind.endswith("_scale")


def _lowers(adjustment: Adjustment) -> bool:
    """Whether it makes its setting smaller."""
    if _is_factor(adjustment):
        return adjustment.number < 1.0
    return adjustment.number < 0.0 or adjustment.kind in ("mix_away", "rollback", "log_less", "lora_freeze")


def _doublings(now: float, asked: float) -> float:
    """Return log2 of now over asked; from or to 0 it is beyond any range."""
    if asked <= 0.0 or now <= 0.0:
        return math.inf if now > asked else -math.inf
    return math.log2(now / asked)


def _clipped(value: float) -> float:
    return min(1.0, max(-1.0, value))
