"""Clicks a slate of the shipped learner and its rivals in variants of the shop, on the same visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import Console
from rich.table import Table

from metaban.bench.core.parallel import Failure, run_all
from metaban.bench.core.report import Report
from metaban.bench.core.summaries import CONFIDENCE, Curve, curve_places, ratio_interval, summed_curves
from metaban.bench.shop.claims import prefixes, shop_bars
from metaban.bench.shop.players import METHODS, OURS, OVER_HTTP, RIVALS, unavailable
from metaban.bench.shop.runs import ShopOutcome, ShopRun, execute
from metaban.bench.shop.variants import FULL_SLATES, VARIANTS, usual_slates, variant_of
from metaban.bench.worlds.shop import Shop, ShopVariant

#: Seeds of reported results.
REPORTING_SEEDS: Final = (300, 301, 302, 303, 304)

#: Variants, slates and seeds of a quick run.
QUICK_VARIANTS: Final = ("60x40",)
QUICK_SLATES: Final = 300
QUICK_SEEDS: Final = (240, 241)

#: Part of a run at its end that has a column of its own: one in so many slates.
LAST_SHARE: Final = 6


@final
@dataclass(frozen=True, slots=True)
class ShopPlan:
    """Variants, methods and sizes of a run; slates None means those of each variant."""

    variants: tuple[str, ...] = VARIANTS
    methods: tuple[str, ...] = METHODS
    slates: int | None = None
    seeds: tuple[int, ...] = REPORTING_SEEDS
    data: Path | None = None

    @classmethod
    def usual(cls, *, quick: bool) -> ShopPlan:
        """Everything but `metaban-http`; a quick run is small."""
        return cls(QUICK_VARIANTS, METHODS, QUICK_SLATES, QUICK_SEEDS) if quick else cls()

    @classmethod
    def through_http(cls, *, quick: bool) -> ShopPlan:
        """The shipped learner in one process and through HTTP, on one seed."""
        small = cls.usual(quick=quick)
        return cls(small.variants[:1], (OURS, OVER_HTTP), small.slates or FULL_SLATES, small.seeds[:1])

    def slates_of(self, name: str) -> int:
        """Slates of a run in a variant."""
        return self.slates or usual_slates(name)


def measure_shop(plan: ShopPlan, *, jobs: int, quick: bool, console: Console) -> Report:
    """Run every method in every variant on every seed; prints which methods are skipped."""
    Shop(variant_of(plan.variants[0]), seed=plan.seeds[0], data=plan.data)  # raises DataMissing before any run
    skipped = {name: reason for name in plan.methods if (reason := unavailable(name)) is not None}
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
    runs = [
        ShopRun(method, name, variant_of(name), seed, plan.slates_of(name), plan.data)
        for name in plan.variants
        for method in plan.methods
        if method not in skipped
        for seed in plan.seeds
    ]
    outcomes, failures = run_all(execute, runs, jobs=jobs, console=console, unit="slates")
    failed = {failure.label for failure in failures}
    ended = [outcome for outcome in outcomes if outcome.run.label not in failed]
    variants = {
        name: variant_results([outcome for outcome in ended if outcome.run.variant_name == name], plan.slates_of(name))
        for name in plan.variants
    }
    results = {
        "variants": variants,
        "failures": [_failure_row(failure) for failure in failures],
        "skipped": skipped,
    }
    settings = {
        "variants": {name: {**_sizes(variant_of(name)), "slates": plan.slates_of(name)} for name in plan.variants},
        "methods": list(plan.methods),
        "seeds": list(plan.seeds),
        "jobs": jobs,
    }
    return Report("shop", settings, results, shop_bars(variants, quick=quick), quick)


def _sizes(variant: ShopVariant) -> dict[str, int | bool]:
    return {name: getattr(variant, name) for name in ShopVariant.__slots__}


def _failure_row(failure: Failure) -> dict[str, Any]:
    return {"method": failure.label, "seed": failure.seed, "error": failure.error}


def variant_results(outcomes: Sequence[ShopOutcome], slates: int) -> dict[str, Any]:
    """Results of the methods in one variant, and the shipped learner against the best rival over each prefix."""
    grouped: dict[str, list[ShopOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.run.method, []).append(outcome)
    methods = {name: _summary(group, slates) for name, group in grouped.items()}
    return {
        "slates": slates,
        "methods": methods,
        "comparisons": {str(length): _comparison(methods, str(length)) for length in prefixes(slates)},
        "curve_slates": [place + 1 for place in curve_places(slates)],
    }


def _summary(group: Sequence[ShopOutcome], slates: int) -> dict[str, Any]:
    """One method over its seeds: clicks a slate in the whole run, in prefixes of it and at its end."""
    last = [outcome.clicks[-_last_slates(slates) :] for outcome in group]
    return {
        **_part("clicks", [outcome.clicks for outcome in group]),
        "prefixes": {
            str(length): _part("clicks", [outcome.clicks[:length] for outcome in group]) for length in prefixes(slates)
        },
        **_part("last_clicks", last),
        **summed_curves([outcome.clicks for outcome in group]),
        "decision_ms": float(np.mean([outcome.decision_ms for outcome in group])),
        "update_ms": float(np.mean([outcome.update_ms for outcome in group])),
        "settings": dict(group[0].settings),
    }


def _part(name: str, clicks: Sequence[Curve]) -> dict[str, Any]:
    """Clicks a slate in a part of the run: of each seed, and their mean and standard deviation."""
    means = [float(of_seed.mean()) for of_seed in clicks]
    deviation = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    return {f"{name}_mean": float(np.mean(means)), f"{name}_sd": deviation, name: means}


def _comparison(methods: Mapping[str, Any], length: str) -> dict[str, Any]:
    """The shipped learner against the rival with the most clicks over these first slates."""
    clicks = {name: row["prefixes"][length] for name, row in methods.items()}
    best = max((name for name in RIVALS if name in clicks), key=lambda name: clicks[name]["clicks_mean"], default=None)
    if best is None or OURS not in clicks or not clicks[best]["clicks_mean"]:
        return {"best_baseline": best, "ratio": None, "ratio_interval": None}
    return {
        "best_baseline": best,
        "ratio": clicks[OURS]["clicks_mean"] / clicks[best]["clicks_mean"],
        "ratio_interval": ratio_interval(clicks[OURS]["clicks"], clicks[best]["clicks"]),
    }


def _last_slates(slates: int) -> int:
    return max(1, slates // LAST_SHARE)


def print_shop(report: Report, console: Console) -> None:
    """Print a table for each variant, most clicks first, and the shipped learner against the best rival."""
    for name, found in report.results["variants"].items():
        sizes = report.settings["variants"][name]
        title = f"{sizes['items']:,} items, {sizes['users']:,} users; clicks a slate in the first …"
        console.print(f"[bold]{name}[/] {title}", highlight=False)
        _print_variant(found, console)
    for failure in report.results["failures"]:
        console.print(
            f"failed: {failure['method']}, seed {failure['seed']}: {failure['error']}", style="red", markup=False
        )
    if report.bars:
        report.print_bars(console)


def _print_variant(found: Mapping[str, Any], console: Console) -> None:
    methods, slates = found["methods"], found["slates"]
    table = Table("method", box=None, pad_edge=False)
    lengths = [f"{length:,}" for length in prefixes(slates)]
    for heading in (*lengths, f"last {_last_slates(slates):,}", "ms/slate", "ms/update"):
        table.add_column(heading, justify="right")
    for column in table.columns:
        column.no_wrap = True
    for name in by_clicks(methods):
        row = methods[name]
        cells = [_cell(part, "clicks") for part in row["prefixes"].values()] + [_cell(row, "last_clicks")]
        table.add_row(name, *cells, f"{row['decision_ms']:.2f}", f"{row['update_ms']:.2f}")
    console.print(table)
    for length, compared in found["comparisons"].items():
        if compared["ratio"] is not None:
            console.print(_comparison_line(int(length), compared), highlight=False)


def _cell(part: Mapping[str, Any], name: str) -> str:
    deviation = f"±{part[f'{name}_sd']:.2f}".replace("±0", "±") if len(part[name]) > 1 else ""
    return f"{part[f'{name}_mean']:.3f}{deviation}"


def _comparison_line(length: int, compared: Mapping[str, Any]) -> str:
    line = f"{OURS} / {compared['best_baseline']}, {length:,} slates: {compared['ratio']:.3f}"
    if compared["ratio_interval"] is None:
        return line
    low, high = compared["ratio_interval"]
    return f"{line}, paired {CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"


def by_clicks(methods: Mapping[str, Any]) -> list[str]:
    """Names, most clicks first."""
    return sorted(methods, key=lambda name: -float(methods[name]["clicks_mean"]))
