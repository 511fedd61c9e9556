"""The trainable modules of model fusion and their evidence lower bound.

Parameterised as in A.2 of the supplement; `model.py` describes the model. The bound, Eq. 27 with q(w∅; ω) and
q(s), by reparameterised samples:

    L = E_q Σ_i [λ log N(γ_i | m_i, v_i) + log N(f(x; γ_i) | f(x; m_i), s²)] − KL(q(w∅) ‖ p(w∅)) − KL(q(s) ‖ p(s))

The second likelihood, of the networks' outputs at some inputs x, is an addition to the paper: the mean of networks with
equal outputs has different outputs, however well their units are aligned. Without inputs it is omitted and λ = 1, which
is the published bound.

Letters in shape comments: n networks, p parameters, d profile coordinates, S samples, e processes, N inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from metaban.models.fusion.gp import ProfileProcesses
from metaban.models.numerics.dense_net import NetShape

#: Sizes of A.2: w∅ and w, the noise of the prior of w∅, and the hidden layers.
BASE, TASK, NOISE, WARP, CROSS, LATENT = 100, 100, 100, 256, 64, 32

#: Noise draws for one estimate of the divergence from p(w∅; α).
NOISE_DRAWS = 16

#: Largest change of a parameter's log-variance by the profile.
VARIANCE_RANGE = 1.0

#: Initial standard deviation of q(w∅).
FIRST_DEVIATION = 0.1

#: Least output noise, relative to the variation of a network's outputs.
LEAST_OUTPUT_NOISE = 0.003


@final
@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Sources: standardised profiles [n, d], networks [n, p], weights [n], and their outputs [n, N, o] if used."""

    profiles: Tensor
    nets: Tensor
    weights: Tensor
    outputs: Tensor | None
    output_scale: Tensor | None
    #: Weights of the parameters' likelihoods [n]; 1 if None.
    held: Tensor | None = None

    def rows(self, index: Tensor) -> SourceBatch:
        """Some of the sources."""
        return SourceBatch(
            self.profiles[index],
            self.nets[index],
            self.weights[index],
            None if self.outputs is None else self.outputs[index],
            None if self.output_scale is None else self.output_scale[index],
        )

    def between(self, other: SourceBatch, share: Tensor) -> SourceBatch:
        """Interpolation towards other sources, row by row: `share` 1 is this batch, 0 is the other.

        If outputs are used, parameters count for uninterpolated sources only: the network halfway between two networks
        does not compute the mean of their outputs.
        """

        def mixed(here: Tensor, there: Tensor) -> Tensor:
            return there + (here - there) * share.view(-1, *[1] * (here.dim() - 1))

        return SourceBatch(
            mixed(self.profiles, other.profiles),
            mixed(self.nets, other.nets),
            mixed(self.weights, other.weights),
            None if self.outputs is None or other.outputs is None else mixed(self.outputs, other.outputs),
            None
            if self.output_scale is None or other.output_scale is None
            else mixed(self.output_scale, other.output_scale),
            None if self.outputs is None else (share == 1).to(share),
        )


@final
class BaseModule(nn.Module):
    """q(w∅; ω) = N(ω), and the deep generative prior p(w∅; α) = E_ε N(mean(ε), variance(ε))."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(BASE))
        self.log_deviation = nn.Parameter(torch.full((BASE,), math.log(FIRST_DEVIATION)))
        self.prior_mean = nn.Linear(NOISE, BASE)
        self.prior_variance = nn.Linear(NOISE, BASE)

    def draw(self, noise: Tensor) -> Tensor:
        """w∅ from standard normal noise [S, BASE]."""
        return self.mean + self.log_deviation.exp() * noise

    def divergence(self, noise: Tensor) -> Tensor:
        """E_ε KL(q(w∅) ‖ N(mean(ε), variance(ε))) ≥ KL(q ‖ p), from noise [NOISE_DRAWS, NOISE].

        KL is convex in its second argument, so this is still a bound. The variance is the exponential of A.2's
        normalised output, which itself may be negative.
        """
        mean, bent = self.prior_mean(noise), self.prior_variance(noise).tanh()
        log_variance = (bent - bent.mean(0)) / (bent.var(0, unbiased=False) + 1e-5).sqrt()
        own = 2 * self.log_deviation
        terms = log_variance - own + (own.exp() + (self.mean - mean).square()) / log_variance.exp() - 1
        found: Tensor = 0.5 * terms.sum(-1).mean()
        return found


@final
class CrossingModule(nn.Module):
    """Mean and variance of γ from [w∅, w]: shared layers and one output layer each.

    Parameters of one class (`NetShape.kinds`) share a variance. With separate variances some places of the common order
    would become wide and attract every unusual unit.
    """

    def __init__(self, centre: Tensor, scale: Tensor, kinds: Tensor, least_variance: float) -> None:
        super().__init__()
        count = int(kinds.max()) + 1
        self.first = nn.Linear(BASE + TASK, CROSS)
        self.second = nn.Linear(CROSS, LATENT)
        self.mean = nn.Linear(LATENT, len(centre))
        self.variance = nn.Linear(LATENT, count, bias=False)
        self.free_variance = nn.Parameter(torch.zeros(count))
        self.least_variance = least_variance
        self.register_buffer("centre", centre)
        self.register_buffer("scale", scale)
        self.register_buffer("kinds", kinds)
        self.centre: Tensor
        self.scale: Tensor
        self.kinds: Tensor
        nn.init.zeros_(self.variance.weight)

    def variance_offset(self) -> Tensor:
        """Log-variance of each class of parameters, in its own scale, before the profile's change."""
        return (self.free_variance.exp() + self.least_variance).log()

    def forward(self, base: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
        """w∅ [S, 1, BASE] and w [S, n, TASK] → mean and variance, each [S, n, p]."""
        weight, offset = self.first.weight, self.first.bias
        hidden = base @ weight[:, :BASE].mT + task @ weight[:, BASE:].mT + offset
        latent = self.second(hidden.relu()).relu()
        bent = (self.variance(latent).tanh() * VARIANCE_RANGE + self.variance_offset())[..., self.kinds]
        return self.centre + self.scale * self.mean(latent), bent.exp() * self.scale.square()


@final
class FusionModules(nn.Module):
    """All trainable parts."""

    def __init__(
        self, shape: NetShape, processes: ProfileProcesses, crossing: CrossingModule, parameter_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.shape = shape
        self.parameter_weight = parameter_weight
        self.base = BaseModule()
        self.processes = processes
        self.warp_1 = nn.Linear(processes.count, WARP)
        self.warp_2 = nn.Linear(WARP, TASK)
        self.crossing = crossing
        self.log_output_noise = nn.Parameter(torch.tensor(math.log(0.5)))

    def draw(self, profiles: Tensor, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """m and v under reparameterised draws of w∅ and g: profiles [n, d] → each [S, n, p]."""
        where, spread = self.processes.marginals(profiles)
        base = self.base.draw(_normal((samples, 1, BASE), generator, where))
        drawn = where + spread.clamp_min(1e-10).sqrt() * _normal((samples, *where.shape), generator, where)
        found: tuple[Tensor, Tensor] = self.crossing(base, self.warp_2(self.warp_1(drawn).tanh()))
        return found

    def likelihoods(self, batch: SourceBatch, mean: Tensor, variance: Tensor, inputs: Tensor | None) -> Tensor:
        """Expected log-likelihood of each source (Eq. 27), from samples [S, n, p] → [n]."""
        terms = (batch.nets - mean).square() / variance + (2 * math.pi * variance).log()
        found = -0.5 * self.parameter_weight * terms.sum(-1).mean(0)
        if batch.held is not None:
            found = found * batch.held
        if inputs is not None and batch.outputs is not None and batch.output_scale is not None:
            noise = self.log_output_noise.exp() + LEAST_OUTPUT_NOISE
            errors = (self.shape.outputs(mean, inputs) - batch.outputs) / batch.output_scale[:, None, None]
            terms = (errors / noise).square() + 2 * noise.log() + math.log(2 * math.pi)
            found = found - 0.5 * terms.flatten(-2).sum(-1).mean(0)
        return found

    def bound(
        self, batch: SourceBatch, total: float, samples: int, generator: torch.Generator, inputs: Tensor | None
    ) -> Tensor:
        """An unbiased estimate of L over all sources, whose weights sum to `total`, from a batch."""
        mean, variance = self.draw(batch.profiles, samples, generator)
        found = self.likelihoods(batch, mean, variance, inputs)
        likelihood = total * (found * batch.weights).sum() / batch.weights.sum()
        noise = _normal((NOISE_DRAWS, NOISE), generator, mean)
        return likelihood - self.base.divergence(noise) - self.processes.divergence()

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `FusionState`."""
        warp_1, warp_2, crossing = self.warp_1, self.warp_2, self.crossing
        return {
            **self.processes.tensors(),
            "warp_1": warp_1.weight, "warp_1_offset": warp_1.bias,
            "warp_2": warp_2.weight, "warp_2_offset": warp_2.bias,
            "base_mean": self.base.mean, "base_deviation": self.base.log_deviation.exp(),
            "cross_base": crossing.first.weight[:, :BASE], "cross_task": crossing.first.weight[:, BASE:],
            "cross_offset": crossing.first.bias,
            "cross_2": crossing.second.weight, "cross_2_offset": crossing.second.bias,
            "mean": crossing.mean.weight, "mean_offset": crossing.mean.bias,
            "variance": crossing.variance.weight[crossing.kinds],
            "variance_offset": crossing.variance_offset()[crossing.kinds],
            "variance_range": torch.full((), VARIANCE_RANGE).to(crossing.centre),
            "centre": crossing.centre, "scale": crossing.scale,
        }  # fmt: skip


def _normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(like)
