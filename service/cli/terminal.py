"""Shared by all commands: output, errors, settings, tables and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from metaban.service.settings.environment import Settings, SettingsError, load_settings

#: Exit status for invalid arguments or settings; the same as typer's for wrong options.
WRONG_USE: Final = 2

#: Blanks between two columns of a table.
COLUMN_GAP: Final = 2

#: Columns are not folded to fewer characters.
NARROWEST: Final = 6

#: Reports progress: what, done, total.
ReportProgress: TypeAlias = Callable[[str, int, int], None]

stdout = Console(highlight=False, soft_wrap=True)

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def settings_or_exit() -> Settings:
    """The settings of the environment; invalid ones end the command with a message."""
    try:
        return load_settings()
    except SettingsError as error:
        stderr.print(f"[red]invalid settings[/]\n{escape(str(error))}")
        raise typer.Exit(WRONG_USE) from None


def fail(message: str, *, status: int = 1) -> NoReturn:
    """End the command with an error message."""
    stderr.print(f"[red]error[/] {escape(message)}")
    raise typer.Exit(status)


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, unbroken: Collection[str] = ()) -> None:
    """Print a table without cutting cells, because ids are pasted into other commands.

    On a terminal cells are folded to its width, except in the columns `unbroken`. If the output is not a terminal, or
    it is too narrow, every row is one line.
    """
    cells = [[_text(cell) for cell in row] for row in (heads, *rows)]
    longest = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    least = [
        length if head in unbroken else min(length, NARROWEST) for head, length in zip(heads, longest, strict=True)
    ]
    if not stdout.is_terminal or sum(least) + COLUMN_GAP * (len(heads) - 1) > stdout.width:
        for row in cells:
            padded = (cell + Text(" " * (length - cell.cell_len)) for cell, length in zip(row, longest, strict=True))
            line = Text(" " * COLUMN_GAP).join(padded)
            line.rstrip()
            stdout.print(line)
        return
    columns = (Column(head, overflow="fold", no_wrap=head in unbroken) for head in heads)
    table = Table(*columns, box=None, pad_edge=False)
    for row in cells[1:]:
        table.add_row(*row)
    stdout.print(table, soft_wrap=False)


def _text(cell: str | Text) -> Text:
    """A cell as text; markup in strings is not interpreted."""
    return Text(cell) if isinstance(cell, str) else cell


@contextmanager
def progress_bar() -> Iterator[ReportProgress]:
    """A progress bar, if stderr is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield report
