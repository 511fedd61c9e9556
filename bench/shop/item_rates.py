"""Players that see only how often each item was shown and clicked, and the two ends of the scale: random and oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from metaban.bench.shop.player import ShopPlayer, ShownItem, best_items
from metaban.bench.worlds.shop import Matrix, Places, ShopCatalogue, ShopRequest

#: Shows and clicks that `popularity` assumes of every item: a rate above the average, so that all items are tried.
ASSUMED_SHOWS: Final = 10.0
ASSUMED_CLICKS: Final = 2.0


@final
class RandomPlayer(ShopPlayer):
    """Shows random items."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        return self._random.permutation(eligible)[:size]

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        """Nothing to learn."""


@final
class OraclePlayer(ShopPlayer):
    """Knows the click probability of every item and shows the highest first: the upper end of the scale."""

    def __init__(self, chances: Callable[[ShopRequest], Matrix]) -> None:
        self._chances = chances

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        order = np.argsort(-self._chances(request)[eligible], kind="stable")
        return eligible[order[:size]]

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        """Nothing to learn."""


@final
class PopularityPlayer(ShopPlayer):
    """Shows the items with the highest click rate so far, after some assumed shows and clicks."""

    def __init__(self, catalogue: ShopCatalogue, *, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._identities = catalogue.identities  # [N]
        self._shows = np.full(self._identities.max() + 1, ASSUMED_SHOWS)  # [identities]
        self._clicks = np.full_like(self._shows, ASSUMED_CLICKS)  # [identities]

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        known = self._identities[eligible]
        return best_items(self._clicks[known] / self._shows[known], eligible, size, self._random)

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            self._shows[self._identities[shown.item]] += 1
            self._clicks[self._identities[shown.item]] += shown.reward


@final
class ClickRateThompson(ShopPlayer):
    """Thompson sampling of the click rate of each item: Chapelle and Li, An empirical evaluation of Thompson sampling,
    NIPS 2011.

    The rate of an item has the posterior Beta(a, b) with a = α + clicks and b = β + shows − clicks. Draws are from
    Beta(a/width, b/width), the paper's posterior reshaping: a width below 1 explores less. With `decay` below 1, a show
    without a click at position p counts decay^p shows, since lower places are looked at less often.
    """

    def __init__(
        self,
        catalogue: ShopCatalogue,
        *,
        seed: int,
        prior_rate: float,
        prior_shows: float,
        width: float,
        decay: float,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._identities = catalogue.identities  # [N]
        self._width = width
        self._decay = decay
        count = self._identities.max() + 1
        #: Both parameters of the Beta distribution, [identities].
        self.clicked = np.full(count, prior_rate * prior_shows)
        self.ignored = np.full(count, (1 - prior_rate) * prior_shows)

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        known = self._identities[eligible]
        drawn = self._random.beta(self.clicked[known] / self._width, self.ignored[known] / self._width)
        return best_items(drawn, eligible, size, self._random)

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            identity = self._identities[shown.item]
            self.clicked[identity] += shown.reward
            self.ignored[identity] += (1 - shown.reward) * self._decay**shown.position
