"""Rounds that are adjusted while they run, and watchers of what their optimiser, loss and sampler really used."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.generation.logits_process import TemperatureLogitsWarper

from posttrain_gym.inner_trainers.adjustments import Adjustment
from posttrain_gym.inner_trainers.base import Checkpoint, RoundReport
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.tasks.base import Source
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.gae import generalised_advantages, token_rewards
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from tests.trl_rounds import Weights, graded

Watch = Callable[[Any], list[float]]
"""Takes a trainer and returns a list that grows by what each step used."""

_PPO = "posttrain_gym.inner_trainers.trl.ppo"

SOURCES = ("ash", "birch", "cedar", "dogwood")


class FourSources(TinyTask):
    """The tiny task with four sources of rows of every kind, and a teacher."""

    name = "four"

    def __init__(self, folder: Path, teacher: Path, verifier: Callable[[Any, str], float] = graded) -> None:
        super().__init__(folder, verifier=verifier)
        self._teacher = teacher

    def teacher_checkpoint(self) -> Path:
        return self._teacher

    def sources(self) -> list[Source]:
        plain = super().sources()[1]
        quarters = []
        for number, name in enumerate(SOURCES):
            rows = plain.rows["demonstrations"][number::4]
            kinds = {
                "demonstrations": rows,
                "prompts": plain.rows["prompts"][number::4],
                "preferences": [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "hh"} for r in rows],
                "text": [{"text": r["prompt"] + r["completion"]} for r in rows],
            }
            quarters.append(Source(name, kinds, plain.verifier))
        return quarters


def recipe(algorithm: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "mix": dict.fromkeys(SOURCES, 0.25),
        "steps": 4,
        "batch_size": 8,
        "num_generations": 4,
        "learning_rate": 3e-3,
        "min_reward": 0.0,
    }
    return Recipe(algorithm, **{**settings, **changes})


def adjusted(
    trainer: TrlTrainer,
    task: TinyTask,
    asked: Recipe,
    *adjustments: tuple[int, Adjustment],
    watch: Watch | None = None,
    start: Checkpoint | None = None,
    seed: int = 3,
) -> tuple[RoundReport, Weights, list[float]]:
    """Run a round with each adjustment applied after so many steps; return what its steps used too."""
    session = trainer.begin(task, asked, trainer.base(task) if start is None else start, seed)
    used = [] if watch is None else watch(session._trainer)
    try:
        for after, adjustment in adjustments:
            if after > session.step:
                session.advance(after - session.step)
            session.apply(adjustment)
        session.advance()
        report, checkpoint = session.result()
    finally:
        session.close()
    assert report.failure is None, report.failure
    assert checkpoint is not None
    weights: Weights = checkpoint.weights
    return report, weights, used


class _BeforeUpdate(TrainerCallback):  # type: ignore[misc]
    def __init__(self, used: list[float], read: Callable[[Any], float]) -> None:
        self._used, self._read = used, read

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._used.append(self._read(kwargs["optimizer"]))


def before_updates(read: Callable[[Any], float]) -> Watch:
    """Return the watcher that reads the optimiser right before each of its steps."""

    def watch(trainer: Any) -> list[float]:
        used: list[float] = []
        trainer.add_callback(_BeforeUpdate(used, read))
        return used

    return watch


def learning_rate(optimizer: Any) -> float:
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    return float(rate)


def gradient_norm(optimizer: Any) -> float:
    """The norm that the gradient has when the optimiser uses it: after clipping."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))


def _sum(parameters: Iterable[torch.Tensor]) -> float:
    """A number that changes when any entry does."""
    return float(sum((p.detach().double() * torch.arange(1, p.numel() + 1).view(p.shape)).sum() for p in parameters))


def weight_sums(trainer: Any) -> list[float]:
    """A number that tells the trained weights apart, before each update."""
    return before_updates(lambda optimizer: _sum(p for group in optimizer.param_groups for p in group["params"]))(
        trainer
    )


def projection_sums(trainer: Any) -> list[float]:
    """Two numbers before each update: one of the adapters' down-projections, one of their up-projections."""
    used: list[float] = []

    def of(side: str) -> float:
        return _sum(p for name, p in trainer.model.named_parameters() if f"lora_{side}" in name)

    def read(optimizer: Any) -> float:
        used.append(of("A"))
        return of("B")

    trainer.add_callback(_BeforeUpdate(used, read))
    return used


def losses_at(
    trainer: Any, attribute: str, values: tuple[float, ...], judge: Callable[..., float], needs: str | None = None
) -> list[float]:
    """Let each pass also compute its loss as if the attribute had other values; ``judge`` says what it used.

    Where the batch lacks what the attribute ``needs``, it was not used: 0.
    """
    used: list[float] = []
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(model, inputs, *args, **kwargs)
        if needs is not None and inputs.get(needs) is None:
            used.append(0.0)
            return loss
        held, meter = getattr(trainer, attribute), copy.deepcopy(trainer.meter)
        metrics = copy.deepcopy(trainer._metrics)
        others = []
        with torch.no_grad():
            for value in values:
                setattr(trainer, attribute, value)
                others.append(float(original(model, inputs, *args, **kwargs)))
        setattr(trainer, attribute, held)
        vars(trainer.meter).update(vars(meter))
        trainer._metrics = metrics
        used.append(judge(float(loss.detach()), *others))
        return loss

    trainer.compute_loss = compute_loss
    return used


def weight_of(attribute: str, needs: str | None = None) -> Watch:
    """Return the watcher of a coefficient in which the loss is affine, recovered from the loss itself.

    It is not known, NaN, where the loss does not depend on it.
    """

    def judge(loss: float, at_zero: float, at_one: float) -> float:
        return math.nan if at_one == at_zero else (loss - at_zero) / (at_one - at_zero)

    def watch(trainer: Any) -> list[float]:
        return losses_at(trainer, attribute, (0.0, 1.0), judge, needs)

    return watch


grpo_kl = weight_of("beta", needs="ref_per_token_logps")
"""Watcher of the KL coefficient in GRPO's loss, not known in the first step, where there is no divergence."""


def one_of(attribute: str, *values: float) -> Watch:
    """Return the watcher of a setting that has one of some values: the one that gives the loss that was used."""

    def judge(loss: float, *others: float) -> float:
        return values[others.index(loss)] if others.count(loss) == 1 else math.nan

    def watch(trainer: Any) -> list[float]:
        return losses_at(trainer, attribute, values, judge)

    return watch


# What a step trains on ------------------------------------------------------------------------------------------------


def texts_of(trainer: Any, rows: torch.Tensor) -> list[str]:
    """Return rows of token ids as text, without padding and end tokens."""
    return [trainer.processing_class.decode(row, skip_special_tokens=True) for row in rows]


def trained_texts(judge: Callable[[list[str]], float]) -> Watch:
    """Return the watcher of the rows in each pass's loss; of sampled ones only the prompts."""

    def watch(trainer: Any) -> list[float]:
        used: list[float] = []
        original = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = inputs["prompt_ids"] if "prompt_ids" in inputs else inputs["input_ids"]
            used.append(judge(texts_of(trainer, rows)))
            return original(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        return used

    return watch


rows_in_loss = trained_texts(len)
"""Watcher of the number of rows in each pass's loss."""

completions_per_prompt = trained_texts(lambda texts: len(texts) / len(set(texts)))
"""Watcher of how many completions of each prompt are in the loss."""


def rows_of(slot: int) -> Watch:
    """Return the watcher of how many rows of one of the four sources are in the loss."""
    prompts = [f"{a}{b}{c}=" for a in "abcdefgh" for b in "abcd" for c in "01"]
    return trained_texts(lambda texts: sum(text[:4] in prompts[slot::4] for text in texts))


def repeated_rows(trainer: Any) -> list[float]:
    """How many rows of each step an earlier step trained on."""
    seen: set[str] = set()

    def judge(texts: list[str]) -> float:
        again = sum(text in seen for text in texts)
        seen.update(texts)
        return again

    return trained_texts(judge)(trainer)


# What rewards and samples are made of ---------------------------------------------------------------------------------


def rloo_kl(trainer: Any) -> list[float]:
    """The KL coefficient in RLOO's rewards, recovered from the advantages of each sampled batch.

    Not known in the first step, where there is no divergence.
    """
    used: list[float] = []
    read: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    probabilities, rewards = trainer._get_per_token_logps_and_entropies, trainer._calculate_rewards
    original = trainer._generate_and_score_completions

    def noting_probabilities(*args: Any, **kwargs: Any) -> Any:
        result = probabilities(*args, **kwargs)
        read.append(result[0].detach())
        return result

    def noting_rewards(*args: Any, **kwargs: Any) -> Any:
        scores.append(rewards(*args, **kwargs))
        return scores[-1]

    def left_out(values: torch.Tensor) -> torch.Tensor:
        groups = values.view(-1, trainer.num_generations)
        others = (groups.sum(dim=1, keepdim=True) - groups) / int(trainer.num_generations - 1)
        return (groups - others).flatten()

    def sample(inputs: Any) -> Any:
        read.clear()
        batch = original(inputs)
        plain = left_out(scores[-1][:, 0])
        if len(read) < 2:  # no reference was read
            used.append(0.0 if torch.allclose(batch["advantages"], plain, atol=1e-6) else math.nan)
            return batch
        divergence = left_out(((read[0] - read[1]) * batch["completion_mask"]).sum(-1))
        size = float(divergence @ divergence)
        used.append(float((plain - batch["advantages"]) @ divergence) / size if size else math.nan)
        return batch

    trainer._get_per_token_logps_and_entropies = noting_probabilities
    trainer._calculate_rewards, trainer._generate_and_score_completions = noting_rewards, sample
    return used


def ppo_kl(monkeypatch: Any) -> Watch:
    """Return the watcher of the KL coefficient in PPO's rewards, recovered from what its advantages are made of.

    Not known where there is no divergence, or where none was read.
    """

    def watch(trainer: Any) -> list[float]:
        used: list[float] = []
        divergences: list[torch.Tensor] = []
        values = trainer._old_values_and_divergence

        def noting_divergence(batch: Any) -> Any:
            result = values(batch)
            divergences.append(result[1])
            return result

        def noting_rewards(rewards: torch.Tensor, values: Any, mask: torch.Tensor, *args: Any) -> Any:
            divergence = (divergences[-1] * mask).flatten()
            penalty = (token_rewards(trainer._scores, mask) - rewards).flatten()
            size = float(divergence @ divergence)
            used.append(float(penalty @ divergence) / size if size else math.nan)
            return generalised_advantages(rewards, values, mask, *args)

        trainer._old_values_and_divergence = noting_divergence
        monkeypatch.setattr(f"{_PPO}.generalised_advantages", noting_rewards)
        return used

    return watch


def ppo_gamma(monkeypatch: Any) -> Watch:
    """Return the watcher of the discount with which PPO's advantages are computed."""

    def watch(trainer: Any) -> list[float]:
        used: list[float] = []

        def noting(rewards: Any, values: Any, mask: Any, gamma: float, gae_lambda: float) -> Any:
            used.append(gamma)
            return generalised_advantages(rewards, values, mask, gamma, gae_lambda)

        monkeypatch.setattr(f"{_PPO}.generalised_advantages", noting)
        return used

    return watch


def sampling_temperature(monkeypatch: Any) -> Watch:
    """Return the watcher of the temperature that logits are divided by before each token is drawn."""

    def watch(trainer: Any) -> list[float]:
        drawn: list[float] = []
        used: list[float] = []
        call, original = TemperatureLogitsWarper.__call__, trainer._generate_and_score_completions

        def noting(self: Any, *args: Any) -> Any:
            drawn.append(self.temperature)
            return call(self, *args)

        def sample(inputs: Any) -> Any:
            drawn.clear()
            batch = original(inputs)
            used.append(drawn[0] if drawn and len(set(drawn)) == 1 else 1.0 if not drawn else math.nan)
            return batch

        monkeypatch.setattr(TemperatureLogitsWarper, "__call__", noting)
        trainer._generate_and_score_completions = sample
        return used

    return watch


def loss_temperature(*values: float, reference: bool = False) -> Watch:
    """Return the watcher of the temperature in the log-probabilities that a group-sampling loss is made of.

    Args:
        values: what it can be.
        reference: whether to look at those of the reference model instead.
    """

    def watch(trainer: Any) -> list[float]:
        used: list[float] = []
        original = trainer._get_per_token_logps_and_entropies

        def noting(model: Any, input_ids: Any, attention_mask: Any, kept: int, *args: Any, **kwargs: Any) -> Any:
            result = original(model, input_ids, attention_mask, kept, *args, **kwargs)
            if (model is trainer.ref_model) if reference else torch.is_grad_enabled():
                with torch.no_grad():
                    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -kept - 1 : -1]
                tokens = input_ids[:, -kept:, None]
                mask = attention_mask[:, -kept:]

                def distance(value: float) -> float:
                    expected = torch.log_softmax(logits / value, -1).gather(-1, tokens)[..., 0]
                    return float(((expected - result[0].detach()) * mask).abs().max())

                best = min(values, key=distance)
                used.append(best if distance(best) < 1e-5 else math.nan)
            return result

        trainer._get_per_token_logps_and_entropies = noting
        return used

    return watch
