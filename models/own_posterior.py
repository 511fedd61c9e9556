"""What a user's own learner is unsure of: the Laplace approximation of its last layer, for the bonus `posterior`.

The layers below count as known, so that the posterior of the last one is exact for what they make of inputs, a. Its
prior is the N(0, I/m) that Section 5 of Meta-Ban draws it from; with rewards of variance σ² around the learner its
precision is H = Σ aaᵀ/σ² + mI, and f(x) has the variance aᵀH⁻¹a. `fit` keeps R with RᵀR = H⁻¹: a request is a product.

Letters in shape comments: B users of S samples, R requests of at most K arms, N arms, d inputs, m width, p parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.curvature import last_layer_root, last_layer_variance
from models.network import Shape, last_hidden
from models.slates import Slates


def fitted_root(shape: Shape, theta: Tensor, x: Tensor, valid: Tensor, noise: float) -> Tensor:
    """R of users with learners θ [B, p], from their samples x [B, S, d], which of them are real, and σ²: [B, m, m]."""
    weight = valid.to(torch.float64).unsqueeze(-1) / noise  # [B, S, 1]
    hidden = last_hidden(shape, theta, x)  # [B, S, m]
    return last_layer_root(hidden, weight, float(shape.width)).squeeze(1).to(theta)


def newborn_root(shape: Shape, like: Tensor) -> Tensor:
    """R of a user without samples [m, m]."""
    nothing = like.new_zeros(1, 1, shape.inputs)
    theta = like.new_zeros(1, shape.parameters)
    return fitted_root(shape, theta, nothing, nothing[..., 0] > 0, 1.0).squeeze(0)


def own_deviation(shape: Shape, own: Mapping[str, Tensor], slates: Slates, x: Tensor) -> Tensor:
    """σ of what the asking users' learners say of their arms x [N, d]: [N]."""
    hidden = last_hidden(shape, own["theta"], slates.padded(x))  # [R, K, m]
    deviation: Tensor = slates.flat(last_layer_variance(own["root"].unsqueeze(1), hidden).squeeze(-1)).sqrt()
    return deviation
