"""`metaban bench fusion`: warm starts by model fusion against other starts, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from metaban.bench.core.report import Part, Report, run_parts
from metaban.bench.warm_starts.first_rounds import measure_movielens, measure_profiles
from metaban.bench.warm_starts.plan import FusionBenchPlan
from metaban.bench.warm_starts.sine import measure_sine
from metaban.bench.warm_starts.timing import measure_timing

PARTS: Final[Mapping[str, Part[FusionBenchPlan]]] = {
    "sine": measure_sine,
    "profiles": measure_profiles,
    "movielens": measure_movielens,
    "timing": measure_timing,
}


def measure_fusion(plan: FusionBenchPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Run the given parts, one after the other."""
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    settings = {"seeds": list(plan.seeds), "parts": list(parts), **asdict(plan.settings)}
    return Report("fusion", settings, results, bars, quick)
