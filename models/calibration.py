"""Whether predictions come true: reliability of what was noted when decisions were made, against the rewards since.

Everything rests on notes: what the learner would say now has seen the reward. Of each sample the notes have the mean m
that was expected, the deviation s of a reward around it, √(σ² + noise), and the reach, in these, of the interval that
was to hold 9 rewards in 10. Rewards lie between 0 and 1, so the prediction is p = min(max(m, 0), 1) and the interval
p ± reach·s.

    ECE       Σ_b n_b/n · |mean prediction − mean reward| over ten bins of equal width         Naeini et al. (2015)
    MCE       the largest of these differences, over bins with enough samples
    coverage  the share of rewards inside their intervals

Were rewards normal, a reach of 1.645 would do. Most are 0 or 1, and such an interval holds nearly all of them. So the
reach is learned: the least that would have held 9 in 10 of the samples before (split conformal prediction, Vovk et al.,
2005). It moves no mean and no ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.upkeep import DEVIATION, MEAN, REACH, Samples

#: Bins of equal width over [0, 1].
BINS: Final = 10
#: Samples that are judged at most, the newest.
NEWEST: Final = 10_000
#: Share of rewards that intervals are to hold, and the reach in deviations that would do for normal rewards.
HELD: Final = 0.9
NORMAL_REACH: Final = 1.6448536269514722
#: Samples from which on another reach is believed in, and how many it is learned from at most, the newest: a learner
#: that gets better misses by less than it used to.
REACH_SAMPLES: Final = 100
REACH_NEWEST: Final = 1_000
#: A bin with fewer samples does not count for the MCE: chance alone makes a large difference there.
MCE_SAMPLES: Final = 50
#: Of each bin: samples, sum of predictions, sum of rewards, rewards inside their interval.
COLUMNS: Final = 4


def judged(samples: Samples, since: Tensor) -> dict[str, Tensor]:
    """`reliability` [BINS, COLUMNS] of the newest samples since tastes changed, and the `reach` for those to come.

    Rows of the same epoch are equally new; no order is known between them but that of the samples.
    """
    noted = (samples.notes[:, DEVIATION] > 0) & samples.notes[:, MEAN].isfinite()
    real = noted & (samples.weights > 0) & (samples.epochs >= since)
    newest = torch.where(real, samples.epochs, -1).argsort(descending=True, stable=True)[:NEWEST]  # [n]
    real, rewards = real[newest], samples.rewards[newest].to(torch.float64)
    notes = samples.notes[newest].to(torch.float64)
    predicted = torch.where(real, notes[:, MEAN].clamp(0, 1), 0)  # [n]
    miss = (rewards - predicted).abs()
    inside = miss <= notes[:, REACH] * notes[:, DEVIATION]
    numbers = torch.stack([torch.ones_like(miss), predicted, rewards, inside.to(miss)], dim=-1)  # [n, COLUMNS]
    bins = (predicted * BINS).to(torch.int64).clamp_max(BINS - 1)  # [n]
    table = numbers.new_zeros(BINS, COLUMNS).index_add(0, bins, torch.where(real.unsqueeze(-1), numbers, 0))
    misses = torch.where(real, miss / notes[:, DEVIATION], torch.inf)  # in deviations
    return {"reliability": table, "reach": _reach(misses[:REACH_NEWEST], real[:REACH_NEWEST].sum())}


def _reach(misses: Tensor, count: Tensor) -> Tensor:
    """The least multiple of the deviation [] that holds HELD of `count` misses, which are those of [n] not infinite."""
    # The (n + 1)·HELD-th of n: a reward to come is as likely to be any of n + 1.
    place = ((count + 1) * HELD).ceil().to(torch.int64).clamp(1, max(1, misses.shape[0])) - 1
    return torch.where(count >= REACH_SAMPLES, misses.sort().values[place], NORMAL_REACH)


@final
@dataclass(frozen=True, slots=True)
class Reliability:
    """What a table of reliability says."""

    table: NDArray[np.float64]  # [BINS, COLUMNS]

    @classmethod
    def of(cls, shared: dict[str, NDArray[Any]]) -> Self | None:
        """Of an epoch; None where nothing was noted, or nothing has come true yet."""
        table = shared.get("reliability")
        return None if table is None or not table[:, 0].any() else cls(table.astype(np.float64))

    @property
    def count(self) -> int:
        """Samples that were judged."""
        return round(float(self.table[:, 0].sum()))

    @property
    def gaps(self) -> NDArray[np.float64]:
        """|mean prediction − mean reward| of each bin [BINS], 0 where it is empty."""
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
        """All of it that is one number, by name."""
        return {"samples": self.count, "ece": self.ece, "mce": self.mce, "coverage": self.coverage}

    @property
    def coverage(self) -> float:
        """The share of rewards inside their interval."""
        return float(self.table[:, 3].sum()) / self.count
