"""`python -m tests.fuzz`: start a service, fuzz it, and report answers that violate its OpenAPI document."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from metaban.service.process.local_deployment import Deployment
from tests.fuzz.fuzzing import Findings, fuzz

stdout = Console(highlight=False, soft_wrap=True, width=112)
COLUMNS = ("2xx", "4xx", "503", "500", "none")


def main(
    examples: Annotated[int, typer.Option(min=50, help="Requests to make, about.")] = 2_000,
    seed: Annotated[int | None, typer.Option(help="What is random is random by it; printed when left out.")] = None,
    url: Annotated[str | None, typer.Option(help="A service without keys to ask, whose data may be spoilt.")] = None,
) -> None:
    """Exit with 1 when an answer violates the document or is missing."""
    seed = random.randrange(10**6) if seed is None else seed
    stdout.print(f"seed {seed}")
    with _service(url) as address:
        findings = fuzz(address, examples=examples, seed=seed)
    stdout.print(table_of(findings))
    for violation in findings.violations:
        stdout.print(f"\n{violation}", markup=False)
    stdout.print(
        f"\nseed {seed}: {findings.examples:,} examples of {len(findings.operations())} operations, "
        f"{findings.linked:,} along links; errors {findings.server_errors}, violations {findings.broken.total()}"
    )
    if findings.broken:
        raise typer.Exit(1)


@contextmanager
def _service(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="metaban-fuzz-") as folder, Deployment(Path(folder)) as service:
        yield service.url


def table_of(findings: Findings) -> Table:
    """One row per operation."""
    table = Table("operation", *COLUMNS, box=None, pad_edge=False)
    for name, answers in findings.operations().items():
        table.add_row(name, *(f"{answers[column]:,}" if answers[column] else "" for column in COLUMNS))
    return table


if __name__ == "__main__":
    typer.run(main)
    sys.exit()
