"""The tables and the picture of `metaban bench latency`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.report import Report
from service.scorer import BATCH_REQUESTS

#: Races of the report, in the order they are shown; one that was skipped is left out.
RACES: Final = ("paper_decision", "paper_decision_anew", "paper_updates", "vowpal", "crowd")
#: What is compared with whom: a race whose reference is the slower side is told as a speed-up.
SPEEDUPS: Final = frozenset({"paper_decision", "paper_decision_anew", "paper_updates"})


def print_latency(report: Report, console: Console) -> None:
    """Ratios, learning, the roofline and sizes, then the claims."""
    results = report.results
    table = Table("measured in turns", "p50 ms", "against", "p50 ms", "ratio", "95% interval", box=None, pad_edge=False)
    for name in RACES:
        if name in results:
            table.add_row(*_race_row(results[name], faster=name in SPEEDUPS))
    console.print(table)
    console.print()
    training = results["training"]
    console.print(
        f"learning, CPU ms an event: {training['cpu_ms_an_event']:.2f} = "
        f"{training['fit_ms_an_event']:.2f} fitting the user + {training['epoch_ms_an_event']:.2f} epochs "
        f"({training['epochs']} in {training['events']:,} events)",
        highlight=False,
    )
    console.print(f"the reference is {report.settings['reference']}", highlight=False)
    console.print()
    console.print(_roofline_table(results["roofline"]))
    console.print(_machine_line(results["roofline"]), highlight=False)
    console.print()
    console.print(_sizes_table(results["bytes_a_user"]))
    console.print()
    report.print_bars(console)


def _race_row(found: Mapping[str, Any], *, faster: bool) -> list[str]:
    ours, other = ("below", "above") if faster else ("above", "below")
    low, high = found["interval"]
    sign = " ×" if faster else ""
    return [
        found[ours]["name"],
        _short(found[ours]["p50_ms"]),
        found[other]["name"],
        _short(found[other]["p50_ms"]),
        _short(found["ratio"]) + sign,
        f"{_short(low)} - {_short(high)}",
    ]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _roofline_table(found: Mapping[str, Any]) -> Table:
    table = Table("default score", "MB", "Mflop", "bound ms", "took ms", "of the bound", box=None, pad_edge=False)
    for row in found["rows"]:
        label = f"{row['requests']} request{'s' if row['requests'] > 1 else ''}"
        numbers = [row["bytes"] / 1e6, row["flops"] / 1e6, row["bound_ms"], row["took_ms"]]
        table.add_row(label, *(f"{number:.3g}" for number in numbers), f"{row['share']:.1%}")
    return table


def _machine_line(found: Mapping[str, Any]) -> str:
    speeds = [found["machine"][name] / 1e9 for name in ("bytes_per_s", "single_flops_per_s", "double_flops_per_s")]
    return (
        f"one thread copies {speeds[0]:.1f} GB/s and multiplies at {speeds[1]:.0f} Gflop/s in single, {speeds[2]:.0f} "
        f"in double precision; {found['aim']:.0%} of the bound is the aim at {BATCH_REQUESTS} requests"
    )


def _sizes_table(found: Mapping[str, Mapping[str, int]]) -> Table:
    dimensions = list(next(iter(found.values())))
    table = Table("bytes a user", *(f"d = {d}" for d in dimensions), box=None, pad_edge=False)
    for preset, sizes in found.items():
        table.add_row(preset, *(f"{sizes[d]:,}" for d in dimensions))
    return table


def plot_latency(report: Report, path: Path) -> None:
    """The distributions of both sides of every race."""
    from matplotlib.figure import Figure

    races = [(name, report.results[name]) for name in RACES if name in report.results]
    sides = [(found[side], colour) for _, found in races for side, colour in (("above", "C1"), ("below", "C0"))]
    figure = Figure(figsize=(9, 0.45 * len(sides) + 1.5), layout="constrained")
    axes = figure.subplots()
    places = [place + place // 2 * 0.6 for place in range(len(sides))]
    boxes = axes.boxplot(
        [side["times_ms"] for side, _ in sides], positions=places, orientation="horizontal", widths=0.7,
        whis=(1, 99), showfliers=False, patch_artist=True, medianprops={"color": "black"},
    )  # fmt: skip
    for box, (_, colour) in zip(boxes["boxes"], sides, strict=True):
        box.set(facecolor=colour, alpha=0.6)
    right = max(max(side["times_ms"]) for side, _ in sides)
    for (_, found), place in zip(races, places[::2], strict=True):
        axes.text(right * 1.6, place + 0.5, _short(found["ratio"]), va="center", ha="left")
    axes.set(xscale="log", xlabel="ms; boxes hold half of the calls, whiskers 98%; numbers are ratios of medians")
    axes.set_yticks(places, [side["name"] for side, _ in sides])
    axes.set_xlim(right=right * 4)
    axes.invert_yaxis()
    axes.set_title("Latency, one thread")
    axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
