"""Long rounds of each algorithm against the plain training run a person writes: what the environment adds to it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ..inner_trainers.messages import did_you_mean

BATCH, RATE, GENERATIONS, SEED = 32, 1e-4, 8, 0
STEPS: Mapping[str, int] = {
    "distill": 70,
    "dpo": 80,
    "grpo": 110,
    "kto": 100,
    "midtrain": 160,
    "ppo": 80,
    "rft": 120,
    "rloo": 100,
    "sft": 160,
}
"""Optimiser steps at which plain training takes more than five seconds on one core."""


def bench_long_round(algorithm: str, repeats: int) -> dict[str, Any]:
    """One `env.step` of a round that trains for more than 5 s, against the same training written by hand.

    Both sides evaluate alike, so the difference is what session and environment add. By hand means TRL's own trainer
    on its own data set where TRL has one; sampling, filtering and `SFTTrainer` for rft; for ppo, which TRL has not, the
    trainer of this package outside any session.

    Args:
        algorithm: inner algorithm.
        repeats: interleaved pairs, after one of warm-up.

    Raises:
        ValueError: an unknown algorithm.
    """
    if algorithm not in STEPS:
        raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, STEPS)}")
    env, recipe = _env_and_recipe(algorithm)
    base: Any = env.unwrapped
    action = base.encode_recipe(recipe)
    plain = _Plain(base, recipe)
    ours, theirs, training = [], [], []
    for number in range(1 + repeats):
        began = time.perf_counter()
        info = env.step(action)[4]
        ours_seconds = time.perf_counter() - began
        if info["round"]["failure"] is not None:
            raise RuntimeError(f"the round failed: {info['round']['failure']['evidence']}")
        began = time.perf_counter()
        trained = plain.train()
        training_seconds = time.perf_counter() - began
        base.trainer.evaluator.evaluate(trained, plain.tokenizer, plain.task.built.benchmark, "validation")
        if number > 0:
            ours.append(ours_seconds)
            training.append(training_seconds)
            theirs.append(time.perf_counter() - began)
    return {
        "algorithm": algorithm,
        "steps": recipe.steps,
        "env_step_seconds": statistics.median(ours),
        "plain_seconds": statistics.median(theirs),
        "plain_training_seconds": statistics.median(training),
        "ratio": statistics.median(o / t for o, t in zip(ours, theirs, strict=True)),
        "target_ratio": 1.05,
    }


def bench_rollouts(repeats: int) -> dict[str, Any]:
    """Share of an optimiser step that generation takes, and PPO's step time against GRPO's at equal batch."""
    seconds: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for number in range(1 + repeats):
        for algorithm in ("grpo", "rloo", "ppo"):
            step, share = _timed_steps(algorithm)
            if number > 0:
                seconds.setdefault(algorithm, []).append(step)
                shares.setdefault(algorithm, []).append(share)
    return {
        "step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "generation_share": {name: statistics.median(values) for name, values in shares.items()},
        "target_generation_share": 0.6,
        "ppo_to_grpo_ratio": statistics.median(p / g for p, g in zip(seconds["ppo"], seconds["grpo"], strict=True)),
        "target_ratio": 1.6,
    }


def _timed_steps(algorithm: str, steps: int = 20) -> tuple[float, float]:
    """Return seconds per optimiser step of a warm session, and the share of them that sampling took."""
    from ..inner_trainers.trl.trainer import TrlTrainer

    task = _task()
    trainer = TrlTrainer()
    recipe = _recipe(algorithm, batch_size=64, steps=steps + 1)
    session = trainer.begin(task, recipe, trainer.base(task), SEED)
    try:
        session.advance(1)
        live: Any = session._trainer
        sampling = 0.0
        original = live._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal sampling
            began = time.perf_counter()
            result = original(*args, **kwargs)
            sampling += time.perf_counter() - began
            return result

        live._generate = timed
        began = time.perf_counter()
        session.advance(steps)
        elapsed = time.perf_counter() - began
    finally:
        session.close()
    return elapsed / steps, sampling / elapsed


def _task() -> Any:
    from ..inner_trainers.tasks.letters import SOURCES, LettersTask

    return LettersTask(
        SEED,
        base="messy",
        qualities=dict.fromkeys(SOURCES, "clean"),
        verifiers=dict.fromkeys(SOURCES, "exact"),
        sizes=dict.fromkeys(SOURCES, 1024),
    )


def _recipe(algorithm: str, **changes: Any) -> Any:
    from ..inner_trainers.recipe import Recipe
    from ..inner_trainers.tasks.letters import SOURCES

    settings = {"steps": STEPS[algorithm], "batch_size": BATCH, "learning_rate": RATE, "start": "base", **changes}
    return Recipe(algorithm, dict.fromkeys(SOURCES, 1 / len(SOURCES)), num_generations=GENERATIONS, **settings)


def _env_and_recipe(algorithm: str) -> tuple[Any, Any]:
    import gymnasium as gym

    import posttrain_gym  # noqa: F401 (registers the ids)

    from ..envs.decision_space import DecisionSpace, Parameter
    from ..inner_trainers.trl.trainer import TrlTrainer

    task, trainer, recipe = _task(), TrlTrainer(), _recipe(algorithm)
    space = DecisionSpace(
        algorithms=(algorithm,),
        sources=tuple(task.built.sources),
        usable={algorithm: trainer.usable_sources(task, algorithm)},
        parameters={"learning_rate": Parameter(1e-5, 1e-2, scale="log")},
        fixed={"steps": recipe.steps, "batch_size": BATCH, "num_generations": GENERATIONS},
    )
    endless = {"limit": 1e12, "max_rounds": 100_000, "patience": 100_000}
    env = gym.make("PostTrain/Recipe-v0", task=task, trainer=trainer, space=space, reuse=False, budget=endless)
    env.reset(seed=SEED)
    return env, recipe


class _Plain:
    """The same training, as a person writes it with TRL."""

    def __init__(self, env: Any, recipe: Any) -> None:
        from transformers import AutoTokenizer

        self.task, self.recipe, self.trainer = env.search.task, recipe, env.trainer
        self.folder = self.task.base_checkpoint()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def train(self) -> Any:
        """Build the trainer and train; return the model in evaluation mode."""
        from transformers import PrinterCallback

        trainer = getattr(self, f"_{self.recipe.algorithm}")()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer.model.eval()

    def _model(self, folder: Any = None) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder or self.folder, dtype=torch.float32)

    def _drawn(self, kind: str, count: int) -> list[Mapping[str, Any]]:
        from ..inner_trainers.trl.data import draw_mix

        rows = {name: source.rows[kind] for name, source in self.task.built.sources.items()}
        draw = draw_mix({name: len(of) for name, of in rows.items()}, self.recipe.mix, count, SEED)
        return [rows[name][index] for name, index in draw]

    def _arguments(self) -> dict[str, Any]:
        import torch

        return {
            "output_dir": tempfile.gettempdir(),
            "max_steps": self.recipe.steps,
            "per_device_train_batch_size": BATCH,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": not torch.cuda.is_available(),
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": self.recipe.steps,
            "dataloader_pin_memory": False,
        }

    def _common(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import datasets

        return {
            "model": self._model(),
            "train_dataset": datasets.Dataset.from_list(rows),
            "processing_class": self.tokenizer,
        }

    def _sft(self, rows: list[Mapping[str, Any]] | None = None) -> Any:
        from trl import SFTConfig, SFTTrainer

        drawn = self._drawn("demonstrations", self.recipe.steps * BATCH) if rows is None else rows
        texts = [{"prompt": row["prompt"], "completion": row["completion"]} for row in drawn]
        return SFTTrainer(args=SFTConfig(**self._arguments()), **self._common(texts))

    def _midtrain(self) -> Any:
        from trl import SFTConfig, SFTTrainer

        rows = [{"text": row["text"]} for row in self._drawn("text", self.recipe.steps * BATCH)]
        return SFTTrainer(args=SFTConfig(**self._arguments()), **self._common(rows))

    def _dpo(self) -> Any:
        from trl import DPOConfig, DPOTrainer

        rows = [dict(row) for row in self._drawn("preferences", self.recipe.steps * BATCH)]
        return DPOTrainer(args=DPOConfig(**self._arguments()), **self._common(rows))

    def _kto(self) -> Any:
        from trl import KTOConfig, KTOTrainer

        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in self._drawn("preferences", self.recipe.steps * BATCH // 2)
            for side in ("chosen", "rejected")
        ]
        return KTOTrainer(args=KTOConfig(**self._arguments()), **self._common(rows))

    def _prompts(self, per_prompt: int) -> list[dict[str, Any]]:
        return [dict(row) for row in self._drawn("prompts", self.recipe.steps * BATCH // per_prompt)]

    def _reward(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        from ..inner_trainers.tasks.letters import verify_exactly

        pairs = zip(columns["skill"], columns["answer"], completions, strict=True)
        return [verify_exactly({"skill": skill, "answer": answer}, text) for skill, answer, text in pairs]

    def _sampling(self) -> dict[str, Any]:
        return {"num_generations": GENERATIONS, "max_completion_length": self.task.built.benchmark.max_new_tokens}

    def _grpo(self) -> Any:
        from trl import GRPOConfig, GRPOTrainer

        rows = self._prompts(GENERATIONS)
        arguments = GRPOConfig(**self._arguments(), **self._sampling())
        return GRPOTrainer(args=arguments, reward_funcs=[self._reward], **self._common(rows))

    def _rloo(self) -> Any:
        from trl import RLOOConfig, RLOOTrainer

        rows = self._prompts(GENERATIONS)
        arguments = RLOOConfig(**self._arguments(), **self._sampling(), beta=0.0)
        return RLOOTrainer(args=arguments, reward_funcs=[self._reward], **self._common(rows))

    def _distill(self) -> Any:
        from trl import DistillationConfig, DistillationTrainer

        arguments = DistillationConfig(
            **self._arguments(), max_completion_length=self.task.built.benchmark.max_new_tokens
        )
        teacher = self._model(self.task.teacher_checkpoint())
        return DistillationTrainer(args=arguments, teacher_model=teacher, **self._common(self._prompts(1)))

    def _rft(self) -> Any:
        import torch

        model = self._model().eval()
        kept: dict[tuple[str, str], dict[str, Any]] = {}
        prompts = self._prompts(GENERATIONS)
        for first in range(0, len(prompts), 128):
            chunk = prompts[first : first + 128]
            inputs = self.tokenizer([row["prompt"] for row in chunk], return_tensors="pt", padding=True)
            with torch.no_grad():
                output = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=self.task.built.benchmark.max_new_tokens,
                    num_return_sequences=GENERATIONS,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            texts = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            owners = [row for row in chunk for _ in range(GENERATIONS)]
            columns = {name: [row[name] for row in owners] for name in ("skill", "answer")}
            for row, text, reward in zip(owners, texts, self._reward([], texts, **columns), strict=True):
                if reward >= 1:
                    kept[row["prompt"], text] = {"prompt": row["prompt"], "completion": text}
        rows = list(kept.values())
        return self._sft([rows[i % len(rows)] for i in range(self.recipe.steps * BATCH)])

    def _ppo(self) -> Any:
        """Return the trainer of this package, to be run outside any session."""
        session = self.trainer.begin(self.task, self.recipe, self.trainer.base(self.task), SEED)
        trainer, session._trainer = session._trainer, None
        session.close()
        trainer.callback_handler.callbacks = [
            callback for callback in trainer.callback_handler.callbacks if "Parking" not in type(callback).__name__
        ]
        return trainer
