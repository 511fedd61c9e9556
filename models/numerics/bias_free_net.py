"""Stacks of fully connected ReLU networks without biases, Eq. 9 of the Meta-Ban paper, in closed form.

    f(x; θ) = W_L σ(W_{L−1} … σ(W_1 x)),   W_1 ∈ R^{m×d}, W_l ∈ R^{m×m}, W_L ∈ R^{1×m}

A network is one flat vector θ = [vec(W_1), …, vec(W_L)], so that many networks are one matrix. No autograd graph is
recorded: the gradient of such a network is a sum of outer products δ_l ⊗ h_{l−1}, from which loss gradients, norms and
distances follow in closed form.

Letters in shape comments: B networks each with its own S inputs, P networks that share N inputs, d inputs, m width,
p parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs d, width m and depth L of a network."""

    inputs: int
    width: int
    depth: int

    def __post_init__(self) -> None:
        if self.inputs < 1 or self.width < 1 or self.depth < 2:
            raise ValueError(f"a network needs inputs ≥ 1, width ≥ 1 and depth ≥ 2, not {self}")

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every weight matrix, first layer first."""
        hidden = ((self.width, self.width),) * (self.depth - 2)
        return ((self.width, self.inputs), *hidden, (1, self.width))

    @property
    def parameters(self) -> int:
        """p, the length of θ."""
        return sum(rows * columns for rows, columns in self.matrices)


def initial_parameters(shape: Shape, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Initial θ of Section 5: hidden entries from N(0, 2/m), the last layer's from N(0, 1/m)."""
    hidden = shape.parameters - shape.width
    theta = torch.randn(shape.parameters, generator=generator, dtype=torch.float64, device=generator.device)
    theta[:hidden] *= math.sqrt(2 / shape.width)
    theta[hidden:] *= math.sqrt(1 / shape.width)
    return theta.to(dtype)


def weights(shape: Shape, theta: Tensor) -> list[Tensor]:
    """View θ [..., p] as its weight matrices [..., outputs, inputs]."""
    sizes = [rows * columns for rows, columns in shape.matrices]
    flat = torch.split(theta, sizes, dim=-1)
    return [part.reshape(*part.shape[:-1], *matrix) for part, matrix in zip(flat, shape.matrices, strict=True)]


def forward(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """f(x; θ) of Eq. 9, each network on its own inputs: θ [B, p], x [B, S, d] → [B, S]."""
    return (last_hidden(shape, theta, x) @ weights(shape, theta)[-1].mT).squeeze(-1)


def last_hidden(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """Inputs of the last layer of each network on its own inputs: θ [B, p], x [B, S, d] → [B, S, m]."""
    hidden = x
    for matrix in weights(shape, theta)[:-1]:
        hidden = torch.relu(hidden @ matrix.mT)  # [B, S, m]
    return hidden


def predict_all(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """Every network on every input: θ [P, p], x [N, d] → [N, P].

    The first layer of all networks is one product with the shared inputs; deeper layers are batched over networks.
    """
    networks, inputs = theta.shape[0], x.shape[0]
    first, *inner, last = weights(shape, theta)
    hidden = torch.relu_(x @ first.reshape(-1, shape.inputs).mT)  # [N, P·m]
    hidden = hidden.view(inputs, networks, shape.width)  # [N, P, m]
    for matrix in inner:
        hidden = torch.relu((hidden.transpose(0, 1) @ matrix.mT).transpose(0, 1))  # [N, P, m]
    return torch.einsum("npm,pm->np", hidden, last.squeeze(-2))


def loss_gradient(shape: Shape, theta: Tensor, x: Tensor, rewards: Tensor, weight: Tensor) -> Tensor:
    """Gradient of ½ Σ_s weight_s (f(x_s; θ) − r_s)², the loss of Eq. 3, for each network.

    θ [B, p], x [B, S, d], rewards and weight [B, S] → [B, p].
    """
    matrices = weights(shape, theta)
    layers = [x]
    for matrix in matrices[:-1]:
        layers.append(torch.relu(layers[-1] @ matrix.mT))  # [B, S, m]
    residual = (layers[-1] @ matrices[-1].mT).squeeze(-1) - rewards  # [B, S]
    delta = (residual * weight).unsqueeze(-1)  # [B, S, 1]
    parts = [delta.mT @ layers[-1]]  # [B, 1, m]
    for index in range(len(matrices) - 2, -1, -1):
        delta = (delta @ matrices[index + 1]) * (layers[index + 1] > 0)  # [B, S, m]
        parts.append(delta.mT @ layers[index])  # [B, m, inputs of the layer]
    return torch.cat([part.flatten(-2) for part in reversed(parts)], dim=-1)


def output_factors(shape: Shape, theta: Tensor, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """f(x_n; θ_n) and, layer by layer, the factors (δ, h) whose outer product is ∂f/∂W.

    θ [N, p] or [1, p], x [N, d] → f [N] and pairs of [N, outputs], [N, inputs].
    """
    matrices = weights(shape, theta)
    layers = [x]
    for matrix in matrices[:-1]:
        layers.append(torch.relu((matrix @ layers[-1].unsqueeze(-1)).squeeze(-1)))  # [N, m]
    output = (matrices[-1] @ layers[-1].unsqueeze(-1)).squeeze(-1)  # [N, 1]
    delta = torch.ones_like(output)
    factors = [(delta, layers[-1])]
    for index in range(len(matrices) - 2, -1, -1):
        delta = (delta.unsqueeze(-2) @ matrices[index + 1]).squeeze(-2) * (layers[index + 1] > 0)  # [N, m]
        factors.append((delta, layers[index]))
    return output.squeeze(-1), factors[::-1]


def input_gradient(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """∂f(x_n; θ_n)/∂x_n = W₁ᵀδ₁: θ [N, p], x [N, d] → [N, d]."""
    delta = output_factors(shape, theta, x)[1][0][0]  # [N, m]
    return (delta.unsqueeze(-2) @ weights(shape, theta)[0]).squeeze(-2)


def factor_norm(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """‖g‖₂ of a gradient given by its factors: [N]."""
    squared = [delta.square().sum(-1) * hidden.square().sum(-1) for delta, hidden in factors]
    return torch.stack(squared).sum(0).sqrt()


def factor_distance(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> Tensor:
    """‖g_a − g_b‖₂ of two gradients given by their factors, without forming them.

    δ⊗h − δ'⊗h' is written as (δ−δ')⊗h + δ'⊗(h−h'): every term contains a difference, which avoids the cancellation in
    ‖g_a‖² + ‖g_b‖² − 2⟨g_a, g_b⟩ for nearly equal gradients.
    """
    squared = []
    for (delta_a, hidden_a), (delta_b, hidden_b) in zip(a, b, strict=True):
        delta, hidden = delta_a - delta_b, hidden_a - hidden_b
        squared.append(
            delta.square().sum(-1) * hidden_a.square().sum(-1)
            + delta_b.square().sum(-1) * hidden.square().sum(-1)
            + 2 * (delta * delta_b).sum(-1) * (hidden_a * hidden).sum(-1)
        )  # [N]
    return torch.stack(squared).sum(0).clamp_min(0).sqrt()


def gradient_distance(shape: Shape, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """‖g(x_n; a_n) − g(x_n; b_n)‖₂ with g = ∂f/∂θ: a [N, p], b [N, p] or [p], x [N, d] → [N]."""
    other = b if b.ndim == 2 else b.unsqueeze(0)
    return factor_distance(output_factors(shape, a, x)[1], output_factors(shape, other, x)[1])


def gradient_norm(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """‖g(x_n; θ_n)‖₂ = (Σ_l ‖δ_l‖²·‖h_{l−1}‖²)^½: θ [N, p], x [N, d] → [N]."""
    return factor_norm(output_factors(shape, theta, x)[1])
