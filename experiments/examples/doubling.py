"""Example: an inner task of your own, with your data and your scorer, on a packaged base model.

Run it: `posttrain-gym train --task posttrain_gym.experiments.examples.doubling:Doubling --out runs/doubling`
"""

from itertools import product
from pathlib import Path

from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source
from posttrain_gym.inner_trainers.tasks.letters import LettersTask

WORDS = ["".join(letters) for letters in product("abcdefgh", repeat=3)]


class Doubling(InnerTask):
    """Say the last letter of a word twice: ``>abc<`` -> ``cc``."""

    name = "doubling"

    def base_checkpoint(self) -> Path:
        """Start from a packaged model of 0.28 M parameters."""
        return LettersTask(0, base="messy").base_checkpoint()

    def sources(self) -> list[Source]:
        """Offer right answers with verifiable prompts, and a pool where every answer is wrong."""
        words = WORDS[::2]
        right = [{"prompt": f">{w}<", "completion": w[-1] * 2} for w in words]
        wrong = [{"prompt": f">{w}<", "completion": w[:2]} for w in words]
        asks = [{"prompt": f">{w}<", "answer": w[-1] * 2} for w in words]
        checked = Source(
            "right", {"demonstrations": right, "prompts": asks}, lambda row, text: float(text == row["answer"]), "1"
        )
        return [checked, Source("wrong", {"demonstrations": wrong})]

    def benchmark(self) -> Benchmark:
        """Score unseen words by exact match."""
        items = [Item(f">{w}<", "doubling", {"answer": w[-1] * 2}) for w in WORDS[1::2]]
        score = lambda item, text: float(text == item.data["answer"])  # noqa: E731
        return Benchmark({"doubling": 1.0}, items[::4], items[1::4], score, max_new_tokens=6, scorer_version="1")
