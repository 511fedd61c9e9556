"""One plain taste for everybody, by which arms are ranked at first, until users' own heads foresee more than it does.

In the first hundreds of events the many coefficients of users' heads mostly follow chance. A ridge regression of
everybody's rewards on the inputs alone, without products and trunk, has the fewest coefficients that can tell arms
apart: it is the last to take chance for taste. Users differ in how much they like anything at all, which tells no arm
from another but would drown what does, so each has a level of their own, a random effect: r = level_u + xᵀw + noise,
level_u ~ N(0, Σ₀₀), with the prior's variance of the constant.

Trust τ in [0, 1] is what a user's own head counts beside it; what was noted of decisions tells (upkeep.py). What is not
known of arms stays what the user's own posterior does not know: users would not be told apart by choices that
everybody's head alone explores. Where rewards are rare, though, nobody can be told apart for long, and posteriors of
users stay so wide that they try anything: there τ is 0 at first, and arms are tried for what the plain head does not
know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from models.arrays import Array, inverse, library_of, zeros
from models.prior import Prior, Statistics

#: Events that it takes to believe half of what a coefficient seems to be, when inputs are standardised.
HALF_BELIEVED_EVENTS = 1_000.0
#: The same for the constant, which has nothing to be confused with.
HALF_BELIEVED_CONSTANT = 1.0


@final
@dataclass(frozen=True, slots=True)
class PlainHead:
    """Everybody's plain head w [D] and its covariance [D, D], events κ [] that it takes to believe half of a user's
    level, and trust τ [] in users' own heads; float64."""

    mean: Array
    covariance: Array
    level_events: Array
    trust: Array

    @classmethod
    def initial(cls, dimension: int) -> Self:
        """Before any event: there is none."""
        nothing, one = torch.zeros(dimension, dimension, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        return cls(nothing[0].clone(), nothing, one, one.clone())

    @classmethod
    def fitted(cls, users: Statistics, teaching: Tensor, seen: int, prior: Prior, trust: Tensor) -> Self:
        """From everybody's rows on the constant and the `seen` inputs behind it, where users count w_u [U].

        Levels are integrated out: with n rewards of a user that are correlated by their level, A − aaᵀ/(n + κ) and
        b − a·Σr/(n + κ) take the place of A and b, where a = Σh and κ = σ²/Σ₀₀.
        """
        size, level_events = 1 + seen, prior.noise / prior.covariance[0, 0]
        sums, earned = users.gram[:, 0, :size], users.moment[:, 0]  # [U, size], [U]
        share = teaching / (users.events + level_events)  # [U]
        gram = (teaching @ users.gram.flatten(1)).view_as(users.gram[0])[:size, :size] - (sums.mT * share) @ sums
        moment = teaching @ users.moment[:, :size] - (share * earned) @ sums
        penalty = torch.full_like(moment, HALF_BELIEVED_EVENTS)
        penalty[0] = HALF_BELIEVED_CONSTANT
        mean, covariance = torch.zeros_like(users.moment[0]), torch.zeros_like(users.gram[0])  # [D], [D, D]
        inverted = inverse(gram + penalty.diag())
        mean[:size], covariance[:size, :size] = inverted @ moment, prior.noise * inverted
        return cls(mean, covariance, level_events, trust)

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """Of an epoch."""
        return cls(shared["plain_mean"], shared["plain_covariance"], shared["plain_level_events"], shared["trust"])

    def state(self) -> dict[str, Array]:
        """What an epoch keeps of it."""
        return {
            "plain_mean": self.mean,
            "plain_covariance": self.covariance,
            "plain_level_events": self.level_events,
            "trust": self.trust,
        }

    def of_users(self, gram: Array, moment: Array) -> Array:
        """With the levels of users with A [R, D, D] and b [R, D]: [R, D]."""
        heads = zeros(moment.shape, moment) + self.mean
        heads[:, 0] += (moment[:, 0] - gram[:, 0] @ self.mean) / (gram[:, 0, 0] + self.level_events)
        return heads

    def beside(self, plain: Array, own: Array) -> Array:
        """Users' mean heads [R, D] as far as they are trusted, for the rest their plain ones [R, D]."""
        mixed: Array = plain + self.trust * (own - plain)
        return mixed

    def explored(self, own: Array) -> Array:
        """What arms are tried for [R, D, D]: what users' own posteriors do not know, unless those are not asked."""
        return library_of(own).where(self.trust > 0, own, self.covariance)
