"""Aligns hidden units of separately trained networks without changing the functions they compute.

Networks that compute the same function may hold it in different units, so that averaging their parameters gives
something else. A ReLU network keeps its function when the units of a hidden layer are permuted (a unit's incoming row,
offset and outgoing column move together) and when a unit's incoming weights grow as its outgoing ones shrink. The scale
is fixed by a convention, the permutation by a linear sum assignment for each network and layer: unit u of network i
goes to the place v where the density of its parameters is highest (Eq. 28-33 of the supplement to *Model Fusion for
Personalized Learning*, whose permutations act on a latent vector instead).

Letters in shape comments: n networks, p parameters, S samples of densities, N inputs, o and k units of neighbouring
layers, u the places of units in a network and v those in the common order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from metaban.models.numerics.dense_net import NEGLIGIBLE, NetShape

#: Weight of outgoing weights (of norm one) relative to incoming ones in the first alignment, in standard deviations of
#: the input: units with opposite effects must not be matched.
OUTGOING_PULL = 8.0


@final
@dataclass(frozen=True, slots=True)
class Density:
    """Expected −2 log N(γ | m, v) of each parameter up to a constant, aγ² − 2bγ + c: each [n or 1, p]."""

    a: Tensor
    b: Tensor
    c: Tensor

    @classmethod
    def expected(cls, mean: Tensor, variance: Tensor) -> Density:
        """Over samples of means [S, n, p] and variances that broadcast with them."""
        variance = variance.expand_as(mean)
        precision = 1 / variance
        return cls(precision.mean(0), (mean * precision).mean(0), (mean.square() * precision + variance.log()).mean(0))

    def layers(self, shape: NetShape) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By layer, as `NetShape.layers`."""
        return list(zip(shape.layers(self.a), shape.layers(self.b), shape.layers(self.c), strict=True))


def permuted(shape: NetShape, nets: Tensor, orders: Mapping[int, Tensor]) -> Tensor:
    """The same functions with unit orders[l][i, v] of hidden layer l of network i moved to place v: nets [n, p]."""
    layers = shape.layers(nets)
    for place, order in orders.items():
        columns = shape.sizes[place + 1][1]
        layers[place] = torch.take_along_dim(layers[place], order[:, :, None], 1)
        outgoing = torch.take_along_dim(layers[place + 1][..., :columns], order[:, None, :], 2)
        layers[place + 1] = torch.cat([outgoing, layers[place + 1][..., columns:]], -1)
    return shape.flat(layers)


def assignment_costs(shape: NetShape, nets: Tensor, density: Density, place: int) -> Tensor:
    """−2 log-density of unit u of hidden layer `place` at place v (Eq. 33), for all networks: [n, p] → [n, u, v]."""
    layers, densities = shape.layers(nets), density.layers(shape)
    columns = shape.sizes[place + 1][1]
    incoming = layers[place]  # [n, u, k]
    outgoing = layers[place + 1][..., :columns].mT  # [n, u, o]
    units = torch.cat([incoming, outgoing], -1)
    a, b, c = (
        torch.cat([here, there[..., :columns].mT], -1)
        for here, there in zip(densities[place], densities[place + 1], strict=True)
    )  # [n or 1, v, k + o]
    return units.square() @ a.mT - 2 * units @ b.mT + c.sum(-1)[:, None, :]


def best_orders(costs: Tensor) -> Tensor:
    """The assignment of least cost for each network: [n, u, v] → the unit at each place [n, v]."""
    found = np.stack([linear_sum_assignment(cost)[1] for cost in costs.mT.double().cpu().numpy()])
    return torch.from_numpy(found).to(costs.device)


def aligned(shape: NetShape, nets: Tensor, density: Density, sweeps: int = 1) -> Tensor:
    """Networks with hidden units permuted to the highest expected log-density (Eq. 33): [n, p].

    One layer at a time; with several hidden layers more sweeps may improve it.
    """
    for _ in range(sweeps):
        for place in range(len(shape.sizes) - 1):
            nets = permuted(shape, nets, {place: best_orders(assignment_costs(shape, nets, density, place))})
    return nets


def first_alignment(
    shape: NetShape, nets: Tensor, profiles: Tensor, inputs: Tensor | None = None, rounds: tuple[int, int] = (3, 3)
) -> Tensor:
    """A common order before there is a model: aligned to one network, then to running means, then to means of networks
    with similar profiles.

    Nets [n, p] have outgoing weights of norm 1 (`rescaled`), profiles [n, d] are standardised, and inputs [N, …] weigh
    the columns; without them all inputs count as 1.
    """
    if len(shape.sizes) < 2 or len(nets) < 2:
        return nets
    variance = contribution_variances(shape, nets, inputs)
    distances = torch.cdist(profiles, profiles).square()
    near = torch.softmax(-distances / (0.1 * distances.mean()).clamp_min(NEGLIGIBLE), -1)  # [n, n]
    everywhere, nearby = rounds
    mean = nets[:1]
    for step in range(everywhere + nearby):
        nets = aligned(shape, nets, Density.expected(mean[None], variance))
        mean = nets.mean(0, keepdim=True) if step < everywhere - 1 else near @ nets
    return nets


def contribution_variances(shape: NetShape, nets: Tensor, inputs: Tensor | None) -> Tensor:
    """Variances [p] that weigh parameters by their effect on the outputs, the same for all units of a layer.

    Fitted variances would attract unusual units to wide places and weigh parameters by their variation instead of their
    effect; networks aligned that way average badly.
    """
    found: list[Tensor] = []
    layers = shape.layers(nets)
    for place, layer in enumerate(layers):
        precision = torch.ones_like(layer[0])  # [o, k]
        columns = shape.sizes[place][1]
        if place:
            power = (layers[place - 1].square() * found[-1]).sum(-1).mean()
            precision[:, :columns] = OUTGOING_PULL**2 * power.clamp_min(NEGLIGIBLE)
        elif inputs is not None:
            precision[:, :columns] = inputs.square().mean(0).clamp_min(NEGLIGIBLE)
        found.append(precision)
    return 1 / shape.flat(found)
