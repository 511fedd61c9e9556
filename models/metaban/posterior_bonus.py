"""The bonus `posterior`: deviation of a user's own learner, by a Laplace approximation of its last layer.

The layers below are taken as known, so that the posterior of the last layer is exact for its inputs a. Its prior is
N(0, I/m), the initial distribution of Section 5 of Meta-Ban; with noise variance σ² its precision is
H = Σ aaᵀ/σ² + mI, and f(x) has variance aᵀH⁻¹a. `fit` stores R with RᵀR = H⁻¹, so that scoring is one product.

Letters in shape comments: B users of S samples, R requests of at most K arms, N arms, d inputs, m width, p parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from metaban.models.bayes.curvature import last_layer_root, last_layer_variance
from metaban.models.numerics.bias_free_net import Shape, last_hidden
from metaban.models.numerics.slates import Slates


def fitted_root(shape: Shape, theta: Tensor, x: Tensor, valid: Tensor, noise: float) -> Tensor:
    """R of users with learners θ [B, p], from samples x [B, S, d], their validity and σ²: [B, m, m]."""
    weight = valid.to(torch.float64).unsqueeze(-1) / noise  # [B, S, 1]
    hidden = last_hidden(shape, theta, x)  # [B, S, m]
    return last_layer_root(hidden, weight, float(shape.width)).squeeze(1).to(theta)


def initial_root(shape: Shape, like: Tensor) -> Tensor:
    """R of a user without samples [m, m]."""
    nothing = like.new_zeros(1, 1, shape.inputs)
    theta = like.new_zeros(1, shape.parameters)
    return fitted_root(shape, theta, nothing, nothing[..., 0] > 0, 1.0).squeeze(0)


def posterior_deviation(shape: Shape, own: Mapping[str, Tensor], slates: Slates, x: Tensor) -> Tensor:
    """Posterior deviation σ of the requesting users' learners at their arms x [N, d]: [N]."""
    hidden = last_hidden(shape, own["theta"], slates.padded(x))  # [R, K, m]
    deviation: Tensor = slates.flat(last_layer_variance(own["root"].unsqueeze(1), hidden).squeeze(-1)).sqrt()
    return deviation
