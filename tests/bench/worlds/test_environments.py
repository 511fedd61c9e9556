"""Every environment matches its description, on made-up data and on the real data if present."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from metaban.bench.worlds.data import FOLDER_VARIABLE, DataMissing, folder_beside_checkout
from metaban.bench.worlds.environments import (
    CLUSTERS,
    ENVIRONMENTS,
    Categories,
    ClusteredRatings,
    DigitBlocks,
    Environment,
    EnvironmentRound,
    Purchases,
    RatedItems,
    ShiftedImages,
    SyntheticGroups,
    build_environment,
)

Matrix = NDArray[np.float64]
#: Environments made of data sets that may be missing.
OF_DATA = ("movielens", "yelp", "service", "mnist", "revenue")


def world_of(name: str, seed: int) -> Environment:
    try:
        return build_environment(name, seed=seed)
    except DataMissing as missing:
        pytest.skip(f"{name} needs its data set: {missing}")


def density(values: Matrix) -> Matrix:
    result: Matrix = np.exp(-2 * values**2) / (0.5 * np.sqrt(2 * np.pi))
    return result


def undensity(arms: Matrix) -> Matrix:
    """Absolute values of the features behind the density of arms; signs are lost."""
    result: Matrix = np.sqrt(np.maximum(0, -np.log(arms * 0.5 * np.sqrt(2 * np.pi)) / 2))
    return result


def test_rounds_are_made_of_unit_arms_and_their_true_chances() -> None:
    world = SyntheticGroups(seed=1, users=6, groups=2, arms=5, dimension=3, low=0.1, high=0.9, spread=0.5)
    for _ in range(50):
        asked = world.next_round()
        assert asked.arms.shape == (5, 3)
        assert np.allclose(np.linalg.norm(asked.arms, axis=1), 1)
        assert ((asked.chances >= 0.1) & (asked.chances <= 0.9)).all()
        assert world.group_of(asked.user_id) == int(asked.user_id.removeprefix("user-")) % 2


def test_groups_want_different_arms() -> None:
    world = SyntheticGroups(seed=2)
    rounds = [world.next_round() for _ in range(4_000)]
    liked = [
        np.mean([asked.arms[asked.chances.argmax()] for asked in rounds if world.group_of(asked.user_id) == group], 0)
        for group in (0, 1)
    ]
    assert liked[0] @ liked[1] < -0.3


def test_rewards_come_with_the_chance_of_the_arm() -> None:
    world = SyntheticGroups(seed=3)
    rounds = [world.next_round() for _ in range(2_000)]
    chances, rewards = np.array([asked.chances for asked in rounds]), np.array([asked.rewards for asked in rounds])
    for low, high in ((0, 0.1), (0.1, 0.4), (0.4, 1)):
        among = (chances >= low) & (chances < high)
        spread = np.sqrt((chances * (1 - chances))[among].sum()) / among.sum()
        assert abs(rewards[among].mean() - chances[among].mean()) < 4 * spread
    assert world.reward(rounds[0], 2) == rewards[0, 2]


def test_the_same_seed_is_the_same_world() -> None:
    one, two = SyntheticGroups(seed=9), SyntheticGroups(seed=9)
    for _ in range(5):
        first, second = one.next_round(), two.next_round()
        assert first.user_id == second.user_id
        assert np.array_equal(first.arms, second.arms)


def test_a_switch_changes_all_tastes_at_its_round_and_nothing_before() -> None:
    steady, switched = SyntheticGroups(seed=4), SyntheticGroups(seed=4, switch_at=20)
    for _ in range(20):
        assert np.array_equal(steady.next_round().chances, switched.next_round().chances)
    before = SyntheticGroups(seed=4)
    after = [switched.next_round() for _ in range(200)]
    for group in (0, 1):
        mine = [asked for asked in after if asked.user % 2 == group]
        expected = [before._bumps(asked.arms, before._tastes[group]) for asked in mine]
        assert np.abs(np.array([asked.chances for asked in mine]) - expected).mean() > 0.02


def test_a_reward_rate_is_what_random_arms_earn() -> None:
    world = build_environment("synthetic", seed=5, reward_rate=0.01)
    rounds = [world.next_round() for _ in range(3_000)]
    assert np.mean([asked.chances for asked in rounds]) == pytest.approx(0.01, rel=0.05)
    assert np.mean([asked.rewards for asked in rounds]) == pytest.approx(0.01, rel=0.2)


def test_with_interaction_arms_are_liked_by_context_not_by_themselves() -> None:
    world = build_environment("synthetic", seed=6, interaction=True, groups=1, users=3, spread=2.0)
    rounds = [world.next_round() for _ in range(600)]
    assert world.context_dimension == world.dimension == 5
    contexts = [asked.context for asked in rounds if asked.context is not None]
    assert np.allclose(np.linalg.norm(contexts, axis=1), 1)
    chances = np.concatenate([asked.chances for asked in rounds])
    arms = np.concatenate([asked.arms for asked in rounds])
    products = np.concatenate(
        [np.einsum("ki,j->kij", asked.arms, asked.context).reshape(len(asked.arms), -1) for asked in rounds]
    )

    def explained(inputs: Matrix) -> float:
        inputs = np.column_stack([inputs, np.ones(len(inputs))])
        left = chances - inputs @ np.linalg.lstsq(inputs, chances, rcond=None)[0]
        return 1 - float(left.var() / chances.var())

    assert explained(arms) < 0.05
    assert explained(products) > 0.5


def test_clustered_ratings_show_nine_liked_and_one_disliked_pair_of_one_cluster() -> None:
    random = np.random.default_rng(7)
    raters, items = random.uniform(0.1, 1, (130, 3)), random.uniform(0.1, 1, (40, 4))
    entries = np.array([(u, i, random.choice([-1, 1])) for u in range(130) for i in random.permutation(40)[:12]])
    label = {(u, i): sign for u, i, sign in entries.tolist()}
    cluster = KMeans(CLUSTERS, random_state=0, n_init=10).fit_predict(raters)
    world = ClusteredRatings(entries, raters, items, seed=8)
    assert world.dimension == 7
    clusters_of_users: dict[int, set[int]] = {}
    for _ in range(150):
        asked = world.next_round()
        assert asked.arms.shape == (10, 7)
        shown = undensity(asked.arms)
        item = np.abs(shown[:, None, :4] - items).sum(-1).argmin(1)
        rater = np.abs(shown[:, None, 4:] - raters).sum(-1).argmin(1)
        assert np.allclose(asked.arms, density(np.concatenate([items[item], raters[rater]], axis=1)))
        signs = [label[pair] for pair in zip(rater.tolist(), item.tolist(), strict=True)]
        assert sorted(signs) == [-1] + [1] * 9
        assert asked.rewards.tolist() == [float(sign < 0) for sign in signs]
        clusters_of_users.setdefault(asked.user, set()).update(cluster[rater].tolist())
    assert all(len(found) == 1 for found in clusters_of_users.values())
    assert len(set.union(*clusters_of_users.values())) == len(clusters_of_users)


def test_rated_items_show_one_loved_item_among_nine_plain_ones_by_their_factors() -> None:
    random = np.random.default_rng(9)
    ratings = random.integers(0, 6, (50, 80)).astype(np.float64) * (
        random.random((50, 80)) < random.uniform(0.1, 1, (50, 1))
    )
    centred = np.zeros_like(ratings)
    for user, row in enumerate(ratings):
        centred[user, row > 0] = row[row > 0] - row[row > 0].mean()
    _, values, right = np.linalg.svd(centred)
    factors = right[:12].T * np.sqrt(values[:12])
    factors = np.abs(factors / factors.std(0))  # the sign of singular vectors is arbitrary
    able = [
        user
        for user in sorted(range(50), key=lambda user: -np.count_nonzero(ratings[user]))
        if (ratings[user] == 5).sum() > 2 and ((ratings[user] > 0) & (ratings[user] <= 3)).sum() > 9
    ]
    world = RatedItems(ratings, seed=10)
    assert (world.users, world.dimension) == (len(able), 12)
    assert 0 < len(able) < 50
    for _ in range(150):
        asked = world.next_round()
        item = np.abs(np.abs(asked.arms)[:, None] - factors).sum(-1).argmin(1)
        assert np.allclose(np.abs(asked.arms), factors[item])
        assert len(set(item.tolist())) == 10
        stars = ratings[able[asked.user], item]
        assert asked.rewards.tolist() == (stars == 5).tolist()
        assert asked.rewards.sum() == 1
        assert ((stars == 5) | ((stars > 0) & (stars <= 3))).all()


def test_shifted_images_earn_when_moved_by_their_class() -> None:
    # The first value of an image is its class, the second its set.
    sets = [
        (np.array([[1 + label, 8 + number, 3.0] for label in (0, 1, 2, 1)], dtype=np.float32), np.array([0, 1, 2, 1]))
        for number in (0, 1)
    ]
    world = ShiftedImages(sets, seed=11, classes=3)
    assert (world.users, world.dimension) == (6, 5)
    for _ in range(60):
        asked = world.next_round()
        moved = [int(np.flatnonzero(row)[0]) for row in asked.arms]
        assert sorted(moved) == [0, 1, 2]
        for row, places in zip(asked.arms, moved, strict=True):
            image = row[places : places + 3]
            assert image.tolist() == [1 + asked.user % 3, 8 + asked.user // 3, 3.0]
            assert np.count_nonzero(row) == 3
        assert asked.rewards.tolist() == [float(places == asked.user % 3) for places in moved]


def slow_digit_arm(image: Matrix, kind: int, classes: int) -> list[float]:
    """The input of one arm, number by number."""
    arm = []
    for block in range(classes):
        for row in range(0, 8, 2):
            for column in range(0, 8, 2):
                pixels = [image[8 * (row + down) + column + right] for down in (0, 1) for right in (0, 1)]
                arm.append(sum(pixels) / 4 / 16 if block == kind else 0.0)
        arm.append(float(block == kind))
    return arm


def test_digits_earn_in_the_block_of_their_class() -> None:
    random = np.random.default_rng(20)
    images, labels = random.integers(0, 17, (7, 64)).astype(np.float64), np.array([0, 1, 2, 1, 0, 2, 1])
    world = DigitBlocks(images, labels, seed=21, users=4)
    assert (world.users, world.dimension) == (4, 51)
    seen: set[int] = set()
    for _ in range(60):
        asked = world.next_round()
        blocks = [int(np.flatnonzero(row)[-1]) // 17 for row in asked.arms]  # the constant is the last of its block
        assert sorted(blocks) == [0, 1, 2]
        [image] = [
            number
            for number in range(7)
            if all(np.allclose(asked.arms[arm], slow_digit_arm(images[number], blocks[arm], 3)) for arm in range(3))
        ]
        assert asked.rewards.tolist() == asked.chances.tolist() == [float(block == labels[image]) for block in blocks]
        seen.add(image)
    assert seen == set(range(7))


def test_categories_are_one_hot_with_the_click_rates_of_the_user_s_kind() -> None:
    world = Categories(12, seed=22, users=9, kinds=4)
    assert (world.users, world.dimension, world.rates.shape) == (9, 12, (4, 12))
    rounds = [world.next_round() for _ in range(4_000)]
    shows, clicks, first = np.zeros((4, 12)), np.zeros((4, 12)), np.zeros(12)
    for asked in rounds:
        shown = [row.tolist().index(1.0) for row in asked.arms]
        assert asked.arms.sum() == len(set(shown)) == 10
        assert asked.chances.tolist() == [world.rates[asked.user % 4, category] for category in shown]
        for category, reward in zip(shown, asked.rewards, strict=True):
            shows[asked.user % 4, category] += 1
            clicks[asked.user % 4, category] += reward
        first[shown[0]] += 1
    spread = np.sqrt(world.rates * (1 - world.rates) / shows)
    assert (np.abs(clicks / shows - world.rates) < 4.5 * spread + 1e-3).all()
    assert np.abs(first - 4_000 / 12).max() < 5 * np.sqrt(4_000 / 12)
    rates = Categories(4_000, seed=23).rates
    assert rates.shape == (5, 4_000)
    assert (rates.mean(), rates.var()) == pytest.approx((1 / 5, 1 * 4 / (5**2 * 6)), rel=0.05)


def test_purchases_are_rare_and_their_amounts_heavy_tailed() -> None:
    random = np.random.default_rng(24)
    ratings = random.integers(0, 6, (20, 90)).astype(np.float64)
    world, films = Purchases(ratings, seed=25), RatedItems(ratings, seed=25)
    assert (world.users, world.dimension) == (films.users, 12)
    # The expected amount, by a sum over quantiles of the clipped log-normal distribution.
    quantiles = [NormalDist().inv_cdf((place + 0.5) / 100_000) for place in range(100_000)]
    cap = math.exp(1.5 * 2.3263479)
    slow = sum(min(math.exp(1.5 * each), cap) / cap for each in quantiles) / 100_000
    assert world.expected_amount == pytest.approx(slow, rel=1e-3)
    chances = {1: 0.02, 2: 0.05, 3: 0.1, 5: 0.5}
    factors = {tuple(row): item for item, row in enumerate(films._items)}
    rounds = [world.next_round() for _ in range(3_000)]
    for asked in rounds:
        stars = [ratings[films.rows[asked.user], factors[tuple(row)]] for row in asked.arms]
        assert sorted(star == 5 for star in stars) == [False] * 9 + [True]
        assert asked.chances == pytest.approx([chances[int(star)] * world.expected_amount for star in stars])
        assert asked.regret(stars.index(5)) == 0
    rewards = np.array([asked.rewards for asked in rounds])
    expected = np.array([asked.chances for asked in rounds])
    assert ((rewards >= 0) & (rewards <= 1)).all()
    assert rewards.mean() == pytest.approx(expected.mean(), rel=0.1)
    assert (rewards > 0).mean() == pytest.approx(expected.mean() / world.expected_amount, rel=0.1)
    paid = rewards[rewards > 0]
    assert np.median(paid) == pytest.approx(1 / cap, rel=0.15)
    assert (paid == 1).mean() == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize(
    ("name", "users", "dimension", "arms"),
    [("digits", 20, 170, 10), ("categories-50", 50, 50, 10), ("categories-200", 50, 200, 10), ("revenue", 300, 12, 10)],
)
def test_worlds_have_the_documented_sizes_and_shuffled_arms(name: str, users: int, dimension: int, arms: int) -> None:
    world = world_of(name, 26)
    assert world.dimension == dimension
    assert 0.9 * users <= world.users <= users
    rounds = [world.next_round() for _ in range(1_000)]
    assert all(asked.arms.shape == (arms, dimension) for asked in rounds)
    places = np.bincount([int(asked.chances.argmax()) for asked in rounds], minlength=arms)
    assert np.abs(places - 100).max() < 5 * np.sqrt(100 * 0.9)


@pytest.mark.parametrize(
    ("name", "users", "dimension"),
    [("movielens", 100, 20), ("yelp", 100, 20), ("service", 300, 12), ("mnist", 20, 793)],
)
def test_one_of_ten_arms_has_a_reward_at_any_position(name: str, users: int, dimension: int) -> None:
    world = world_of(name, 12)
    assert world.dimension == dimension
    assert 0.9 * users <= world.users <= users
    rounds = [world.next_round() for _ in range(1_500)]
    assert all(asked.arms.shape == (10, dimension) and asked.rewards.sum() == 1 for asked in rounds)
    assert {asked.user for asked in rounds} <= set(range(world.users))
    assert len({asked.user for asked in rounds}) > 0.9 * world.users
    places = np.bincount([int(asked.rewards.argmax()) for asked in rounds], minlength=10)
    assert np.abs(places - 150).max() < 5 * np.sqrt(1_500 * 0.1 * 0.9)


def test_movielens_features_are_unit_vectors_and_a_constant_over_root_two() -> None:
    world = world_of("movielens", 13)
    sizes = undensity(np.concatenate([world.next_round().arms for _ in range(20)]))
    for half in (sizes[:, :10], sizes[:, 10:]):
        assert np.allclose(half[:, 9], np.sqrt(0.5))
        assert np.allclose(np.square(half[:, :9]).sum(1), 0.5)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_same_seed_is_the_same_world_by_name_and_another_seed_another(name: str) -> None:
    def first(seed: int) -> list[EnvironmentRound]:
        world = world_of(name, seed)
        return [world.next_round() for _ in range(5)]

    one, two, other = first(14), first(14), first(15)
    for mine, same in zip(one, two, strict=True):
        assert mine.user == same.user
        assert np.array_equal(mine.arms, same.arms)
        assert np.array_equal(mine.rewards, same.rewards)
    assert not all(np.array_equal(mine.arms, strange.arms) for mine, strange in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OF_DATA)
def test_missing_data_says_which_file_and_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"is not in .*; name the folder that has it with --data"):
        build_environment(name, seed=1, data=tmp_path)


def test_the_default_data_folder_is_beside_the_checkout(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    module = root / "bench" / "worlds" / "data.py"
    module.parent.mkdir(parents=True)
    module.touch()
    (root / "src" / "metaban").mkdir(parents=True)
    link = root / "src" / "metaban" / "bench"
    link.symlink_to(root / "bench")
    assert folder_beside_checkout(module) is None
    (root / "pyproject.toml").touch()
    assert folder_beside_checkout(module) is None
    folder = tmp_path / "shared" / "data"
    folder.mkdir(parents=True)
    assert folder_beside_checkout(module) == folder
    assert folder_beside_checkout(link / "worlds" / "data.py") == folder


def test_without_a_data_folder_the_message_names_the_file_and_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("metaban.bench.worlds.data.folder_beside_checkout", lambda module: None)
    with pytest.raises(DataMissing, match=r"no data folder; name the folder that has yelp\.npz with --data"):
        build_environment("yelp", seed=1)


def test_only_the_synthetic_world_has_switches() -> None:
    with pytest.raises(ValueError, match="has no switches"):
        build_environment("service", seed=1, users=3)
    with pytest.raises(ValueError, match="synthetic, movielens"):
        build_environment("nowhere", seed=1)
