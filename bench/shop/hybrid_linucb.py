"""LinUCB with hybrid linear models: Li, Chu, Langford and Schapire, A contextual-bandit approach to personalized news
recommendation, WWW 2010, Algorithm 2.

The reward is zᵀβ + xᵀθ_a: β is shared, θ_a belongs to an arm. The paper's users have features; here they have ids
only. So there are two ways to split the model: an *item* has parameters of its own for the context, or a *user* has
parameters of their own for the metadata of items. The shared part has a column an item, and metadata × context.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, final

import numpy as np

from metaban.bench.shop.inputs import CONTEXT_NUMBERS, context_inputs, item_inputs
from metaban.bench.shop.player import ShopPlayer, ShownItem, best_items
from metaban.bench.worlds.shop import Matrix, Places, ShopCatalogue, ShopRequest


@final
class HybridRidge:
    """The ridge regression of Algorithm 2 with the parameters of the arms eliminated, updated by blocks of samples.

    With A_a = λI + Σxxᵀ, B_a = Σxzᵀ and b_a = Σrx of an arm, the matrix of the shared part is C = λI + Σzzᵀ −
    ΣB_aᵀA_a⁻¹B_a. Samples X [n, d], Z [n, k] and r [n] of one arm, with W = Z − XA_a⁻¹B_a and S = I + XA_a⁻¹Xᵀ, change
    C by WᵀS⁻¹W and its target by WᵀS⁻¹(r − XA_a⁻¹b_a). All inverses are kept and changed by Woodbury's identity.
    """

    def __init__(self, arms: int, own: int, shared: int, regularization: float) -> None:
        self._inverses = np.tile(np.eye(own) / regularization, (arms, 1, 1))  # A_a⁻¹ [arms, d, d]
        self._crossed = np.zeros((arms, own, shared))  # A_a⁻¹B_a [arms, d, k]
        self._weights = np.zeros((arms, own))  # A_a⁻¹b_a [arms, d]
        self._shared_inverse = np.eye(shared) / regularization  # C⁻¹ [k, k]
        self._shared_weights = np.zeros(shared)  # β [k]

    def predict(self, arms: Places, own: Matrix, shared: Matrix) -> tuple[Matrix, Matrix]:
        """Means and variances [n] of rows with these arms [n], x [n, d] and z [n, k]."""
        left = shared - np.einsum("nd,ndk->nk", own, self._crossed[arms], optimize=True)  # W [n, k]
        means = left @ self._shared_weights + np.einsum("nd,nd->n", own, self._weights[arms])
        variances = np.einsum("nd,nde,ne->n", own, self._inverses[arms], own, optimize=True)
        variances += ((left @ self._shared_inverse) * left).sum(1)
        return means, variances

    def predict_crossed(self, arm: int, own: Matrix, columns: Places, context: Matrix) -> tuple[Matrix, Matrix]:
        """As `predict` for rows of one arm, where z is 1 in a column [n] and x ⊗ context in the last d·c columns.

        Takes k²·d multiplications for all rows together, where `predict` takes k² for each row.
        """
        size, crossed = own.shape[1], own.shape[1] * len(context)
        inverse, weights = self._shared_inverse, self._shared_weights
        both = self._crossed[arm] @ inverse  # A⁻¹BC⁻¹ [d, k]
        # z is linear in its unit vector and in x: products with C⁻¹, folded by the context.
        single_x = inverse[columns, -crossed:].reshape(-1, size, len(context)) @ context  # [n, d]
        x_x = np.einsum(
            "icjd,c,d->ij",
            inverse[-crossed:, -crossed:].reshape(size, len(context), size, len(context)),
            context,
            context,
            optimize=True,
        )  # [d, d]
        own_x = both[:, -crossed:].reshape(size, size, len(context)) @ context  # [d, d]
        own_own = both @ self._crossed[arm].T + self._inverses[arm]  # [d, d]
        variances = inverse[columns, columns] + 2 * ((single_x - both[:, columns].T) * own).sum(1)
        variances += ((own @ (x_x - 2 * own_x + own_own)) * own).sum(1)
        slopes = weights[-crossed:].reshape(size, len(context)) @ context + self._weights[arm]
        means = weights[columns] + own @ (slopes - self._crossed[arm] @ weights)
        return means, variances

    def observe(self, arm: int, own: Matrix, shared: Matrix, rewards: Matrix) -> None:
        """Learn samples of one arm: x [n, d], z [n, k] and rewards [n]."""
        left = shared - own @ self._crossed[arm]  # W [n, k]
        errors = rewards - own @ self._weights[arm]  # [n]
        gains = own @ self._inverses[arm]  # XA_a⁻¹ [n, d]
        scales = np.eye(len(own)) + gains @ own.T  # S [n, n]
        directions = left @ self._shared_inverse  # WC⁻¹ [n, k]
        shrunk = np.linalg.solve(scales + directions @ left.T, directions)  # [n, k]
        self._shared_weights += (errors - left @ self._shared_weights) @ shrunk
        self._shared_inverse -= directions.T @ shrunk
        # A'⁻¹B' = A⁻¹B + A'⁻¹Xᵀ(Z − XA⁻¹B), and A'⁻¹Xᵀ is A⁻¹XᵀS⁻¹; the same for b.
        shrunk_gains = np.linalg.solve(scales, gains)  # S⁻¹XA_a⁻¹ [n, d]
        self._inverses[arm] -= gains.T @ shrunk_gains
        self._crossed[arm] += shrunk_gains.T @ left
        self._weights[arm] += errors @ shrunk_gains


@final
class HybridLinUCB(ShopPlayer):
    """Shows the items of the highest upper bounds of their rewards, mean + α·deviation.

    With `decay` below 1 an item at position p is learned as if its inputs were decay^p times as large, since its reward
    is that of the first place times the probability that its place is looked at.
    """

    def __init__(
        self,
        catalogue: ShopCatalogue,
        *,
        users: int,
        seed: int,
        split: Literal["user", "item"],
        regularization: float,
        exploration: float,
        decay: float,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._identities = catalogue.identities
        self._items = item_inputs(catalogue)  # [N, d]
        self._by_user = split == "user"
        self._exploration = exploration
        self._decay = decay
        identities = int(self._identities.max()) + 1
        self._shared_columns = identities + self._items.shape[1] * CONTEXT_NUMBERS
        self._model = (
            HybridRidge(users, self._items.shape[1], self._shared_columns, regularization)
            if self._by_user
            else HybridRidge(identities, CONTEXT_NUMBERS, self._shared_columns, regularization)
        )

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        if self._by_user:
            described, columns = self._items[eligible], self._identities[eligible]
            means, variances = self._model.predict_crossed(request.user, described, columns, context_inputs(request))
        else:
            means, variances = self._model.predict(*self._rows(request, eligible))
        bounds = means + self._exploration * np.sqrt(np.maximum(variances, 0.0))
        return best_items(bounds, eligible, size, self._random)

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        # By user, the items of a slate are samples of one arm, and most often arrive together.
        for _, group in groupby(feedback, lambda shown: shown.request if self._by_user else shown):
            shown = list(group)
            arms, own, shared = self._rows(shown[0].request, np.array([each.item for each in shown]))
            looked = self._decay ** np.array([each.position for each in shown])[:, None]  # [n, 1]
            rewards = np.array([each.reward for each in shown])
            self._model.observe(int(arms[0]), looked * own, looked * shared, rewards)

    def _rows(self, request: ShopRequest, items: Places) -> tuple[Places, Matrix, Matrix]:
        """Arm [n], x [n, d] and z [n, k] of some items."""
        context, described = context_inputs(request), self._items[items]
        shared = np.zeros((len(items), self._shared_columns))
        shared[np.arange(len(items)), self._identities[items]] = 1.0
        shared[:, self._shared_columns - described.shape[1] * CONTEXT_NUMBERS :] = (
            described[:, :, None] * context
        ).reshape(len(items), -1)
        if self._by_user:
            return np.full(len(items), request.user), described, shared
        return self._identities[items], np.tile(context, (len(items), 1)), shared
