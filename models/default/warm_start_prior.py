"""Warm starts as priors of users' heads: conversion between input bases, and their sufficient statistics.

A warm start is `[raw coefficients…, trust]`. Raw coefficients apply to the unstandardised input x, so that they keep
their meaning when the standardisation changes. If heads see inputs themselves the conversion is exact: a head is a
polynomial c + lᵀz + zᵀQz, and z is affine in x. If heads see principal directions it is a projection: the linear part
becomes a linear function of all inputs, and then the nearest one in the current directions; coefficients of products
are kept, because directions rotate as little as possible.

Trust t in [0, 1) is the share of the prior's variance that the warm start explains: the user's prior is N(m, (1 − t)Σ)
around the started head m instead of N(μ, Σ). With ρ = 1 − t this equals N(μ, Σ) after the statistics

    A₀ = σ²(1/ρ − 1)Σ⁻¹,   b₀ = A₀(μ + (m − μ)/t) = σ²/ρ · Σ⁻¹(m − ρμ)

which are added to the user's own. Trust 0 adds nothing.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from metaban.models.default.arms import FACTORS
from metaban.models.default.inputs import ArmInputs
from metaban.models.default.prior import Prior
from metaban.models.numerics.arrays import Array, Arrays, double, inverse, library_of, zeros

#: Largest trust.
TRUST_MAX: Final = 0.95

#: Started heads are clipped to so many deviations around the prior's mean, in case the basis changed much.
START_REACH: Final = 10.0

#: Inputs whose mean is so many times their spread count as constant: their coefficients are rounding errors.
CONSTANT_RATIO: Final = 1e6


@final
class WarmStartPrior:
    """Converts heads [..., D] to raw coefficients [..., size − 1] and back."""

    def __init__(self, inputs: ArmInputs, count: int) -> None:
        """For raw inputs of `count` numbers."""
        self._inputs = inputs
        self._count = count
        #: Numbers of a warm start, trust included.
        self.size = 1 + count + inputs.products + 1 + FACTORS + 1

    def raw(self, basis: Arrays, heads: Array) -> Array:
        """Heads in a basis [B, D] as raw coefficients [B, size − 1], float64."""
        heads, mean, scale = double(heads), double(basis["mean"]), double(basis["scale"])
        linear, products = self._split(heads)
        linear = self._widened(linear, basis)
        varying = double(abs(mean) < CONSTANT_RATIO * scale)  # [d]
        shift, linear = varying * mean / scale, varying * linear
        constant = heads[:, 0] - linear @ shift
        if self._exact_products:
            end = self._inputs.head_inputs_count
            squares = _symmetric(products, end)
            constant = constant - _traces(squares)  # heads see squares minus 1
            squares = squares * varying[:end] * varying[:end, None]
            turned = squares @ shift[:end]  # [B, c]
            constant = constant + turned @ shift[:end]
            linear[:, :end] -= 2 * turned
            products = _pairs(squares / scale[:end] / scale[:end, None])
        return _joined(constant, linear / scale, products, heads[:, -1 - FACTORS :])

    def heads(self, basis: Arrays, raw: Array) -> Array:
        """Raw coefficients [B, size − 1] as heads in a basis [B, D], float64."""
        mean, scale = double(basis["mean"]), double(basis["scale"])
        linear, products = self._split(raw)
        constant, end = raw[:, 0] + linear @ mean, self._inputs.head_inputs_count
        linear, mean, scale = linear[:, :end], mean[:end], scale[:end]
        if self._exact_products:
            squares = _symmetric(products, end)
            turned = squares @ mean
            constant, linear = constant + turned @ mean, linear + 2 * turned
            squares = squares * scale * scale[:, None]
            constant = constant + _traces(squares)
            products = _pairs(squares)
        linear = linear * scale
        if self._inputs.selected:
            linear = linear[:, basis["head_columns"]]
        if self._inputs.narrowed:
            directions = double(basis["directions"])
            # Least squares over the inputs' distribution, since principal directions are scaled to unit variance.
            linear = linear @ directions @ inverse(directions.mT @ directions)
        return _joined(constant, linear, products, raw[:, -1 - FACTORS :])

    def statistics(self, basis: Arrays, prior: Prior, starts: Array) -> tuple[Array, Array]:
        """A₀ [B, D, D] and b₀ [B, D] of warm starts [B, size] under a prior, float64; 0 for a start of trust 0."""
        library, count = library_of(starts), starts.shape[0]
        # Usually no user has a warm start, which is cheap to see in numpy; on a GPU it would need a synchronisation.
        if not starts.shape[1] or (isinstance(starts, np.ndarray) and not starts[:, -1].any()):
            shape = prior.precision.shape
            return zeros((count, *shape), prior.precision), zeros((count, shape[0]), prior.precision)
        sound = library.isfinite(starts).all(-1)  # [B]
        starts = library.where(sound[:, None], double(starts), 0.0)
        trust = starts[:, -1].clip(0.0, TRUST_MAX)[:, None]  # [B, 1]
        reach = START_REACH * library.sqrt(prior.covariance.diagonal())
        head = self.heads(basis, starts[:, :-1])
        head = library.minimum(library.maximum(head, prior.mean - reach), prior.mean + reach)
        left = 1 - trust
        gram = (prior.noise * trust / left)[..., None] * prior.precision
        moment = prior.noise / left * ((head - left * prior.mean) @ prior.precision)
        return gram, library.where(trust > 0, moment, 0.0)

    def _widened(self, linear: Array, basis: Arrays) -> Array:
        """Coefficients of what heads see [B, c] as coefficients of all standardised inputs [B, d]."""
        if self._inputs.selected:
            widened = zeros((linear.shape[0], self._count), linear)
            widened[:, basis["head_columns"]] = linear
            return widened
        if self._inputs.narrowed:
            linear = linear @ double(basis["directions"]).mT
        missing = self._count - linear.shape[1]
        return library_of(linear).concatenate([linear, zeros((linear.shape[0], missing), linear)], -1)

    @property
    def _exact_products(self) -> bool:
        """Whether heads have products of the inputs themselves, not of projections or of a choice that may change."""
        return self._inputs.products > 0 and not (self._inputs.narrowed or self._inputs.selected)

    def _split(self, values: Array) -> tuple[Array, Array]:
        """The linear part [B, …] and the products' part [B, products]."""
        end = values.shape[1] - 1 - FACTORS
        return values[:, 1 : end - self._inputs.products], values[:, end - self._inputs.products : end]


def _joined(constant: Array, linear: Array, products: Array, others: Array) -> Array:
    """The inverse of `_split`, with the constant [B] first; last, the coefficients of the trunk and of factors, which
    do not depend on the basis [B, 1 + r]."""
    return library_of(constant).concatenate([constant[:, None], linear, products, others], -1)


def _symmetric(products: Array, side: int) -> Array:
    """Coefficients of products x_i·x_j for i ≤ j [B, …] as symmetric matrices [B, side, side]."""
    squares, end = zeros((products.shape[0], side, side), products), 0
    for row in range(side):  # few: heads have few inputs when products are on
        begin, end = end, end + side - row
        squares[:, row, row:] = products[:, begin:end] / 2
    return squares + squares.mT


def _pairs(squares: Array) -> Array:
    """The inverse of `_symmetric`."""
    rows = [2 * squares[:, row, row:] for row in range(squares.shape[1])]
    for row in rows:
        row[:, 0] /= 2
    return library_of(squares).concatenate(rows, -1)


def _traces(matrices: Array) -> Array:
    """[B, d, d] → [B]."""
    return matrices.diagonal(0, 1, 2).sum(-1)
