"""Trains a meta-policy with SB3 on real rounds; a killed run goes on where it was.

Resuming repeats the run's decisions from its seed and takes each finished round from the journal, which costs
milliseconds, so the trained policy is the one an unbroken run would have given.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize

from ..envs.journal import Journal
from ..inner_trainers.files import write_atomically
from ..inner_trainers.messages import require_integer
from ..meta_policies.hyperparameters import Hyperparameters
from ..meta_policies.policy_file import save_policy
from ..meta_policies.sb3 import make_model, sb3_algorithm, wrap_for
from .compare import check_settings_file
from .comparison import normalised
from .episodes import describe_recipe
from .settings import EnvSettings, recipe_env, require_folder
from .tensorboard_log import CurveWriter
from .workers import end_with_parent

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSettings:
    """One meta-training run.

    Attributes:
        environment: how its environments are built.
        algo: key of `SB3_ALGORITHMS`.
        rounds: decisions in total, rounded up to whole rollouts; each is one round or an early stop, or, where rounds
            are adjusted while they run, ``interval`` optimiser steps of one.
        envs: environments side by side, each in a process of its own when there are several.
        seed: decides everything: SB3's seed, instances, round seeds.
        hyperparameters: keyword arguments that replace the algorithm's defaults, as rl-zoo3 writes them.
        normalize: arguments of SB3's `VecNormalize`; None for observations and rewards as they are.
        noise: kind and standard deviation of action noise; None for the algorithm's default.
    """

    environment: EnvSettings
    algo: str = "maskable_ppo"
    rounds: int = 128
    envs: int = 1
    seed: int = 0
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    normalize: Mapping[str, Any] | None = None
    noise: tuple[str, float | None] | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before anything is written.

        Raises:
            ValueError: an unknown algorithm, or a number outside its range.
        """
        algorithm = sb3_algorithm(self.algo)
        require_integer("rounds", self.rounds, low=1, high=10**9)
        require_integer("envs", self.envs, low=1, high=1024)
        if self.envs > 1 and not algorithm.vectors:
            raise ValueError(f"envs: {self.algo} plays whole episodes one after the other; use --envs 1.")
        require_integer("seed", self.seed, low=0, high=2**31 - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = {
            **asdict(self),
            "environment": self.environment.to_dict(),
            "hyperparameters": dict(self.hyperparameters),
            "noise": None if self.noise is None else list(self.noise),
        }
        for name in ("normalize", "noise"):
            if data[name] is None:
                del data[name]  # as runs of before there were such have it
        return data

    def chosen(self) -> Hyperparameters:
        """Return what replaces the algorithm's packaged hyperparameters."""
        kind, deviation = self.noise or (None, None)
        return Hyperparameters(self.hyperparameters, None, None, self.normalize, kind, deviation)


@dataclass(frozen=True)
class RoundEvent:
    """One decision of the run, for progress displays.

    Attributes:
        number: decision number from 1.
        total: decisions in the run.
        env: index of the environment.
        info: the environment's ``info``.
        reward: the reward.
        replayed: whether the journal answered.
        seconds_left: estimate of the time left; None before a round was trained.
    """

    number: int
    total: int
    env: int
    info: Mapping[str, Any]
    reward: float
    replayed: bool
    seconds_left: float | None

    def describe(self) -> str:
        """Return one line a person can read."""
        head = f"{self.number:4d}/{self.total}  env {self.env}  instance {self.info['instance']}"
        tail = f"best {self.info['best_score']:.3f}  budget left {self.info['budget_left']:.0%}"
        facts, running = self.info.get("round"), self.info.get("running")
        if running is not None:
            step = f"step {running['step']}/{running['recipe']['steps']}"
            did = self.info["adjustment"] or f"begins: {describe_recipe(running['recipe'])}"
            return f"{head}  {step}  {did}{'  (was illegal)' if self.info['illegal'] else ''}  {tail}"
        if facts is None:
            return f"{head}  stop  {tail}"
        if facts["failure"] is not None:
            result = f"failed ({facts['failure']['cause']}: {facts['failure']['kind']})"
        else:
            result = f"score {facts['score']:.3f} ± {facts['score_error']:.3f}  gain {facts['gain']:+.3f}"
        return f"{head}  {describe_recipe(facts['recipe'])}  {result}  {tail}"


def train(
    settings: TrainSettings,
    out: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundEvent], None] | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Train and return the policy's path with one row per finished episode (rounds, reward, gain).

    The folder gets ``run.json`` (settings), ``rounds-*.jsonl`` (every round), ``checkpoints-*`` (weights a restart
    needs), ``tensorboard`` and ``policy.zip`` (after each rollout and at the end).

    Args:
        settings: what to run.
        out: run folder.
        resume: go on with a run that is in the folder.
        on_round: called after each decision.

    Raises:
        ValueError: an unknown algorithm, a folder in use, or one of another run.
        RuntimeError: a worker process died.
    """
    require_folder("out", out)
    config = out / "run.json"
    if config.exists() and not resume:
        raise ValueError(f"{out}: a run is there already; add --resume to go on with it, or choose another folder.")
    if resume and not config.exists():
        raise ValueError(f"{out}: no run to resume (run.json is missing).")
    if resume:
        _refuse_fewer_rounds(config, settings.rounds)
    torch.set_num_threads(1)  # more threads add up in another order, and a resumed run would drift from its journal
    example = wrap_for(settings.algo, settings.environment.build())  # what cannot be built leaves no run behind
    out.mkdir(parents=True, exist_ok=True)
    check_settings_file(config, settings.to_dict(), ignore=("rounds",))
    for worker in range(settings.envs):
        _error_file(out, worker).unlink(missing_ok=True)
    workers = _vector_env(settings, out)
    tap = _Tap(workers)
    vector: VecEnv = tap
    if settings.normalize is not None:
        vector = VecNormalize(tap, **settings.normalize)
    writer = CurveWriter(out / "tensorboard" / "meta")
    broken = False
    try:
        model = make_model(settings.algo, vector, settings.seed, settings.chosen())
        model.set_logger(Logger(folder=None, output_formats=[_LoggerOutput(writer)]))
        task = recipe_env(example).family.name
        save = functools.partial(
            save_policy,
            path=out / "policy.zip",
            algo=settings.algo,
            env=example,
            task=task,
            hyperparameters=settings.hyperparameters,
        )
        callback = _RunCallback(settings, out, writer, save, on_round, tap)
        try:
            model.learn(settings.rounds, callback=callback)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            broken = True
            raise RuntimeError(
                f"a worker process died: {_worker_errors(out, settings.envs).rstrip('.')}. "
                f"Finished rounds are in {out}; --resume goes on with them."
            ) from error
        path = out / "policy.zip"
        if callback.trained or not path.exists():  # a run that was complete already keeps its file
            save(model)
        return path, callback.episodes
    finally:
        writer.close()
        _end(workers, broken)
        example.close()


def _refuse_fewer_rounds(config: Path, rounds: int) -> None:
    try:
        stored = json.loads(config.read_text()).get("rounds", 0)
    except (ValueError, AttributeError):
        return  # `check_settings_file` says what is damaged
    if rounds < stored:
        raise ValueError(f"{config.parent}: the run has {stored} rounds; --resume takes as many or more, got {rounds}.")


def make_training_env(settings: TrainSettings, out: str, worker: int) -> gym.Env[Any, Any]:
    """Build one worker's environment with its journal; a spawn target."""
    in_worker = multiprocessing.parent_process() is not None
    if in_worker:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        end_with_parent()
    journal = Journal(out, name=str(worker))
    env: gym.Env[Any, Any] = Monitor(wrap_for(settings.algo, settings.environment.build(worker, journal)))
    return _ToldErrors(env, _error_file(Path(out), worker)) if in_worker else env


class _ToldErrors(gym.Wrapper[Any, Any, Any, Any]):
    """Leaves an error's text where the parent finds it; a pipe that breaks tells nothing."""

    def __init__(self, env: gym.Env[Any, Any], path: Path) -> None:
        super().__init__(env)
        self._path = path

    def reset(self, **kwargs: Any) -> Any:
        """Reset, telling errors."""
        return self._told(lambda: self.env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        """Step, telling errors."""
        return self._told(lambda: self.env.step(action))

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            _LOG.debug("worker error", exc_info=True)
            write_atomically(self._path, f"{type(error).__name__}: {error}".encode())
            raise SystemExit(1) from None


def _error_file(out: Path, worker: int) -> Path:
    return out / f"worker-{worker}.error"


def _worker_errors(out: Path, envs: int) -> str:
    told = [f.read_text() for f in (_error_file(out, worker) for worker in range(envs)) if f.exists()]
    return "; ".join(told) or "it was ended from outside, or ran out of memory"


def _vector_env(settings: TrainSettings, out: Path) -> VecEnv:
    makers = [functools.partial(make_training_env, settings, str(out), worker) for worker in range(settings.envs)]
    if settings.envs == 1:
        return DummyVecEnv(makers)  # type: ignore[arg-type]
    try:
        return SubprocVecEnv(makers, start_method="spawn")  # type: ignore[arg-type]  # a fork would copy CUDA's state
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError(
            f"a worker process died while it was built; run with --envs 1 to see why, or fewer than {settings.envs}."
        ) from error


def _end(vector: VecEnv, broken: bool) -> None:
    """Close the environments; workers that are in a round, or whose pipes are broken, are ended instead."""
    if isinstance(vector, SubprocVecEnv) and (broken or vector.waiting):  # what was finished is on disk
        for process in vector.processes:
            process.terminate()
        for process in vector.processes:
            process.join()
    else:
        vector.close()


class _Tap(VecEnvWrapper):
    """Keeps what the last step gave, as it was before anything is normalised: not every algorithm shows it."""

    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]

    def reset(self) -> Any:
        """Reset all environments."""
        return self.venv.reset()

    def step_wait(self) -> Any:
        """Wait for a step, and keep it."""
        observations, self.rewards, self.dones, self.infos = self.venv.step_wait()
        return observations, self.rewards, self.dones, self.infos


class _LoggerOutput(KVWriter):
    """Sends SB3's own training figures to the run's TensorBoard folder."""

    def __init__(self, writer: CurveWriter) -> None:
        self._writer = writer

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Write the numbers; speeds and elapsed times are left out, as a resumed run would repeat them."""
        numbers = {k: float(v) for k, v in key_values.items() if isinstance(v, int | float) or hasattr(v, "item")}
        self._writer.write({k: v for k, v in numbers.items() if not k.startswith("time/")}, step)

    def close(self) -> None:
        """Leave the shared writer open."""


class _RunCallback(BaseCallback):
    """Writes curves, keeps the episode rows, saves the policy after each rollout."""

    def __init__(
        self,
        settings: TrainSettings,
        out: Path,
        writer: CurveWriter,
        save: Callable[[Any], Path],
        on_round: Callable[[RoundEvent], None] | None,
        tap: _Tap,
    ) -> None:
        super().__init__()
        self._tap = tap
        self._settings, self._out, self._writer, self._save, self._on_round = settings, out, writer, save, on_round
        self.episodes: list[dict[str, Any]] = []
        self._rewards = [0.0] * settings.envs
        self._episode_numbers = [0] * settings.envs
        self._decisions = 0
        self._total = settings.rounds
        self._trained = 0
        self._trained_seconds = 0.0
        self._last = time.perf_counter()

    def _on_training_start(self) -> None:
        on_policy = sb3_algorithm(self._settings.algo).on_policy
        rollout = (int(self.model.n_steps) if on_policy else 1) * self._settings.envs  # type: ignore[attr-defined]
        self._total = -(-self._settings.rounds // rollout) * rollout

    def _on_step(self) -> bool:
        now = time.perf_counter()
        infos = self._tap.infos
        fresh = sum(1 for info in infos if ("round" in info or "running" in info) and not info["replayed"])
        if fresh:
            self._trained += fresh
            self._trained_seconds += now - self._last
        self._last = now
        for index, info in enumerate(infos):
            self._decisions += 1
            self._note(index, info, float(self._tap.rewards[index]), bool(self._tap.dones[index]))
        return True

    def _note(self, index: int, info: Mapping[str, Any], reward: float, done: bool) -> None:
        self._rewards[index] += reward
        facts = info.get("round")
        values = {
            "round/reward": reward,
            "round/best_score": info["best_score"],
            "round/budget_left": info["budget_left"],
        }
        if "illegal" in info:
            values["adjustments/illegal"] = float(info["illegal"])
        if facts is not None:
            values["round/failed"] = float(facts["failure"] is not None)
            if facts["score"] is not None:
                values |= {"round/score": facts["score"], "round/gain": facts["gain"]}
            self._write_inner_curves(index, info, facts)
        self._writer.write(values, self._decisions)
        if done:
            gain = normalised(info["base_score"], info["best_score"])
            row = {
                "rounds": self._decisions,
                "reward": self._rewards[index],
                "gain": gain,
                "recorded": info["recorded"],
            }
            self.episodes.append(row)
            self._writer.write({"episode/reward": row["reward"], "episode/gain": gain}, self._decisions)
            self._rewards[index] = 0.0
            self._episode_numbers[index] += 1
        if self._on_round is not None:
            left = None
            if self._trained:
                left = (self._total - self._decisions) * self._trained_seconds / self._trained
            replayed = bool(info["replayed"])
            self._on_round(RoundEvent(self._decisions, self._total, index, info, reward, replayed, left))

    def _write_inner_curves(self, index: int, info: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        folder = self._out / "tensorboard" / f"round-{self._decisions:05d}"
        writer = CurveWriter(folder)
        for row in facts["curves"]:
            writer.write({f"inner/{k}": v for k, v in row.items() if k != "step"}, int(row["step"]))
        writer.close()

    @property
    def trained(self) -> bool:
        """Whether a round was trained, not only taken from the journal."""
        return self._trained > 0

    def _on_rollout_end(self) -> None:
        if self.trained:  # a policy of this moment of the replay may be on disk in a later state
            self._save(self.model)
