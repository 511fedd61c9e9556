"""LLAMA: lightweight Laplace approximation for meta-adaptation (Grant et al., 2018), of many tasks at once.

An initial θ is adapted to each task's samples; around the adapted θ̂ the task's parameters are N(θ̂, H⁻¹) with the
curvature H of `curvature.py`. Algorithm 2, by line:

    θ̂ = θ − α∇L(θ, D)                                `adapted`; `mode` goes to the maximum of Eq. 8's integrand instead
    H = ∇²(L(θ̂, D) + ½τ‖θ̂ − θ‖²)                     `laplace`, by Gauss-Newton
    θ ← θ − β∇_θ Σ L(θ̂, D') + η log det H             `objective`, `objective_gradient`
    in production: draw from N(θ̂, H⁻¹)                `Laplace.draws`; their predictions: `Laplace.predicted`

With η = ½, D' = D and the prior's density at θ̂ this is Eq. 8, the evidence: `log_evidence`. L is −log p(D|θ̂) with all
constants, so that noise and damping can be fitted too. For linear heads with Gaussian noise everything is exact.

Predictions record no graph; the meta-gradient does, because it differentiates through the adaptation.

Letters in shape comments: B tasks of S samples, N inputs, d inputs, C outputs, p parameters, n draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metaban.models.bayes.curvature import STRUCTURES, Curvature, Factors, Structure, output_factors, precisions
from metaban.models.numerics.dense_net import NetShape


class OutputLikelihood(ABC):
    """Distribution of targets given a network's outputs, which are independent of each other."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−log p of each number, [B, S, C]."""

    @abstractmethod
    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂output [B, S, C]."""

    @abstractmethod
    def curvature(self, outputs: Tensor) -> Tensor:
        """Λ = ∂²loss/∂output² [B, S, C], positive and independent of the target."""


@final
@dataclass(frozen=True, slots=True)
class GaussianOutputs(OutputLikelihood):
    """Targets normal around the output with variance σ² []."""

    noise: Tensor

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * ((outputs - targets).square() / self.noise + (2 * math.pi * self.noise).log())

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / self.noise

    def curvature(self, outputs: Tensor) -> Tensor:
        return torch.ones_like(outputs) / self.noise


@final
@dataclass(frozen=True, slots=True)
class BernoulliOutputs(OutputLikelihood):
    """Targets in [0, 1] with the output as log odds."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return softplus(outputs) - targets * outputs

    def slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid() - targets

    def curvature(self, outputs: Tensor) -> Tensor:
        chance = outputs.sigmoid()
        return chance * (1 - chance)


@final
@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Samples of B tasks, padded."""

    x: Tensor  # [B, S, d]
    targets: Tensor  # [B, S, C]
    weight: Tensor  # [B, S], sample weights; 0 for padding


def loss(shape: NetShape, nets: Tensor, batch: TaskBatch, likelihood: OutputLikelihood) -> Tensor:
    """−log p(D|θ) of each task: nets [B, p] → [B]."""
    outputs, _ = output_factors(shape, nets, batch.x)
    return (likelihood.loss(outputs, batch.targets) * batch.weight.unsqueeze(-1)).sum((1, 2))


def loss_gradient(shape: NetShape, nets: Tensor, batch: TaskBatch, likelihood: OutputLikelihood) -> Tensor:
    """∂loss/∂θ [B, p]."""
    return _loss_gradient(shape, *output_factors(shape, nets, batch.x), batch, likelihood)


def _loss_gradient(
    shape: NetShape, outputs: Tensor, factors: Factors, batch: TaskBatch, likelihood: OutputLikelihood
) -> Tensor:
    slope = (likelihood.slope(outputs, batch.targets) * batch.weight.unsqueeze(-1)).unsqueeze(-1)  # [B, S, C, 1]
    return shape.flat([(delta * slope).sum(2).mT @ a for delta, a in factors])


def adapted(
    shape: NetShape, start: Tensor, batch: TaskBatch, likelihood: OutputLikelihood, *, rate: float, steps: int
) -> Tensor:
    """Each task's parameters after gradient steps from the start [p] → [B, p] (Alg. 2); differentiable in the start."""
    nets = start.expand(batch.x.shape[0], -1)
    for _ in range(steps):
        nets = nets - rate * loss_gradient(shape, nets, batch, likelihood)
    return nets


@final
@dataclass(frozen=True, slots=True)
class Laplace:
    """N(θ̂, H⁻¹) of B tasks."""

    shape: NetShape
    point: Tensor  # [B, p]
    curvature: Curvature

    def predicted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean f(x; θ̂) and variance gᵀH⁻¹g of each output, with the network linearised in θ around θ̂.

        x [B, N, d] → both [B, N, C]; the variance excludes noise.
        """
        outputs, factors = output_factors(self.shape, self.point, x)
        return outputs, self.curvature.variance(factors)

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Parameters from N(θ̂, H⁻¹): [B, n, p]."""
        size = (self.point.shape[0], count, self.shape.parameters)
        noise = torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device)
        return self.point.unsqueeze(1) + self.curvature.spread(noise).to(self.point)


def laplace(
    shape: NetShape, nets: Tensor, batch: TaskBatch, likelihood: OutputLikelihood, structure: Structure, damping: Tensor
) -> Laplace:
    """The approximation at adapted parameters [B, p], from their samples and τ [] or [layers]."""
    outputs, factors = output_factors(shape, nets, batch.x)
    return Laplace(shape, nets, _curvature(shape, outputs, factors, batch, likelihood, structure, damping))


def _curvature(
    shape: NetShape,
    outputs: Tensor,
    factors: Factors,
    batch: TaskBatch,
    likelihood: OutputLikelihood,
    structure: Structure,
    damping: Tensor,
) -> Curvature:
    weight = likelihood.curvature(outputs) * batch.weight.unsqueeze(-1)  # [B, S, C]
    return STRUCTURES[structure].of(shape, factors, weight, damping)


def mode(
    shape: NetShape,
    start: Tensor,
    batch: TaskBatch,
    likelihood: OutputLikelihood,
    structure: Structure,
    damping: Tensor,
    *,
    steps: int = 1,
    rate: float = 1.0,
) -> Tensor:
    """The maximum of p(D|θ̂)·N(θ̂; θ, I/τ) by steps θ̂ ← θ̂ − rate·H⁻¹∇, from the start [p] → [B, p], float64.

    Parameters that the structure does not cover stay at the start. One step of rate 1 is exact where outputs are linear
    in the covered parameters and noise is GaussianOutputs: linear heads and last layers.
    """
    nets = start.double().expand(batch.x.shape[0], -1)
    for _ in range(steps):
        outputs, factors = output_factors(shape, nets, batch.x)
        away = nets - start
        pull = away @ damping if damping.dim() == 2 else precisions(shape, damping) * away  # [B, p]
        gradient = _loss_gradient(shape, outputs, factors, batch, likelihood) + pull
        curvature = _curvature(shape, outputs, factors, batch, likelihood, structure, damping)
        nets = nets - rate * curvature.solved(gradient)
    return nets


def objective(fitted: Laplace, query: TaskBatch, likelihood: OutputLikelihood, weight: float) -> Tensor:
    """−log p(D'|θ̂) + η log det H of each task [B], η the weight: the summand of Algorithm 2's meta-update."""
    return loss(fitted.shape, fitted.point, query, likelihood) + weight * fitted.curvature.log_det()


def objective_gradient(
    shape: NetShape,
    start: Tensor,
    batch: TaskBatch,
    query: TaskBatch,
    likelihood: OutputLikelihood,
    structure: Structure,
    damping: Tensor,
    *,
    weight: float,
    rate: float,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """`objective` of each task [B] after an adaptation of the start, and the gradient of their sum in the start [p].

    It differentiates through the adaptation and through H; the gradient of log det H needs H⁻¹ alone, so that equal
    eigenvalues of a Kronecker factor are no problem.
    """
    with torch.enable_grad():
        origin = start.detach().requires_grad_()
        nets = adapted(shape, origin, batch, likelihood, rate=rate, steps=steps)
        fitted = laplace(shape, nets, batch, likelihood, structure, damping)
        values = objective(fitted, query, likelihood, weight)
        (gradient,) = torch.autograd.grad(values.sum(), origin)
    return values.detach(), gradient


def log_evidence(
    fitted: Laplace, start: Tensor, batch: TaskBatch, likelihood: OutputLikelihood, damping: Tensor
) -> Tensor:
    """log p(D|θ) of each task by Eq. 8 [B], with the prior N(θ, I/τ) over the parameters that the curvature covers.

    2π cancels between the prior's density and the GaussianOutputs integral.
    """
    covered = fitted.curvature.covered  # the last ones
    precision, away = precisions(fitted.shape, damping)[-covered:], (fitted.point - start)[:, -covered:]
    prior = 0.5 * (precision.log() - precision * away.square()).sum(-1)  # [B]
    return prior - objective(fitted, batch, likelihood, 0.5)
