"""Environments: which user asks, which arms there are, and the reward of each arm.

All rewards of a round are drawn before a method chooses, so methods with the same seed see the same users, arms and
rewards, whatever they chose before. Arms are shuffled in every round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from metaban.bench.worlds.data import data_folder, digit_images, movielens_ratings, yelp_entries

Matrix = NDArray[np.float64]

Places = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class EnvironmentRound:
    """One round: a user, arm features [k, d], the chance of a reward of each arm [k], and the rewards [k].

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
        self.users = len(fit)
        self.dimension = SERVICE_FACTORS

    def next_round(self) -> EnvironmentRound:
        return self.round_of(int(self._random.integers(self.users)), self._random)

    def round_of(self, user: int, random: np.random.Generator) -> EnvironmentRound:
        """A round of one user."""
        plain = random.choice(self._plain[user], size=IDLE_ARMS, replace=False)
        shown = np.append(plain, random.choice(self._loved[user]))
        order = random.permutation(len(shown))
        rewards = (order == IDLE_ARMS).astype(np.float64)
        return EnvironmentRound(user, self._items[shown[order]], rewards, rewards)


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


#: The synthetic environment of the benchmarks without switches.
SYNTHETIC: Final[dict[str, Any]] = {"users": 200, "groups": 4, "arms": 10, "dimension": 5, "tastes": 2}
ENVIRONMENTS: Final = ("synthetic", "movielens", "yelp", "service", "mnist")


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
    raise ValueError(f"there is no environment {name!r}; choose one of {', '.join(ENVIRONMENTS)}")
