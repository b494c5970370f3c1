"""`PostTrainingEnv`: one step is one real post-training round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from ..inner_trainers.base import CAUSES, InnerTrainer, RoundReport, Scorecard
from ..inner_trainers.evaluation import completion_flags
from ..inner_trainers.messages import did_you_mean, require_integer
from ..inner_trainers.recipe import Recipe
from ..inner_trainers.tasks import InnerTask, TaskFamily, resolve_task
from .budget import Budget
from .decision_space import COSTLY_KNOBS, DEFAULT_PARAMETERS, STOP, DecisionSpace
from .journal import Journal
from .observation import CHECKPOINTS, LOSS_SCALE, SCORE_COLUMNS, ObservationInputs, ObservationLayout, observe
from .reward import round_reward
from .search import Outcome, Search
from .space_file import SpaceFile, resolve_space

SPLIT_SEEDS = {"train": "train_seeds", "test": "test_seeds"}


class PostTrainingEnv(gym.Env[dict[str, np.ndarray], dict[str, Any]]):
    """Search over post-training recipes as an episode; the reward is benchmark gain minus its price in budget.

    An episode is one search on one task instance. An action names an algorithm (0 is ``stop``), a starting
    checkpoint, a data mix and hyperparameters; the step trains that round for real, evaluates the checkpoint on
    validation items and returns what it gained. `docs/environment.md` has the table of every observation entry.

    Terminated: ``stop``, or budget, rounds or patience are spent. Never truncated by itself.

    Args:
        task: a built-in family's name, ``module:Class``, an `InnerTask` or a `TaskFamily`.
        split: ``"train"`` or ``"test"``: which of the family's instance seeds episodes draw from.
        instances: instance seeds to draw from instead.
        trainer: an `InnerTrainer`; None for the task's own, else TRL.
        budget: a `Budget`, a mapping of its fields, or a limit in train tokens; None for that of ``space``, if it is a
            file that has one, else the default.
        space: what may be tried: a `DecisionSpace`, a YAML file (`docs/decision_space.md`) by name, or its content as a
            mapping; None for the default space of the family and the trainer. The file's budget, evaluator, price and
            failure penalty are used where the argument is not given, its evaluator where no trainer is.
        evaluator: settings of the TRL trainer's `Evaluator`; refused when the trainer is another one.
        faults: settings of the TRL trainer's `FaultPolicy`; refused when the trainer is another one.
        price: reward taken for spending the whole budget, in [0, 100]; by default 0.1.
        failure_penalty: reward taken for a failed round, in [0, 100]; by default 0.1.
        history: rounds kept in the observation, in [1, 100].
        reuse: whether an equal round of the same episode is answered from memory at cost 0.
        journal: folder (or `Journal`) where finished rounds are written and, after a restart, read back.
        render_mode: None or ``"ansi"``: `render` then returns the last round in words.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}
    action_space: Any
    in_loop = False
    """Whether rounds can be adjusted while they run, which the observation's layout follows."""
    _spec: EnvSpec | None = None

    def __init__(
        self,
        task: str | InnerTask | TaskFamily = "letters",
        *,
        split: str = "train",
        instances: Sequence[int] | None = None,
        trainer: InnerTrainer | None = None,
        budget: Budget | Mapping[str, Any] | float | None = None,
        space: DecisionSpace | SpaceFile | Mapping[str, Any] | str | Path | None = None,
        evaluator: Mapping[str, Any] | None = None,
        faults: Mapping[str, Any] | None = None,
        price: float | None = None,
        failure_penalty: float | None = None,
        history: int = 4,
        reuse: bool = True,
        journal: str | Path | Journal | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode: unknown {render_mode!r}; expected None or 'ansi'.")
        if not isinstance(split, str) or split not in SPLIT_SEEDS:
            raise ValueError(f"split: unknown {split!r}.{did_you_mean(str(split), SPLIT_SEEDS)}")
        self.render_mode = render_mode
        self.family = resolve_task(task)
        given = resolve_space(
            space,
            budget=budget,
            evaluator=evaluator,
            price=price,
            failure_penalty=failure_penalty,
            own_evaluator=trainer is not None,
        )
        self.budget, self.reward_settings = given.budget, given.reward
        self.instances = getattr(self.family, SPLIT_SEEDS[split]) if instances is None else _checked_seeds(instances)
        if not isinstance(reuse, bool):
            raise ValueError(f"reuse: expected True or False, got {reuse!r}.")
        if isinstance(journal, str) and not journal:
            raise ValueError("journal: expected the name of a folder, got ''.")
        first = self.family.instance(self.instances[0])
        self.trainer = _trainer_for(first, trainer, {"evaluator": given.evaluator, "faults": faults})
        own = given.decision_space(first, self.trainer)
        self.space = (self._space_of(first) if own is None else own).bound_to(first, self.trainer)
        for name in self.space.algorithms:
            if name not in self.trainer.algorithms:
                raise ValueError(
                    f"space: the trainer has no algorithm {name!r}.{did_you_mean(name, self.trainer.algorithms)}"
                )
        self._dimensions = first.built.benchmark.dimensions
        self._check_names(self.instances[0], first)
        self.layout = ObservationLayout(
            sources=len(self.space.sources),
            algorithms=len(self.space.algorithms),
            dimensions=len(self._dimensions),
            recipe_width=self.space.width,
            history=require_integer("history", history, low=1, high=100),
            in_loop=self.in_loop,
        )
        self.action_space = self.space.action_space()
        self.observation_space = cast("gym.Space[dict[str, np.ndarray]]", self.layout.space())
        evaluation = self.trainer.evaluation_cost_bound(first, "validation").in_unit(self.budget.unit)
        if self.budget.limit < evaluation:
            raise ValueError(
                f"budget.limit: {self.budget.limit:g} is below what evaluating the base checkpoint alone can cost "
                f"({evaluation:g} {self.budget.unit})."
            )
        self._reuse = reuse
        self._journal = journal if journal is None or isinstance(journal, Journal) else Journal(journal)
        self._owns_journal = self._journal is not journal
        self._episode = -1
        self._search: Search | None = None
        self._run_round: Callable[[Search, Recipe], Outcome] | None = None
        self._instance = self.instances[0]

    @property
    def spec(self) -> EnvSpec | None:
        """The id and arguments it was made with; what a clock decides makes it ``nondeterministic``."""
        return self._spec

    @spec.setter
    def spec(self, value: EnvSpec | None) -> None:
        self._spec = replace(value, nondeterministic=True) if value is not None and self.clocked else value

    @property
    def clocked(self) -> bool:
        """Whether a clock decides some of what is observed: the budget is in seconds."""
        return self.budget.unit == "device_seconds"

    def _space_of(self, first: InnerTask) -> DecisionSpace:
        """Return what may be tried when no space is given."""
        return default_space(first, self.trainer)

    @property
    def search(self) -> Search:
        """The running search.

        Raises:
            RuntimeError: before the first `reset`.
        """
        if self._search is None:
            raise RuntimeError("call reset() before using the environment.")
        return self._search

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search on an instance drawn from the seed.

        Args:
            seed: seeds the environment, and the action space with it.
            options: ``{"instance": n}`` fixes the instance; any family seed is allowed.

        Raises:
            ValueError: an unknown option, or an instance that is no integer.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        instance = int(self.instances[int(self.np_random.integers(len(self.instances)))])
        for name, value in (options or {}).items():
            if name != "instance":
                raise ValueError(f"options: unknown {name!r}.{did_you_mean(str(name), ['instance'])}")
            instance = require_integer("options['instance']", value, low=-(2**63), high=2**63)
        task = self.family.instance(instance)
        self._check_names(instance, task)
        space = self.space.bound_to(task, self.trainer)
        search = Search(
            task,
            self.trainer,
            space,
            self.budget,
            seed=int(self.np_random.integers(2**31)),
            journal=self._journal,
            episode=self._episode + 1,
            reuse=self._reuse,
        )
        if self._search is not None:
            self._search.close()
        self._search, self.space = search, space
        self._instance = instance
        self._episode += 1
        self._search_began()
        info = self._info(None)
        info["flags"] = [*task.built.flags, *completion_flags(search.scorecards["base"])]
        return self._observation(), info

    @contextmanager
    def rounds_run_by(self, run: Callable[[Search, Recipe], Outcome]) -> Iterator[None]:
        """Let ``run`` take a recipe's round to its settled end, instead of `Search.run`, within a ``with`` block."""
        held, self._run_round = self._run_round, run
        try:
            yield
        finally:
            self._run_round = held

    def _search_began(self) -> None:
        """Do what an environment of another kind does first in an episode."""

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Run one round.

        Where the budget pays no round at all, the first step ends the episode: ``stop`` with reward 0, any other
        action with a failed round at cost 0. A batch of which the budget cannot pay one step becomes the largest that
        it can pay.

        Raises:
            ValueError: an action outside the space, or the episode is over; nothing is trained or charged.
        """
        search = self.search
        reason = search.closed()
        if reason is not None:
            raise ValueError(f"step: the episode is over ({reason}); call reset().")
        self._check_action(action)
        recipe = self.space.decode(action)
        if recipe is None:
            search.stopped = True
            return self._observation(), 0.0, True, False, self._info(None)
        recipe = search.fitted(recipe)
        outcome = search.run(recipe) if self._run_round is None else self._run_round(search, recipe)
        reward = self._reward(outcome, outcome.charged)
        return self._observation(), reward, search.closed() is not None, False, self._info(outcome)

    def _reward(self, outcome: Outcome, charged: float) -> float:
        """Return the reward of a round that was charged ``charged`` in all, in the budget's unit."""
        return float(
            round_reward(
                outcome.best_before,
                outcome.best_after,
                self.search.scorecards["base"].score,
                charged / self.budget.limit,
                outcome.report.failure is not None,
                self.reward_settings,
            )
        )

    def action_masks(self) -> np.ndarray:
        """Return ``(1 + algorithms + starts,)`` bool: the legal choices of ``algorithm``, then of ``start``.

        The convention is sb3-contrib's: one flat array, the discrete parts in the order of the action space's keys.
        """
        return np.concatenate(list(self.choice_masks().values()))

    def choice_masks(self) -> dict[str, np.ndarray]:
        """Return the legal choices of each discrete part, by its key, in the order of the action space's keys."""
        names, playable = self.space.algorithms, self._playable()
        algorithms = np.array([True, *[name in playable for name in names]])
        return {"algorithm": algorithms, "start": self.space.start_mask(playable or names)}

    @property
    def asks_for_recipe(self) -> bool:
        """Whether the next action is a recipe, not an adjustment of a running round."""
        return True

    def knob_mask(self, name: str, values: Sequence[float]) -> np.ndarray:
        """Return ``(len(values),)`` bool: whether some legal algorithm can have a knob at each value; one always can.

        The constraints must allow it, whatever the other knobs are, and the budget pay a step with it. A knob that no
        legal algorithm uses has one legal value.
        """
        legal = self.space.knob_mask(name, tuple(values), self._playable() or self.space.algorithms)
        if self._search is None or name not in COSTLY_KNOBS:
            return legal
        paid = legal & np.array([on and self._search.pays_with(name, v) for on, v in zip(legal, values, strict=True)])
        return paid if paid.any() else legal

    def _playable(self) -> tuple[str, ...]:
        """Return the algorithms that a round may have now: all before the first `reset`, none once it has ended."""
        if self._search is None:
            return self.space.algorithms
        legal = self._search.legal()
        if self._search.ended(legal) is not None:
            return ()
        return tuple(name for name, there in legal.items() if there)

    def pays(self, recipe: Recipe) -> bool:
        """Return whether the budget pays a step of a recipe and its evaluation; True before the first `reset`."""
        return self._search is None or self._search.fitted(recipe) is recipe

    def encode_recipe(self, recipe: Recipe | None) -> dict[str, Any]:
        """Return the action of a recipe (None is ``stop``); action wrappers answer in their own space."""
        return self.space.encode(recipe)

    def render(self) -> str | None:
        """Return the last round in words when ``render_mode="ansi"``."""
        if self.render_mode != "ansi" or self._search is None:
            return None
        search = self._search
        best, base = search.scorecards["best"].score, search.scorecards["base"].score
        left = search.ledger.left / self.budget.limit
        lines = [f"instance {self._instance}  best {best:.3f} (base {base:.3f})  budget left {left:.0%}"]
        if search.outcomes:
            lines.append(describe_round(search.rounds, search.outcomes[-1]))
        return "\n".join(lines)

    def close(self) -> None:
        """End the round that is running, and let go of the journal, if it was given as a folder."""
        if self._search is not None:
            self._search.close()
        if self._journal is not None and self._owns_journal:
            self._journal.close()

    def _check_names(self, instance: int, task: InnerTask) -> None:
        built = task.built
        missing = [name for name in self.space.sources if name not in built.sources]
        if missing or built.benchmark.dimensions != self._dimensions:
            raise ValueError(
                f"instance {instance}: sources {tuple(built.sources)} and dimensions {built.benchmark.dimensions} "
                f"differ from the space's {self.space.sources} and {self._dimensions}; "
                "a family's instances must share their names."
            )

    def _check_action(self, action: Any) -> None:
        spaces = self.action_space.spaces
        if not isinstance(action, Mapping) or set(action) != set(spaces):
            given = sorted(map(str, action)) if isinstance(action, Mapping) else type(action).__name__
            raise ValueError(f"action: expected a mapping with keys {sorted(spaces)}, got {given}.")
        for name, space in spaces.items():
            value = action[name]
            if isinstance(space, gym.spaces.Discrete):
                require_integer(f"action[{name!r}]", value, low=0, high=int(space.n) - 1)
                continue
            try:
                array = np.asarray(value, dtype=np.float64)
            except (TypeError, ValueError):
                raise ValueError(f"action[{name!r}]: expected {space.shape} numbers, got {value!r}.") from None
            if array.shape != space.shape:
                raise ValueError(f"action[{name!r}]: expected shape {space.shape}, got {array.shape}.")
            if not (np.abs(array) <= 1.0 + 1e-6).all():  # NaN is not
                raise ValueError(f"action[{name!r}]: expected finite values in [-1, 1], got {array.tolist()}.")

    def _observation(self) -> dict[str, np.ndarray]:
        search = self.search
        built = search.task.built
        budget = self.budget
        history = np.zeros((1, self.layout.history, self.layout.round_width))
        for row, outcome in enumerate(reversed(search.outcomes[-self.layout.history :])):
            history[0, row] = self._round_row(outcome)
        last = np.zeros((1, self.layout.last_width))
        if search.outcomes:
            last[0] = self._last_row(search.outcomes[-1])
        inputs = ObservationInputs(
            parameters=np.array([float(self.trainer.parameters(search.task))]),
            rows=np.array(
                [[sum(map(len, built.sources[name].rows.values())) for name in self.space.sources]], dtype=float
            ),
            available=np.array([[float(there) for there in search.available.values()]]),
            dimension_weights=np.array([[built.benchmark.weights[name] for name in self._dimensions]]),
            scores=np.array(
                [[x for name in CHECKPOINTS for x in _score_row(search.scorecards[name], self._dimensions)]]
            ),
            budget=np.array(
                [
                    [
                        self._left() / budget.limit,
                        1.0 - search.rounds / budget.max_rounds,
                        1.0 - search.rounds_without_best / budget.patience,
                    ]
                ]
            ),
            last=last,
            history=history,
        )
        return {name: values[0] for name, values in observe(inputs).items()}

    def _left(self) -> float:
        """Return what is left of the budget, in its unit."""
        return self.search.ledger.left

    def _round_row(self, outcome: Outcome) -> np.ndarray:
        report = outcome.report
        gain = 0.0 if report.scorecard is None else report.scorecard.score - outcome.best_before
        tail = [gain, outcome.charged / self.budget.limit, float(report.failure is not None)]
        return np.concatenate([self.space.to_vector(report.recipe), tail])

    def _last_row(self, outcome: Outcome) -> np.ndarray:
        report = outcome.report
        recipe_gain_cost = self._round_row(outcome)[:-1]
        causes = [float(report.failure is not None and report.failure.cause == cause) for cause in CAUSES]
        done = report.steps / report.recipe.steps
        failed = float(report.failure is not None)
        curves = [_squash(value) for value in _curve_summary(report)]
        return np.concatenate([recipe_gain_cost, [done, failed], causes, curves, [0.0]])

    def _info(self, outcome: Outcome | None) -> dict[str, Any]:
        search = self.search
        info: dict[str, Any] = {
            "instance": self._instance,
            "seed": search.seed,
            "action_mask": self.action_masks(),
            "budget_left": self._left() / self.budget.limit,
            "best_score": search.scorecards["best"].score,
            "base_score": search.scorecards["base"].score,
            "ended": search.ended(),
            "recorded": self.trainer.recorded,
            "replayed": outcome is not None and outcome.replayed,
        }
        if outcome is not None:
            info["round"] = round_info(outcome)
        return info


def _checked_seeds(instances: Sequence[int]) -> Sequence[int]:
    if isinstance(instances, range) and len(instances):
        return instances
    if isinstance(instances, str | bytes) or not isinstance(instances, Iterable) or not (seeds := list(instances)):
        raise ValueError(f"instances: expected at least one instance seed in a sequence, got {instances!r}.")
    return tuple(require_integer("instances", seed, low=-(2**63), high=2**63) for seed in seeds)


def default_space(task: InnerTask, trainer: InnerTrainer) -> DecisionSpace:
    """Return the default decision space: every algorithm the trainer knows, every source of the task.

    What is no knob is as recipes of the task leave it out (`InnerTask.recipe_defaults`).
    """
    return DecisionSpace(
        algorithms=trainer.algorithms,
        sources=tuple(task.built.sources),
        usable={name: trainer.usable_sources(task, name) for name in trainer.algorithms},
        fixed={name: value for name, value in task.recipe_defaults().items() if name not in DEFAULT_PARAMETERS},
    )


def round_info(outcome: Outcome) -> dict[str, Any]:
    """Return a round's facts for ``info``: nothing a clock decides.

    ``curves`` has a row per optimiser step; its ``learning_rate`` is the one that step used.
    """
    report = outcome.report
    score = None if report.scorecard is None else report.scorecard
    return {
        "recipe": report.recipe.to_dict(),
        "checkpoint": report.checkpoint,
        "start": report.start,
        "seed": report.seed,
        "steps": report.steps,
        "ended": report.ended,
        "score": None if score is None else score.score,
        "score_error": None if score is None else score.standard_error,
        "gain": None if score is None else score.score - outcome.best_before,
        "improved": outcome.improved,
        "charged": outcome.charged,
        "curves": [dict(row) for row in report.curves],
        "supervised_tokens": report.supervised_tokens,
        "failure": None if report.failure is None else asdict(report.failure),
        "rescued": [asdict(fault) for fault in report.rescued],
        "flags": list(report.flags),
        "cached": report.cached,
    }


def describe_round(number: int, outcome: Outcome) -> str:
    """Return one line a person can read."""
    report = outcome.report
    asked = report.recipe
    mix = " ".join(f"{name} {weight:.0%}" for name, weight in asked.mix.items() if weight >= 0.005)
    head = f"round {number}: {asked.algorithm} from {asked.start}, lr {asked.learning_rate:.2g}, {report.steps} steps"
    if report.failure is not None:
        return f"{head}, {mix} -> failed ({report.failure.cause}: {report.failure.evidence})"
    assert report.scorecard is not None  # a round that did not fail was evaluated
    mark = "  new best" if outcome.improved else ""
    cached = "  cached, cost 0" if report.cached else ""
    score = f"{report.scorecard.score:.3f} ± {report.scorecard.standard_error:.3f}"
    return f"{head}, {mix} -> {score}{mark}{cached}"


def _trainer_for(
    task: InnerTask, trainer: InnerTrainer | None, settings: Mapping[str, Mapping[str, Any] | None]
) -> InnerTrainer:
    """Return the trainer given, the task's own, or TRL's with the settings ``evaluator`` and ``faults``."""
    for name, given in settings.items():
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{name}: expected a mapping of settings, got {given!r}.")
    own = task.trainer() if trainer is None else trainer
    if own is not None:
        for name, given in settings.items():
            if given is not None:
                why = (
                    "with a trainer of your own, configure that"
                    if trainer is not None
                    else "the task brings its own trainer"
                )
                raise ValueError(f"{name}: it configures the TRL trainer; {why}.")
        return own
    from ..inner_trainers.evaluation import Evaluator
    from ..inner_trainers.fault_policy import FaultPolicy
    from ..inner_trainers.trl.trainer import TrlTrainer

    evaluator = settings["evaluator"] or {}
    for key in evaluator:
        if key not in Evaluator.__dataclass_fields__:
            raise ValueError(f"evaluator: unknown key {key!r}.{did_you_mean(str(key), Evaluator.__dataclass_fields__)}")
    return TrlTrainer(Evaluator(**evaluator), fault_policy=FaultPolicy.from_dict(settings["faults"] or {}))


def _score_row(scorecard: Scorecard, dimensions: Sequence[str]) -> list[float]:
    row = [scorecard.score, scorecard.standard_error]
    for name in dimensions:
        row.extend(getattr(scorecard.dimensions[name], column) for column in SCORE_COLUMNS)
    return row


def _curve_summary(report: RoundReport) -> list[float]:
    curves = report.curves
    if not curves:
        return [0.0] * 5
    first, last = curves[0], curves[-1]
    largest = float(np.max([row.get("grad_norm", 0.0) for row in curves]))  # NaN if any is
    return [first["loss"], last["loss"], largest, last.get("reward", 0.0), last.get("entropy", 0.0)]


def _squash(value: float) -> float:
    """Return tanh(value / LOSS_SCALE); infinities stay, so that the observation's not-finite flag sees them."""
    return math.tanh(value / LOSS_SCALE) if math.isfinite(value) else value


__all__ = ["STOP", "PostTrainingEnv", "default_space", "describe_round", "round_info"]
