"""Attribution of an arm's mean to input columns: gradient × input, in closed form.

Column j of a raw input x contributes x_j · ∂mean/∂x_j (Shrikumar et al., "Not Just a Black Box", 2016); for a linear
learner the contributions are its terms. Learners write their gradients out; at a kink the side with slope 0 is taken.
All functions accept numpy arrays and torch tensors (arrays.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from metaban.models.numerics.arrays import Array, double, library_of, on_device
from metaban.models.numerics.normalizer import LARGEST_DEVIATION


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
    """Parts of the means of n arms, in float64; `rest` is the remainder."""

    columns: Array  # [n, d] gradient × raw input
    intercept: Array  # [n] the learner's own constant
    memory: Array  # [n] correction from rewards of near-identical arms

    @staticmethod
    def of(gradient: Array, raw: Array, intercept: Array, memory: Array) -> Contributions:
        """From a gradient [n, d] at raw inputs [n, d]."""
        return Contributions(double(gradient) * double(raw), double(intercept), double(memory))

    def rest(self, mean: Array) -> Array:
        """Means [n] minus all parts [n]: constants and nonlinearity."""
        return double(mean) - self.columns.sum(-1) - self.intercept - self.memory


def without_own_row(near: Array, own_row: Array) -> Array:
    """Group members [n, P] without the requesting user, whose row in the pool is own_row [1], or −1."""
    rows: Array = library_of(near).arange(near.shape[1], **on_device(near))
    return near & (rows != own_row)


def through_standardizing(gradient: Array, z: Array, scale: Array) -> Array:
    """∂/∂x from ∂/∂z [n, d], z = `standardize(x)` [n, d]; clipped inputs have gradient 0."""
    return gradient / scale * (abs(z) < LARGEST_DEVIATION)


def through_unit(gradient: Array, x: Array) -> Array:
    """∂/∂x from ∂/∂u [n, d] where u = x/‖x‖; 0 at x = 0."""
    library = library_of(x)
    largest = library.amax(abs(x), -1)[:, None]  # scaled out: squares overflow before norms do
    scaled = x / library.where(largest > 0, largest, 1)
    length = library.sqrt((scaled * scaled).sum(-1))[:, None]
    direction = scaled / library.where(length > 0, length, 1)
    across = gradient - (gradient * direction).sum(-1)[:, None] * direction
    return library.where(largest > 0, across / library.where(largest > 0, length * largest, 1), 0)
