"""Scoring of arms by the default learner: posteriors of users' heads, predictions, groups and memory.

All functions accept numpy arrays and torch tensors (arrays.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from metaban.models.default.memory import combine_terms, kernel
from metaban.models.default.prior import Groups, Prior
from metaban.models.numerics.arrays import (
    Array,
    count_true,
    dots,
    double,
    inverse,
    library_of,
    on_device,
    rectified,
    zeros,
)
from metaban.models.numerics.slates import Slates


@final
@dataclass(frozen=True, slots=True)
class HeadPosteriors:
    """Posterior mean heads of R users without groups, with groups, and their blend by the guard λ, each [R, D]."""

    alone: Array
    together: Array
    head: Array
    _groups: Groups | None
    _guard: Array
    _covariance: Array  # [R, D, D] without groups
    _within: Array  # [R, D, D] within a group
    _belief: Array  # [R, Q] responsibilities of the groups

    def covariance(self) -> Array:
        """Covariance of `head` [R, D, D]: within a group, plus the spread between the group means."""
        if self._groups is None:
            return self._covariance
        pull = self._groups.pull
        apart = (pull - (self._belief @ pull)[:, None]) @ self._within  # [R, Q, D], group heads relative to the mean
        spread = apart.mT @ (apart * self._belief[..., None])  # [R, D, D]
        return self._covariance + self._guard * (self._within + spread - self._covariance)


def head_posteriors(prior: Prior, groups: Groups | None, guard: Array, gram: Array, moment: Array) -> HeadPosteriors:
    """Posteriors of users' heads from A [R, D, D] and b [R, D] (prior.py), in float64."""
    known = gram / prior.noise
    if groups is None:
        covariance = inverse(known + prior.precision)
        alone = prior.mean_under(covariance, moment)
        return HeadPosteriors(alone, alone, alone, None, guard, covariance, covariance, alone[:, :0])
    both = library_of(gram).stack([prior.precision, prior.precision / groups.share])[:, None]  # [2, 1, D, D]
    covariance, within = inverse(known + both)  # each [R, D, D]
    alone = prior.mean_under(covariance, moment)
    rewarded = moment / prior.noise
    belief = groups.responsibilities(within, rewarded)  # [R, Q]
    together = library_of(gram).where(groups.any(), groups.head(within, rewarded, belief), alone)
    head = alone + guard * (together - alone)
    return HeadPosteriors(alone, together, head, groups, guard, covariance, within, belief)


def predict_arms(arms: Array, slates: Slates, own: Mapping[str, Array]) -> tuple[Array, Array]:
    """Predictions [N, n] for arms h [N, D] by the users' `heads` [R, D, n], and the variance by `covariance` [N]."""
    padded = slates.padded(arms)  # [R, K, D]
    spread = dots(padded @ own["covariance"], padded)  # [R, K]
    return slates.flat(padded @ own["heads"]), rectified(slates.flat(spread))


def group_sizes(heads: Array, arms: Array, mean: Array, reach: Array, row: Array, places: Array | slice) -> Array:
    """Eq. 4: group sizes of the arms in some places [n], the requesting user included once.

    heads [P, D] of the pool, arms [N, D], the user's own mean [N], the squared threshold [N], and the user's row in the
    pool [N], or [1] when one user requests all arms; −1 for none.
    """
    arms, mean, reach, one_request = arms[places], mean[places], reach[places], row.shape[0] == 1
    if not heads.shape[0]:
        return zeros((arms.shape[0],), row) + 1
    away = arms @ heads.mT  # [N, P], the largest array: modified in place
    away -= mean[:, None]
    away *= away
    agree = away <= reach[:, None]
    found = count_true(agree)  # [n]
    if not one_request:
        row = row[places]
        return found + ~(agree[library_of(arms).arange(row.shape[0], **on_device(row)), row] & (row >= 0))
    if isinstance(row, Tensor):  # may be on a GPU: no synchronisation
        return found + ~(agree[:, row[0]] & (row >= 0))
    return found + (~agree[:, row[0]] if row[0] >= 0 else 1)


def memory_correction(
    x: Array, slates: Slates, own: Mapping[str, Array], gain: Array, radius: float
) -> tuple[Array, Array]:
    """The memory's correction [N] and the remaining share of the noise variance [N], in float64 (memory.py).

    Arms are [1, x] [N, 1 + c]; `own` has `memory_table` [R, 1 + c, S] and `memory_terms` [R, S, 2].
    """
    near = kernel(slates.padded(double(x)), own["memory_table"], radius)  # [R, K, S]
    correction, left = combine_terms(near, own["memory_terms"], gain)
    return slates.flat(correction), slates.flat(left)
