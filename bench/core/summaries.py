"""Summaries of runs over seeds: cumulative curves, and the ratio of two methods paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]

#: Points of a curve in the report.
CURVE_POINTS: Final = 200

#: Confidence level of intervals.
CONFIDENCE: Final = 0.95


def curve_places(rounds: int) -> list[int]:
    """Rounds of a curve, counted from 0; includes the last."""
    points = min(rounds, CURVE_POINTS)
    places: list[int] = ((np.arange(1, points + 1) * rounds) // points - 1).tolist()
    return places


def summed_curves(values: Sequence[Curve]) -> dict[str, list[float]]:
    """Cumulative values at up to `CURVE_POINTS` rounds: mean, lowest and highest over seeds."""
    summed = np.cumsum(values, axis=1)[:, curve_places(len(values[0]))]  # [seeds, points]
    return {
        "curve": summed.mean(0).tolist(),
        "curve_least": summed.min(0).tolist(),
        "curve_most": summed.max(0).tolist(),
    }


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> list[float] | None:
    """t-interval of the ratio of two methods, paired by seed; None with fewer than two seeds or a zero below."""
    if len(above) < 2 or not all(below):
        return None
    ratios = np.array(above) / np.array(below)
    student: Any = import_module("scipy.stats").t  # slow to import, and untyped
    half = student.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1) * ratios.std(ddof=1) / np.sqrt(len(ratios))
    return [float(ratios.mean() - half), float(ratios.mean() + half)]
