"""Sine tasks of Section 5.1 of GEM-BML, and MAML on them, for several seeds at once.

Letters in shape comments: G runs (seeds or candidate rates), T tasks, K points, p parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.bayes.inference import NetLikelihood
from metaban.models.numerics.dense_net import NetShape

SHAPE: Final = NetShape((1, 40, 40, 1))

LOW, HIGH = -5.0, 5.0

SHOTS: Final = 10

#: Gradients of MAML's and Reptile's inner steps are clipped here, as in the authors' code of MAML.
CUT: Final = 10.0


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """Ranges of y = A sin(wx + b) + noise·A·ε."""

    name: str
    phases: tuple[float, float]
    frequencies: tuple[float, float]
    noise: float
    amplitudes: tuple[float, float] = (0.1, 5.0)


#: The ranges of MAML's paper, and wider ones with noise.
SETTINGS: Final = (
    Setting("default", (0.0, math.pi), (1.0, 1.0), 0.0),
    Setting("challenging", (0.0, 2 * math.pi), (0.5, 2.0), 0.01),
)


@final
@dataclass(frozen=True, slots=True)
class SineBatch:
    """Points of tasks to adapt to and to evaluate on: x [..., T, K, 1], y [..., T, K]."""

    x: Tensor
    y: Tensor
    other_x: Tensor
    other_y: Tensor


def draw(setting: Setting, generator: torch.Generator, size: Sequence[int], others: int = SHOTS) -> SineBatch:
    """Tasks [*size] with ten points each, and other points of the same tasks."""

    def uniform(low: float, high: float, shape: Sequence[int]) -> Tensor:
        return torch.rand(*shape, generator=generator) * (high - low) + low

    amplitude = uniform(*setting.amplitudes, (*size, 1))  # [..., T, 1]
    phase = uniform(*setting.phases, (*size, 1))
    frequency = uniform(*setting.frequencies, (*size, 1))
    x = uniform(LOW, HIGH, (*size, SHOTS + others))  # [..., T, K + others]
    y = amplitude * torch.sin(frequency * x + phase)
    y = y + setting.noise * amplitude * torch.randn(y.shape, generator=generator)
    x = x[..., None]
    return SineBatch(x[..., :SHOTS, :], y[..., :SHOTS], x[..., SHOTS:, :], y[..., SHOTS:])


def fresh_net(generator: torch.Generator) -> Tensor:
    """An untrained network with torch's default initialisation: [p]."""
    layers = []
    for rows, columns in SHAPE.sizes:
        bound = columns**-0.5
        layers.append((torch.rand(rows, columns + 1, generator=generator) * 2 - 1) * bound)
    return SHAPE.flat(layers)


def errors(nets: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each network on its own points: [..., p] → [...]."""
    return NetLikelihood(SHAPE, x, y, y.shape[-1] / -2).at(nets)


def adapt(nets: Tensor, batch: SineBatch, rate: float | Tensor, steps: int, *, graph: bool = False) -> Tensor:
    """Gradient descent on each task's mean squared error; keeps the graph for MAML: [..., T, p]."""
    for _ in range(steps):
        nets = nets if graph else nets.detach().requires_grad_()
        (slope,) = torch.autograd.grad(errors(nets, batch.x, batch.y).sum(), nets, create_graph=graph)
        nets = nets - rate * slope.clamp(-CUT, CUT)
    return nets if graph else nets.detach()


def maml_gradient(theta: Tensor, batch: SineBatch, rate: float | Tensor, steps: int) -> Tensor:
    """Gradient of the error after adaptation in the start network, through all steps (Finn et al., 2017): [..., p]."""
    theta = theta.detach().requires_grad_()
    tasks = batch.x.shape[-3]
    start = theta.unsqueeze(-2).expand(*theta.shape[:-1], tasks, theta.shape[-1])
    found = adapt(start, batch, rate, steps, graph=True)
    loss = errors(found, batch.other_x, batch.other_y).mean(-1).sum()
    (slope,) = torch.autograd.grad(loss, theta)
    return slope
