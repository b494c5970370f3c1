"""What each inner algorithm needs and reads, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..messages import did_you_mean
from . import step_tokens
from .step_tokens import Lengths, StepTokens

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..tasks.base import InnerTask

OPTIONAL_FIELDS = (
    "beta",
    "clip_range",
    "clip_range_vf",
    "critic",
    "entropy_coef",
    "gae_lambda",
    "gamma",
    "kl_coef",
    "loss",
    "max_length",
    "min_reward",
    "num_generations",
    "num_iterations",
    "packing",
    "replay_share",
    "temperature",
    "vf_coef",
)
"""Recipe fields that only some algorithms read."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """One inner algorithm.

    Attributes:
        name: what recipes call it.
        summary: one line for tables.
        rows: the kind of source rows it trains on.
        module: module of this package with ``build_trainer(context)``.
        reads: the `OPTIONAL_FIELDS` that it reads.
        step_tokens: the most tokens of one optimiser step.
        losses: variants of its loss, the default first.
        sampled: whether it samples completions of prompts, as long as the benchmark's, and trains on them.
        on_policy: whether its loss is a policy gradient, whose size says nothing of health.
        grouped: whether it compares ``num_generations`` completions of one prompt with each other.
        needs_teacher: whether the task must have a teacher.
        adapters: whether it can train LoRA adapters.
        chats: whether what it samples may be a turn of a conversation, written with the task's chat template.
        tools: whether conversations that it samples may go on after a tool's answer, whose tokens carry no gradient.
        samples_first: whether all of its sampling comes before its first optimiser step.
    """

    name: str
    summary: str
    rows: str
    module: str
    reads: tuple[str, ...]
    step_tokens: Callable[[Recipe, Lengths], StepTokens]
    losses: tuple[str, ...] = ("default",)
    sampled: bool = False
    on_policy: bool = False
    grouped: bool = False
    needs_teacher: bool = False
    adapters: bool = True
    chats: bool = False
    tools: bool = False
    samples_first: bool = False

    @property
    def ignored(self) -> tuple[str, ...]:
        """Recipe fields that change nothing about its rounds."""
        return tuple(name for name in OPTIONAL_FIELDS if name not in self.reads)

    def loss(self, recipe: Recipe) -> str:
        """Return the loss variant that the recipe asks for."""
        return self.losses[0] if recipe.loss == "default" else recipe.loss

    def rows_per_step(self, recipe: Recipe) -> int:
        """Return how many source rows (for sampling algorithms: prompts) one optimiser step uses."""
        sequences = recipe.batch_size * recipe.gradient_accumulation
        return sequences // recipe.num_generations if self.grouped else sequences

    def rows_per_round(self, recipe: Recipe) -> int:
        """Return how many source rows a whole round uses; completions may be reused for ``num_iterations`` steps."""
        batches = recipe.steps
        if "num_iterations" in self.reads:
            batches = -(-recipe.steps // recipe.num_iterations)
        return batches * self.rows_per_step(recipe)


ALGORITHMS = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            AlgorithmSpec(
                "distill",
                summary="on-policy distillation from the task's teacher",
                rows="prompts",
                module="distill",
                reads=("loss", "temperature"),
                step_tokens=step_tokens.taught,
                losses=("reverse_kl", "forward_kl", "jsd"),
                sampled=True,
                needs_teacher=True,
                chats=True,
            ),
            AlgorithmSpec(
                "dpo",
                summary="direct preference optimisation",
                rows="preferences",
                module="dpo",
                reads=("beta", "loss", "max_length"),
                step_tokens=step_tokens.pairs,
                losses=("sigmoid", "sigmoid+sft", "ipo"),
            ),
            AlgorithmSpec(
                "grpo",
                summary="group-relative policy optimisation",
                rows="prompts",
                module="grpo",
                reads=(
                    "clip_range",
                    "entropy_coef",
                    "kl_coef",
                    "loss",
                    "num_generations",
                    "num_iterations",
                    "temperature",
                ),
                step_tokens=step_tokens.policy_gradient,
                losses=("dapo", "dr_grpo", "grpo", "bnpo"),
                sampled=True,
                on_policy=True,
                grouped=True,
                chats=True,
                tools=True,
            ),
            AlgorithmSpec(
                "kto",
                summary="Kahneman-Tversky optimisation on single answers marked good or bad",
                rows="preferences",
                module="kto",
                reads=("beta", "max_length"),
                step_tokens=step_tokens.unpaired,
            ),
            AlgorithmSpec(
                "midtrain",
                summary="mid-training on raw text, with the task's earlier stages replayed",
                rows="text",
                module="midtrain",
                reads=("max_length", "packing", "replay_share"),
                step_tokens=step_tokens.whole_rows,
            ),
            AlgorithmSpec(
                "ppo",
                summary="proximal policy optimisation with a critic",
                rows="prompts",
                module="ppo",
                reads=(
                    "clip_range",
                    "clip_range_vf",
                    "critic",
                    "entropy_coef",
                    "gae_lambda",
                    "gamma",
                    "kl_coef",
                    "num_iterations",
                    "temperature",
                    "vf_coef",
                ),
                step_tokens=step_tokens.actor_critic,
                sampled=True,
                on_policy=True,
                chats=True,
                tools=True,
            ),
            AlgorithmSpec(
                "rft",
                summary="rejection-sampling fine-tuning: sample, verify, deduplicate, train on what passes",
                rows="prompts",
                module="rft",
                reads=("min_reward", "num_generations", "temperature"),
                step_tokens=step_tokens.rejection_sampling,
                sampled=True,
                grouped=True,
                chats=True,
                samples_first=True,
            ),
            AlgorithmSpec(
                "rloo",
                summary="REINFORCE with a leave-one-out baseline",
                rows="prompts",
                module="rloo",
                reads=("clip_range", "kl_coef", "num_generations", "num_iterations", "temperature"),
                step_tokens=step_tokens.leave_one_out,
                sampled=True,
                on_policy=True,
                grouped=True,
                chats=True,
            ),
            AlgorithmSpec(
                "sft",
                summary="supervised fine-tuning on completions",
                rows="demonstrations",
                module="sft",
                reads=("loss", "max_length", "packing"),
                step_tokens=step_tokens.whole_rows,
                losses=("nll", "dft"),
            ),
        )
    }
)
"""Inner algorithms by name; to add one, write its module and list it here."""


def usable_sources(task: InnerTask, spec: AlgorithmSpec) -> tuple[str, ...]:
    """Return the names of the sources that ``spec`` can train on, sorted: none without a teacher or a mask it needs."""
    if (spec.needs_teacher and task.built.teacher is None) or not _can_hold_conversations(task, spec):
        return ()
    return tuple(name for name, source in task.built.sources.items() if spec.rows in source.rows)


def check_recipe(task: InnerTask, recipe: Recipe) -> AlgorithmSpec:
    """Return the recipe's algorithm, or refuse what cannot run on the task.

    Raises:
        ValueError: an unknown algorithm, loss or source, a source without the rows the algorithm trains on, a missing
            teacher, or a batch that does not divide into groups.
    """
    spec = ALGORITHMS.get(recipe.algorithm)
    if spec is None:
        raise ValueError(f"algorithm: unknown {recipe.algorithm!r}.{did_you_mean(recipe.algorithm, ALGORITHMS)}")
    if recipe.loss not in ("default", *spec.losses):
        raise ValueError(
            f"loss: {spec.name} has none called {recipe.loss!r}.{did_you_mean(recipe.loss, {'default', *spec.losses})}"
        )
    if spec.needs_teacher and task.built.teacher is None:
        raise ValueError(
            f"algorithm: {spec.name} needs a teacher, and task {task.name!r} has none; "
            "`InnerTask.teacher_checkpoint` returns its folder."
        )
    _check_conversations(task, spec)
    sources = task.built.sources
    fitting = [name for name, source in sources.items() if spec.rows in source.rows]
    for name, weight in recipe.mix.items():
        if name not in sources:
            raise ValueError(f"mix: task {task.name!r} has no source {name!r}.{did_you_mean(name, sources)}")
        if weight > 0 and name not in fitting:
            raise ValueError(
                f"mix: source {name!r} has no {spec.rows} rows, which {spec.name} trains on; "
                f"sources that have: {', '.join(fitting) or 'none'}."
            )
    if spec.grouped:
        _check_groups(recipe)
    if spec.name == "kto" and recipe.batch_size < 2:
        raise ValueError(
            f"batch_size: kto estimates a KL divergence from mismatched rows of a batch, so it needs at least 2, "
            f"got {recipe.batch_size}."
        )
    if spec.name == "midtrain" and recipe.replay_share > 0 and not replayed_sources(task):
        raise ValueError(f"replay_share: task {task.name!r} has no demonstrations to replay; set it to 0.")
    if recipe.lora_rank and not spec.adapters:
        raise ValueError(f"lora_rank: {spec.name} trains full weights only; set it to 0.")
    return spec


def _can_hold_conversations(task: InnerTask, spec: AlgorithmSpec) -> bool:
    chat = task.built.chat
    return not spec.sampled or chat is None or (spec.chats and (spec.tools or chat.max_turns == 1))


def _check_conversations(task: InnerTask, spec: AlgorithmSpec) -> None:
    if _can_hold_conversations(task, spec):
        return
    able = [name for name, other in ALGORITHMS.items() if other.sampled and _can_hold_conversations(task, other)]
    if task.built.chat is not None and task.built.chat.max_turns > 1:
        reason = f"has a tool, and {spec.name} cannot keep the tool's turns out of its loss"
    else:
        reason = f"writes prompts as turns, and {spec.name} samples plain text only"
    raise ValueError(
        f"algorithm: task {task.name!r} {reason}; algorithms that sample and can: {', '.join(able)}; "
        "those that train on rows are not concerned."
    )


def replayed_sources(task: InnerTask) -> tuple[str, ...]:
    """Return the sources whose demonstrations mid-training can replay, sorted."""
    return tuple(name for name, source in task.built.sources.items() if "demonstrations" in source.rows)


def _check_groups(recipe: Recipe) -> None:
    if recipe.num_generations < 2:
        raise ValueError(
            f"num_generations: {recipe.algorithm} compares completions of one prompt, so it needs at least 2, "
            f"got {recipe.num_generations}."
        )
    sequences = recipe.batch_size * recipe.gradient_accumulation
    if sequences % recipe.num_generations:
        allowed = [n for n in range(2, sequences + 1) if sequences % n == 0]
        raise ValueError(
            f"num_generations: {recipe.num_generations} does not divide the {sequences} completions of a step "
            f"(batch_size {recipe.batch_size} x gradient_accumulation {recipe.gradient_accumulation}); "
            f"allowed: {', '.join(map(str, allowed)) or 'none, raise batch_size to at least 2'}."
        )
