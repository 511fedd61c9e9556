"""What the default learner's networks and heads see of a raw input.

Inputs are standardised. The trunk also gets each of them as a piecewise-linear code: column j, cut at its quantiles
t₀ < … < t_b, becomes b numbers min(max((z − t_i)/(t_{i+1} − t_i), 0), 1), shifted to [−½, ½]. A network on such codes
learns steps and thresholds in one column as easily as a tree does, which plain standardised inputs make it learn
slowly (Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep Learning", 2022). Heads are exact
posteriors whose cost grows with the cube of their inputs, so wide inputs reach them through their principal directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from models.arrays import Array, bounded, cast, library_of, packed
from models.normalizer import CONSTANT_RELATIVE_SPREAD, Moments

#: Narrowest bin, in standard deviations: a column with few distinct values would have bins of no width.
NARROWEST_BIN = 0.01
#: Rows that quantiles and principal directions are taken from.
ROWS_MAX = 8_192
#: Variance below which a principal direction is not blown up to unit variance.
SMALLEST_VARIANCE = 1e-3


def centring(moments: Moments) -> tuple[Tensor, Tensor]:
    """(mean, scale), both [d]: constant columns become 0, since the learner has a constant of its own; what only
    rounding moves stays small."""
    deviation = (moments.squares / moments.count.clamp_min(1)).sqrt()
    constant = deviation <= CONSTANT_RELATIVE_SPREAD * (moments.mean.abs() + CONSTANT_RELATIVE_SPREAD)
    return moments.mean, torch.where(constant, deviation.clamp_min(1), deviation)


def bins_for(inputs: int, bins: int, most: int) -> int:
    """Bins a column, so that all codes together are at most `most` numbers; 0 where that leaves fewer than 2."""
    fitting = min(bins, most // inputs)
    return fitting if fitting >= 2 else 0


def even_edges(inputs: int, bins: int) -> Tensor:
    """Edges [d, bins + 1] before any sample is seen."""
    return torch.linspace(-2, 2, bins + 1).expand(inputs, -1).clone()


def quantile_edges(z: Tensor, bins: int) -> Tensor:
    """Edges [d, bins + 1] at the quantiles of standardised rows [n, d]."""
    ordered = z.sort(0).values  # [n, d]
    share = torch.linspace(0, 1, bins + 1, dtype=z.dtype, device=z.device)
    place = (share * (ordered.shape[0] - 1)).round().to(torch.int64)
    quantiles = ordered[place].mT  # [d, bins + 1]
    gaps = quantiles.diff(dim=1).clamp_min(NARROWEST_BIN)
    return torch.cat([quantiles[:, :1], quantiles[:, :1] + gaps.cumsum(1)], dim=1)


def piecewise(z: Array, edges: Array) -> Array:
    """Codes [..., d·bins] of standardised inputs [..., d]."""
    codes = z[..., None] - edges[:, :-1]  # [..., d, bins]
    codes /= edges[:, 1:] - edges[:, :-1]
    bounded(codes, 0, 1)
    codes -= 0.5
    return codes.reshape(*z.shape[:-1], -1)


@final
@dataclass(frozen=True, slots=True)
class Ramps:
    """What a first layer makes of inputs and their codes, in fewer passes: a code is its ramp min(max(z − t, 0), width)
    over the width, less ½, and weights can take both on. An input itself is a ramp without ends; all are [d, 1 + bins].
    """

    begin: Array
    least: Array
    most: Array

    @classmethod
    def of(cls, edges: Tensor) -> Self:
        """From edges [d, bins + 1]."""
        own, width = torch.zeros_like(edges[:, :1]), edges.diff(dim=1)
        begin, least = torch.cat([own, edges[:, :-1]], 1), torch.cat([own - torch.inf, torch.zeros_like(width)], 1)
        return cls(begin, least, torch.cat([own + torch.inf, width], 1))

    def packed(self) -> Ramps:
        """For numpy."""
        return Ramps(packed(self.begin), packed(self.least), packed(self.most))

    def layer(self, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """A first layer on [z, `piecewise(z)`], weights [d + d·bins, m] and offsets [m], as one on ramps."""
        inputs, bins = self.most.shape[0], self.most.shape[1] - 1
        plain, coded = weight[:inputs].unsqueeze(1), weight[inputs:].view(inputs, bins, -1)  # [d, 1, m], [d, bins, m]
        on_ramps = torch.cat([plain, coded / self.most[:, 1:].unsqueeze(-1)], 1)
        return on_ramps.flatten(0, 1), offset - 0.5 * coded.sum((0, 1))

    def values(self, z: Array) -> Array:
        """Ramps [n, d·(1 + bins)] of standardised inputs [n, d]."""
        ramps = z[..., None] - self.begin  # [n, d, 1 + bins]
        return bounded(ramps, self.least, self.most).reshape(z.shape[0], -1)

    def gradient(self, z: Array, delta: Array) -> Array:
        """∂/∂z [n, d] from ∂/∂ of the ramps of z [n, d]."""
        ramps = z[..., None] - self.begin  # [n, d, 1 + bins]
        return (delta.reshape(ramps.shape) * cast((ramps > self.least) & (ramps < self.most), z)).sum(-1)


def products_for(inputs: int, most: int) -> int:
    """How many products of two inputs (squares among them) heads see: all or none."""
    pairs = inputs * (inputs + 1) // 2
    return pairs if pairs <= most else 0


def pair_products(x: Array) -> Array:
    """x_i·x_j for i ≤ j, [..., c] → [..., c(c+1)/2]; squares less the 1 that they are on average."""
    rows = [x[..., i : i + 1] * x[..., i:] for i in range(x.shape[-1])]  # as many as heads can hold: a handful
    for row in rows:
        row[..., 0] -= 1
    return library_of(x).concatenate(rows, -1)


def turned_towards(z: Tensor, directions: Tensor, before: Tensor) -> Tensor:
    """Directions [d, c] turned so that rows [n, d] look as much as possible as they did before, [n, c].

    Principal directions come with any sign, and in any rotation where variances are alike; what was noted in the old
    ones should mean nearly the same in the new (orthogonal Procrustes problem).
    """
    left, _, right = torch.linalg.svd((z @ directions).to(torch.float64).mT @ before.to(torch.float64))
    turned: Tensor = directions @ (left @ right).to(directions.dtype)
    return turned


def principal_directions(z: Tensor, count: int) -> Tensor:
    """The `count` directions of standardised rows [n, d] that vary most, scaled to unit variance: [d, count]."""
    rows = z.to(torch.float64)
    values, vectors = torch.linalg.eigh(rows.mT @ rows / max(1, rows.shape[0]))  # ascending
    scale = values[-count:].clamp_min(SMALLEST_VARIANCE).rsqrt()
    directions: Tensor = (vectors[:, -count:] * scale).to(z.dtype)
    return directions
