"""Scoring of arms by the default learner: predictions of users' heads, group sizes and memory.

All functions accept numpy arrays and torch tensors (arrays.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metaban.models.default.memory import combine_terms, kernel
from metaban.models.numerics.arrays import (
    Array,
    count_true,
    dots,
    double,
    library_of,
    on_device,
    rectified,
    zeros,
)
from metaban.models.numerics.slates import Slates


def predict_arms(arms: Array, slates: Slates, own: Mapping[str, Array]) -> tuple[Array, Array]:
    """Predictions [N] for arms h [N, D] by the users' heads and their variance [N], from users' briefs."""
    padded = slates.padded(arms)  # [R, K, D]
    spread = dots(padded @ own["covariance"], padded)  # [R, K]
    return slates.flat((padded @ own["head"][..., None])[..., 0]), rectified(slates.flat(spread))


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
