"""`metaban bench transfer`."""

from __future__ import annotations

from rich.console import Console

from bench.cli_options import Check, Data, Json, PartPlots, Parts, Quick, Seeds, finish, parse_names, parse_seeds

console = Console()


def transfer(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Which sources help a target (task modeling): whether they are found, and what they are worth.

    [bold]linear[/]: related and unrelated sources of one linear vector. [bold]surrogate[/]: how well losses of sets are
    foretold, with MovieLens users as tasks. [bold]selection[/]: what targets lose with the sources that are chosen,
    against all, none, and those that first-order methods choose. [bold]speed[/]: sets at once against one by one.
    [bold]poison[/]: what users lose by others whose rewards are turned around, with and without weights of teachers.
    """
    from bench.transfer import PARTS, measure_transfer
    from bench.transfer_plan import TransferPlan

    parts = tuple(PARTS) if part is None else parse_names(part, PARTS, "--part")
    plan = TransferPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    report = measure_transfer(plan.quick() if quick else plan, parts, quick=quick, console=console)
    report.print_bars(console)
    finish(report, json, check=check, failed=False)
