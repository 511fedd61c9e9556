"""Draws of what arms may be worth, jointly for the arms of a request: what Thompson sampling compares.

Arms of one request share what is not known of the user: a draw has to move all of them together, or what is common to
them, such as the intercept, would count as a reason to prefer one. So a draw is one head w ~ N(ŵ, P) for all arms,

    mean + h(x)ᵀ L z + √v(x)·ε,    L Lᵀ = P,  z and ε standard normal,

where v is what no head tells and each arm has to itself. Numbers belong to a seed, and a seed to a decision: drawn
together with others, on whatever device, a decision meets the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import final

import numpy as np

from models.arrays import Array, cast, double, library_of, like_kind, lower_factor
from models.slates import Slates

#: Added to the diagonal of a correlation matrix, against rounding of the float32 that it was kept in.
JITTER = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """How many draws of each arm are wanted, and the seed of each request's [R], at least 0 and below 2⁶³."""

    count: int
    seeds: Sequence[int]


def draws_seed(seed: int, decision_id: str) -> int:
    """The seed of a decision's draws; what `decision_draws` hashes is told apart from it."""
    digest = blake2b(f"draws:{seed}:{decision_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def root(covariance: Array) -> Array:
    """L [R, D, D] with L Lᵀ = P, of covariances that may have lost a digit: scaled to correlations, in float64.

    One that is none, even then, is taken for its diagonal.
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


def joint_draws(mean: Array, h: Array, factor: Array, apart: Array | None, slates: Slates, draws: Draws) -> Array:
    """[N, M] draws of arms h [N, D] with these means [N], of heads with a factor L [R, D, D].

    `apart` [N] is the variance that each arm has to itself, if any has.
    """
    shared, own = _normals(slates, draws, h.shape[1], mean)  # [R, D, M], [N, M]
    away = slates.flat(slates.padded(h) @ (factor @ shared))  # [N, M]
    if apart is not None:
        away = away + library_of(mean).sqrt(apart)[:, None] * own
    return mean[:, None] + away


def independent_draws(mean: Array, deviation: Array, slates: Slates, draws: Draws) -> Array:
    """[N, M] draws of arms with these means and deviations [N], of which nothing else is known."""
    _, own = _normals(slates, draws, 0, mean)
    return mean[:, None] + deviation[:, None] * own


def _normals(slates: Slates, draws: Draws, shared: int, like: Array) -> tuple[Array, Array]:
    """Standard normal numbers: so many for all arms of a request [R, shared, M], and for each arm [N, M].

    Draw by draw, so that whoever wants fewer gets the first of them.
    """
    each = [
        np.random.Generator(np.random.Philox(key=seed)).standard_normal((draws.count, shared + size)).T
        for seed, size in zip(draws.seeds, slates.sizes, strict=True)
    ]
    together = np.stack([numbers[:shared] for numbers in each])
    own = np.concatenate([numbers[shared:] for numbers in each]) if len(each) > 1 else each[0][shared:]
    return like_kind(together, like), like_kind(own, like)
