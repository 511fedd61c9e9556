"""Inputs of the default learner's trunk and heads, from raw inputs.

Inputs are standardised. The trunk also gets a piecewise-linear code of each column: cut at its quantiles t₀ < … < t_b,
it becomes b numbers min(max((z − t_i)/(t_{i+1} − t_i), 0), 1), shifted to [−½, ½]. On such codes a network learns steps
and thresholds in one column quickly (Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep Learning",
2022). The cost of a head grows with the cube of its inputs, so heads see few of many inputs: the most active places
of hashed features, and principal directions of others. All users share the coefficients of what heads do not see, and
of the products of arm and context, by which a context ranks arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from metaban.models.default.arms import FACTORS
from metaban.models.default.common_part import fit_common_effect, remove_common
from metaban.models.default.samples import Samples
from metaban.models.features import InputParts
from metaban.models.learner import State
from metaban.models.numerics.arrays import Array, Arrays, bounded, cast, library_of, packed, zeros
from metaban.models.numerics.normalizer import CONSTANT_RELATIVE_SPREAD, Moments, repeated_share, standardize, winsorize
from metaban.models.settings import PosteriorSettings

#: Narrowest bin, in standard deviations: a column with few distinct values would have bins of width 0.
NARROWEST_BIN = 0.01

#: Largest number of rows for quantiles and principal directions.
ROWS_MAX = 8_192

#: Terms with shared coefficients are the most active ones: at most so many inputs that heads do not see, and so many
#: products of arm and context, of at most so many inputs of each.
UNSEEN_MAX = 256
CROSSED_MAX = 128
CROSSED_ARM_MAX = 64
CROSSED_CONTEXT_MAX = 16

#: Principal directions of smaller variance are not scaled up to unit variance.
SMALLEST_VARIANCE = 1e-3


def centre_and_scale(moments: Moments, repeated: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, scale), both [d], where a share `repeated` [d] of the rows repeats the most frequent value of a column.

    The scale is the root mean square deviation per row that does not: the standard deviation of a column of numbers,
    about 1 for a tag. All coefficients have the same prior at first, and in standard deviations a tag that few arms
    have would be a large number that decides about these arms. Constant columns become 0, because heads have their own
    constant, and columns that vary by rounding only stay small.
    """
    deviation = (moments.squares / moments.count.clamp_min(1)).sqrt()
    constant = deviation <= CONSTANT_RELATIVE_SPREAD * (moments.mean.abs() + CONSTANT_RELATIVE_SPREAD)
    return moments.mean, torch.where(constant, deviation.clamp_min(1), deviation / (1 - repeated).sqrt())


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


def _with_one(z: Array) -> Array:
    """z [..., d] and a 1: [..., d + 1]."""
    return library_of(z).concatenate([z, library_of(z).ones_like(z[..., :1])], -1)


@final
class ArmInputs:
    """Maps raw inputs to trunk and head inputs; its parameters are shared state, fixed until a refit."""

    def __init__(self, settings: PosteriorSettings, parts: InputParts, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._parts, self._count = parts, parts.count
        count, most = parts.count, settings.head_inputs_max
        self.bins = bins_for(count, settings.bins, settings.codes_max)
        #: Trunk inputs of an arm.
        self.codes_count = count * (1 + self.bins)
        #: The first numbers of an input that heads are about: all of them or, if these are too many, those of the arm.
        self.head_inputs_count = count if count <= most else parts.arm
        #: Whether these are still too many: heads then see the most active ones, or projections to few directions.
        self.selected = self.head_inputs_count > most and parts.hashed
        self.narrowed = self.head_inputs_count > most and not parts.hashed
        #: Numbers of an input that heads and memory see.
        self.seen = settings.head_directions if self.narrowed else min(self.head_inputs_count, most)
        self._unseen = min(UNSEEN_MAX, count if self.narrowed else count - self.seen)
        #: The first terms, which make factors of an arm: inputs of the arm that heads do not see.
        self.making_factors = self._unseen if self.head_inputs_count > most else 0
        self._arms_crossed, self._contexts_crossed = (
            min(parts.arm, CROSSED_ARM_MAX),
            min(parts.context, CROSSED_CONTEXT_MAX),
        )
        self._crossed = min(CROSSED_MAX, self._arms_crossed * self._contexts_crossed)
        #: Terms that all users share coefficients of: inputs that heads do not see, and products of arm and context.
        self.wide = self._unseen + self._crossed
        #: Whether there is a trunk. Where a context makes inputs wide, most of what is shared are products of arm and
        #: context: their coefficients are learned exactly, and networks only repeat what arms' effects say.
        self.trunk = settings.trunk and (self.narrowed or count <= most)
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
            # The first inputs themselves: a factor with the number of no input is 1.
            state["wide_factors"] = torch.stack(
                [torch.arange(self.wide).clip(None, count - 1), torch.full((self.wide,), count)]
            )
        if self.selected:
            state["head_columns"] = torch.arange(self.seen)
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
        limited = winsorize(self.arm_part(derived, samples.features, slates), real)
        # Principal directions are those of columns of equal variance, whatever their values.
        repeated = 0 * limited[0] if self.narrowed else repeated_share(limited, real)
        mean, scale = centre_and_scale(Moments.of(limited, real), repeated)
        derived |= {"mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}
        rows = samples.evenly_spread(ROWS_MAX)
        z = self.standardized(derived, samples.features[rows], slates[rows])
        if self.bins:
            derived["edges"] = quantile_edges(z, self.bins)
        # E|z|: 0 for a constant, small for a place that is hardly ever used, 0.8 for a normal variable.
        active = z.abs().mean(0)
        if self.selected:
            derived["head_columns"] = active[: self.head_inputs_count].topk(self.seen).indices.sort().values
        if self.wide:
            derived["wide_factors"] = self._most_active_terms(z, active, derived.get("head_columns"))
        if self.narrowed:
            arms, earlier = (
                z[:, : self.head_inputs_count],
                self.standardized(shared, samples.features[rows], slates[rows]),
            )
            before = earlier[:, : self.head_inputs_count] @ shared["directions"]
            derived["directions"] = rotated_towards(arms, principal_directions(arms, self.seen), before)
        return derived

    def _most_active_terms(self, z: Tensor, active: Tensor, head_columns: Tensor | None) -> Tensor:
        """The factors [2, W] of the most active terms: inputs that heads do not see, and products of arm and context.

        From standardised rows [n, d] and their activities [d].
        """
        unseen = active.clone()
        if not self.narrowed:
            unseen[slice(self.seen) if head_columns is None else head_columns] = -1
        columns = unseen.topk(self._unseen).indices.sort().values
        start = self._parts.arm
        arm = active[:start].topk(self._arms_crossed).indices.sort().values
        context = start + active[start : start + self._parts.context].topk(self._contexts_crossed).indices.sort().values
        together = z[:, arm].abs().mT @ z[:, context].abs()  # [arms, contexts]
        pairs = together.flatten().topk(self._crossed).indices.sort().values
        crossed = torch.cartesian_prod(arm, context).view(-1, 2)[pairs].mT
        return torch.cat([torch.stack([columns, torch.full_like(columns, self._count)]), crossed], 1)

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
        if self.selected:
            x = x[..., shared["head_columns"]]
        h = zeros((*x.shape[:-1], self.head_size), z)
        h[..., 0], h[..., 1 : 1 + self.seen], h[..., self.trunk_column] = 1, x, predicted
        if self.products:
            h[..., 1 + self.seen : self.trunk_column] = pair_products(x)
        if factors is not None:
            h[..., self.trunk_column + 1 :] = factors
        return h

    def wide_inputs(self, shared: Arrays, z: Array) -> Array:
        """The terms that all users share coefficients of: z [..., d] → [..., W]."""
        if not self.wide:
            return z[..., :0]
        first, second = shared["wide_factors"]
        return z[..., first] * _with_one(z)[..., second]

    def factor_inputs(self, shared: Arrays, terms: Array) -> Array:
        """The terms that make factors [..., W₀], from all terms [..., W]; 0 for those of the context."""
        if not self.making_factors:
            return terms[..., :0]
        of_arm = shared["wide_factors"][0, : self.making_factors] < self._parts.arm
        return terms[..., : self.making_factors] * cast(of_arm, terms)

    def wide_gradient(self, shared: Arrays, z: Array, weights: Array) -> Array:
        """Gradient [n, d] of the terms of z [n, d], weighted by β [W]."""
        first, second = shared["wide_factors"]
        coefficients = zeros((self._count + 1, self._count + 1), z)
        coefficients[first, second] = weights
        return (_with_one(z) @ (coefficients + coefficients.mT))[:, :-1]

    def same_terms(self, before: Arrays, now: Arrays) -> Tensor:
        """Which terms [W] of one state are which terms [W] of an earlier one, bool [W, W]."""
        codes = [state["wide_factors"][0] * (self._count + 1) + state["wide_factors"][1] for state in (now, before)]
        same: Tensor = codes[0].unsqueeze(-1) == codes[1]
        return same

    def arm_part(self, shared: Arrays, raw: Array, slate: Array) -> Array:
        """Raw inputs [..., d] minus the slate effect, by slate summaries [..., 1 + d]; unchanged when that is off."""
        return (
            remove_common(raw, slate, shared["common_ratio"], shared["common_centre"]) if self.removes_common else raw
        )

    def standardized(self, shared: Arrays, raw: Array, slate: Array) -> Array:
        """The same, standardised."""
        return standardize(self.arm_part(shared, raw, slate), shared["mean"], shared["scale"])
