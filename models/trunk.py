"""The shared network of the default learner: a ReLU MLP in one flat vector, trained by AdamW on replayed samples.

Forward and backward pass are written out: the vector is stored with every epoch as it is, optimiser moments beside it,
so that the next epoch goes on exactly where this one stopped, in whatever process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

#: AdamW (Loshchilov and Hutter, 2019), as usual.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
#: The last layer starts this much smaller than the others: an untrained trunk should say little.
OUTPUT_SCALE = 0.1


@final
@dataclass(frozen=True, slots=True)
class Trunk:
    """Inputs → `depth` hidden layers of `width` units → one prediction."""

    inputs: int
    width: int
    depth: int

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each layer."""
        widths = [self.inputs, *[self.width] * self.depth, 1]
        return [(after, before) for before, after in pairwise(widths)]

    @property
    def parameters(self) -> int:
        """Length of the flat vector."""
        return sum(rows * (columns + 1) for rows, columns in self.sizes)

    def initial(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Uniform weights in ±1/√inputs of their layer, a small last layer."""
        parts = []
        for place, (rows, columns) in enumerate(self.sizes):
            last = place == len(self.sizes) - 1
            layer = (torch.rand(rows * (columns + 1), generator=generator, dtype=dtype) * 2 - 1) / math.sqrt(columns)
            parts.append(layer * OUTPUT_SCALE if last else layer)
        return torch.cat(parts)

    def layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights [rows, columns] and offsets [rows] of each layer, as views."""
        found, start = [], 0
        for rows, columns in self.sizes:
            middle, end = start + rows * columns, start + rows * (columns + 1)
            found.append((flat[start:middle].view(rows, columns), flat[middle:end]))
            start = end
        return found

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """f(x): x [n, inputs] → [n]."""
        return self._activations(flat, x)[-1].squeeze(-1)

    def gradient(self, flat: Tensor, x: Tensor, rewards: Tensor) -> Tensor:
        """∇ mean (f(x) − r)² [p]: x [n, inputs], rewards [n]."""
        held = self._activations(flat, x)
        delta = (held[-1] - rewards.unsqueeze(-1)) * (2 / x.shape[0])  # [n, 1]
        parts: list[Tensor] = []
        for place, (weight, _) in reversed(list(enumerate(self.layers(flat)))):
            parts += [delta.sum(0), (delta.mT @ held[place]).flatten()]
            if place:
                # The sign of what was rectified is 1 where a unit is on, and a mask of floats the cheapest.
                delta = (delta @ weight).mul_(held[place].sign())  # [n, columns]
        return torch.cat(parts[::-1])

    def _activations(self, flat: Tensor, x: Tensor) -> list[Tensor]:
        """The input of each layer, and the output."""
        held = [x]
        layers = self.layers(flat)
        for place, (weight, offset) in enumerate(layers):
            y = torch.addmm(offset, held[-1], weight.mT)
            held.append(y if place == len(layers) - 1 else y.relu_())
        return held


@final
@dataclass(frozen=True, slots=True)
class TrunkState:
    """Parameters with the optimiser's first and second moments [p], and the steps made []."""

    parameters: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor

    @classmethod
    def fresh(cls, parameters: Tensor) -> TrunkState:
        """Before the first step."""
        zeros = torch.zeros_like(parameters)
        return cls(parameters, zeros, zeros.clone(), torch.zeros((), dtype=torch.float64, device=parameters.device))

    @classmethod
    def stored(cls, shared: Mapping[str, Tensor]) -> TrunkState:
        """Of an epoch."""
        return cls(shared["trunk"], shared["trunk_first"], shared["trunk_second"], shared["trunk_steps"])

    def state(self) -> dict[str, Tensor]:
        """What an epoch keeps of it."""
        moments = {"trunk_first": self.first, "trunk_second": self.second, "trunk_steps": self.steps}
        return {"trunk": self.parameters, **moments}

    def after(self, gradient: Tensor, rate: float, decay: float) -> TrunkState:
        """One step of AdamW."""
        steps = self.steps + 1
        first = self.first.lerp(gradient, 1 - BETA1)
        second = (self.second * BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = (1 - BETA2**steps).sqrt()  # [] float64
        # In as few passes over all parameters as it takes: there is a step every few events.
        spread = second.sqrt().add_((EPSILON * root).to(first.dtype))  # [p]
        step = (first * (rate * root / (1 - BETA1**steps)).to(first.dtype)).div_(spread)  # [p]
        return TrunkState((self.parameters * (1 - rate * decay)).sub_(step), first, second, steps)
