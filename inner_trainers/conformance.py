"""Conformance suites to import into one's own tests: `TaskConformance` for a task, `TrainerConformance` for a trainer.

Test classes inherit from them; pytest runs each check as a test of its own, which says in words what is wrong::

    class TestMyTask(TaskConformance):
        task = MyTask
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .task_checks import CHECKS, Finding, check_task
from .trainer_conformance import TrainerConformance, trainer_findings

__all__ = ["TaskConformance", "TrainerConformance", "trainer_findings"]


class TaskConformance:
    """Tests of an `InnerTask`, to be inherited by a test class; one for each check of `task_checks.CHECKS`.

    Attributes:
        task: an object, a class, or a name that `resolve_task` takes.
        instance: seed of a family's instance; None for the first of meta-training.
        evaluate: whether to score the base model, and to take the task's own trainer through `TrainerConformance`.
        fails: severities that fail a test.
        allowed: names of checks whose findings are meant.
    """

    task: Any = None
    instance: int | None = None
    evaluate: bool = False
    fails: tuple[str, ...] = ("error",)
    allowed: tuple[str, ...] = ()

    def findings(self) -> list[Finding]:
        """Return what `check_task` finds, looked for once per class."""
        kind = type(self)
        if "_found" not in vars(kind):
            kind._found = check_task(kind.task, kind.instance, evaluate=kind.evaluate)  # type: ignore[attr-defined]
        found: list[Finding] = vars(kind)["_found"]
        return found

    def require(self, check: str) -> None:
        """Fail with all findings of a check.

        Raises:
            AssertionError: there is one that is not allowed.
        """
        if check in self.allowed:
            return
        wrong = [one for one in self.findings() if one.check == check and one.severity in self.fails]
        if wrong:
            raise AssertionError("\n".join([f"expected that {CHECKS[check]}; but", *map(str, wrong)]))


def _test_of(check: str, meaning: str) -> Callable[[TaskConformance], None]:
    def test(self: TaskConformance) -> None:
        self.require(check)

    test.__name__, test.__doc__ = f"test_{check}", f"Require that {meaning}."
    return test


for _check, _meaning in CHECKS.items():
    setattr(TaskConformance, f"test_{_check}", _test_of(_check, _meaning))
