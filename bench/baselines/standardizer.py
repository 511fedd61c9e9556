"""Standardised inputs for linear models as a penalty: statistics stay in raw coordinates and cannot go stale.

Let z = T·x be the standardised form of a raw input x = (features, 1), with means μ and deviations σ of the features of
all arms seen. A ridge fit on z with penalty λ‖v‖² gives the predictions, and the bonus, of a ridge fit on x with the
penalty wᵀPw where

    P = λ·T⁻¹T⁻ᵀ = λ·[[diag(σ²) + μμᵀ, μ], [μᵀ, 1]],        v = (σ∘w, μᵀw + w₀).

New moments therefore change P, never Σxxᵀ or Σrx. A new P costs every model an inversion, so the moments in use are
renewed when the number of arms seen has doubled, and fixed after `SETTLED_ARMS`.
"""

from __future__ import annotations

from typing import final

import numpy as np

from metaban.bench.baselines.base import Matrix

#: Moments are first used after this many arms, and renewed each time the number has doubled.
FIRST_ARMS = 40

#: After this many arms the moments are fixed: their error is about one percent.
SETTLED_ARMS = 10_000

#: A column whose deviation is below this share of the largest counts as constant and is not scaled.
CONSTANT_SHARE = 1e-4


@final
class Standardizer:
    """Running moments of the arms of all slates, and the ridge penalty that follows from them."""

    def __init__(self, dimension: int, regularization: float, *, enabled: bool) -> None:
        self._regularization = regularization
        self._watching = enabled
        self._count = 0
        self._renew_at = FIRST_ARMS
        self._total = np.zeros(dimension)  # [d]
        self._squares = np.zeros(dimension)  # [d], about the first arm, so that a large mean does not cancel
        self._origin: Matrix | None = None
        self.mean = np.zeros(dimension)  # [d]
        self.deviation = np.ones(dimension)  # [d]

    @property
    def penalty(self) -> Matrix:
        """P of the module's docstring, [d + 1, d + 1]; λI before the first moments."""
        centre = np.append(self.mean, 1.0)  # [d + 1]
        spread = np.append(np.square(self.deviation), 0.0)  # [d + 1]
        return self._regularization * (np.outer(centre, centre) + np.diag(spread))

    def observe(self, arms: Matrix) -> bool:
        """Add a slate [k, d]; returns whether the penalty changed."""
        if not self._watching:
            return False
        if self._origin is None:
            self._origin = arms[0].copy()
        shifted = arms - self._origin  # [k, d]
        self._total += shifted.sum(0)
        self._squares += np.square(shifted).sum(0)
        self._count += len(arms)
        if self._count < self._renew_at:
            return False
        self._renew_at = 2 * self._count
        self._watching = self._count < SETTLED_ARMS
        mean = self._total / self._count
        deviation = np.sqrt(np.maximum(self._squares / self._count - np.square(mean), 0.0))
        constant = deviation <= CONSTANT_SHARE * deviation.max(initial=0.0)
        self.mean = np.where(constant, 0.0, mean + self._origin)
        self.deviation = np.where(constant, 1.0, deviation)
        return True

    def standard_weights(self, weights: Matrix) -> Matrix:
        """Raw weights [..., d + 1] as the weights v of standardised inputs, in which users are compared."""
        features = weights[..., :-1]  # [..., d]
        intercept = weights[..., -1:] + features @ self.mean[:, None]  # [..., 1]
        return np.concatenate([features * self.deviation, intercept], axis=-1)
