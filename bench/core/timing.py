"""Times of two or more ways to do the same work, measured in turns; claims are about their ratio, which noise affects
least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

#: Resamples behind an interval, and its confidence level.
RESAMPLES: Final = 1_000
CONFIDENCE: Final = 0.95

#: Numbers drawn at once for resamples.
RESAMPLED_NUMBERS_MAX: Final = 1 << 22

#: Does the work once; gets the number of the call.
Work = Callable[[int], object]


@final
@dataclass(frozen=True, slots=True)
class Side:
    """Name and times of one side in seconds [rounds, calls per round]."""

    name: str
    times: Times

    def summary(self) -> dict[str, Any]:
        """Percentiles and all times in milliseconds."""
        p25, p50, p75, p99 = np.percentile(self.times, [25, 50, 75, 99]) * 1_000
        return {
            "name": self.name,
            "calls": self.times.size,
            "p25_ms": float(p25),
            "p50_ms": float(p50),
            "p75_ms": float(p75),
            "p99_ms": float(p99),
            "times_ms": [round(float(each), 6) for each in self.times.ravel() * 1_000],
        }


@final
@dataclass(frozen=True, slots=True)
class Race:
    """Two sides; the ratio is the median of `above` over the median of `below`."""

    above: Side
    below: Side

    @property
    def ratio(self) -> float:
        """Median over median."""
        return float(np.median(self.above.times) / np.median(self.below.times))

    def interval(self) -> tuple[float, float]:
        """Confidence interval of the ratio by a paired bootstrap over rounds."""
        above, below = np.median(self.above.times, axis=1), np.median(self.below.times, axis=1)  # [rounds]
        random, rounds = np.random.default_rng(0), len(above)
        ratios: list[float] = []
        while len(ratios) < RESAMPLES:
            drawn = random.integers(rounds, size=(max(1, min(RESAMPLES, RESAMPLED_NUMBERS_MAX // rounds)), rounds))
            ratios += (np.median(above[drawn], axis=1) / np.median(below[drawn], axis=1)).tolist()
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(ratios, [tail, 100 - tail])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """Both sides and their ratio."""
        return {
            "ratio": self.ratio,
            "interval": list(self.interval()),
            "above": self.above.summary(),
            "below": self.below.summary(),
        }


def take_turns(
    works: Mapping[str, Work],
    *,
    rounds: int,
    calls: Sequence[int] | None = None,
    between: Callable[[int], None] = lambda turn: None,
) -> list[Side]:
    """Run all works in turns, with a number of calls of each per round. Work done `between` rounds is not timed.

    An additional first round warms caches and does not count.
    """
    counts = calls or [1] * len(works)
    times = [np.empty((rounds + 1, count)) for count in counts]
    for turn in range(rounds + 1):
        for work, held, count in zip(works.values(), times, counts, strict=True):
            for call in range(count):
                number = turn * count + call
                start = time.perf_counter()
                work(number)
                held[turn, call] = time.perf_counter() - start
        between(turn)
    return [Side(name, held[1:]) for name, held in zip(works, times, strict=True)]
