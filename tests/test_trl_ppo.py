"""PPO rounds: what their first step computes, what the critic learns, what is counted, what is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain_gym.inner_trainers.base import Checkpoint, Limit
from posttrain_gym.inner_trainers.fault_policy import FaultPolicy
from posttrain_gym.inner_trainers.recipe import Recipe
from posttrain_gym.inner_trainers.testing import TinyTask
from posttrain_gym.inner_trainers.trl.gae import generalised_advantages, token_rewards, whitened
from posttrain_gym.inner_trainers.trl.on_policy import policy_mask
from posttrain_gym.inner_trainers.trl.ppo import PPOConfig, PPOTrainer
from posttrain_gym.inner_trainers.trl.trainer import TrlTrainer
from posttrain_gym.inner_trainers.trl.value import ValueHead, ValueModel
from tests.trl_fixtures import *  # noqa: F403
from tests.trl_rounds import Weights, by_hand, equal, graded, grpo, run, trained

VARIANTS: list[dict[str, Any]] = [
    {},
    {"critic": "none"},
    {"critic": "model", "kl_coef": 0.1},
    {"kl_coef": 0.1, "num_iterations": 2, "gradient_accumulation": 2, "batch_size": 3},
    {"critic": "none", "num_iterations": 3},
    {"lora_rank": 2, "kl_coef": 0.1},
    {"lora_rank": 2, "critic": "model", "num_iterations": 2},
    {"batch_size": 1},
]


def ppo(**changes: Any) -> Recipe:
    return grpo(**{"algorithm": "ppo", **changes})


def sampled_batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that fills with the batches that rounds sample, advantages included."""
    batches: list[dict[str, torch.Tensor]] = []
    original = PPOTrainer._with_advantages

    def noted(self: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = original(self, dict(batch))
        batches.append({**found, "scores": self._scores})
        return found

    monkeypatch.setattr(PPOTrainer, "_with_advantages", noted)
    return batches


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_round_trains_within_its_bound_and_leaves_no_critic(
    changes: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    recipe = ppo(**changes)
    report, checkpoint = run(trainer, task, recipe)
    assert report.failure is None, report.failure
    assert checkpoint is not None
    assert checkpoint.weights.keys() == trainer.base(task).weights.keys()
    assert not equal(checkpoint.weights, trainer.base(task).weights)
    assert equal(checkpoint.weights, trained(trainer, task, recipe))
    bound = trainer.step_cost_bound(task, recipe).times(report.steps)
    cost = report.training_cost
    for unit in ("trained_tokens", "generated_tokens", "scored_tokens", "flops"):
        assert getattr(cost, unit) <= getattr(bound, unit)
    for row in report.curves:
        assert {"reward", "entropy", "advantage_std", "returns_mean", "clip_ratio/region_mean"} <= row.keys()
        assert "groups_without_spread" not in row
        assert ("value_loss" in row) == (recipe.critic != "none")
        assert ("kl" in row) == (recipe.kl_coef > 0)


def test_every_token_is_counted(trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = sampled_batches(monkeypatch)
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({"critic": "none"}, 0, 1),
        ({}, 1, 1),  # log-probabilities and the head's values in one pass
        ({"kl_coef": 0.1}, 2, 1),
        ({"critic": "model"}, 1, 2),
        ({"critic": "model", "kl_coef": 0.1, "num_iterations": 2}, 3, 2),
    ]
    for changes, own_passes, models in cases:
        batches.clear()
        report, _ = run(trainer, task, ppo(**changes))
        uses = changes.get("num_iterations", 1)
        prompts = sum(int(batch["prompt_mask"].sum()) for batch in batches)
        completions = sum(int(batch["completion_mask"].sum()) for batch in batches)
        assert len(batches) == 4 // uses and prompts == len(batches) * 8 * 4
        cost = report.training_cost
        assert cost.generated_tokens == completions
        assert cost.scored_tokens == prompts + own_passes * (prompts + completions)
        assert cost.trained_tokens == models * uses * (prompts + completions)
        assert report.supervised_tokens == uses * completions


@pytest.mark.parametrize("critic", ["head", "model"])
def test_the_first_step_is_the_formula(
    critic: str, trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient norm of a step, against a plain forward pass with the losses written out."""
    batches = sampled_batches(monkeypatch)
    recipe = ppo(critic=critic, vf_coef=0.7, kl_coef=0.3, gamma=0.9, gae_lambda=0.8, entropy_coef=0.05, temperature=0.8)
    report, _ = run(trainer, task, Recipe.from_dict({**recipe.to_dict(), "steps": 1}))
    (batch,) = batches
    model = trainer._load(task).model.with_weights(trainer.base(task).weights)
    mask = policy_mask(batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = mask.shape[1]
    outputs = model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
    log_softmax = torch.log_softmax(outputs.logits[:, -width - 1 : -1] / 0.8, dim=-1)
    log_probabilities = log_softmax.gather(2, batch["completion_ids"][..., None])[..., 0]
    head = ValueHead(32)
    values = head(outputs.hidden_states[-1][:, -width - 1 : -1])
    # nothing has been updated: values are 0, the divergence is 0 and the ratio is 1
    advantages = generalised_advantages(token_rewards(batch["scores"], mask), torch.zeros(8, width), mask, 0.9, 0.8)
    torch.testing.assert_close(batch["returns"], advantages, atol=1e-6, rtol=0)
    torch.testing.assert_close(batch["advantages"], whitened(advantages, mask), atol=1e-4, rtol=0)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / mask.sum()

    ratio = torch.exp(log_probabilities - log_probabilities.detach())
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    value_loss = mean(0.5 * (values - advantages) ** 2)
    loss = -mean(ratio * whitened(advantages, mask)) + 0.7 * value_loss - 0.05 * mean(entropy)
    loss.backward()
    squares = sum(
        float((parameter.grad**2).sum())
        for parameter in [*model.parameters(), *head.parameters()]
        if parameter.grad is not None
    )
    (row,) = report.curves
    assert row["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert row["value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
    assert row["grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert row["kl"] == pytest.approx(0.0, abs=1e-6)
    assert row["reward"] == pytest.approx(float(batch["scores"].mean()), abs=1e-6)
    assert row["advantage_std"] == pytest.approx(float(advantages[mask > 0].std(correction=0)), rel=1e-4)
    assert row["returns_mean"] == pytest.approx(float(advantages[mask > 0].mean()), rel=1e-4)
    assert row["explained_variance"] == pytest.approx(0.0, abs=1e-5)


def test_accumulated_passes_make_the_same_step(trainer: TrlTrainer, task: TinyTask) -> None:
    """The loss is a mean over all tokens of a step, however many passes they are cut into."""
    whole, _ = run(trainer, task, ppo(steps=1, entropy_coef=0.0))
    parts, _ = run(trainer, task, ppo(steps=1, batch_size=2, gradient_accumulation=4))
    for name in ("loss", "value_loss", "grad_norm"):
        assert parts.curves[0][name] == pytest.approx(whole.curves[0][name], rel=1e-4, abs=1e-6)


def test_without_critic_it_is_each_completions_reward(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    run(trainer, task, ppo(critic="none", gamma=1.0, gae_lambda=1.0))
    for batch in batches:
        mask = policy_mask(batch)
        expected = whitened(batch["scores"][:, None] * mask, mask)
        assert torch.equal(batch["advantages"], expected)
        assert "returns" not in batch


def test_the_divergence_lowers_the_rewards_and_stays_out_of_the_loss(
    trainer: TrlTrainer, task: TinyTask, sft_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference other than the policy gives each token the reward −c·(log π − log π_ref), the score at the last."""
    start = Checkpoint("sft", sft_weights, 1)
    batches = sampled_batches(monkeypatch)
    session = trainer.begin(task, ppo(critic="none", kl_coef=0.5, gamma=0.0, steps=2), start, 3)
    live = session._trainer
    reference = trainer._load(task).model.with_weights(trainer.base(task).weights).eval()
    live.keep_close_to(reference, 0.5)
    assert live.beta == 0.0
    session.advance(1)
    (batch,) = batches
    session.close()
    mask = policy_mask(batch)
    width = mask.shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    found = []
    for weights in (sft_weights, trainer.base(task).weights):
        model = trainer._load(task).model.with_weights(weights)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        found.append(torch.log_softmax(logits, dim=-1).gather(2, batch["completion_ids"][..., None])[..., 0])
    divergence = (found[0] - found[1]) * mask
    assert float(divergence.abs().max()) > 0.1
    rewards = token_rewards(batch["scores"], mask) - 0.5 * divergence  # with γ = 0 they are the advantages
    torch.testing.assert_close(batch["advantages"], whitened(rewards, mask), atol=1e-4, rtol=0)


def test_a_completion_cut_at_the_limit_ends_there(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    report, _ = run(trainer, task, ppo(gae_lambda=0.0, steps=6))
    batch = batches[-1]
    cut = (batch["completion_mask"].sum(dim=1) == 4) & (batch["completion_ids"][:, -1] != 1)  # 1 is the end token
    assert bool(cut.any()) and report.curves[-1]["completions/clipped_ratio"] > 0
    assert float(batch["old_values"].abs().max()) > 0
    # λ = 0: the return of a token is its reward and the next value, and after the cut there is none
    torch.testing.assert_close(batch["returns"][cut, -1], batch["scores"][cut], atol=1e-6, rtol=0)
    torch.testing.assert_close(batch["returns"][cut, :-1], batch["old_values"][cut, 1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"critic": "model"}, {"lora_rank": 2}, {"lora_rank": 2, "critic": "model"}])
def test_the_critic_learns(changes: dict[str, Any], trainer: TrlTrainer, folder: Any) -> None:
    always = TinyTask(folder, verifier=lambda row, text: 1.0)
    recipe = ppo(steps=16, gae_lambda=1.0, learning_rate=1e-2, clip_range_vf=10.0, vf_coef=1.0, **changes)
    report, _ = run(trainer, always, recipe)
    losses = [row["value_loss"] for row in report.curves]
    assert losses[0] == pytest.approx(0.5, abs=1e-6)  # values are 0 and every return is 1
    assert losses[-1] < 0.05


def test_one_optimiser_one_clip_and_no_stale_gradient(trainer: TrlTrainer, task: TinyTask) -> None:
    variants: list[dict[str, Any]] = [{}, {"critic": "model"}, {"critic": "model", "lora_rank": 2}]
    for changes in variants:
        recipe = ppo(max_grad_norm=1e-3, weight_decay=0.1, schedule="linear", **changes)
        session = trainer.begin(task, recipe, trainer.base(task), 3)
        session.advance(2)
        live = session._trainer
        groups = live.optimizer.optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        both = [*live.model.parameters(), *live.critic.parameters()]
        wanted = {id(parameter) for parameter in both if parameter.requires_grad}
        assert held == wanted and sum(len(group["params"]) for group in groups) == len(wanted)
        assert {group["lr"] for group in groups} == {recipe.learning_rate_at(3)}
        decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        decays = {name: decay[id(p)] for name, p in live.critic.named_parameters() if p.requires_grad}
        assert decays.pop("bias" if "bias" in decays else "head.bias") == 0.0
        assert set(decays.values()) == ({0.1, 0.0} if changes == {"critic": "model"} else {0.1})
        gradients = [p.grad for p in live.critic.parameters() if p.grad is not None]
        norm = sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5
        assert 0 < norm <= 1e-3 * 1.001  # one step's, clipped together with the policy's
        assert isinstance(live.critic, ValueHead if "critic" not in changes else ValueModel)
        session.close()


def test_a_tools_tokens_are_not_learnt(trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a tool carry no gradient, no value loss and no supervision: other advantages there change nothing."""
    original = PPOTrainer._generate
    bump = [0.0]

    def with_a_tool(self: Any, prompts: Any) -> Any:
        ids, completions, _, *rest = original(self, prompts)
        return (ids, completions, [[1, 0, 1, 1][: len(c)] for c in completions], *rest)

    original_loss = PPOTrainer._compute_loss

    def bumped(self: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outside = 1 - inputs["tool_mask"]
        assert bool(outside.any())
        changed = {
            name: inputs[name] + bump[0] * outside if name in ("advantages", "returns", "old_values") else inputs[name]
            for name in inputs
        }
        return original_loss(self, model, changed)

    monkeypatch.setattr(PPOTrainer, "_generate", with_a_tool)
    monkeypatch.setattr(PPOTrainer, "_compute_loss", bumped)
    weights = []
    for bump[0] in (0.0, 5.0):
        report, checkpoint = run(trainer, task, ppo())
        assert checkpoint is not None
        weights.append(checkpoint.weights)
        hidden = report.training_cost.generated_tokens - report.supervised_tokens
        assert 24 <= hidden <= 32  # the second token of nearly every completion
    assert equal(*weights)
    assert not equal(weights[0], trainer.base(task).weights)


def test_knobs_that_change_between_steps_take_effect_on_the_next_batch(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    session = trainer.begin(task, ppo(critic="none", gamma=1.0, gae_lambda=1.0), trainer.base(task), 3)
    session.advance(1)
    session._trainer.gamma = 0.5
    session.advance(1)
    session._trainer.gae_lambda = 0.0
    session.advance(1)
    session.close()
    for batch, gamma, gae_lambda in zip(batches, (1.0, 0.5, 0.5), (1.0, 1.0, 0.0), strict=True):
        mask = policy_mask(batch)
        plain = generalised_advantages(
            token_rewards(batch["scores"], mask), torch.zeros(mask.shape), mask, gamma, gae_lambda
        )
        assert torch.equal(batch["advantages"], whitened(plain, mask))


@pytest.mark.parametrize(
    "change",
    [
        {"num_iterations": 2},
        {"entropy_coef": 0.5},
        {"gae_lambda": 0.5},
        {"gamma": 0.5},
        {"kl_coef": 0.5},
        {"vf_coef": 5.0},
        {"critic": "none"},
        {"critic": "model"},
        {"temperature": 0.5},
        {"clip_range": 1e-6},
        {"clip_range_vf": 1e-6},
    ],
    ids=str,
)
def test_every_field_that_it_reads_changes_the_round(
    change: dict[str, Any], trainer: TrlTrainer, task: TinyTask
) -> None:
    # nothing is clipped before the first update that uses a batch again
    plain = ppo(num_iterations=4) if change.keys() & {"clip_range", "clip_range_vf"} else ppo()
    other = Recipe.from_dict({**plain.to_dict(), **change})
    assert not equal(trained(trainer, task, other), trained(trainer, task, plain))


def test_a_tight_clip_range_shows_in_the_curve(trainer: TrlTrainer, task: TinyTask) -> None:
    report, _ = run(trainer, task, ppo(num_iterations=4, clip_range=1e-6))
    clipped = [row["clip_ratio/region_mean"] for row in report.curves]
    assert clipped[0] == 0.0 and min(clipped[1:]) > 0.2


def test_one_completion_per_prompt_whatever_the_batch(
    trainer: TrlTrainer, task: TinyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    run(trainer, task, ppo(batch_size=5, gradient_accumulation=3, steps=2, num_generations=4))
    assert [len({tuple(row) for row in batch["prompt_ids"].tolist()}) for batch in batches] == [15, 15]
    config = by_hand("grpo")
    assert config.num_generations == 4
    ours = PPOConfig(
        output_dir=config.output_dir,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
    )
    assert (ours.num_generations, ours.per_device_train_batch_size, ours.generation_batch_size) == (1, 3, 6)
    assert ours.steps_per_generation == 2


def test_a_limit_cuts_the_round(trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = ppo(critic="model", kl_coef=0.1)
    bound = trainer.step_cost_bound(task, recipe).in_unit("train_tokens")
    report, checkpoint = run(trainer, task, recipe, limit=Limit("train_tokens", 2.5 * bound))
    assert checkpoint is not None
    assert (report.ended, report.steps) == ("budget", 2)
    assert report.training_cost.in_unit("train_tokens") <= 2.5 * bound


@pytest.mark.parametrize(("rewards", "flagged"), [((0.0, 0.0), True), ((1.0, 1.0), True), ((0.0, 1.0), False)])
def test_equal_rewards_are_no_signal(
    rewards: tuple[float, float], flagged: bool, trainer: TrlTrainer, folder: Any
) -> None:
    calls = iter([rewards[0]] * 31 + [rewards[1]])  # 4 steps of 8: only the last completion differs, if any
    report, _ = run(trainer, TinyTask(folder, verifier=lambda row, text: next(calls)), ppo())
    assert (report.failure is not None and report.failure.kind == "no_signal") is flagged


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_the_divergence_is_measured_from_the_weights_the_round_started_with(
    algorithm: str, rank: int, trainer: TrlTrainer, task: TinyTask, sft_weights: Weights
) -> None:
    start = Checkpoint("sft", sft_weights, 1)  # far from the model's folder
    recipe = ppo(algorithm=algorithm, lora_rank=rank, kl_coef=0.1)
    report, checkpoint = run(trainer, task, recipe, start)
    assert checkpoint is not None
    assert report.curves[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(report.curves[-1]["kl"]) > 1e-5
    _, free = run(trainer, task, Recipe.from_dict({**recipe.to_dict(), "kl_coef": 0.0}), start)
    assert free is not None and not equal(checkpoint.weights, free.weights)


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_a_verifier_that_raises_ends_the_round_and_its_rollout_is_charged(
    algorithm: str, trainer: TrlTrainer, folder: Any
) -> None:
    def raises(row: Any, text: str) -> float:
        raise KeyError("answer")

    report, checkpoint = run(trainer, TinyTask(folder, verifier=raises), ppo(algorithm=algorithm))
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("environment", "reward_function", 1)
    assert report.training_cost.trained_tokens == 0
    assert report.training_cost.generated_tokens > 8 and report.training_cost.scored_tokens >= 8 * 4


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_stepping_one_at_a_time_is_the_same_round(algorithm: str, trainer: TrlTrainer, task: TinyTask) -> None:
    recipe = ppo(algorithm=algorithm, num_iterations=2)
    session = trainer.begin(task, recipe, trainer.base(task), 3)
    while not session.done:
        session.advance(1)
        torch.manual_seed(session.step)
    _, checkpoint = session.result()
    assert checkpoint is not None
    assert equal(checkpoint.weights, trained(trainer, task, recipe))


def test_nothing_of_a_round_stays_in_memory(trainer: TrlTrainer, task: TinyTask, live_models: Any) -> None:
    variants: list[dict[str, Any]] = [{"kl_coef": 0.1}, {"critic": "model"}]
    for changes in [*variants, {"critic": "model", "lora_rank": 2, "kl_coef": 0.1}]:
        run(trainer, task, ppo(**changes))
        assert live_models() == 0


def test_a_value_that_explodes_ends_the_round(trainer: TrlTrainer, folder: Any) -> None:
    huge = TinyTask(folder, verifier=lambda row, text: 1e4 * graded(row, text))
    report, checkpoint = run(trainer, huge, ppo())
    assert checkpoint is None and report.failure is not None
    assert (report.failure.cause, report.failure.kind, report.failure.step) == ("hyperparameter", "diverged", 1)


@pytest.mark.parametrize("critic", ["head", "model"])
@pytest.mark.parametrize("uses", [1, 2])
def test_a_retry_puts_the_critic_back_and_samples_anew(
    critic: str, uses: int, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sampled_batches(monkeypatch)
    critics: list[Weights] = []
    original = PPOTrainer._with_advantages

    def critic_noted(self: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        critics.append({name: value.clone() for name, value in self.critic.state_dict().items()})
        return original(self, batch)

    monkeypatch.setattr(PPOTrainer, "_with_advantages", critic_noted)
    calls = [0]

    def once_huge(row: Any, text: str) -> float:
        calls[0] += 1
        return 1e6 if calls[0] == 17 else graded(row, text)  # the first completion of the third batch

    trainer = TrlTrainer(fault_policy=FaultPolicy(responses={"diverged": "retry"}))
    recipe = ppo(critic=critic, num_iterations=uses, steps=8)
    report, checkpoint = run(trainer, TinyTask(folder, verifier=once_huge), recipe)
    assert report.failure is None and checkpoint is not None
    assert (report.steps, [fault.step for fault in report.rescued]) == (8, [2 * uses + 1])
    assert float(batches[2]["returns"].max()) > 1e5 > 1e2 > float(batches[3]["returns"].max())
    if uses == 1:  # step 3 tells that the update of step 2 was bad: step 4 begins as step 2 did
        assert len(batches) == 8
        assert equal(critics[3], critics[1])
        assert not equal(critics[3], critics[2]) and not equal(critics[4], critics[3])
    else:  # steps 1-2, 3-4, 5 (ruined), 6 with a batch of its own, 7-8
        assert len(batches) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("critic", ["head", "model", "none"])
def test_it_runs_in_half_precision(critic: str, task: TinyTask) -> None:
    report, checkpoint = run(TrlTrainer(device="cuda", precision="bf16"), task, ppo(critic=critic, kl_coef=0.1))
    assert report.failure is None and checkpoint is not None
