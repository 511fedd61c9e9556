"""Clicks a slate of the shipped learner and its rivals in variants of the shop, on the same visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import Console
from rich.table import Table

from metaban.bench.core.parallel import Failure, run_all
from metaban.bench.core.report import Bar, Report
from metaban.bench.core.summaries import CONFIDENCE, curve_places, ratio_interval, summed_curves
from metaban.bench.shop.players import METHODS, OURS, RIVALS, unavailable
from metaban.bench.shop.runs import ShopOutcome, ShopRun, execute
from metaban.bench.worlds.shop import Shop, ShopVariant

VARIANTS: Final[dict[str, ShopVariant]] = {
    "plain": ShopVariant(),
    "large": ShopVariant(items=1_000, users=943),
    "arrivals": ShopVariant(arrivals=True),
    "no-features": ShopVariant(features=False),
    "no-ids": ShopVariant(ids=False),
    "explained": ShopVariant(explained=True),
    "clicks-only": ShopVariant(clicks_only=True),
}

#: Slates of the claims, and sizes of a quick run.
FULL_SLATES: Final = 3_000
QUICK_SLATES: Final = 300
QUICK_ITEMS: Final = 60
QUICK_USERS: Final = 40

#: Slates at the start that have a column of their own; and the last sixth of all slates.
FIRST_SLATES: Final = 500
LAST_SHARE: Final = 6

#: Clicks a slate of the parts of a run, as results name them: all of it, its start and its end.
PARTS: Final = ("clicks", "first_clicks", "last_clicks")

#: Limits of clicks of the shipped learner over those of the best rival: mean over variants, and smallest.
MEAN_RATIO_LIMIT: Final = 1.10
SMALLEST_RATIO_LIMIT: Final = 1.00


@final
@dataclass(frozen=True, slots=True)
class ShopPlan:
    """Variants, methods and sizes of a run; items and users None means those of each variant."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    methods: tuple[str, ...] = METHODS
    slates: int = FULL_SLATES
    seeds: tuple[int, ...] = (300, 301, 302, 303, 304)
    items: int | None = None
    users: int | None = None
    data: Path | None = None

    def variant(self, name: str) -> ShopVariant:
        """A variant with the sizes of this plan."""
        variant = VARIANTS[name]
        return replace(variant, items=self.items or variant.items, users=self.users or variant.users)


def measure_shop(plan: ShopPlan, *, jobs: int, quick: bool, console: Console) -> Report:
    """Run every method in every variant on every seed; prints which methods are skipped."""
    Shop(plan.variant(plan.variants[0]), seed=plan.seeds[0], data=plan.data)  # raises DataMissing before any run
    skipped = {name: reason for name in plan.methods if (reason := unavailable(name)) is not None}
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
    runs = [
        ShopRun(method, name, plan.variant(name), seed, plan.slates, plan.data)
        for name in plan.variants
        for method in plan.methods
        if method not in skipped
        for seed in plan.seeds
    ]
    outcomes, failures = run_all(execute, runs, jobs=jobs, console=console, unit="slates")
    failed = {failure.label for failure in failures}
    ended = [outcome for outcome in outcomes if outcome.run.label not in failed]
    variants = {
        name: variant_results([outcome for outcome in ended if outcome.run.variant_name == name])
        for name in plan.variants
    }
    results = {
        "variants": variants,
        "curve_slates": [place + 1 for place in curve_places(plan.slates)],
        "failures": [_failure_row(failure) for failure in failures],
        "skipped": skipped,
    }
    settings = {
        "variants": {name: _sizes(plan.variant(name)) for name in plan.variants},
        "methods": list(plan.methods),
        "slates": plan.slates,
        "seeds": list(plan.seeds),
        "jobs": jobs,
    }
    return Report("shop", settings, results, shop_bars(plan, variants, quick=quick), quick)


def _sizes(variant: ShopVariant) -> dict[str, int | bool]:
    return {name: getattr(variant, name) for name in ShopVariant.__slots__}


def _failure_row(failure: Failure) -> dict[str, Any]:
    return {"method": failure.label, "seed": failure.seed, "error": failure.error}


def variant_results(outcomes: Sequence[ShopOutcome]) -> dict[str, Any]:
    """Results of the methods in one variant, and the shipped learner against the best rival."""
    grouped: dict[str, list[ShopOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.run.method, []).append(outcome)
    methods = {name: _summary(group) for name, group in grouped.items()}
    best = max((name for name in RIVALS if name in methods), key=lambda name: _mean(methods, name), default=None)
    compared = OURS in methods and best is not None and _mean(methods, best) > 0
    return {
        "methods": methods,
        "best_baseline": best,
        "ratio": _mean(methods, OURS) / _mean(methods, best) if compared and best else None,
        "ratio_interval": ratio_interval(methods[OURS]["clicks"], methods[best]["clicks"])
        if compared and best
        else None,
    }


def _summary(group: Sequence[ShopOutcome]) -> dict[str, Any]:
    """One method over its seeds: clicks a slate in the whole run, in the first slates and in the last ones."""
    last = max(1, len(group[0].clicks) // LAST_SHARE)
    row: dict[str, Any] = {}
    for name, part in zip(PARTS, (slice(None), slice(FIRST_SLATES), slice(-last, None)), strict=True):
        means = [float(outcome.clicks[part].mean()) for outcome in group]
        row |= {f"{name}_mean": float(np.mean(means)), f"{name}_sd": _deviation(means), name: means}
    return {
        **row,
        **summed_curves([outcome.clicks for outcome in group]),
        "decision_ms": float(np.mean([outcome.decision_ms for outcome in group])),
        "update_ms": float(np.mean([outcome.update_ms for outcome in group])),
        "settings": dict(group[0].settings),
    }


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _mean(methods: Mapping[str, Any], name: str) -> float:
    return float(methods[name]["clicks_mean"])


def shop_bars(plan: ShopPlan, variants: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """The mean ratio over the variants that were run, and the smallest; names say when a run is not the full one."""
    ratios = {name: found["ratio"] for name, found in variants.items() if found["ratio"] is not None}
    if not ratios:
        return []
    size = f", {plan.slates:,} slates" if plan.slates != FULL_SLATES else ""
    note = f"{size}{', quick' if quick else ''}"
    smallest = min(ratios, key=ratios.__getitem__)
    mean = float(np.mean(list(ratios.values())))
    return [
        Bar(f"shop: clicks / best rival, mean of {', '.join(ratios)}{note}", mean, ">=", MEAN_RATIO_LIMIT),
        Bar(f"shop: clicks / best rival, smallest ({smallest}){note}", ratios[smallest], ">=", SMALLEST_RATIO_LIMIT),
    ]


def print_shop(report: Report, console: Console) -> None:
    """Print a table for each variant, most clicks first; ratios are to the best rival."""
    for name, found in report.results["variants"].items():
        sizes = report.settings["variants"][name]
        console.print(
            f"[bold]{name}[/] {sizes['items']:,} items, {sizes['users']:,} users; clicks a slate", highlight=False
        )
        _print_variant(found, report.settings["slates"], console)
    for failure in report.results["failures"]:
        console.print(
            f"failed: {failure['method']}, seed {failure['seed']}: {failure['error']}", style="red", markup=False
        )
    if report.bars:
        report.print_bars(console)


def _print_variant(found: Mapping[str, Any], slates: int, console: Console) -> None:
    methods, best = found["methods"], found["best_baseline"]
    last = max(1, slates // LAST_SHARE)
    table = Table("method", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for heading in (
        "all slates",
        f"first {min(slates, FIRST_SLATES)}",
        f"last {last}",
        "ms/slate",
        "ms/update",
        "ratio",
    ):
        table.add_column(heading, justify="right")
    for name in by_clicks(methods):
        row = methods[name]
        means, deviations = ([row[f"{part}_{kind}"] for part in PARTS] for kind in ("mean", "sd"))
        several = len(row["clicks"]) > 1
        parts = [f"{mean:.3f}" + (f" ±{sd:.3f}" if several else "") for mean, sd in zip(means, deviations, strict=True)]
        times = (f"{row['decision_ms']:.2f}", f"{row['update_ms']:.2f}")
        table.add_row(name, *parts, *times, f"{_mean(methods, name) / _mean(methods, best):.3f}" if best else "")
    console.print(table)
    if found["ratio_interval"] is not None:
        low, high = found["ratio_interval"]
        console.print(f"{OURS} / {best}, paired by seed, {CONFIDENCE:.0%} interval: {low:.3f} to {high:.3f}")


def by_clicks(methods: Mapping[str, Any]) -> list[str]:
    """Names, most clicks first."""
    return sorted(methods, key=lambda name: -_mean(methods, name))
