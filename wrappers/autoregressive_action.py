"""`AutoregressiveAction`: one decision as several steps, each with the exact mask that the choices before it leave."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from ..envs.decision_space import STOP, Parameter
from ..envs.space_masks import DecisionOrder
from ..inner_trainers.messages import require_integer
from ..inner_trainers.recipe import STARTS
from .checks import adjustment_choices, base_env, chooses_recipe
from .discretize_action import coordinate_of

KEY = "decision"


class AutoregressiveAction(gym.Wrapper[dict[str, np.ndarray], Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Asks for a recipe step by step: the algorithm, the start, a level per source, then each knob.

    The heads come in that order; knobs in the order in which constraints let them be decided, and only those that the
    algorithm uses with what was chosen before. `action_masks` is exact: a choice is legal when the choices before it
    and some after it can be a legal recipe whose step the budget pays. So what is chosen under the mask is what is
    trained: nothing is repaired, but for the mix, whose levels go to the nearest mix within the bounds. A head with one
    legal choice is not asked, nor a knob whose legal values all lie between its bins, which takes the one nearest to
    its middle. ``stop`` acts at once.

    The action is a `Discrete` as wide as the widest head. A choice that is not legal becomes the nearest that is
    (``info["repaired"]``), for algorithms that take no masks. Steps before the last of a decision give reward 0, train
    and cost nothing, and end nothing; they count for `TimeLimit` and for a learner's discount, which should be
    nearer to 1 than with one step per round. ``info["deciding"]`` is the head that is asked next.

    The observation gets ``decision``: a one-hot of the head that is asked, then for each head whether it was chosen and
    the choice over the largest of its head.

    Args:
        env: `PostTrain/Recipe-v0`, wrapped or not.
        bins: bins of each continuous knob, in [2, 1000].
        mix_levels: levels per source, in [2, 100].

    Raises:
        ValueError: another environment, or a number outside its range.
    """

    def __init__(self, env: gym.Env[Any, Any], bins: int = 5, mix_levels: int = 3) -> None:
        require_integer("bins", bins, low=2, high=1000)
        require_integer("mix_levels", mix_levels, low=2, high=100)
        gym.utils.RecordConstructorArgs.__init__(self, bins=bins, mix_levels=mix_levels)
        gym.Wrapper.__init__(self, env)
        base = base_env(env)
        if not chooses_recipe(base) or adjustment_choices(base):
            raise ValueError(
                f"AutoregressiveAction: {type(base).__name__} also takes adjustments; wrap PostTrain/Recipe-v0."
            )
        space = base.space
        self._levels = mix_levels
        self._bins = {name: len(p.choices) if p.choices else bins for name, p in space.parameters.items()}
        self._sizes = {
            "algorithm": 1 + len(space.algorithms),
            "start": len(STARTS),
            **{f"mix.{name}": mix_levels for name in space.sources},
            **self._bins,
        }
        self._heads = list(self._sizes)
        self.action_space: Any = gym.spaces.Discrete(max(self._sizes.values()))
        below: Any = env.observation_space
        decision = gym.spaces.Box(0.0, 1.0, (3 * len(self._heads),), np.float32)
        self.observation_space: Any = gym.spaces.Dict({**below.spaces, KEY: decision})
        self._chosen: dict[str, int] = {}
        self._between: dict[str, Any] = {}
        self._head = "algorithm"
        self._mask = self._algorithms()
        self._order: DecisionOrder | None = None
        self._last: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None

    @property
    def head(self) -> str:
        """The head that is asked next."""
        return self._head

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a search; see `PostTrainingEnv.reset`."""
        if seed is not None:
            self.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        return self._begin(observation, info)

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], Any, bool, bool, dict[str, Any]]:
        """Choose in one head; with the last head of a decision its round is run.

        Raises:
            ValueError: an action outside the space, or the episode is over; nothing is chosen, trained or charged.
        """
        choice = require_integer("action", action, low=0, high=int(self.action_space.n) - 1)
        if self._last is None:
            raise ValueError("step: call reset() before using the environment.")
        base = base_env(self.env)
        reason = base.search.closed()
        if reason is not None:
            raise ValueError(f"step: the episode is over ({reason}); call reset().")
        legal = np.flatnonzero(self._mask)
        nearest = int(legal[np.argmin(np.abs(legal - choice))])
        self._choose(nearest)
        while self._order is not None and self._advance() and self._mask.sum() == 1:
            self._choose(int(np.argmax(self._mask)))
        if self._order is None or self._head == "":
            observation, reward, terminated, truncated, info = self.env.step(self._action())
            shown, facts = self._begin(observation, info)
            facts["repaired"] = nearest != choice
            return shown, reward, terminated, truncated, facts
        observation, info = self._last
        return self._shown(observation), 0.0, False, False, {**self._facts(info), "repaired": nearest != choice}

    def action_masks(self) -> np.ndarray:
        """Return ``(width,)`` bool: the legal choices of the head that is asked."""
        mask = np.zeros(int(self.action_space.n), dtype=np.bool_)
        mask[: len(self._mask)] = self._mask
        return mask

    def encode_recipe(self, recipe: Any) -> Any:
        """Refuse: a recipe is several actions here.

        Raises:
            ValueError: always.
        """
        raise ValueError("recipe: AutoregressiveAction takes several steps for one; give it to the environment below.")

    # One decision -----------------------------------------------------------------------------------------------------

    def _begin(
        self, observation: dict[str, np.ndarray], info: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._chosen, self._between, self._head, self._order = {}, {}, "algorithm", None
        self._mask = self._algorithms()
        self._last = observation, info
        return self._shown(observation), {**info, "deciding": self._head}

    def _facts(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in info.items() if key != "round"}, "deciding": self._head}

    def _algorithms(self) -> np.ndarray:
        return base_env(self.env).choice_masks()["algorithm"]

    def _choose(self, choice: int) -> None:
        """Take a choice of the head that is asked."""
        base, head = base_env(self.env), self._head
        self._chosen[head] = choice
        if head == "algorithm":
            self._order = None if choice == STOP else DecisionOrder(base.space, base.space.algorithms[choice - 1])
        elif self._order is None:
            raise RuntimeError("a head was asked before the algorithm.")
        elif head == "start":
            self._order.choose_start(STARTS[choice])
        elif head in self._bins:
            self._order.choose(head, self._values(head)[choice])

    def _advance(self) -> bool:
        """Go to the next head; return whether there is one."""
        order = self._order
        assert order is not None  # asked only within a decision
        base = base_env(self.env)
        algorithm = base.space.algorithms[self._chosen["algorithm"] - 1]
        if "start" not in self._chosen:
            self._head, self._mask = "start", order.legal_starts()
            return True
        usable = base.space.usable[algorithm] or base.space.sources
        for name in base.space.sources:
            head = f"mix.{name}"
            if name in usable and head not in self._chosen and len(usable) > 1:
                self._head, self._mask = head, np.ones(self._levels, bool)
                return True
        if not any(head in self._chosen for head in self._bins):
            order.choose_mix(self._weights(usable))
        for head in order.knobs:
            if head in self._chosen or not order.uses(head):
                continue
            values = self._values(head)
            legal = order.legal_values(head, values)
            if not legal.any():
                self._take_between(order, head, values)
                continue
            held = {name: self._value(name) for name in self._bins if name in self._chosen}
            paid = [
                on and base.search.pays_choices(algorithm, {**held, head: v})
                for on, v in zip(legal, values, strict=True)
            ]
            self._head, self._mask = head, np.array(paid) if any(paid) else legal
            return True
        self._head = ""
        return False

    def _take_between(self, order: DecisionOrder, head: str, values: list[Any]) -> None:
        """Decide a knob whose legal values lie between its bins; the observation shows the nearest bin."""
        value = order.nearest_legal(head)
        order.choose(head, value)
        encode = base_env(self.env).space.parameters[head].encode
        self._between[head] = value
        self._chosen[head] = int(np.argmin([abs(encode(other) - encode(value)) for other in values]))

    def _weights(self, usable: Any) -> dict[str, float]:
        levels = {name: float(self._chosen.get(f"mix.{name}", 0)) for name in usable}
        total = sum(levels.values())
        return {name: level / total if total else 1.0 / len(levels) for name, level in levels.items()}

    def _values(self, name: str) -> list[Any]:
        """Return the values of a knob's bins, as they decode from single precision."""
        parameter, count = base_env(self.env).space.parameters[name], self._bins[name]
        return [parameter.decode(float(np.float32(coordinate_of(parameter, b, count)))) for b in range(count)]

    def _value(self, name: str) -> Any:
        return self._between[name] if name in self._between else self._values(name)[self._chosen[name]]

    def _coordinate(self, name: str, parameter: Parameter) -> float:
        if name in self._between:
            return parameter.encode(self._between[name])
        return coordinate_of(parameter, self._chosen[name], self._bins[name])

    def _action(self) -> dict[str, Any]:
        """Return the environment's action of what was chosen."""
        base = base_env(self.env)
        space = base.space
        if self._chosen["algorithm"] == STOP:
            return dict(space.encode(None))
        algorithm = space.algorithms[self._chosen["algorithm"] - 1]
        weights = self._weights(space.usable[algorithm] or space.sources)
        parameters = [
            self._coordinate(name, parameter) if name in self._chosen else 0.0
            for name, parameter in space.parameters.items()
        ]
        return {
            "algorithm": self._chosen["algorithm"],
            "mix": np.array([2.0 * weights.get(name, 0.0) - 1.0 for name in space.sources], np.float32),
            "parameters": np.array(parameters, np.float32),
            "start": self._chosen["start"],
        }

    def _shown(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = len(self._heads)
        vector = np.zeros(3 * count, np.float32)
        vector[self._heads.index(self._head)] = 1.0
        for place, head in enumerate(self._heads):
            if head in self._chosen:
                vector[count + 2 * place] = 1.0
                vector[count + 2 * place + 1] = self._chosen[head] / max(1, self._sizes[head] - 1)
        return {**observation, KEY: vector}
