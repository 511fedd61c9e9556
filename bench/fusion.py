"""Warm starts out of profiles: model fusion against others, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from bench.fusion_plan import FusionPlan
from bench.fusion_sine import measure_sine
from bench.fusion_timing import measure_timing
from bench.parts import Part, run_parts
from bench.report import Report
from bench.warm_start_parts import measure_movielens, measure_profiles

PARTS: Final[Mapping[str, Part[FusionPlan]]] = {
    "sine": measure_sine,
    "profiles": measure_profiles,
    "movielens": measure_movielens,
    "timing": measure_timing,
}


def measure_fusion(plan: FusionPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Some parts, one after the other."""
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    settings = {"seeds": list(plan.seeds), "parts": list(parts), **asdict(plan.settings)}
    return Report("fusion", settings, results, bars, quick)
