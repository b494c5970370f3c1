"""What a check of a task reports: findings in words, each with what to do about it, and the list of all checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""An error makes results wrong or rounds fail; a warning may; a note is something to know."""

CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "resolves": "the name, file or class leads to a task, in this process and in a fresh one",
        "pickles": "an object can be sent to workers",
        "parts": "each method returns what it must, and the parts fit together",
        "facts": "facts() is plain JSON",
        "family": "instances of a seed are equal, and those of meta-training and meta-test apart",
        "repeatable": "sources and benchmark are the same again, and in a fresh process with another hash seed",
        "splits": "no item stands in both splits, in whatever form, and none twice in one",
        "items": "each dimension has enough items to tell a gain from noise",
        "contamination": "training rows neither ask items nor hold their words",
        "sources": "each source has rows that some algorithm trains on",
        "rows": "rows are not copies of each other",
        "raises": "scoring raises on no text",
        "range": "scores are numbers in [0, 1]",
        "hangs": "scoring ends within its time",
        "prints": "nothing prints",
        "mutates": "scoring changes neither item nor row",
        "deterministic": "scoring the same text again gives the same score, in a fresh process too",
        "generous": "no full marks for saying nothing, or anything",
        "pays": "a right answer is paid",
        "demonstrations": "the verifier calls the source's own demonstrations right",
        "version": "scorer and verifiers name their version, which the content hash needs",
        "model": "the base checkpoint, and the teacher's, is there, loads and fits",
        "template": "turns have a written form, and a model of turns is not given plain text",
        "length": "right answers fit max_new_tokens",
        "positions": "prompts with their completions fit the model's positions",
        "vocabulary": "the tokenizer can write the prompts and answers",
        "headroom": "the base model is neither at 0 nor at 1 on a dimension",
        "trainer": "the task's own trainer keeps the contract of `InnerTrainer`",
    }
)
"""Checks by name: what holds of a task that passes."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        severity: one of `SEVERITIES`.
        check: a key of `CHECKS`.
        where: which part of the task, such as ``"source 'math'"``.
        problem: what is wrong, as a sentence with the values that show it.
        remedy: what to do about it.
    """

    severity: str
    check: str
    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.severity}: {self.where}: {self.problem}{remedy}"

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON types."""
        return asdict(self)


@dataclass
class Findings:
    """Findings in the order they were made."""

    all: list[Finding] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.all)

    def error(self, check: str, where: str, problem: str, remedy: str = "") -> None:
        """Add an error."""
        self._add("error", check, where, problem, remedy)

    def warning(self, check: str, where: str, problem: str, remedy: str = "") -> None:
        """Add a warning."""
        self._add("warning", check, where, problem, remedy)

    def note(self, check: str, where: str, problem: str, remedy: str = "") -> None:
        """Add a note."""
        self._add("note", check, where, problem, remedy)

    def has(self, check: str, severity: str = "error") -> bool:
        """Return whether a check has findings of a severity."""
        return any(one.check == check and one.severity == severity for one in self.all)

    def _add(self, severity: str, check: str, where: str, problem: str, remedy: str) -> None:
        assert check in CHECKS, check  # ours to keep
        finding = Finding(severity, check, where, problem, remedy)
        if finding not in self.all:
            self.all.append(finding)


def counted(numbers: list[int], limit: int = 5) -> str:
    """Return row numbers as messages list them: ``rows 1, 4, 8``, the first few of many."""
    shown = ", ".join(map(str, numbers[:limit]))
    more = f", … ({len(numbers)} in all)" if len(numbers) > limit else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more}"


def quoted(text: Any, limit: int = 60) -> str:
    """Return a text as messages show it, its end cut where it is long."""
    plain = repr(text)
    return plain if len(plain) <= limit else f"{plain[:limit]}… ({len(str(text))} characters)"
