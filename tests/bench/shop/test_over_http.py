"""The shop through HTTP: a real service shows what the player in one process shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import final

import numpy as np
import pytest

from metaban.bench.shop.inputs import named_context, named_features
from metaban.bench.shop.over_http import EPOCH_DUE, HttpPlayer
from metaban.bench.shop.player import ShopPlayer, ShownItem
from metaban.bench.shop.players import METHODS, OURS, OVER_HTTP
from metaban.bench.shop.runs import play
from metaban.bench.shop.shipped import ShippedPlayer
from metaban.bench.shop.shop import ShopPlan
from metaban.bench.shop.variants import variant_of
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.shop import Places, Shop, ShopRequest
from tests.bench.shop.shops import catalogue


@final
class Watched(ShopPlayer):
    """Records the slates of another player."""

    def __init__(self, player: ShopPlayer) -> None:
        self._player = player
        self.slates: list[list[int]] = []

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        shown = self._player.recommend(request, eligible, size)
        self.slates.append(shown.tolist())
        return shown

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        self._player.learn(feedback)

    def close(self) -> None:
        self._player.close()


def test_slates_are_those_of_the_player_in_one_process() -> None:
    try:
        shops = [Shop(variant_of("40x6-arrivals"), seed=245) for _ in range(2)]
    except DataMissing as missing:
        pytest.skip(str(missing))
    here = Watched(ShippedPlayer(shops[0].catalogue, seed=245))
    there = Watched(HttpPlayer(shops[1].catalogue, seed=245))
    with closing(there):
        clicks = [play(shop, player, 60)[0].tolist() for shop, player in zip(shops, (here, there), strict=True)]
    assert there.slates == here.slates
    assert clicks[0] == clicks[1]
    assert len({tuple(slate) for slate in here.slates}) > 30  # rewards were learned


def test_features_are_those_of_the_player_in_one_process() -> None:
    items = catalogue()
    assert items.metadata is not None
    assert ShippedPlayer(items, seed=0)._arms.table.features == tuple(named_features(item) for item in items.metadata)
    assert named_context(ShopRequest(0, 3, "tv", 21)) == {"device": "tv", "hour": 21}


def test_items_without_ids_or_metadata_are_refused() -> None:
    items = catalogue()
    for given in (catalogue(features=False), replace(items, identities=np.zeros_like(items.identities))):
        with pytest.raises(ValueError, match="need ids and metadata"):
            HttpPlayer(given, seed=0)


def test_the_epoch_that_is_due_is_read_from_the_metrics() -> None:
    values = {"other": 0.0, "default": 1.0}
    lines = [f'metaban_epoch_due{{namespace="{name}"}} {value}' for name, value in values.items()]
    found = EPOCH_DUE.search("\n".join(["# TYPE metaban_epoch_due gauge", *lines, "metaban_ready 1.0"]))
    assert found is not None
    assert found[1] == "1.0"


def test_a_run_through_http_has_one_seed_and_no_rivals() -> None:
    plan = ShopPlan.through_http(quick=False)
    assert (plan.variants, plan.methods, plan.seeds) == (("200x150",), (OURS, OVER_HTTP), (300,))
    assert plan.slates_of("200x150") == 3_000
    assert ShopPlan.through_http(quick=True).variants == ("60x40",)
    assert OVER_HTTP not in METHODS
