"""GEM-BML, Reptile and local reparameterisation task by task, as published."""

from __future__ import annotations

import torch
from torch import Tensor

from metaban.models.numerics.dense_net import NetShape


def reptile(
    theta: Tensor, shape: NetShape, tasks: list[list[tuple[Tensor, Tensor]]], inner: float, outer: float, noise: float
) -> Tensor:
    """θ + ε·mean over tasks of (θ after SGD on the task's batches − θ)."""
    found = []
    for batches in tasks:
        copy = theta.clone().requires_grad_()
        descent = torch.optim.SGD([copy], lr=inner)
        for x, y in batches:
            descent.zero_grad()
            loss = (shape.outputs(copy, x).squeeze(-1) - y).square().sum() / (2 * noise)
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
        found.append(copy.detach())
    return theta + outer * (torch.stack(found) - theta).mean(0)


def local_reparameterisation(
    shape: NetShape, mean: Tensor, sd: Tensor, x: Tensor, y: Tensor, noise: float, epsilons: list[Tensor]
) -> Tensor:
    """−Σ(f − y)²/2σ² of one network whose pre-activations are drawn: x [N, k], epsilons [N, o] of each layer."""
    hidden = x
    for place, (centre, spread) in enumerate(zip(shape.layers(mean), shape.layers(sd**2), strict=True)):
        if place:
            hidden = torch.relu(hidden)
        with_one = torch.cat([hidden, torch.ones(len(x), 1, dtype=x.dtype)], 1) if shape.offsets else hidden
        hidden = with_one @ centre.T + (with_one**2 @ spread.T).sqrt() * epsilons[place]
    return -((hidden.squeeze(-1) - y) ** 2).sum() / (2 * noise)


def variational(
    mean: Tensor, sd: Tensor, slope: Tensor, curvature: Tensor, rate: float, steps: int
) -> tuple[Tensor, Tensor]:
    """(m, v) after ascent in (m, log √v) of the ELBO by autograd, log p(D|θ) = slopeᵀθ − ½ θᵀ diag(curvature) θ."""
    prior = torch.distributions.Normal(mean, sd)
    m, s = mean.clone().requires_grad_(), sd.log().requires_grad_()
    for _ in range(steps):
        q = torch.distributions.Normal(m, s.exp())
        fit = (slope * m - 0.5 * curvature * (m**2 + s.exp() ** 2)).sum()
        elbo = fit - torch.distributions.kl_divergence(q, prior).sum()
        g_m, g_s = torch.autograd.grad(elbo, (m, s))
        m, s = (m + rate * g_m).detach().requires_grad_(), (s + rate * g_s).detach().requires_grad_()
    return m.detach(), s.detach().exp() ** 2
