"""The one error about a person's data: it names the file, the place in it, what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """Something is wrong with a file of rows.

    Attributes:
        path: the file, or what it was asked by.
        problem: what is wrong, and what to do about it.
        line: line of the file, from 1; None where there are no lines.
        row: number of the row in the file, from 1; None when it is about the whole file.
        column: the column; empty when it is about the whole row.
    """

    def __init__(
        self, path: Path | str, problem: str, *, line: int | None = None, row: int | None = None, column: str = ""
    ) -> None:
        self.path, self.problem, self.line, self.row, self.column = path, problem, line, row, column
        place = str(path)
        if line is not None:
            place += f", line {line}"
        elif row is not None:
            place += f", row {row}"
        if column:
            place += f", column {column!r}"
        super().__init__(f"{place}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.path, self.problem, self.line, self.row, self.column)


def _rebuilt(path: Path | str, problem: str, line: int | None, row: int | None, column: str) -> DataError:
    return DataError(path, problem, line=line, row=row, column=column)
