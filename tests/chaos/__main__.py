"""`python -m tests.chaos`: inject faults into real processes and check that no event is lost or counted twice."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metaban.models.numerics.hardware import use_threads
from tests.chaos.catalogue import BY_NAME, FAULTS, Fault
from tests.chaos.fork_server import ForkServer
from tests.chaos.run import Row

#: Wide enough for the table, even without a terminal.
stdout = Console(highlight=False, soft_wrap=True, width=112)
stderr = Console(stderr=True, highlight=False)
COLOURS = {"holds": "green", "BROKEN": "red"}
#: Time of a fault besides the injection: start of the processes and the wait before the audit.
SETTLE_S = 4.0
#: Most problems printed per fault; the JSON has all.
PROBLEMS_SHOWN = 12


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Approximate time of all faults together.")] = 600,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random generator; by default a new one, which is printed.")
    ] = None,
    only: Annotated[str, typer.Option(help="Names of faults, separated by commas.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file too.")] = None,
) -> None:
    """Exit with 1 when an invariant is violated; logs and data are then kept."""
    wanted = [name for name in (part.strip() for part in only.split(",")) if name]
    if unknown := sorted(set(wanted) - BY_NAME.keys()):
        stderr.print(f"unknown fault: {', '.join(unknown)}; known are {', '.join(BY_NAME)}")
        raise typer.Exit(2)
    chosen = [BY_NAME[name] for name in wanted] or list(FAULTS)
    seed = random.randrange(10**6) if seed is None else seed
    use_threads(1)
    rows = run_all(chosen, seconds=seconds, seed=seed)
    stdout.print(table_of(rows))
    for row in rows:
        show(row)
    stdout.print(f"seed {seed}: {sum(row.kills for row in rows)} kills, {sum(row.accepted for row in rows)} events")
    if json_file is not None:
        json_file.write_text(json.dumps({"seed": seed, "faults": [row.to_json() for row in rows]}, indent=2) + "\n")
    if any(row.verdict == "BROKEN" for row in rows):
        raise typer.Exit(1)


def run_all(faults: list[Fault], *, seconds: float, seed: int) -> list[Row]:
    """Run the faults one after the other, each with its share of the time."""
    deadline = time.monotonic() + seconds
    rows = []
    with ForkServer() as fork_server:
        for place, fault in enumerate(faults):
            stderr.print(f"[bold]{fault.name}[/]  {escape(fault.about)}")
            # A share of the remaining time, so that the whole run takes the time asked for.
            left_s = deadline - time.monotonic()
            share_s = left_s * fault.share / sum(later.share for later in faults[place:])
            rows.append(fault.run(fork_server, seconds=max(1.0, share_s - SETTLE_S), seed=seed, timed=True))
            row = rows[-1]
            stderr.print(f"  [{COLOURS[row.verdict]}]{row.verdict}[/] after {row.seconds:.0f} s")
    return rows


def table_of(rows: list[Row]) -> Table:
    """One row a fault."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "fault", "kills", "accepted", "applied", "duplicates\nrefused", "lost", "twice", "valid dead\nletters",
        "seconds", "verdict",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("fault", "verdict") else "right", no_wrap=True)
    for row in rows:
        counts = (row.kills, row.accepted, row.applied, row.duplicates, row.lost, row.twice, row.valid_dead_letters)
        colour = COLOURS[row.verdict]
        table.add_row(
            row.fault, *(f"{value:,}" for value in counts), f"{row.seconds:.0f}", f"[{colour}]{row.verdict}[/]"
        )
    return table


def show(row: Row) -> None:
    """Print what the table has no column for."""
    for note in row.notes:
        stdout.print(f"{row.fault}: {note}", markup=False)
    for problem in row.problems[:PROBLEMS_SHOWN]:
        stdout.print(f"{row.fault}: BROKEN: {problem}", markup=False)
    if len(row.problems) > PROBLEMS_SHOWN:
        stdout.print(f"{row.fault}: and {len(row.problems) - PROBLEMS_SHOWN} more, see --json", markup=False)
    for folder in row.kept:
        stdout.print(f"{row.fault}: logs and data are kept in {folder}", markup=False)


if __name__ == "__main__":
    typer.run(main)
    sys.exit()
