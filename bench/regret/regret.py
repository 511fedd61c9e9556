"""Cumulative regret of learners, baselines and Vowpal Wabbit in one environment, on the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import Console
from rich.table import Table

from metaban.bench.core.parallel import Failure, run_all
from metaban.bench.core.report import Bar, Report
from metaban.bench.core.summaries import CONFIDENCE, curve_places, ratio_interval, summed_curves
from metaban.bench.regret.methods import METHODS, RIVALS, VARIANTS, unavailable
from metaban.bench.regret.runs import Contender, Outcome, Run, execute
from metaban.bench.worlds.environments import build_environment

#: Rounds of the claims and of a quick run; fewer where inputs are wide and most methods slow.
FULL_ROUNDS: Final = 10_000
QUICK_ROUNDS: Final = 500
QUICK_ROUNDS_OF: Final = {"mnist": 150}

#: Limits of the regret of `default` over that of the best baseline.
RATIO_LIMITS: Final = {
    "movielens": 0.80, "yelp": 0.94, "service": 0.87, "mnist": 0.80, "synthetic": 0.80,
    "digits": 1.0, "categories-50": 1.0, "categories-200": 1.0, "revenue": 1.0,
}  # fmt: skip

#: Limits of the regret of `default` over that of one of its variants, by environment.
VARIANT_LIMITS: Final = {"service": {"shared-net": 0.80}, "synthetic": {"default-no-kinds": 0.95}}

#: Regret of the authors' public code, the limit for `pooled`.
POOLED_LIMITS: Final = {"movielens": 6_045.0, "yelp": 7_493.0}


@final
@dataclass(frozen=True, slots=True)
class RegretPlan:
    """Environment, methods and sizes of a run."""

    env: str
    methods: tuple[str, ...]
    rounds: int = FULL_ROUNDS
    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None


def usual_methods(env: str) -> tuple[str, ...]:
    """Methods that run by default: all, and the variants that a claim is about."""
    extra = [name for name in VARIANT_LIMITS.get(env, {}) if name not in METHODS]
    return (*METHODS, *extra)


def ablation_methods() -> tuple[str, ...]:
    """`default` and each variant without one of its components."""
    return ("default", *VARIANTS)


def measure_regret(plan: RegretPlan, *, jobs: int, quick: bool, console: Console) -> Report:
    """Run every method on every seed; prints which methods are skipped."""
    world = build_environment(plan.env, seed=plan.seeds[0], data=plan.data)
    skipped = print_skipped(plan.methods, console)
    runs = [
        Run(Contender.plain(name), plan.env, seed, plan.rounds, plan.data)
        for name in plan.methods
        if name not in skipped
        for seed in plan.seeds
    ]
    outcomes, failures = run_all(execute, runs, jobs=jobs, console=console)
    settings = {
        "env": plan.env,
        "users": world.users,
        "dimension": world.dimension,
        "methods": list(plan.methods),
        "rounds": plan.rounds,
        "seeds": list(plan.seeds),
        "jobs": jobs,
    }
    results = regret_results(outcomes, failures) | {"skipped": skipped}
    return Report("regret", settings, results, regret_bars(plan, results, quick=quick), quick)


def print_skipped(methods: Sequence[str], console: Console) -> dict[str, str]:
    """Print the methods that cannot run here; returns them with the reason."""
    skipped = {name: reason for name in methods if (reason := unavailable(name)) is not None}
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
    return skipped


def regret_results(outcomes: Sequence[Outcome], failures: Sequence[Failure]) -> dict[str, Any]:
    """Results of methods without a failed run, and `default` against the best baseline."""
    failed = {failure.label for failure in failures}
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.label not in failed:
            grouped.setdefault(outcome.label, []).append(outcome)
    methods = {label: _summary(group) for label, group in grouped.items()}
    best = min((name for name in RIVALS if name in methods), key=lambda name: _mean(methods, name), default=None)
    compared = best is not None and "default" in methods
    random = [outcome.random for outcome in next(iter(grouped.values()), [])]
    return {
        "methods": methods,
        "random": {"regret_mean": float(np.sum(random) / len(random)), **summed_curves(random)} if random else None,
        "curve_rounds": [place + 1 for place in curve_places(len(random[0]))] if random else [],
        "best_baseline": best,
        "ratio": ratio(methods, "default", best) if compared and best else None,
        "ratio_interval": ratio_interval(methods["default"]["regrets"], methods[best]["regrets"])
        if compared and best
        else None,
        "failures": [{"method": failure.label, "seed": failure.seed, "error": failure.error} for failure in failures],
    }


def _summary(group: Sequence[Outcome]) -> dict[str, Any]:
    """One method over its seeds."""
    regrets = [float(outcome.regret.sum()) for outcome in group]
    return {
        "regret_mean": float(np.mean(regrets)),
        "regret_sd": float(np.std(regrets, ddof=1)) if len(regrets) > 1 else 0.0,
        "regrets": regrets,
        **summed_curves([outcome.regret for outcome in group]),
        "decision_ms": float(np.mean([outcome.decision_ms for outcome in group])),
        "update_ms": float(np.mean([outcome.update_ms for outcome in group])),
        "settings": dict(group[0].settings),
    }


def _mean(methods: Mapping[str, Any], name: str) -> float:
    return float(methods[name]["regret_mean"])


def ratio(methods: Mapping[str, Any], name: str, other: str) -> float:
    """Mean regret of one method over that of another; 1 if both are 0."""
    above, below = _mean(methods, name), _mean(methods, other)
    return above / below if below else float(above == below)


def regret_bars(plan: RegretPlan, results: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """Bars of an environment for the methods that were run; names say when a run is not full size."""
    methods, best = results["methods"], results["best_baseline"]
    size = f", {plan.rounds:,} rounds" if plan.rounds != FULL_ROUNDS else ""
    note = f"{size}{', quick' if quick else ''}"
    bars = []
    if results["ratio"] is not None:
        of = "best baseline" if all(name in methods for name in RIVALS) else "best baseline that was run"
        name = f"{plan.env}: default / {of} ({best}){note}"
        bars.append(Bar(name, results["ratio"], "<=", RATIO_LIMITS[plan.env]))
    for variant, limit in VARIANT_LIMITS.get(plan.env, {}).items():
        if "default" in methods and variant in methods:
            bars.append(Bar(f"{plan.env}: default / {variant}{note}", ratio(methods, "default", variant), "<=", limit))
    if plan.env in POOLED_LIMITS and "pooled" in methods and plan.rounds == FULL_ROUNDS:
        name = f"{plan.env}: regret of pooled{note}"
        bars.append(Bar(name, _mean(methods, "pooled"), "<=", POOLED_LIMITS[plan.env]))
    return bars


def print_regret(report: Report, console: Console, *, against: str | None = None) -> None:
    """Print one row a method, least regret first; ratios are to the best baseline unless another method is named."""
    results = report.results
    methods, rival = results["methods"], against or results["best_baseline"]
    title = f"ratio to {rival}" if rival in methods else "ratio"
    table = Table("method", box=None, pad_edge=False)
    for heading in ("regret", "ms per decision", "ms per update", title):
        table.add_column(heading, justify="right")
    for name in by_regret(methods):
        row = methods[name]
        table.add_row(
            name,
            f"{row['regret_mean']:.1f} ± {row['regret_sd']:.1f}",
            f"{row['decision_ms']:.3f}",
            f"{row['update_ms']:.3f}",
            f"{ratio(methods, name, rival):.3f}" if rival in methods else "",
        )
    if results["random"] is not None:
        table.add_row("random", f"{results['random']['regret_mean']:.1f}", "", "", "")
    console.print(table)
    if results["ratio_interval"] is not None:
        low, high = results["ratio_interval"]
        console.print(
            f"default / {results['best_baseline']}, paired by seed, {CONFIDENCE:.0%} interval: {low:.3f} to {high:.3f}"
        )
    print_failures(results["failures"], console)
    if report.bars:
        report.print_bars(console)


def print_failures(failures: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the failed runs by method and seed."""
    for failure in failures:
        console.print(
            f"failed: {failure['method']}, seed {failure['seed']}: {failure['error']}", style="red", markup=False
        )


def by_regret(methods: Mapping[str, Any]) -> list[str]:
    """Names, least regret first."""
    return sorted(methods, key=lambda name: _mean(methods, name))
