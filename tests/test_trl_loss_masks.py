"""Where the loss is taken: on what the assistant wrote, to the token, in rows of turns and in rollouts with a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain_gym.inner_trainers.evaluation import Evaluator
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Chat
from posttrain_gym.inner_trainers.tasks.calculator import CalculatorTask, use_calculator
from posttrain_gym.inner_trainers.trl.metering import Meter
from posttrain_gym.inner_trainers.trl.on_policy import policy_mask
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.chat_rounds import LINES, ChatTask, said, write_chat_checkpoint
from tests.trl_fixtures import live_models

__all__ = ["live_models"]

Gradients = dict[str, torch.Tensor]

TURNS = [
    {"messages": [said("user", f"{i}+1?"), said("assistant", f"[{i}+1]"), said("tool", str(i + 1)),
                  said("assistant", f"{i + 1}.")]}
    for i in range(8)
]  # fmt: skip
OWN = len("[0+1]") + 1 + len("1.") + 1
"""Tokens of the assistant in each row."""


@pytest.fixture(scope="module")
def trainer() -> TrlTrainer:
    return TrlTrainer(Evaluator(seeds=(0,), samples_per_seed=2, k=2), device="cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ChatTask:
    return ChatTask(write_chat_checkpoint(tmp_path_factory.mktemp("lines"), LINES), TURNS, Chat(system="add"))


# Rows of turns --------------------------------------------------------------------------------------------------------


def sft_batch(trainer: TrlTrainer, task: ChatTask) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the library's trainer of a round on the rows, and its first batch."""
    recipe = Recipe("sft", {"talk": 1.0}, steps=1, batch_size=8, learning_rate=1e-3)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    inner = session._trainer
    batch = inner._prepare_inputs(next(iter(inner.get_train_dataloader())))
    return inner, {name: value.clone() for name, value in batch.items() if name != "row_number"}


def gradients(inner: Any, batch: dict[str, torch.Tensor]) -> Gradients:
    inner.model.zero_grad()
    inner.compute_loss(inner.model, batch).backward()
    return {name: p.grad.clone() for name, p in inner.model.named_parameters()}


def same(left: Gradients, right: Gradients) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def by_role(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return whose each token is: a role's turn runs from its token to the next; ``end`` after the assistant's end."""
    roles = {tokenizer.convert_tokens_to_ids(f"<{r}>"): r for r in ("system", "user", "assistant", "tool")}
    owner, owners = "", []
    for token in ids:
        if token in roles:
            owner = roles[token]
            owners.append("template")
            continue
        owners.append(owner)
        if owner == "assistant" and token == tokenizer.eos_token_id:
            owner = "template"
    return owners


def test_labels_stand_on_the_assistants_tokens_and_nowhere_else(trainer: TrlTrainer, task: ChatTask) -> None:
    inner, batch = sft_batch(trainer, task)
    tokenizer = inner.processing_class
    columns = [batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")]
    for ids, labels, attention in zip(*columns, strict=True):
        owners = by_role(tokenizer, ids)
        for token, label, owner, seen in zip(ids, labels, owners, attention, strict=True):
            assert label == (token if owner == "assistant" and seen else -100)
        assert {"system", "user", "tool"} <= set(owners)


def test_only_states_that_choose_an_assistants_token_get_a_gradient(trainer: TrlTrainer, task: ChatTask) -> None:
    """The last hidden state of a position reaches the loss through that position's prediction alone."""
    inner, batch = sft_batch(trainer, task)
    states: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    handle = inner.model.base_model.register_forward_hook(keep)
    gradients(inner, batch)
    handle.remove()
    (state,) = states
    assert state.grad is not None
    touched = state.grad.abs().sum(dim=-1) > 0
    labelled = batch["labels"][:, 1:] != -100
    assert torch.equal(touched[:, :-1], labelled) and not touched[:, -1].any()
    assert int(labelled.sum()) == 8 * OWN


@pytest.mark.parametrize(("role", "moves"), [("system", False), ("user", False), ("tool", False), ("assistant", True)])
def test_other_targets_change_the_gradient_only_where_the_assistant_spoke(
    role: str, moves: bool, trainer: TrlTrainer, task: ChatTask
) -> None:
    """The same inputs, labelled as if the turns of one role had said something else."""
    inner, batch = sft_batch(trainer, task)
    tokenizer = inner.processing_class
    before = gradients(inner, dict(batch))
    assert same(before, gradients(inner, dict(batch)))
    other = tokenizer.convert_tokens_to_ids("z")
    owners = [by_role(tokenizer, ids) for ids in batch["input_ids"].tolist()]
    spoken = torch.tensor([[owner == role for owner in row] for row in owners])
    assert spoken.any()
    targets = torch.where(spoken, other, batch["input_ids"])
    labels = torch.where(batch["labels"] == -100, -100, targets)
    assert same(before, gradients(inner, {**batch, "labels": labels})) is not moves


def test_supervised_tokens_are_the_assistants(trainer: TrlTrainer, task: ChatTask) -> None:
    recipe = Recipe("sft", {"talk": 1.0}, steps=3, batch_size=8, learning_rate=1e-3)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    session.advance()
    report = session.result()[0]
    assert (report.failure, report.supervised_tokens) == (None, 3 * 8 * OWN)
    row = len("<system>add\n<user>0+1?\n<assistant>[0+1]<eos>\n<tool>1\n<assistant>1.<eos>\n")
    row -= sum(len(f"<{name}>") - 1 for name in ("system", "user", "assistant", "eos", "tool", "assistant", "eos"))
    assert report.training_cost.trained_tokens == 3 * 8 * row
    assert trainer.step_cost_bound(task, recipe).trained_tokens == 8 * row


def test_a_tokenizer_that_pads_with_its_end_token_still_learns_every_end(trainer: TrlTrainer, tmp_path: Path) -> None:
    rows = [
        {"messages": [said("user", "q"), said("assistant", "a")]},
        {"messages": [said("user", "q"), said("assistant", "abc"), said("user", "r"), said("assistant", "d")]},
    ]
    task = ChatTask(write_chat_checkpoint(tmp_path, pad="<eos>"), rows)
    recipe = Recipe("sft", {"talk": 1.0}, steps=1, batch_size=2)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    tokenizer = session._trainer.processing_class
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    batch = next(iter(session._trainer.get_train_dataloader()))
    a, b, c, d = tokenizer.convert_tokens_to_ids(list("abcd"))
    assert sorted(batch["labels"].tolist(), key=lambda row: row.count(-100)) == [
        [-100, -100, -100, a, b, c, 1, -100, -100, -100, d, 1],
        [-100, -100, -100, a, 1, -100, -100, -100, -100, -100, -100, -100],
    ]
    session.advance()
    assert session.result()[0].supervised_tokens == 4 + 2 + 2


# Rollouts with a tool -------------------------------------------------------------------------------------------------


def rollout_round(
    trainer: TrlTrainer, algorithm: str, watch: Callable[[Any, dict[str, torch.Tensor]], None], **changes: Any
) -> Any:
    """Run a round on the calculator; ``watch`` sees the library's trainer and each sampled batch."""
    recipe = Recipe(
        algorithm,
        {"practice": 1.0},
        **{"steps": 2, "batch_size": 16, "num_generations": 4, "learning_rate": 1e-3, **changes},
    )
    task = CalculatorTask(16, 2)
    session = trainer.begin(task, recipe, trainer.base(task), 1)
    inner = session._trainer
    original = inner._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        batch = original(inputs)
        watch(inner, batch)
        return batch

    inner._generate_and_score_completions = watched
    session.advance()
    report = session.result()[0]
    assert report.failure is None
    return report


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_tool_mask_is_right_to_the_token(algorithm: str, trainer: TrlTrainer) -> None:
    seen = {"called": 0, "own": 0, "rows": 0}

    def watch(inner: Any, batch: dict[str, torch.Tensor]) -> None:
        tokenizer = inner.processing_class
        names = ("completion_ids", "completion_mask", "tool_mask")
        for ids, alive, mask in zip(*(batch[n].tolist() for n in names), strict=True):
            ids = [token for token, kept in zip(ids, alive, strict=True) if kept]
            mask = mask[: len(ids)]
            text = tokenizer.decode(ids)
            first, _, rest = text.partition("<tool>")
            seen["rows"] += 1
            seen["own"] += sum(mask)
            if not rest:  # nothing was called
                assert mask == [1] * len(ids)
                assert use_calculator(first.removesuffix("<eos>")) is None
                continue
            seen["called"] += 1
            answer, _, last = rest.partition("<assistant>")
            assert answer == use_calculator(first.removesuffix("<eos>"))
            before, tool = len(tokenizer(first)["input_ids"]), len(answer) + 2
            assert mask == [1] * before + [0] * tool + [1] * (len(ids) - before - tool)
            assert tokenizer.decode(ids[before + tool :]) == last
        assert torch.equal(policy_mask(batch), batch["completion_mask"] * batch["tool_mask"])

    report = rollout_round(trainer, algorithm, watch)
    assert seen["rows"] == 32 and 4 <= seen["called"] <= 30
    assert report.supervised_tokens == report.training_cost.generated_tokens == seen["own"]
    bound = trainer.step_cost_bound(CalculatorTask(16, 2), report.recipe).times(2)
    for name in ("trained_tokens", "generated_tokens", "scored_tokens"):
        assert 0 < getattr(report.training_cost, name) < getattr(bound, name)


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "grpo", "bnpo"])
def test_the_gradient_does_not_see_how_likely_a_tools_tokens_were(loss: str, trainer: TrlTrainer) -> None:
    """Log-probabilities of the policy, the reference and the sampling policy, at the tool's places and at its own."""
    results: list[tuple[bool, bool]] = []

    def watch(inner: Any, batch: dict[str, torch.Tensor]) -> None:
        if results:
            return
        batch = {name: value for name, value in batch.items()}
        batch["advantages"] = torch.linspace(-1, 1, len(batch["advantages"]))
        batch["num_items_in_batch"] = policy_mask(batch).sum()
        places = {
            "tool": batch["completion_mask"].bool() & ~batch["tool_mask"].bool(),
            "own": policy_mask(batch).bool(),
        }
        assert places["tool"].any()
        before = with_noise(inner, batch, torch.zeros(places["own"].shape))
        for name, moves in (("tool", False), ("own", True)):
            noise = torch.where(places[name], 0.05, 0.0)
            for where in ("policy", "ref_per_token_logps", "old_per_token_logps"):
                results.append((same(before, with_noise(inner, batch, noise, where)) is not moves, moves))

    rollout_round(trainer, "grpo", watch, steps=1, loss=loss, kl_coef=0.1, num_iterations=2)
    assert len(results) == 6 and all(right for right, _ in results), results


def with_noise(inner: Any, batch: dict[str, torch.Tensor], noise: torch.Tensor, where: str = "policy") -> Gradients:
    """Return the loss's gradients with noise on one kind of log-probabilities: (B, T)."""
    original, meter = inner._get_per_token_logps_and_entropies, inner.meter
    inner.meter = Meter()  # what is tried here is no part of the round

    def noisy(*arguments: Any, **more: Any) -> Any:
        log_probabilities, entropies, *rest = original(*arguments, **more)
        return (log_probabilities + noise, entropies, *rest)

    if where == "policy":
        inner._get_per_token_logps_and_entropies = noisy
    else:
        batch = {**batch, where: batch[where] + noise}
    inner.model.zero_grad()
    with torch.enable_grad():
        inner._compute_loss(inner.model, batch).backward()
    found = {name: p.grad.clone() for name, p in inner.model.named_parameters()}
    inner.model.zero_grad()
    inner._get_per_token_logps_and_entropies, inner.meter = original, meter
    return found


def test_without_a_tool_there_is_no_mask_and_the_librarys_path_is_taken(trainer: TrlTrainer, tmp_path: Path) -> None:
    task = ChatTask(write_chat_checkpoint(tmp_path))
    recipe = Recipe("grpo", {"talk": 1.0}, steps=1, batch_size=8, num_generations=4)
    session = trainer.begin(task, recipe, trainer.base(task), 0)
    inner = session._trainer
    assert inner.rollout_func is None and inner.max_completion_length == 4
    batch = inner._generate_and_score_completions([{"prompt": "1?", "row_number": 0} for _ in range(8)])
    assert "tool_mask" not in batch
    session.close()


def test_no_model_outlives_a_round_with_a_tool(trainer: TrlTrainer, live_models: Callable[[], int]) -> None:
    for _ in range(2):
        rollout_round(trainer, "grpo", lambda inner, batch: None, steps=1, kl_coef=0.1)
        assert live_models() == 0


@pytest.fixture(autouse=True)
def no_gradients_left() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
