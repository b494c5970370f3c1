"""Live progress of long commands: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from .comparison import EpisodeResult
    from .train import RoundEvent

console = Console(highlight=False)


class ProgressDisplay:
    """Live progress on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Say which stage begins."""
        self._line(f"[bold]{plain(text)}[/]")
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def round(self, event: RoundEvent) -> None:
        """Show one decision of meta-training."""
        left = "" if event.seconds_left is None else f"about {minutes(event.seconds_left)} left"
        shown = event.describe() + ("  (from the journal)" if event.replayed else "")
        self._line(plain(shown if console.is_terminal else f"{shown}  {left}"))
        self._advance("rounds", event.number, event.total, left)

    def episode(self, done: int, total: int, result: EpisodeResult) -> None:
        """Show one finished episode of a comparison."""
        self._line(plain(f"{done:4d}/{total}  {episode_line(result)}"))
        self._advance("episodes", done, total, "")

    def _advance(self, description: str, done: int, total: int, note: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task(description, total=total, note=note)
        self._bar.update(self._task, completed=done, note=note)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._bar.console.print(text, soft_wrap=True)


def episode_line(result: EpisodeResult) -> str:
    """Return one finished episode in a line."""
    failed = sum(result.failures.values())
    return (
        f"instance {result.instance} seed {result.seed} {result.policy}: test {result.base_score:.3f} -> "
        f"{result.final_score:.3f} ± {result.final_error:.3f}, {result.rounds} rounds, "
        f"{result.budget_used:.0%} of the budget{f', {failed} failed' if failed else ''}"
    )


def minutes(seconds: float) -> str:
    """Return a duration as a person says it."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def plain(text: str) -> str:
    """Return text that rich prints as it is; control characters, which could drive a terminal, are shown escaped."""
    from rich.markup import escape

    return escape("".join(_shown(character) for character in text) if not text.isprintable() else text)


def _shown(character: str) -> str:
    return character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
