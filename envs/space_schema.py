"""The shape of a decision-space file: its sections and their spellings, as pydantic models; values are read elsewhere.

Each spelling that is read becomes one form: a range has ``low`` and ``high``, a list of choices ``choices``, one value
``value``. Every message says what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..inner_trainers.messages import did_you_mean
from ..inner_trainers.yaml_file import Keys
from ..inner_trainers.yaml_scalars import shown

SUM_RULES = ("sum = 1", "sum == 1", "sum = 1.0", "sum == 1.0")
"""Spellings of what every mix keeps anyway."""


def _wrong(wanted: str, value: object, kind: str = "") -> PydanticCustomError:
    return PydanticCustomError("expected", "{wanted}", {"wanted": wanted, "value": value, "kind": kind})


def _number(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
        raise _wrong("a number", value, "number")
    return value


def _integer(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong("an integer", value, "number")
    return value


def _truth(value: object) -> Any:
    if not isinstance(value, bool):
        raise _wrong("true or false", value, "truth")
    return value


def _text(value: object) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise _wrong("text", value)
    return value


def _name(value: object) -> Any:
    if not isinstance(value, str) or not value.strip():
        raise _wrong("a name", value)
    return value


def _scalar(value: object) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise _wrong("one value", value)
    return value


def _many(value: object) -> Any:
    """Return a list; one text or number alone is a list of one."""
    return [value] if isinstance(value, str | int | float) else value


Number = Annotated[Any, PlainValidator(_number)]  # an integer stays one
Integer = Annotated[int, PlainValidator(_integer)]
Truth = Annotated[bool, PlainValidator(_truth)]
Text = Annotated[str, PlainValidator(_text)]
Name = Annotated[str, PlainValidator(_name)]
Scalar = Annotated[Any, PlainValidator(_scalar)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_many), Field(strict=False)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_many), Field(strict=False)]


class Section(BaseModel):
    """One mapping of the file; a key that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class AlgorithmSection(Section):
    """The algorithms that may be tried, and constraints; a list alone is the algorithms."""

    choices: Names
    constraints: Texts | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, value: object) -> object:
        return {"choices": value} if isinstance(value, list | tuple | str) else value


class MixSection(Section):
    """Bounds of one source's weight: two numbers, one number, or nothing for 0 to 1."""

    low: Number = 0
    high: Number = 1

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, value: object) -> object:
        if value is None:
            return {}
        if isinstance(value, list | tuple):
            if len(value) != 2:
                raise _wrong("two bounds such as [0.1, 0.5], or one weight", value)
            return {"low": value[0], "high": value[1]}
        if isinstance(value, Mapping):
            return value
        weight = _number(value)
        return {"low": weight, "high": weight}


class KnobSection(Section):
    """One setting: a range, choices, or one value."""

    low: Number | None = None
    high: Number | None = None
    scale: Literal["linear", "log", "integer", "choice"] | None = None
    integer: Truth | None = None
    choices: Annotated[tuple[Scalar, ...], Field(strict=False)] | None = None
    value: Scalar | None = None
    default: Scalar | None = None
    when: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return value
        if isinstance(value, list | tuple):
            if not value:
                raise _wrong("a range such as [1e-6, 5e-5], or choices", value)
            numbers = [entry for entry in value if isinstance(entry, int | float) and not isinstance(entry, bool)]
            if len(value) == len(numbers) == 2:
                return {"low": value[0], "high": value[1]}
            if len(value) == 2 and numbers:  # one of the two is text that looks like no number, such as 1_000
                return {"low": value[0], "high": value[1]}
            return {"choices": value}
        if value is None:
            raise _wrong("a range such as [1e-6, 5e-5], choices or one value", value)
        return {"value": value}


def _without_sum(value: object) -> object:
    """Return the sources of a mix: without its sum rule, a list of names with the widest bounds."""
    if isinstance(value, list | tuple):
        names = [_name(entry) for entry in value]
        if not names:
            raise _wrong("sources with their bounds", value)
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"source {name!r} is there twice; leave one out.")
        return dict.fromkeys(names)
    if not isinstance(value, Mapping):
        return value
    rule = value.get("constraint")
    if not isinstance(rule, str):
        return value
    if " ".join(rule.replace("=", " = ").replace("=  =", "==").split()) not in SUM_RULES:
        raise PydanticCustomError(
            "sum_rule",
            "{wanted}",
            {
                "wanted": f"the weights of a mix sum to 1; write 'sum = 1.0' or leave it out, got {shown(rule)}. "
                "Other constraints on weights stand under constraints, such as mix.math <= 0.4."
            },
        )
    return {name: bounds for name, bounds in value.items() if name != "constraint"}


Knobs = dict[str, KnobSection]


class DecisionSection(Section):
    """The section ``decision_space``."""

    algorithm: AlgorithmSection
    start: Names | None = None
    data_mix: Annotated[dict[str, MixSection], BeforeValidator(_without_sum)] | None = None
    hyperparams: Knobs | None = None
    hyperparameters: Knobs | None = None
    exploration: Knobs | None = None
    constraints: Texts | None = None


class BudgetSection(Section):
    """The section ``budget``."""

    max_gpu_hours: Number | None = None
    limit: Number | None = None
    unit: Name | None = None
    max_rounds: Integer | None = None
    early_stop_patience: Integer | None = None
    patience: Integer | None = None
    price: Number | None = None


class EvaluatorSection(Section):
    """The section ``evaluator``."""

    eval_repeats: Integer | None = None
    stratified_eval: Truth | None = None
    samples: Integer | None = None
    k: Integer | None = None
    temperature: Number | None = None
    batch_sequences: Integer | None = None


class RewardSection(Section):
    """The section ``reward``."""

    price: Number | None = None
    failure_penalty: Number | None = None


class SpaceSections(Section):
    """The whole file."""

    space_section: DecisionSection = Field(alias="decision_space")
    budget_section: BudgetSection | None = Field(None, alias="budget")
    evaluator_section: EvaluatorSection | None = Field(None, alias="evaluator")
    reward_section: RewardSection | None = Field(None, alias="reward")


class SpaceProblem(ValueError):
    """What is wrong with a file, and at which keys.

    Args:
        at: keys that lead to the value.
        problem: a sentence.
        key: whether the key itself is wrong.
        other: keys that lead to another place that has to do with it.
        wanted: ``"number"`` or ``"truth"`` where text may stand for one; see `scalar_hint`.
    """

    def __init__(
        self, at: Keys, problem: str, *, key: bool = False, other: Keys | None = None, wanted: str = ""
    ) -> None:
        super().__init__(problem)
        self.at, self.problem, self.key, self.other, self.wanted = at, problem, key, other, wanted


def problems_of(error: ValidationError) -> list[SpaceProblem]:
    """Return what pydantic found, in our own words; keys that are missing come last, as another may be one misspelt."""
    found = sorted(error.errors(include_url=False), key=lambda entry: entry["type"] == "missing")
    return [_problem(entry) for entry in found]


def _problem(entry: Mapping[str, Any]) -> SpaceProblem:
    at: Keys = tuple(entry["loc"])
    kind, got, context = entry["type"], entry["input"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        known = known_keys(at[:-1])
        problem = f"unknown key {shown(at[-1])}.{did_you_mean(str(at[-1]), known)}"
        if len(at) == 1 and at[0] in known_keys(("decision_space",)):
            problem = f"it stands under decision_space; indent it below `decision_space:`. Known: {', '.join(known)}."
        return SpaceProblem(at, problem, key=True)
    if kind == "missing":
        return SpaceProblem(at[:-1], f"key {at[-1]!r} is missing.")
    if kind == "expected":
        return SpaceProblem(at, f"expected {context['wanted']}, got {shown(context['value'])}.", wanted=context["kind"])
    if kind == "sum_rule":
        return SpaceProblem((*at, "constraint"), str(context["wanted"]))
    if kind == "literal_error":
        known = ["linear", "log", "integer", "choice"]
        return SpaceProblem(at, f"unknown scale {shown(got)}.{did_you_mean(str(got), known)}")
    if kind == "value_error":
        return SpaceProblem(at, str(context["error"]))
    wanted = "a list" if kind in ("tuple_type", "list_type") else "keys with values"
    return SpaceProblem(at, f"expected {wanted}, got {shown(got)}.")


def known_keys(at: Sequence[str | int]) -> list[str]:
    """Return the keys that the mapping at ``at`` may have."""
    model: type[Section] = SpaceSections
    if at:
        sections: dict[str, type[Section]] = {
            "budget": BudgetSection,
            "evaluator": EvaluatorSection,
            "reward": RewardSection,
        }
        model = sections.get(str(at[0]), DecisionSection)
    if len(at) > 1:
        parts: dict[str, type[Section]] = {"algorithm": AlgorithmSection, "data_mix": MixSection}
        model = parts.get(str(at[1]), KnobSection)
    return [entry.alias or name for name, entry in model.model_fields.items()]
