"""The shared networks of the default learner: an ensemble of ReLU MLPs in one flat vector, trained by AdamW.

Members are trained on the same replayed samples from different initial weights, and the trunk's prediction is their
mean, which cancels part of their errors where data is scarce (Lakshminarayanan et al., "Simple and Scalable Predictive
Uncertainty Estimation using Deep Ensembles", 2017).

Forward and backward pass are written out. The vector and the optimiser's moments are stored with every epoch, so that
the next epoch continues exactly from there in any process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

#: AdamW's usual constants (Loshchilov and Hutter, 2019).
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

#: Scale of the last layer's initial weights: an untrained trunk should predict little.
OUTPUT_SCALE = 0.1


@final
@dataclass(frozen=True, slots=True)
class Trunk:
    """Inputs → `depth` hidden layers of `width` units → one prediction, for each of `members` networks."""

    inputs: int
    width: int
    depth: int
    members: int = 1

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each layer of a member."""
        widths = [self.inputs, *[self.width] * self.depth, 1]
        return [(after, before) for before, after in pairwise(widths)]

    @property
    def parameters(self) -> int:
        """Length of the flat vector."""
        return self.members * sum(rows * (columns + 1) for rows, columns in self.sizes)

    def initial(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Uniform weights in ±1/√inputs of their layer, a small last layer."""
        parts = []
        for place, (rows, columns) in enumerate(self.sizes):
            last, count = place == len(self.sizes) - 1, self.members * rows * (columns + 1)
            layer = (torch.rand(count, generator=generator, dtype=dtype) * 2 - 1) / math.sqrt(columns)
            parts.append(layer * OUTPUT_SCALE if last else layer)
        return torch.cat(parts)

    def layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights [members, rows, columns] and offsets [members, rows] of each layer, as views."""
        found, start = [], 0
        for rows, columns in self.sizes:
            middle = start + self.members * rows * columns
            end = middle + self.members * rows
            found.append((flat[start:middle].view(-1, rows, columns), flat[middle:end].view(-1, rows)))
            start = end
        return found

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """f(x), the mean of all members: x [n, inputs] → [n]."""
        return self._activations(flat, x)[-1].mean(0).squeeze(-1)

    def gradient(self, flat: Tensor, x: Tensor, rewards: Tensor) -> Tensor:
        """∇ Σ_m mean (f_m(x) − r)² over members m [p]: x [n, inputs], rewards [n]."""
        held = self._activations(flat, x)
        delta = (held[-1] - rewards.unsqueeze(-1)) * (2 / x.shape[0])  # [members, n, 1]
        parts: list[Tensor] = []
        for place, (weight, _) in reversed(list(enumerate(self.layers(flat)))):
            parts.append(delta.sum(1).flatten())
            if place:
                parts.append((delta.mT @ held[place]).flatten())
                # The sign of a rectified value is 1 for an active unit, and the cheapest float mask.
                delta = (delta @ weight).mul_(held[place].sign())  # [members, n, columns]
            else:  # all members see the same inputs: one product
                parts.append((delta.transpose(1, 2).flatten(0, 1) @ x).flatten())
        return torch.cat(parts[::-1])

    def _activations(self, flat: Tensor, x: Tensor) -> list[Tensor]:
        """The input of each layer, and the output: [n, inputs], then [members, n, …]."""
        (first, offset), *rest = self.layers(flat)
        seen = torch.addmm(offset.flatten(), x, first.flatten(0, 1).mT)  # [n, members·width]
        held = [x, seen.view(x.shape[0], self.members, -1).transpose(0, 1).relu()]
        for place, (weight, offset) in enumerate(rest, 1):
            y = torch.baddbmm(offset.unsqueeze(1), held[-1], weight.mT)
            held.append(y if place == len(rest) else y.relu_())
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
        """From an epoch's shared state."""
        return cls(shared["trunk"], shared["trunk_first"], shared["trunk_second"], shared["trunk_steps"])

    def state(self) -> dict[str, Tensor]:
        """The shared state of the trunk."""
        moments = {"trunk_first": self.first, "trunk_second": self.second, "trunk_steps": self.steps}
        return {"trunk": self.parameters, **moments}

    def after(self, gradient: Tensor, rate: float, decay: float) -> TrunkState:
        """One step of AdamW."""
        steps = self.steps + 1
        first = self.first.lerp(gradient, 1 - BETA1)
        second = (self.second * BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = (1 - BETA2**steps).sqrt()  # [] float64
        # In as few passes over the parameters as possible: there is a step every few events.
        spread = second.sqrt().add_((EPSILON * root).to(first.dtype))  # [p]
        step = (first * (rate * root / (1 - BETA1**steps)).to(first.dtype)).div_(spread)  # [p]
        return TrunkState((self.parameters * (1 - rate * decay)).sub_(step), first, second, steps)
