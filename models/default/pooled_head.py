"""The pooled head: one ridge regression for all users, which ranks arms until users' own heads predict better.

During the first hundreds of events the many coefficients of users' heads mostly fit noise. A ridge regression of all
rewards on the inputs alone, without products and trunk, has the fewest coefficients and overfits least. Users differ in
their overall level, which does not rank arms but would dominate the fit, so each has a random effect:
r = level_u + xᵀw + noise, level_u ~ N(0, Σ₀₀), with the prior's variance of the constant.

Trust τ in [0, 1] is the weight of a user's own head (evidence.py). The exploration bonus is that of the user's own
posterior, because choices that only explore the pooled head do not separate users. Where rewards are rare, posteriors
of users stay wide for long and would explore at random: there τ is 0 at first, and the bonus is the pooled head's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from metaban.models.default.prior import Prior, Statistics
from metaban.models.numerics.arrays import Array, inverse, library_of, zeros

#: Events after which a coefficient is shrunk to half its estimate, with standardised inputs.
RIDGE_EVENTS = 1_000.0

#: The same for the constant, which is not confounded.
RIDGE_CONSTANT_EVENTS = 1.0


@final
@dataclass(frozen=True, slots=True)
class PooledHead:
    """Pooled head w [D] with covariance [D, D], shrinkage κ [] of users' levels in events, and trust τ [] in users' own
    heads; float64."""

    mean: Array
    covariance: Array
    level_events: Array
    trust: Array

    @classmethod
    def initial(cls, dimension: int) -> Self:
        """Before any event: trust 1, so that the pooled head is not used."""
        nothing, one = torch.zeros(dimension, dimension, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        return cls(nothing[0].clone(), nothing, one, one.clone())

    @classmethod
    def fitted(cls, users: Statistics, user_weights: Tensor, seen: int, prior: Prior, trust: Tensor) -> Self:
        """Fit to all users' statistics on the constant and the `seen` inputs after it, with user weights w_u [U].

        Levels are integrated out: with n rewards of a user that are correlated by their level, A − aaᵀ/(n + κ) and
        b − a·Σr/(n + κ) replace A and b, where a = Σh and κ = σ²/Σ₀₀.
        """
        size, level_events = 1 + seen, prior.noise / prior.covariance[0, 0]
        sums, earned = users.gram[:, 0, :size], users.moment[:, 0]  # [U, size], [U]
        share = user_weights / (users.gram[:, 0, 0] + level_events)  # [U]; by places, a sample counts e_k² times
        gram = (user_weights @ users.gram.flatten(1)).view_as(users.gram[0])[:size, :size] - (sums.mT * share) @ sums
        moment = user_weights @ users.moment[:, :size] - (share * earned) @ sums
        penalty = torch.full_like(moment, RIDGE_EVENTS)
        penalty[0] = RIDGE_CONSTANT_EVENTS
        mean, covariance = torch.zeros_like(users.moment[0]), torch.zeros_like(users.gram[0])  # [D], [D, D]
        inverted = inverse(gram + penalty.diag())
        mean[:size], covariance[:size, :size] = inverted @ moment, prior.noise * inverted
        return cls(mean, covariance, level_events, trust)

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """From an epoch's shared state."""
        return cls(shared["plain_mean"], shared["plain_covariance"], shared["plain_level_events"], shared["trust"])

    def state(self) -> dict[str, Array]:
        """The shared state of the pooled head."""
        return {
            "plain_mean": self.mean,
            "plain_covariance": self.covariance,
            "plain_level_events": self.level_events,
            "trust": self.trust,
        }

    def with_user_levels(self, gram: Array, moment: Array) -> Array:
        """Pooled heads [R, D] with the levels of users with A [R, D, D] and b [R, D]."""
        heads = zeros(moment.shape, moment) + self.mean
        heads[:, 0] += (moment[:, 0] - gram[:, 0] @ self.mean) / (gram[:, 0, 0] + self.level_events)
        return heads

    def blend(self, pooled: Array, own: Array) -> Array:
        """τ·own + (1 − τ)·pooled, both [R, D]."""
        mixed: Array = pooled + self.trust * (own - pooled)
        return mixed

    def exploration_covariance(self, own: Array) -> Array:
        """Covariance for the bonus [R, D, D]: of users' own posteriors, or of the pooled head while trust is 0."""
        return library_of(own).where(self.trust > 0, own, self.covariance)
