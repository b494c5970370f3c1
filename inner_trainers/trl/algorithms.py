"""What each inner algorithm needs and reads, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..messages import did_you_mean

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
class Lengths:
    """The longest sequences of a round's sources, in tokens.

    Attributes:
        prompt: longest prompt; 0 for algorithms that train on whole rows.
        completion: longest completion that is sampled; in a conversation, longest assistant turn.
        row: longest training row at the recipe's ``max_length``; for preferences the longer side.
        turns: most assistant turns of a sampled conversation.
        tool_turn: most tokens between two of them.
    """

    prompt: int
    completion: int
    row: int
    turns: int = 1
    tool_turn: int = 0

    @property
    def generated(self) -> int:
        """Most tokens that are sampled in one conversation."""
        return self.turns * self.completion

    @property
    def whole(self) -> int:
        """Length of the longest prompt with everything after it."""
        return self.prompt + self.generated + (self.turns - 1) * self.tool_turn

    @property
    def read(self) -> int:
        """Most tokens that are read before the turns of one conversation: each turn reads all that is before it."""
        before = self.turns * (self.turns - 1) // 2
        return self.turns * self.prompt + before * (self.completion + self.tool_turn)


@dataclass(frozen=True)
class StepTokens:
    """The most tokens of one optimiser step: trained, sampled, scored by the model itself, scored by a teacher."""

    trained: int = 0
    generated: int = 0
    scored: int = 0
    teacher: int = 0


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


def _sequences(recipe: Recipe) -> int:
    return recipe.batch_size * recipe.gradient_accumulation


def _whole_rows(recipe: Recipe, lengths: Lengths) -> StepTokens:
    row = recipe.max_length if recipe.packing else lengths.row
    return StepTokens(trained=_sequences(recipe) * row)


def _pairs(recipe: Recipe, lengths: Lengths) -> StepTokens:
    both_sides = 2 * _sequences(recipe) * lengths.row
    return StepTokens(trained=both_sides, scored=both_sides)


def _unpaired(recipe: Recipe, lengths: Lengths) -> StepTokens:
    tokens = _sequences(recipe) * lengths.row
    # the reference reads each row and its mismatched partner, the policy the partner without training on it
    return StepTokens(trained=tokens, scored=3 * tokens)


def _policy_gradient(recipe: Recipe, lengths: Lengths) -> StepTokens:
    sequences, whole = _sequences(recipe), lengths.whole
    scored = lengths.read + (whole if recipe.kl_coef else 0) + (whole if recipe.num_iterations > 1 else 0)
    # completions are sampled once for `num_iterations` steps: the first of them costs the most
    return StepTokens(sequences * whole, sequences * lengths.generated, sequences * scored)


def _leave_one_out(recipe: Recipe, lengths: Lengths) -> StepTokens:
    sequences, whole = _sequences(recipe), lengths.whole
    # the policy's own log-probabilities are always read before the first update
    scored = lengths.read + whole + (whole if recipe.kl_coef else 0)
    return StepTokens(sequences * whole, sequences * lengths.generated, sequences * scored)


def _actor_critic(recipe: Recipe, lengths: Lengths) -> StepTokens:
    sequences, whole = _sequences(recipe), lengths.whole
    models = 2 if recipe.critic == "model" else 1
    # old log-probabilities and the values of a head come out of one pass
    policy_read = recipe.critic == "head" or recipe.kl_coef > 0 or recipe.num_iterations > 1
    passes = policy_read + (recipe.kl_coef > 0) + (recipe.critic == "model")
    return StepTokens(
        trained=models * sequences * whole,
        generated=sequences * lengths.generated,
        scored=sequences * (lengths.read + passes * whole),
    )


def _rejection_sampling(recipe: Recipe, lengths: Lengths) -> StepTokens:
    sequences = _sequences(recipe)
    return StepTokens(
        trained=sequences * (lengths.whole + 1),  # a completion that was cut is trained on with an end token
        generated=sequences * lengths.generated,
        scored=sequences * lengths.read,
    )


def _taught(recipe: Recipe, lengths: Lengths) -> StepTokens:
    sequences, whole = _sequences(recipe), lengths.whole
    return StepTokens(
        trained=sequences * whole,
        generated=sequences * lengths.generated,
        scored=sequences * lengths.read,
        teacher=sequences * whole,
    )


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
                step_tokens=_taught,
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
                step_tokens=_pairs,
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
                step_tokens=_policy_gradient,
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
                step_tokens=_unpaired,
            ),
            AlgorithmSpec(
                "midtrain",
                summary="mid-training on raw text, with the task's earlier stages replayed",
                rows="text",
                module="midtrain",
                reads=("max_length", "packing", "replay_share"),
                step_tokens=_whole_rows,
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
                step_tokens=_actor_critic,
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
                step_tokens=_rejection_sampling,
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
                step_tokens=_leave_one_out,
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
                step_tokens=_whole_rows,
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
            f"loss: {spec.name} has none called {recipe.loss!r}.{did_you_mean(recipe.loss, ('default', *spec.losses))}"
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
