"""Sine tasks y = a sin(x + b), networks trained on one task each, and ways to start on a new task.

All networks of a kind train at once, as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from metaban.bench.worlds.data import sine_nets
from metaban.models.numerics.dense_net import NetShape

SHAPE: Final = NetShape((1, 100, 1))

LOW, HIGH, POINTS = -5.0, 5.0, 200

#: Amplitudes and phase of each band (Table 5); amplitudes are at least 0.1, as in the authors' tasks, since errors are
#: relative to them.
BANDS: Final = (
    ((4.0, 5.0), 2.94),
    ((3.0, 4.0), 2.44),
    ((2.0, 3.0), 1.50),
    ((1.0, 2.0), 0.91),
    ((0.1, 1.0), 0.91),
)

#: Sources per band in the sparse protocol, and targets in each gap between two.
SPARSE_SOURCES, SPARSE_TARGETS = 5, 4

#: Adaptation steps on a few points, and the candidates (optimiser, rate).
ADAPT_STEPS: Final = 100
ADAPT_WITH: Final = (("sgd", 1e-3), ("sgd", 1e-2), ("adam", 1e-4), ("adam", 1e-3), ("adam", 3e-3), ("adam", 1e-2))


@final
@dataclass(frozen=True, slots=True)
class SineTasks:
    """Sources with their networks, and targets: (a, b) of each, and the band of each target."""

    sources: Tensor
    nets: Tensor
    targets: Tensor
    bands: Tensor


def grid() -> Tensor:
    """Inputs at which errors are measured: [200, 1]."""
    return torch.linspace(LOW, HIGH, POINTS)[:, None]


def output_inputs() -> Tensor:
    """Inputs at which fusion compares the outputs of sources: [32, 1]."""
    return torch.linspace(LOW, HIGH, 32)[:, None]


def sine(tasks: Tensor, x: Tensor) -> Tensor:
    """Tasks [n, 2] at inputs x [N, 1] or [n, N, 1] → [n, N]."""
    return tasks[:, :1] * torch.sin(x.squeeze(-1) + tasks[:, 1:])


def error(nets: Tensor, tasks: Tensor) -> Tensor:
    """RMSE over the grid divided by the range (max − min) of the target: nets [n, p] → [n]."""
    truth = sine(tasks, grid())
    said = SHAPE.outputs(nets, grid()).squeeze(-1)
    return (said - truth).square().mean(-1).sqrt() / (truth.amax(-1) - truth.amin(-1))


def fresh_nets(count: int, generator: torch.Generator) -> Tensor:
    """Untrained networks, each with its own initialisation: kinks across the range, a small last layer."""
    width = SHAPE.widths[1]
    weight = torch.randn(count, width, generator=generator)
    kink = torch.rand(count, width, generator=generator) * (HIGH - LOW) + LOW
    outgoing = torch.randn(count, width, generator=generator) / width
    return torch.cat([weight, -weight * kink, outgoing, torch.zeros(count, 1)], 1)


def trained_nets(tasks: Tensor, generator: torch.Generator, steps: int = 1_500) -> Tensor:
    """One network per task, each from its own initialisation, by Adam on the whole grid."""
    nets = fresh_nets(len(tasks), generator)
    x = grid()
    return _descend(nets, x, sine(tasks, x), "adam", 1e-2, steps, cosine=True)


def adapted(nets: Tensor, x: Tensor, y: Tensor, optimiser: str, rate: float) -> Tensor:
    """Each network after some steps on its own few points: x [n, K, 1], y [n, K]."""
    return _descend(nets, x, y, optimiser, rate, ADAPT_STEPS)


def _descend(
    nets: Tensor, x: Tensor, y: Tensor, optimiser: str, rate: float, steps: int, *, cosine: bool = False
) -> Tensor:
    """Steps on the squared error of each network separately."""
    theta = nets.clone().requires_grad_()
    kind = torch.optim.Adam if optimiser == "adam" else torch.optim.SGD
    descent = kind([theta], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(descent, steps) if cosine else None
    for _ in range(steps):
        descent.zero_grad(set_to_none=True)
        _losses(theta, x, y).sum().backward()  # type: ignore[no-untyped-call]
        descent.step()
        if schedule is not None:
            schedule.step()
    return theta.detach()


def _losses(nets: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each network: x [N, 1] shared or [n, N, 1] → [n]."""
    return (_outputs(nets, x) - y).square().mean(-1)


def _outputs(nets: Tensor, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return SHAPE.outputs(nets, x).squeeze(-1)
    first, second = SHAPE.layers(nets)
    hidden = (first[:, None, :, 0] * x + first[:, None, :, 1]).relu()  # [n, N, m]
    return (hidden @ second[:, 0, :-1, None]).squeeze(-1) + second[:, 0, -1:]


def paper_tasks(seed: int, folder: Path | None, size: int | None = None) -> SineTasks:
    """800 of the authors' 1,000 networks as sources and the tasks of the others as targets."""
    known = sine_nets(folder)
    tasks, nets = torch.from_numpy(known[0]), torch.from_numpy(known[1])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(tasks)))
    cut = len(order) * 4 // 5
    targets = tasks[order[cut:]]
    phases = torch.unique((tasks[:, 1] * 100).round(), sorted=True).flip(0)
    bands = ((targets[:, 1:] * 100).round() == phases).int().argmax(1)
    kept = order[:cut][:size]
    return SineTasks(tasks[kept], nets[kept], targets[:size], bands[:size])


def sparse_tasks(seed: int, steps: int) -> SineTasks:
    """Five sources a band, one in each fifth of it, and targets in the middle of the gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    sources, targets, bands = [], [], []
    for band, ((low, high), phase) in enumerate(BANDS):
        jitter = 0.4 * (torch.rand(SPARSE_SOURCES, generator=generator) - 0.5)
        known = low + (high - low) * (torch.arange(SPARSE_SOURCES) + 0.5 + jitter) / SPARSE_SOURCES
        share = 0.35 + 0.3 * torch.rand(SPARSE_TARGETS, SPARSE_SOURCES - 1, generator=generator)
        held = (known[:-1] + share * known.diff()).flatten()
        sources.append(torch.stack([known, torch.full_like(known, phase)], 1))
        targets.append(torch.stack([held, torch.full_like(held, phase)], 1))
        bands.append(torch.full((len(held),), band))
    known = torch.cat(sources)
    return SineTasks(known, trained_nets(known, generator, steps), torch.cat(targets), torch.cat(bands))


def few_points(tasks: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of each task: x [n, count, 1], y [n, count]."""
    x = torch.rand(len(tasks), count, 1, generator=generator) * (HIGH - LOW) + LOW
    return x, sine(tasks, x)


def maml(tasks: Tensor, generator: torch.Generator, steps: int) -> Tensor:
    """MAML (Finn et al., 2017): one network that is good after a step on ten points, trained on the sources' tasks: [1,
    p].
    """

    def outer(theta: Tensor, chosen: Tensor) -> Tensor:
        x, y = few_points(chosen, 10, generator)
        copies = theta.expand(len(chosen), -1)
        (slope,) = torch.autograd.grad(_losses(copies, x, y).sum(), copies, create_graph=True)
        x, y = few_points(chosen, 10, generator)
        return _losses(copies - 0.01 * slope.clamp(-10, 10), x, y).mean()

    return _meta_trained(tasks, generator, steps, outer)


def reptile(tasks: Tensor, generator: torch.Generator, steps: int) -> Tensor:
    """Reptile (Nichol et al., 2018): one network near those of all tasks, trained on the sources' tasks: [1, p]."""

    def outer(theta: Tensor, chosen: Tensor) -> Tensor:
        x, y = few_points(chosen, 10, generator)
        found = _descend(theta.detach().expand(len(chosen), -1), x, y, "adam", 1e-3, 8)
        return 0.5 * (theta - found).square().sum(-1).mean()  # its gradient is Reptile's step

    return _meta_trained(tasks, generator, steps // 4, outer)


def _meta_trained(
    tasks: Tensor, generator: torch.Generator, steps: int, outer: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    theta = fresh_nets(1, generator).requires_grad_()
    descent = torch.optim.Adam([theta], lr=1e-3)
    for _ in range(steps):
        chosen = tasks[torch.randint(len(tasks), (25,), generator=generator)]
        descent.zero_grad(set_to_none=True)
        outer(theta, chosen).backward()  # type: ignore[no-untyped-call]
        descent.step()
    return theta.detach()


def ridge_nets(profiles: Tensor, nets: Tensor, targets: Tensor) -> Tensor:
    """Ridge regression from profiles to parameters, its penalty chosen by leave-one-out errors: [n, p]."""
    centre, scale = profiles.mean(0), profiles.std(0)
    design = torch.cat([torch.ones_like(profiles[:, :1]), (profiles - centre) / scale], 1).double()
    wanted = torch.cat([torch.ones_like(targets[:, :1]), (targets - centre) / scale], 1).double()
    y = nets.double()
    best, chosen = math.inf, y.mean(0).expand(len(targets), -1)
    for strength in (1e-4, 1e-2, 1.0, 10.0, 100.0, 1_000.0):
        penalty = strength * torch.eye(design.shape[1], dtype=torch.float64)
        penalty[0, 0] = 0
        solved = torch.linalg.solve(design.mT @ design + penalty, design.mT)  # [d + 1, n]
        leverage = (design * solved.mT).sum(-1, keepdim=True)
        left_out = float((((y - design @ (solved @ y)) / (1 - leverage)) ** 2).sum())
        if left_out < best:
            best, chosen = left_out, wanted @ (solved @ y)
    return chosen.to(nets.dtype)
