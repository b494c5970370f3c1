"""Reads an inner task from one YAML or JSON file: model, sources, benchmark and chat, without a line of code.

Nothing that the file names is executed: data files are read as data, templates are rendered in a sandbox, weights are
safetensors. Paths are relative to the file's folder, or absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..messages import did_you_mean
from ..recipe import Recipe
from ..yaml_file import FileError, read_yaml
from ..yaml_section import YamlSection
from .base import Benchmark, Chat, InnerTask, Source

_TOP = ("name", "model", "teacher", "chat", "sources", "benchmark", "recipe")
_CHAT = ("system", "template")
_FILE_SOURCE = ("file", "kind", "columns", "verifier", "max_rows", "seed")
_GENERATED_SOURCE = ("reasoning_gym", "settings", "size", "seed", "extract")
_MOST_ROWS = 1_000_000_000

if TYPE_CHECKING:
    from ..benchmarks.verifiers import Verifier

Read = TypeVar("Read")


class FileTask(InnerTask):
    """The task that a file describes.

    The file is read when the object is made; data, weights and templates that it names when they are asked for.

    Args:
        path: the file.

    Raises:
        FileError: the file cannot be read, a key is unknown or missing, a value is not what it should be, or a file
            that it names is missing; says file, line, column and key.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path.resolve().parent
        self._file = YamlSection(read_yaml(self.path, f"task {self.path}", expected="keys like model and sources"))
        self._file.only(_TOP)
        self.name = self._file.text("name", self.path.stem)
        self._file.text("model")
        self._teacher = self._file.text("teacher") if "teacher" in self._file else None
        self._chat = self._read_chat()
        self._recipe = self._read_recipe()
        self._check_sources()
        self._check_benchmark()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self.path),))

    def base_checkpoint(self) -> Path:
        """Return the folder of the model: built in, local or of the hub."""
        return self._model("model")

    def teacher_checkpoint(self) -> Path | None:
        """Return the folder of the teacher; None where the file names none."""
        return None if self._teacher is None else self._model("teacher")

    def chat(self) -> Chat | None:
        """Return system turn and template; None where the file has no key ``chat``."""
        return self._chat

    def recipe_defaults(self) -> Mapping[str, Any]:
        """Return the recipe fields that recipes of this task take when they leave them out."""
        return self._recipe

    def facts(self) -> dict[str, Any]:
        """Return the name, the model, and the sources with their kinds and numbers of rows."""
        rows = {
            name: {kind: len(of) for kind, of in source.rows.items()} for name, source in self.built.sources.items()
        }
        return {"name": self.name, "model": self._file.text("model"), "rows": rows}

    def sources(self) -> list[Source]:
        """Read the sources, in the order of the file.

        Raises:
            FileError: a data file cannot be read as it should; says which row, and where the task names the file.
        """
        sections = self._file.section("sources")
        return [self._source(name, sections.section(name)) for name in sections]

    def benchmark(self) -> Benchmark:
        """Read the benchmark.

        Raises:
            FileError: as `benchmark_file.read_benchmark`.
        """
        from ..benchmarks.benchmark_file import read_benchmark

        section = self._benchmark_section()
        return read_benchmark(section, self._folder if section.at else self._beside("benchmark").parent)

    # Parts ------------------------------------------------------------------------------------------------------

    def _model(self, key: str) -> Path:
        from ..base_models import model_folder

        return self._asked(self._file, key, lambda: model_folder(self._file.text(key), self._folder))

    def _source(self, name: str, section: YamlSection) -> Source:
        if "reasoning_gym" in section:
            from ..benchmarks.reasoning_gym import read_reasoning_source

            settings = section.section("settings").data if "settings" in section else {}
            return self._asked(
                section,
                "reasoning_gym",
                lambda: read_reasoning_source(
                    name,
                    section.text("reasoning_gym"),
                    settings,
                    section.integer("size", 500, low=1, high=10_000_000),
                    section.integer("seed", 0, low=0, high=2**63 - 1),
                    extract=section.text("extract", "last_number"),
                ),
            )
        from ..data.sources import read_source

        verifier = self._verifier(section)
        return self._asked(
            section,
            "file",
            lambda: read_source(
                name,
                self._place(section.text("file")),
                kind=section.text("kind") if "kind" in section else None,
                columns=section.section("columns").data if "columns" in section else None,
                verifier=verifier,
                max_rows=section.integer("max_rows", low=1, high=_MOST_ROWS) if "max_rows" in section else None,
                seed=section.integer("seed", 0, low=0, high=2**63 - 1),
            ),
        )

    def _verifier(self, section: YamlSection) -> Verifier | None:
        """Return the verifier of a source; None where it names none."""
        if "verifier" not in section:
            return None
        from ..benchmarks.benchmark_file import read_verifier

        return read_verifier(section, "verifier")

    def _asked(self, section: YamlSection, key: str, read: Callable[[], Read]) -> Read:
        """Return what is read; an error says where in the file it was asked for."""
        try:
            return read()
        except FileError:
            raise
        except (ValueError, OSError, ImportError) as error:
            raise section.error(key, str(error).removeprefix(f"{key}: ")) from error

    # Checks that cost nothing -----------------------------------------------------------------------------------

    def _place(self, name: str) -> Path | str:
        """Return a path as the file means it; a name that is no file there is left to the reader, as of the hub."""
        beside = self._folder / Path(name).expanduser()
        return beside if _is_there(beside) or "*" in name or Path(name).suffix or name.startswith((".", "/")) else name

    def _beside(self, key: str) -> Path:
        path = self._folder / Path(self._file.text(key)).expanduser()
        if not (_is_there(path) and path.is_file()):
            raise self._file.error(key, f"there is no file {path}; paths are relative to the task's file.")
        return path.resolve()

    def _benchmark_section(self) -> YamlSection:
        """Return the benchmark's keys, which stand here or in a file of their own."""
        if isinstance(self._file.value("benchmark"), str):
            path = self._beside("benchmark")
            return YamlSection(read_yaml(path, f"benchmark {path}", expected="keys like dimensions"))
        return self._file.section("benchmark")

    def _check_benchmark(self) -> None:
        section = self._benchmark_section()
        if not section.section("dimensions").data:
            raise section.error("dimensions", "there is no dimension; name at least one, with its weight.")

    def _check_sources(self) -> None:
        sections = self._file.section("sources")
        if not sections.data:
            raise self._file.error("sources", "there is no source; name at least one, with its file.")
        for name in sections:
            section = sections.section(name)
            if not {"file", "reasoning_gym"} & set(section):
                section.only((*_FILE_SOURCE, *_GENERATED_SOURCE))  # one of them may be misspelt
            if ("file" in section) == ("reasoning_gym" in section):
                raise sections.error(name, "expected one of the keys file and reasoning_gym.")
            if "reasoning_gym" in section:
                section.only(_GENERATED_SOURCE)
                continue
            section.only(_FILE_SOURCE)
            where = self._place(section.text("file"))
            if isinstance(where, Path) and "*" not in where.name and not _is_there(where):
                folder = where.parent
                near = [path.name for path in folder.iterdir()] if _is_there(folder) and folder.is_dir() else []
                hint = did_you_mean(where.name, near) if near else ""
                raise section.error("file", f"there is no file {where}; paths are relative to the task's file.{hint}")
            if "columns" in section:
                columns = section.section("columns")
                for column in columns:
                    columns.text(column)
            self._verifier(section)

    def _read_chat(self) -> Chat | None:
        if "chat" not in self._file:
            return None
        if self._file.value("chat") is None:
            raise self._file.error(
                "chat", "expected keys, got nothing; write {} for the template saved with the model.", key=True
            )
        section = self._file.section("chat")
        section.only(_CHAT)
        template = None
        if "template" in section:
            path = self._folder / section.text("template")
            if not (_is_there(path) and path.is_file()):
                raise section.error("template", f"there is no file {path} with the Jinja template.")
            try:
                template = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise section.error("template", f"{path} cannot be read as UTF-8 text ({error}).") from None
        return Chat(template=template, system=section.text("system") if "system" in section else None)

    def _read_recipe(self) -> dict[str, Any]:
        if "recipe" not in self._file:
            return {}
        section = self._file.section("recipe")
        section.only([f.name for f in fields(Recipe) if f.init and f.name not in ("algorithm", "mix", "start")])
        try:
            recipe = Recipe("sft", {"any": 1.0}, **section.data)
        except (ValueError, TypeError) as error:
            name, _, problem = str(error).partition(": ")
            raise section.error(name if name in section else None, problem or str(error)) from None
        return {name: getattr(recipe, name) for name in section}


def _is_there(path: Path) -> bool:
    """Return whether there is such a file or folder; there is none of a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False
