"""What the default learner's trunk and heads see of an arm: standardised, coded, in few directions where it is wide."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from models.arrays import Array, library_of, zeros
from models.encoding import (
    ROWS_MAX,
    bins_for,
    centring,
    even_edges,
    pair_products,
    piecewise,
    principal_directions,
    products_for,
    quantile_edges,
    turned_towards,
)
from models.learner import Arrays, State
from models.normalizer import Moments, standardize, winsorize
from models.offer import common_ratio, without_common
from models.settings import PosteriorSettings
from models.upkeep import Samples


@final
class ArmInputs:
    """From raw inputs to what is learned on; what it takes is shared state, held for an epoch or until a refit."""

    def __init__(self, settings: PosteriorSettings, count: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._count = count
        self.bins = bins_for(count, settings.bins, settings.codes_max)
        #: Numbers that the trunk sees of an arm.
        self.codes_count = count * (1 + self.bins)
        self.narrowed = count > settings.head_inputs_max
        #: Numbers of an input that heads and memory see.
        self.seen = settings.head_directions if self.narrowed else count
        #: Products of two of them that heads see as well, where they are few.
        self.products = products_for(self.seen, settings.products_max)
        self.head_size = 1 + self.seen + self.products + 1
        #: Wide inputs are often one thing in many cuts, so what a request's arms share is taken out of them.
        self.apart = settings.apart and self.narrowed
        #: Numbers to be noted of what was on offer with an arm.
        self.offered = 1 + count if self.apart else 0

    def initial(self, generator: torch.Generator) -> State:
        """Shared state before any sample is seen."""
        count = self._count
        state = {"mean": torch.zeros(count, dtype=self.dtype), "scale": torch.ones(count, dtype=self.dtype)}
        if self.bins:
            state["edges"] = even_edges(count, self.bins).to(self.dtype)
        if self.apart:
            state |= {name: torch.zeros(count, dtype=self.dtype) for name in ("common_ratio", "common_centre")}
        if self.narrowed:
            directions = torch.randn(count, self.seen, generator=generator, dtype=self.dtype)
            state["directions"] = directions / count**0.5
        return state

    def anew(self, shared: State, samples: Samples, offers: Tensor) -> State:
        """What everybody's samples say of inputs, with what was on offer with each [n, …]."""
        derived: State = {}
        if self.apart:
            ratio, centre = common_ratio(samples.features, offers, samples.weights)
            derived = {"common_ratio": ratio.to(self.dtype), "common_centre": centre.to(self.dtype)}
        real = samples.weights > 0
        mean, scale = centring(Moments.of(winsorize(self.own_part(derived, samples.features, offers), real), real))
        derived |= {"mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}
        rows = samples.spread(ROWS_MAX)
        z = self.standardized(derived, samples.features[rows], offers[rows])
        if self.bins:
            derived["edges"] = quantile_edges(z, self.bins)
        if self.narrowed:
            before = self.standardized(shared, samples.features[rows], offers[rows]) @ shared["directions"]
            derived["directions"] = turned_towards(z, principal_directions(z, self.seen), before)
        return derived

    def codes(self, shared: Arrays, z: Array) -> Array:
        """What the trunk sees of standardised inputs [..., d]."""
        return library_of(z).concatenate([z, piecewise(z, shared["edges"])], -1) if self.bins else z

    def heads(self, shared: Arrays, z: Array, predicted: Array) -> Array:
        """h = [1, x, products of x where they are few, p]: z [..., d], predicted [...] → [..., D]."""
        x = z @ shared["directions"] if self.narrowed else z
        h = zeros((*x.shape[:-1], self.head_size), z)
        h[..., 0], h[..., 1 : 1 + self.seen], h[..., -1] = 1, x, predicted
        if self.products:
            h[..., 1 + self.seen : -1] = pair_products(x)
        return h

    def own_part(self, shared: Arrays, raw: Array, offer: Array) -> Array:
        """Raw inputs [..., d] without what they shared with the arms on offer [..., 1 + d], where that is looked at."""
        return without_common(raw, offer, shared["common_ratio"], shared["common_centre"]) if self.apart else raw

    def standardized(self, shared: Arrays, raw: Array, offer: Array) -> Array:
        """The same in standard deviations."""
        return standardize(self.own_part(shared, raw, offer), shared["mean"], shared["scale"])
