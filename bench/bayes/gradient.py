"""Errors of meta-gradients after few inference steps: GEM against the gradient of the ELBO.

Appendix C.1 of GEM-BML: Bayesian linear regression, where log p(D; Θ) is known. Inputs of a task are orthogonal, so a
diagonal posterior can be exact, and the remaining error comes from too few steps and from sampling. Both estimates use
the same posteriors: inference takes the same steps with the same draws.

Letters in shape comments: S draws, T tasks, K points, D inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.core.report import Bar
from metaban.models.bayes.gem import gaussian_gradient
from metaban.models.bayes.inference import Gaussian, InnerSettings, Likelihood, infer_by_steps
from metaban.models.default.prior import Statistics, log_marginal
from metaban.models.numerics.hardware import one_thread

DIMENSION, POINTS = 5, 10

NOISE: Final = 0.25

#: Range of the input scales.
SCALES: Final = (0.5, 1.5)

#: Draws per step.
DRAWS: Final = 4
INNER: Final = InnerSettings(rate=0.01, fading=0.02)

#: Limits: GEM's error over the ELBO gradient's at every number of steps, and GEM's error at the last.
RATIO_LIMIT, ERROR_LIMIT = 1.0, 0.05


@final
@dataclass(frozen=True, slots=True)
class Regression(Likelihood):
    """y = xᵀθ + noise with x [T, K, D], y [T, K]; gradients by draws, or exact when `draws` is 0."""

    x: Tensor
    y: Tensor
    draws: int

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.x)

    def at(self, theta: Tensor) -> Tensor:
        """log p(D|θ) without its constant: [..., T, D] → [..., T]."""
        return ((self.x @ theta[..., None]).squeeze(-1) - self.y).square().sum(-1) / (-2 * NOISE)

    def slope(self, theta: Tensor) -> Tensor:
        """Gradient of log p(D|θ) in θ: [..., T, D]."""
        return (self.x.mT @ (self.y[..., None] - self.x @ theta[..., None])).squeeze(-1) / NOISE

    def slopes(self, mean: Tensor, sd: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Gradients of E_q log p(D|θ) in mean and deviation; differentiable."""
        if not self.draws:
            return self.slope(mean), -sd * self.x.square().sum(-2) / NOISE
        noise = torch.randn(self.draws, *mean.shape, generator=generator, dtype=mean.dtype)  # [S, T, D]
        found = self.slope(mean + sd * noise)  # [S, T, D]
        return found.mean(0), (found * noise).mean(0)

    def expected(self, mean: Tensor, sd: Tensor, generator: torch.Generator | None) -> Tensor:
        """E_q log p(D|θ), estimated with the same draws: [T]."""
        if not self.draws:
            return self.at(mean) - 0.5 * (sd.square() * self.x.square().sum(-2)).sum(-1) / NOISE
        noise = torch.randn(self.draws, *mean.shape, generator=generator, dtype=mean.dtype)  # [S, T, D]
        return self.at(mean + sd * noise).mean(0)


def tasks_of(seed: int, count: int, draws: int) -> Regression:
    """Tasks whose θ is drawn from the prior N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    low, high = SCALES
    columns, _ = torch.linalg.qr(normal(count, POINTS, DIMENSION))  # [T, K, D], orthonormal
    sizes = low + (high - low) * torch.rand(count, 1, DIMENSION, generator=generator, dtype=torch.float64)
    x = columns * sizes * POINTS**0.5
    y = (x @ normal(count, DIMENSION, 1)).squeeze(-1) + NOISE**0.5 * normal(count, POINTS)
    return Regression(x, y, draws)


def prior_of(count: int) -> Gaussian:
    """The prior at which gradients are taken; not the one of the tasks, where they would be small."""
    return Gaussian(torch.full((count, DIMENSION), 0.5).double(), torch.full((count, DIMENSION), 2.0).double())


def analytic(prior: Gaussian, data: Regression) -> Tensor:
    """∇ log p(D; μ, log v) of each task, by autograd of the marginal likelihood: [T, 2D]."""
    known = Statistics.of(data.x, data.y, torch.ones_like(data.y))
    mean, log_variance = prior.mean.clone().requires_grad_(), prior.variance.log().requires_grad_()
    noise = torch.tensor(NOISE, dtype=mean.dtype)

    def value(mean: Tensor, log_variance: Tensor, *parts: Tensor) -> Tensor:
        one = Statistics(*(part.unsqueeze(0) for part in parts))
        return log_marginal(mean, torch.diag((-log_variance).exp()), noise, one).squeeze(0)

    parts = (known.gram, known.moment, known.squares, known.events)
    values = torch.vmap(value)(mean, log_variance, *parts)  # [T]
    return torch.cat(torch.autograd.grad(values.sum(), (mean, log_variance)), -1)


def gem_gradients(prior: Gaussian, data: Regression, steps: Sequence[int], seed: int) -> list[Tensor]:
    """E_q ∇_Θ log p(θ; Θ) after each number of steps: [T, 2D] each."""
    inner = InnerSettings(max(steps), INNER.rate, fading=INNER.fading)
    found = []
    for step, posterior in enumerate(infer_by_steps(prior, data, inner, torch.Generator().manual_seed(seed)), 1):
        if step in steps:
            slope = gaussian_gradient(prior, posterior)
            found.append(torch.cat([slope.mean, slope.log_variance(prior)], -1))
    return found


def elbo_gradients(prior: Gaussian, data: Regression, steps: Sequence[int], seed: int) -> list[Tensor]:
    """Eq. 4: ∇_Θ ELBO(λ(D; Θ); Θ) by backpropagation through all inference steps: [T, 2D] each."""
    generator, last = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    centre, log_variance = prior.mean.clone().requires_grad_(), prior.variance.log().requires_grad_()
    variance = log_variance.exp()
    mean, log_sd, found = centre, log_variance / 2, []
    for step in range(max(steps)):
        rate, sd = INNER.rate / (1 + INNER.fading * step), log_sd.exp()
        slope, slope_sd = data.slopes(mean, sd, generator)
        log_sd = log_sd + rate * (slope_sd * sd - sd.square() / variance + 1)
        mean = mean + rate * (slope - (mean - centre) / variance)
        if step + 1 in steps:
            reached = Gaussian(mean, (2 * log_sd).exp())
            value = data.expected(mean, log_sd.exp(), last) - reached.divergence(Gaussian(centre, variance))
            slopes = torch.autograd.grad(value.sum(), (centre, log_variance), retain_graph=True)
            found.append(torch.cat(slopes, -1))
    return found


def measure_gradient(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Errors of both estimates by the number of steps, with and without draws."""
    results: dict[str, Any] = {
        "steps": list(plan.gradient_steps),
        "draws": DRAWS,
        "error": "‖estimate − analytic‖ of a task / root mean square of ‖analytic‖, mean of tasks and seeds",
        "sampled": {},
        "exact": {},
    }
    estimates = {"GEM": gem_gradients, "ELBO": elbo_gradients}
    with one_thread():
        for kind, draws in (("sampled", DRAWS), ("exact", 0)):
            for name, estimate in estimates.items():
                rows = []
                for seed in plan.seeds:
                    data, prior = tasks_of(seed, plan.gradient_tasks, draws), prior_of(plan.gradient_tasks)
                    truth = analytic(prior, data)  # [T, 2D]
                    size = truth.square().sum(-1).mean().sqrt()
                    found = torch.stack(estimate(prior, data, plan.gradient_steps, seed + 1_000))  # [steps, T, 2D]
                    rows.append((found - truth).square().sum(-1).sqrt() / size)  # [steps, T]
                errors = torch.cat(rows, -1)  # [steps, T of all seeds]
                results[kind][name] = {"mean": errors.mean(-1).tolist(), "sd": errors.std(-1).tolist()}
    _print(results, console)
    if plan.plot is not None:
        _plot(results, plan.plot)
    return results, gradient_bars(results, quick=quick)


def gradient_bars(results: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """Bars of the estimates with draws; the last-step bar only when there are enough steps."""
    note = ", quick" if quick else ""
    gem, elbo = (results["sampled"][name]["mean"] for name in ("GEM", "ELBO"))
    worst = max(ours / theirs for ours, theirs in zip(gem, elbo, strict=True))
    last = results["steps"][-1]
    bars = [Bar(f"gradient error, GEM / ELBO, worst of 1 to {last} steps{note}", worst, "<=", RATIO_LIMIT)]
    if not quick:
        bars.append(Bar(f"gradient error of GEM after {last} steps", gem[-1], "<=", ERROR_LIMIT))
    return bars


def _print(results: Mapping[str, Any], console: Console) -> None:
    heads = [f"{name}, {kind}" for kind in ("sampled", "exact") for name in ("GEM", "ELBO")]
    table = Table("inner steps", *heads, box=None, pad_edge=False)
    for place, steps in enumerate(results["steps"]):
        cells = [results[kind][name]["mean"][place] for kind in ("sampled", "exact") for name in ("GEM", "ELBO")]
        table.add_row(str(steps), *[f"{cell:.4f}" for cell in cells])
    console.print(table)


def _plot(results: Mapping[str, Any], folder: Path) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, line in (("sampled", "-o"), ("exact", ":")):
        for name, colour in (("GEM", "tab:blue"), ("ELBO", "tab:orange")):
            axes.plot(results["steps"], results[kind][name]["mean"], line, color=colour, label=f"{name}, {kind}")
    axes.set(xlabel="inner steps", ylabel="error of the meta-gradient", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "bayes-gradient.png", dpi=150)
