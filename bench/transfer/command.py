"""`metaban bench transfer`: task modeling against other ways to choose sources, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from metaban.bench.core.report import Part, Report, run_parts
from metaban.bench.transfer.linear import measure_linear
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.transfer.selection import measure_selection
from metaban.bench.transfer.speed import measure_speed
from metaban.bench.transfer.surrogate import measure_surrogate

PARTS: Final[Mapping[str, Part[TransferPlan]]] = {
    "linear": measure_linear,
    "surrogate": measure_surrogate,
    "selection": measure_selection,
    "speed": measure_speed,
}


def measure_transfer(plan: TransferPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Run the given parts, one after the other."""
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    sizes = {name: value for name, value in asdict(plan).items() if name not in {"data", "plot"}}
    return Report("transfer", {"parts": list(parts), **sizes}, results, bars, quick)
