"""The trunk of one epoch in the form in which requests need it: few operations, the same for numpy and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from torch import Tensor

from metaban.models.default.inputs import Ramps
from metaban.models.default.trunk import Trunk
from metaban.models.numerics.arrays import Array, double, packed, rectified


@final
@dataclass(frozen=True, slots=True)
class ServedTrunk:
    """Layers of all M members, and the ramps of standardised inputs that the first one sees; None without codes.

    The first layer is that of all members side by side, [n, M·m] and [M·m]. Hidden layers are weights [M, columns,
    rows] and offsets [M·rows]; the last holds each member's share of the mean, [M·m] and [].
    """

    layers: Sequence[tuple[Array, Array]]
    ramps: Ramps | None

    @classmethod
    def of(cls, trunk: Trunk, parameters: Tensor, edges: Tensor | None) -> Self:
        """From the flat vector of all members, and the edges of codes [d, bins + 1]."""
        (first, offset), *rest = trunk.layers(parameters)
        first, offset = first.flatten(0, 1), offset.flatten()  # all members see the same inputs: one layer
        ramps = None if edges is None else Ramps.of(edges)
        seen = ramps.layer(first.mT, offset) if ramps else (first.mT, offset)
        *hidden, (last, level) = rest
        inner = [(weight.mT, offset.flatten()) for weight, offset in hidden]
        return cls([seen, *inner, (last.flatten() / trunk.members, level.mean())], ramps)

    def packed(self) -> ServedTrunk:
        """As contiguous numpy arrays."""
        layers = [(packed(weight), packed(offset)) for weight, offset in self.layers]
        return ServedTrunk(layers, self.ramps.packed() if self.ramps else None)

    def predict(self, z: Array) -> Array:
        """p(z) [N] of standardised inputs [N, d]."""
        (first, start), *hidden, (last, level) = self.layers
        y = (self.ramps.values(z) if self.ramps else z) @ first
        y += start
        for weight, offset in hidden:
            y = join_members(split_members(rectified(y), weight) @ weight)
            y += offset
        return rectified(y) @ last + level

    def gradient(self, z: Array) -> Array:
        """∂p/∂z [n, d] of standardised inputs [n, d], in float64."""
        (first, start), *hidden, (last, _) = self.layers
        y, active = (self.ramps.values(z) if self.ramps else z) @ first + start, []
        for weight, offset in hidden:
            active.append(y > 0)
            y = join_members(split_members(rectified(y), weight) @ weight) + offset
        delta = last * (y > 0)  # [n, M·m]
        for (weight, _), alive in zip(reversed(hidden), reversed(active), strict=True):
            delta = join_members(split_members(delta, weight) @ weight.mT) * alive
        delta = delta @ first.mT
        return double(self.ramps.gradient(z, delta) if self.ramps else delta)


def split_members(y: Array, weight: Array) -> Array:
    """Units of all members side by side [N, M·m] → one batch per member [M, N, m]; M is taken from weights [M, …]."""
    return y.reshape(y.shape[0], weight.shape[0], -1).swapaxes(0, 1)


def join_members(y: Array) -> Array:
    """The inverse of `split_members`."""
    return y.swapaxes(0, 1).reshape(y.shape[1], -1)
