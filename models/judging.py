"""How the default learner judges arms: what it believes of users, and what heads, pool and memories say.

Everything here takes numpy arrays and torch tensors alike (arrays.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from models.arrays import Array, count_true, dots, double, inverse, library_of, on_device, rectified, zeros
from models.memory import kernel, recall
from models.prior import Groups, Prior
from models.slates import Slates


@final
@dataclass(frozen=True, slots=True)
class Beliefs:
    """Of R users, mean heads without groups, with them, and of the two as the guard weighs them, each [R, D]."""

    alone: Array
    together: Array
    head: Array
    _groups: Groups | None
    _guard: Array
    _covariance: Array  # [R, D, D] without groups
    _within: Array  # [R, D, D] in one group
    _belief: Array  # [R, Q]

    def covariance(self) -> Array:
        """Of `head` [R, D, D]: what is not known within a group, and of which group to believe in."""
        if self._groups is None:
            return self._covariance
        pull = self._groups.pull
        apart = (pull - (self._belief @ pull)[:, None]) @ self._within  # [R, Q, D], each group's head from the mean
        spread = apart.mT @ (apart * self._belief[..., None])  # [R, D, D]
        return self._covariance + self._guard * (self._within + spread - self._covariance)


def believe(prior: Prior, groups: Groups | None, guard: Array, gram: Array, moment: Array) -> Beliefs:
    """What is known of users with A [R, D, D] and b [R, D], in float64."""
    known = gram / prior.noise
    if groups is None:
        covariance = inverse(known + prior.precision)
        alone = prior.mean_under(covariance, moment)
        return Beliefs(alone, alone, alone, None, guard, covariance, covariance, alone[:, :0])
    both = library_of(gram).stack([prior.precision, prior.precision / groups.share])[:, None]  # [2, 1, D, D]
    covariance, within = inverse(known + both)  # each [R, D, D]
    alone = prior.mean_under(covariance, moment)
    rewarded = moment / prior.noise
    belief = groups.beliefs(within, rewarded)  # [R, Q]
    together = library_of(gram).where(groups.any(), groups.head(within, rewarded, belief), alone)
    head = alone + guard * (together - alone)
    return Beliefs(alone, together, head, groups, guard, covariance, within, belief)


def said_of(arms: Array, slates: Slates, own: Mapping[str, Array]) -> tuple[Array, Array]:
    """What the asking users' `heads` [R, D, n] say of arms h [N, D], [N, n], and the variance by `covariance` [N]."""
    padded = slates.padded(arms)  # [R, K, D]
    spread = dots(padded @ own["covariance"], padded)  # [R, K]
    return slates.flat(padded @ own["heads"]), rectified(slates.flat(spread))


def count_agreeing(heads: Array, arms: Array, mean: Array, reach: Array, row: Array, places: Array | slice) -> Array:
    """Eq. 4: how many agree with the asking user on the arms in some places [n], that user included, once.

    heads [P, D] of the pool, arms [N, D], the user's own mean [N] and the square of how far from it others may be [N],
    and the user's row in the pool [N], or [1] when all arms are asked about by one; −1 for none.
    """
    arms, mean, reach, one_asks = arms[places], mean[places], reach[places], row.shape[0] == 1
    if not heads.shape[0]:
        return zeros((arms.shape[0],), row) + 1
    away = arms @ heads.mT  # [N, P], the largest array of all: worked on in place
    away -= mean[:, None]
    away *= away
    agree = away <= reach[:, None]
    found = count_true(agree)  # [n]
    if not one_asks:
        row = row[places]
        return found + ~(agree[library_of(arms).arange(row.shape[0], **on_device(row)), row] & (row >= 0))
    if isinstance(row, Tensor):  # which may be on a GPU, and is not to be waited for
        return found + ~(agree[:, row[0]] & (row >= 0))
    return found + (~agree[:, row[0]] if row[0] >= 0 else 1)


def foretold(layers: Sequence[tuple[Array, Array]], x: Array, asked: Array) -> Array:
    """The trunk's prediction [N] from x [N, n], what it sees of arms, and `asked` [N, M·m], what it makes of who asks.

    The first layer is that of all M members side by side, [n, M·m], its offset part of `asked`. Hidden ones come as
    weights [M, columns, rows] and offsets [M·rows], the last as each member's share of the mean, [M·m] and [].
    """
    (first, _), *hidden, (last, level) = layers
    y = x @ first
    y += asked
    for weight, offset in hidden:
        y = side_by_side(by_member(rectified(y), weight) @ weight)
        y += offset
    return rectified(y) @ last + level


def by_member(y: Array, weight: Array) -> Array:
    """What members say side by side [N, M·m], for each to go on by itself [M, N, m]: weights [M, …] tell how many."""
    return y.reshape(y.shape[0], weight.shape[0], -1).swapaxes(0, 1)


def side_by_side(y: Array) -> Array:
    """The inverse of `by_member`."""
    return y.swapaxes(0, 1).reshape(y.shape[1], -1)


def remember(x: Array, slates: Slates, own: Mapping[str, Array], gain: Array, radius: float) -> tuple[Array, Array]:
    """By the users' memories: a correction [N], and the share of the noise's variance that is left [N], in float64.

    Arms as heads see them, [1, x] [N, 1 + c]; `own` has `kept_table` [R, 1 + c, S] and `kept_told` [R, S, 2].
    """
    near = kernel(slates.padded(double(x)), own["kept_table"], radius)  # [R, K, S]
    correction, left = recall(near, own["kept_told"], gain)
    return slates.flat(correction), slates.flat(left)
