"""Reads a decision space, with its budget, evaluator and reward, from one YAML file; errors name file, line and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr, ValidationError

from ..inner_trainers.evaluation import Evaluator
from ..inner_trainers.yaml_file import FileError, Keys, YamlFile, key_path, parse_yaml, read_yaml
from ..inner_trainers.yaml_scalars import scalar_hint
from .budget import Budget
from .decision_space import DecisionSpace
from .reward import RewardSettings
from .space_builder import build_space, check_section
from .space_schema import SpaceProblem, SpaceSections, problems_of

if TYPE_CHECKING:
    from ..inner_trainers.base import InnerTrainer
    from ..inner_trainers.tasks.base import InnerTask

_SECONDS_PER_HOUR = 3600
_EXPECTED = "the key decision_space"


class SpaceFile(SpaceSections):
    """A decision-space file, checked as far as that is possible without a task."""

    _file: YamlFile | None = PrivateAttr(None)
    _data: Any = PrivateAttr(None)
    _title: str = PrivateAttr("space")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], title: str = "space") -> SpaceFile:
        """Return the file of plain data, such as `to_dict` gives.

        Args:
            data: the keys of the file.
            title: how messages call it.

        Raises:
            ValueError: what is wrong with it, and at which keys.
        """
        return _checked(data, None, title)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, in the order of the file, from which `from_dict` makes an equal space."""
        data: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return data

    # What it says -----------------------------------------------------------------------------------------------------

    def budget(self) -> Budget | None:
        """Return the budget of one search; None where the file has none."""
        section = self.budget_section
        if section is None:
            return None
        at: Keys = ("budget",)
        for one, other in (("max_gpu_hours", "limit"), ("max_gpu_hours", "unit"), ("early_stop_patience", "patience")):
            if getattr(section, one) is not None and getattr(section, other) is not None:
                raise SpaceProblem((*at, other), f"{one} says it already; keep one", key=True, other=(*at, one))
        settings: dict[str, Any] = {"max_rounds": section.max_rounds}
        names = {"limit": "limit", "unit": "unit", "max_rounds": "max_rounds", "patience": "patience"}
        settings["limit"], settings["unit"] = section.limit, section.unit
        if section.max_gpu_hours is not None:
            settings["limit"], settings["unit"] = section.max_gpu_hours * _SECONDS_PER_HOUR, "device_seconds"
            names["limit"] = "max_gpu_hours"
        settings["patience"] = section.patience
        if section.early_stop_patience is not None:
            settings["patience"], names["patience"] = section.early_stop_patience, "early_stop_patience"
        elif section.unit is not None and section.limit is None:
            raise SpaceProblem((*at, "unit"), "a unit needs a limit; write one, such as limit: 200000.", key=True)
        try:
            return Budget(**{name: value for name, value in settings.items() if value is not None})
        except ValueError as error:
            raise _renamed(error, "budget", names) from None

    def evaluator_settings(self) -> dict[str, Any] | None:
        """Return the settings of an `Evaluator`; None where the file has none.

        ``eval_repeats`` is the number of sampling seeds (0, 1, ...); ``k`` is at most the completions per item.
        """
        section = self.evaluator_section
        if section is None:
            return None
        settings: dict[str, Any] = {}
        if section.eval_repeats is not None:
            if not 1 <= section.eval_repeats <= 1000:
                raise SpaceProblem(
                    ("evaluator", "eval_repeats"), f"expected an integer in [1, 1000], got {section.eval_repeats}."
                )
            settings["seeds"] = list(range(section.eval_repeats))
        for name, field in (
            ("samples", "samples_per_seed"),
            ("k", "k"),
            ("temperature", "temperature"),
            ("batch_sequences", "batch_sequences"),
            ("stratified_eval", "stratified"),
        ):
            if getattr(section, name) is not None:
                settings[field] = getattr(section, name)
        samples = len(settings.get("seeds", Evaluator.seeds)) * settings.get(
            "samples_per_seed", Evaluator.samples_per_seed
        )
        settings.setdefault("k", max(1, min(Evaluator.k, samples)))
        try:
            Evaluator(**evaluator_arguments(settings))
        except ValueError as error:
            names = {"samples_per_seed": "samples", "seeds": "eval_repeats", "stratified": "stratified_eval"}
            raise _renamed(error, "evaluator", {**dict.fromkeys(settings, ""), **names}) from None
        return settings

    def reward(self) -> dict[str, float]:
        """Return the settings of `RewardSettings` that the file has: ``price``, ``failure_penalty``."""
        settings: dict[str, float] = {}
        section, budget = self.reward_section, self.budget_section
        if section is not None:
            for name in ("price", "failure_penalty"):
                if getattr(section, name) is not None:
                    settings[name] = getattr(section, name)
        at: Keys = ("reward", "price")
        if budget is not None and budget.price is not None:
            if "price" in settings:
                raise SpaceProblem(at, "it stands under budget too; keep one", key=True, other=("budget", "price"))
            settings["price"], at = budget.price, ("budget", "price")
        for name, value in settings.items():
            try:
                RewardSettings(**{name: value})
            except ValueError as error:
                where = at if name == "price" else ("reward", name)
                raise SpaceProblem(where, str(error).removeprefix(f"{name}: ")) from None
        return settings

    # The space --------------------------------------------------------------------------------------------------------

    def decision_space(self, task: InnerTask | None = None, trainer: InnerTrainer | None = None) -> DecisionSpace:
        """Return the decision space for a family of tasks; bind it to each of them (`DecisionSpace.bound_to`).

        Args:
            task: one of the family's instances, whose sources count; None for those that the file names.
            trainer: whose algorithms and settings count; None for those of TRL.

        Raises:
            ValueError: an algorithm or source that there is not, a setting that no algorithm reads, or constraints
                that no recipe can meet; names the place.
        """
        try:
            return build_space(self.space_section, task, trainer)
        except SpaceProblem as problem:
            raise self.located(problem) from None

    def located(self, problem: SpaceProblem) -> FileError:
        """Return a problem as an error that names the place in the file."""
        text, file = problem.problem, self._file
        at = _as_written(self._data, problem.at)
        value = self._data
        for part in at:
            value = value[part]
        if problem.other is not None:
            other = _as_written(self._data, problem.other)
            where = key_path(other) if file is None else f"in line {file.place(other, key=True).line}"
            text += f" (the other is {where})."
        if problem.wanted:
            text += scalar_hint(value, problem.wanted, quoted=file is not None and at in file.quoted)
        if file is None:
            return FileError(f"{self._title}: {key_path(at)}{': ' if at else ''}{text}")
        return file.error(at, text, key=problem.key and bool(at))


@dataclass(frozen=True)
class ResolvedSpace:
    """What an environment is given: by its arguments, else by a file, else by default.

    Attributes:
        source: the space, its file, or None for the default space.
        budget: the budget of one search.
        evaluator: settings of the evaluator; None for its defaults.
        reward: price and failure penalty.
    """

    source: DecisionSpace | SpaceFile | None
    budget: Budget
    evaluator: Mapping[str, Any] | None
    reward: RewardSettings

    def decision_space(self, task: InnerTask, trainer: InnerTrainer) -> DecisionSpace | None:
        """Return the space for a family of tasks; None for the default space."""
        if isinstance(self.source, SpaceFile):
            return self.source.decision_space(task, trainer)
        return self.source


def resolve_space(
    space: DecisionSpace | SpaceFile | Mapping[str, Any] | str | Path | None,
    *,
    budget: Budget | Mapping[str, Any] | float | None = None,
    evaluator: Mapping[str, Any] | None = None,
    price: float | None = None,
    failure_penalty: float | None = None,
    own_evaluator: bool = False,
) -> ResolvedSpace:
    """Return what an environment's arguments come to; those that are None are taken from the file, if one is given.

    Args:
        space: a space, a YAML or JSON file by its name, its content as a mapping, or None.
        budget: as `Budget.from_any` takes it.
        evaluator: settings of the evaluator.
        price: reward taken for spending the whole budget.
        failure_penalty: reward taken for a failed round.
        own_evaluator: whether the trainer is given and has its evaluator, so that the file's is not used.

    Raises:
        ValueError: something else, or what is wrong with the file or an argument.
    """
    file = as_space_file(space)
    if file is None:
        given = space if isinstance(space, DecisionSpace) else None
        rewards: dict[str, float] = {}
    else:
        given = None
        rewards = file.reward()
        budget = file.budget() if budget is None else budget
        evaluator = file.evaluator_settings() if evaluator is None and not own_evaluator else evaluator
    for name, value in (("price", price), ("failure_penalty", failure_penalty)):
        if value is not None:
            rewards[name] = value
    settings = None if evaluator is None or not isinstance(evaluator, Mapping) else evaluator_arguments(evaluator)
    return ResolvedSpace(
        file if file is not None else given,
        Budget.from_any(budget),
        evaluator if settings is None else settings,
        RewardSettings(**rewards),
    )


def as_space_file(space: object) -> SpaceFile | None:
    """Return the file that an argument names or holds; None for a space that is made already, or for None.

    Raises:
        ValueError: something else, or what is wrong with the file.
    """
    if space is None or isinstance(space, DecisionSpace):
        return None
    if isinstance(space, SpaceFile):
        return space
    if isinstance(space, str | Path):
        return load_space_file(Path(space))
    if isinstance(space, Mapping):
        return SpaceFile.from_dict(space)
    raise ValueError(
        f"space: expected a DecisionSpace, the name of a YAML file or its content as a mapping, got {space!r}."
    )


def load_space_file(path: Path) -> SpaceFile:
    """Read a decision space from YAML or JSON.

    Raises:
        ValueError: no such file, or what is wrong with it: file, line, column, key and what to write.
    """
    file = read_yaml(path, f"space {path}", expected=_EXPECTED)
    return _checked(file.data, file, file.title)


def parse_space_file(text: str, title: str) -> SpaceFile:
    """Read a decision space from YAML or JSON text; ``title`` is what messages call it.

    Raises:
        ValueError: as `load_space_file`.
    """
    file = parse_yaml(text, title, expected=_EXPECTED)
    return _checked(file.data, file, title)


def evaluator_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an `Evaluator` of settings that may have come through JSON, where tuples are lists."""
    seeds = settings.get("seeds")
    return {**settings, "seeds": tuple(seeds)} if isinstance(seeds, list) else dict(settings)


def _checked(data: Mapping[str, Any], file: YamlFile | None, title: str) -> SpaceFile:
    blank = SpaceFile.model_construct()
    blank._file, blank._data, blank._title = file, data, title
    try:
        space = SpaceFile.model_validate(data)
    except ValidationError as error:
        raise blank.located(problems_of(error)[0]) from None
    space._file, space._data, space._title = file, data, title
    try:
        check_section(space.space_section)
        space.budget()
        space.evaluator_settings()
        space.reward()
    except SpaceProblem as problem:
        raise space.located(problem) from None
    return space


def _as_written(data: Any, at: Keys) -> Keys:
    """Return the keys of a checked form as the file has them: one spelling's keys are missing in another."""
    found: list[str | int] = []
    for part in at:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list | tuple):
            place = {"low": 0, "high": 1}.get(str(part), part)
            if not isinstance(place, int) or place >= len(data):
                continue
            part, data = place, data[place]
        else:
            continue
        found.append(part)
    return tuple(found)


def _renamed(error: ValueError, section: str, names: Mapping[str, str]) -> SpaceProblem:
    """Return an error about a setting as one about the file's key for it."""
    name, _, text = str(error).removeprefix(f"{section}.").partition(": ")
    return SpaceProblem((section, names.get(name) or name), text)
