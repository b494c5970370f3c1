"""Checks a task against its language model: does it load, can it read the prompts, do right answers fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .messages import first_line
from .task_findings import Findings, counted, quoted
from .tasks.base import SPLITS, InnerTask
from .tasks.rows import Row
from .tokens import text_ids

if TYPE_CHECKING:
    from .base import InnerTrainer
    from .chat import ChatFormat

_MOST_TEXTS = 2_000


def check_model(
    findings: Findings, task: InnerTask, trainer: InnerTrainer, right: Mapping[str, Sequence[tuple[str, str]]]
) -> None:
    """Load the base model and look for what it cannot read, say or hold.

    Args:
        findings: what is found is added here.
        task: a task that can be built.
        trainer: the TRL trainer.
        right: scorer -> (prompt, text) that it gives full marks, see `fresh_process.Examined`.
    """
    import torch

    from .chat import ChatFormat
    from .sampling import end_token_ids
    from .trl.models import load_model, quiet_libraries

    quiet_libraries()
    folder = Path(task.base_checkpoint())
    try:
        model = load_model(folder, torch.device("cpu"), torch.float32)
    except ValueError as error:
        findings.error("model", "base_checkpoint()", str(error))
        return
    tokenizer, config = model.tokenizer, model.template.config
    chat: ChatFormat | None = None
    if task.built.chat is not None:
        try:
            chat = ChatFormat(tokenizer, task.built.chat, str(folder), end_token_ids(model.template, tokenizer))
        except ValueError as error:
            findings.error("template", "chat()", str(error))
            return
    if chat is None and getattr(tokenizer, "chat_template", None):
        findings.note(
            "template",
            "chat()",
            f"the tokenizer of {folder.name} has a chat template, but the task has plain text, which is no turn of a "
            "conversation.",
            "Return Chat() from chat(), or write `chat: {}` in a task file, unless the model is to continue text.",
        )
    _check_lengths(findings, task, tokenizer, config, chat, right)
    _check_vocabulary(findings, task, tokenizer, right)
    if task.built.teacher is not None:
        try:
            algorithms = [name for name in trainer.algorithms if not trainer.usable_sources(task, name)]
            if "distill" in algorithms:
                findings.warning(
                    "model",
                    "teacher_checkpoint()",
                    "no algorithm can learn from the teacher: its vocabulary is another, or there are no prompts.",
                    "Use a teacher of the same family.",
                )
        except (ValueError, OSError) as error:
            findings.error("model", "teacher_checkpoint()", str(error))


def _check_lengths(
    findings: Findings,
    task: InnerTask,
    tokenizer: Any,
    config: Any,
    chat: ChatFormat | None,
    right: Mapping[str, Sequence[tuple[str, str]]],
) -> None:
    benchmark = task.built.benchmark
    limit = benchmark.max_new_tokens
    scored = {prompt for split in SPLITS for prompt in (item.prompt for item in benchmark.items(split))}
    pairs = {pair for name, found in right.items() if name.startswith("benchmark.") for pair in found}
    answers = sorted(pair for pair in pairs if pair[0] in scored)
    lengths = [len(ids) + 1 for ids in _ids(tokenizer, [text for _, text in answers])]
    long = [(count, pair) for count, pair in zip(lengths, answers, strict=True) if count > limit]
    if long:
        count, (prompt, text) = max(long)
        findings.error(
            "length",
            "benchmark.max_new_tokens",
            f"it is {limit}, but {len(long)} of {len(answers)} right answers need more tokens with their end token, up "
            f"to {count}: {quoted(text)} for prompt {quoted(prompt)}.",
            f"Set it to at least {count}.",
        )
    for name, source in task.built.sources.items():
        rows = source.rows.get("demonstrations", ())[:_MOST_TEXTS]
        said = [_answer(row) for row in rows]
        lengths = [len(ids) + 1 for ids in _ids(tokenizer, said)]
        over = [number for number, count in enumerate(lengths, 1) if count > limit]
        if over:
            findings.warning(
                "length",
                f"source {name!r}",
                f"{len(over)} of {len(said)} demonstrations answer with more than the benchmark's {limit} new tokens "
                f"(up to {max(lengths)}), {counted(over)}.",
                "A model that learns to answer so is cut off when it is scored; raise max_new_tokens.",
            )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    prompts = [item.prompt for split in SPLITS for item in benchmark.items(split)][:_MOST_TEXTS]
    try:
        ids = chat.prompts(prompts) if chat is not None else _ids(tokenizer, prompts)
    except ValueError as error:
        findings.error("template", "chat()", str(error))
        return
    nothing = [prompt for prompt, tokens in zip(prompts, ids, strict=True) if not tokens]
    if nothing:
        problem = f"{len(nothing)} prompts have no tokens, so there is nothing to continue."
        findings.error("vocabulary", "benchmark", problem, "Leave them out.")
    longest = max(range(len(ids)), key=lambda place: len(ids[place]))
    if positions and len(ids[longest]) + limit > positions:
        too_long = sum(len(tokens) + limit > positions for tokens in ids)
        findings.error(
            "positions",
            "benchmark",
            f"{too_long} prompts with {limit} new tokens do not fit the {positions} positions of the model; the "
            f"longest has {len(ids[longest])} tokens: {quoted(prompts[longest])}.",
            "Shorten or leave out those prompts, lower max_new_tokens, or use another model.",
        )


def _check_vocabulary(
    findings: Findings, task: InnerTask, tokenizer: Any, right: Mapping[str, Sequence[tuple[str, str]]]
) -> None:
    """Look for text that the tokenizer writes as unknown: such a prompt is not read, such an answer cannot be said."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id:
        return
    benchmark = task.built.benchmark
    answers = {text for name, pairs in right.items() if name.startswith("benchmark.") for _, text in pairs}
    texts = {"benchmark, right answers": sorted(answers)}
    texts |= {"benchmark, prompts": [item.prompt for split in SPLITS for item in benchmark.items(split)][:_MOST_TEXTS]}
    for name, source in task.built.sources.items():
        for kind, rows in source.rows.items():
            texts[f"source {name!r}, {kind}"] = [_whole(row) for row in rows[:_MOST_TEXTS]]
    for where, found in texts.items():
        bad = [place for place, ids in enumerate(_ids(tokenizer, found)) if unknown in ids]
        if bad:
            characters = sorted({one for place in bad for one in found[place]})
            characters = [one for one in characters if unknown in _ids(tokenizer, [one])[0]]
            shown = f": {' '.join(map(repr, characters[:12]))}" if characters else ""
            add = findings.error if where == "benchmark, right answers" else findings.warning
            add(
                "vocabulary",
                where,
                f"{len(bad)} of {len(found)} texts have parts that the tokenizer does not know{shown}; the first: "
                f"{quoted(found[bad[0]])}.",
                "The model reads them as one and the same unknown token, and cannot say them; write them otherwise or "
                "use another model.",
            )


def check_headroom(findings: Findings, task: InnerTask, trainer: InnerTrainer) -> None:
    """Score the base model on validation and look for dimensions on which nothing can be seen; says what it cost."""
    try:
        scorecard, cost = trainer.evaluate(task, trainer.base(task), "validation")
    except (ValueError, RuntimeError, OSError) as error:
        findings.error("headroom", "the base model", f"it cannot be scored: {first_line(error)}.")
        return
    for name, score in scorecard.dimensions.items():
        where = f"benchmark, dimension {name!r}"
        findings.note(
            "headroom",
            where,
            f"the base model scores {score.mean:.3f} ± {score.standard_error:.3f} on validation, {score.pass_at_k:.3f} "
            f"with {scorecard.k} {_tries(scorecard.k)}, in the asked form {score.format_rate:.0%}.",
        )
        if score.mean == 0:
            findings.warning(
                "headroom",
                where,
                f"the base model never scores there in {scorecard.samples} {_tries(scorecard.samples)} per item.",
                "Algorithms that sample get no signal from such prompts; bring demonstrations, or easier items.",
            )
        elif score.mean == 1:
            findings.warning(
                "headroom", where, "the base model has full marks already.", "No gain can be seen; bring harder items."
            )
    findings.note(
        "headroom",
        "the base model",
        f"this evaluation cost {cost.generated_tokens} generated and {cost.scored_tokens} scored tokens, "
        f"{cost.device_seconds:.2g} device-seconds.",
    )


def _tries(count: int) -> str:
    return "try" if count == 1 else "tries"


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return text_ids(tokenizer, texts) if texts else []  # tokenizers refuse an empty list


def _answer(row: Row) -> str:
    return (row["messages"][-1].get("content") or "") if "messages" in row else row["completion"]


def _whole(row: Row) -> str:
    if "text" in row and "prompt" not in row:
        return str(row["text"])
    if "messages" in row:
        return "".join(turn.get("content") or "" for turn in row["messages"])
    parts = [row.get("prompt"), row.get("completion"), row.get("chosen"), row.get("rejected")]
    return "".join(part for part in parts if isinstance(part, str))
