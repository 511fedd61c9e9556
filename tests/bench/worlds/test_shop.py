"""The shop: tastes, click probabilities, arrivals and common random numbers match their definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from metaban.bench.worlds.data import DataMissing, data_folder, movielens_films, movielens_ratings
from metaban.bench.worlds.shop import EXAMINATION, Matrix, Shop, ShopItem, ShopRequest, ShopVariant, tastes_of

SMALL = ShopVariant(items=40, users=12)


def shop(variant: ShopVariant = SMALL, seed: int = 200) -> Shop:
    try:
        return Shop(variant, seed=seed)
    except DataMissing as missing:
        pytest.skip(str(missing))


def slow_tastes(ratings: Matrix, start: Matrix) -> Matrix:
    """Twenty alternations of ridge regressions, one rating at a time."""
    users, items = ratings.shape
    means = [ratings[user][ratings[user] > 0].mean() for user in range(users)]

    def regression(samples: Sequence[tuple[Matrix, float]]) -> Matrix:
        gram, target = 4.0 * np.eye(8), np.zeros(8)
        for inputs, value in samples:
            gram += np.outer(inputs, inputs)
            target += value * inputs
        return np.linalg.inv(gram) @ target

    of_items = list(start)
    for _ in range(20):
        of_users = [
            regression([(of_items[i], ratings[u, i] - means[u]) for i in range(items) if ratings[u, i]])
            for u in range(users)
        ]
        of_items = [
            regression([(of_users[u], ratings[u, i] - means[u]) for u in range(users) if ratings[u, i]])
            for i in range(items)
        ]
    predicted = np.array([[float(user @ item) for item in of_items] for user in of_users])
    return np.array([(row - row.mean()) / row.std() for row in predicted])


def test_tastes_are_the_standardised_factorisation_of_centred_ratings() -> None:
    random = np.random.default_rng(3)
    ratings = random.integers(1, 6, (9, 14)) * (random.random((9, 14)) < 0.6).astype(np.float64)
    ratings[:, 0] = 3.0
    found = tastes_of(ratings)
    start = np.random.default_rng(0).standard_normal((14, 8))
    assert found == pytest.approx(slow_tastes(ratings, start), abs=1e-8)
    assert found.mean(1) == pytest.approx(np.zeros(9), abs=1e-12)
    assert found.std(1) == pytest.approx(np.ones(9))


def test_items_are_the_most_rated_and_users_rated_most_of_them() -> None:
    world = shop(ShopVariant(items=50, users=20))
    folder = data_folder(None)
    rated, films = movielens_ratings(folder) > 0, movielens_films(folder)
    counts = sorted(rated.sum(0).tolist(), reverse=True)[:50]
    assert world.catalogue.metadata is not None
    popular = sorted(range(rated.shape[1]), key=lambda item: -int(rated[:, item].sum()))[:50]
    assert [int(rated[:, item].sum()) for item in popular] == counts
    for item, film in zip(world.catalogue.metadata, popular, strict=True):
        year, genres = films[film]
        assert (item.year, item.tags, item.category) == (year, genres, genres[0])
        assert 4.99 <= item.price <= 49.99
    assert world.tastes.shape == (20, 50)
    # The tastes of everyone in the shop come from a matrix of their ratings of these items alone.
    active = sorted(range(len(rated)), key=lambda user: -int(rated[user, popular].sum()))[:20]
    assert np.array_equal(world.tastes, tastes_of(movielens_ratings(folder)[np.ix_(active, popular)]))


def slow_chance(taste: float, item: ShopItem, request: ShopRequest) -> float:
    odds = -2.2 + 1.6 * taste
    if request.device == "tv" and "Drama" in item.tags:
        odds += 0.7
    if request.device == "phone" and "Comedy" in item.tags:
        odds += 0.7
    if request.hour >= 20 and "Horror" in item.tags:
        odds += 1.0
    return 1 / (1 + math.exp(-odds))


def test_click_probabilities_are_those_of_the_definition() -> None:
    world = shop(ShopVariant(items=200, users=12))
    metadata = world.catalogue.metadata
    assert metadata is not None
    assert {tag for item in metadata for tag in item.tags} >= {"Drama", "Comedy", "Horror"}
    for number in range(60):
        request = world.visit(number).request
        slow = [slow_chance(world.tastes[request.user, i], item, request) for i, item in enumerate(metadata)]
        assert world.chances(request) == pytest.approx(np.array(slow))
    assert EXAMINATION.tolist() == [1.0, 0.85, 0.72, 0.61, 0.52]


def test_clicks_follow_the_uniform_number_of_slate_and_item() -> None:
    world, total, expected = shop(), 0, 0.0
    for number in range(400):
        visit = world.visit(number)
        shown = np.array([7, 3, 11, 0, 20])
        chances = [looked * world.chances(visit.request)[item] for looked, item in zip(EXAMINATION, shown, strict=True)]
        clicked = world.clicks(visit, shown)
        assert clicked.tolist() == [visit.draws[item] < chance for item, chance in zip(shown, chances, strict=True)]
        total, expected = total + int(clicked.sum()), expected + sum(chances)
        # An item that moves to a better place keeps its click.
        if clicked[4]:
            assert world.clicks(visit, np.array([20, 3, 11, 0, 7]))[0]
    assert total == pytest.approx(expected, abs=4 * math.sqrt(expected))


def test_visits_depend_on_seed_and_slate_alone() -> None:
    first, again, other = shop(), shop(), shop(seed=201)
    backwards = [again.visit(number) for number in reversed(range(300))][::-1]
    visits = [first.visit(number) for number in range(300)]
    for one, two in zip(visits, backwards, strict=True):
        assert (one.request, one.delay) == (two.request, two.delay)
        assert np.array_equal(one.draws, two.draws)
    assert {visit.delay for visit in visits} <= set(range(1, 40))
    assert {1, 39} <= {first.visit(number).delay for number in range(1_000)}
    assert {visit.request.user for visit in visits} == set(range(12))
    assert {visit.request.device for visit in visits} == {"phone", "desktop", "tv"}
    assert {visit.request.hour for visit in visits} == set(range(24))
    assert any(one.request != other.visit(number).request for number, one in enumerate(visits))
    assert first.catalogue.metadata == again.catalogue.metadata != other.catalogue.metadata


def test_items_arrive_every_fifty_slates_until_all_are_there() -> None:
    world = shop(ShopVariant(items=200, users=12, arrivals=True))
    assert len(world.in_catalogue(0)) == len(world.in_catalogue(49)) == 100
    assert len(world.in_catalogue(50)) == 102
    assert set(world.in_catalogue(50)) > set(world.in_catalogue(49))
    assert len(world.in_catalogue(2_499)) == 198
    assert world.in_catalogue(2_500).tolist() == list(range(200))
    assert shop().in_catalogue(0).tolist() == list(range(40))


def test_what_is_absent_is_not_in_the_catalogue() -> None:
    plain, no_features, no_ids = shop(), shop(ShopVariant(40, 12, features=False)), shop(ShopVariant(40, 12, ids=False))
    assert plain.catalogue.identities.tolist() == list(range(40))
    assert no_features.catalogue.metadata is None
    metadata = no_ids.catalogue.metadata
    assert metadata is not None
    for one, kind in zip(metadata, no_ids.catalogue.identities, strict=True):
        for two, other in zip(metadata, no_ids.catalogue.identities, strict=True):
            assert (one.category == two.category) == (kind == other)
    assert np.array_equal(plain.chances(plain.visit(3).request), no_features.chances(plain.visit(3).request))


def test_explained_tastes_are_linear_in_tags_and_year() -> None:
    world = shop(ShopVariant(items=120, users=12, explained=True))
    metadata = world.catalogue.metadata
    assert metadata is not None
    tags = sorted({tag for item in metadata for tag in item.tags})
    inputs = np.array([[1.0, item.year - 1990.0, *(float(tag in item.tags) for tag in tags)] for item in metadata])
    fitted = inputs @ np.linalg.pinv(inputs) @ world.tastes.T
    assert np.allclose(fitted.T, world.tastes, atol=1e-8)
    assert world.tastes.std(1) == pytest.approx(np.ones(12))
    # The part that features explain is closer to the user's own tastes than to those of others.
    plain = shop(ShopVariant(items=120, users=12))
    alike = world.tastes @ plain.tastes.T / 120
    assert alike.diagonal().mean() > np.abs(alike).mean() + 0.1
