"""Vowpal Wabbit in the shop: what it is told, and that it learns it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metaban.bench.shop.player import ShownItem
from metaban.bench.shop.players import VOWPAL, unavailable
from metaban.bench.shop.vowpal_ids import VowpalIds
from metaban.bench.worlds.shop import ShopCatalogue, ShopItem, ShopRequest
from tests.bench.shop.shops import catalogue

pytestmark = pytest.mark.skipif(unavailable(VOWPAL) is not None, reason="needs Vowpal Wabbit")

OPTIONS: dict[str, Any] = {
    "learning_rate": 0.5, "l2": 0.0, "power_t": 0.5, "epsilon": 0.0, "interactions": "ui ci", "rank": 0, "coin": False,
    "metadata": True, "position": True,
}  # fmt: skip


def test_examples_have_ids_metadata_context_and_position() -> None:
    items = ShopCatalogue(np.array([0]), (ShopItem("War", ("War", "Drama"), 1980, 25.0),))
    player = VowpalIds(items, seed=0, **OPTIONS)
    assert player._text(ShopRequest(0, 7, "tv", 21), 2) == "|u u7 |c tv part5 |p p2"
    assert player._items == ["|i i0 |g War |t War Drama |m year:-1 price:0.5"]
    plain = VowpalIds(items, seed=0, **{**OPTIONS, "metadata": False, "position": False})
    assert plain._text(ShopRequest(0, 7, "tv", 21), 2) == "|u u7 |c tv part5"
    assert plain._items == ["|i i0"]


def test_each_user_gets_the_items_that_they_click() -> None:
    player = VowpalIds(catalogue(), seed=0, **OPTIONS)
    for number in range(300):
        item, user = number % 12, number % 2
        liked = float(item < 6 if (number // 12) % 2 == 0 else item >= 6)
        asked = ShopRequest(number, (number // 12) % 2, "tv", 8)
        player.learn([ShownItem(asked, item, user, liked)])
    everything = np.arange(12)
    assert set(player.recommend(ShopRequest(0, 0, "tv", 8), everything, 5).tolist()) < set(range(6))
    assert set(player.recommend(ShopRequest(0, 1, "tv", 8), everything, 5).tolist()) < set(range(6, 12))


def test_epsilon_spreads_places_evenly() -> None:
    player = VowpalIds(catalogue(), seed=0, **{**OPTIONS, "epsilon": 1.0})
    counts = np.zeros(12)
    for number in range(600):
        shown = player.recommend(ShopRequest(number, 0, "tv", 8), np.arange(12), 5)
        assert len(set(shown.tolist())) == 5
        counts[shown] += 1
    assert counts == pytest.approx(np.full(12, 250.0), abs=70)
