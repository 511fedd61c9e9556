"""The range that a reward was sent in, and its place on the learners' scale from 0 to 1.

A range may change while rewards of before are kept. So each is kept with its own: what it was stays known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

#: Rewards lie within ± this.
REWARD_LIMIT: Final = 1e30


@final
@dataclass(frozen=True, slots=True)
class RewardRange:
    """From the least reward to the greatest; ValueError when there is nothing between them, or they are too large."""

    least: float
    greatest: float

    def __post_init__(self) -> None:
        # A number that is not finite fails each comparison, or the limit.
        if not -REWARD_LIMIT <= self.least < self.greatest <= REWARD_LIMIT:
            raise ValueError(f"rewards cannot lie between {self.least:g} and {self.greatest:g}")

    def takes(self, reward: float) -> bool:
        """Whether a reward lies in the range."""
        return self.least <= reward <= self.greatest

    def scaled(self, reward: float) -> float:
        """A reward as learners see it, from 0 to 1; one outside of the range is cut to it."""
        return min(1.0, max(0.0, (reward - self.least) / (self.greatest - self.least)))

    def as_sent(self, scaled: float) -> float:
        """A reward that learners see so, in the range's own numbers."""
        return self.least + scaled * (self.greatest - self.least)


def scaled_sum(rewards: Sequence[tuple[float, RewardRange]]) -> float:
    """What scaled rewards, each with its range, are together: the sum of what was sent, in the range of the last."""
    _, latest = rewards[-1]
    return latest.scaled(math.fsum(sent_in.as_sent(scaled) for scaled, sent_in in rewards))
