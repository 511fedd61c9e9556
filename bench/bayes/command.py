"""`metaban bench bayes`: Bayesian meta-learning against other methods, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from metaban.bench.bayes.bandits import measure_bandits, measure_calibration
from metaban.bench.bayes.cost import measure_cost
from metaban.bench.bayes.fewshot import measure_fewshot
from metaban.bench.bayes.gradient import measure_gradient
from metaban.bench.bayes.heads import measure_heads
from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.bayes.sine import measure_sinusoids
from metaban.bench.bayes.tuning import measure_tuning
from metaban.bench.core.report import Part, Report, run_parts

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

#: Parts that run by default: all but tuning.
USUAL: Final = tuple(name for name in PARTS if name != "tuning")


def measure_bayes(plan: BayesPlan, parts: Sequence[str], *, quick: bool, console: Console) -> Report:
    """Run the given parts, one after the other."""
    results, bars = run_parts(PARTS, parts, plan, quick=quick, console=console)
    sizes = {name: value for name, value in asdict(plan).items() if name not in {"data", "plot"}}
    return Report("bayes", {"parts": list(parts), **sizes}, results, bars, quick)
