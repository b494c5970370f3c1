"""`TrlTrainer`: the inner trainer that runs real TRL rounds, many in one process."""

from __future__ import annotations

import importlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..base import Checkpoint, Cost, Limit, Scorecard, round_id
from ..evaluation import Evaluator
from ..faults import FaultWatch
from ..messages import did_you_mean, require_integer
from ..recipe import Recipe
from .algorithms import ALGORITHMS, check_recipe

if TYPE_CHECKING:
    from ..tasks.base import InnerTask
    from .data import TokenisedRows
    from .models import LoadedModel
    from .session import Meter, TrlSession

RESIDENT_TASKS = 8
"""Tasks whose tokenised rows and base scores stay in memory."""


@dataclass
class _Resident:
    """What stays in memory of a task: its model, tokenised rows and the base scores."""

    task: InnerTask
    model: LoadedModel
    tokenised: dict[str, TokenisedRows] = field(default_factory=dict)
    longest_prompt: dict[tuple[str, str], int] = field(default_factory=dict)
    base_scores: dict[str, tuple[Scorecard, Cost]] = field(default_factory=dict)


class TrlTrainer:
    """Runs SFT and GRPO rounds with TRL; satisfies `InnerTrainer`.

    TRL is imported once per process and the model of each base checkpoint is loaded once. The rows of a source are
    tokenised, and the base weights scored, once for equal tasks, of which the `RESIDENT_TASKS` used last are kept.
    Nothing is written to disk.

    Args:
        evaluator: how checkpoints are scored.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"`` for training.
        torch_threads: CPU threads torch may use, set for the process; None leaves it alone. One thread is the
            fastest on a shared machine and makes results equal bit for bit.
    """

    recorded = False

    def __init__(
        self,
        evaluator: Evaluator | None = None,
        device: str = "auto",
        precision: str = "auto",
        torch_threads: int | None = 1,
    ) -> None:
        self.evaluator = evaluator if evaluator is not None else Evaluator()
        self._device_name, self._precision_name, self._torch_threads = device, precision, torch_threads
        self._models: dict[str, tuple[str, LoadedModel]] = {}  # folder -> hash of its files, model
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # content hash -> task, the last used at the end
        if device != "auto" or precision != "auto":
            self._ready()  # a device or precision that is not there is refused at once

    def __deepcopy__(self, memo: dict[int, Any]) -> TrlTrainer:
        """Return the trainer itself: Gymnasium copies an environment's arguments whenever its spec is read."""
        return self

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms it knows, in a fixed order."""
        return tuple(ALGORITHMS)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Settings of the evaluator, the precision that rounds train in, and the kind of device."""
        device, precision = self._ready()
        evaluator = {**asdict(self.evaluator), "seeds": list(self.evaluator.seeds)}
        return {"trainer": "TrlTrainer", "evaluator": evaluator, "precision": precision, "device": device.type}

    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that ``algorithm`` ignores."""
        return ALGORITHMS[algorithm].ignored

    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        """Return the names of the sources that have the rows ``algorithm`` trains on, sorted."""
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)}")
        kind = ALGORITHMS[algorithm].row_kind
        return tuple(name for name, source in task.built.sources.items() if kind in source.rows)

    def base(self, task: InnerTask) -> Checkpoint:
        """Return the task's base weights."""
        return Checkpoint("base", self._load(task).model.base_weights)

    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of the task's model."""
        return self._load(task).model.parameters

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse a recipe that cannot run on the task, before the model is loaded; see `InnerTrainer.check`."""
        check_recipe(task, recipe)

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the most one optimiser step can cost."""
        spec = check_recipe(task, recipe)
        resident = self._load(task)
        sequences = recipe.batch_size * recipe.gradient_accumulation
        used = [name for name, weight in recipe.mix.items() if weight > 0]
        if spec.on_policy:
            prompt = max(self._longest_prompt(resident, name, spec.row_kind) for name in used)
            completion = task.built.benchmark.max_new_tokens
            scored = prompt + (prompt + completion if recipe.kl_coef else 0)
            counts = (sequences * (prompt + completion), sequences * completion, sequences * scored)
        else:
            longest = min(recipe.max_length, max(self._tokenise(resident, name).longest for name in used))
            counts = (sequences * longest, 0, 0)
        return Cost(*counts, flops=self._flops(resident, recipe, *counts))

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        """Return the most one evaluation can cost."""
        resident = self._load(task)
        benchmark = task.built.benchmark
        items = benchmark.items(split)
        generated = len(items) * self.evaluator.samples * benchmark.max_new_tokens
        if ("", split) not in resident.longest_prompt:
            ids = resident.model.tokenizer(text=[item.prompt for item in items])["input_ids"]
            resident.longest_prompt["", split] = sum(map(len, ids))
        scored = resident.longest_prompt["", split] * len(self.evaluator.seeds)
        return Cost(0, generated, scored, 2.0 * resident.model.parameters * (generated + scored))

    def begin(
        self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None
    ) -> TrlSession:
        """Start a round, parked before its first step; see `InnerTrainer.begin`.

        Raises:
            ValueError: the recipe cannot run on the task, a seed outside [0, 2**32), or a source of the mix of which
                no row keeps a completion token at ``max_length``.
        """
        spec = check_recipe(task, recipe)
        require_integer("seed", seed, low=0, high=2**32 - 1)
        resident = self._load(task)
        device, precision = self._ready()
        from .context import RoundContext
        from .data import draw_mix
        from .session import TrlSession

        sources = {name: task.built.sources[name] for name, weight in recipe.mix.items() if weight > 0}
        tokenised = (
            {} if spec.on_policy else {name: self._tokenise(resident, name).cut(recipe.max_length) for name in sources}
        )
        unsupervised, flags = _truncation_flags(tokenised, recipe.max_length)
        rows = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
        if spec.on_policy:
            rows //= recipe.num_generations
        usable = {
            name: tokenised[name].trainable if name in tokenised else range(len(source.rows[spec.row_kind]))
            for name, source in sources.items()
        }
        drawn = draw_mix({name: len(indices) for name, indices in usable.items()}, recipe.mix, rows, seed)
        draw = [(name, usable[name][position]) for name, position in drawn]
        module = importlib.import_module(f".{spec.module}", __package__)

        def build() -> tuple[Any, Meter]:
            context = RoundContext(
                task=task,
                recipe=recipe,
                model=resident.model.with_weights(start.weights),
                reference=lambda: resident.model.with_weights(start.weights).eval(),
                tokenizer=resident.model.tokenizer,
                draw=draw,
                sources=sources,
                tokenised=tokenised,
                seed=seed,
                precision=precision,
                device=device,
            )
            built: tuple[Any, Meter] = module.build_trainer(context)
            return built

        return TrlSession(
            build=build,
            recipe=recipe,
            start=start,
            seed=seed,
            round_id=round_id(task, start, recipe, seed, spec.ignored),
            flops=lambda m: self._flops(resident, recipe, m.trained_tokens, m.generated_tokens, m.scored_tokens),
            step_bound=self.step_cost_bound(task, recipe),
            limit=limit,
            watch=FaultWatch(resident.model.template.config.vocab_size, spec.on_policy),
            torch_threads=self._torch_threads,
            flags=flags,
            rows_without_supervision=unsupervised,
        )

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Score a checkpoint on one split; the base weights' score is computed once per task."""
        resident = self._load(task)
        if checkpoint.id == "base" and split in resident.base_scores:
            return resident.base_scores[split]
        from .models import load_weights

        began = time.perf_counter()
        model = resident.model.template
        load_weights(model, checkpoint.weights)
        scorecard, generated, scored = self.evaluator.evaluate(
            model, resident.model.tokenizer, task.built.benchmark, split
        )
        cost = Cost(
            generated_tokens=generated,
            scored_tokens=scored,
            flops=2.0 * resident.model.parameters * (generated + scored),
            device_seconds=time.perf_counter() - began,
        )
        if checkpoint.id == "base":
            resident.base_scores[split] = (scorecard, cost)
        return scorecard, cost

    def _ready(self) -> tuple[Any, str]:
        import torch

        from .models import quiet_libraries, resolve_device, resolve_precision

        if self._torch_threads is not None and torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        quiet_libraries()
        device = resolve_device(self._device_name)
        return device, resolve_precision(self._precision_name, device)

    def _load(self, task: InnerTask) -> _Resident:
        key = task.built.content_hash
        if key not in self._residents:
            self._residents[key] = _Resident(task, self._model(task))
            if len(self._residents) > RESIDENT_TASKS:
                self._residents.popitem(last=False)
        self._residents.move_to_end(key)
        return self._residents[key]

    def _model(self, task: InnerTask) -> LoadedModel:
        folder, content = str(task.base_checkpoint()), task.built.checkpoint_hash
        if folder not in self._models or self._models[folder][0] != content:
            device, _ = self._ready()
            import torch

            from .models import load_model, trainable_tensors
            from .session import caller_random_state_kept

            # building a module draws its initial weights before they are loaded
            with caller_random_state_kept(), trainable_tensors():
                self._models[folder] = content, load_model(task.base_checkpoint(), device, torch.float32)
        return self._models[folder][1]

    def _tokenise(self, resident: _Resident, source: str) -> TokenisedRows:
        if source not in resident.tokenised:
            from .data import tokenise_demonstrations

            rows = resident.task.built.sources[source].rows["demonstrations"]
            resident.tokenised[source] = tokenise_demonstrations(resident.model.tokenizer, rows)
        return resident.tokenised[source]

    def _longest_prompt(self, resident: _Resident, source: str, kind: str) -> int:
        key = (source, kind)
        if key not in resident.longest_prompt:
            rows = resident.task.built.sources[source].rows[kind]
            ids = resident.model.tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
            empty = [number for number, row in enumerate(ids, start=1) if not row]
            if empty:
                raise ValueError(f"source {source!r}, {kind} row {empty[0]}: the prompt has no tokens to continue.")
            resident.longest_prompt[key] = max(map(len, ids))
        return resident.longest_prompt[key]

    def _flops(self, resident: _Resident, recipe: Recipe, trained: int, generated: int, scored: int) -> float:
        total = resident.model.parameters
        if recipe.lora_rank == 0:
            per_trained_token = 6.0 * total
        else:
            adapter = lora_parameters(resident.model.template, recipe.lora_rank)
            per_trained_token = 4.0 * total + 6.0 * adapter
        return per_trained_token * trained + 2.0 * total * (generated + scored)


def lora_parameters(model: Any, rank: int) -> int:
    """Return the number of adapter parameters of rank ``rank`` on every linear layer but the output head."""
    import torch
    from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2 and its kin

    head = model.get_output_embeddings()
    return sum(
        rank * sum(module.weight.shape)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    )


def _truncation_flags(tokenised: dict[str, Any], max_length: int) -> tuple[int, tuple[str, ...]]:
    lost = {name: rows.unsupervised for name, rows in tokenised.items() if rows.unsupervised}
    for name, rows in tokenised.items():
        if not rows.trainable:
            count, needed = len(rows.input_ids), rows.smallest_max_length
            if needed is None:
                raise ValueError(f"source {name!r}: all {count} completions are empty, so there is nothing to learn.")
            raise ValueError(
                f"max_length: at {max_length} none of the {count} rows of source {name!r} keeps a completion token; "
                f"the smallest max_length that works is {needed}."
            )
    flags = tuple(
        f"{len(rows)} of {len(tokenised[name].input_ids)} rows of source {name!r} keep no completion token at "
        f"max_length {max_length}: rows {', '.join(map(str, rows[:10]))}{', …' if len(rows) > 10 else ''}"
        for name, rows in lost.items()
    )
    return sum(map(len, lost.values())), flags
