"""The guard of warm starts: whether heads fused from profiles predict first rewards better than the prior.

Rewards r of a held-out user for head inputs H are N(Hm, (1 − t)HΣHᵀ + σ²I) under a warm start, m = μ + β(w − μ) with
the fused head w; under the prior β = t = 0. The log-density is the sum of one-step-ahead predictive log-densities.
Blend β and trust t are chosen from a grid on all held-out users; the gain is measured by cross-validation between two
halves of them, because the best of many is biased on the users who chose it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.default.prior import Prior
from metaban.models.fusion.warm_starts import GuardReport

#: The grid.
BLENDS: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
TRUSTS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

#: Standard errors by which the gain has to exceed 0.
CLEAR: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class FirstRewards:
    """The first F rewards of n users [n, F], their inputs h [n, F, D], and their validity, all float64."""

    inputs: Tensor
    rewards: Tensor
    valid: Tensor

    def rows(self, index: Tensor) -> FirstRewards:
        """Some of the users."""
        return FirstRewards(self.inputs[index], self.rewards[index], self.valid[index])

    def losses(self, prior: Prior, away: Tensor, trusts: Sequence[float], blends: Sequence[float]) -> Tensor:
        """−log-likelihood of each user's rewards [T, B, n] for heads `away` [n, D] from the prior's mean."""
        h = self.inputs * self.valid[..., None]
        residuals = (self.rewards - self.inputs @ prior.mean) * self.valid  # [n, F]
        moved = (h @ away[..., None]).squeeze(-1)  # [n, F]
        spread = h @ prior.covariance @ h.mT  # [n, F, F]
        noise = prior.noise * torch.eye(h.shape[1], dtype=h.dtype)
        left = torch.tensor([1 - trust for trust in trusts], dtype=h.dtype)[:, None, None, None]
        factor = torch.linalg.cholesky(left * spread + noise)  # [T, n, F, F]
        both = torch.stack([residuals, moved], -1).expand(len(trusts), -1, -1, -1)
        a, c = torch.linalg.solve_triangular(factor, both, upper=False).unbind(-1)  # [T, n, F]
        share = torch.tensor(list(blends), dtype=h.dtype)[:, None]  # [B, 1]
        squares = (a * a).sum(-1)[:, None] - 2 * share * (a * c).sum(-1)[:, None] + share**2 * (c * c).sum(-1)[:, None]
        # Padding has the noise variance alone under every hypothesis.
        counts = self.valid.sum(-1)
        idle = 0.5 * (h.shape[1] - counts) * prior.noise.log()
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [T, n]
        losses: Tensor = 0.5 * squares + (logs - idle + 0.5 * counts * math.log(2 * math.pi))[:, None]
        return losses


def evaluate_starts(prior: Prior, first: FirstRewards, heads: Tensor) -> GuardReport:
    """Evaluate fused heads [n, D] on held-out users."""
    half = torch.arange(len(heads)) % 2 == 0
    away = heads - prior.mean
    alone = first.losses(prior, away, (0.0,), (0.0,))[0, 0]  # [n]
    losses = first.losses(prior, away, TRUSTS, BLENDS).flatten(0, 1)  # [T·B, n]
    best = losses.sum(1).argmin()
    others = torch.where(half, losses[losses[:, ~half].sum(1).argmin()], losses[losses[:, half].sum(1).argmin()])
    gains = alone - others
    gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    trust, blend = TRUSTS[int(best) // len(BLENDS)], BLENDS[int(best) % len(BLENDS)]
    used = gain > 0 and gain >= CLEAR * error
    return GuardReport(
        verdict=("fusion" if blend >= 1 else "blend") if used else "prior",
        blend=blend if used else 0.0,
        trust=trust if used else 0.0,
        held_out=len(gains),
        events=int(first.valid.sum()),
        prior_loss=float(alone.mean()),
        fusion_loss=float(others.mean()),
        gain=gain,
        gain_error=error,
    )
