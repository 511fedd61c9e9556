"""Plots of the shop: clicks a slate over time, one picture a variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from metaban.bench.core.report import Report
from metaban.bench.core.summaries import Curve
from metaban.bench.shop.players import OURS, OVER_HTTP, RIVALS
from metaban.bench.shop.shop import by_clicks

#: Points of a curve that a moving mean covers, as a share of all points.
WINDOW_SHARE: Final = 0.1

PLOT_INCHES: Final = (8.0, 4.5)

#: Ends of the scale, drawn with broken lines.
ENDS: Final = ("random", "oracle")


def plot_shop(report: Report, folder: Path) -> None:
    """One plot a variant, named after it: moving mean of clicks a slate, mean over seeds.

    The legend has the mean of the whole run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in report.results["variants"].items():
        _draw_variant(name, found, folder / f"{name}.png")


def _draw_variant(name: str, found: Mapping[str, Any], path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=PLOT_INCHES, layout="constrained")
    axes = figure.subplots()
    colours, slates = colormaps["tab10"], np.array(found["curve_slates"], dtype=np.float64)
    for method in by_clicks(found["methods"]):
        row = found["methods"][method]
        label = f"{method}  {row['clicks_mean']:.2f}"
        ends, rates = moving_rates(slates, row["curve"])
        if method in ENDS:
            axes.plot(ends, rates, "--", color="grey", lw=1, label=label)
            continue
        ours = method in (OURS, OVER_HTTP)
        colour = "black" if ours else colours(RIVALS.index(method))
        dashes = ":" if method == OVER_HTTP else "-"
        axes.plot(ends, rates, dashes, color=colour, lw=2.4 if ours else 1.3, label=label)
    axes.set(title=name, xlabel="slate", ylabel="clicks a slate, moving mean", xlim=(0, slates[-1]), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def moving_rates(slates: Curve, summed: Sequence[float]) -> tuple[Curve, Curve]:
    """Ends of moving windows, and the clicks a slate in each, from cumulative clicks at some slates."""
    window = max(1, round(WINDOW_SHARE * len(slates)))
    at, total = np.concatenate([[0], slates]), np.concatenate([[0.0], summed])
    return at[window:], (total[window:] - total[:-window]) / (at[window:] - at[:-window])
