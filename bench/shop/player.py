"""The interface of all methods that `metaban bench shop` compares.

A player knows the catalogue from the start. Items that have not arrived yet are never eligible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from metaban.bench.worlds.shop import Matrix, Places, ShopRequest

#: Settings of a player, for the report.
PlayerSettings: TypeAlias = Mapping[str, float | str | bool]


@final
@dataclass(frozen=True, slots=True)
class ShownItem:
    """What became of one shown item; positions are counted from 0, and the reward of a click is 1."""

    request: ShopRequest
    item: int
    position: int
    reward: float


class ShopPlayer(ABC):
    """Recommends slates; feedback arrives some slates later."""

    @abstractmethod
    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        """The items to show, `size` of the eligible ones, first place first."""

    @abstractmethod
    def learn(self, feedback: Sequence[ShownItem]) -> None:
        """Learn from shown items, in the order of arrival."""

    def close(self) -> None:  # noqa: B027 - most players hold nothing
        """Release what the player holds, such as processes; called once, at the end of a run."""


def best_items(scores: Matrix, eligible: Places, size: int, random: np.random.Generator) -> Places:
    """The eligible items with the highest scores [n], best first; equal scores are in random order."""
    order = np.lexsort((random.random(len(scores)), -scores))
    return eligible[order[:size]]
