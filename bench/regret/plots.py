"""Plots of the regret benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metaban.bench.core.report import Report
from metaban.bench.regret.regret import by_regret
from metaban.bench.regret.scenarios import NU_GAMMA, NUS, RECOVERED


def plot_regret(report: Report, path: Path) -> None:
    """Cumulative regret by round: mean over seeds, with a band from the lowest to the highest."""
    title = f"Regret on {report.settings['env']}, {len(report.settings['seeds'])} seeds"
    _draw_curves(report.results, path, title)


def _draw_curves(results: Mapping[str, Any], path: Path, title: str) -> None:
    """Curves of methods; the legend is ordered as the curves end, from top to bottom."""
    from matplotlib import colormaps

    figure, axes = _picture(title, "round", "cumulative regret")
    rounds, colours = results["curve_rounds"], colormaps["tab20"]
    methods = dict(results["methods"]) | ({"random": results["random"]} if results["random"] else {})
    for place, name in enumerate(reversed(by_regret(methods))):
        row = methods[name]
        label = f"{name}  {_short(row['regret_mean'])}"
        if name == "random":
            axes.plot(rounds, row["curve"], "--", color="grey", label=label)
            continue
        colour = "black" if name == "default" else colours(place % colours.N)
        axes.plot(rounds, row["curve"], color=colour, lw=2.4 if name == "default" else 1.3, label=label)
        axes.fill_between(rounds, row["curve_least"], row["curve_most"], color=colour, alpha=0.15, lw=0)
    axes.set(xlim=(0, rounds[-1]), ylim=(0, None))
    figure.legend(loc="outside right upper", frameon=False)
    _save(figure, path)


def _short(regret: float) -> str:
    return f"{regret:,.0f}" if regret >= 100 else f"{regret:.3g}"


def plot_scenarios(report: Report, folder: Path) -> None:
    """One plot a scenario, named after it."""
    for name, results in report.results.items():
        if not results.get("methods"):
            continue
        path = folder / f"{name}.png"
        if "switch" in results:
            _draw_switch(results, path)
        elif name == "nu":
            _draw_nu(results, path)
        else:
            _draw_curves(results, path, results["claim"])


def _draw_switch(results: Mapping[str, Any], path: Path) -> None:
    """Reward rates before and after the switch, and those of a fresh start."""
    found, half = results["switch"], results["rounds"] // 2
    figure, axes = _picture(results["claim"], "round", f"expected reward, mean of {found['window']} rounds")
    for label, start in (("through the switch", 0), ("fresh start", half)):
        rates = found["rates"][label]
        axes.plot(np.arange(len(rates)) * found["rates_every"] + start + found["window"], rates, label=label)
    axes.axvline(half, color="grey", ls="--", label="all tastes change")
    axes.axhline(found["level"], color="grey", ls=":", label=f"{RECOVERED:.0%} of the rate before")
    axes.legend()
    _save(figure, path)


def _draw_nu(results: Mapping[str, Any], path: Path) -> None:
    """Regret against ν, as in Appendix A."""
    figure, axes = _picture(f"Group tolerance ν on {results['env']}, γ = {NU_GAMMA:g}", "ν", "regret")
    rows = [results["methods"].get(f"ν = {nu:g}") for nu in NUS]
    shown = [(nu, row) for nu, row in zip(NUS, rows, strict=True) if row is not None]
    axes.errorbar(
        [nu for nu, _ in shown],
        [row["regret_mean"] for _, row in shown],
        [row["regret_sd"] for _, row in shown],
        marker="o",
        capsize=3,
    )
    axes.set(xscale="log", xticks=NUS, xticklabels=[f"{nu:g}" for nu in NUS])
    axes.minorticks_off()
    _save(figure, path)


def _picture(title: str, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
