"""Environments: which user asks, which arms there are, and the reward of each arm.

All rewards of a round are drawn before a method chooses, so methods with the same seed see the same users, arms and
rewards, whatever they chose before. Arms are shuffled in every round.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.worlds.data import data_folder, digit_images, movielens_ratings, yelp_entries

Matrix = NDArray[np.float64]

Places = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class EnvironmentRound:
    """One round: a user, arm features [k, d], the expected reward of each arm [k], and the rewards [k].

    Where rewards are 0 or 1, the expected reward is the chance of a 1.

    Methods see the user, the arms and the context; chances, and rewards of arms that were not chosen, are hidden.
    """

    user: int
    arms: Matrix
    chances: Matrix
    rewards: Matrix
    context: Matrix | None = None

    @property
    def user_id(self) -> str:
        """The user's id in the service."""
        return f"user-{self.user}"

    def regret(self, arm: int) -> float:
        """Expected reward lost by an arm against the best one."""
        return float(self.chances.max() - self.chances[arm])


class Environment(ABC):
    """A seeded stream of rounds."""

    #: Number of users, of numbers that describe an arm, and of numbers in the context of a request.
    users: int
    dimension: int
    context_dimension: int = 0

    @abstractmethod
    def next_round(self) -> EnvironmentRound:
        """A random user and new arms."""

    def reward(self, asked: EnvironmentRound, arm: int) -> float:
        """Reward of an arm in a round."""
        return float(asked.rewards[arm])


@final
class SyntheticGroups(Environment):
    """Users in hidden groups with non-linear tastes, bumps on the unit sphere; no feature tells the groups apart.

    An arm x, uniform on the sphere, has a reward of 1 with chance low + (high − low)·max_j exp(−‖x − c_gj‖²/spread),
    where c_g1 … c_gJ are the tastes of the user's group. With one taste a group, tastes of two groups are opposite, up
    to noise. Switches: `switch_at` draws all tastes again at that round; `reward_rate` scales the chances so that a
    random arm has this mean reward; `interaction` adds a context c of unit length to every round, and an arm is liked
    for being near R_g(c), a rotation of c that belongs to the group.
    """

    def __init__(
        self,
        *,
        seed: int,
        users: int = 12,
        groups: int = 2,
        arms: int = 6,
        dimension: int = 4,
        tastes: int = 1,
        low: float = 0.02,
        high: float = 0.98,
        spread: float = 0.8,
        switch_at: int | None = None,
        reward_rate: float | None = None,
        interaction: bool = False,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.users = users
        self.dimension = dimension
        self.context_dimension = dimension if interaction else 0
        self._arms = arms
        self._groups, self._per_group = groups, tastes
        self._low, self._high, self._spread = low, high, spread
        self._switch_at = switch_at
        self._rounds = 0
        self._tastes = self._draw_tastes()  # [groups, tastes, d]
        self._rotations = np.linalg.qr(self._random.standard_normal((groups, dimension, dimension)))[0]
        self._scale = 1.0
        if reward_rate is not None:
            sample = _on_sphere(np.random.default_rng(seed).standard_normal((20_000, dimension)))
            self._scale = reward_rate / np.mean([self._bumps(sample, taste).mean() for taste in self._tastes])

    def _draw_tastes(self) -> Matrix:
        tastes = self._random.standard_normal((self._groups, self._per_group, self.dimension))
        if self._per_group == 1:
            tastes[1::2] = -tastes[0 : 2 * (self._groups // 2) : 2] + 0.3 * tastes[1::2]
        return _on_sphere(tastes)

    def _bumps(self, arms: Matrix, tastes: Matrix) -> Matrix:
        squared = np.square(arms[:, None] - tastes).sum(-1).min(-1)  # [k], distance to the nearest taste
        chances: Matrix = self._low + (self._high - self._low) * np.exp(-squared / self._spread)
        return chances

    def group_of(self, user_id: str) -> int:
        """The hidden group of a user."""
        return int(user_id.removeprefix("user-")) % self._groups

    def next_round(self) -> EnvironmentRound:
        if self._rounds == self._switch_at:
            self._tastes = self._draw_tastes()
        self._rounds += 1
        user = int(self._random.integers(self.users))
        arms = _on_sphere(self._random.standard_normal((self._arms, self.dimension)))
        group = user % self._groups
        context, tastes = None, self._tastes[group]
        if self.context_dimension:
            context = _on_sphere(self._random.standard_normal(self.dimension))
            tastes = (self._rotations[group] @ context)[None]
        chances = np.clip(self._scale * self._bumps(arms, tastes), 0, 1)
        rewards = (self._random.random(self._arms) < chances).astype(np.float64)
        return EnvironmentRound(user, arms, chances, rewards, context)


def _on_sphere(rows: Matrix) -> Matrix:
    unit: Matrix = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return unit


#: Clusters of raters; each is one bandit user.
CLUSTERS: Final = 100

#: Arms without reward in a round; one more arm has one.
IDLE_ARMS: Final = 9

#: Scale of the normal density that turns features into arm features.
DENSITY_SCALE: Final = 0.5


@final
class ClusteredRatings(Environment):
    """MovieLens and Yelp as in the Meta-Ban paper: find the one badly rated item among ten.

    Raters are clustered by k-means on their features; each cluster is one user. A round draws nine entries labelled +1
    and one labelled −1 from a cluster, with replacement. An arm is the normal density of the item's and the rater's
    features; the −1 entry has reward 1.
    """

    def __init__(self, entries: Places, user_features: Matrix, item_features: Matrix, *, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._users = _density(user_features)
        self._items = _density(item_features)
        cluster = _clusters(user_features)[entries[:, 0]]  # [entries]
        liked, disliked = entries[:, 2] > 0, entries[:, 2] < 0
        both = [
            number for number in range(CLUSTERS) if liked[cluster == number].any() and disliked[cluster == number].any()
        ]
        self._liked = [entries[(cluster == number) & liked] for number in both]
        self._disliked = [entries[(cluster == number) & disliked] for number in both]
        self.users = len(both)
        self.dimension = user_features.shape[1] + item_features.shape[1]

    def next_round(self) -> EnvironmentRound:
        user = int(self._random.integers(self.users))
        liked, disliked = self._liked[user], self._disliked[user]
        shown = np.concatenate(
            [
                liked[self._random.integers(len(liked), size=IDLE_ARMS)],
                disliked[self._random.integers(len(disliked), size=1)],
            ]
        )
        shown = shown[self._random.permutation(len(shown))]
        arms = np.concatenate([self._items[shown[:, 1]], self._users[shown[:, 0]]], axis=1)
        rewards = (shown[:, 2] < 0).astype(np.float64)
        return EnvironmentRound(user, arms, rewards, rewards)


def _density(features: Matrix) -> Matrix:
    density: Matrix = np.exp(-0.5 * np.square(features / DENSITY_SCALE)) / (DENSITY_SCALE * np.sqrt(2 * np.pi))
    return density


def _clusters(features: Matrix) -> Places:
    from sklearn.cluster import KMeans  # slow to import

    return np.asarray(KMeans(CLUSTERS, random_state=0, n_init=10).fit_predict(features), dtype=np.int64)


#: Singular vectors of the ±1 matrix, and of the ratings for `service`.
RATING_FACTORS: Final = 9
SERVICE_FACTORS: Final = 12
SERVICE_USERS: Final = 300


@lru_cache(maxsize=1)
def _movielens_features(folder: Path | None) -> tuple[Places, Matrix, Matrix]:
    """Entries (user, item, ±1), user features and item features of MovieLens; only ratings above 4 and below 2."""
    ratings = movielens_ratings(folder)
    signs = np.where(ratings > 4, 1.0, np.where((ratings > 0) & (ratings < 2), -1.0, 0.0))
    left, _, right = np.linalg.svd(signs, full_matrices=False)
    rows, columns = np.nonzero(signs)
    entries = np.stack([rows, columns, signs[rows, columns].astype(np.int64)], axis=1)
    return entries, _rating_features(left[:, :RATING_FACTORS]), _rating_features(right[:RATING_FACTORS].T)


def _rating_features(vectors: Matrix) -> Matrix:
    """Rows of unit length with a constant 1 appended, divided by √2."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    features: Matrix = np.concatenate([unit, np.ones((len(unit), 1))], axis=1) / np.sqrt(2)
    return features


@final
class RatedItems(Environment):
    """The most active MovieLens users: one film they rated 5 among nine they rated at most 3.

    Arms are described by 12 factors of the item only; the context does not tell who asks.
    """

    def __init__(self, ratings: Matrix, *, seed: int, most: int = SERVICE_USERS) -> None:
        self._random = np.random.default_rng(seed)
        rated = ratings > 0
        centred = np.where(rated, ratings - ratings.sum(1, keepdims=True) / rated.sum(1, keepdims=True), 0.0)
        _, values, right = np.linalg.svd(centred, full_matrices=False)
        factors = right[:SERVICE_FACTORS].T * np.sqrt(values[:SERVICE_FACTORS])
        self._items: Matrix = factors / factors.std(axis=0)
        active = np.argsort(-rated.sum(1), kind="stable")[:most]
        loved = [np.flatnonzero(ratings[user] == 5) for user in active]
        plain = [np.flatnonzero(rated[user] & (ratings[user] <= 3)) for user in active]
        fit = [place for place in range(len(active)) if len(loved[place]) > 2 and len(plain[place]) > IDLE_ARMS]
        self._loved, self._plain = [loved[place] for place in fit], [plain[place] for place in fit]
        #: Row of each user in the matrix of ratings.
        self.rows: Places = active[fit]
        self._ratings = ratings
        self.users = len(fit)
        self.dimension = SERVICE_FACTORS

    def next_round(self) -> EnvironmentRound:
        return self.round_of(int(self._random.integers(self.users)), self._random)

    def round_of(self, user: int, random: np.random.Generator) -> EnvironmentRound:
        """A round of one user."""
        arms, ratings = self.rated_arms(user, random)
        rewards = (ratings == 5).astype(np.float64)
        return EnvironmentRound(user, arms, rewards, rewards)

    def rated_arms(self, user: int, random: np.random.Generator) -> tuple[Matrix, Matrix]:
        """The arms of a round of one user [10, 12], and the user's own ratings of them [10]."""
        plain = random.choice(self._plain[user], size=IDLE_ARMS, replace=False)
        shown = np.append(plain, random.choice(self._loved[user]))
        shown = shown[random.permutation(len(shown))]
        return self._items[shown], self._ratings[self.rows[user], shown]


#: Probability that a user buys an item that they rated so.
PURCHASE_CHANCES: Final[dict[int, float]] = {1: 0.02, 2: 0.05, 3: 0.1, 5: 0.5}

#: Deviation of the logarithm of an amount, and the quantile of the amounts at which they are clipped.
AMOUNT_SIGMA: Final = 1.5
AMOUNT_QUANTILE: Final = 0.99


@final
class Purchases(Environment):
    """The rounds of `RatedItems` with rare and heavy-tailed rewards: what a user pays, instead of whether they like it.

    An item is bought with the probability that belongs to the user's rating of it. The amount is log-normal with
    median 1 and σ = 1.5, clipped at its 99 % quantile c = exp(1.5 · 2.326) ≈ 32.8, and divided by c. The expected
    amount is (exp(σ²/2)·Φ(ln(c)/σ − σ) + 0.01·c) / c ≈ 0.085, so that of a loved item is 0.042.
    """

    def __init__(self, ratings: Matrix, *, seed: int, most: int = SERVICE_USERS) -> None:
        self._random = np.random.default_rng(seed)
        self._films = RatedItems(ratings, seed=seed, most=most)
        self._chances = np.array([PURCHASE_CHANCES.get(rating, 0.0) for rating in range(6)])  # [ratings]
        normal, above = NormalDist(), 1 - AMOUNT_QUANTILE
        quantile = normal.inv_cdf(AMOUNT_QUANTILE)
        self._cap = math.exp(AMOUNT_SIGMA * quantile)
        kept = math.exp(AMOUNT_SIGMA**2 / 2) * normal.cdf(quantile - AMOUNT_SIGMA)
        #: Expected amount of a purchase, clipped and scaled.
        self.expected_amount = kept / self._cap + above
        self.users, self.dimension = self._films.users, self._films.dimension

    def next_round(self) -> EnvironmentRound:
        user = int(self._random.integers(self.users))
        arms, ratings = self._films.rated_arms(user, self._random)
        chances = self._chances[ratings.astype(np.int64)]
        bought = self._random.random(len(arms)) < chances
        amounts = np.minimum(self._random.lognormal(0.0, AMOUNT_SIGMA, len(arms)), self._cap) / self._cap
        return EnvironmentRound(user, arms, chances * self.expected_amount, bought * amounts)


@final
class ShiftedImages(Environment):
    """MNIST and notMNIST: an image gives ten arms, the image shifted by 0 … 9 places; the shift equal to its class has
    reward 1.

    The ten classes of both sets are the 20 users; the sets are two groups.
    """

    def __init__(self, sets: list[tuple[NDArray[np.float32], Places]], *, seed: int, classes: int = 10) -> None:
        self._random = np.random.default_rng(seed)
        self._classes = classes
        self._images = [images[labels == number] for images, labels in sets for number in range(classes)]
        self.users = len(self._images)
        self.dimension = sets[0][0].shape[1] + classes - 1

    def next_round(self) -> EnvironmentRound:
        user = int(self._random.integers(self.users))
        images = self._images[user]
        image = images[int(self._random.integers(len(images)))]
        order = self._random.permutation(self._classes)
        arms = np.zeros((self._classes, self.dimension))
        for place, moved in enumerate(order):
            arms[place, moved : moved + len(image)] = image
        rewards = (order == user % self._classes).astype(np.float64)
        return EnvironmentRound(user, arms, rewards, rewards)


#: Users of `digits`, side of an image and of a patch that becomes one number, and the largest value of a pixel.
DIGIT_USERS: Final = 20
DIGIT_SIDE: Final = 8
DIGIT_PATCH: Final = 2
DIGIT_VALUE_MAX: Final = 16.0


@final
class DigitBlocks(Environment):
    """Digits as a bandit with one block of inputs a class: the arm of the image's class has reward 1.

    An image of 8 × 8 pixels becomes 16 numbers in [0, 1], the means of its patches of 2 × 2, and a constant 1. The arm
    of class c has these 17 numbers in the block of c, and zeros in the other blocks: 170 inputs for ten classes. All
    users share the task, so what one user teaches holds for the others.
    """

    def __init__(self, images: Matrix, labels: Places, *, seed: int, users: int = DIGIT_USERS) -> None:
        """Images [n, 64] with values from 0 to 16, and their classes [n], from 0 on."""
        self._random = np.random.default_rng(seed)
        half = DIGIT_SIDE // DIGIT_PATCH
        patches = images.reshape(len(images), half, DIGIT_PATCH, half, DIGIT_PATCH)
        means = patches.mean((2, 4)).reshape(len(images), -1) / DIGIT_VALUE_MAX  # [n, 16]
        self._inputs: Matrix = np.concatenate([means, np.ones((len(images), 1))], axis=1)  # [n, 17]
        self._labels = labels
        self._classes = int(labels.max()) + 1
        self.users = users
        self.dimension = self._classes * self._inputs.shape[1]

    def next_round(self) -> EnvironmentRound:
        user, image = int(self._random.integers(self.users)), int(self._random.integers(len(self._inputs)))
        order = self._random.permutation(self._classes)
        arms = np.zeros((self._classes, self._classes, self._inputs.shape[1]))  # [arms, blocks, 17]
        arms[np.arange(self._classes), order] = self._inputs[image]
        rewards = (order == self._labels[image]).astype(np.float64)
        return EnvironmentRound(user, arms.reshape(self._classes, -1), rewards, rewards)


@lru_cache(maxsize=1)
def _digits() -> tuple[Matrix, Places]:
    """The 1,797 images of scikit-learn's digits, and their classes."""
    found: Any = import_module("sklearn.datasets").load_digits()  # slow to import, and untyped
    return found.data.astype(np.float64), found.target.astype(np.int64)


#: Users of `categories`, their hidden kinds, arms of a round, and parameters of the Beta distribution of click rates.
CATEGORY_USERS: Final = 50
CATEGORY_KINDS: Final = 5
CATEGORY_ARMS: Final = 10
CATEGORY_RATES: Final = (1.0, 4.0)


@final
class Categories(Environment):
    """Arms are one-hot: ten different random categories a round; the user's hidden kind has a click rate of each.

    The click rates of each kind are drawn from Beta(1, 4), mean 0.2. User u is of kind u mod 5. Rewards are 0 or 1.
    """

    def __init__(self, categories: int, *, seed: int, users: int = CATEGORY_USERS, kinds: int = CATEGORY_KINDS) -> None:
        self._random = np.random.default_rng(seed)
        #: Click rate of each kind of users in each category [kinds, categories].
        self.rates: Matrix = self._random.beta(*CATEGORY_RATES, (kinds, categories))
        self.users = users
        self.dimension = categories

    def next_round(self) -> EnvironmentRound:
        user = int(self._random.integers(self.users))
        shown = self._random.choice(self.dimension, CATEGORY_ARMS, replace=False)  # in random order
        chances = self.rates[user % len(self.rates), shown]
        rewards = (self._random.random(CATEGORY_ARMS) < chances).astype(np.float64)
        return EnvironmentRound(user, np.eye(self.dimension)[shown], chances, rewards)


#: The synthetic environment of the benchmarks without switches.
SYNTHETIC: Final[dict[str, Any]] = {"users": 200, "groups": 4, "arms": 10, "dimension": 5, "tastes": 2}
ENVIRONMENTS: Final = (
    "synthetic", "movielens", "yelp", "service", "mnist", "digits", "categories-50", "categories-200", "revenue"
)  # fmt: skip


def build_environment(name: str, *, seed: int, data: Path | None = None, **switches: Any) -> Environment:
    """The environment of a name; only `synthetic` has switches. Raises DataMissing if its data is not found."""
    folder = data_folder(data)
    if name == "synthetic":
        return SyntheticGroups(seed=seed, **{**SYNTHETIC, **switches})
    if switches:
        raise ValueError(f"{name} has no switches; only synthetic does")
    if name == "movielens":
        return ClusteredRatings(*_movielens_features(folder), seed=seed)
    if name == "yelp":
        return ClusteredRatings(*yelp_entries(folder), seed=seed)
    if name == "service":
        return RatedItems(movielens_ratings(folder), seed=seed)
    if name == "mnist":
        return ShiftedImages([digit_images(folder, "mnist"), digit_images(folder, "notmnist")], seed=seed)
    if name == "digits":
        return DigitBlocks(*_digits(), seed=seed)
    if name in ("categories-50", "categories-200"):
        return Categories(int(name.removeprefix("categories-")), seed=seed)
    if name == "revenue":
        return Purchases(movielens_ratings(folder), seed=seed)
    raise ValueError(f"there is no environment {name!r}; choose one of {', '.join(ENVIRONMENTS)}")
