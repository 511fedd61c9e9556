"""A shop: MovieLens users with hidden tastes, items with ids and metadata, slates of five, and clicks.

Tastes are a factorisation of real ratings, which players never see. A player sees who asks, the context, the metadata
of the items and, some slates later, which shown items were clicked. All random numbers belong to a seed and a slate,
and do not depend on what was shown: all players meet the same users, contexts, delays and uniform numbers. An item is
clicked if its uniform number in the slate is below its click probability, so players with the same seed are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray

from metaban.bench.worlds.data import data_folder, movielens_films, movielens_ratings

Matrix = NDArray[np.float64]

Places = NDArray[np.int64]

Device: TypeAlias = Literal["phone", "desktop", "tv"]

DEVICES: Final[tuple[Device, ...]] = get_args(Device)
HOURS: Final = 24

#: Factorisation of the ratings: factors, ridge penalty, alternations, and the seed of its start.
TASTE_RANK: Final = 8
TASTE_RIDGE: Final = 4.0
TASTE_ALTERNATIONS: Final = 20
TASTE_SEED: Final = 0

#: Log-odds of a click at the first place: of an item of average taste, and per standard deviation of taste.
BASE_LOG_ODDS: Final = -2.2
TASTE_LOG_ODDS: Final = 1.6

#: Log-odds added for dramas on a television, comedies on a phone, and horror late in the evening.
TV_DRAMA: Final = 0.7
PHONE_COMEDY: Final = 0.7
EVENING_HORROR: Final = 1.0
EVENING_HOUR: Final = 20

#: Probability that a place of the slate is looked at, first place first.
EXAMINATION: Final = np.array([1.0, 0.85, 0.72, 0.61, 0.52])

#: Smallest and largest delay of feedback in slates; both occur.
DELAY_SLATES: Final = (1, 39)

#: The latest clicked items of a user that are not shown to them.
CLICKED_HIDDEN: Final = 10

#: Lowest and highest price.
PRICES: Final = (4.99, 49.99)

#: With arrivals: share of the items at the start, slates between two arrivals, and share of the items that arrive then.
STARTING_SHARE: Final = 0.5
ARRIVAL_SLATES: Final = 50
ARRIVAL_SHARE: Final = 0.01


@final
@dataclass(frozen=True, slots=True)
class ShopVariant:
    """Sizes and switches of the world."""

    items: int = 200
    users: int = 150
    #: The catalogue starts with half of the items; every 50 slates 1 % of them arrive.
    arrivals: bool = False
    #: Whether players see the metadata of items, and their ids.
    features: bool = True
    ids: bool = True
    #: Whether tastes are linear in tags and year, with weights of their own for each user.
    explained: bool = False
    #: Whether feedback says only what was clicked.
    clicks_only: bool = False


@final
@dataclass(frozen=True, slots=True)
class ShopItem:
    """Metadata of an item; the category is the first of its tags."""

    category: str
    tags: tuple[str, ...]
    year: int
    price: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShopCatalogue:
    """All that players know of the items.

    `identities` [N] tells items apart: the number of each item or, without ids, the number of its category. Metadata is
    None where it is hidden.
    """

    identities: Places
    metadata: tuple[ShopItem, ...] | None


@final
@dataclass(frozen=True, slots=True)
class ShopRequest:
    """A user asks for a slate; slates are numbered from 0."""

    number: int
    user: int
    device: Device
    hour: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A request, and what players do not see: the delay of its feedback, and a uniform number for each item [N]."""

    request: ShopRequest
    delay: int
    draws: Matrix


@final
class Shop:
    """A seeded sequence of visits."""

    def __init__(self, variant: ShopVariant, *, seed: int, data: Path | None = None) -> None:
        self.variant = variant
        self._seed = seed
        folder = data_folder(data)
        items, self.tastes = _items_and_tastes(folder, variant.items, variant.users)  # [N], [U, N]
        self.users, self.size = len(self.tastes), len(items)
        random = np.random.default_rng([seed, 0])
        films = movielens_films(folder)
        prices: Matrix = random.uniform(PRICES[0], PRICES[1], (self.size,))
        self._metadata = tuple(
            ShopItem(films[item][1][0], films[item][1], films[item][0], round(float(price), 2))
            for item, price in zip(items.tolist(), prices, strict=True)
        )
        if variant.explained:
            self.tastes = explained_tastes(self.tastes, self._metadata)
        self._drama, self._comedy, self._horror = (
            np.array([tag in item.tags for item in self._metadata]) for tag in ("Drama", "Comedy", "Horror")
        )  # [N] each
        #: Items in the order of their arrival.
        self._order: Places = random.permutation(self.size)
        _, categories = np.unique([item.category for item in self._metadata], return_inverse=True)
        self.catalogue = ShopCatalogue(
            np.arange(self.size) if variant.ids else categories.astype(np.int64),
            self._metadata if variant.features else None,
        )

    def visit(self, number: int) -> Visit:
        """The visit of a slate, whatever was shown before."""
        # Zeros at the end do not change a seed: [seed, 0] is for the items, so slates start at 1.
        random = np.random.default_rng([self._seed, number + 1])
        user, device, hour = (int(random.integers(count)) for count in (self.users, len(DEVICES), HOURS))
        delay = int(random.integers(DELAY_SLATES[0], DELAY_SLATES[1] + 1))
        return Visit(ShopRequest(number, user, DEVICES[device], hour), delay, random.random(self.size))

    def in_catalogue(self, number: int) -> Places:
        """The items in the catalogue at a slate, in ascending order."""
        if not self.variant.arrivals:
            return np.arange(self.size)
        arrived = number // ARRIVAL_SLATES * max(1, round(ARRIVAL_SHARE * self.size))
        return np.sort(self._order[: max(len(EXAMINATION), round(STARTING_SHARE * self.size)) + arrived])

    def chances(self, request: ShopRequest) -> Matrix:
        """Click probability of each item at the first place, [N]."""
        log_odds = BASE_LOG_ODDS + TASTE_LOG_ODDS * self.tastes[request.user]  # [N]
        if request.device == "tv":
            log_odds = log_odds + TV_DRAMA * self._drama
        if request.device == "phone":
            log_odds = log_odds + PHONE_COMEDY * self._comedy
        if request.hour >= EVENING_HOUR:
            log_odds = log_odds + EVENING_HORROR * self._horror
        chances: Matrix = 1 / (1 + np.exp(-log_odds))
        return chances

    def clicks(self, visit: Visit, shown: Places) -> NDArray[np.bool_]:
        """Which of the shown items are clicked, [k]; the first is at the first place."""
        clicked: NDArray[np.bool_] = visit.draws[shown] < EXAMINATION[: len(shown)] * self.chances(visit.request)[shown]
        return clicked


@lru_cache(maxsize=4)
def _items_and_tastes(folder: Path | None, items: int, users: int) -> tuple[Places, Matrix]:
    """The most rated items [N], as columns of the ratings, and tastes of the users who rated most of them [U, N]."""
    ratings = movielens_ratings(folder)
    rated = ratings > 0
    popular = np.argsort(-rated.sum(0), kind="stable")[:items]
    active = np.argsort(-rated[:, popular].sum(1), kind="stable")[:users]
    return popular, tastes_of(ratings[np.ix_(active, popular)])


def tastes_of(ratings: Matrix) -> Matrix:
    """z [U, N]: ratings centred by user and factorised by alternating ridge regressions, standardised by user.

    Alternating least squares over the given ratings only: Zhou, Wilkinson, Schreiber and Pan, Large-scale parallel
    collaborative filtering for the Netflix Prize, AAIM 2008, with the same penalty for all rows. 0 means no rating.
    """
    rated = (ratings > 0).astype(np.float64)
    centred = rated * (ratings - ratings.sum(1, keepdims=True) / np.maximum(rated.sum(1, keepdims=True), 1))
    of_items = np.random.default_rng(TASTE_SEED).standard_normal((ratings.shape[1], TASTE_RANK))  # [N, r]
    for _ in range(TASTE_ALTERNATIONS):
        of_users = _ridge_rows(centred, rated, of_items)  # [U, r]
        of_items = _ridge_rows(centred.T, rated.T, of_users)
    return _standardised(of_users @ of_items.T)


def _ridge_rows(targets: Matrix, given: Matrix, inputs: Matrix) -> Matrix:
    """For each row of targets [n, m] the ridge regression of those given on the inputs [m, r]: weights [n, r]."""
    rank = inputs.shape[1]
    outer = (inputs[:, :, None] * inputs[:, None, :]).reshape(len(inputs), -1)  # [m, r²]
    grams = (given @ outer).reshape(-1, rank, rank) + TASTE_RIDGE * np.eye(rank)  # [n, r, r]
    weights = np.linalg.solve(grams, (targets @ inputs)[..., None])[..., 0]
    return weights.astype(np.float64, copy=False)


def explained_tastes(tastes: Matrix, metadata: tuple[ShopItem, ...]) -> Matrix:
    """The part of tastes [U, N] that is linear in tags and year, by least squares for each user, standardised again."""
    tags = sorted({tag for item in metadata for tag in item.tags})
    years = np.array([item.year for item in metadata], dtype=np.float64)
    columns = [[float(tag in item.tags) for tag in tags] for item in metadata]
    inputs = np.column_stack([columns, (years - years.mean()) / max(float(years.std()), 1.0), np.ones(len(metadata))])
    weights = np.linalg.lstsq(inputs, tastes.T, rcond=None)[0]  # [tags + 2, U]
    return _standardised((inputs @ weights).T)


def _standardised(rows: Matrix) -> Matrix:
    """Rows of mean 0 and standard deviation 1; a constant row becomes zeros."""
    centred = rows - rows.mean(1, keepdims=True)
    spread = centred.std(1, keepdims=True)
    standardised: Matrix = centred / np.where(spread > 0, spread, 1.0)
    return standardised
