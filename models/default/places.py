"""Places of a slate: e_k, how often place k is looked at, relative to the first (position bias).

The reward at place k is e_k times that at the first place. e_k is learned by regression of rewards on what is predicted
for the first place. Predictions are uncertain, and the first place has the most overestimated arms: their variance is
part of the squared predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array

#: Places with an e_k of their own; later ones share the last.
PLACES: Final = 16

#: Range of e_k, and the weight of its last value, in squared predictions.
LEAST_LOOK, MOST_LOOK = 0.05, 2.0
LOOK_EVIDENCE: Final = 2.0


def looks_at(looks: Array, places: Array) -> Array:
    """e_k [...] of places [...], counted from 0, from e [PLACES]."""
    return looks[places.clip(None, PLACES - 1)]


@final
@dataclass(frozen=True, slots=True)
class LookEvidence:
    """Sums over samples for each place [PLACES]: reward × prediction, squared prediction, and weight."""

    earned: Tensor
    predicted: Tensor
    counted: Tensor

    @classmethod
    def before(cls, looks: Tensor) -> Self:
        """The evidence for e_k so far [PLACES]."""
        return cls(LOOK_EVIDENCE * looks, torch.full_like(looks, LOOK_EVIDENCE), torch.zeros_like(looks))

    def with_samples(self, places: Tensor, weights: Tensor, rewards: Tensor, first: Tensor, square: Tensor) -> Self:
        """With samples [B, S]: their places, weights, rewards, predictions for the first place and E[prediction²]."""
        index = places.clip(None, PLACES - 1).flatten()
        return type(self)(
            self.earned.index_add(0, index, (weights * rewards * first).flatten()),
            self.predicted.index_add(0, index, (weights * square).flatten()),
            self.counted.index_add(0, index, weights.flatten()),
        )

    def looks(self, before: Tensor) -> Tensor:
        """e_k [PLACES]; places without samples keep theirs: relative to the first, they would move with every round."""
        looks = self.earned / self.predicted
        looks = (looks / looks[0].clamp_min(LEAST_LOOK)).clamp(LEAST_LOOK, MOST_LOOK)
        looks[0] = 1
        return torch.where(self.counted > 0, looks, before)
