"""Players that count shows and clicks, against plain counting."""

from __future__ import annotations

import numpy as np
import pytest

from metaban.bench.shop.item_rates import ClickRateThompson, OraclePlayer, PopularityPlayer
from metaban.bench.worlds.shop import ShopCatalogue, ShopRequest
from tests.bench.shop.shops import catalogue, feedback

ASKED = ShopRequest(0, 0, "phone", 3)


def test_click_rates_have_the_posterior_of_counts() -> None:
    player = ClickRateThompson(catalogue(), seed=0, prior_rate=0.2, prior_shows=10, width=1.0, decay=1.0)
    shown = feedback(200)
    for start in range(0, 200, 7):
        player.learn(shown[start : start + 7])
    for item in range(12):
        rewards = [each.reward for each in shown if each.item == item]
        assert player.clicked[item] == pytest.approx(2 + sum(rewards))
        assert player.ignored[item] == pytest.approx(8 + len(rewards) - sum(rewards))


def test_decay_counts_fewer_shows_at_lower_places() -> None:
    player = ClickRateThompson(catalogue(), seed=0, prior_rate=0.5, prior_shows=2, width=1.0, decay=0.5)
    shown = feedback(60)
    player.learn(shown)
    lost = sum(0.5**each.position for each in shown if each.item == 3 and not each.reward)
    assert player.ignored[3] == pytest.approx(1 + lost)


def test_slates_are_ranked_by_draws_of_the_posterior() -> None:
    player = ClickRateThompson(catalogue(2), seed=0, prior_rate=0.5, prior_shows=2, width=0.5, decay=1.0)
    player.clicked[:], player.ignored[:] = (3.0, 2.0), (2.0, 2.0)
    first = [player.recommend(ASKED, np.array([0, 1]), 2)[0] for _ in range(4_000)]
    random = np.random.default_rng(1)
    better = random.beta(6.0, 4.0, 100_000) > random.beta(4.0, 4.0, 100_000)
    assert np.mean(np.array(first) == 0) == pytest.approx(better.mean(), abs=0.03)


def test_popularity_ranks_by_click_rate() -> None:
    player = PopularityPlayer(catalogue(), seed=0)
    shown = feedback(300)
    player.learn(shown)
    rewards = {item: [each.reward for each in shown if each.item == item] for item in range(12)}
    rates = {item: (2 + sum(found)) / (10 + len(found)) for item, found in rewards.items()}
    eligible = np.array([1, 4, 5, 8, 9, 11])
    expected = sorted(eligible.tolist(), key=lambda item: -rates[item])[:3]
    assert [rates[item] for item in player.recommend(ASKED, eligible, 3)] == [rates[item] for item in expected]


def test_items_of_one_identity_share_their_counts() -> None:
    player = PopularityPlayer(ShopCatalogue(np.array([0] * 6 + [1] * 6), None), seed=0)
    player.learn([each for each in feedback(100) if (each.item < 6) == bool(each.reward)])
    assert player.recommend(ASKED, np.array([2, 8]), 1).tolist() == [2]


def test_the_oracle_shows_the_highest_probabilities() -> None:
    chances = np.array([0.1, 0.5, 0.3, 0.9])
    assert OraclePlayer(lambda request: chances).recommend(ASKED, np.array([0, 1, 2]), 2).tolist() == [1, 2]
