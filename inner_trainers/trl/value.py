"""Critics: a value head on the policy's trunk, or a value model of its own. Neither outlives its round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ValueHead(torch.nn.Linear):
    """One value per hidden state; every value is 0 before the first update."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the values of hidden states: (B, T, H) -> (B, T), in full precision."""
        with torch.autocast(states.device.type, enabled=False):
            return super().forward(states.float())[..., 0]


class ValueModel(torch.nn.Module):
    """A trunk of its own under a `ValueHead`.

    Args:
        model: a causal language model, LoRA adapters included; its output head is not used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        trunk = trunk_of(model)
        self.head = ValueHead(trunk.config.hidden_size)
        self.to(next(model.parameters()).device)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion: int) -> torch.Tensor:
        """Return the values of the states in which the last ``completion`` tokens were chosen: (B, completion)."""
        # called by attribute, not kept as a submodule: the trunk's parameters would be listed twice
        outputs = trunk_of(self.model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return chosen_in(self.head, outputs.last_hidden_state, completion)


def trunk_of(model: Any) -> Any:
    """Return the part of a causal language model below its output head, LoRA adapters included."""
    if hasattr(model, "get_base_model"):  # a PEFT model
        model = model.get_base_model()
    return model.base_model


def chosen_in(head: ValueHead, states: torch.Tensor, completion: int) -> torch.Tensor:
    """Return the values of the states in which the last ``completion`` tokens were chosen.

    A token is chosen in the state of the position before it: (B, prompt + completion, H) -> (B, completion).
    """
    values: torch.Tensor = head(states[:, -completion - 1 : -1])
    return values


@contextmanager
def hidden_states_noted(model: Any) -> Iterator[list[torch.Tensor]]:
    """Note the trunk's last hidden states, (B, L, H), of every forward pass in the block; gradients flow through."""
    states: list[torch.Tensor] = []
    handle = trunk_of(model).register_forward_hook(
        lambda module, arguments, outputs: states.append(outputs.last_hidden_state)
    )
    try:
        yield states
    finally:
        handle.remove()
