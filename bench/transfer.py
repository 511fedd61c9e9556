"""Which sources help a target: task modeling against others, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from bench.parts import Part, run_parts
from bench.report import Report
from bench.transfer_linear import measure_linear
from bench.transfer_plan import TransferPlan
from bench.transfer_poison import measure_poison
from bench.transfer_selection import measure_selection
from bench.transfer_speed import measure_speed
from bench.transfer_surrogate import measure_surrogate

PARTS: Final[Mapping[str, Part[TransferPlan]]] = {
    "linear": measure_linear,
    "surrogate": measure_surrogate,
    "selection": measure_selection,
    "speed": measure_speed,
    "poison": measure_poison,
}


def measure_transfer(plan: TransferPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Some parts, one after the other."""
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    sizes = {name: value for name, value in asdict(plan).items() if name not in {"data", "plot"}}
    return Report("transfer", {"parts": list(parts), **sizes}, results, bars, quick)
