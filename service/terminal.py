"""What all commands have in common: where they print, how they fail, where their settings come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from service.settings import Settings, SettingsError, load_settings

#: Exit status of a command that was asked for something impossible, as typer has it for wrong options.
WRONG_USE: Final = 2

#: Takes note of how far something is: what, done, of how many.
Tell: TypeAlias = Callable[[str, int, int], None]

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def settings_or_exit() -> Settings:
    """The settings of the environment; what is wrong with them is told."""
    try:
        return load_settings()
    except SettingsError as error:
        stderr.print(f"[red]these settings cannot be used[/]\n{escape(str(error))}")
        raise typer.Exit(WRONG_USE) from None


def fail(message: str, *, status: int = 1) -> NoReturn:
    """End the command with a reason."""
    stderr.print(f"[red]error[/] {escape(message)}")
    raise typer.Exit(status)


@contextmanager
def progress_bar() -> Iterator[Tell]:
    """Shows how far things are, where somebody is looking."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield tell
