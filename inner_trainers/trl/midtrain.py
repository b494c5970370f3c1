"""Mid-training: raw text, every token of it supervised, with two kinds of replay against forgetting.

General text is a source of the mix like any other. The task's earlier stages, its demonstrations written out whole,
are mixed in as the share `Recipe.replay_share`; `rows.TaskRows.pools` says how.
"""

from __future__ import annotations

from typing import Any

from .context import RoundContext
from .sft import drawn_trainer


def build_trainer(context: RoundContext) -> Any:
    """Return the trainer for a recipe whose text is drawn."""
    return drawn_trainer(context)
