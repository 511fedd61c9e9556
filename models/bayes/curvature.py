"""Curvature of many networks at once: generalised Gauss-Newton matrices in four structures.

    H = Σ_s Jᵀ_s Λ_s J_s + τI,   J = ∂f/∂θ,   Λ = ∂²(−log p)/∂f²

for a network f at θ and the samples of one task: the Hessian without the term that multiplies residuals, which makes H
positive definite for every θ. ReLU networks are linear in each layer, so the layers' diagonal blocks equal the
Hessian's. The damping τ is the precision of the prior N(θ₀, I/τ): one number, or one per layer. J of a fully connected
network is δ ⊗ a in each layer, δ the gradient at the layer's outputs and a its inputs; it is formed for `full` only.

    full        all of H: small networks, linear heads
    diagonal    its diagonal
    last-layer  its block of the last layer; the layers below are taken as known
    kronecker   each layer's block as A ⊗ G, A the mean of aaᵀ, G the sum of δᵀΛδ (Martens and Grosse, 2015); damping is
                added in its eigenbasis, which is exact

Everything is float64, because sums of squares exceed the resolution of float32.

Letters in shape comments: B networks, each with its own S samples or N inputs, C outputs, o and k outputs and inputs of
a layer (a constant included if it has offsets), p parameters, n draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, final

import torch
from torch import Tensor

from metaban.models.numerics.dense_net import NetShape

Structure = Literal["full", "diagonal", "last-layer", "kronecker"]

#: For each layer δ = ∂f/∂(its outputs before ReLU) [B, S, C, o] and its inputs a [B, S, k]; δ ⊗ a is ∂f/∂W.
Factors = Sequence[tuple[Tensor, Tensor]]


def output_factors(shape: NetShape, nets: Tensor, x: Tensor) -> tuple[Tensor, Factors]:
    """Outputs of each network on its own inputs, and the factors of their gradients.

    nets [B, p], x [B, S, d] → [B, S, C] and, first layer first, pairs of [B, S, C, o] and [B, S, k].
    """
    layers, given = shape.layers(nets), []
    outputs = x
    for place, layer in enumerate(layers):
        hidden = outputs.relu() if place else outputs
        if shape.offsets:
            hidden = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)  # [B, S, k]
        given.append(hidden)
        outputs = hidden @ layer.mT  # [B, S, o]
    count = shape.widths[-1]
    delta = torch.eye(count, dtype=x.dtype, device=x.device).expand(*outputs.shape, count)  # [B, S, C, C]
    found = [(delta, given[-1])]
    for place in range(len(layers) - 2, -1, -1):
        units = shape.widths[place + 1]
        alive = (given[place + 1][..., :units] > 0).unsqueeze(-2)  # [B, S, 1, o]
        delta = (delta @ layers[place + 1][:, None, :, :units]) * alive  # [B, S, C, o]
        found.append((delta, given[place]))
    return outputs, found[::-1]


def jacobian(shape: NetShape, factors: Factors) -> Tensor:
    """∂f/∂θ [B, S, C, p], in float64."""
    return shape.flat([delta.double().unsqueeze(-1) * a.double()[:, :, None, None] for delta, a in factors])


def precisions(shape: NetShape, damping: Tensor) -> Tensor:
    """τ of each parameter [p], from τ [] or [layers]."""
    layers = zip(shape.sizes, damping.expand(len(shape.sizes)), strict=True)
    return shape.flat([tau.expand(rows, columns + shape.offsets) for (rows, columns), tau in layers])


class Curvature(ABC):
    """H of B networks."""

    shape: NetShape

    @property
    def covered(self) -> int:
        """Number of parameters that H covers."""
        return self.shape.parameters

    @abstractmethod
    def log_det(self) -> Tensor:
        """log det H [B]."""

    @abstractmethod
    def variance(self, factors: Factors) -> Tensor:
        """gᵀH⁻¹g of each output, from the factors of N inputs: [B, N, C]."""

    @abstractmethod
    def solved(self, flat: Tensor) -> Tensor:
        """H⁻¹v of vectors [B, p]; 0 for parameters that H does not cover."""

    @abstractmethod
    def spread(self, noise: Tensor) -> Tensor:
        """Draws from N(0, H⁻¹) made of standard normal numbers [B, n, p]; 0 for parameters that H does not cover."""


@final
@dataclass(frozen=True, slots=True)
class Full(Curvature):
    """All of H, as its Cholesky factor [B, p, p]."""

    shape: NetShape
    factor: Tensor

    @classmethod
    def of(cls, shape: NetShape, factors: Factors, weight: Tensor, damping: Tensor) -> Self:
        """From Λ of each sample's outputs [B, S, C] and τ [] or [layers], or a full prior precision [p, p]."""
        rows = jacobian(shape, factors).flatten(1, 2)  # [B, S·C, p]
        gram = rows.mT @ (rows * weight.double().flatten(1).unsqueeze(-1))  # [B, p, p]
        return cls(shape, cholesky(gram + (damping if damping.dim() == 2 else precisions(shape, damping).diag())))

    def log_det(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def variance(self, factors: Factors) -> Tensor:
        rows = jacobian(self.shape, factors)  # [B, N, C, p]
        away: Tensor = torch.linalg.solve_triangular(self.factor, rows.flatten(1, 2).mT, upper=False)  # [B, p, N·C]
        return away.square().sum(-2).view(rows.shape[:-1])

    def solved(self, flat: Tensor) -> Tensor:
        return torch.cholesky_solve(flat.unsqueeze(-1), self.factor).squeeze(-1)

    def spread(self, noise: Tensor) -> Tensor:
        away: Tensor = torch.linalg.solve_triangular(self.factor.mT, noise.double().mT, upper=True)  # [B, p, n]
        return away.mT


@final
@dataclass(frozen=True, slots=True)
class Diagonal(Curvature):
    """The diagonal of H [B, p]."""

    shape: NetShape
    entries: Tensor

    @classmethod
    def of(cls, shape: NetShape, factors: Factors, weight: Tensor, damping: Tensor) -> Self:
        """From Λ of each sample's outputs [B, S, C] and τ [] or [layers]."""
        layers = []
        for delta, a in factors:
            pulled = (delta.double().square() * weight.double().unsqueeze(-1)).sum(2)  # [B, S, o]
            layers.append(pulled.mT @ a.double().square())  # [B, o, k]
        return cls(shape, shape.flat(layers) + precisions(shape, damping))

    def log_det(self) -> Tensor:
        return self.entries.log().sum(-1)

    def variance(self, factors: Factors) -> Tensor:
        found = [
            torch.einsum("bnco,bok,bnk->bnc", delta.double().square(), 1 / layer, a.double().square())
            for (delta, a), layer in zip(factors, self.shape.layers(self.entries), strict=True)
        ]
        return torch.stack(found).sum(0)

    def solved(self, flat: Tensor) -> Tensor:
        return flat / self.entries

    def spread(self, noise: Tensor) -> Tensor:
        return noise.double() / self.entries.sqrt().unsqueeze(1)


@final
@dataclass(frozen=True, slots=True)
class LastLayer(Curvature):
    """The last layer's block of H. Outputs share no weight of it, so there is one matrix per output: R with RᵀR = H⁻¹.

    R is lower triangular, and ‖Ra‖² is never negative, however R is rounded.
    """

    shape: NetShape
    root: Tensor  # [B, C, k, k]

    @classmethod
    def of(cls, shape: NetShape, factors: Factors, weight: Tensor, damping: Tensor) -> Self:
        """From Λ of each sample's outputs [B, S, C] and τ [] or [layers]."""
        return cls(shape, last_layer_root(factors[-1][1], weight, damping.reshape(-1)[-1]))

    @property
    def covered(self) -> int:
        return self.root.shape[1] * self.root.shape[2]

    def log_det(self) -> Tensor:
        return -2 * self.root.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))

    def variance(self, factors: Factors) -> Tensor:
        return last_layer_variance(self.root, factors[-1][1].double())

    def solved(self, flat: Tensor) -> Tensor:
        *below, last = self.shape.layers(flat)
        found = (self.root.mT @ (self.root @ last.unsqueeze(-1))).squeeze(-1)  # [B, C, k]
        return self.shape.flat([*(torch.zeros_like(layer) for layer in below), found])

    def spread(self, noise: Tensor) -> Tensor:
        *below, last = self.shape.layers(noise.double())
        found = (self.root.mT.unsqueeze(1) @ last.unsqueeze(-1)).squeeze(-1)  # [B, n, C, k]
        return self.shape.flat([*(torch.zeros_like(layer) for layer in below), found])


def last_layer_root(a: Tensor, weight: Tensor, damping: Tensor | float) -> Tensor:
    """R with RᵀR = (Σ_s Λ_s aaᵀ + τI)⁻¹: inputs a [B, S, k] of the last layer, Λ [B, S, C] → [B, C, k, k], lower."""
    rows = a.double().unsqueeze(1)  # [B, 1, S, k]
    gram = (rows * weight.double().mT.unsqueeze(-1)).mT @ rows  # [B, C, k, k]
    identity = _identity(gram)
    factor = cholesky(gram + damping * identity)
    root: Tensor = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    return root


def last_layer_variance(root: Tensor, a: Tensor) -> Tensor:
    """‖Ra‖²: roots [B, C, k, k], inputs of the last layer a [B, N, k] → [B, N, C]."""
    return (a.unsqueeze(1) @ root.mT).square().sum(-1).mT


@final
@dataclass(frozen=True, slots=True)
class Kronecker(Curvature):
    """Each layer's block of H as A ⊗ G + τI, in the eigenvectors of A [B, k, k] and G [B, o, o]."""

    shape: NetShape
    bases: tuple[tuple[Tensor, Tensor], ...]
    values: tuple[Tensor, ...]  # eigenvalues of the block, [B, o, k] of each layer

    @classmethod
    def of(cls, shape: NetShape, factors: Factors, weight: Tensor, damping: Tensor) -> Self:
        """From Λ of each sample's outputs [B, S, C] and τ [] or [layers]; a sample of weight 0 is ignored."""
        counted = weight.double()
        # Only the samples' relative weights matter for A: G holds the sum.
        share = counted.sum(-1, keepdim=True)  # [B, S, 1]
        share = share / share.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        bases, values = [], []
        for (delta, a), tau in zip(factors, damping.expand(len(factors)), strict=True):
            inputs, pulled = a.double(), delta.double().flatten(1, 2)  # [B, S, k], [B, S·C, o]
            left, across = torch.linalg.eigh((inputs * share).mT @ inputs)  # [B, k], [B, k, k]
            above, down = torch.linalg.eigh((pulled * counted.flatten(1).unsqueeze(-1)).mT @ pulled)
            # Rounding may make an eigenvalue of 0 slightly negative.
            values.append(above.clamp_min(0).unsqueeze(-1) * left.clamp_min(0).unsqueeze(-2) + tau)
            bases.append((across, down))
        return cls(shape, tuple(bases), tuple(values))

    def log_det(self) -> Tensor:
        return torch.stack([value.log().sum((-1, -2)) for value in self.values]).sum(0)

    def variance(self, factors: Factors) -> Tensor:
        found = []
        for (delta, a), (across, down), value in zip(factors, self.bases, self.values, strict=True):
            pulled = (delta.double() @ down.unsqueeze(1)).square()  # [B, N, C, o]
            found.append(((pulled @ (1 / value).unsqueeze(1)) * (a.double() @ across).square().unsqueeze(2)).sum(-1))
        return torch.stack(found).sum(0)

    def solved(self, flat: Tensor) -> Tensor:
        found = []
        for layer, (across, down), value in zip(self.shape.layers(flat), self.bases, self.values, strict=True):
            found.append(down @ ((down.mT @ layer @ across) / value) @ across.mT)
        return self.shape.flat(found)

    def spread(self, noise: Tensor) -> Tensor:
        found = []
        for layer, (across, down), value in zip(
            self.shape.layers(noise.double()), self.bases, self.values, strict=True
        ):
            found.append(down.unsqueeze(1) @ (layer / value.sqrt().unsqueeze(1)) @ across.mT.unsqueeze(1))
        return self.shape.flat(found)


STRUCTURES: dict[Structure, type[Full] | type[Diagonal] | type[LastLayer] | type[Kronecker]] = {
    "full": Full,
    "diagonal": Diagonal,
    "last-layer": LastLayer,
    "kronecker": Kronecker,
}


def cholesky(matrix: Tensor) -> Tensor:
    """Cholesky factors of matrices [..., k, k]; NaN for one that is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.where((failed == 0)[..., None, None], factor, torch.nan)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
