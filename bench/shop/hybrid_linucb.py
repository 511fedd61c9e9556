"""LinUCB with hybrid linear models: Li, Chu, Langford and Schapire, A contextual-bandit approach to personalized news
recommendation, WWW 2010, Algorithm 2.

The reward is zᵀβ + xᵀθ_a: β is shared, θ_a belongs to an arm. The paper's users have features; here they have ids
only. So there are two ways to split the model: an *item* has parameters of its own for the context, or a *user* has
parameters of their own for the metadata of items. The shared part has a column an item, and metadata × context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import numpy as np

from metaban.bench.shop.inputs import CONTEXT_NUMBERS, context_inputs, item_inputs
from metaban.bench.shop.player import ShopPlayer, ShownItem, best_items
from metaban.bench.worlds.shop import Matrix, Places, ShopCatalogue, ShopRequest


@final
class HybridRidge:
    """The ridge regression of Algorithm 2 with the parameters of the arms eliminated, by rank-one updates.

    With A_a = λI + Σxxᵀ, B_a = Σxzᵀ and b_a = Σrx of an arm, the matrix of the shared part is C = λI + Σzzᵀ −
    ΣB_aᵀA_a⁻¹B_a. A sample with w = z − B_aᵀA_a⁻¹x and s = 1 + xᵀA_a⁻¹x changes C by wwᵀ/s and its target by
    w·(r − xᵀA_a⁻¹b_a)/s.
    """

    def __init__(self, arms: int, own: int, shared: int, regularization: float) -> None:
        self._inverses = np.tile(np.eye(own) / regularization, (arms, 1, 1))  # A_a⁻¹ [arms, d, d]
        self._crossed = np.zeros((arms, own, shared))  # A_a⁻¹B_a [arms, d, k]
        self._weights = np.zeros((arms, own))  # A_a⁻¹b_a [arms, d]
        self._shared_inverse = np.eye(shared) / regularization  # C⁻¹ [k, k]
        self._shared_weights = np.zeros(shared)  # β [k]

    def predict(self, arms: Places, own: Matrix, shared: Matrix) -> tuple[Matrix, Matrix]:
        """Means and variances [n] of rows with these arms [n], x [n, d] and z [n, k]."""
        left = self._left(arms, own, shared)  # [n, k]
        means = left @ self._shared_weights + np.einsum("nd,nd->n", own, self._weights[arms])
        variances = np.einsum("nd,nde,ne->n", own, self._inverses[arms], own, optimize=True)
        variances += ((left @ self._shared_inverse) * left).sum(1)
        return means, variances

    def observe(self, arm: int, own: Matrix, shared: Matrix, reward: float) -> None:
        """Learn one sample: x [d] and z [k]."""
        left = shared - own @ self._crossed[arm]  # w [k]
        error = reward - float(own @ self._weights[arm])
        gain = self._inverses[arm] @ own  # A_a⁻¹x [d]
        scale = 1.0 + float(own @ gain)
        direction = self._shared_inverse @ left  # C⁻¹w [k]
        shrunk = direction / (scale + left @ direction)
        self._shared_weights += shrunk * (error - left @ self._shared_weights)
        self._shared_inverse -= np.multiply.outer(direction, shrunk)
        self._inverses[arm] -= np.multiply.outer(gain, gain / scale)
        # A'⁻¹B' = A⁻¹B + A'⁻¹x·(z − xᵀA⁻¹B), and A'⁻¹x is A⁻¹x/s; the same for b.
        self._crossed[arm] += np.multiply.outer(gain / scale, left)
        self._weights[arm] += gain / scale * error

    def _left(self, arms: Places, own: Matrix, shared: Matrix) -> Matrix:
        """w = z − B_aᵀA_a⁻¹x of each row, [n, k]."""
        if (arms == arms[0]).all():  # rows of one user; no copies of B
            common: Matrix = own @ self._crossed[arms[0]]
            return shared - common
        crossed: Matrix = np.einsum("nd,ndk->nk", own, self._crossed[arms], optimize=True)
        return shared - crossed


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
        self._own_columns = np.zeros((len(self._items), identities))  # [N, identities]
        self._own_columns[np.arange(len(self._items)), self._identities] = 1.0
        crossed = self._items.shape[1] * CONTEXT_NUMBERS
        self._model = (
            HybridRidge(users, self._items.shape[1], identities + crossed, regularization)
            if self._by_user
            else HybridRidge(identities, CONTEXT_NUMBERS, identities + crossed, regularization)
        )

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        means, variances = self._model.predict(*self._rows(request, eligible))
        bounds = means + self._exploration * np.sqrt(np.maximum(variances, 0.0))
        return best_items(bounds, eligible, size, self._random)

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            arms, own, shared = self._rows(shown.request, np.array([shown.item]))
            looked = self._decay**shown.position
            self._model.observe(int(arms[0]), looked * own[0], looked * shared[0], shown.reward)

    def _rows(self, request: ShopRequest, items: Places) -> tuple[Places, Matrix, Matrix]:
        """Arm [n], x [n, d] and z [n, k] of some items."""
        context, described = context_inputs(request), self._items[items]
        crossed = (described[:, :, None] * context).reshape(len(items), -1)
        shared = np.concatenate([self._own_columns[items], crossed], axis=1)
        if self._by_user:
            return np.full(len(items), request.user), described, shared
        return self._identities[items], np.tile(context, (len(items), 1)), shared
