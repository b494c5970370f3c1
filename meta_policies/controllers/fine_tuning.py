"""Policy-gradient fine-tuning of a policy net on live rounds, with sb3-contrib's MaskablePPO.

What SB3 does: it collects decisions under masks, holds the net and a value head, and takes clipped policy-gradient
steps. What it has no place for is the return: a decision is worth the mean improvement of the objective over the next
100 optimiser steps, which is a window of equal weights and not a discounted sum. `ImprovementReturns`, a callback,
puts these returns, and as advantages their difference from the value head's baseline, into the rollout buffer before
each update.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from ...inner_trainers.adjustments import NONE
from ...inner_trainers.messages import did_you_mean, require_integer, require_number
from .control_view import ControlView, Outcome
from .net import HIDDEN, LAYERS, PolicyNet

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE_HIDDEN = 12
"""Width of the value head's hidden layer; the head is left behind when the net is exported."""
OBJECTIVES = ("improvement", "benchmark")
_REMEMBERED = 4096


@dataclass(frozen=True)
class FineTuningSettings:
    """How a net is fine-tuned.

    Attributes:
        objective: ``"improvement"``: a decision is worth the mean improvement over the next ``horizon`` steps;
            ``"benchmark"``: the environment's own reward to the round's end, undiscounted.
        horizon: optimiser steps over which the improvement is taken, in [1, 100000]; fewer at a round's end.
        before: optimiser steps before the decision that it is taken against, in [1, 100000].
        failure_penalty: what each step that a failure cost counts below the level before, in spreads; at least 0.
        rollout: decisions per environment between two updates, in [2, 100000]. A rollout's last decisions are judged by
            the steps there were; take whole rounds.
        epochs: passes over a rollout.
        batch_size: decisions per gradient step.
        learning_rate: of Adam.
        entropy: weight of the entropy bonus.
        clip_range: how far a probability ratio may move from 1.
        target_kl: an update ends early when it has moved the policy by more than 1.5 times this.
        softening: what the net's logits are divided by while it is fine-tuned, at least 1: a cloned net is too sure to
            explore.
    """

    objective: str = "improvement"
    horizon: int = 100
    before: int = 10
    failure_penalty: float = 2.0
    rollout: int = 128
    epochs: int = 8
    batch_size: int = 64
    learning_rate: float = 3e-3
    entropy: float = 0.02
    clip_range: float = 0.2
    target_kl: float = 0.1
    softening: float = 2.0

    def __post_init__(self) -> None:
        """Check every entry.

        Raises:
            ValueError: an unknown objective, or a number outside its range.
        """
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective: unknown {self.objective!r}.{did_you_mean(str(self.objective), OBJECTIVES)}")
        for name in ("horizon", "before", "epochs", "batch_size"):
            require_integer(name, getattr(self, name), low=1, high=100_000)
        require_integer("rollout", self.rollout, low=2, high=100_000)
        require_number("failure_penalty", self.failure_penalty, low=0, high=100)
        require_number("entropy", self.entropy, low=0, high=10)
        require_number("softening", self.softening, low=1, high=100)
        for name in ("learning_rate", "clip_range", "target_kl"):
            require_number(name, getattr(self, name), low=0, high=10, low_open=True)


@dataclass(frozen=True)
class FineTuningReport:
    """What came of a fine-tuning.

    Attributes:
        decisions: decisions taken.
        rounds: rounds that ended.
        rollouts: for each update, oldest first: ``improvement`` (mean worth of a decision, in spreads; None for the
            benchmark's reward), ``reward`` (mean return of the rounds that ended in it; None when none did),
            ``nothing`` (share of decisions that were ``none``).
    """

    decisions: int
    rounds: int
    rollouts: list[dict[str, float | None]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def fine_tune(
    net: PolicyNet,
    envs: Sequence[Callable[[], gym.Env[Any, Any]]],
    *,
    decisions: int,
    seed: int = 0,
    settings: FineTuningSettings | None = None,
) -> tuple[PolicyNet, FineTuningReport]:
    """Return the net after policy-gradient updates on the environments' rounds, and what came of it.

    The same net, environments, seed and settings give the same weights. Global random states are put back.

    Args:
        net: where to start, usually a cloned one; what it may choose, and how often, stays the same.
        envs: builders of `PostTrain/InLoop-v0` environments, which are stepped in turn in this process and closed.
        decisions: decisions in all, rounded up to whole rollouts.
        seed: decides what is explored, and the environments' instances.
        settings: None for the defaults.

    Raises:
        ValueError: no environment, one of another kind, or a number outside its range.
    """
    settings = FineTuningSettings() if settings is None else settings
    decisions = require_integer("decisions", decisions, low=1, high=10**9)
    seed = require_integer("seed", seed, low=0, high=2**31 - 1)
    if not envs:
        raise ValueError("envs: expected at least one builder of an environment.")

    def viewed(build: Callable[[], gym.Env[Any, Any]]) -> Callable[[], gym.Env[Any, Any]]:
        return lambda: ControlView(build(), actions=net.actions, hardware=net.hardware, limits=net.limits)

    by_benchmark = settings.objective == "benchmark"
    with _random_states_kept():
        vector = DummyVecEnv([viewed(build) for build in envs])
        try:
            model = _model(net, vector, seed, settings)
            watch = ImprovementReturns(settings, write=not by_benchmark)
            model.learn(decisions, callback=watch)
            report = FineTuningReport(model.num_timesteps, watch.rounds, watch.rollouts)
            tuned = _exported(model, net, settings)
        finally:
            vector.close()
    facts = {**net.facts, "fine_tuning": {"seed": seed, "settings": asdict(settings), **report.to_dict()}}
    return replace(tuned, facts=facts), report


class ImprovementReturns(BaseCallback):
    """Puts the mean improvement after each decision into the rollout buffer, as its return.

    A decision's worth is the mean objective over the next ``horizon`` optimiser steps less the mean over the last
    ``before`` steps, in units of the size that three quarters of all worths so far stay below, each kind of objective
    on its own; clipped to [-5, 5].

    Args:
        settings: horizon and so on.
        write: whether the buffer is written to; if not it only watches.

    Attributes:
        rounds: rounds that ended.
        rollouts: see `FineTuningReport`.
    """

    def __init__(self, settings: FineTuningSettings, *, write: bool = True) -> None:
        super().__init__()
        self._settings, self._write = settings, write
        self.rounds = 0
        self.rollouts: list[dict[str, float | None]] = []
        self._open: list[_Round | None] = []
        self._decided: list[list[tuple[_Round, int]]] = []
        self._worths: dict[str, deque[float]] = {}
        self._rewards: list[float] = []
        self._running: list[float] = []

    def _on_training_start(self) -> None:
        count = self.training_env.num_envs
        self._open, self._running = [None] * count, [0.0] * count

    def _on_rollout_start(self) -> None:
        self._decided, self._rewards = [], []

    def _on_step(self) -> bool:
        row: list[tuple[_Round, int]] = []
        for number, info in enumerate(self.locals["infos"]):
            outcome: Outcome = info["control"]
            running = self._open[number]
            if running is None:
                running = self._open[number] = _Round(outcome.kind)
                running.add(outcome.decided_at, outcome.before)
            running.add(outcome.step, outcome.after)
            row.append((running, outcome.decided_at))
            self._running[number] += float(self.locals["rewards"][number])
            if outcome.ended:
                running.steps_lost, running.last = outcome.steps_lost, outcome.step
                self.rounds += 1
                self._rewards.append(self._running[number])
                self._open[number], self._running[number] = None, 0.0
        self._decided.append(row)
        return True

    def _on_rollout_end(self) -> None:
        buffer: Any = self.locals["rollout_buffer"]
        mean = None
        if self._write:
            worths = self._standardised()
            buffer.returns[:] = worths
            buffer.advantages[:] = worths - buffer.values
            mean = float(worths.mean())
        self.rollouts.append(
            {
                "improvement": mean,
                "reward": float(np.mean(self._rewards)) if self._rewards else None,
                "nothing": float(np.mean(buffer.actions == NONE)),
            }
        )

    def _standardised(self) -> np.ndarray:
        """Return each decision's worth, (rollout, environments) float32."""
        settings = self._settings
        raw = [[r.worth(at, settings.horizon, settings.before, 0.0) for r, at in row] for row in self._decided]
        for row, values in zip(self._decided, raw, strict=True):
            for (running, _), value in zip(row, values, strict=True):
                self._worths.setdefault(running.kind, deque(maxlen=_REMEMBERED)).append(abs(value))
        spread = {kind: float(np.percentile(list(sizes), 75)) or 1.0 for kind, sizes in self._worths.items()}
        worths = [
            [
                r.worth(at, settings.horizon, settings.before, settings.failure_penalty * spread[r.kind])
                / spread[r.kind]
                for r, at in row
            ]
            for row in self._decided
        ]
        return np.clip(np.asarray(worths, dtype=np.float32), -5.0, 5.0)


class _Round:
    """What one round's objective did.

    Attributes:
        kind: what the objective is made of.
        steps_lost: optimiser steps that a failure cost.
        last: step at which it ended.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind = str(kind)
        self.steps_lost, self.last = 0, 0
        self._seen: list[tuple[int, int, float]] = []  # after which step, how many steps it stands for, objective
        self._at = 0

    def add(self, step: int, objective: float | None) -> None:
        """Note the objective after a step; it stands for the steps since the last one noted."""
        if objective is not None:
            self._seen.append((step, max(1, step - self._at), objective))
        self._at = step

    def worth(self, decided_at: int, horizon: int, before: int, penalty: float) -> float:
        """Return the mean improvement after a decision; 0 when nothing was measured before or after it.

        Args:
            decided_at: optimiser steps done then.
            horizon: optimiser steps after it that count.
            before: optimiser steps before it that count.
            penalty: how far below the level before each lost step is taken to lie; 0 leaves lost steps out.
        """
        was = [entry for entry in self._seen if decided_at - before < entry[0] <= decided_at]
        now = [entry for entry in self._seen if decided_at < entry[0] <= decided_at + horizon]
        if not was:
            return 0.0
        level = _mean(was)
        lost = max(0, min(self.last + self.steps_lost, decided_at + horizon) - self.last)
        if penalty > 0 and lost:
            now.append((0, lost, level - penalty))
        return _mean(now) - level if now else 0.0


def _mean(entries: Sequence[tuple[int, int, float]]) -> float:
    """Return the mean objective over the steps that the entries stand for."""
    return sum(steps * value for _, steps, value in entries) / sum(steps for _, steps, _ in entries)


def _model(net: PolicyNet, vector: DummyVecEnv, seed: int, settings: FineTuningSettings) -> MaskablePPO:
    """Return an SB3 model whose actor is the net."""
    rollout = settings.rollout * vector.num_envs
    model = MaskablePPO(
        "MlpPolicy",
        vector,
        learning_rate=settings.learning_rate,
        n_steps=settings.rollout,
        batch_size=min(settings.batch_size, rollout),
        n_epochs=settings.epochs,
        clip_range=settings.clip_range,
        ent_coef=settings.entropy,
        target_kl=settings.target_kl,
        policy_kwargs={
            "net_arch": {"pi": list(HIDDEN), "vf": [VALUE_HIDDEN]},
            "activation_fn": torch.nn.Tanh,
        },
        gamma=1.0,  # of the benchmark's reward; improvements have no discount
        gae_lambda=1.0,
        seed=seed,
        device="cpu",
    )
    with torch.no_grad():
        for name, parameter in zip(LAYERS, _actor(model), strict=True):
            parameter.copy_(torch.from_numpy(net.weights[name]))
            if name.startswith("output"):
                parameter.div_(settings.softening)
    return model


def _actor(model: MaskablePPO) -> list[torch.nn.Parameter]:
    """Return the parameters that are the net's, in the order of `LAYERS`."""
    policy: Any = model.policy
    return [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]


def _exported(model: MaskablePPO, net: PolicyNet, settings: FineTuningSettings) -> PolicyNet:
    """Return the model's actor as a net that may choose what ``net`` may, as sure as it was before it was softened."""
    weights = {
        name: parameter.detach().numpy().astype(np.float32, copy=True)
        for name, parameter in zip(LAYERS, _actor(model), strict=True)
    }
    for name in ("output.weight", "output.bias"):
        weights[name] *= np.float32(settings.softening)
    return replace(net, weights=weights)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put the global random states and torch's thread count back afterwards; SB3 seeds all of them."""
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_num_threads(1)  # more add up in another order, and equal runs would differ
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)
