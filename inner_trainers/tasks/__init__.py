"""Inner tasks: the abstract bases, and the built-in families by name."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from ..messages import did_you_mean, where_raised
from .base import Benchmark, Chat, InnerTask, Item, SingleTask, Source, TaskFamily

__all__ = ["BUILT_IN", "Benchmark", "Chat", "InnerTask", "Item", "SingleTask", "Source", "TaskFamily", "resolve_task"]

BUILT_IN = {
    "calculator": "posttrain_gym.inner_trainers.tasks.calculator:CalculatorTask",
    "letters": "posttrain_gym.inner_trainers.tasks.letters:LettersFamily",
    "smol-reasoning": "posttrain_gym.inner_trainers.tasks.smol_reasoning:SmolReasoning",
}
"""Built-in task families: name -> ``module:Class``."""

TASK_FILE_SUFFIXES = (".yaml", ".yml", ".json")
"""What the name of a task file ends in."""


def resolve_task(task: str | Path | InnerTask | TaskFamily | type[Any]) -> TaskFamily:
    """Return the family behind a built-in name, a task file, ``module:Class``, an object or a class.

    A path is a task file's, and so is text that ends in one of `TASK_FILE_SUFFIXES`; see `task_file`.

    Raises:
        ValueError: no such name, file, module or class, a file that is wrong, or something that is neither a task nor
            a family.
    """
    given: Any = task
    if isinstance(given, Path) or (isinstance(given, str) and given.lower().endswith(TASK_FILE_SUFFIXES)):
        from .task_file import FileTask

        return SingleTask(FileTask(given))
    if isinstance(given, str):
        target = BUILT_IN.get(given, given)
        if ":" not in target:
            raise ValueError(
                f"task: no built-in task is called {given!r}.{did_you_mean(given, BUILT_IN)} "
                "A task of your own is given as 'module:Class', or as the name of a file such as task.yaml."
            )
        module_name, _, attribute = target.partition(":")
        if not module_name or module_name.startswith("."):
            raise ValueError(f"task {given!r}: expected 'module:Class'.")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"task {given!r}: module {error.name!r} cannot be imported; "
                "run from its folder or put it on PYTHONPATH."
            ) from error
        except (Exception, SystemExit) as error:  # whatever a person's module does when it is imported
            raise ValueError(f"task {given!r}: importing {module_name!r} failed with {where_raised(error)}.") from error
        if not hasattr(module, attribute):
            raise ValueError(
                f"task {given!r}: module {module_name!r} has no {attribute!r}."
                f"{did_you_mean(attribute, [n for n in vars(module) if not n.startswith('_')])}"
            )
        given = getattr(module, attribute)
    if isinstance(given, type):
        try:
            inspect.signature(given).bind()
        except TypeError as error:
            raise ValueError(
                f"task {task!r}: {given.__name__}() cannot be built without arguments ({error}); "
                "pass an object instead."
            ) from error
        try:
            given = given()
        except ValueError:
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"task {task!r}: {given.__name__}() failed with {where_raised(error)}.") from error
    if isinstance(given, TaskFamily):
        for name in ("train_seeds", "test_seeds"):
            seeds = getattr(given, name, None)
            if not isinstance(seeds, range) or len(seeds) == 0:
                raise ValueError(f"task {task!r}: {name} must be a range with at least one seed, got {seeds!r}.")
        return given
    if isinstance(given, InnerTask):
        return SingleTask(given)
    raise ValueError(f"task: expected a name, an InnerTask or a TaskFamily, got {type(given).__name__}.")
