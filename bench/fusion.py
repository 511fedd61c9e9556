"""Warm starts out of profiles: model fusion against others, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from bench.fusion_plan import FusionPlan
from bench.fusion_sine import measure_sine
from bench.fusion_timing import measure_timing
from bench.report import Bar, Report
from bench.warm_start_parts import measure_movielens, measure_profiles

#: Runs a part, shows its tables and draws its pictures where the plan says so; gives its results and claims.
Part = Callable[[FusionPlan, bool, Console], tuple[dict[str, Any], list[Bar]]]
PARTS: Final[Mapping[str, Part]] = {
    "sine": measure_sine,
    "profiles": measure_profiles,
    "movielens": measure_movielens,
    "timing": measure_timing,
}


def measure_fusion(plan: FusionPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Some parts, one after the other."""
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for part in parts:
        results[part], found = PARTS[part](plan, quick, console)
        bars += found
    settings = {"seeds": list(plan.seeds), "parts": list(parts), **asdict(plan.settings)}
    return Report("fusion", settings, results, bars, quick)
