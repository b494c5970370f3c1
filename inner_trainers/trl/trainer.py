"""`TrlTrainer`: the inner trainer that runs real TRL rounds, many in one process."""

from __future__ import annotations

import importlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import Checkpoint, Cost, Limit, Scorecard, TrainingSession, round_id
from ..evaluation import Evaluator
from ..fault_policy import FaultPolicy
from ..faults import FaultWatch
from ..messages import did_you_mean, require_integer
from ..recipe import Recipe
from ..tasks.base import SPLITS
from ..time_limit import TimeLimitError, call_with_time_limit
from .algorithms import ALGORITHMS, AlgorithmSpec, check_recipe, usable_sources
from .positions import require_conversation_positions, require_positions
from .step_tokens import StepTokens

if TYPE_CHECKING:
    from ..tasks.base import Benchmark, InnerTask
    from .metering import Meter
    from .models import LoadedModel
    from .rows import TaskRows
    from .session import TrlSession

RESIDENT_TASKS = 8
"""Tasks whose tokenised rows and base scores stay in memory."""


@dataclass
class _Resident:
    """What stays in memory of a task: its model, tokenised rows and the base scores."""

    task: InnerTask
    model: LoadedModel
    rows: TaskRows
    prompt_tokens: dict[str, list[int]] = field(default_factory=dict)  # number of tokens of each item's prompt
    packs: bool | None = None  # whether packed rows stay apart, once asked
    base_scores: dict[str, tuple[Scorecard, Cost]] = field(default_factory=dict)
    quick_benchmarks: dict[int, Benchmark] = field(default_factory=dict)  # number of items -> the benchmark with them


class TrlTrainer:
    """Runs real rounds of every algorithm in `ALGORITHMS` with TRL; satisfies `InnerTrainer`.

    TRL is imported once per process and the model of each base checkpoint is loaded once. The rows of a source are
    tokenised, and the base weights scored, once for equal tasks, of which the `RESIDENT_TASKS` used last are kept.
    Nothing is written to disk.

    Args:
        evaluator: how checkpoints are scored.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"`` for training.
        torch_threads: CPU threads torch may use, set for the process; None leaves it alone. One thread is the
            fastest on a shared machine and makes results equal bit for bit.
        fault_policy: where faults begin and what a round does about them; None stops it at each.
        tf32: whether matrix products on CUDA may round their inputs to TF32, set for the process.
        vllm: whether the rollouts of grpo, rloo, ppo and distill are sampled with vLLM, which shares the CUDA device.
    """

    recorded = False

    def __init__(
        self,
        evaluator: Evaluator | None = None,
        device: str = "auto",
        precision: str = "auto",
        torch_threads: int | None = 1,
        fault_policy: FaultPolicy | None = None,
        tf32: bool = False,
        vllm: bool = False,
    ) -> None:
        self.evaluator = evaluator if evaluator is not None else Evaluator()
        self._device_name, self._precision_name, self._torch_threads = device, precision, torch_threads
        self.fault_policy = FaultPolicy() if fault_policy is None else fault_policy
        self._models: dict[str, tuple[str, LoadedModel]] = {}  # folder -> hash of its files, model
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # content hash -> task, the last used at the end
        self._differences: dict[tuple[str, ...], str] = {}  # folders and hashes of a model and its teacher -> sentence
        self._written: set[str] = set()  # content hashes of tasks whose chat template is there
        self._tf32, self._vllm = tf32, vllm
        if device != "auto" or precision != "auto" or tf32 or vllm:
            self._ready()  # what is not there is refused at once

    def __deepcopy__(self, memo: dict[int, Any]) -> TrlTrainer:
        """Return the trainer itself: Gymnasium copies an environment's arguments whenever its spec is read."""
        return self

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms it knows, in a fixed order."""
        return tuple(ALGORITHMS)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Settings of the evaluator, precision, kind of device, fault policy, TF32 and vLLM."""
        device, precision = self._ready()
        return {
            "trainer": "TrlTrainer",
            "evaluator": self.evaluator.settings,
            "precision": precision,
            "device": device.type,
            "fault_policy": self.fault_policy.to_dict(),
            "tf32": self._tf32,
            "vllm": self._vllm,
        }

    def ignored_settings(self, algorithm: str) -> tuple[str, ...]:
        """Return the recipe fields that ``algorithm`` ignores."""
        return ALGORITHMS[algorithm].ignored

    def usable_sources(self, task: InnerTask, algorithm: str) -> tuple[str, ...]:
        """Return the names of the sources that have the rows ``algorithm`` trains on, sorted.

        There are none for an algorithm that needs a teacher where the task has none, or one of another vocabulary.

        Raises:
            ValueError: an unknown algorithm, or a teacher's folder that is missing or damaged.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: unknown {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)}")
        spec = ALGORITHMS[algorithm]
        if spec.needs_teacher and task.built.teacher is not None and self._vocabulary_difference(task):
            return ()
        return usable_sources(task, spec)

    def base(self, task: InnerTask) -> Checkpoint:
        """Return the task's base weights."""
        return Checkpoint("base", self._load(task).model.base_weights)

    def training_rows(self, task: InnerTask, algorithm: str) -> dict[str, int]:
        """Return source -> rows of the kind that ``algorithm`` trains on, for the sources that it can use."""
        kind = ALGORITHMS[algorithm].rows
        return {name: len(task.built.sources[name].rows[kind]) for name in self.usable_sources(task, algorithm)}

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return str(self._ready()[0].type)

    @property
    def device_memory(self) -> float:
        """Memory of the device in bytes: of the CUDA device, or of the machine."""
        import torch

        device, _ = self._ready()
        if device.type == "cuda":
            return float(torch.cuda.get_device_properties(device).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def parameters(self, task: InnerTask) -> int:
        """Return the number of parameters of the task's model."""
        return self._load(task).model.parameters

    def check(self, task: InnerTask, recipe: Recipe) -> None:
        """Refuse a recipe that cannot run on the task, before the model is loaded; see `InnerTrainer.check`."""
        self._checked(task, recipe)

    def step_cost_bound(self, task: InnerTask, recipe: Recipe) -> Cost:
        """Return the most one optimiser step can cost."""
        spec = self._checked(task, recipe)
        resident = self._load(task)
        return self._cost(resident, recipe, spec.step_tokens(recipe, resident.rows.lengths(spec, recipe)))

    def evaluation_cost_bound(self, task: InnerTask, split: str) -> Cost:
        """Return the most one evaluation can cost."""
        return self._sampling_bound(self._load(task), task.built.benchmark, split, self.evaluator, split)

    def quick_cost_bound(self, task: InnerTask, items: int) -> Cost:
        """Return the most one quick evaluation can cost."""
        resident = self._load(task)
        benchmark = self._quick_benchmark(resident, items)
        return self._sampling_bound(resident, benchmark, "validation", self.evaluator.quick(), f"quick {items}")

    def _quick_benchmark(self, resident: _Resident, items: int) -> Benchmark:
        if items not in resident.quick_benchmarks:
            resident.quick_benchmarks[items] = self.evaluator.quick_benchmark(resident.task.built.benchmark, items)
        return resident.quick_benchmarks[items]

    def _sampling_bound(
        self, resident: _Resident, benchmark: Benchmark, split: str, evaluator: Evaluator, key: str
    ) -> Cost:
        """Return the most that scoring a checkpoint with an evaluator can cost; ``key`` names the items."""
        items = benchmark.items(split)
        if key not in resident.prompt_tokens:
            ids = resident.rows.prompt_ids([item.prompt for item in items])
            resident.prompt_tokens[key] = list(map(len, ids))
        chat = resident.rows.chat
        per_answer = chat.chat.max_turns if chat is not None and chat.uses_tool else 1  # the assistant's, tools between
        generated = scored = 0
        for item, prompt in zip(items, resident.prompt_tokens[key], strict=True):
            later = per_answer * (1 + len(item.follow_ups)) - 1
            generated += evaluator.samples * (later + 1) * benchmark.max_new_tokens
            # a prompt's first turns share one reading; every later turn of a conversation reads all that is before it
            scored += prompt * len(evaluator.seeds)
            if later and chat is not None:
                between = [len(chat.user_turn(text)) + 1 for text in item.follow_ups]
                per_turn = benchmark.max_new_tokens + max([chat.longest_tool_turn, *between])
                scored += evaluator.samples * (prompt * later + per_turn * later * (later + 1) // 2)
        return Cost(0, generated, scored, 2.0 * resident.model.parameters * (generated + scored))

    def begin(
        self, task: InnerTask, recipe: Recipe, start: Checkpoint, seed: int, limit: Limit | None = None
    ) -> TrlSession:
        """Start a round, parked before its first step; see `InnerTrainer.begin`.

        Raises:
            ValueError: the recipe cannot run on the task, a seed outside [0, 2**32), or a source of the mix of which
                no row keeps a completion token at ``max_length``.
        """
        spec = self._checked(task, recipe)
        require_integer("seed", seed, low=0, high=2**32 - 1)
        resident = self._load(task)
        device, precision = self._ready()
        from .context import RoundContext
        from .drawing import draw_rows
        from .metering import Meter
        from .row_pools import RowPools
        from .session import TrlSession

        if recipe.packing and "packing" in spec.reads:
            self._require_packing(resident)
        require_positions(resident.model.template.config, spec, recipe, resident.rows.lengths(spec, recipe))
        for split in SPLITS:  # before training, which an evaluation that is refused would waste
            config = resident.model.template.config
            require_conversation_positions(config, resident.rows.chat, task.built.benchmark, split)
        drawn = draw_rows(task, resident.rows, spec, recipe, seed)
        meter = Meter()
        tokens = spec.step_tokens(recipe, resident.rows.lengths(spec, recipe))
        bound = self._cost(resident, recipe, tokens)

        def later_bound(now: Recipe) -> Cost:
            later = spec.step_tokens(now, resident.rows.lengths(spec, now))
            return self._cost(resident, now, StepTokens(trained=later.trained) if spec.samples_first else later)

        def check_mix(now: Recipe) -> None:
            check_recipe(task, now)
            require_positions(resident.model.template.config, spec, now, resident.rows.lengths(spec, now))

        pools = RowPools(task, resident.rows, spec, recipe, drawn.tokenised, check_mix)
        module = importlib.import_module(f".{spec.module}", __package__)

        def build() -> Any:
            context = RoundContext(
                task=task,
                recipe=recipe,
                model=resident.model.with_weights(start.weights),
                reference=lambda: resident.model.with_weights(start.weights).eval(),
                teacher=lambda: self._teacher(task),
                tokenizer=resident.model.tokenizer,
                draw=drawn.draw,
                packs=drawn.packs,
                sources={name: task.built.sources[name] for name, weight in recipe.mix.items() if weight > 0},
                tokenised=drawn.tokenised,
                loss=spec.loss(recipe),
                steps=_affordable_steps(recipe, bound, limit),
                seed=seed,
                precision=precision,
                device=device,
                meter=meter,
                pools=pools,
                vllm=self._vllm,
                seconds=limit.amount if limit is not None and limit.unit == "device_seconds" else None,
                chat=resident.rows.chat,
            )
            return module.build_trainer(context)

        return TrlSession(
            build=build,
            meter=meter,
            recipe=recipe,
            start=start,
            seed=seed,
            round_id=round_id(task, start, recipe, seed, spec.ignored),
            flops=lambda meter: self._flops(resident, recipe, _metered_tokens(meter)),
            first_bound=bound,
            step_bound=later_bound,
            limit=limit,
            watch=FaultWatch(
                resident.model.template.config.get_text_config().vocab_size, spec.on_policy, self.fault_policy
            ),
            torch_threads=self._torch_threads,
            device=device,
            spec=spec,
            flags=drawn.flags,
            rows_without_supervision=drawn.unsupervised,
        )

    def evaluate(self, task: InnerTask, checkpoint: Checkpoint, split: str) -> tuple[Scorecard, Cost]:
        """Score a checkpoint on one split; the base weights' score is computed once per task.

        Raises:
            TimeLimitError: it took longer than the fault policy's ``max_evaluation_seconds``.
        """
        resident = self._load(task)
        if checkpoint.id == "base" and split in resident.base_scores:
            return resident.base_scores[split]
        config = resident.model.template.config
        require_conversation_positions(config, resident.rows.chat, task.built.benchmark, split)
        scorecard, cost = self._measured(resident, checkpoint.weights, task.built.benchmark, split, self.evaluator)
        if checkpoint.id == "base":
            resident.base_scores[split] = (scorecard, cost)
        return scorecard, cost

    def quick_score(self, task: InnerTask, session: TrainingSession, items: int) -> tuple[float, Cost]:
        """Score the weights a parked session has now on few validation items; see `QuickEvaluator`.

        Raises:
            ValueError: the session is not this trainer's, or not at a pause between two of its steps.
            TimeLimitError: it took longer than the fault policy's ``max_evaluation_seconds``.
        """
        from .session import TrlSession

        if not isinstance(session, TrlSession):
            raise ValueError(f"quick_score: expected a session of TrlTrainer, got {type(session).__name__}.")
        resident = self._load(task)
        benchmark = self._quick_benchmark(resident, items)
        scorecard, cost = self._measured(
            resident, session.weights_now(), benchmark, "validation", self.evaluator.quick()
        )
        return scorecard.score, cost

    def _measured(
        self, resident: _Resident, weights: Any, benchmark: Benchmark, split: str, evaluator: Evaluator
    ) -> tuple[Scorecard, Cost]:
        from .models import load_weights

        began = time.perf_counter()
        model, policy = resident.model.template, self.fault_policy
        load_weights(model, weights)

        def measured() -> tuple[Scorecard, int, int]:
            return evaluator.evaluate(
                model,
                resident.model.tokenizer,
                benchmark,
                split,
                resident.rows.chat,
                scoring_seconds=policy.max_scoring_seconds,
                grace_seconds=policy.grace_seconds,
            )

        try:
            scorecard, generated, scored = call_with_time_limit(
                measured, policy.max_evaluation_seconds, f"evaluation on {split}", policy.grace_seconds
            )
        except TimeLimitError as error:
            if not error.ended:  # its thread may wake and read the model, so the next round loads another
                self._forget(resident)
            raise
        return scorecard, Cost(
            generated_tokens=generated,
            scored_tokens=scored,
            flops=2.0 * resident.model.parameters * (generated + scored),
            device_seconds=time.perf_counter() - began,
        )

    def _ready(self) -> tuple[Any, str]:
        import torch

        from .models import quiet_libraries, require_vllm, resolve_device, resolve_precision, set_tf32

        if self._torch_threads is not None and torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        quiet_libraries()
        device = resolve_device(self._device_name)
        set_tf32(self._tf32, device)
        if self._vllm:
            require_vllm(device)
        return device, resolve_precision(self._precision_name, device)

    def _load(self, task: InnerTask) -> _Resident:
        key = task.built.content_hash
        if key not in self._residents:
            from ..sampling import end_token_ids
            from .rows import TaskRows

            self._require_template(task)
            model = self._model(Path(task.base_checkpoint()), task.built.checkpoint_hash)
            ends = end_token_ids(model.template, model.tokenizer)
            rows = TaskRows(task, model.tokenizer, ends, model.unusable_tokens)
            self._residents[key] = _Resident(task, model, rows)
            if len(self._residents) > RESIDENT_TASKS:
                self._residents.popitem(last=False)
        self._residents.move_to_end(key)
        return self._residents[key]

    def _model(self, folder: Path, content: str, role: str = "base checkpoint") -> LoadedModel:
        """Return the model of a folder whose files have the hash ``content``, loaded once."""
        key = str(folder)
        if key not in self._models or self._models[key][0] != content:
            device, _ = self._ready()
            import torch

            from .models import load_model, trainable_tensors
            from .random_state import caller_random_state_kept

            # building a module draws its initial weights before they are loaded
            with caller_random_state_kept(), trainable_tensors():
                self._models[key] = content, load_model(folder, device, torch.float32, role)
        return self._models[key][1]

    def _forget(self, resident: _Resident) -> None:
        """Let go of a model that someone else may still use, and of every task that has it."""
        self._models = {key: entry for key, entry in self._models.items() if entry[1] is not resident.model}
        for key in [key for key, other in self._residents.items() if other.model is resident.model]:
            del self._residents[key]

    def _teacher_model(self, task: InnerTask) -> LoadedModel:
        assert task.built.teacher is not None  # `check_recipe` refuses what needs one without
        return self._model(task.built.teacher, task.built.teacher_hash, "teacher checkpoint")

    def _teacher(self, task: InnerTask) -> Any:
        loaded = self._teacher_model(task)
        return loaded.with_weights(loaded.base_weights).eval().requires_grad_(False)

    def _checked(self, task: InnerTask, recipe: Recipe) -> AlgorithmSpec:
        """Return the recipe's algorithm, or refuse what cannot run."""
        spec = check_recipe(task, recipe)
        self._require_template(task)
        difference = self._vocabulary_difference(task) if spec.needs_teacher else ""
        if difference:
            raise ValueError(
                f"algorithm: {spec.name} needs a teacher with the vocabulary of the model, but {difference} "
                f"({task.built.teacher}); use a teacher of the same family or another algorithm."
            )
        chat = task.built.chat
        if self._vllm and spec.sampled and chat is not None and chat.max_turns > 1:
            raise ValueError(  # it corrects for the engine by the log-probabilities of tokens, and a tool's have none
                f"vllm: task {task.name!r} has a tool, and {spec.name} cannot weigh the tool's tokens by vLLM's "
                "log-probabilities; leave it False for this task."
            )
        return spec

    def _vocabulary_difference(self, task: InnerTask) -> str:
        """Return how the teacher's vocabulary differs from the model's; empty when it does not. No model is loaded."""
        from .vocabularies import vocabulary_difference

        assert task.built.teacher is not None  # `check_recipe` refuses what needs one without
        folders = Path(task.base_checkpoint()), task.built.teacher
        key = (*map(str, folders), task.built.checkpoint_hash, task.built.teacher_hash)
        if key not in self._differences:
            self._differences[key] = vocabulary_difference(*folders)
        return self._differences[key]

    def _require_packing(self, resident: _Resident) -> None:
        """Refuse packing for a model whose attention would let packed rows see each other."""
        from .models import load_weights
        from .packing import rows_stay_apart

        model = resident.model
        if resident.packs is None:
            load_weights(model.template, model.base_weights)  # those evaluated last may be ruined
            resident.packs = rows_stay_apart(model.template)
        if not resident.packs:
            config = model.template.config
            raise ValueError(
                f"packing: in a {config.model_type} model with attention {config._attn_implementation!r} packed rows "
                "would see each other; set packing to false."
            )

    def _require_template(self, task: InnerTask) -> None:
        """Refuse a task of conversations whose tokenizer has no chat template, before its model is loaded."""
        chat, key = task.built.chat, task.built.content_hash
        if chat is None or key in self._written:
            return
        from ..chat import require_template
        from .models import load_tokenizer

        folder = Path(task.base_checkpoint())
        require_template(load_tokenizer(folder), chat, str(folder))
        self._written.add(key)

    def _cost(self, resident: _Resident, recipe: Recipe, tokens: StepTokens) -> Cost:
        scored = tokens.scored + tokens.teacher
        return Cost(tokens.trained, tokens.generated, scored, self._flops(resident, recipe, tokens))

    def _flops(self, resident: _Resident, recipe: Recipe, tokens: StepTokens) -> float:
        total = resident.model.parameters
        if recipe.lora_rank == 0:
            per_trained_token = 6.0 * total
        else:
            adapter = lora_parameters(resident.model.template, recipe.lora_rank)
            per_trained_token = 4.0 * total + 6.0 * adapter
        flops = per_trained_token * tokens.trained + 2.0 * total * (tokens.generated + tokens.scored)
        if tokens.teacher:
            flops += 2.0 * self._teacher_model(resident.task).parameters * tokens.teacher
        return flops


def _metered_tokens(meter: Meter) -> StepTokens:
    """Return what was counted, with the teacher's tokens apart."""
    own = meter.scored_tokens - meter.teacher_tokens
    return StepTokens(meter.trained_tokens, meter.generated_tokens, own, meter.teacher_tokens)


def _affordable_steps(recipe: Recipe, bound: Cost, limit: Limit | None) -> int:
    """Return how many steps a limit pays for when each costs the most it can; all when it is counted in seconds."""
    if limit is None or bound.in_unit(limit.unit) <= 0:
        return recipe.steps
    return min(recipe.steps, int(limit.amount // bound.in_unit(limit.unit)))


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
