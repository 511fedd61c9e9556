"""Bayesian meta-learning against others, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from bench.bayes_bandits import measure_bandits, measure_calibration
from bench.bayes_cost import measure_cost
from bench.bayes_fewshot import measure_fewshot
from bench.bayes_gradient import measure_gradient
from bench.bayes_heads import measure_heads
from bench.bayes_plan import BayesPlan
from bench.bayes_sine import measure_sinusoids
from bench.bayes_tuning import measure_tuning
from bench.report import Bar, Report

#: Runs a part, shows its tables and draws its pictures where the plan says so; gives its results and claims.
Part = Callable[[BayesPlan, bool, Console], tuple[dict[str, Any], list[Bar]]]
PARTS: Final[Mapping[str, Part]] = {
    "sinusoids": measure_sinusoids,
    "gradient": measure_gradient,
    "cost": measure_cost,
    "heads": measure_heads,
    "fewshot": measure_fewshot,
    "bandits": measure_bandits,
    "calibration": measure_calibration,
    "tuning": measure_tuning,
}
#: What is run unless something is asked for: settings stay as they were chosen.
USUAL: Final = tuple(name for name in PARTS if name != "tuning")


def measure_bayes(plan: BayesPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Some parts, one after the other."""
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for part in parts:
        results[part], found = PARTS[part](plan, quick, console)
        bars += found
    sizes = {name: value for name, value in asdict(plan).items() if name not in {"data", "plot"}}
    return Report("bayes", {"parts": list(parts), **sizes}, results, bars, quick)
