"""Inputs of the default learner's trunk and heads, from raw inputs.

Inputs are standardised. The trunk also gets a piecewise-linear code of each column: cut at its quantiles t₀ < … < t_b,
it becomes b numbers min(max((z − t_i)/(t_{i+1} − t_i), 0), 1), shifted to [−½, ½]. On such codes a network learns steps
and thresholds in one column quickly (Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep Learning",
2022). The cost of a head grows with the cube of its inputs, so wide inputs are projected to their principal directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from metaban.models.default.arms import FACTORS
from metaban.models.default.evidence import Samples
from metaban.models.default.slate_effects import fit_common_effect, remove_common
from metaban.models.learner import State
from metaban.models.numerics.arrays import Array, Arrays, bounded, cast, library_of, packed, zeros
from metaban.models.numerics.normalizer import CONSTANT_RELATIVE_SPREAD, Moments, standardize, winsorize
from metaban.models.settings import PosteriorSettings

#: Narrowest bin, in standard deviations: a column with few distinct values would have bins of width 0.
NARROWEST_BIN = 0.01

#: Largest number of rows for quantiles and principal directions.
ROWS_MAX = 8_192

#: Largest number of inputs with shared coefficients, those that vary most.
WIDE_MAX = 256

#: Principal directions of smaller variance are not scaled up to unit variance.
SMALLEST_VARIANCE = 1e-3


def centre_and_scale(moments: Moments) -> tuple[Tensor, Tensor]:
    """(mean, scale), both [d]; constant columns become 0, because heads have their own constant, and columns that vary
    by rounding only stay small."""
    deviation = (moments.squares / moments.count.clamp_min(1)).sqrt()
    constant = deviation <= CONSTANT_RELATIVE_SPREAD * (moments.mean.abs() + CONSTANT_RELATIVE_SPREAD)
    return moments.mean, torch.where(constant, deviation.clamp_min(1), deviation)


def bins_for(inputs: int, bins: int, most: int) -> int:
    """Bins per column such that all codes together are at most `most` numbers; 0 if that leaves fewer than 2."""
    fitting = min(bins, most // inputs)
    return fitting if fitting >= 2 else 0


def even_edges(inputs: int, bins: int) -> Tensor:
    """Edges [d, bins + 1] before any sample."""
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
    """A first layer on inputs and their codes in fewer passes. A code is a ramp min(max(z − t, 0), width), divided by
    the width, minus ½; the weights absorb scale and shift. An input itself is an unbounded ramp; all are [d, 1 + bins].
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
        """As contiguous numpy arrays."""
        return Ramps(packed(self.begin), packed(self.least), packed(self.most))

    def layer(self, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """A first layer on [z, `piecewise(z)`], weights [d + d·bins, m] and offsets [m], rewritten for ramps."""
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
    """Number of products of two inputs, squares included, among head inputs: all or none."""
    pairs = inputs * (inputs + 1) // 2
    return pairs if pairs <= most else 0


def pair_products(x: Array) -> Array:
    """x_i·x_j for i ≤ j, [..., c] → [..., c(c+1)/2]; squares minus 1, their mean."""
    rows = [x[..., i : i + 1] * x[..., i:] for i in range(x.shape[-1])]  # few: c is small when products are on
    for row in rows:
        row[..., 0] -= 1
    return library_of(x).concatenate(rows, -1)


def rotated_towards(z: Tensor, directions: Tensor, before: Tensor) -> Tensor:
    """Directions [d, c] rotated such that projections of rows [n, d] are closest to earlier ones [n, c].

    Principal directions have arbitrary signs, and rotate where variances are equal; notes in the old directions should
    keep their meaning (orthogonal Procrustes problem).
    """
    left, _, right = torch.linalg.svd((z @ directions).to(torch.float64).mT @ before.to(torch.float64))
    turned: Tensor = directions @ (left @ right).to(directions.dtype)
    return turned


def principal_directions(z: Tensor, count: int) -> Tensor:
    """The `count` directions of largest variance of standardised rows [n, d], scaled to unit variance: [d, count]."""
    rows = z.to(torch.float64)
    values, vectors = torch.linalg.eigh(rows.mT @ rows / max(1, rows.shape[0]))  # ascending
    scale = values[-count:].clamp_min(SMALLEST_VARIANCE).rsqrt()
    directions: Tensor = (vectors[:, -count:] * scale).to(z.dtype)
    return directions


@final
class ArmInputs:
    """Maps raw inputs to trunk and head inputs; its parameters are shared state, fixed until a refit."""

    def __init__(self, settings: PosteriorSettings, count: int, arm_inputs: int, dtype: torch.dtype) -> None:
        """For inputs of `count` numbers, of which the first `arm_inputs` describe the arm alone."""
        self.dtype = dtype
        self._count = count
        self.bins = bins_for(count, settings.bins, settings.codes_max)
        #: Trunk inputs of an arm.
        self.codes_count = count * (1 + self.bins)
        #: The first numbers of an input that heads are about: all of them or, if these are too many, those of the arm.
        self.head_inputs_count = count if count <= settings.head_inputs_max else arm_inputs
        self.narrowed = self.head_inputs_count > settings.head_inputs_max
        #: Numbers of an input that heads and memory see.
        self.seen = settings.head_directions if self.narrowed else self.head_inputs_count
        #: Inputs that all users share coefficients of; those that heads do not see come first.
        self.wide = min(count, WIDE_MAX) if count > settings.head_inputs_max else 0
        #: Whether there is a trunk. Where a context makes inputs wide, most of them are products of arm and context:
        #: their coefficients are learned exactly, and networks on them only repeat what arms' effects say.
        self.trunk = settings.trunk and (self.narrowed or not self.wide)
        #: Products of two of them among the head inputs, if they are few enough.
        self.products = products_for(self.seen, settings.products_max)
        #: The head input p(x); the arm's factors follow it.
        self.trunk_column = 1 + self.seen + self.products
        self.head_size = self.trunk_column + 1 + FACTORS
        #: Wide inputs are often variants of one thing, so the slate effect is subtracted.
        self.removes_common = settings.apart and self.narrowed
        #: Numbers of a slate summary in the notes.
        self.slate_numbers = 1 + count if self.removes_common else 0

    def initial(self, generator: torch.Generator) -> State:
        """Shared state before any sample."""
        count = self._count
        state = {"mean": torch.zeros(count, dtype=self.dtype), "scale": torch.ones(count, dtype=self.dtype)}
        if self.bins:
            state["edges"] = even_edges(count, self.bins).to(self.dtype)
        if self.removes_common:
            state |= {name: torch.zeros(count, dtype=self.dtype) for name in ("common_ratio", "common_centre")}
        if self.wide:
            state["wide_columns"] = torch.arange(self.wide)
        if self.narrowed:
            directions = torch.randn(self.head_inputs_count, self.seen, generator=generator, dtype=self.dtype)
            state["directions"] = directions / self.head_inputs_count**0.5
        return state

    def derive(self, shared: State, samples: Samples, slates: Tensor) -> State:
        """Parameters from all users' samples and their slate summaries [n, …]."""
        derived: State = {}
        if self.removes_common:
            ratio, centre = fit_common_effect(samples.features, slates, samples.weights)
            derived = {"common_ratio": ratio.to(self.dtype), "common_centre": centre.to(self.dtype)}
        real = samples.weights > 0
        mean, scale = centre_and_scale(
            Moments.of(winsorize(self.arm_part(derived, samples.features, slates), real), real)
        )
        derived |= {"mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}
        rows = samples.evenly_spread(ROWS_MAX)
        z = self.standardized(derived, samples.features[rows], slates[rows])
        if self.bins:
            derived["edges"] = quantile_edges(z, self.bins)
        if self.wide:
            varying = z.var(0, correction=0)
            if not self.narrowed:
                varying[: self.head_inputs_count] = -1  # heads see these
            derived["wide_columns"] = varying.topk(self.wide).indices.sort().values
        if self.narrowed:
            arms, earlier = (
                z[:, : self.head_inputs_count],
                self.standardized(shared, samples.features[rows], slates[rows]),
            )
            before = earlier[:, : self.head_inputs_count] @ shared["directions"]
            derived["directions"] = rotated_towards(arms, principal_directions(arms, self.seen), before)
        return derived

    def codes(self, shared: Arrays, z: Array) -> Array:
        """Trunk inputs of standardised inputs [..., d]."""
        return library_of(z).concatenate([z, piecewise(z, shared["edges"])], -1) if self.bins else z

    def head_inputs(self, shared: Arrays, z: Array, predicted: Array, factors: Array | None = None) -> Array:
        """h = [1, x, products of x if few enough, p, q]: z [..., d], predicted [...], factors [..., r] → [..., D].

        Arms without factors have zeros there.
        """
        x = z if self.head_inputs_count == z.shape[-1] else z[..., : self.head_inputs_count]
        if self.narrowed:
            x = x @ shared["directions"]
        h = zeros((*x.shape[:-1], self.head_size), z)
        h[..., 0], h[..., 1 : 1 + self.seen], h[..., self.trunk_column] = 1, x, predicted
        if self.products:
            h[..., 1 + self.seen : self.trunk_column] = pair_products(x)
        if factors is not None:
            h[..., self.trunk_column + 1 :] = factors
        return h

    def wide_inputs(self, shared: Arrays, z: Array) -> Array:
        """The inputs that all users share coefficients of: z [..., d] → [..., W]."""
        return z[..., shared["wide_columns"]] if self.wide else z[..., :0]

    def arm_part(self, shared: Arrays, raw: Array, slate: Array) -> Array:
        """Raw inputs [..., d] minus the slate effect, by slate summaries [..., 1 + d]; unchanged when that is off."""
        return (
            remove_common(raw, slate, shared["common_ratio"], shared["common_centre"]) if self.removes_common else raw
        )

    def standardized(self, shared: Arrays, raw: Array, slate: Array) -> Array:
        """The same, standardised."""
        return standardize(self.arm_part(shared, raw, slate), shared["mean"], shared["scale"])
