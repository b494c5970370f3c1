"""The global random number generators of Python, NumPy and torch, as one state that can be kept and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = tuple[Any, ...]


def random_state() -> RandomState:
    """Return the state of every global generator; of CUDA's only once CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def restore_random_state(state: RandomState) -> None:
    """Put a state back that `random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])


@contextmanager
def caller_random_state_kept() -> Iterator[None]:
    """Leave the global random number generators as they were, whatever the block draws."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
