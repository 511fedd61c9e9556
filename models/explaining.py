"""What the mean of an arm is made of: gradient × input, in closed form.

Column j of a raw input x contributes x_j · ∂mean/∂x_j, where the gradient is the learner's own, written out backwards
through all that it makes of an input: standardisation, principal directions, products, piecewise codes and ReLU layers.
All of these are differentiable except at single points, where the side that a network itself counts as 0 is taken.
(Shrikumar et al., "Not Just a Black Box", 2016; for a linear learner the contributions are its terms.)

Everything here takes numpy arrays and torch tensors alike (arrays.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from models.arrays import Array, double, library_of, on_device, rectified, zeros
from models.judging import by_member, side_by_side
from models.normalizer import LARGEST_DEVIATION


@final
@dataclass(frozen=True, slots=True)
class Agreement:
    """Eq. 4 for n arms of one request: what the asking user and all P users of the pool predict, and who agrees."""

    prediction: Array  # [n] of the asking user
    threshold: Array  # [n] how far from it others may be
    predictions: Array  # [n, P] of the pool
    members: Array  # [n, P] bool: who else is in the group; the asking user, a member too, is left out

    @property
    def group_size(self) -> Array:
        """As `Scores` have it [n]."""
        return self.members.sum(-1) + 1


@final
@dataclass(frozen=True, slots=True)
class Contributions:
    """What the means of n arms are made of, in float64; `rest` says what these do not account for."""

    columns: Array  # [n, d] gradient × raw input
    intercept: Array  # [n] a constant of the learner's own
    memory: Array  # [n] what was earned on such arms before, beyond what the rest of the learner expects

    @staticmethod
    def of(gradient: Array, raw: Array, intercept: Array, memory: Array) -> Contributions:
        """Of a gradient [n, d] at raw inputs [n, d]."""
        return Contributions(double(gradient) * double(raw), double(intercept), double(memory))

    def rest(self, mean: Array) -> Array:
        """Means [n] less all parts [n]: constants and what bends."""
        return double(mean) - self.columns.sum(-1) - self.intercept - self.memory


def without_asker(near: Array, own_row: Array) -> Array:
    """Who agrees [n, P] without the asking user, whose row in the pool is own_row [1], or −1."""
    rows: Array = library_of(near).arange(near.shape[1], **on_device(near))
    return near & (rows != own_row)


def through_standardizing(gradient: Array, z: Array, scale: Array) -> Array:
    """∂/∂x from ∂/∂z [n, d], z = `standardize(x)` [n, d]; what was cut off does not move."""
    return gradient / scale * (abs(z) < LARGEST_DEVIATION)


def through_products(x: Array, weight: Array) -> Array:
    """Gradient [n, c] of Σ weight · `pair_products(x)`: x [n, c], weight [c(c+1)/2]."""
    gradient, start = zeros(x.shape, x), 0
    for i in range(x.shape[-1]):  # as many as heads can hold: a handful
        row = weight[start : start + x.shape[-1] - i]  # of x_i·x_i, x_i·x_{i+1}, …
        gradient[:, i] += x[:, i:] @ row
        gradient[:, i:] += row * x[:, i : i + 1]
        start += x.shape[-1] - i
    return gradient


def through_layers(layers: Sequence[tuple[Array, Array]], x: Array, asked: Array) -> Array:
    """Gradient [n, inputs] of `judging.foretold`, which takes the same."""
    (first, _), *hidden, (last, _) = layers
    y, active = x @ first + asked, []
    for weight, offset in hidden:
        active.append(y > 0)
        y = side_by_side(by_member(rectified(y), weight) @ weight) + offset
    delta = last * (y > 0)  # [n, M·m]
    for (weight, _), alive in zip(reversed(hidden), reversed(active), strict=True):
        delta = side_by_side(by_member(delta, weight) @ weight.mT) * alive
    return delta @ first.mT


def through_unit(gradient: Array, x: Array) -> Array:
    """∂/∂x from ∂/∂u [n, d] where u = x/‖x‖; 0 where x is."""
    library = library_of(x)
    largest = library.amax(abs(x), -1)[:, None]  # squares overflow before norms do
    scaled = x / library.where(largest > 0, largest, 1)
    length = library.sqrt((scaled * scaled).sum(-1))[:, None]
    direction = scaled / library.where(length > 0, length, 1)
    across = gradient - (gradient * direction).sum(-1)[:, None] * direction
    return library.where(largest > 0, across / library.where(largest > 0, length * largest, 1), 0)
