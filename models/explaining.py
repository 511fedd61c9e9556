"""Explanation of an arm's mean: its blocks, and the contributions of input columns.

Blocks say whose knowledge a mean is: of all users, of the arm itself, of the user. They add up to it. Columns split the
part that inputs make, shared + user. Column j contributes z_j · ∂mean/∂z_j, gradient × input in closed form (Shrikumar
et al., "Not Just a Black Box", 2016), where z is the input as a learner standardises it: a column at its mean over all
samples contributes 0. For a linear learner the contributions are its terms. Learners write their gradients out; at a
kink the side with slope 0 is taken. All functions accept numpy arrays and torch tensors (arrays.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from metaban.models.numerics.arrays import Array, double, library_of, on_device


@final
@dataclass(frozen=True, slots=True)
class Agreement:
    """Eq. 4 for n arms of one request: predictions of the requesting user and of the pool's P users, and groups."""

    prediction: Array  # [n] of the requesting user
    threshold: Array  # [n] largest difference within the group
    predictions: Array  # [n, P] of the pool
    members: Array  # [n, P] bool: the group without the requesting user

    @property
    def group_size(self) -> Array:
        """Group size as in `Scores` [n]."""
        return self.members.sum(-1) + 1


@final
@dataclass(frozen=True, slots=True)
class Contributions:
    """The means of n arms in two ways, in float64: blocks that add up to them, and columns.

    mean = shared + user + arm + taste + memory        shared + user = intercept + Σ columns + rest
    """

    columns: Array  # [n, d] gradient × standardised input
    intercept: Array  # [n] shared + user of an arm whose inputs all have their means
    shared: Array  # [n] from the inputs, for a user without rewards
    user: Array  # [n] from the inputs, by which this user differs from one without rewards
    arm: Array  # [n] effect of the arm itself
    taste: Array  # [n] this user's taste for the arm's factors
    memory: Array  # [n] correction from rewards of near-identical arms

    def blocks(self) -> Array:
        """Sum of the blocks [n]: the mean, up to rounding."""
        return self.shared + self.user + self.arm + self.taste + self.memory

    def rest(self, mean: Array) -> Array:
        """Means [n] minus all parts but shared and user, which the columns split [n]: what is not linear."""
        return double(mean) - self.columns.sum(-1) - self.intercept - self.arm - self.taste - self.memory


def without_own_row(near: Array, own_row: Array) -> Array:
    """Group members [n, P] without the requesting user, whose row in the pool is own_row [1], or −1."""
    rows: Array = library_of(near).arange(near.shape[1], **on_device(near))
    return near & (rows != own_row)
