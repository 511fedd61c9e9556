"""The interface of all methods that `metaban bench regret` compares.

A method sees the user, the arms and the context of a round, and the rewards of the arms that it chose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class VisibleRound:
    """The part of a round that a method may see: the user, the arms [k, d], and the context [c] if there is one."""

    user: int
    arms: Matrix
    context: Matrix | None = None

    @property
    def joined(self) -> Matrix:
        """Arms with the context appended to each, [k, d + c]."""
        if self.context is None:
            return self.arms
        return np.concatenate([self.arms, np.broadcast_to(self.context, (len(self.arms), len(self.context)))], axis=1)


class Method(ABC):
    """Decides round by round; a reward may arrive later and names its decision by number."""

    #: Settings, for the report.
    settings: Mapping[str, Any]

    @abstractmethod
    def decide(self, asked: VisibleRound, number: int) -> int:
        """The index of the arm to show."""

    @abstractmethod
    def learn(self, number: int, reward: float) -> None:
        """Learn the reward of a decision; called once per decision."""
