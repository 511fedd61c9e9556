"""Posteriors of many tasks at once by variational inference: the subroutine VI of GEM-BML's Algorithm 1.

q(θ; λ) = N(m, diag v) starts at the prior and ascends the evidence lower bound

    ELBO(λ; Θ) = E_q log p(D|θ) − KL(q ‖ p(θ; Θ))                                              (Section 3.1)

by reparameterised gradient steps. No graph is kept between steps, so memory does not grow with their number. Letters in
shape comments: p parameters, N points of a task, o units of a layer, k of the one before; `...` are tasks, and further
stacked dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from metaban.models.numerics.dense_net import NetShape

#: Adam's decays, and the term that keeps its division finite.
ADAM_DECAYS = (0.9, 0.999)
ADAM_LEAST = 1e-8

#: Least variance of a unit's input under local reparameterisation; the root has no derivative at 0.
LEAST_VARIANCE = 1e-12


@final
@dataclass(frozen=True, slots=True)
class Gaussian:
    """N(mean, diag variance), both [..., p]; variance 0 is a point estimate."""

    mean: Tensor
    variance: Tensor

    def draws(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """θ = m + √v·ε: [count, ..., p]."""
        noise = torch.empty((count, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.variance.sqrt() * noise.normal_(generator=generator)

    def log_density(self, theta: Tensor) -> Tensor:
        """log N(θ; mean, variance) without its constant: [..., p] → [...]."""
        return -0.5 * ((theta - self.mean).square() / self.variance + self.variance.log()).sum(-1)

    def divergence(self, other: Gaussian) -> Tensor:
        """KL(self ‖ other): [...]."""
        ratio = self.variance / other.variance  # [..., p]
        away = (self.mean - other.mean).square() / other.variance  # [..., p]
        return 0.5 * (ratio - 1 - ratio.log() + away).sum(-1)

    def for_tasks(self, count: int) -> Gaussian:
        """The same for each of `count` tasks: [..., count, p]."""
        wide = (*self.mean.shape[:-1], count, self.mean.shape[-1])
        return Gaussian(self.mean.unsqueeze(-2).expand(wide), self.variance.unsqueeze(-2).expand(wide))


class Likelihood(ABC):
    """log p(D|θ) of the data of many tasks."""

    @property
    @abstractmethod
    def tasks(self) -> int:
        """Number of tasks, the last of the stacked dimensions."""

    @abstractmethod
    def at(self, theta: Tensor) -> Tensor:
        """log p(D|θ) of each task: [..., p] → [...]."""

    def slopes(self, mean: Tensor, sd: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Unbiased gradients of E_q log p(D|θ) in mean and deviation, by one draw θ = m + √v·ε per task: [..., p]."""
        noise = torch.empty_like(mean).normal_(generator=generator)  # [..., p]
        slope = self.slope(torch.addcmul(mean, sd, noise))
        return slope, noise.mul_(slope)

    def slope(self, theta: Tensor) -> Tensor:
        """The gradient of `at`: [..., p]."""
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.at(theta).sum(), theta)
        return slope


@final
@dataclass(frozen=True, slots=True)
class AnyLikelihood(Likelihood):
    """Any function of the stacked parameters of `count` tasks."""

    count: int
    log_likelihood: Callable[[Tensor], Tensor]

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.count

    def at(self, theta: Tensor) -> Tensor:
        """log p(D|θ) of each task."""
        return self.log_likelihood(theta)


@final
@dataclass(frozen=True, slots=True)
class NetLikelihood(Likelihood):
    """Networks of one output with normal errors of variance `noise`: x [..., N, inputs], y [..., N].

    `local` draws unit inputs for each point instead of weights for all points: less variance, half as much more work.
    """

    shape: NetShape
    x: Tensor
    y: Tensor
    noise: float
    local: bool = True

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.x.shape[-3]

    def at(self, theta: Tensor) -> Tensor:
        """−Σ(f − y)²/2σ², without its constant."""
        hidden = self.x  # [..., N, k]
        for place, (weight, offset) in enumerate(self.shape.pairs(theta)):
            hidden = _plus(hidden.relu() if place else hidden, weight, offset)
        return (hidden.squeeze(-1) - self.y).square().sum(-1) / (-2 * self.noise)

    def slope(self, theta: Tensor) -> Tensor:
        """The gradient of `at`, written out without a graph."""
        layers = self.shape.pairs(theta)
        inputs, hidden = [], self.x  # [..., N, k]
        for place, (weight, offset) in enumerate(layers):
            inputs.append(hidden.relu_() if place else hidden)
            hidden = _plus(inputs[-1], weight, offset)
        back = (
            (self.y - hidden.squeeze(-1)).div_(self.noise).unsqueeze(-1)
        )  # [..., N, o], gradient at a layer's outputs
        found: list[Tensor] = []
        for place in range(len(layers) - 1, -1, -1):
            found = self._parts(back, inputs[place]) + found
            if place:
                back = (back @ layers[place][0]).mul_(inputs[place] > 0)
        return torch.cat(found, -1)

    def slopes(self, mean: Tensor, sd: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """By local reparameterisation: a unit's input is Σ m_k h_k + √(Σ v_k h_k²)·ε (Kingma et al., 2015)."""
        if not self.local:
            return Likelihood.slopes(self, mean, sd, generator)
        centres, spreads = self.shape.pairs(mean), self.shape.pairs(sd.square())
        inputs, squares, shares, hidden = [], [], [], self.x
        for place, (centre, spread) in enumerate(zip(centres, spreads, strict=True)):
            inputs.append(hidden.relu_() if place else hidden)  # [..., N, k]
            squares.append(inputs[-1].square())
            root = _plus(squares[-1], *spread).clamp_min_(LEAST_VARIANCE).sqrt_()  # [..., N, o]
            noise = torch.empty_like(root).normal_(generator=generator)
            hidden = _plus(inputs[-1], *centre).addcmul_(root, noise)
            shares.append(noise.div_(root))  # twice dε√v/dv
        back = (self.y - hidden.squeeze(-1)).div_(self.noise).unsqueeze(-1)
        found: list[Tensor] = []
        found_sd: list[Tensor] = []
        for place in range(len(centres) - 1, -1, -1):
            spreading = back * shares[place]  # [..., N, o], twice the gradient in a unit's variance
            found = self._parts(back, inputs[place]) + found
            found_sd = self._parts(spreading, squares[place]) + found_sd
            if place:
                through = (spreading @ spreads[place][0]).mul_(inputs[place])
                back = (back @ centres[place][0]).add_(through).mul_(inputs[place] > 0)
        return torch.cat(found, -1), torch.cat(found_sd, -1).mul_(sd)

    def _parts(self, back: Tensor, inputs: Tensor) -> list[Tensor]:
        """A layer's gradients, flat: of its weights and of its offsets."""
        weights = (back.mT @ inputs).flatten(-2)  # [..., o·k]
        return [weights, back.sum(-2)] if self.shape.offsets else [weights]


def _plus(inputs: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
    """Outputs of a layer: [..., N, k] → [..., N, o]."""
    outputs = inputs @ weight.mT
    return outputs if offset is None else outputs.add_(offset.unsqueeze(-2))


@final
@dataclass(frozen=True, slots=True)
class InnerSettings:
    """How a task's posterior is computed.

    `rate` may be a tensor that broadcasts against [..., p], for several rates at once. `point` updates the mean alone;
    with a prior weight of 0 this is the inner loop of MAML and Reptile. `whitened` steps are in units of the prior's
    deviations: a parameter in which tasks differ much moves much.
    """

    steps: int = 5
    rate: float | Tensor = 0.01
    optimiser: Literal["sgd", "adam"] = "sgd"
    point: bool = False
    prior_weight: float = 1.0
    whitened: bool = False
    #: Rate of log √v, whose gradient has no unit; the mean's rate if None.
    sd_rate: float | None = None
    #: The rate of step i is rate / (1 + fading·i).
    fading: float = 0.0
    #: Gradients of a mean and of a log √v are clipped here, in the units of the steps; 0 for no clipping.
    cut: float = 0.0
    cut_sd: float = 0.0


def infer(
    prior: Gaussian, likelihood: Likelihood, settings: InnerSettings, generator: torch.Generator | None = None
) -> Gaussian:
    """VI(Θ, D) of Algorithm 1: each task's posterior after all steps; detached from the prior."""
    mean, log_sd = prior.mean.detach(), None if settings.point else prior.variance.detach().log().div_(2)
    for reached in _climbed(prior, likelihood, settings, generator):
        mean, log_sd = reached
    return _gaussian(mean, log_sd)


def infer_by_steps(
    prior: Gaussian, likelihood: Likelihood, settings: InnerSettings, generator: torch.Generator | None = None
) -> Iterator[Gaussian]:
    """Each task's posterior after each step from the prior, whose mean and variance are [..., p] per task."""
    for mean, log_sd in _climbed(prior, likelihood, settings, generator):
        yield _gaussian(mean, log_sd)


def _gaussian(mean: Tensor, log_sd: Tensor | None) -> Gaussian:
    return Gaussian(mean, torch.zeros_like(mean) if log_sd is None else (2 * log_sd).exp_())


def _climbed(
    prior: Gaussian, likelihood: Likelihood, settings: InnerSettings, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """m and log √v after each gradient step on the ELBO; the divergence's gradient is in closed form.

    Temporaries are overwritten instead of allocated, which is most of the time with small networks.
    """
    centre, variance, weight = prior.mean.detach(), prior.variance.detach(), settings.prior_weight
    mean, log_sd = centre, variance.log().div_(2)  # [..., p]
    pull, scale = weight / variance, log_sd.exp() if settings.whitened else None  # [..., p]
    climb_mean, climb_sd = _Climb(settings, settings.cut), _Climb(settings, settings.cut_sd)
    for step in range(settings.steps):
        fades = 1 / (1 + settings.fading * step)
        rate = settings.rate * fades
        sd_rate = rate if settings.sd_rate is None else settings.sd_rate * fades
        if settings.point:
            slope = likelihood.slope(mean)
        else:
            sd = log_sd.exp()
            slope, slope_sd = likelihood.slopes(mean, sd, generator)
            # In log √v: √v·gradient − weight·(v/v of the prior − 1).
            rise = slope_sd.addcmul_(pull, sd, value=-1).mul_(sd).add_(weight)
            log_sd = climb_sd.step(rise).mul_(sd_rate).add_(log_sd)
        if weight:
            slope = slope.addcmul_(mean - centre, pull, value=-1)
        if scale is None:
            mean = climb_mean.step(slope).mul_(rate).add_(mean)
        else:
            mean = climb_mean.step(slope.mul_(scale)).mul_(rate).mul_(scale).add_(mean)
        yield mean, None if settings.point else log_sd


@final
class _Climb:
    """Directions of gradient ascent or Adam."""

    def __init__(self, settings: InnerSettings, cut: float) -> None:
        self._adam = settings.optimiser == "adam"
        self._cut = cut
        self._first: Tensor | None = None
        self._second: Tensor | None = None
        self._count = 0

    def step(self, slope: Tensor) -> Tensor:
        """The step for a rate of 1: [..., p]. The gradient and the result may be overwritten."""
        if self._cut:
            slope = slope.clamp_(-self._cut, self._cut)
        if not self._adam:
            return slope
        fast, slow = ADAM_DECAYS
        self._count += 1
        self._first = (1 - fast) * slope + (0 if self._first is None else fast * self._first)
        self._second = (1 - slow) * slope.square() + (0 if self._second is None else slow * self._second)
        first, second = self._first / (1 - fast**self._count), self._second / (1 - slow**self._count)
        return first / (second.sqrt() + ADAM_LEAST)
