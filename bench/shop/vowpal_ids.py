"""Vowpal Wabbit with the ids of users and items: logistic regression of clicks on ids, metadata and context, crossed.

VW namespaces: u is the user, i the item, g its category, t its tags, m its year and price, c the context, p the
position. Items are scored at the first position.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, final

import numpy as np

from metaban.bench.shop.inputs import PART_HOURS
from metaban.bench.shop.player import ShopPlayer, ShownItem, best_items
from metaban.bench.worlds.shop import Matrix, Places, ShopCatalogue, ShopItem, ShopRequest

#: 2 to this power weights: enough for the pairs of a thousand users and items.
WEIGHT_BITS: Final = 22

#: Year that counts as 0, and years and money that count as 1.
YEAR_CENTRE: Final = 1990
YEAR_SCALE: Final = 10.0
PRICE_SCALE: Final = 50.0


@final
class VowpalIds(ShopPlayer):
    """Shows the items of the highest log-odds; with probability ε a place gets a random item instead.

    `interactions` are pairs of VW namespaces such as "ui ci". With a `rank`, user × item also has that many factors
    (`--lrq`). `coin` takes VW's update by coin betting, which needs no learning rate.
    """

    def __init__(
        self,
        catalogue: ShopCatalogue,
        *,
        seed: int,
        learning_rate: float,
        l2: float,
        power_t: float,
        epsilon: float,
        interactions: str,
        rank: int,
        coin: bool,
        metadata: bool,
        position: bool,
    ) -> None:
        options = [f"-l {learning_rate:g} --l2 {l2:g} --power_t {power_t:g}"]
        options += [f"-q {pair}" for pair in interactions.split()]
        options += [f"--lrq ui{rank}"] if rank else []
        options += ["--coin"] if coin else []
        # Imported by name: the package is optional and untyped.
        workspace: Any = import_module("vowpalwabbit").Workspace
        self._vw = workspace(
            f"--loss_function logistic {' '.join(options)} -b {WEIGHT_BITS} --random_seed {seed} --quiet"
        )
        self._random = np.random.default_rng(seed)
        self._epsilon = epsilon
        self._position = position
        described = catalogue.metadata if metadata and catalogue.metadata is not None else None
        names = [f"|i i{identity}" for identity in catalogue.identities.tolist()]
        self._items = names if described is None else [
            f"{name} {_item_text(item)}" for name, item in zip(names, described, strict=True)
        ]  # fmt: skip

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        start = self._text(request, 0)
        scores: Matrix = np.array([self._vw.predict(f"{start} {self._items[item]}") for item in eligible.tolist()])
        return self._explored(best_items(scores, eligible, len(eligible), self._random), size)

    def _explored(self, ranked: Places, size: int) -> Places:
        """The first of the ranked items; with probability ε a random one of those left takes a place."""
        left = ranked.tolist()
        return np.array(
            [
                left.pop(int(self._random.integers(len(left))) if self._random.random() < self._epsilon else 0)
                for _ in range(size)
            ]
        )

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            label = 1 if shown.reward > 0 else -1
            self._vw.learn(f"{label} {self._text(shown.request, shown.position)} {self._items[shown.item]}")

    def _text(self, request: ShopRequest, position: int) -> str:
        """The part of an example that does not depend on the item, in VW's text format."""
        context = f"|u u{request.user} |c {request.device} part{request.hour // PART_HOURS}"
        return f"{context} |p p{position}" if self._position else context


def _item_text(item: ShopItem) -> str:
    year, price = (item.year - YEAR_CENTRE) / YEAR_SCALE, item.price / PRICE_SCALE
    return f"|g {item.category} |t {' '.join(item.tags)} |m year:{year:g} price:{price:g}"
