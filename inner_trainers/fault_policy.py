"""What a round does about faults, and where they begin: the thresholds and responses of `FaultPolicy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .fault_kinds import FAULTS, RESPONSES
from .messages import did_you_mean, require_integer, require_number

RETRY_FACTOR = 0.5
"""What the learning rate of every later step is multiplied by when a round is retried."""


@dataclass(frozen=True)
class FaultPolicy:
    """Thresholds of faults, and the response to each kind.

    - ``"stop"``: the round fails with the fault's label and makes no checkpoint.
    - ``"rollback"``: the round ends with the last good weights, those before the last optimiser step whose loss was
      fine. When these are the weights it started from, it fails as with ``"stop"``.
    - ``"retry"``: the last good weights are put back, the optimiser's state is cleared, the learning rate of every
      later step is halved, and the round goes on with the steps that are left. All steps are charged.

    A fault that has ended training as an exception cannot be retried, whatever its kind: ``after_retries`` decides.

    Attributes:
        responses: kind of fault -> response; ``"stop"`` for kinds that are not listed.
        max_retries: retries of one round, in [0, 100].
        after_retries: ``"stop"`` or ``"rollback"``, for a fault that comes when the retries are used up.
        explosion_factor: a supervised loss above this many times the larger of its first value and ln(vocabulary) has
            exploded, in (1, 1e6].
        exploded_policy_loss: a policy-gradient loss beyond this magnitude has exploded, in (0, 1e12]; its ordinary
            size is below 10.
        max_kl: largest KL divergence per token to the start, in nats; None for any. Policy-gradient algorithms report
            it when ``kl_coef`` is above 0. A useful policy stays well below 1; at 10 it is another model.
        no_signal_steps: steps without any difference in reward, counted from the first, after which a round fails;
            None for the whole round.
        max_memory_bytes: most memory in use, of the CUDA device that trains or else resident in the process; None for
            any. Seen between forward passes, so it should leave room for one.
        max_round_seconds: longest training of one round, in seconds; None for any.
        max_evaluation_seconds: longest evaluation, in seconds; None for any.
        max_scoring_seconds: longest that the benchmark's scorer may take for one evaluation, in seconds, sampling left
            out; None for any.
        grace_seconds: how long code that was interrupted at a time limit may take to end, in [0, 3600].
    """

    responses: Mapping[str, str] = field(default_factory=dict)
    max_retries: int = 2
    after_retries: str = "stop"
    explosion_factor: float = 10.0
    exploded_policy_loss: float = 1e3
    max_kl: float | None = 10.0
    no_signal_steps: int | None = None
    max_memory_bytes: int | None = None
    max_round_seconds: float | None = None
    max_evaluation_seconds: float | None = None
    max_scoring_seconds: float | None = 600.0
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: an unknown kind, a response that does not fit its kind, or a threshold outside its range.
        """
        put = object.__setattr__
        put(self, "responses", MappingProxyType(_checked_responses(self.responses)))
        put(self, "max_retries", require_integer("max_retries", self.max_retries, low=0, high=100))
        allowed = ("stop", "rollback")
        if self.after_retries not in allowed:
            raise ValueError(
                f"after_retries: unknown {self.after_retries!r}.{did_you_mean(str(self.after_retries), allowed)}"
            )
        for name, high, low in (("explosion_factor", 1e6, 1.0), ("exploded_policy_loss", 1e12, 0.0)):
            put(self, name, require_number(name, getattr(self, name), low=low, high=high, low_open=True))
        for name in ("max_kl", "max_round_seconds", "max_evaluation_seconds", "max_scoring_seconds"):
            if getattr(self, name) is not None:
                put(self, name, require_number(name, getattr(self, name), low=0, high=1e9, low_open=True))
        for name, most in (("no_signal_steps", 100_000), ("max_memory_bytes", 2**63)):
            if getattr(self, name) is not None:
                put(self, name, require_integer(name, getattr(self, name), low=1, high=most))
        put(self, "grace_seconds", require_number("grace_seconds", self.grace_seconds, low=0, high=3600))

    @property
    def keeps_weights(self) -> bool:
        """Whether some response needs the last good weights."""
        return any(response != "stop" for response in self.responses.values())

    def response(self, kind: str, retries: int, unwound: bool) -> str:
        """Return the response to one fault.

        Args:
            kind: a key of `FAULTS`.
            retries: how often the round was retried already.
            unwound: whether training has ended, so that it cannot go on.
        """
        asked = self.responses.get(kind, "stop")
        return self.after_retries if asked == "retry" and (unwound or retries >= self.max_retries) else asked

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; `from_dict` reads them back to an equal policy."""
        data = {f.name: getattr(self, f.name) for f in fields(self)} | {"responses": dict(self.responses)}
        if self.max_scoring_seconds == FaultPolicy.max_scoring_seconds:
            del data["max_scoring_seconds"]  # as journals of before there was one have it
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FaultPolicy:
        """Build a policy from plain data.

        Raises:
            ValueError: an unknown key, or a value outside its range.
        """
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"fault policy: unknown key {key!r}.{did_you_mean(str(key), known)}")
        return cls(**data)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FaultPolicy.from_dict, (self.to_dict(),))  # a mapping proxy cannot be pickled

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, repr(value)) for name, value in self.to_dict().items())))


def _checked_responses(responses: object) -> dict[str, str]:
    if not isinstance(responses, Mapping):
        raise ValueError(
            f"responses: expected kinds of faults with responses, for example {{'diverged': 'rollback'}}, "
            f"got {responses!r}."
        )
    for kind, response in responses.items():
        if kind not in FAULTS:
            raise ValueError(f"responses: unknown fault {kind!r}.{did_you_mean(str(kind), FAULTS)}")
        if response not in RESPONSES:
            raise ValueError(f"responses.{kind}: unknown {response!r}.{did_you_mean(str(response), RESPONSES)}")
        fault = FAULTS[kind]
        if response not in fault.responses:
            raise ValueError(
                f"responses.{kind}: {response!r} does not fit: {fault.unfit}; what fits: {', '.join(fault.responses)}."
            )
    return dict(sorted(responses.items()))
