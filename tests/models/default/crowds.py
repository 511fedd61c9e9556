"""Users whose heads are drawn from a known prior, with samples."""

from __future__ import annotations

import numpy as np
import torch

from metaban.models.default.prior import Prior, Statistics
from tests.models.literal_default import Array


class Crowd:
    """Users with samples whose heads are drawn from a known prior or from known kinds."""

    def __init__(self, users: int, samples: int, dimension: int, seed: int = 0, *, noise: float = 0.1) -> None:
        self.random = np.random.default_rng(seed)
        self.noise = noise
        root = self.random.normal(size=(dimension, dimension))
        self.mean, self.covariance = (
            self.random.normal(size=dimension),
            root @ root.T / dimension + 0.1 * np.eye(dimension),
        )
        self.heads = self.random.multivariate_normal(self.mean, self.covariance, size=users)
        self.inputs = self.random.normal(size=(users, samples, dimension))
        self.counts = self.random.integers(1, samples + 1, size=users)
        self.reward()

    def reward(self) -> None:
        """Draw rewards from the current heads."""
        exact = np.einsum("usd,ud->us", self.inputs, self.heads)
        self.rewards = exact + self.random.normal(size=exact.shape) * np.sqrt(self.noise)

    def samples(self, user: int) -> tuple[Array, Array]:
        """H [S, D] and r [S]."""
        return self.inputs[user, : self.counts[user]], self.rewards[user, : self.counts[user]]

    def statistics(self) -> Statistics:
        """Statistics of a padded batch; the padding is not zero."""
        valid = np.arange(self.inputs.shape[1]) < self.counts[:, None]
        return Statistics.of(*(torch.from_numpy(value) for value in (self.inputs, self.rewards, valid)))

    def prior(self) -> Prior:
        """The true prior."""
        return prior_of(self.mean, self.covariance, self.noise)


def prior_of(mean: Array, covariance: Array, noise: float) -> Prior:
    return Prior.of(torch.from_numpy(mean), torch.from_numpy(covariance), torch.tensor(noise, dtype=torch.float64))
