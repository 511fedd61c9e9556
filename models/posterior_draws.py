"""Joint draws from the posterior of the arms of a request, which Thompson sampling compares.

The arms of a request share the uncertainty about the user. Independent draws would count shared uncertainty, such as
that of the intercept, as a reason to prefer an arm. A draw is therefore one head w ~ N(ŵ, P) for all arms,

    mean + h(x)ᵀ L z + √v(x)·ε,    L Lᵀ = P,  z and ε standard normal,

where v is the variance that is independent for each arm. All random numbers depend on the seed and the decision id
alone, not on the batch or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, final

import numpy as np

from metaban.models.numerics.arrays import Array, cast, double, library_of, like_kind, lower_factor
from metaban.models.numerics.slates import Slates

#: Added to the diagonal of a correlation matrix, against rounding in float32.
JITTER: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """Number of draws of each arm, and the seed of each request [R], at least 0 and below 2⁶³."""

    count: int
    seeds: Sequence[int]


def draws_seed(seed: int, decision_id: str) -> int:
    """The seed of a decision's posterior draws; independent of `decision_draws`."""
    digest = blake2b(f"draws:{seed}:{decision_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def covariance_root(covariance: Array) -> Array:
    """L [R, D, D] with L Lᵀ = P; covariances are scaled to correlations in float64, against rounding.

    A matrix that is still not positive definite is replaced by its diagonal.
    """
    library, exact = library_of(covariance), double(covariance)
    deviation = library.sqrt(exact.diagonal(0, -2, -1).clip(0, None))  # [R, D]
    scale = library.where(deviation > 0, deviation, 1.0)
    correlation = exact / scale[..., None] / scale[..., None, :]
    size = covariance.shape[-1]
    identity = like_kind(np.eye(size), correlation)  # [D, D]
    factor, sound = lower_factor(correlation + JITTER * identity)
    factor = library.where(sound[..., None, None], factor, identity)
    return cast(factor * deviation[..., None], covariance)


def joint_draws(
    mean: Array, h: Array, factor: Array, arm_variance: Array | None, slates: Slates, draws: Draws
) -> Array:
    """[N, M] joint draws of arms h [N, D] with means [N], from heads with covariance factor L [R, D, D].

    `arm_variance` [N] is the variance independent for each arm, if any.
    """
    shared, own = _normals(slates, draws, h.shape[1], mean)  # [R, D, M], [N, M]
    away = slates.flat(slates.padded(h) @ (factor @ shared))  # [N, M]
    if arm_variance is not None:
        away = away + library_of(mean).sqrt(arm_variance)[:, None] * own
    return mean[:, None] + away


def independent_draws(mean: Array, deviation: Array, slates: Slates, draws: Draws) -> Array:
    """[N, M] independent draws of arms with these means and deviations [N]."""
    _, own = _normals(slates, draws, 0, mean)
    return mean[:, None] + deviation[:, None] * own


def _normals(slates: Slates, draws: Draws, shared: int, like: Array) -> tuple[Array, Array]:
    """Standard normal numbers: `shared` for all arms of a request [R, shared, M], and one for each arm [N, M].

    They are generated draw by draw, so that fewer draws are the first of more.
    """
    each = [
        np.random.Generator(np.random.Philox(key=seed)).standard_normal((draws.count, shared + size)).T
        for seed, size in zip(draws.seeds, slates.sizes, strict=True)
    ]
    together = np.stack([numbers[:shared] for numbers in each])
    own = np.concatenate([numbers[shared:] for numbers in each]) if len(each) > 1 else each[0][shared:]
    return like_kind(together, like), like_kind(own, like)
