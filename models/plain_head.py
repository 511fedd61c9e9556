"""One plain head for everybody, by which arms are ranked until users' own heads foresee more than it does.

Where rewards are rare, and in the first hundreds of events anywhere, the many coefficients of users' heads mostly
follow chance. A ridge regression of everybody's rewards on the inputs alone, without products and trunk, has the fewest
coefficients that can tell arms apart: it is the last to take chance for taste. Trust τ in [0, 1] is what a user's own
head counts beside it; what was noted of decisions tells (upkeep.py). What is not known of arms stays what the user's
own posterior does not know: users would not be told apart by choices that everybody's head alone explores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from models.arrays import Array, inverse
from models.prior import Statistics

#: Events that it takes to believe half of what a coefficient seems to be, when inputs are standardised.
HALF_BELIEVED_EVENTS = 1_000.0
#: The same for the constant, which has nothing to be confused with.
HALF_BELIEVED_CONSTANT = 1.0


@final
@dataclass(frozen=True, slots=True)
class PlainHead:
    """Everybody's plain head [D], and trust τ [] in users' own, float64."""

    mean: Array
    trust: Array

    @classmethod
    def initial(cls, dimension: int) -> Self:
        """Before any event: there is none."""
        return cls(torch.zeros(dimension, dtype=torch.float64), torch.ones((), dtype=torch.float64))

    @classmethod
    def fitted(cls, users: Statistics, teaching: Tensor, seen: int, trust: Tensor) -> Self:
        """From everybody's rows on the constant and the `seen` inputs behind it, where users count w_u [U]."""
        size = 1 + seen
        gram = (teaching @ users.gram.flatten(1)).view_as(users.gram[0])[:size, :size]
        penalty = torch.full_like(users.moment[0, :size], HALF_BELIEVED_EVENTS)
        penalty[0] = HALF_BELIEVED_CONSTANT
        mean = torch.zeros_like(users.moment[0])  # [D]
        mean[:size] = inverse(gram + penalty.diag()) @ (teaching @ users.moment[:, :size])
        return cls(mean, trust)

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """Of an epoch."""
        return cls(shared["plain_mean"], shared["trust"])

    def state(self) -> dict[str, Array]:
        """What an epoch keeps of it."""
        return {"plain_mean": self.mean, "trust": self.trust}

    def beside(self, heads: Array) -> Array:
        """Users' mean heads [R, D] as far as they are trusted, for the rest the plain one."""
        mixed: Array = self.mean + self.trust * (heads - self.mean)
        return mixed
