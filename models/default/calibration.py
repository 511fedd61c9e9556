"""Calibration: reliability of the predictions noted at decision time, against the rewards since.

The notes of a sample hold the predicted mean m, the deviation s = √(σ² + noise) of a reward around it, and the reach,
in these, of the interval that should hold 9 rewards in 10. Rewards lie in [0, 1], so the prediction is
p = min(max(m, 0), 1) and the interval p ± reach·s.

    ECE       Σ_b n_b/n · |mean prediction − mean reward| over ten bins of equal width         Naeini et al. (2015)
    MCE       the largest of these differences, over bins with enough samples
    coverage  the share of rewards inside their intervals

For normal rewards a reach of 1.645 would be right; most rewards are 0 or 1, and such an interval holds nearly all of
them. So the reach is learned: the least that would have held 9 in 10 of earlier samples (split conformal prediction,
Vovk et al., 2005). It changes no mean and no ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metaban.models.default.notes import Notes
from metaban.models.default.samples import Samples

#: Bins of equal width over [0, 1].
BINS: Final = 10

#: Largest number of samples used, newest first.
NEWEST: Final = 10_000

#: Target coverage of intervals, and the reach in deviations for normal rewards.
HELD: Final = 0.9
NORMAL_REACH: Final = 1.6448536269514722

#: Samples required to learn the reach, and the number of newest samples it is learned from: errors shrink as the
#: learner improves.
REACH_SAMPLES: Final = 100
REACH_NEWEST: Final = 1_000

#: A bin with fewer samples is left out of the MCE, where chance alone makes a large difference.
MCE_SAMPLES: Final = 50

#: Columns of a bin: samples, sum of predictions, sum of rewards, rewards inside their interval.
COLUMNS: Final = 4


def reliability_and_reach(samples: Samples, since: Tensor) -> tuple[Tensor, Tensor]:
    """Reliability [BINS, COLUMNS] of the newest samples since the last drift, and the reach [] for future intervals.

    Samples of one epoch are equally new; ties keep the order of the samples.
    """
    noted = (samples.notes.deviation > 0) & samples.notes.mean.isfinite()
    real = noted & (samples.weights > 0) & (samples.epochs >= since)
    newest = torch.where(real, samples.epochs, -1).argsort(descending=True, stable=True)[:NEWEST]  # [n]
    looks = samples.looks[newest]
    real, rewards = real[newest], samples.rewards[newest].to(torch.float64) * looks
    notes = Notes(samples.notes.stored[newest].to(torch.float64))
    predicted = torch.where(real, (notes.mean * looks).clamp(0, 1), 0)  # [n]
    miss = (rewards - predicted).abs()
    inside = miss <= notes.reach * notes.deviation
    numbers = torch.stack([torch.ones_like(miss), predicted, rewards, inside.to(miss)], dim=-1)  # [n, COLUMNS]
    bins = (predicted * BINS).to(torch.int64).clamp_max(BINS - 1)  # [n]
    table = numbers.new_zeros(BINS, COLUMNS).index_add(0, bins, torch.where(real.unsqueeze(-1), numbers, 0))
    misses = torch.where(real, miss / notes.deviation, torch.inf)  # in deviations
    return table, _reach(misses[:REACH_NEWEST], real[:REACH_NEWEST].sum())


def _reach(misses: Tensor, count: Tensor) -> Tensor:
    """The least multiple of the deviation [] that covers HELD of the `count` finite values among misses [n]."""
    # The (n + 1)·HELD-th of n: a future reward is equally likely to have any of n + 1 ranks.
    place = ((count + 1) * HELD).ceil().to(torch.int64).clamp(1, max(1, misses.shape[0])) - 1
    return torch.where(count >= REACH_SAMPLES, misses.sort().values[place], NORMAL_REACH)


@final
@dataclass(frozen=True, slots=True)
class ReliabilityTable:
    """Calibration measures of a reliability table."""

    table: NDArray[np.float64]  # [BINS, COLUMNS]

    @classmethod
    def of(cls, shared: dict[str, NDArray[Any]]) -> Self | None:
        """From an epoch's shared state; None without notes or rewards."""
        table = shared.get("reliability")
        return None if table is None or not table[:, 0].any() else cls(table.astype(np.float64))

    @property
    def count(self) -> int:
        """Number of samples."""
        return round(float(self.table[:, 0].sum()))

    @property
    def gaps(self) -> NDArray[np.float64]:
        """|mean prediction − mean reward| of each bin [BINS], 0 for an empty bin."""
        counts, predicted, rewards = self.table[:, :3].T
        gaps: NDArray[np.float64] = np.abs(predicted - rewards) / np.maximum(counts, 1)
        return gaps

    @property
    def ece(self) -> float:
        """The expected calibration error."""
        return float(self.table[:, 0] @ self.gaps) / self.count

    @property
    def mce(self) -> float | None:
        """The largest calibration error; None when no bin has enough samples."""
        enough = self.table[:, 0] >= MCE_SAMPLES
        return float(self.gaps[enough].max()) if enough.any() else None

    def summary(self) -> dict[str, float | None]:
        """All scalar measures by name."""
        return {"samples": self.count, "ece": self.ece, "mce": self.mce, "coverage": self.coverage}

    @property
    def coverage(self) -> float:
        """The share of rewards inside their interval."""
        return float(self.table[:, 3].sum()) / self.count
