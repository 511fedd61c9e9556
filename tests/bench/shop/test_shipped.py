"""The shipped learner in the shop sends what a client would send, and learns what was shown."""

from __future__ import annotations

import numpy as np

from metaban.bench.shop.player import ShownItem
from metaban.bench.shop.shipped import ShippedPlayer
from metaban.bench.worlds.shop import ShopRequest
from metaban.models.features import assemble
from tests.bench.shop.shops import catalogue


def test_inputs_are_those_of_named_features_in_the_order_of_the_items() -> None:
    items = catalogue(11)
    player = ShippedPlayer(items, seed=0)
    layout = player._loop.layout
    assert (layout.arm_named, layout.context_named, layout.products, layout.arm) == (True, True, False, 32)
    assert items.metadata is not None
    named = [
        {"category": each.category, "year": each.year, "price": each.price} | dict.fromkeys(each.tags, True)
        for each in items.metadata
    ]
    rows = np.array([1, 2, 10])
    found = player._arms.inputs(rows, {"device": "tv", "hour": 7})
    assert found.tolist() == assemble(layout, [named[row] for row in rows], {"device": "tv", "hour": 7}).tolist()


def test_places_for_names() -> None:
    assert ShippedPlayer(catalogue(), seed=0, hash_dimension=64)._loop.layout.dimension == 64 + 64 + 1


def test_without_metadata_the_id_is_the_feature() -> None:
    player = ShippedPlayer(catalogue(4, features=False), seed=0)
    assert player._arms.table.features == tuple({"item": f"i{number}"} for number in range(4))


def test_rewards_reach_the_samples_of_the_shown_items() -> None:
    player = ShippedPlayer(catalogue(), seed=0)
    eligible = np.array([0, 2, 3, 5, 7, 8, 11])
    request = ShopRequest(4, 3, "phone", 9)
    shown = player.recommend(request, eligible, 5)
    assert len(set(shown.tolist()) & set(eligible.tolist())) == 5
    player.learn([ShownItem(request, int(item), place, float(place == 1)) for place, item in enumerate(shown)][::-1])
    samples = player._loop._samples["user-3"]
    inputs = player._arms.inputs(shown, {"device": "phone", "hour": 9})
    assert [sample.features.tolist() for sample in samples] == inputs[::-1].tolist()
    assert [sample.reward for sample in samples] == [0, 0, 0, 1, 0]
    assert all(0 < sample.propensity <= 1 for sample in samples)
    assert player._open == {}
