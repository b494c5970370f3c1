"""What is to be improved: `InnerTask` with its `Source`s and its `Benchmark`, and `TaskFamily`, which draws tasks."""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..messages import did_you_mean, require_integer, require_number, where_raised
from ..printed import prints_aside
from .contamination import ContaminatedItem, separate
from .rows import ROW_COLUMNS, canonical, check_columns, has_turns
from .rows import Row as Row

if TYPE_CHECKING:
    from ..base import InnerTrainer

Verifier = Callable[[Row, str], float]

SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Source:
    """One named pool of training rows; it may hold rows of more than one kind.

    Attributes:
        name: what recipes call it in their mix.
        rows: kind (a key of `ROW_COLUMNS`) -> rows.
        verifier: ``verifier(row, completion) -> reward`` for ``prompts`` rows; the completion is text without its end
            token, in a conversation the assistant's last turn.
        verifier_version: names the verifier's behaviour in the task's content hash, which sees rows and no code; change
            it when the verifier changes, or finished rounds are taken for equal.
    """

    name: str
    rows: Mapping[str, Sequence[Row]]
    verifier: Verifier | None = None
    verifier_version: str = ""

    def __post_init__(self) -> None:
        """Check kinds and columns.

        Raises:
            ValueError: an unknown kind, an empty kind, a row without its columns or with a turn that is not well
                formed (both numbered from 1), or prompts without a verifier.
        """
        for kind, rows in self.rows.items():
            if kind not in ROW_COLUMNS:
                raise ValueError(f"source {self.name!r}: unknown kind {kind!r}.{did_you_mean(kind, ROW_COLUMNS)}")
            if len(rows) == 0:
                raise ValueError(f"source {self.name!r}: no {kind} rows; leave the kind out instead.")
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, Mapping):
                    raise ValueError(
                        f"source {self.name!r}, {kind} row {number}: expected columns with values, got {row!r}."
                    )
                check_columns(f"source {self.name!r}, {kind} row {number}", kind, row)
        if "prompts" in self.rows and self.verifier is None:
            raise ValueError(f"source {self.name!r}: prompts rows need a verifier.")


@dataclass(frozen=True)
class Item:
    """One benchmark question.

    Attributes:
        prompt: the text given to the model.
        dimension: the benchmark dimension it belongs to.
        data: whatever the benchmark's scorer needs (the right answer, the asked format).
        follow_ups: what the user says next, turn by turn, whatever the assistant answered; for tasks with a chat.
    """

    prompt: str
    dimension: str
    data: Mapping[str, Any] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()


def always_well_formed(item: Item, completion: str) -> bool:
    """Return True: the format check of a benchmark that has none."""
    return True


@dataclass(frozen=True)
class Benchmark:
    """Weighted dimensions a checkpoint is scored on, with disjoint validation and test items.

    Attributes:
        weights: dimension -> weight; weights are > 0 and sum to 1.
        validation: items that drive the reward.
        test: items that only reports use.
        score: ``score(item, completion) -> float in [0, 1]``; of a conversation it is given the assistant's last turn.
        well_formed: whether a completion has the asked form, right or wrong.
        max_new_tokens: longest completion, in tokens; in a conversation, of each assistant turn.
        scorer_version: names the behaviour of ``score``, ``well_formed`` and ``score_turns`` in the task's content
            hash, which sees items and no code; change it when they change, or finished rounds are taken for equal.
        score_turns: ``score_turns(item, turns) -> float in [0, 1]`` over all of the assistant's turns, for items with
            ``follow_ups``; None gives ``score`` the last turn of them.
    """

    weights: Mapping[str, float]
    validation: Sequence[Item]
    test: Sequence[Item]
    score: Callable[[Item, str], float]
    well_formed: Callable[[Item, str], bool] = always_well_formed
    max_new_tokens: int = 16
    scorer_version: str = ""
    score_turns: Callable[[Item, Sequence[str]], float] | None = None

    def __post_init__(self) -> None:
        """Check weights, dimensions and split isolation.

        Raises:
            ValueError: weights that do not sum to 1, a dimension without items, an item in both splits, or
                ``max_new_tokens`` below 1.
        """
        require_integer("benchmark.max_new_tokens", self.max_new_tokens, low=1, high=1_048_576)
        for name, weight in self.weights.items():
            require_number(f"benchmark.weights.{name}", weight, low=0, high=1, low_open=True)
        if abs(math.fsum(self.weights.values()) - 1) > 1e-6:
            raise ValueError(f"benchmark: weights must sum to 1, got {dict(self.weights)}.")
        for split in SPLITS:
            for item in self.items(split):
                if not isinstance(item, Item):
                    raise ValueError(f"benchmark: {split} items must be Item objects, got {item!r}.")
            found = {item.dimension for item in self.items(split)}
            if found != set(self.weights):
                raise ValueError(
                    f"benchmark: the {split} split has items for {sorted(found)}, "
                    f"the weights name {sorted(self.weights)}."
                )
        shared = {item.prompt for item in self.validation} & {item.prompt for item in self.test}
        if shared:
            raise ValueError(
                f"benchmark: {len(shared)} prompts stand in both splits, for example {sorted(shared)[0]!r}."
            )

    @cached_property
    def content_hash(self) -> str:
        """16 hex digits over items, their order, weights, ``max_new_tokens`` and ``scorer_version``.

        Raises:
            ValueError: an item holds an object that shows as a memory address.
        """
        return hashlib.sha256(b"".join(self.digested())).hexdigest()[:16]

    def digested(self) -> Iterator[bytes]:
        """Yield what is hashed of the benchmark, piece by piece."""
        for split in SPLITS:
            for item in self.items(split):
                told = [split, item.prompt, item.dimension, dict(item.data)]
                yield canonical([*told, list(item.follow_ups)] if item.follow_ups else told)
        yield canonical([dict(self.weights), self.max_new_tokens])
        if self.scorer_version:
            yield canonical(["scorer", self.scorer_version])

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Dimension names in their fixed (sorted) order."""
        return tuple(sorted(self.weights))

    def items(self, split: str) -> Sequence[Item]:
        """Return the items of ``"validation"`` or ``"test"``.

        Raises:
            ValueError: another split.
        """
        if split not in SPLITS:
            raise ValueError(f"benchmark: no split is called {split!r}.{did_you_mean(split, SPLITS)}")
        return self.validation if split == "validation" else self.test


@dataclass(frozen=True)
class Chat:
    """How a task's prompts and rows become the turns of a conversation.

    A text prompt is one user turn; a demonstrations row may have ``messages`` in place of prompt and completion.

    Attributes:
        template: Jinja chat template; None for the one saved with the tokenizer.
        system: text of a system turn before every prompt that brings none; None for no such turn.
        tool: ``tool(assistant_text) -> text of the tool's turn``, or None when the text calls no tool.
        tool_version: names the tool's behaviour in the task's content hash, which sees no code.
        max_turns: assistant turns of one sampled conversation, in [1, 64]; without a tool there is one.
        max_tool_tokens: the longest text of a tool's turn, in tokens, in [1, 65536]; what is longer is cut at its end.
    """

    template: str | None = None
    system: str | None = None
    tool: Callable[[str], str | None] | None = None
    tool_version: str = ""
    max_turns: int = 1
    max_tool_tokens: int = 64

    def __post_init__(self) -> None:
        """Check the number of turns and the length of a tool's.

        Raises:
            ValueError: a number outside its range, or several turns without a tool that could lead to them.
        """
        require_integer("chat.max_turns", self.max_turns, low=1, high=64)
        require_integer("chat.max_tool_tokens", self.max_tool_tokens, low=1, high=65_536)
        if self.max_turns > 1 and self.tool is None:
            raise ValueError(f"chat.max_turns: {self.max_turns} turns need a tool that answers in between.")


class InnerTask(ABC):
    """One thing to improve: a base model, data sources and a benchmark. Subclass it and pass the object.

    `base_checkpoint`, `sources` and `benchmark` are called once and kept; they must be deterministic.
    """

    name: str = "custom"

    @abstractmethod
    def base_checkpoint(self) -> Path:
        """Return a folder with `config.json`, `model.safetensors` and a tokenizer, as `save_pretrained` writes it.

        A task whose own `trainer` has its base weights from elsewhere returns a folder that is not there, as
        `loop.LoopTask` does.
        """

    @abstractmethod
    def sources(self) -> Sequence[Source]:
        """Return the data sources, each name once."""

    @abstractmethod
    def benchmark(self) -> Benchmark:
        """Return the benchmark."""

    def teacher_checkpoint(self) -> Path | None:
        """Return the folder of a stronger model with the same vocabulary to distil from; None when there is none."""
        return None

    def chat(self) -> Chat | None:
        """Return how prompts become turns of a conversation; None when prompts are plain text to continue."""
        return None

    def trainer(self) -> InnerTrainer | None:
        """Return the task's own inner trainer, or None for the TRL trainer."""
        return None

    def recipe_defaults(self) -> Mapping[str, Any]:
        """Return recipe fields that recipe files of this task, and its default decision space, leave out."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return what may be shown of the task: name and free descriptors. Hidden qualities do not belong here."""
        return {"name": self.name}

    @cached_property
    def built(self) -> BuiltTask:
        """The task's sources and benchmark, built once and checked, with its content hash.

        What building prints goes to standard error.

        Raises:
            ValueError: a source named twice, or no sources.
        """
        with prints_aside():
            return BuiltTask.build(self)


def _asked(task: InnerTask, part: str, expected: Any) -> Any:
    """Return what a task's method returns; an error in it names the task, the method and the line."""
    try:
        value = getattr(task, part)()
    except ValueError:
        raise  # ours already say what is wrong, and a person's own say what they mean
    except (Exception, SystemExit) as error:
        raise ValueError(f"task {task.name!r}: {part}() raised {where_raised(error)}.") from error
    if not isinstance(value, expected):
        raise ValueError(
            f"task {task.name!r}: {part}() returned {value!r}, see `InnerTask.{part}` for what it must be."
        )
    return value


@dataclass(frozen=True)
class BuiltTask:
    """A task's parts after checking: what rows and benchmark have in common is taken out, see `contamination.separate`.

    Attributes:
        sources: name -> source, in sorted order.
        benchmark: the benchmark.
        leaked: source name -> number of rows removed because they ask a benchmark prompt.
        content_hash: 16 hex digits over base weights, every row and every item; an edited row changes it.
        checkpoint_hash: 16 hex digits over the files of the base checkpoint alone.
        teacher: folder of the teacher; None when there is none.
        teacher_hash: 16 hex digits over the files of the teacher; empty when there is none.
        chat: how prompts become turns; None for plain text.
        contaminated: items removed from the benchmark because a run of their words stands in training rows.
    """

    sources: Mapping[str, Source]
    benchmark: Benchmark
    leaked: Mapping[str, int]
    content_hash: str
    checkpoint_hash: str
    teacher: Path | None = None
    teacher_hash: str = ""
    chat: Chat | None = None
    contaminated: tuple[ContaminatedItem, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """Sentences about what was taken out; usually none."""
        flags = []
        if self.leaked:
            counts = ", ".join(f"{name} {count}" for name, count in self.leaked.items())
            flags.append(f"rows were taken out because they ask a benchmark prompt: {counts}")
        if self.contaminated:
            first = self.contaminated[0]
            flags.append(
                f"{len(self.contaminated)} benchmark items are not scored because a run of their words stands in "
                f"training rows; the first, of {first.split}: {first.prompt!r}, in source {first.source!r}, "
                f"{first.kind} row {first.row}: {first.shared!r}"
            )
        return tuple(flags)

    @classmethod
    def build(cls, task: InnerTask) -> BuiltTask:
        """Build and check the parts of ``task``."""
        benchmark = _asked(task, "benchmark", Benchmark)
        digest = hashlib.sha256()
        offered = list(_asked(task, "sources", Iterable))
        for source in offered:
            if not isinstance(source, Source):
                raise ValueError(f"task {task.name!r}: sources() must return Source objects, got {source!r}.")
        offered.sort(key=lambda source: source.name)
        for source, following in itertools.pairwise(offered):
            if source.name == following.name:
                raise ValueError(f"task {task.name!r}: two sources are called {source.name!r}.")
        separated = separate(task.name, offered, benchmark)
        benchmark = separated.benchmark
        sources = {source.name: source for source in separated.sources}
        for source in sources.values():
            plain = {k: list(map(dict, r)) for k, r in source.rows.items()}
            digest.update(canonical([source.name, source.verifier_version, plain]))
        if not sources:
            raise ValueError(f"task {task.name!r}: it has no sources.")
        for piece in benchmark.digested():
            digest.update(piece)
        checkpoint = _digests_of_files(Path(_asked(task, "base_checkpoint", (str, Path))))
        digest.update(checkpoint)
        teacher = _asked(task, "teacher_checkpoint", (str, Path, type(None)))
        teacher_hash = ""
        if teacher is not None:
            files = _digests_of_files(Path(teacher))
            digest.update(canonical(["teacher"]) + files)
            teacher_hash = hashlib.sha256(files).hexdigest()[:16]
        chat = _asked(task, "chat", (Chat, type(None)))
        if chat is not None:
            written = [chat.template, chat.system, chat.tool_version, chat.max_turns, chat.max_tool_tokens]
            digest.update(canonical(["chat", *written]))
        else:
            _refuse_turns(task.name, sources)
            _refuse_follow_ups(task.name, benchmark)
        return cls(
            sources=sources,
            benchmark=benchmark,
            leaked=separated.leaked,
            contaminated=separated.contaminated,
            content_hash=digest.hexdigest()[:16],
            checkpoint_hash=hashlib.sha256(checkpoint).hexdigest()[:16],
            teacher=None if teacher is None else Path(teacher),
            teacher_hash=teacher_hash,
            chat=chat,
        )


def _digests_of_files(folder: Path) -> bytes:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    # downloads keep folders of their own beside the weights
    return b"".join(f.name.encode() + hashlib.sha256(f.read_bytes()).digest() for f in files if f.is_file())


def _refuse_follow_ups(task: str, benchmark: Benchmark) -> None:
    """Refuse items of several turns in a task that does not say how turns are written."""
    for split in SPLITS:
        for item in benchmark.items(split):
            if item.follow_ups:
                raise ValueError(
                    f"task {task!r}: {split} item {item.prompt!r} has follow_ups, so the task must say how turns are "
                    "written; return Chat() from `chat()` for the template saved with the tokenizer."
                )


def _refuse_turns(task: str, sources: Mapping[str, Source]) -> None:
    """Refuse rows that hold turns in a task that does not say how turns are written."""
    for name, source in sources.items():
        for kind, rows in source.rows.items():
            for number, row in enumerate(rows, start=1):
                if has_turns(kind, row):
                    raise ValueError(
                        f"task {task!r}: source {name!r}, {kind} row {number} holds turns, so the task must say how "
                        "they are written; return Chat() from `chat()` for the template saved with the tokenizer."
                    )


class TaskFamily(ABC):
    """A distribution of inner tasks that share source names and benchmark dimensions.

    Attributes:
        name: what the command line calls it.
        train_seeds: instance seeds for meta-training.
        test_seeds: instance seeds for meta-testing, disjoint from ``train_seeds``.
    """

    name: str
    train_seeds: range
    test_seeds: range

    @abstractmethod
    def instance(self, seed: int) -> InnerTask:
        """Return the task drawn from ``seed``; the same seed gives an equal task in any process."""


class SingleTask(TaskFamily):
    """A family of exactly one task, which is how a custom `InnerTask` object is used."""

    train_seeds = range(1)
    test_seeds = range(1)

    def __init__(self, task: InnerTask) -> None:
        self.task = task
        self.name = task.name

    def instance(self, seed: int) -> InnerTask:
        """Return the one task, whatever the seed."""
        return self.task
