"""Benchmarks that measure both sides in one run and give ratios; nothing here is asserted in tests."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ..inner_trainers.messages import did_you_mean
from .bench_data import bench_inspect_data
from .bench_in_loop import PAIRS, bench_in_loop
from .bench_rounds import bench_long_round, bench_rollouts
from .bench_space import bench_space

STEPS, BATCH, RATE = 20, 32, 3e-4
INSTANCE, REPEATS = 0, 5
ENDLESS = {"limit": 1e12, "max_rounds": 100_000, "patience": 100_000}


def run_bench(name: str, repeats: int | None = None, algorithm: str | None = None) -> dict[str, Any]:
    """Run the benchmark of a name.

    Args:
        name: a key of `BENCHES`.
        repeats: repetitions of each side; None for 5, of ``"in-loop"`` for 10.
        algorithm: with ``"round"``, run a long round of this algorithm; see `bench_long_round`.

    Raises:
        ValueError: unknown name, or an algorithm with another benchmark than ``"round"``.
    """
    if name not in BENCHES:
        raise ValueError(f"bench: unknown {name!r}.{did_you_mean(name, BENCHES)}")
    if algorithm is not None and name != "round":
        raise ValueError(f"algorithm: only the benchmark 'round' takes one, got {algorithm!r} for {name!r}.")
    if repeats is None:
        repeats = PAIRS if name == "in-loop" else REPEATS
    result = BENCHES[name](repeats) if algorithm is None else bench_long_round(algorithm, repeats)
    return {"bench": name, "repeats": repeats, "python": platform.python_version(), **result}


def bench_round(repeats: int) -> dict[str, Any]:
    """One `env.step` of a 20-step SFT round with its evaluation, against the same written plainly with TRL.

    The plain side builds a fresh trainer on text rows, which TRL tokenises, and samples with `generate`; both sides
    run in this warm process, interleaved, at the same batch, rate, rows, items and number of samples.
    """
    env = _bench_env()
    base: Any = env.unwrapped
    env.reset(seed=0)
    recipe = base.space.recipe("sft", steps=STEPS, batch_size=BATCH, learning_rate=RATE, start="base")
    action = base.encode_recipe(recipe)
    plain = _PlainRound(base, recipe)
    env.step(action)
    plain.run()
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_timed(lambda: env.step(action)))
        theirs.append(_timed(plain.run))
    return {
        "env_step_seconds": _spread([wall for wall, _ in ours]),
        "plain_seconds": _spread([wall for wall, _ in theirs]),
        "ratio": statistics.median(o[0] / t[0] for o, t in zip(ours, theirs, strict=True)),
        "cpu_ratio": statistics.median(o[1] / t[1] for o, t in zip(ours, theirs, strict=True)),
        "target_ratio": 0.8,
    }


class _PlainRound:
    """The same training and evaluation as a person writes them with TRL and transformers."""

    def __init__(self, env: Any, recipe: Any) -> None:
        from transformers import AutoTokenizer

        from ..inner_trainers.trl.data import draw_mix

        self.task = env.search.task
        self.folder = self.task.base_checkpoint()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.evaluator = env.trainer.evaluator
        rows = {name: source.rows["demonstrations"] for name, source in self.task.built.sources.items()}
        draw = draw_mix({name: len(r) for name, r in rows.items()}, recipe.mix, STEPS * BATCH, env.search.seed)
        self.rows = [rows[name][index] for name, index in draw]

    def run(self) -> float:
        import tempfile

        import datasets
        import torch
        from transformers import AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in self.rows]
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=tempfile.gettempdir(),
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=not torch.cuda.is_available(),
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=STEPS,
                dataloader_pin_memory=False,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=self.tokenizer,
        )
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return self.score(trainer.model.eval())

    def score(self, model: Any) -> float:
        import torch

        benchmark = self.task.built.benchmark
        items = benchmark.validation
        inputs = self.tokenizer([item.prompt for item in items], return_tensors="pt", padding=True)
        inputs = {k: v.to(model.device) for k, v in inputs.items() if k != "token_type_ids"}
        total = 0.0
        samples: int = self.evaluator.samples_per_seed
        for seed in self.evaluator.seeds:
            torch.manual_seed(seed)
            with torch.no_grad():
                output = model.generate(
                    **inputs,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=benchmark.max_new_tokens,
                    num_return_sequences=self.evaluator.samples_per_seed,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            texts = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            total += float(sum(benchmark.score(items[i // samples], text) for i, text in enumerate(texts)))
        return total / (len(items) * samples * len(self.evaluator.seeds))


def bench_rounds_per_hour(repeats: int) -> dict[str, Any]:
    """Rounds per hour of one process that runs many, against a fresh process per round that imports TRL."""
    env = _bench_env()
    base: Any = env.unwrapped
    env.reset(seed=0)
    recipe = base.space.recipe("sft", steps=STEPS, batch_size=BATCH, learning_rate=RATE, start="base")
    action = base.encode_recipe(recipe)
    env.step(action)
    code = (
        "from posttrain_gym.inner_trainers.recipe import Recipe\n"
        "from posttrain_gym.inner_trainers.tasks import resolve_task\n"
        "from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer\n"
        f"task = resolve_task('letters').instance({INSTANCE})\n"
        "trainer = TrlTrainer()\n"
        f"recipe = Recipe.from_dict({recipe.to_dict()!r})\n"
        "session = trainer.begin(task, recipe, trainer.base(task), 0)\n"
        "session.advance()\n"
        "report, checkpoint = session.result()\n"
        "trainer.evaluate(task, checkpoint, 'validation')\n"
    )
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_timed(lambda: env.step(action))[0])
        theirs.append(_timed(lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True))[0])
    return {
        "rounds_per_hour": 3600 / statistics.median(ours),
        "fresh_process_rounds_per_hour": 3600 / statistics.median(theirs),
        "ratio": statistics.median(t / o for o, t in zip(ours, theirs, strict=True)),
        "target_ratio": 4.0,
    }


def bench_memory(repeats: int) -> dict[str, Any]:
    """Resident memory after round 30 against round 5 of one process, SFT and GRPO in turn; repeats are unused."""
    env = _bench_env()
    base: Any = env.unwrapped
    env.reset(seed=0)
    resident = []
    for number in range(30):
        recipe = base.space.recipe(("sft", "grpo")[number % 2], steps=STEPS, learning_rate=RATE, start="base")
        env.step(base.encode_recipe(recipe))
        resident.append(_resident_megabytes())
    return {
        "after_round_5_mb": resident[4],
        "after_round_30_mb": resident[29],
        "ratio": resident[29] / resident[4],
        "target_ratio": 1.05,
    }


def bench_import(repeats: int) -> dict[str, Any]:
    """Seconds that `import posttrain_gym` adds to a bare interpreter's start, and whether it loads torch."""
    code = "import sys, posttrain_gym; print('torch' in sys.modules)"
    ours, bare, torch_loaded = [], [], False
    for _ in range(repeats):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        ours.append(time.perf_counter() - began)
        torch_loaded = torch_loaded or done.stdout.strip() == "True"
        bare.append(_timed(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))[0])
    return {
        "import_seconds": statistics.median(ours) - statistics.median(bare),
        "loads_torch": torch_loaded,
        "target_seconds": 0.5,
    }


BENCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "import": bench_import,
    "in-loop": bench_in_loop,
    "inspect-data": bench_inspect_data,
    "space": bench_space,
    "memory": bench_memory,
    "rollouts": bench_rollouts,
    "round": bench_round,
    "rounds-per-hour": bench_rounds_per_hour,
}


def _bench_env() -> Any:
    """Return an environment whose episode outlasts any benchmark; equal rounds are trained anew."""
    import gymnasium as gym

    import posttrain_gym  # noqa: F401 (registers the ids)

    return gym.make("PostTrain/Recipe-v0", instances=[INSTANCE], reuse=False, budget=dict(ENDLESS))


def _timed(action: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _resident_megabytes() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * 4096 / 2**20
