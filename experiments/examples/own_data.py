"""Example: your own data files and your own scorer, on a model that comes with the package."""

from pathlib import Path

from posttrain_gym.inner_trainers.base_models import model_folder
from posttrain_gym.inner_trainers.data.reading import open_data
from posttrain_gym.inner_trainers.data.sources import read_source, split_rows
from posttrain_gym.inner_trainers.tasks import Benchmark, InnerTask, Item, Source

FILES = Path(__file__).parent / "own_data"


def share_in_place(right: str, text: str) -> float:
    """Return which share of the right letters stands in its place; nothing for an answer of another length."""
    return sum(map(str.__eq__, text, right)) / len(right) if len(text) == len(right) else 0.0


class OwnData(InnerTask):
    """Sort or reverse the letters of a word as files of questions and answers show it; sorting is scored."""

    name = "own-data"

    def base_checkpoint(self) -> Path:
        """Start from a packaged model of 0.28 M parameters."""
        return model_folder("letters-messy")

    def sources(self) -> list[Source]:
        """Offer the rows of one file, to be shown and, as there is a verifier, to be asked."""
        columns = {"prompt": "question", "completion": "answer"}
        judge = lambda row, text: share_in_place(row["completion"], text)  # noqa: E731
        return [read_source("words", FILES / "train.jsonl", columns=columns, verifier=judge, verifier_version="1")]

    def benchmark(self) -> Benchmark:
        """Score the rows of another file, half of them for validation and half for the test."""
        rows = [row.value for row in open_data(FILES / "sorting.jsonl").rows()]
        halves = ([Item(row["question"], "sorting", row) for row in half] for half in split_rows(rows, 0.5, seed=0))
        validation, test = halves
        score = lambda item, text: share_in_place(item.data["answer"], text)  # noqa: E731
        return Benchmark({"sorting": 1.0}, validation, test, score, max_new_tokens=6, scorer_version="1")
