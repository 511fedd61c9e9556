"""The Gaussian processes of model fusion: e independent sparse GPs over profiles, as one batch.

Each has its own inducing inputs, a constant mean, an RBF kernel with one length per profile coordinate, and a whitened
Gaussian q(s) over its values at the inducing inputs: s = L v, L Lᵀ = K(Z, Z), v ~ N(m, C Cᵀ). The supplement leaves
q(s) at the prior (Eq. 16 is Eq. 27 with q(s) = p(s)), under which nothing learned from the sources could reach a new
profile; here q(s) is fitted, and KL(q(s) ‖ p(s)) is in the bound.

Letters in shape comments: e processes, M inducing inputs, d profile coordinates, n profiles.
"""

from __future__ import annotations

from typing import Any, final

import gpytorch
import torch
from torch import Tensor

#: Initial kernel length, in standard deviations of the profiles.
FIRST_LENGTH = 1.0

#: Initial scale of the inducing values' covariance factor, small so that the first steps see little noise.
FIRST_SPREAD = 0.1


@final
class ProfileProcesses(gpytorch.models.ApproximateGP):  # type: ignore[misc]
    """g: profile → R^e, with a trainable q(g)."""

    def __init__(self, inducing: Tensor, generator: torch.Generator) -> None:
        """From inducing inputs [e, M, d]; initial means are random, so that the e processes differ."""
        processes, places, size = inducing.shape
        batch = torch.Size([processes])
        distribution = gpytorch.variational.CholeskyVariationalDistribution(places, batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.count = processes
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=size, batch_shape=batch), batch_shape=batch
        )
        self.covar_module.base_kernel.lengthscale = FIRST_LENGTH
        self.covar_module.outputscale = 1.0
        self.to(inducing)
        drawn = torch.randn(processes, places, generator=generator, device=generator.device)
        with torch.no_grad():
            distribution.variational_mean.copy_(drawn.to(inducing))
            distribution.chol_variational_covar.mul_(FIRST_SPREAD)
        strategy.variational_params_initialized.fill_(1)

    def forward(self, profiles: Tensor) -> Any:
        """The prior at these profiles."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(profiles), self.covar_module(profiles))

    def marginals(self, profiles: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of q(g(τ)): profiles [n, d] → each [n, e].

        The same as calling the model, without the covariances between profiles.
        """
        mean, spread = self._whitened()
        cross = torch.linalg.solve_triangular(self._factor(), self._kernel(profiles), upper=False)  # [e, M, n]
        found = self.mean_module.constant + (cross.mT @ mean[..., None]).squeeze(-1).mT
        explained = cross.square().sum(-2) - (spread.mT @ cross).square().sum(-2)
        return found, (self.covar_module.outputscale[:, None] - explained).mT

    def divergence(self) -> Tensor:
        """Σ KL(q(s) ‖ p(s)) over the processes."""
        mean, spread = self._whitened()
        log_determinants = 2 * spread.diagonal(dim1=-2, dim2=-1).abs().log().sum()
        return 0.5 * (spread.square().sum() + mean.square().sum() - mean.numel() - log_determinants)

    def _whitened(self) -> tuple[Tensor, Tensor]:
        """m [e, M] and C [e, M, M] of v."""
        held = self.variational_strategy._variational_distribution
        return held.variational_mean, held.chol_variational_covar.tril()

    def _kernel(self, profiles: Tensor) -> Tensor:
        """k(Z, τ): profiles [..., n, d] → [e, M, n]."""
        lengths = self.covar_module.base_kernel.lengthscale  # [e, 1, d]
        places, points = self.variational_strategy.inducing_points / lengths, profiles / lengths
        squares = places.square().sum(-1)[..., None] + points.square().sum(-1)[..., None, :]
        gaps = (squares - 2 * places @ points.mT).clamp_min(0)
        found: Tensor = self.covar_module.outputscale[:, None, None] * (-0.5 * gaps).exp()
        return found

    def _factor(self) -> Tensor:
        """L: [e, M, M], computed in float64, since close inducing inputs make K(Z, Z) nearly singular."""
        inducing = self.variational_strategy.inducing_points
        jitter = gpytorch.settings.variational_cholesky_jitter.value(inducing.dtype)
        gram = self._kernel(inducing).double()
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor: Tensor = torch.linalg.cholesky(gram + jitter * identity)
        return factor.to(inducing.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `FusionState`, with all factorisations done.

        With k = k(Z, τ): mean = μ + kᵀ L⁻ᵀ m and variance = σ² − kᵀ L⁻ᵀ (I − C Cᵀ) L⁻¹ k.
        """
        inducing = self.variational_strategy.inducing_points
        whitened = self.variational_strategy._variational_distribution
        factor = self._factor().double()  # [e, M, M]
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        turn = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT  # L⁻ᵀ
        spread = whitened.chol_variational_covar.tril().double()
        weights = turn @ (identity - spread @ spread.mT) @ turn.mT
        return {
            "inducing": inducing.clone(),
            "lengths": self.covar_module.base_kernel.lengthscale.squeeze(-2).clone(),  # [e, d]
            "scales": self.covar_module.outputscale.clone(),  # [e]
            "constants": self.mean_module.constant.clone(),  # [e]
            "mean_weights": (turn @ whitened.variational_mean.double()[..., None]).squeeze(-1).to(inducing),
            "variance_weights": weights.to(inducing),
        }
