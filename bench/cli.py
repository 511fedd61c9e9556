"""`metaban bench …`: one command a benchmark, with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

bench_app = typer.Typer(help="Measure what the README claims, on this machine.", no_args_is_help=True)
console = Console()

Json = Annotated[Path | None, typer.Option("--json", help="Write machine, versions, settings, results and bars here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this file (.png, .svg or .pdf).")]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes, under two minutes; bars are marked quick.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar does not hold.")]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds of the worlds to run in: 100, 100-102 or 100,105.")]


def parse_seeds(text: str) -> list[int]:
    """Numbers and ranges, separated by commas."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        seeds = []
    if not seeds:
        raise typer.BadParameter(f"{text!r} names no seeds; write 100, 100-102 or 100,105", param_hint="--seeds")
    return seeds


@bench_app.callback()
def _bench() -> None:
    pass


@bench_app.command()
def freshness(
    json: Json = None,
    plot: Plot = None,
    quick: Quick = False,
    check: Check = False,
    seeds: Seeds = "100",
) -> None:
    """How soon a reward is in the parameters that answer requests: p50 and p99 of 202 → served.

    Starts a service of its own with a private Valkey in a temporary directory, and stops it again.
    """
    from bench.freshness import FreshnessPlan, measure_freshness, plot_freshness, print_freshness

    plan = FreshnessPlan.quick() if quick else FreshnessPlan()
    report = measure_freshness(plan, parse_seeds(seeds), quick=quick, console=console)
    print_freshness(report, console)
    if json is not None:
        report.write(json)
    if plot is not None:
        plot_freshness(report, plot)
    if check and not all(bar.holds for bar in report.bars):
        raise typer.Exit(1)
