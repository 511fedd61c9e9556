"""Interactive collaborative filtering: Zhao, Zhang and Wang, Interactive collaborative filtering, CIKM 2013.

Probabilistic matrix factorisation with Thompson sampling: the reward of item i for user u is m + b_i + p_uᵀq_i + ε with
ε ~ N(0, σ²), p_u ~ N(0, I) and (q_i, b_i) ~ N(0, τ²I). Given the other side, each user's and each item's parameters are
a Bayesian linear regression. Their posteriors are kept up to date event by event, and computed again from all events by
alternation every so many slates. A slate is ranked by one draw of the user and of each item. Metadata and context are
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from metaban.bench.shop.player import ShopPlayer, ShownItem, best_items
from metaban.bench.worlds.shop import Matrix, Places, ShopCatalogue, ShopRequest

#: Events between two refits, as a share of the events so far, and their minimum.
REFIT_SHARE: Final = 0.05
REFIT_EVENTS: Final = 100

#: Alternations of a refit; it starts from the last one's result.
ALTERNATIONS: Final = 3

#: Deviation of the random factors at the start, as a share of the prior's: with zeros, nothing would tell them apart.
START_SHARE: Final = 0.3

#: The mean reward assumed before the first events, and how many events it counts as.
ASSUMED_MEAN: Final = 0.15
ASSUMED_EVENTS: Final = 20.0


@final
class Regressions:
    """Bayesian linear regressions with the prior N(0, v·I) and noise σ², one a row."""

    def __init__(self, rows: int, size: int, variance: float, noise: float) -> None:
        self._precision = np.eye(size) / variance  # [r, r]
        self._noise = noise
        self._grams = np.zeros((rows, size, size))  # Σxxᵀ/σ² [n, r, r]
        self._targets = np.zeros((rows, size))  # Σyx/σ² [n, r]
        self.means = np.zeros((rows, size))  # [n, r]
        #: Factors F with FFᵀ the covariance of a row, [n, r, r].
        self.factors = np.tile(np.sqrt(variance) * np.eye(size), (rows, 1, 1))

    def fit(self, rows: Places, inputs: Matrix, targets: Matrix) -> None:
        """The posteriors given samples, by row: rows [s], inputs [s, r] and targets [s]."""
        self._grams[:] = 0.0
        self._targets[:] = 0.0
        self.add(rows, inputs, targets)
        self._solve(np.arange(len(self.means)))

    def add(self, rows: Places, inputs: Matrix, targets: Matrix) -> None:
        """Add samples to the posteriors of their rows."""
        np.add.at(self._grams, rows, inputs[:, :, None] * inputs[:, None, :] / self._noise)
        np.add.at(self._targets, rows, targets[:, None] * inputs / self._noise)
        self._solve(np.unique(rows))

    def _solve(self, rows: Places) -> None:
        lower = np.linalg.cholesky(self._precision + self._grams[rows])  # [n, r, r]; LLᵀ is the precision
        self.factors[rows] = np.linalg.inv(lower).transpose(0, 2, 1)
        self.means[rows] = np.einsum(
            "nij,nkj,nk->ni", self.factors[rows], self.factors[rows], self._targets[rows], optimize=True
        )

    def draw(self, rows: Places, random: np.random.Generator, scale: float) -> Matrix:
        """One posterior draw of each row [n, r], with deviations times `scale`."""
        noise = random.standard_normal((len(rows), self.means.shape[1], 1))
        drawn: Matrix = self.means[rows] + scale * (self.factors[rows] @ noise)[..., 0]
        return drawn


@final
class InteractiveFactors(ShopPlayer):
    """PMF with Thompson sampling.

    With `decay` below 1, the reward at position p is modelled as decay^p times that of the first place.
    """

    def __init__(
        self,
        catalogue: ShopCatalogue,
        *,
        users: int,
        seed: int,
        rank: int,
        item_deviation: float,
        noise_deviation: float,
        draw_scale: float,
        decay: float,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._identities = catalogue.identities
        self._rank = rank
        self._draw_scale = draw_scale
        self._decay = decay
        items = int(self._identities.max()) + 1
        noise = noise_deviation**2
        self._users = Regressions(users, rank, 1.0, noise)
        self._items = Regressions(items, rank + 1, item_deviation**2, noise)
        self._items.means[:, :rank] = START_SHARE * item_deviation * self._random.standard_normal((items, rank))
        self._events: list[tuple[int, int, float, float]] = []  # user, identity, probability of a look, reward
        self._fitted_at = 0
        self._mean = ASSUMED_MEAN

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        items = self._items.draw(self._identities[eligible], self._random, self._draw_scale)  # [n, r + 1]
        [user] = self._users.draw(np.array([request.user]), self._random, self._draw_scale)  # [r]
        return best_items(items[:, : self._rank] @ user + items[:, self._rank], eligible, size, self._random)

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            looked, identity = self._decay**shown.position, int(self._identities[shown.item])
            self._events.append((shown.request.user, identity, looked, shown.reward))
        if len(self._events) >= self._fitted_at + max(REFIT_EVENTS, REFIT_SHARE * self._fitted_at):
            self._refit()
        else:
            self._update(len(feedback))

    def _columns(self, latest: int) -> tuple[Places, Places, Matrix, Matrix]:
        """User, identity, probability of a look and reward of the latest events, [s] each."""
        users, items, looked, rewards = zip(*self._events[-latest:], strict=True)
        return np.array(users), np.array(items), np.array(looked), np.array(rewards)

    def _update(self, latest: int) -> None:
        """Add the latest events to the posteriors of both sides."""
        users, items, looked, rewards = self._columns(latest)
        before = self._items.means[items]  # [s, r + 1]
        self._items.add(items, *self._of_items(self._users.means[users], looked, rewards))
        self._users.add(users, *self._of_users(before, looked, rewards))

    def _refit(self) -> None:
        """Both sides in turns, from all events."""
        users, items, looked, rewards = self._columns(len(self._events))
        self._fitted_at = len(self._events)
        self._mean = (rewards.sum() + ASSUMED_EVENTS * ASSUMED_MEAN) / (looked.sum() + ASSUMED_EVENTS)
        for _ in range(ALTERNATIONS):
            self._users.fit(users, *self._of_users(self._items.means[items], looked, rewards))
            self._items.fit(items, *self._of_items(self._users.means[users], looked, rewards))

    def _of_users(self, items: Matrix, looked: Matrix, rewards: Matrix) -> tuple[Matrix, Matrix]:
        """Inputs [s, r] and targets [s] of the users' regressions, given the items' parameters [s, r + 1]."""
        inputs = looked[:, None] * items[:, : self._rank]
        return inputs, rewards - looked * (self._mean + items[:, self._rank])

    def _of_items(self, users: Matrix, looked: Matrix, rewards: Matrix) -> tuple[Matrix, Matrix]:
        """Inputs [s, r + 1] and targets [s] of the items' regressions, given the users' parameters [s, r]."""
        inputs = looked[:, None] * np.concatenate([users, np.ones((len(users), 1))], axis=1)
        return inputs, rewards - looked * self._mean
