"""Adjustments of what the policy is trained for: KL and entropy coefficients, discount, sampling temperature."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adjustments import Adjustment
from .adjust_optimizer import refused_number
from .live import Handler, LiveRound
from .settings import fused_temperatures, samplers
from .snapshots import drop_completions

START_KL = 0.01
"""KL coefficient of a round that had none, when it is raised."""

START_ENTROPY = 0.001
"""Entropy coefficient of a round that had none, when it is raised."""

TEMPERATURES = (0.05, 5.0)
"""Sampling temperatures that a running round may be adjusted to."""

_KL: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "grpo": ("kl_coef", "beta", False),
        "rloo": ("kl_coef", "beta", True),
        "ppo": ("kl_coef", "kl_coef", True),
        "dpo": ("beta", "beta", False),
        "kto": ("beta", "beta", False),
    }
)
"""Algorithm -> recipe field, the trainer's attribute, and whether it is read when completions are sampled.

Otherwise the loss reads it at every step.
"""


class ScaleKL:
    """Multiplies the KL coefficient; of dpo and kto, beta."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where there is no such coefficient, no reference to keep close to, or no change."""
        if live.spec.name not in _KL:
            return f"{live.spec.name} has no KL coefficient"
        name = _KL[live.spec.name][0]
        reason = _refused_factor(live, name, START_KL, adjustment.number)
        if reason is None and name == "kl_coef" and not (live.asked.kl_coef or live.asked.lora_rank):
            return "the round holds no reference model to keep close to; begin it with a kl_coef above 0"
        return reason

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it; completions that were scored with the old one are not used again where that matters."""
        name, attribute, when_sampled = _KL[live.spec.name]
        old = getattr(live.now, name)
        coefficient = _scaled(old, START_KL, adjustment.number)
        setattr(live.trainer, attribute, coefficient)
        if when_sampled or old == 0:  # then the reference has not read them either
            drop_completions(live.trainer)
        live.change(**{name: coefficient})


class ScaleEntropy:
    """Multiplies the entropy coefficient, which the loss reads at every step."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where there is no such coefficient, or no change."""
        if "entropy_coef" not in live.spec.reads:
            return f"{live.spec.name} has no entropy coefficient"
        return _refused_factor(live, "entropy_coef", START_ENTROPY, adjustment.number)

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it."""
        coefficient = _scaled(live.now.entropy_coef, START_ENTROPY, adjustment.number)
        live.trainer.entropy_coef = coefficient
        live.trainer._entropy_bonus_enabled = True  # the library switches the bonus off for good when it begins at 0
        live.change(entropy_coef=coefficient)


class AddGamma:
    """Adds to the discount per token, which is read when completions are scored."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where there is no discount, or no change."""
        if "gamma" not in live.spec.reads:
            return f"{live.spec.name} has no discount"
        if _discount(live, adjustment) == live.now.gamma:
            return f"gamma stays {live.now.gamma:g}; it is kept in [0, 1]"
        return None

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Add it; completions that were scored with the old discount are not used again."""
        gamma = _discount(live, adjustment)
        live.trainer.gamma = gamma
        drop_completions(live.trainer)
        live.change(gamma=gamma)


class ScaleTemperature:
    """Multiplies the temperature of sampling, and of the log-probabilities that the loss is made of."""

    def refusal(self, live: LiveRound, adjustment: Adjustment) -> str | None:
        """Refuse where nothing more is sampled, and temperatures at which sampling says little."""
        if "temperature" not in live.spec.reads:
            return f"{live.spec.name} samples nothing"
        if live.spec.samples_first:
            return f"{live.spec.name} samples all its completions before its first step"
        if adjustment.number == 1:
            return "a factor of 1 changes nothing"
        temperature, (low, high) = live.now.temperature * adjustment.number, TEMPERATURES
        if low <= temperature <= high:
            return None
        return f"temperature would become {temperature:g}, outside [{low:g}, {high:g}]"

    def apply(self, live: LiveRound, adjustment: Adjustment) -> None:
        """Scale it; completions that were sampled at the old temperature are not used again."""
        temperature, trainer = live.now.temperature * adjustment.number, live.trainer
        trainer.temperature = temperature
        for sampler in samplers(trainer):
            sampler.temperature = temperature
        if hasattr(trainer, "generation_kwargs"):  # merged into the configuration at each call
            trainer.generation_kwargs["temperature"] = temperature
        for cell in fused_temperatures(trainer):
            cell.cell_contents = temperature
        drop_completions(trainer)
        live.change(temperature=temperature)


def _refused_factor(live: LiveRound, name: str, start: float, factor: float) -> str | None:
    """Return why a coefficient cannot be multiplied by ``factor``; None when it can."""
    old = getattr(live.now, name)
    if factor == 1:
        return "a factor of 1 changes nothing"
    if old == 0 and factor < 1:
        return f"{name} is 0, so it cannot be lowered"
    return refused_number(name, _scaled(old, start, factor))


def _scaled(old: float, start: float, factor: float) -> float:
    """Return the coefficient times the factor; from 0 it is ``start`` whatever the factor."""
    return old * factor if old else start


def _discount(live: LiveRound, adjustment: Adjustment) -> float:
    return min(1.0, max(0.0, live.now.gamma + adjustment.number))


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "kl_scale": ScaleKL(),
        "entropy_scale": ScaleEntropy(),
        "gamma_add": AddGamma(),
        "temperature_scale": ScaleTemperature(),
    }
)
