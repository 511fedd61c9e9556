"""Samples as all parts of the default learner see them: the notes of their decisions, and what they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.default.notes import Notes
from metaban.models.default.places import looks_at
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import UserBatch
from metaban.models.numerics.arrays import Array, cast

#: Weight of samples from before a drift.
STALE_WEIGHT: Final = 0.05


def recency_weight(current: Array, like: Array) -> Array:
    """1 where `current` holds, otherwise STALE_WEIGHT, in the dtype of another array."""
    return STALE_WEIGHT + (1 - STALE_WEIGHT) * cast(current, like)


def sample_weights(batch: UserBatch, shared: SharedState) -> Array:
    """Weight of each sample [B, S]: 0 for padding, STALE_WEIGHT before the last drift, e_k² for its place (arms.py)."""
    looks = cast(looks_at(shared.effects.looks, batch.places), batch.rewards)
    return recency_weight(batch.epochs >= shared.since, batch.rewards) * batch.valid * looks * looks


def first_place_rewards(batch: UserBatch, shared: SharedState) -> Array:
    """Rewards as they would be at the first place [B, S]: r/e_k."""
    rewards: Array = batch.rewards / cast(looks_at(shared.effects.looks, batch.places), batch.rewards)
    return rewards


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """All users' samples, one row each: inputs [n, d], rewards at the first place [n], notes of n rows, epochs [n],
    weights [n], and e_k of their places [n]."""

    features: Tensor
    rewards: Tensor
    notes: Notes
    epochs: Tensor
    weights: Tensor
    looks: Tensor

    @classmethod
    def of(cls, batches: Sequence[UserBatch], shared: SharedState) -> Self:
        """The rows of all batches, padding included, with weight 0; rewards are those at the first place."""
        return cls(
            torch.cat([batch.features.flatten(0, 1) for batch in batches]),
            torch.cat([first_place_rewards(batch, shared).flatten() for batch in batches]),
            Notes(torch.cat([batch.phi.flatten(0, 1) for batch in batches])),
            torch.cat([batch.epochs.flatten() for batch in batches]),
            torch.cat([sample_weights(batch, shared).flatten() for batch in batches]),
            torch.cat([looks_at(shared.effects.looks, batch.places).flatten() for batch in batches]),
        )

    def weighted_by_user(self, batches: Sequence[UserBatch], user_weights: Tensor) -> Samples:
        """The same with the weights of each user's samples multiplied by w_u [U]."""
        parts = torch.split(user_weights, [batch.rewards.shape[0] for batch in batches])
        each = [part.repeat_interleave(batch.rewards.shape[1]) for part, batch in zip(parts, batches, strict=True)]
        return replace(self, weights=self.weights * torch.cat(each).to(self.weights))

    def rows_at(self, shares: Tensor) -> Tensor:
        """Rows [m] at shares [m] of the total weight, each in [0, 1): uniform shares sample rows by weight."""
        ends = self.weights.to(torch.float64).cumsum(0)  # [n]
        return torch.searchsorted(ends, shares * ends[-1], right=True).clamp_max(ends.shape[0] - 1)

    def evenly_spread(self, most: int) -> Tensor:
        """At most so many rows, evenly spaced over the total weight."""
        count = min(most, self.weights.shape[0])
        return self.rows_at((torch.arange(count, dtype=torch.float64, device=self.weights.device) + 0.5) / count)
