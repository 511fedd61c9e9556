"""Model fusion: a new user's learner from their profile and the learners of existing users.

After *Model Fusion for Personalized Learning* (supplement, A.2, B-D). Sources are networks γ_i with profiles τ_i:

    w∅ ~ p(w∅; α)                               base module, shared by all
    g ~ GP over profiles, w_i = warp(g(τ_i))    task-specific module
    γ_i ~ N(A_i m(w∅, w_i), A_i v(w∅, w_i))     crossing module, with a permutation A_i of hidden units

A new profile τ* gets γ* by w∅ ~ q(w∅), g ~ q(g(τ*)), γ* ~ N(m, v). This module predicts for new profiles from the
tensors of a trained model (`training.py`) with products of small matrices only, fast enough for a
request, and without the libraries that training needs.

Letters in shape comments: B profiles of d numbers, S samples, e processes, M inducing inputs, p parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.numerics.dense_net import NetShape, rescaled

#: Draws for the spread of a prediction.
SPREAD_DRAWS = 32

#: Tensors of a state beside the shape, with their dimensions as letters that must agree.
FIELDS: Final[Mapping[str, str]] = {
    "profile_centre": "d", "profile_scale": "d",
    "inducing": "eMd", "lengths": "ed", "scales": "e", "constants": "e",
    "mean_weights": "eM", "variance_weights": "eMM",
    "warp_1": "he", "warp_1_offset": "h", "warp_2": "wh", "warp_2_offset": "w",
    "base_mean": "b", "base_deviation": "b",
    "cross_base": "cb", "cross_task": "cw", "cross_offset": "c", "cross_2": "lc", "cross_2_offset": "l",
    "mean": "pl", "mean_offset": "p", "variance": "pl", "variance_offset": "p", "variance_range": "",
    "centre": "p", "scale": "p",
}  # fmt: skip

WIDTHS, OFFSETS = "widths", "offsets"


class InvalidFusion(ValueError):
    """Tensors that are not a valid fusion model."""


@final
@dataclass(frozen=True, slots=True)
class FusionState:
    """A trained fusion model: the tensors of `FIELDS`, all of one dtype and device, and the shape of its networks."""

    shape: NetShape
    tensors: Mapping[str, Tensor]

    def to_dict(self) -> dict[str, Tensor]:
        """One flat dictionary for storage."""
        return {
            WIDTHS: torch.tensor(self.shape.widths, dtype=torch.int64),
            OFFSETS: torch.tensor(int(self.shape.offsets), dtype=torch.int64),
            **{name: tensor.contiguous() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Tensor]) -> FusionState:
        """The inverse of `to_dict`; raises InvalidFusion if tensors are missing, inconsistent or not finite."""
        missing = [name for name in (WIDTHS, OFFSETS, *FIELDS) if name not in stored]
        if missing:
            raise InvalidFusion(f"a fusion model lacks {', '.join(missing)}")
        shape = NetShape(tuple(stored[WIDTHS].tolist()), bool(stored[OFFSETS].item()))
        sizes = {"p": shape.parameters}
        for name, letters in FIELDS.items():
            tensor = stored[name]
            fits = tensor.dim() == len(letters) and all(
                sizes.setdefault(letter, size) == size for letter, size in zip(letters, tensor.shape, strict=True)
            )
            if not fits or not bool(tensor.isfinite().all()):
                raise InvalidFusion(f"{name} of a fusion model has the wrong shape or is not finite")
        return cls(shape, {name: stored[name] for name in FIELDS})

    def to(self, device: torch.device) -> FusionState:
        """On another device."""
        return FusionState(self.shape, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def profile_size(self) -> int:
        """d: dimension of a profile."""
        return len(self.tensors["profile_centre"])


@final
@dataclass(frozen=True, slots=True)
class Prediction:
    """Networks for new profiles."""

    #: The network at the mean of all latent variables: [B, p].
    mean: Tensor
    #: Standard deviation of each parameter under the model: [B, p].
    spread: Tensor
    #: Remaining share of the processes' variance, 0 at sources, 1 far from all: [B].
    novelty: Tensor


@final
class FusionModel:
    """Predicts networks for new profiles; immutable, so that requests may share it."""

    def __init__(self, state: FusionState, seed: int = 0) -> None:
        """Precompute what does not depend on the profile; the draws for spreads are made once."""
        held = state.tensors
        self.state = state
        generator = torch.Generator(held["base_mean"].device).manual_seed(seed)
        self._task = held["cross_task"] @ held["warp_2"]  # [c, h]: both are linear
        offset = held["cross_task"] @ held["warp_2_offset"] + held["cross_offset"]
        self.base_at_mean = offset + held["cross_base"] @ held["base_mean"]  # [c]
        self._offset = offset
        self._noise_base = self._draw_base(SPREAD_DRAWS, generator)  # [S, c]
        self._noise_task = torch.randn(
            SPREAD_DRAWS, 1, len(held["scales"]), generator=generator, device=generator.device
        ).to(self._task)

    def predict(self, profiles: Tensor) -> Prediction:
        """Mean networks, their spread and novelty for profiles [B, d]."""
        with torch.no_grad():
            where, spread = self.processes(profiles)
            mean, _ = self.cross(self.base_at_mean, where)  # [B, p]
            drawn = where + self._noise_task * spread.sqrt()  # [S, B, e]
            means, variances = self.cross(self._noise_base[:, None, :], drawn)
            deviation = (means.var(0) + variances.mean(0)).sqrt()
            net = self._balanced(mean)
            # Units are rescaled: the spread is scaled with the mean.
            ratio = torch.where(mean.abs() > 1e-9, net / mean, 1.0)
            novelty = (spread / self.state.tensors["scales"]).mean(-1).clamp(0, 1)
            return Prediction(net, deviation * ratio.abs(), novelty)

    def sample(self, profiles: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Networks drawn from the model: profiles [B, d] → [count, B, p]."""
        with torch.no_grad():
            where, spread = self.processes(profiles)
            noise = torch.randn(count, *where.shape, generator=generator, device=generator.device).to(where)
            base = self._draw_base(count, generator)[:, None, :]
            means, variances = self.cross(base, where + noise * spread.sqrt())
            noise = torch.randn(means.shape, generator=generator, device=generator.device).to(means)
            return self._balanced(means + noise * variances.sqrt())

    def _draw_base(self, count: int, generator: torch.Generator) -> Tensor:
        held = self.state.tensors
        noise = torch.randn(count, len(held["base_mean"]), generator=generator, device=generator.device)
        drawn = held["base_mean"] + held["base_deviation"] * noise.to(held["base_mean"])
        return drawn @ held["cross_base"].mT + self._offset  # [S, c]

    def _standardised(self, profiles: Tensor) -> Tensor:
        held = self.state.tensors
        if profiles.dim() != 2 or profiles.shape[1] != self.state.profile_size:
            raise ValueError(f"profiles must be a matrix with {self.state.profile_size} columns")
        return (profiles.to(held["profile_centre"]) - held["profile_centre"]) / held["profile_scale"]

    def processes(self, profiles: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of q(g(τ)): each [B, e]."""
        held = self.state.tensors
        lengths = held["lengths"][:, None, :]
        points, places = self._standardised(profiles) / lengths, held["inducing"] / lengths  # [e, B, d], [e, M, d]
        gaps = torch.cdist(points, places, compute_mode="donot_use_mm_for_euclid_dist")
        kernel = held["scales"][:, None, None] * (-0.5 * gaps.square()).exp()  # [e, B, M]
        mean = held["constants"] + (kernel @ held["mean_weights"][..., None]).squeeze(-1).mT
        explained = ((kernel @ held["variance_weights"]) * kernel).sum(-1).mT
        return mean, (held["scales"] - explained).clamp_min(0)

    def cross(self, base: Tensor, processes: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of γ: base [..., c] with its weights applied, processes [..., e] → each [..., p]."""
        held = self.state.tensors
        warped = (processes @ held["warp_1"].mT + held["warp_1_offset"]).tanh()
        hidden = (warped @ self._task.mT + base).relu()
        latent = (hidden @ held["cross_2"].mT + held["cross_2_offset"]).relu()
        mean = held["centre"] + held["scale"] * (latent @ held["mean"].mT + held["mean_offset"])
        bent = (latent @ held["variance"].mT).tanh() * held["variance_range"] + held["variance_offset"]
        return mean, bent.exp() * held["scale"].square()

    def _balanced(self, nets: Tensor) -> Tensor:
        return rescaled(self.state.shape, nets, balance=True)
