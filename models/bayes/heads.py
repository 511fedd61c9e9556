"""GEM-BML on linear heads: the posteriors of `default/prior.py` are exact, and so is the meta-gradient.

With w_u ~ N(μ, Σ), Λ = Σ⁻¹ and noise variance σ², Theorem 1 holds without inference error, for a full covariance and
for the noise. `Prior.em_step` goes where this gradient is zero: one step is μ + Σ·∇_μ L/U and, about the new mean,
Σ − 2∇_Λ L/U. The gradient of its regularisation (`UNSEEN_USERS`, `FIRST_NOISE`) is `pull_of_unseen`.
Letters in shape comments: U users, D inputs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from metaban.models.default.prior import FIRST_NOISE, UNSEEN_SPREAD, UNSEEN_USERS, Prior, Statistics


@final
@dataclass(frozen=True, slots=True)
class HeadsGradient:
    """Gradient of a sum over users in μ [D], Λ = Σ⁻¹ [D, D] (as a symmetric matrix) and σ² []."""

    mean: Tensor
    precision: Tensor
    noise: Tensor

    def minus(self, other: HeadsGradient) -> HeadsGradient:
        """The difference."""
        return HeadsGradient(self.mean - other.mean, self.precision - other.precision, self.noise - other.noise)

    def plus(self, other: HeadsGradient) -> HeadsGradient:
        """The sum."""
        return HeadsGradient(self.mean + other.mean, self.precision + other.precision, self.noise + other.noise)


def heads_gradient(prior: Prior, users: Statistics) -> HeadsGradient:
    """∇L[1]: E ∇ log p(rewards, w; μ, Λ, σ²) under each user's exact posterior (Theorem 1, appendix B.7)."""
    mean, covariance = prior.posterior(users.gram, users.moment)  # [U, D], [U, D, D]
    away = mean - prior.mean  # [U, D]
    spread = covariance.sum(0) + away.mT @ away  # [D, D]
    seconds = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)  # [U, D, D], E[wwᵀ]
    squares = users.squares.sum() - 2 * (mean * users.moment).sum() + (users.gram * seconds).sum()  # Σ E(r − hᵀw)²
    return HeadsGradient(
        prior.precision @ away.sum(0),
        0.5 * (mean.shape[0] * prior.covariance - spread),
        0.5 * (squares / prior.noise - users.events.sum()) / prior.noise,
    )


def heads_gradient_plus(prior: Prior, train: Statistics, both: Statistics) -> HeadsGradient:
    """∇L[2] = ∇ log p(train ∪ val) − ∇ log p(train) (appendix A.4), from statistics of train and of both together."""
    return heads_gradient(prior, both).minus(heads_gradient(prior, train))


def pull_of_unseen(prior: Prior) -> HeadsGradient:
    """Gradient of `Prior.em_step`'s regularisation: users of variance UNSEEN_SPREAD·σ², one event of FIRST_NOISE."""
    unseen = torch.eye(len(prior.mean), dtype=prior.mean.dtype, device=prior.mean.device) * UNSEEN_SPREAD * prior.noise
    return HeadsGradient(
        torch.zeros_like(prior.mean),
        0.5 * UNSEEN_USERS * (prior.covariance - unseen),
        0.5 * (FIRST_NOISE / prior.noise - 1) / prior.noise,
    )
