"""Options that benchmarks share, how they are read, and how a run ends."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from bench.report import Report

Json = Annotated[Path | None, typer.Option("--json", help="Write machine, versions, settings, results and bars here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this file (.png, .svg or .pdf).")]
PlotFolder = Annotated[Path | None, typer.Option("--plot", help="Draw each scenario into this folder.")]
PartPlots = Annotated[Path | None, typer.Option("--plot", help="Draw what each part found into this folder.")]
Parts = Annotated[str | None, typer.Option("--part", help="Parts to run, separated by commas; all unless said.")]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes, under two minutes; bars are marked quick.")]
Check = Annotated[
    bool, typer.Option("--check", help="Exit with 1 when a bar does not hold, or all of them were skipped.")
]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds of the worlds to run in: 100, 100-102 or 100,105.")]
Env = Annotated[str, typer.Option("--env", help="The world: synthetic, movielens, yelp, service or mnist.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Decisions of each run; 10,000 unless said or --quick.")
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Runs at once, each on one core; all cores unless said.")
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of the public data sets, which docs/learner.md describes.")
]


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


def parse_names(text: str, known: Collection[str], option: str, *, separator: str = ",") -> tuple[str, ...]:
    """Known names separated by commas, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(separator) if part.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"{', '.join(unknown)} is unknown" if unknown else "no name given"
        raise typer.BadParameter(f"{what}; there are {', '.join(known)}", param_hint=option)
    return names


def fail_unchecked() -> NoReturn:
    """A gate that let pass what never ran would not be one."""
    Console(stderr=True).print(
        "nothing was checked: what the claims are about was skipped, which --check counts as a failure. Put the files "
        "that docs/learner.md describes into a folder and name it by --data or METABAN_BENCH_DATA; install what is "
        "said to be missing; or leave --check out.",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    raise typer.Exit(1)


def finish(report: Report, json: Path | None, *, check: bool, failed: bool) -> None:
    """Write what was asked for; a run that raised is an error whether or not bars are checked."""
    if json is not None:
        report.write(json)
    if check and not report.bars and report.skipped:
        fail_unchecked()
    if failed or (check and not all(bar.holds for bar in report.bars)):
        raise typer.Exit(1)
