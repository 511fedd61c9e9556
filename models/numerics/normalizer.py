"""Standardisation of inputs: moments that merge exactly, and the transform they give.

Moments are kept in float64 as (count, mean, Σ(x − mean)²) and combined by the parallel update of Chan, Golub and
LeVeque (1979), which does not cancel when the mean is large. The transform is fixed for an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array, bounded

#: A column whose deviation is below this share of its mean counts as constant and is not transformed.
CONSTANT_RELATIVE_SPREAD = 1e-6


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean [d] and sum of squared deviations [d] of the rows seen, in float64."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, rows: Tensor, valid: Tensor) -> Self:
        """The moments of rows [n, d] where valid [n] holds."""
        weight = valid.to(torch.float64).unsqueeze(-1)  # [n, 1]
        count = weight.sum()
        values = rows.to(torch.float64)
        mean = (values * weight).sum(0) / count.clamp_min(1)  # [d]
        return cls(count, mean, ((values - mean).square() * weight).sum(0))

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of rows together."""
        count = self.count + other.count
        total = count.clamp_min(1)
        shift = other.mean - self.mean  # [d]
        return Moments(
            count,
            self.mean + shift * (other.count / total),
            self.squares + other.squares + shift.square() * (self.count * other.count / total),
        )

    def transform(self) -> tuple[Tensor, Tensor]:
        """(mean, scale), both [d], for `standardize`; constant columns get mean 0 and scale 1."""
        deviation = (self.squares / self.count.clamp_min(1)).sqrt()
        constant = deviation <= CONSTANT_RELATIVE_SPREAD * (self.mean.abs() + CONSTANT_RELATIVE_SPREAD)
        mean = torch.where(constant, torch.zeros_like(self.mean), self.mean)
        return mean, torch.where(constant, torch.ones_like(deviation), deviation)


#: Values further than this many (robust) deviations from a column's median are clipped before moments are taken.
OUTLIER_DEVIATIONS = 20.0

#: The robust deviation is the larger of two: half of all values of a normal distribution lie within 0.6745 standard
#: deviations, nine tenths within 1.6449. In a column that is mostly one value, such as a pixel or a count, the first
#: is 0 although the other values are no outliers.
HALF_WITHIN, MOST_WITHIN = 0.6745, 1.6449

#: Largest number of values for quantiles; with more, evenly spaced rows are used.
QUANTILE_NUMBERS_MAX = 1 << 22


def winsorize(rows: Tensor, valid: Tensor) -> Tensor:
    """Rows [n, d] with outliers clipped, in float64, so that one absurd value does not blank its column.

    A column of which more than nine tenths are one value has no robust deviation and is left as it is.
    """
    if not rows.shape[0]:
        return rows.to(torch.float64)
    values = torch.where(valid.unsqueeze(-1), rows.to(torch.float64), torch.nan)
    step = -(-values.numel() // QUANTILE_NUMBERS_MAX) if values.numel() > QUANTILE_NUMBERS_MAX else 1
    some = values[::step]
    median = some.nanmedian(0).values  # [d]
    away = (some - median).abs()
    half = away.nanmedian(0).values / HALF_WITHIN
    most = away.nanquantile(0.9, dim=0) / MOST_WITHIN
    deviation = torch.maximum(half, most)  # [d]
    reach = torch.where(deviation > 0, OUTLIER_DEVIATIONS * deviation, torch.inf)
    drawn = torch.maximum(torch.minimum(values, median + reach), median - reach)
    drawn = torch.where(median.isnan(), values, drawn)  # none of the sampled rows was valid
    return torch.where(valid.unsqueeze(-1), drawn, 0.0)


def repeated_share(rows: Tensor, valid: Tensor) -> Tensor:
    """Share [d] of the valid rows [n] of [n, d] that repeat the most frequent value of a column; 0 if all differ."""
    step = max(1, -(-rows.numel() // QUANTILE_NUMBERS_MAX))
    values, real = rows[::step], valid[::step].unsqueeze(-1)
    if not values.shape[0]:
        return values.new_zeros(values.shape[1])
    ordered = torch.where(real, values, torch.nan).sort(0).values  # NaN differs from NaN
    place = torch.arange(ordered.shape[0], device=rows.device).unsqueeze(-1)  # [n, 1]
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[1:] = ordered[1:] == ordered[:-1]
    first = torch.where(repeats, 0, place).cummax(0).values  # [n, d], where the run of equal values begins
    return (place - first).amax(0) / real.sum().clamp_min(1).to(rows.dtype)


#: Standardised inputs are clipped at this many deviations, so that one absurd feature does not disturb a network.
LARGEST_DEVIATION = 10.0


def standardize(x: Array, mean: Array, scale: Array) -> Array:
    """(x − mean) / scale, clipped at ±LARGEST_DEVIATION: x [..., d], mean and scale [d]."""
    return bounded((x - mean) / scale, -LARGEST_DEVIATION, LARGEST_DEVIATION)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖, and 0 for 0: x [..., d]. The largest entry is divided out first: squares overflow before norms do."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    scaled = x / largest
    return scaled / scaled.square().sum(-1, keepdim=True).sqrt().clamp_min(1)
