"""Warm starts at request time: a new user's head from their profile by a trained fusion model, and its trust.

The arrays are the result of `warm_start_training.py`: a fusion model of heads, the basis and the prior of its
epoch, and the guard's limits. Profiles of the sources are passed separately, so that a single one can be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.warm_start_prior import TRUST_MAX
from metaban.models.fusion.model import FusionModel, FusionState, InvalidFusion
from metaban.models.learner import Learner

Vector = NDArray[np.float64]

#: Name prefixes in the arrays: of the fusion model and of the basis.
FUSION, BASIS = "fusion.", "basis."

#: Further arrays; `d` is the dimension of a profile, `D` of a head.
OTHERS: Final[Mapping[str, str]] = {
    "profile_centre": "d", "profile_scale": "d", "prior_mean": "D", "blend": "", "trust": "", "novelty": "",
}  # fmt: skip

#: Profiles are clipped at so many standard deviations; they are fully novel there.
PROFILE_REACH: Final = 10.0

Verdict = Literal["fusion", "blend", "prior"]


@final
@dataclass(frozen=True, slots=True)
class GuardReport:
    """Predictions of held-out users' first rewards by fused heads, against the prior; losses in nats per user."""

    #: How starts are used: as fused, shrunk towards the prior, or not at all.
    verdict: Verdict
    #: Step from the prior's mean to the fused head, and the trust in it.
    blend: float
    trust: float
    #: Held-out users, and the number of their rewards.
    held_out: int
    events: int
    #: −log-likelihood of a user's first rewards under the prior, and under a start chosen on other users.
    prior_loss: float
    fusion_loss: float
    #: The difference and its standard error over users.
    gain: float
    gain_error: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore the result of `to_json`."""
        return cls(**values)


@final
class WarmStarter:
    """Computes warm starts from profiles; immutable, so that requests may share it."""

    def __init__(
        self, learner: PosteriorLearner, fusion: FusionModel, held: Mapping[str, NDArray[Any]], sources: Vector
    ) -> None:
        self._starts = learner.starts
        self._fusion = fusion
        self._basis = {name.removeprefix(BASIS): array for name, array in held.items() if name.startswith(BASIS)}
        self._centre, self._scale = held["profile_centre"], held["profile_scale"]
        self._prior_mean = held["prior_mean"]
        self._blend, self._trust, self._known = (float(held[name]) for name in ("blend", "trust", "novelty"))
        self._sources = self._standardised(sources)
        #: Whether starts are used at all.
        self.active = self._blend > 0 and self._trust > 0
        #: d
        self.profile_size = len(self._centre)

    @classmethod
    def from_arrays(cls, learner: Learner, arrays: Mapping[str, NDArray[Any]], source_profiles: Vector) -> WarmStarter:
        """From trained arrays, and the profiles of the sources [n, d] that still exist."""
        if not isinstance(learner, PosteriorLearner):
            raise InvalidFusion("this learner takes no warm starts")
        named = {name.removeprefix(FUSION): array for name, array in arrays.items() if name.startswith(FUSION)}
        state = FusionState.from_dict({name: torch.from_numpy(np.array(array)) for name, array in named.items()})
        basis = learner.initial_shared()
        sizes = {"d": state.profile_size, "D": learner.head_size}
        wanted = {name: tuple(sizes[letter] for letter in letters) for name, letters in OTHERS.items()}
        wanted |= {BASIS + name: tuple(basis[name].shape) for name in basis_names(learner)}
        for name, shape in wanted.items():
            if name not in arrays or arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise InvalidFusion(f"{name} of a fusion model is missing, has the wrong shape or is not finite")
        if state.shape.parameters != learner.head_size:
            raise InvalidFusion("the fusion model is of other heads than the learner's")
        if not (np.all(arrays["profile_scale"] > 0) and np.all(arrays[BASIS + "scale"] > 0)):
            raise InvalidFusion("scales of a fusion model must be positive")
        if not (0 <= arrays["trust"] <= TRUST_MAX and 0 <= arrays["novelty"] <= 1 and arrays["blend"] >= 0):
            raise InvalidFusion("what the guard of a fusion model allows is out of range")
        if source_profiles.ndim != 2 or source_profiles.shape[1] != state.profile_size:
            raise InvalidFusion(f"profiles of sources must have {state.profile_size} numbers")
        held = {name: np.array(arrays[name], dtype=np.float64) for name in wanted}
        return cls(learner, FusionModel(state), held, source_profiles)

    def start(self, profile: Vector) -> Vector:
        """The warm start of a user with this profile [d]: [start_size], with less trust the more novel the profile."""
        with torch.inference_mode():
            predicted = self._fusion.predict(torch.from_numpy(self._known_profile(profile)))
        # Full trust at the held-out users' median novelty, none for an entirely novel profile.
        share = min(1.0, (1 - float(predicted.novelty[0])) / max(1e-9, 1 - self._known))
        head = predicted.mean.numpy().astype(np.float64)
        head = self._prior_mean + self._blend * share * (head - self._prior_mean)
        raw = self._starts.raw(self._basis, head)[0]
        return np.append(raw, self._trust * share)

    def nearest(self, profile: Vector, count: int) -> list[tuple[int, float]]:
        """Rows of the sources with the most similar profiles, and their distances in standard deviations."""
        distances = np.linalg.norm(self._sources - self._known_profile(profile), axis=1)
        rows = np.argsort(distances, kind="stable")[:count]
        return [(int(row), float(distances[row])) for row in rows]

    def _known_profile(self, profile: Vector) -> Vector:
        if profile.shape != (self.profile_size,) or not np.isfinite(profile).all():
            raise ValueError(f"a profile has {self.profile_size} numbers, all finite")
        return self._standardised(profile[None])

    def _standardised(self, profiles: Vector) -> Vector:
        return standardised_profiles(profiles, self._centre, self._scale)


def standardised_profiles(profiles: Vector, centre: Vector, scale: Vector) -> Vector:
    """Profiles [n, d] as inputs of the fusion model."""
    found: Vector = np.clip((profiles - centre) / scale, -PROFILE_REACH, PROFILE_REACH)
    return found


def basis_names(learner: PosteriorLearner) -> tuple[str, ...]:
    """Names of the shared tensors that define the basis of heads."""
    return ("mean", "scale", "directions") if learner.inputs.narrowed else ("mean", "scale")
