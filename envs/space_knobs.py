"""Turns the settings of a decision-space file into knobs: ranges on the scale of their nature, choices, one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.yaml_file import Keys
from ..inner_trainers.yaml_scalars import shown
from .constraints import ConstraintError, parse_condition
from .decision_space import DEFAULT_PARAMETERS
from .parameter import Parameter
from .space_compiler import EPOCHS
from .space_schema import DecisionSection, KnobSection, SpaceProblem

EXPLORATION = ("entropy_coef", "num_generations", "num_iterations", "temperature")
"""Settings of how completions are sampled, which may stand under ``exploration``."""
LOG_KNOBS = (
    "batch_size",
    "beta",
    "entropy_coef",
    "gradient_accumulation",
    "kl_coef",
    "learning_rate",
    "lora_rank",
    "max_grad_norm",
    "max_length",
    "num_generations",
    "steps",
    "weight_decay",
)
"""Knobs whose range has a log scale, unless it touches 0 or another scale is asked for."""
TYPES: Mapping[str, str] = {
    **{f.name: str(f.type) for f in fields(Recipe) if f.init and f.name not in ("algorithm", "mix", "start")},
    EPOCHS: "int",
}
"""Knob -> ``"int"``, ``"float"``, ``"bool"`` or ``"str"``."""
MAX_STEPS = 100_000


@dataclass
class Knobs:
    """What the settings of a file come to.

    Attributes:
        parameters: knob -> its range.
        fixed: knob -> its one value.
        defaults: knob -> the value it has where none is given.
        conditions: knob -> when it is used, as the file says.
        places: knob -> the keys that lead to it.
    """

    parameters: dict[str, Parameter] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    places: dict[str, Keys] = field(default_factory=dict)


def knobs_of(section: DecisionSection) -> Knobs:
    """Return the knobs of a file; those of the default space where it names no hyperparameters.

    Raises:
        SpaceProblem: an unknown knob, one that is there twice, or a range, value or condition that cannot be.
    """
    knobs = Knobs()
    if section.hyperparams is not None and section.hyperparameters is not None:
        raise SpaceProblem(
            ("decision_space", "hyperparameters"),
            "hyperparams and hyperparameters are the same section; keep one",
            key=True,
            other=("decision_space", "hyperparams"),
        )
    for name in ("hyperparams", "hyperparameters", "exploration"):
        for knob, spelt in (getattr(section, name) or {}).items():
            at: Keys = ("decision_space", name, knob)
            if knob not in TYPES:
                raise SpaceProblem(at, f"no setting of a recipe.{did_you_mean(knob, TYPES)}", key=True)
            if name == "exploration" and knob not in EXPLORATION:
                raise SpaceProblem(
                    at,
                    f"no setting of exploration, which has {', '.join(EXPLORATION)}; move it to hyperparams.",
                    key=True,
                )
            if knob in knobs.places:
                other = knobs.places[knob]
                raise SpaceProblem(at, f"it stands under {other[1]} too; keep one", key=True, other=other)
            knobs.places[knob] = at
            _add(knobs, knob, spelt, at)
    if EPOCHS in knobs.places and "steps" in knobs.places:
        raise SpaceProblem(
            knobs.places[EPOCHS], "epochs and steps say the same; keep one", key=True, other=knobs.places["steps"]
        )
    if section.hyperparams is None and section.hyperparameters is None:
        knobs.parameters |= {name: p for name, p in DEFAULT_PARAMETERS.items() if name not in knobs.places}
    return knobs


def _add(knobs: Knobs, name: str, spelt: KnobSection, at: Keys) -> None:
    kinds = [kind for kind in ("choices", "value") if getattr(spelt, kind) is not None]
    if spelt.low is not None or spelt.high is not None:
        kinds.insert(0, "low and high")
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise SpaceProblem(at, f"expected a range (low and high), choices or one value, got {got}.")
    if spelt.when is not None:
        try:
            parse_condition(spelt.when)
        except ConstraintError as error:
            raise SpaceProblem((*at, "when"), str(error)) from None
        knobs.conditions[name] = spelt.when
    if kinds == ["value"]:
        _add_value(knobs, name, spelt, at)
        return
    parameter = _choices(name, spelt, at) if spelt.choices is not None else _range(name, spelt, at)
    knobs.parameters[name] = parameter
    if spelt.default is None:
        return
    value = checked(name, spelt.default, (*at, "default"))
    try:
        parameter.encode(value)
    except ValueError as error:
        raise SpaceProblem((*at, "default"), f"the default {error}.") from None
    knobs.defaults[name] = value


def _add_value(knobs: Knobs, name: str, spelt: KnobSection, at: Keys) -> None:
    for extra in ("scale", "integer", "default"):
        if getattr(spelt, extra) is not None:
            raise SpaceProblem((*at, extra), "it has no meaning beside one value; leave it out.", key=True)
    value = checked(name, spelt.value, (*at, "value"))
    if spelt.when is None and name != EPOCHS:
        knobs.fixed[name] = value
    else:  # what is used in part of the recipes only, or stands for steps, is a knob with one choice
        knobs.parameters[name] = Parameter(choices=(value,))


def _choices(name: str, spelt: KnobSection, at: Keys) -> Parameter:
    assert spelt.choices is not None  # as `_add` asks
    if spelt.scale not in (None, "choice"):
        raise SpaceProblem((*at, "scale"), f"choices have no scale, got {spelt.scale!r}; leave it out.")
    if spelt.integer is not None:
        raise SpaceProblem((*at, "integer"), "choices are what they are; leave it out.", key=True)
    if not spelt.choices:
        raise SpaceProblem((*at, "choices"), "expected at least one choice, got [].")
    values = [checked(name, choice, (*at, "choices", place)) for place, choice in enumerate(spelt.choices)]
    for place, value in enumerate(values):
        if value in values[:place]:
            raise SpaceProblem((*at, "choices", place), f"the choice {shown(value)} is there twice; leave one out.")
    return Parameter(choices=tuple(values if TYPES[name] == "str" else sorted(values)))


def _range(name: str, spelt: KnobSection, at: Keys) -> Parameter:
    if spelt.low is None or spelt.high is None:
        missing = "low" if spelt.low is None else "high"
        raise SpaceProblem(at, f"key {missing!r} is missing: a range has low and high.")
    if TYPES[name] in ("str", "bool"):
        raise SpaceProblem(at, f"it takes {'names' if TYPES[name] == 'str' else 'true or false'}; list its choices.")
    if spelt.scale == "choice":
        raise SpaceProblem((*at, "scale"), "scale choice is that of choices; this is a range.")
    whole = TYPES[name] == "int"
    if whole and spelt.integer is False:
        raise SpaceProblem((*at, "integer"), f"{name} is an integer; leave it out.")
    if spelt.scale == "integer" and spelt.integer is False:
        raise SpaceProblem((*at, "integer"), "scale integer and integer: false contradict each other.")
    low = checked(name, spelt.low, (*at, "low"), ends=True)
    high = checked(name, spelt.high, (*at, "high"), ends=True)
    if low > high:
        raise SpaceProblem(at, f"low {low:g} is above high {high:g}; swap them.")
    if low == high:
        raise SpaceProblem(at, f"low and high are both {low:g}; write {low:g} alone.")
    scale = spelt.scale
    if scale is None:
        scale = "log" if name in LOG_KNOBS and low > 0 else "linear"
    elif scale == "integer":
        scale = "linear"
    if scale == "log" and low <= 0:
        raise SpaceProblem(
            (*at, "scale"), f"a log scale needs low above 0, got {low:g}; raise low, or write scale: linear."
        )
    integer = whole or bool(spelt.integer) or spelt.scale == "integer"
    if integer and not whole:
        for end, number in (("low", low), ("high", high)):
            if number != int(number):
                raise SpaceProblem((*at, end), f"expected an integer, as integer is true, got {number!r}.")
    return Parameter(low, high, scale, integer=integer)


def checked(name: str, value: Any, at: Keys, *, ends: bool = False) -> Any:
    """Return a value of a knob in its field's type.

    Args:
        name: the knob.
        value: what the file has.
        at: where.
        ends: whether it is an end of a range, for messages.

    Raises:
        SpaceProblem: another type, or outside what any recipe can have.
    """
    kind = TYPES[name]
    wanted = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a name"}[kind]
    right = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }[kind]
    if not right:
        hint = {"int": "number", "float": "number", "bool": "truth"}.get(kind, "")
        whole = f" Write {int(value)}." if kind == "int" and isinstance(value, float) and value == int(value) else ""
        raise SpaceProblem(at, f"expected {wanted}, got {shown(value)}.{whole}", wanted=hint)
    try:
        if name == EPOCHS:
            return require_integer(EPOCHS, value, low=1, high=1000)
        steps = {} if name == "steps" else {"steps": MAX_STEPS}
        return getattr(Recipe("any", {"any": 1.0}, **{**steps, name: value}), name)
    except ValueError as error:
        raise SpaceProblem(at, str(error).removeprefix(f"{name}: ")) from None


def place_of(message: str, knobs: Knobs) -> Keys:
    """Return where the first knob stands that a message mentions; the section where it mentions none."""
    found = [(message.index(name), at) for name, at in knobs.places.items() if name in message]
    return min(found)[1] if found else ("decision_space",)
