"""Plots of the shop: clicks a slate over time, one picture for all variants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from metaban.bench.core.report import Report
from metaban.bench.core.summaries import Curve
from metaban.bench.shop.players import OURS, RIVALS
from metaban.bench.shop.shop import by_clicks

#: Points of a curve that a moving mean covers, as a share of all points.
WINDOW_SHARE: Final = 0.1

#: Plots side by side, and inches of one.
COLUMNS: Final = 2
PLOT_INCHES: Final = (7.0, 4.2)

#: Ends of the scale, drawn with broken lines.
ENDS: Final = ("random", "oracle")


def plot_shop(report: Report, path: Path) -> None:
    """Moving mean of clicks a slate, mean over seeds; the legend has the mean of the whole run."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    variants, slates = report.results["variants"], np.array(report.results["curve_slates"], dtype=np.float64)
    columns = min(COLUMNS, len(variants))
    rows = -(-len(variants) // columns)
    figure = Figure(figsize=(PLOT_INCHES[0] * columns, PLOT_INCHES[1] * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    colours = colormaps["tab10"]
    for axes in grid.flat[len(variants) :]:
        axes.set_axis_off()
    for axes, (name, found) in zip(grid.flat, variants.items(), strict=False):
        for method in by_clicks(found["methods"]):
            row = found["methods"][method]
            label = f"{method}  {row['clicks_mean']:.2f}"
            ends, rates = moving_rates(slates, row["curve"])
            if method in ENDS:
                axes.plot(ends, rates, "--", color="grey", lw=1, label=label)
                continue
            colour = "black" if method == OURS else colours(RIVALS.index(method))
            axes.plot(ends, rates, color=colour, lw=2.4 if method == OURS else 1.3, label=label)
        axes.set(title=name, xlabel="slate", ylabel="clicks a slate, moving mean", xlim=(0, slates[-1]), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def moving_rates(slates: Curve, summed: Sequence[float]) -> tuple[Curve, Curve]:
    """Ends of moving windows, and the clicks a slate in each, from cumulative clicks at some slates."""
    window = max(1, round(WINDOW_SHARE * len(slates)))
    at, total = np.concatenate([[0], slates]), np.concatenate([[0.0], summed])
    return at[window:], (total[window:] - total[:-window]) / (at[window:] - at[:-window])
