"""Fully connected ReLU networks of any shape as flat vectors, batched, and their scale invariance.

Letters in shape comments: p parameters, N inputs, o and k units of neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

#: A sum of squares below this counts as 0: such a unit keeps its scale.
NEGLIGIBLE = 1e-12


@final
@dataclass(frozen=True, slots=True)
class NetShape:
    """A fully connected ReLU network as one flat vector: for each layer weights row by row, then offsets if any.

    (1, 100, 1) is a network with 100 hidden units, (d, 1) a linear head.
    """

    widths: tuple[int, ...]
    offsets: bool = True

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise ValueError(f"a network needs at least inputs and outputs, each at least 1, not {self.widths}")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each layer."""
        return [(after, before) for before, after in pairwise(self.widths)]

    @property
    def parameters(self) -> int:
        """Length of the flat vector."""
        return sum(rows * (columns + self.offsets) for rows, columns in self.sizes)

    def layers(self, nets: Tensor) -> list[Tensor]:
        """[..., p] → [..., outputs, inputs (+ 1 for offsets)] of each layer."""
        found, start = [], 0
        for rows, columns in self.sizes:
            middle, end = start + rows * columns, start + rows * (columns + self.offsets)
            layer = nets[..., start:middle].reshape(*nets.shape[:-1], rows, columns)
            found.append(torch.cat([layer, nets[..., middle:end, None]], -1) if self.offsets else layer)
            start = end
        return found

    def pairs(self, nets: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Views of [..., p]: weights [..., outputs, inputs] of each layer, and its offsets [..., outputs] if any."""
        lengths = [length for rows, columns in self.sizes for length in (rows * columns, rows * self.offsets)]
        parts = torch.split(nets, lengths, -1)
        return [
            (parts[2 * place].reshape(*nets.shape[:-1], *size), parts[2 * place + 1] if self.offsets else None)
            for place, size in enumerate(self.sizes)
        ]

    def flat(self, layers: Sequence[Tensor]) -> Tensor:
        """The inverse of `layers`."""
        parts = []
        for layer, (_, columns) in zip(layers, self.sizes, strict=True):
            parts += [layer[..., :columns].flatten(-2), layer[..., columns:].flatten(-2)]
        return torch.cat(parts, -1)

    def kinds(self) -> Tensor:
        """Classes of exchangeable parameters, numbered from 0: [p].

        A class is all weights from one input, all to one output, all between two hidden layers, or all offsets of a
        hidden layer. Without hidden units each parameter is its own class.
        """
        first, last = 0, len(self.sizes) - 1
        found, start = [], 0
        for place, (rows, columns) in enumerate(self.sizes):
            row = torch.arange(rows) if place == last else torch.zeros(rows, dtype=torch.int64)
            column = torch.arange(columns) if place == first else torch.zeros(columns, dtype=torch.int64)
            layer = row[:, None] * int(column[-1] + 1) + column  # [o, k]
            offset = row[:, None] + int(layer[-1, -1] + 1)
            found.append(start + (torch.cat([layer, offset], 1) if self.offsets else layer))
            start = int(found[-1][-1, -1]) + 1
        return self.flat(found)

    def outputs(self, nets: Tensor, x: Tensor) -> Tensor:
        """Outputs of each network at each input: [..., p] and x [N, inputs] → [..., N, outputs].

        Each network may also have its own inputs: x [..., N, inputs].
        """
        layers = self.layers(nets)
        inputs = torch.cat([x, torch.ones_like(x[..., :1])], -1) if self.offsets else x  # [..., N, inputs (+ 1)]
        hidden = layers[0] @ inputs.mT  # [..., o, N]
        for place, layer in enumerate(layers[1:], 1):
            columns = self.sizes[place][1]
            hidden = layer[..., :columns] @ hidden.relu()
            if self.offsets:
                hidden = hidden + layer[..., columns:]
        return hidden.mT


def rescaled(shape: NetShape, nets: Tensor, *, balance: bool = False) -> Tensor:
    """The same functions with outgoing weights of norm 1 at each hidden unit, or with `balance` of the incoming norm.

    With norm 1 means of units are meaningful; balanced units are a good start for gradient descent.
    """
    layers = shape.layers(nets)
    for place in range(len(layers) - 2, -1, -1):
        incoming, outgoing = layers[place], layers[place + 1]
        columns = shape.sizes[place + 1][1]
        taken, given = incoming.square().sum(-1), outgoing[..., :columns].square().sum(-2)  # [..., o]
        factor = (given / taken).clamp_min(NEGLIGIBLE).pow(0.25) if balance else given.sqrt()
        factor = torch.where((taken > NEGLIGIBLE) & (given > NEGLIGIBLE), factor, 1.0)
        layers[place] = incoming * factor[..., None]
        layers[place + 1] = torch.cat([outgoing[..., :columns] / factor[..., None, :], outgoing[..., columns:]], -1)
    return shape.flat(layers)
