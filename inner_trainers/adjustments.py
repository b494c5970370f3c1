"""Changes to a running round: the frozen `Adjustment`, and the catalogue of 37 that policies choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .messages import did_you_mean, require_number


@dataclass(frozen=True)
class AdjustmentKind:
    """What one kind of adjustment does.

    Attributes:
        summary: what it does, for tables and messages.
        low: smallest value; None where the value is unused.
        high: largest value.
        low_open: whether ``low`` itself is refused.
        default: value of an adjustment that names none; None where it must be named.
        on_source: whether it is about one source.
        changes_weights: whether it can change the weights the round ends with; one that cannot is no part of the
            checkpoint's id.
    """

    summary: str
    low: float | None = None
    high: float = 1.0
    low_open: bool = False
    default: float | None = 1.0
    on_source: bool = False
    changes_weights: bool = True


_FACTOR: dict[str, Any] = {"low": 0.0, "high": 1000.0, "low_open": True, "default": None}
KINDS: Mapping[str, AdjustmentKind] = MappingProxyType(
    {
        "none": AdjustmentKind("change nothing", changes_weights=False),
        "stop": AdjustmentKind("end the round after the step that is done"),
        "snapshot": AdjustmentKind("keep the weights as they are, for a later rollback", changes_weights=False),
        "rollback": AdjustmentKind(
            "put the last good weights back (the last snapshot, else those that a fault policy keeps, else the start) "
            "and clear the optimiser's state"
        ),
        "log_more": AdjustmentKind(
            "measure gradients over all their entries, and each layer's norm, at every step", changes_weights=False
        ),
        "log_less": AdjustmentKind("measure gradients on a sample again", changes_weights=False),
        "lr_scale": AdjustmentKind(
            "multiply the learning rate of every later step by the value; composes with the schedule", **_FACTOR
        ),
        "lr_restart": AdjustmentKind("begin the schedule anew over the steps that are left (a warm restart)"),
        "batch_scale": AdjustmentKind(
            "multiply the batch size by the value, to the nearest other size that is legal", **_FACTOR
        ),
        "grad_clip_scale": AdjustmentKind("multiply the norm that gradients are clipped to by the value", **_FACTOR),
        "kl_scale": AdjustmentKind(
            "multiply the KL coefficient (beta of dpo and kto) by the value; from 0 it begins small", **_FACTOR
        ),
        "entropy_scale": AdjustmentKind(
            "multiply the entropy coefficient by the value; from 0 it begins small", **_FACTOR
        ),
        "gamma_add": AdjustmentKind("add the value to the discount per token", low=-1.0, high=1.0, default=None),
        "temperature_scale": AdjustmentKind("multiply the sampling temperature by the value", **_FACTOR),
        "generations_step": AdjustmentKind(
            "take the next larger (value 1) or smaller (value -1) number of completions per prompt that divides the "
            "batch",
            low=-1.0,
            high=1.0,
            default=None,
        ),
        "mix_toward": AdjustmentKind(
            "move the share `value` of the mix to one source", low=0.0, low_open=True, default=0.2, on_source=True
        ),
        "mix_away": AdjustmentKind(
            "move the share `value` of one source's weight to the others",
            low=0.0,
            low_open=True,
            default=0.2,
            on_source=True,
        ),
        "mix_reset": AdjustmentKind("go back to the recipe's mix, without preference for hard rows"),
        "hardest_rows": AdjustmentKind(
            "draw the share `value` of each later batch from the hardest quarter of the rows seen so far",
            low=0.0,
            low_open=True,
            default=0.5,
        ),
        "lora_freeze": AdjustmentKind("train only the up-projections B of the adapters (LoRA-FA, Zhang et al. 2023)"),
        "lora_unfreeze": AdjustmentKind("train both projections of the adapters again"),
    }
)
"""Kinds of adjustments by name."""


@dataclass(frozen=True)
class Adjustment:
    """One change to a running round.

    Attributes:
        kind: a key of `KINDS`.
        value: what `KINDS` says; None for the kind's default.
        source: name of the source, for kinds that are about one; else None.
    """

    kind: str = "none"
    value: float | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        """Check the kind, its value and its source.

        Raises:
            ValueError: an unknown kind (with what cannot change mid-round said plainly), a value outside its range, or
                a source that is missing or not wanted.
        """
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(
                f"adjustment: {self.kind!r} cannot be applied to a running round.{did_you_mean(self.kind, KINDS)}"
            )
        kind = KINDS[self.kind]
        number = kind.default if self.value is None else self.value
        if number is None:
            example = -1 if kind.low == -1.0 else 0.5
            raise ValueError(f"adjustment: {self.kind!r} needs a value, for example {example:g}.")
        low = 0.0 if kind.low is None else kind.low
        high = 1000.0 if kind.low is None else kind.high
        number = require_number(
            "adjustment.value", number, low=low, high=high, low_open=kind.low is None or kind.low_open
        )
        object.__setattr__(self, "value", number)  # a plain float, so that `to_dict` is JSON
        if kind.on_source and (not isinstance(self.source, str) or not self.source):
            raise ValueError(
                f"adjustment: {self.kind!r} is about one source; name it with source=..., got {self.source!r}."
            )
        if not kind.on_source and self.source is not None:
            raise ValueError(f"adjustment: {self.kind!r} is about no source, got {self.source!r}; leave it out.")

    @property
    def number(self) -> float:
        """The value, which is never None once checked."""
        assert self.value is not None
        return self.value

    @property
    def changes_weights(self) -> bool:
        """Whether it can change the weights the round ends with."""
        return KINDS[self.kind].changes_weights and not (self.kind == "lr_scale" and self.value == 1.0)

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        value = "" if kind.low is None else f" {self.value:g}"
        return f"{self.kind}{value}" + ("" if self.source is None else f" {self.source}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data: dict[str, Any] = {"kind": self.kind, "value": self.value}
        return data if self.source is None else {**data, "source": self.source}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Adjustment:
        """Read `to_dict` back.

        Raises:
            ValueError: unknown keys, or what the constructor refuses.
        """
        for key in data:
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"adjustment: unknown key {key!r}.{did_you_mean(str(key), cls.__dataclass_fields__)}")
        return cls(**data)


def require_adjustment(value: object) -> Adjustment:
    """Return an adjustment that was given as one.

    Raises:
        ValueError: it is something else, such as its name.
    """
    if not isinstance(value, Adjustment):
        raise ValueError(f"adjustment: expected an Adjustment, for example Adjustment('lr_scale', 0.5), got {value!r}.")
    return value


@dataclass(frozen=True)
class CatalogueEntry:
    """One of the catalogue's adjustments.

    Attributes:
        name: what rules, logs and masks call it.
        kind: key of `KINDS`.
        value: the adjustment's value.
        slot: which source it is about, counted from 0 in sorted order; None for none.
    """

    name: str
    kind: str
    value: float | None = None
    slot: int | None = None

    def adjustment(self, sources: Sequence[str]) -> Adjustment | None:
        """Return the adjustment for a round on ``sources`` (sorted); None when there is no source in its slot."""
        if self.slot is None:
            return Adjustment(self.kind, self.value)
        return Adjustment(self.kind, self.value, sources[self.slot]) if self.slot < len(sources) else None

    @property
    def summary(self) -> str:
        """What it does, in words."""
        kind = KINDS[self.kind]
        what = kind.summary if self.slot is None else f"{kind.summary} (source {self.slot + 1} in sorted order)"
        return (
            what
            if kind.low is None
            else f"{what} (value {Adjustment(self.kind, self.value, 'x' if kind.on_source else None).number:g})"
        )


SOURCE_SLOTS = 4
"""Sources, in sorted order, that the catalogue can shift the mix to; `Adjustment` itself takes any."""

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry("none", "none"),
    CatalogueEntry("stop", "stop"),
    CatalogueEntry("snapshot", "snapshot"),
    CatalogueEntry("rollback", "rollback"),
    CatalogueEntry("log_more", "log_more"),
    CatalogueEntry("log_less", "log_less"),
    CatalogueEntry("lr_half", "lr_scale", 0.5),
    CatalogueEntry("lr_down", "lr_scale", 0.8),
    CatalogueEntry("lr_up", "lr_scale", 1.25),
    CatalogueEntry("lr_double", "lr_scale", 2.0),
    CatalogueEntry("lr_restart", "lr_restart"),
    CatalogueEntry("batch_down", "batch_scale", 0.8),
    CatalogueEntry("batch_up", "batch_scale", 1.25),
    CatalogueEntry("grad_clip_down", "grad_clip_scale", 0.5),
    CatalogueEntry("grad_clip_up", "grad_clip_scale", 2.0),
    CatalogueEntry("kl_down", "kl_scale", 0.67),
    CatalogueEntry("kl_up", "kl_scale", 1.5),
    CatalogueEntry("entropy_down", "entropy_scale", 0.5),
    CatalogueEntry("entropy_up", "entropy_scale", 2.0),
    CatalogueEntry("gamma_down", "gamma_add", -0.01),
    CatalogueEntry("gamma_up", "gamma_add", 0.01),
    CatalogueEntry("temperature_down", "temperature_scale", 0.9),
    CatalogueEntry("temperature_up", "temperature_scale", 1.1),
    CatalogueEntry("generations_down", "generations_step", -1.0),
    CatalogueEntry("generations_up", "generations_step", 1.0),
    *(CatalogueEntry(f"mix_toward_{slot + 1}", "mix_toward", 0.2, slot) for slot in range(SOURCE_SLOTS)),
    *(CatalogueEntry(f"mix_away_{slot + 1}", "mix_away", 0.2, slot) for slot in range(SOURCE_SLOTS)),
    CatalogueEntry("mix_reset", "mix_reset"),
    CatalogueEntry("hardest_rows", "hardest_rows", 0.5),
    CatalogueEntry("lora_freeze", "lora_freeze"),
    CatalogueEntry("lora_unfreeze", "lora_unfreeze"),
)
"""The adjustments that policies choose from, by index; index 0 changes nothing. The order is part of the contract."""

CATALOGUE_NAMES: tuple[str, ...] = tuple(entry.name for entry in CATALOGUE)
NONE, STOP_ROUND = CATALOGUE_NAMES.index("none"), CATALOGUE_NAMES.index("stop")


def catalogue_index(name: str) -> int:
    """Return the index of a catalogue entry.

    Raises:
        ValueError: an unknown name, with a did-you-mean.
    """
    if name not in CATALOGUE_NAMES:
        raise ValueError(f"action: unknown adjustment {name!r}.{did_you_mean(name, CATALOGUE_NAMES)}")
    return CATALOGUE_NAMES.index(name)
