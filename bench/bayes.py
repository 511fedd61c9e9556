"""Bayesian meta-learning against others, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from bench.bayes_bandits import measure_bandits, measure_calibration
from bench.bayes_cost import measure_cost
from bench.bayes_fewshot import measure_fewshot
from bench.bayes_gradient import measure_gradient
from bench.bayes_heads import measure_heads
from bench.bayes_plan import BayesPlan
from bench.bayes_sine import measure_sinusoids
from bench.bayes_tuning import measure_tuning
from bench.parts import Part, run_parts
from bench.report import Report

PARTS: Final[Mapping[str, Part[BayesPlan]]] = {
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
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    sizes = {name: value for name, value in asdict(plan).items() if name not in {"data", "plot"}}
    return Report("bayes", {"parts": list(parts), **sizes}, results, bars, quick)
