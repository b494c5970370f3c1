"""Distillation rounds equal TRL's own bit for bit, count the teacher too, and refuse one of another vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import gymnasium as gym
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DistillationConfig, DistillationTrainer

import posttrain_gym  # noqa: F401 (registers the ids)
from posttrain_gym.inner_trainers.base import Limit
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask, write_tiny_checkpoint
from posttrain_gym.inner_trainers.trl import models
from posttrain_gym.inner_trainers.trl.algorithms import ALGORITHMS
from posttrain_gym.inner_trainers.trl.data import draw_mix
from posttrain_gym.inner_trainers.trl.distill import MeteredDistillationTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer, lora_parameters
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, by_hand, equal, grpo, run, trained

PROMPT = 4  # tokens of every tiny prompt


class TaughtTask(TinyTask):
    """The tiny task with a teacher."""

    def __init__(self, folder: Path, teacher: Path) -> None:
        super().__init__(folder)
        self._teacher = teacher

    def teacher_checkpoint(self) -> Path:
        return self._teacher


def distill(**changes: Any) -> Recipe:
    settings = grpo(learning_rate=3e-3, num_generations=8).to_dict() | {"algorithm": "distill"}
    return Recipe.from_dict({**settings, **changes})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A wider model than the student, with the student's tokenizer."""
    made = tmp_path_factory.mktemp("teacher")
    config = LlamaConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size = 64, 32
    config.head_dim = 32
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(made)
    AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def taught(folder: Path, teacher: Path) -> TaughtTask:
    return TaughtTask(folder, teacher)


def theirs(folder: Path, teacher: Path, recipe: Recipe, prompts: list[str], **changes: Any) -> Any:
    plain = by_hand("grpo")
    names = ("output_dir", "max_steps", "learning_rate", "lr_scheduler_type", "seed")
    quiet = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no"}
    trainer = DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
        args=DistillationConfig(
            **{name: getattr(plain, name) for name in names},
            **quiet,
            disable_tqdm=True,
            max_completion_length=4,
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation,
            **changes,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=_lora(recipe.lora_rank) if recipe.lora_rank else None,
    )
    trainer.train()
    return trainer


def _lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def drawn_prompts(task: TinyTask, recipe: Recipe, seed: int = 3) -> list[str]:
    rows = task.built.sources["good"].rows["prompts"]
    count = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
    return [rows[index]["prompt"] for _, index in draw_mix({"good": len(rows)}, {"good": 1.0}, count, seed)]


# Equal to TRL, bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "asked"),
    [
        ({}, {"beta": 1.0}),
        ({"loss": "reverse_kl", "temperature": 0.7}, {"beta": 1.0, "temperature": 0.7}),
        ({"loss": "forward_kl"}, {"beta": 0.0}),
        ({"loss": "jsd"}, {"beta": 0.5}),
        ({"loss": "jsd", "batch_size": 4, "gradient_accumulation": 2}, {"beta": 0.5}),
        ({"lora_rank": 2}, {"beta": 1.0}),
    ],
    ids=str,
)
def test_a_distillation_round_is_trls_own_run(
    ours: dict[str, Any], asked: dict[str, Any], trainer: TrlTrainer, taught: TaughtTask, folder: Path, teacher: Path
) -> None:
    recipe = distill(**ours)
    reference = theirs(folder, teacher, recipe, drawn_prompts(taught, recipe), **{"temperature": 1.0, **asked})
    model = reference.model.merge_and_unload() if recipe.lora_rank else reference.model
    state, weights = model.state_dict(), trained(trainer, taught, recipe)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    assert not equal(weights, trainer.base(taught).weights)


def test_every_loss_is_another_round(trainer: TrlTrainer, taught: TaughtTask) -> None:
    found = [trained(trainer, taught, distill(loss=loss)) for loss in ALGORITHMS["distill"].losses]
    assert len(found) == 3
    assert not any(equal(one, other) for i, one in enumerate(found) for other in found[:i])
    assert equal(found[0], trained(trainer, taught, distill()))


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_the_model_comes_nearer_to_its_teacher(loss: str, trainer: TrlTrainer, taught: TaughtTask) -> None:
    """KL(model ‖ teacher) of the first token after every prompt falls to less than half."""
    loaded = trainer._teacher_model(taught)
    prompts = [row["prompt"] for row in taught.built.sources["good"].rows["prompts"]]
    ids = loaded.tokenizer(text=prompts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = loaded.with_weights(loaded.base_weights).eval()(input_ids=ids).logits[:, -1].log_softmax(-1)

    def distance(weights: Weights) -> float:
        model = trainer._load(taught).model.with_weights(weights).eval()
        with torch.no_grad():
            own = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        return float((own.exp() * (own - wanted)).sum(-1).mean())

    before = distance(trainer.base(taught).weights)
    after = distance(trained(trainer, taught, distill(loss=loss, steps=25, batch_size=16, learning_rate=5e-3)))
    assert before > 0.02
    assert after < 0.5 * before


def test_a_teacher_that_is_the_base_teaches_nothing_at_first(trainer: TrlTrainer, folder: Path) -> None:
    report, checkpoint = run(trainer, TaughtTask(folder, folder), distill(steps=2))
    assert checkpoint is not None and report.failure is None
    assert report.curves[0]["loss"] == pytest.approx(0.0, abs=1e-6)
    assert report.curves[0]["grad_norm"] == pytest.approx(0.0, abs=1e-4)


# Counted -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch_size": 4, "gradient_accumulation": 2}, {"lora_rank": 2}],
    ids=["plain", "accumulated", "lora"],
)
def test_every_token_is_counted_with_the_teachers_own_size(
    changes: dict[str, Any], trainer: TrlTrainer, taught: TaughtTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[int] = []
    original = DistillationTrainer._generate_single_turn

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        completions = original(self, *args, **kwargs)
        sampled.extend(map(len, completions))
        return completions

    monkeypatch.setattr(DistillationTrainer, "_generate_single_turn", noted)
    recipe = distill(**changes)
    session = trainer.begin(taught, recipe, trainer.base(taught), 3)
    session.advance()
    meter = session._meter
    report, _ = session.result()
    assert report.failure is None
    assert len(sampled) == meter.sequences == 4 * 8
    prompts, completions = 4 * 8 * PROMPT, sum(sampled)
    cost, n = report.training_cost, trainer.parameters(taught)
    teacher_n = trainer._teacher_model(taught).parameters
    assert n != teacher_n == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(taught._teacher).parameters())
    assert cost.trained_tokens == meter.teacher_tokens == prompts + completions
    assert cost.generated_tokens == report.supervised_tokens == completions
    assert cost.scored_tokens == prompts + (prompts + completions)  # before sampling, and by the teacher
    resident = trainer._load(taught)
    rank = recipe.lora_rank
    per_token = 4 * n + 6 * lora_parameters(resident.model.template, rank) if rank else 6 * n
    assert cost.flops == (
        per_token * cost.trained_tokens + 2 * n * (prompts + completions) + 2 * teacher_n * cost.trained_tokens
    )
    bound = trainer.step_cost_bound(taught, recipe)
    assert (bound.trained_tokens, bound.generated_tokens, bound.scored_tokens) == (8 * 8, 8 * 4, 8 * 4 + 8 * 8)
    assert cost.flops <= bound.times(4).flops


@pytest.mark.parametrize("unit", ["train_tokens", "flops"])
def test_a_distillation_round_ends_before_its_limit(unit: str, trainer: TrlTrainer, taught: TaughtTask) -> None:
    bound = trainer.step_cost_bound(taught, distill()).in_unit(unit)
    report, checkpoint = run(trainer, taught, distill(), limit=Limit(unit, 2.2 * bound))
    spent = report.training_cost.in_unit(unit)
    assert checkpoint is not None and report.ended in ("budget", "finished") and report.steps >= 2
    assert spent <= 2.2 * bound
    report, checkpoint = run(trainer, taught, distill(), limit=Limit(unit, 0.99 * bound))
    assert checkpoint is None and report.failure is not None
    assert (report.failure.kind, report.training_cost.in_unit("train_tokens")) == ("budget_too_small", 0.0)


def test_the_teacher_is_held_once_stays_as_it_is_and_goes_with_the_round(
    taught: TaughtTask, teacher: Path, live_models: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    original = models.load_model

    def load_model(folder: Path, *args: Any, **kwargs: Any) -> Any:
        loaded.append(str(folder))
        return original(folder, *args, **kwargs)

    monkeypatch.setattr(models, "load_model", load_model)
    fresh = TrlTrainer()
    for _ in range(2):
        session = fresh.begin(taught, distill(), fresh.base(taught), 3)
        held = [session._trainer.model, session._trainer.teacher_model]
        assert live_models() == 2
        before = {name: value.clone() for name, value in held[1].state_dict().items()}
        session.advance()
        assert equal(held[1].state_dict(), before)
        assert not any(value.requires_grad for value in held[1].parameters())
        assert all(value.grad is None for value in held[1].parameters())
        held.clear()
        session.result()
        assert live_models() == 0
    assert sorted(loaded) == sorted([str(taught.base_checkpoint()), str(teacher)])  # each once for both rounds
    saved = AutoModelForCausalLM.from_pretrained(teacher).state_dict()
    template = fresh._teacher_model(taught).template.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in template.items())


def test_prompts_go_to_the_teacher_as_they_are_drawn(
    trainer: TrlTrainer, taught: TaughtTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = MeteredDistillationTrainer._generate_single_turn

    def noted(self: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        seen.extend(self.processing_class.batch_decode(prompt_ids))
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(MeteredDistillationTrainer, "_generate_single_turn", noted)
    run(trainer, taught, distill())
    assert sorted(seen) == sorted(drawn_prompts(taught, distill()))


# Another vocabulary --------------------------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.fixture
def with_a_token_more(folder: Path, tmp_path: Path) -> Path:
    made = tmp_path / "more"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["z"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(made), tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def with_two_tokens_swapped(folder: Path, tmp_path: Path) -> Path:
    made = copied(folder, tmp_path / "swapped")
    content = json.loads((made / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (made / "tokenizer.json").write_text(json.dumps(content))
    return made


@pytest.fixture
def padded(folder: Path, tmp_path: Path) -> Path:
    made = copied(folder, tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(32)
    model.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            "with_a_token_more",
            "the model has 23 tokens and the teacher 24, for example 'z' is missing in the model and id 23 in the "
            "teacher",
        ),
        (
            "with_two_tokens_swapped",
            "the model has 23 tokens and the teacher 23, for example 'a' is id 3 in the model and id 4 in the teacher",
        ),
        (
            "padded",
            "both tokenizers have the same 23 tokens, but config.json says vocab_size 23 for the model and 32 for the "
            "teacher",
        ),
    ],
)
def test_a_teacher_of_another_vocabulary_is_refused_before_a_model_is_loaded(
    other: str,
    difference: str,
    folder: Path,
    trainer: TrlTrainer,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = request.getfixturevalue(other)
    task, base = TaughtTask(folder, teacher), trainer.base(TinyTask(folder))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    fresh = TrlTrainer()
    with monkeypatch.context() as patched:
        patched.setattr(models, "load_model", refuse)
        for attempt in (
            lambda: fresh.check(task, distill()),
            lambda: fresh.step_cost_bound(task, distill()),
            lambda: fresh.begin(task, distill(), base, 3),
        ):
            with pytest.raises(ValueError) as caught:
                attempt()
            assert str(caught.value) == (
                f"algorithm: distill needs a teacher with the vocabulary of the model, but {difference} ({teacher}); "
                "use a teacher of the same family or another algorithm."
            )
        assert fresh.usable_sources(task, "distill") == ()
        assert fresh.usable_sources(task, "grpo") == ("good",)
        fresh.check(task, grpo())


def test_vocabularies_are_compared_once_for_the_same_files(
    taught: TaughtTask, folder: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = models.load_tokenizer
    from posttrain_gym.inner_trainers.trl import vocabularies

    def load_tokenizer(folder: Path, role: str = "") -> Any:
        read.append(role)
        return original(folder, role)

    monkeypatch.setattr(vocabularies, "load_tokenizer", load_tokenizer)
    fresh = TrlTrainer()
    for _ in range(3):
        fresh.check(taught, distill())
        assert fresh.usable_sources(taught, "distill") == ("good",)
    assert read == ["base checkpoint", "teacher checkpoint"]
    edited = copied(teacher, tmp_path / "edited")
    fresh.check(TaughtTask(folder, edited), distill())
    tokens = json.loads((edited / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["a"], tokens["model"]["vocab"]["b"] = 4, 3
    (edited / "tokenizer.json").write_text(json.dumps(tokens))
    assert fresh.usable_sources(TaughtTask(folder, edited), "distill") == ()  # the same folder, other files


def test_the_environment_masks_a_teacher_of_another_vocabulary(
    taught: TaughtTask, folder: Path, with_a_token_more: Path, trainer: TrlTrainer
) -> None:
    for task, expected in ((taught, True), (TaughtTask(folder, with_a_token_more), False)):
        env: Any = gym.make("PostTrain/Recipe-v0", task=task, trainer=trainer)
        env.reset(seed=0)
        names = env.unwrapped.space.algorithms
        legal = dict(zip(names, env.unwrapped.action_masks()[1 : 1 + len(names)].tolist(), strict=True))
        assert legal["distill"] == expected
        assert legal["sft"] and legal["grpo"]
        if not expected:
            number = 1 + names.index("distill")
            env.step(env.unwrapped.action_space.sample() | {"algorithm": number})
            report = env.unwrapped.search.outcomes[-1].report
            assert report.failure is not None
            assert (report.failure.kind, report.cost.flops) == ("no_data", 0.0)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors", None])
def test_a_teacher_that_is_missing_or_damaged_is_named(
    missing: str | None, folder: Path, teacher: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    if missing is not None:
        copied(teacher, broken)
        (broken / missing).unlink()
    task, fresh = TaughtTask(folder, broken), TrlTrainer()
    with pytest.raises(ValueError, match=rf"^teacher checkpoint: .*{broken.name}"):
        fresh.step_cost_bound(task, distill())
    with pytest.raises(ValueError, match=rf"^teacher checkpoint: .*{broken.name}"):
        fresh.begin(task, distill(), fresh.base(task), 3)
    if missing != "model.safetensors":
        with pytest.raises(ValueError, match=rf"^teacher checkpoint: .*{broken.name}"):
            fresh.usable_sources(task, "distill")
    assert run(fresh, task, grpo(steps=1, num_generations=2))[0].steps == 1  # the other algorithms need none


def test_another_tiny_checkpoint_is_a_teacher_too(trainer: TrlTrainer, folder: Path, tmp_path: Path) -> None:
    task = TaughtTask(folder, write_tiny_checkpoint(tmp_path / "same-shape", seed=1))
    report, checkpoint = run(trainer, task, distill(steps=2))
    assert checkpoint is not None and report.failure is None and report.curves[0]["loss"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_a_round_on_a_real_card(loss: str, precision: str, taught: TaughtTask) -> None:
    card = TrlTrainer(device="cuda", precision=precision)
    weights = trained(card, taught, distill(loss=loss))
    assert {value.device.type for value in weights.values()} == {"cpu"}
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        trained(card, taught, distill(loss=loss))
    assert torch.cuda.memory_allocated() <= 1.05 * before
