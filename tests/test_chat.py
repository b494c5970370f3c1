"""Chat formats and sampled conversations: what is written, what is labelled, what is refused, how tools are called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer, SFTTrainer

from posttrain_gym.inner_trainers import sampling
from posttrain_gym.inner_trainers.chat import ChatFormat
from posttrain_gym.inner_trainers.conversations import Conversation, carry_on
from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.faults import ToolFault, failure_from_exception
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Chat
from posttrain_gym.inner_trainers.tasks.calculator import CalculatorTask
from posttrain_gym.inner_trainers.trl import algorithms
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import LINES, PLAIN, ChatTask, chat_tokenizer, length_reward, said, write_chat_checkpoint
from tests.trl_rounds import by_hand, trained


def written(template: str = LINES, **chat: Any) -> ChatFormat:
    return ChatFormat(chat_tokenizer(template), Chat(**chat), "the model")


def echo(text: str) -> str | None:
    return text.removeprefix("say ") if text.startswith("say ") else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2))


# What is written ------------------------------------------------------------------------------------------------------


def test_only_what_the_assistant_wrote_is_labelled() -> None:
    turns = [
        said("user", "1+2?"),
        said("assistant", "[1+2]"),
        said("tool", "3"),
        said("assistant", "3."),
        said("user", "ok"),
        said("assistant", ""),
    ]
    expected = [
        ("<system>be brief\n<user>1+2?\n<assistant>", False),
        ("[1+2]<eos>", True),
        ("\n<tool>3\n<assistant>", False),
        ("3.<eos>", True),
        ("\n<user>ok\n<assistant>", False),
        ("<eos>", True),
        ("\n", False),
    ]
    tokenizer = chat_tokenizer()
    ids, labels = written(system="be brief").encode([turns], "rows")[0]
    parts = [(tokenizer(text)["input_ids"], own) for text, own in expected]
    assert ids == [i for part, _ in parts for i in part]
    assert labels == [i if own else -100 for part, own in parts for i in part]


def test_a_system_turn_of_the_row_stands_in_for_the_tasks_own() -> None:
    chat = written(system="be brief")
    own = [said("system", "be long"), said("user", "a"), said("assistant", "b")]
    assert chat.encode([own], "rows") == written().encode([own], "rows")
    assert chat.prompts(["a"]) == [chat_tokenizer()("<system>be brief\n<user>a\n<assistant>")["input_ids"]]
    assert written().prompts(["a", "bc"])[1] == chat_tokenizer()("<user>bc\n<assistant>")["input_ids"]


def test_a_sampled_conversation_is_written_as_a_row_is() -> None:
    chat = written(tool=echo, max_turns=2, system="s")
    tokenizer = chat_tokenizer()
    conversation = Conversation(chat.prompts(["what?"])[0])
    conversation.add_turn(tokenizer("say 12<eos>")["input_ids"])
    carry_on(chat, [conversation], lambda sequences: [tokenizer("12.<eos>")["input_ids"] for _ in sequences])
    turns = [said("user", "what?"), said("assistant", "say 12"), said("tool", "12"), said("assistant", "12.")]
    ids, labels = chat.encode([turns], "rows")[0]
    assert conversation.prompt + conversation.tokens == ids[:-1]  # but for the line break after the last turn
    mask = [0] * len(conversation.prompt) + conversation.chosen
    assert mask == [int(label != -100) for label in labels[:-1]]


COUNTED = "{{ messages | length }}" + PLAIN
UNENDED = PLAIN.replace("<eos>", "")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTED, r"rows row 1: the chat template of the model writes the turns around assistant turn 1 differently"),
        (
            UNENDED,
            r"rows row 1: the chat template of the model writes no end token \(id \[1\]\) after an assistant",
        ),
        ("{{ raise_exception('no such role') }}", r"rows row 1: the chat template of the model raised .*no such role"),
        ("{{ ''.__class__.__mro__ }}", r"rows row 1: the chat template of the model raised SecurityError"),
        ("{{ messages.clear() }}", r"rows row 1: the chat template of the model raised SecurityError"),
    ],
)
def test_a_template_that_cannot_be_trusted_with_a_mask_is_refused(template: str, message: str) -> None:
    rows = [[said("user", "a"), said("assistant", "b")]]
    with pytest.raises(ValueError, match=message):
        written(template).encode(rows, "rows")


def test_a_template_that_rewrites_earlier_turns_is_refused_from_the_second_turn_on() -> None:
    """As templates do that drop the reasoning of all turns but the last."""
    rewriting = PLAIN.replace("{{ message.content }}", "{{ message.content if loop.last else message.content[-1:] }}")
    one = [said("user", "a"), said("assistant", "bc")]
    with pytest.raises(ValueError, match=r"rows row 2: .* around assistant turn 1 differently"):
        written(rewriting).encode([one, [*one, said("user", "d"), said("assistant", "ef")]], "rows")
    assert len(written(rewriting).encode([one], "rows")) == 1


def test_end_tokens_of_the_model_end_a_turn_too() -> None:
    chat = ChatFormat(chat_tokenizer(PLAIN.replace("<eos>", "<tool>")), Chat(), "m", ends=[1, 6])
    assert chat.encode([[said("user", "a"), said("assistant", "b")]], "rows")[0][1][-1] == 6
    assert chat.ended([9, 6]) and chat.ended([1]) and not chat.ended([9]) and not chat.ended([])


# Templates: the tokenizer's or the task's (A03) -----------------------------------------------------------------------


def test_a_model_without_a_template_is_refused_before_it_is_loaded(tmp_path: Path, trainer: TrlTrainer) -> None:
    folder = write_chat_checkpoint(tmp_path / "plain", template=None)
    (folder / "model.safetensors").rename(tmp_path / "weights")
    rows = [{"messages": [said("user", "Name a prime."), said("assistant", "7")]}]
    recipe = Recipe("sft", {"talk": 1.0}, steps=1, batch_size=1)
    for refuse in (trainer.check, trainer.step_cost_bound):
        with pytest.raises(ValueError) as caught:
            refuse(ChatTask(folder, rows), recipe)
        assert str(caught.value) == (
            f"chat template: the tokenizer of {folder} has none, so its conversations have no written form. Either set "
            "tokenizer.chat_template and save the tokenizer with the model, or state one in Chat.template of the "
            "task, which is stored with the task's content hash."
        )
    (tmp_path / "weights").rename(folder / "model.safetensors")
    before = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()}
    task = ChatTask(folder, rows, Chat(template=PLAIN))
    trainer.check(task, recipe)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report = session.result()[0]
    assert (report.failure, report.supervised_tokens) == (None, 2)
    resident = trainer._residents[task.built.content_hash].model
    assert resident.tokenizer.chat_template is None
    assert {f.name: hashlib.sha256(f.read_bytes()).digest() for f in folder.iterdir()} == before


def test_what_a_chat_says_is_part_of_the_content_hash(folder: Path) -> None:
    chats = [
        Chat(),
        Chat(template=PLAIN),
        Chat(template=LINES),
        Chat(system="s"),
        Chat(tool=echo, max_turns=2),
        Chat(tool=echo, max_turns=3),
        Chat(tool=echo, max_turns=2, max_tool_tokens=3),
        Chat(tool=echo, tool_version="2", max_turns=2),
    ]
    assert len({ChatTask(folder, chat=chat).built.content_hash for chat in chats}) == len(chats)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 2}, "chat.max_turns: 2 turns need a tool that answers in between"),
        ({"tool": echo, "max_turns": 0}, r"chat.max_turns: expected an integer in \[1, 64\]"),
        ({"max_tool_tokens": 0}, r"chat.max_tool_tokens: expected an integer in \[1, 65536\]"),
    ],
)
def test_a_chat_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chat(**changes)


# Tools ----------------------------------------------------------------------------------------------------------------


def test_a_tools_answer_is_cut_at_its_limit_and_never_passes_the_bound() -> None:
    chat = written(tool=echo, max_turns=2, max_tool_tokens=5)
    tokenizer = chat_tokenizer()
    assert chat.longest_tool_turn == len("\n\n") + len(["<tool>", "<assistant>"]) + 5
    assert chat.tool_turn("12345") == tokenizer("\n<tool>12345\n<assistant>")["input_ids"]
    assert chat.tool_turn("123456789") == chat.tool_turn("12345")
    assert chat.tool_turn("") == tokenizer("\n<tool>\n<assistant>")["input_ids"]
    assert written().longest_tool_turn == 0


def test_turns_are_sampled_for_all_conversations_at_once_until_nothing_is_called() -> None:
    chat = written(PLAIN, tool=echo, max_turns=3)
    tokenizer = chat_tokenizer()
    asked: list[list[str]] = []
    scripted = iter([["say b<eos>", "done<eos>"], ["say c<eos>"]])

    def sample(sequences: list[list[int]]) -> list[list[int]]:
        asked.append([tokenizer.decode(ids) for ids in sequences])
        return [tokenizer(turn)["input_ids"] for turn in next(scripted)]

    conversations = [Conversation(ids) for ids in chat.prompts(["1", "2", "3", "4"])]
    first = ["say a<eos>", "no<eos>", "say cut", "say z<eos>"]
    for conversation, turn in zip(conversations, first, strict=True):
        conversation.add_turn(tokenizer(turn)["input_ids"])
    carry_on(chat, conversations, sample)
    assert asked == [
        ["<user>1<assistant>say a<eos><tool>a<assistant>", "<user>4<assistant>say z<eos><tool>z<assistant>"],
        ["<user>1<assistant>say a<eos><tool>a<assistant>say b<eos><tool>b<assistant>"],
    ]
    assert [chat.text(conversation.last_turn) for conversation in conversations] == ["say c", "no", "say cut", "done"]
    assert [sum(c.chosen) for c in conversations] == [3 * len("say x") + 3, 3, 7, len("say z") + len("done") + 2]
    assert all(len(c.chosen) == len(c.tokens) for c in conversations)


def test_a_tool_that_fails_is_named() -> None:
    def broken(text: str) -> str:
        return str(1 // 0)

    def counting(text: str) -> Any:
        return 3

    for tool, message in (
        (broken, r"the task's tool raised ZeroDivisionError.* for the assistant's turn 'a'"),
        (counting, r"the task's tool returned 3 for 'a'; expected text"),
    ):
        chat = written(tool=tool, max_turns=2)
        conversation = Conversation([3], last_turn=chat_tokenizer()("a<eos>")["input_ids"])
        with pytest.raises(ToolFault, match=message) as caught:
            carry_on(chat, [conversation], lambda sequences: sequences)
        failure = failure_from_exception(caught.value, 2)
        assert (failure.cause, failure.kind, failure.step) == ("environment", "tool_raised", 2)


def test_evaluations_count_every_turn_and_judge_the_last(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    chat = written(PLAIN, tool=echo, max_turns=2)
    tokenizer = chat_tokenizer()
    scripted = iter([[["say yes<eos>", "yes<eos>"], ["<eos>", "say too"]], [["yes<eos>"]]])

    def sample(model: Any, sequences: Sequence[Sequence[int]], samples: int, *rest: Any, **more: Any) -> Any:
        turns = next(scripted)
        assert [len(group) for group in turns] == [samples] * len(sequences)
        return [[tokenizer(turn)["input_ids"] for turn in group] for group in turns]

    monkeypatch.setattr(sampling, "_sample_turns", sample)
    model = AutoModelForCausalLM.from_pretrained(folder)
    benchmark = ChatTask(folder).built.benchmark
    card, generated, read = Evaluator((0,), 2, 2).evaluate(model, tokenizer, benchmark, "validation", chat)
    assert (card.dimensions["x"].pass_at_1, card.empty_share, card.clipped_share) == (0.5, 0.25, 0.25)
    assert generated == 8 + 4 + 1 + 7 + 4
    first, second = len("v1?") + 2, len("v22?") + 2
    assert read == first + second + (first + 8 + len("yes") + 2)


def test_the_cost_of_an_evaluation_stays_below_its_bound_to_the_token() -> None:
    task, trainer = CalculatorTask(16, 3), TrlTrainer()
    bound = trainer.evaluation_cost_bound(task, "test")
    items = task.built.benchmark.test
    prompts = sum(len(item.prompt) + 2 for item in items)
    assert bound.generated_tokens == len(items) * 8 * 2 * 12
    assert bound.scored_tokens == prompts * 2 + 8 * (prompts + len(items) * (12 + 2 + 12))
    cost = trainer.evaluate(task, trainer.base(task), "test")[1]
    assert 0 < cost.generated_tokens < bound.generated_tokens
    assert prompts * 2 < cost.scored_tokens < bound.scored_tokens


# Algorithms -----------------------------------------------------------------------------------------------------------


def test_algorithms_without_a_tool_mask_are_refused_and_have_no_source(trainer: TrlTrainer) -> None:
    task = CalculatorTask(16, 2)
    usable = {name: trainer.usable_sources(task, name) for name in trainer.algorithms}
    assert {name for name, sources in usable.items() if sources} == {"grpo", "ppo", "sft"}
    assert usable["grpo"] == usable["ppo"] == ("practice",) and usable["sft"] == ("answers", "worked")
    for name in ("rloo", "rft"):
        with pytest.raises(ValueError) as caught:
            trainer.check(task, Recipe(name, {"practice": 1.0}, num_generations=4))
        assert str(caught.value) == (
            f"algorithm: task 'calculator' has a tool, and {name} cannot keep the tool's turns out of its loss; "
            "algorithms that sample and can: grpo, ppo; those that train on rows are not concerned."
        )


def test_algorithms_that_sample_plain_text_are_refused_where_prompts_are_turns(
    trainer: TrlTrainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, sampling_ones = ChatTask(folder), [name for name, spec in ALGORITHMS.items() if spec.rows == "prompts"]
    assert [name for name in sampling_ones if not ALGORITHMS[name].chats] == []
    plain = {name: replace(spec, chats=name != "rloo" and spec.chats) for name, spec in ALGORITHMS.items()}
    monkeypatch.setattr(algorithms, "ALGORITHMS", plain)
    assert algorithms.usable_sources(task, plain["rloo"]) == ()
    assert algorithms.usable_sources(task, plain["grpo"]) == ("talk",)
    with pytest.raises(ValueError) as caught:
        trainer.check(task, Recipe("rloo", {"talk": 1.0}, num_generations=4))
    assert str(caught.value) == (
        "algorithm: task 'chatty' writes prompts as turns, and rloo samples plain text only; "
        "algorithms that sample and can: distill, grpo, ppo, rft; those that train on rows are not concerned."
    )


def test_an_sft_round_on_turns_is_trls_own_run(trainer: TrlTrainer, folder: Path) -> None:
    """Where the template ends a turn with the end token; what follows one, TRL would train on too."""
    rows = [
        {"messages": [said("user", f"{i}+{i}?"), said("assistant", f"{2 * i}")]} if i % 2 else
        {"prompt": f"{i}+{i}?", "completion": f"{2 * i}"}
        for i in range(16)
    ]  # fmt: skip
    recipe = Recipe("sft", {"talk": 1.0}, steps=4, batch_size=8, learning_rate=1e-2)
    draw = draw_mix({"talk": len(rows)}, {"talk": 1.0}, 32, 3)
    reference = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=by_hand("sft"),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": [said("user", f"{i}+{i}?")], "completion": [said("assistant", f"{2 * i}")]} for _, i in draw]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, ChatTask(folder, rows), recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_an_on_policy_round_on_turns_is_trls_own_run(algorithm: str, trainer: TrlTrainer, folder: Path) -> None:
    task = ChatTask(folder)
    settings: dict[str, Any] = {"num_generations": 4, "kl_coef": 0.0} if algorithm == "rloo" else {"num_generations": 4}
    recipe = Recipe(algorithm, {"talk": 1.0}, steps=3, batch_size=8, learning_rate=3e-3, **settings)
    draw = draw_mix({"talk": 32}, {"talk": 1.0}, 6, 3)
    arguments = by_hand("grpo", max_steps=3, max_completion_length=4, temperature=1.0)
    kind: Any = GRPOTrainer
    if algorithm == "rloo":
        arguments = RLOOConfig(
            **{
                name: getattr(arguments, name)
                for name in (
                    "output_dir", "max_steps", "per_device_train_batch_size", "learning_rate", "lr_scheduler_type",
                    "seed", "bf16", "use_cpu", "gradient_checkpointing", "report_to", "save_strategy", "disable_tqdm",
                    "num_generations", "max_completion_length", "temperature",
                )
            },
            beta=0.0,
        )  # fmt: skip
        kind = RLOOTrainer
    reference = kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [length_reward({}, turns[0]["content"]) for turns in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": [said("user", f"{i}?")]} for _, i in draw]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference.train()
    weights = trained(trainer, task, recipe)
    state = reference.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    base = trainer.base(task).weights
    assert any(not torch.equal(value, base[name]) for name, value in weights.items())


def test_rejection_sampling_trains_on_answers_as_turns_and_within_its_bound(trainer: TrlTrainer, folder: Path) -> None:
    """Completions that were cut at the limit are trained on with an end token, one more than was sampled."""
    task = ChatTask(folder)
    recipe = Recipe("rft", {"talk": 1.0}, steps=2, batch_size=8, num_generations=4, min_reward=0.3)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance(1)
    rows = list(session._trainer.train_dataset)
    tokenizer = chat_tokenizer(PLAIN)
    answer = re.compile(r"<user>\d+\?<assistant>[^<>]+<eos>")
    assert len(rows) == 16 and all(answer.fullmatch(tokenizer.decode(row["input_ids"])) for row in rows)
    for row in rows:
        prompt = row["input_ids"].index(tokenizer.convert_tokens_to_ids("<assistant>")) + 1
        assert row["labels"] == [-100] * prompt + row["input_ids"][prompt:]
    session.advance()
    report = session.result()[0]
    assert report.failure is None
    longest = len("<user>31?<assistant>") - len("user>") - len("assistant>") + 4 + 1
    bound = trainer.step_cost_bound(task, recipe)
    assert bound.trained_tokens == 8 * longest
    assert report.training_cost.trained_tokens == sum(len(row["input_ids"]) for row in rows) <= 2 * bound.trained_tokens


def test_preferences_are_written_as_turns(trainer: TrlTrainer, folder: Path) -> None:
    pairs: list[dict[str, Any]] = [
        {"prompt": f"{i}?", "chosen": f"{i}", "rejected": [said("assistant", f"{i + 1}")]} for i in range(8)
    ]
    recipe = Recipe("dpo", {"talk": 1.0}, steps=1, batch_size=4, learning_rate=1e-3)
    task = ChatTask(folder, preferences=pairs)
    trainer.step_cost_bound(task, recipe)
    rows = trainer._residents[task.built.content_hash].rows
    tokenised = rows.tokenised(ALGORITHMS["dpo"], "talk")
    tokenizer = chat_tokenizer()
    assert [tokenizer.decode(ids) for ids in tokenised.chosen[:2]] == [f"<user>{i}?<assistant>{i}<eos>" for i in (0, 1)]
    assert tokenizer.decode(tokenised.rejected[0]) == "<user>0?<assistant>1<eos>"
    assert tokenised.chosen_prompt == tokenised.rejected_prompt == [4] * 8
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report, checkpoint = session.result()
    assert report.failure is None and checkpoint is not None
