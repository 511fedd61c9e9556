"""Warm starts out of profiles, in requests: what a trained fusion model says of a new user's head, and how far.

The arrays are what `models/warm_start_training.py` made: a fusion model of heads, the basis and the prior of the epoch
that it was trained under, and what the guard allows. No profile of a single user is among them; those of the sources
come beside them, so that one can be struck out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from models.fusion import Fusion, FusionState, InvalidFusion
from models.head_starts import TRUST_MAX
from models.learner import Learner
from models.posterior import PosteriorLearner

Vector = NDArray[np.float64]

#: Names in the arrays: the fusion model's begin with the first, the basis's with the second.
FUSION, BASIS = "fusion.", "basis."
#: What else is there; `d` numbers of a profile, `D` of a head.
OTHERS: Final[Mapping[str, str]] = {
    "profile_centre": "d", "profile_scale": "d", "prior_mean": "D", "blend": "", "trust": "", "novelty": "",
}  # fmt: skip
#: Profiles are cut off at so many standard deviations: they are as new there as anywhere further out.
PROFILE_REACH: Final = 10.0

Verdict = Literal["fusion", "blend", "prior"]


@final
@dataclass(frozen=True, slots=True)
class GuardReport:
    """How fused heads foresaw the first rewards of users held out, against the prior; losses in nats a user."""

    #: Whether starts are used: as fused, drawn towards the prior, or not at all.
    verdict: Verdict
    #: How far a started head goes from the prior's mean to the fused head, and how far it is trusted.
    blend: float
    trust: float
    #: Users held out, and how many of their rewards were foretold.
    held_out: int
    events: int
    #: −log-likelihood of a user's first rewards under the prior, and under the start that others than they chose.
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
        """Restore what `to_json` wrote."""
        return cls(**values)


@final
class WarmStarter:
    """Answers for profiles; immutable, so that requests may share it."""

    def __init__(
        self, learner: PosteriorLearner, fusion: Fusion, held: Mapping[str, NDArray[Any]], sources: Vector
    ) -> None:
        self._starts = learner.starts
        self._fusion = fusion
        self._basis = {name.removeprefix(BASIS): array for name, array in held.items() if name.startswith(BASIS)}
        self._centre, self._scale = held["profile_centre"], held["profile_scale"]
        self._prior_mean = held["prior_mean"]
        self._blend, self._trust, self._known = (float(held[name]) for name in ("blend", "trust", "novelty"))
        self._sources = self._standardised(sources)
        #: Whether starts are to be used at all.
        self.active = self._blend > 0 and self._trust > 0
        #: d
        self.profile_size = len(self._centre)

    @classmethod
    def from_arrays(cls, learner: Learner, arrays: Mapping[str, NDArray[Any]], source_profiles: Vector) -> WarmStarter:
        """From what training made, and the profiles of those it was trained on [n, d] as far as they are known."""
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
        return cls(learner, Fusion(state), held, source_profiles)

    def start(self, profile: Vector) -> Vector:
        """The warm start of a user with this profile [d]: [start_size], trusted less the newer the profile is."""
        with torch.inference_mode():
            said = self._fusion.predict(torch.from_numpy(self._known_profile(profile)))
        # At profiles like those that the guard was content with, all that it allows; at quite new ones, nothing.
        share = min(1.0, (1 - float(said.novelty[0])) / max(1e-9, 1 - self._known))
        head = said.mean.numpy().astype(np.float64)
        head = self._prior_mean + self._blend * share * (head - self._prior_mean)
        raw = self._starts.raw(self._basis, head)[0]
        return np.append(raw, self._trust * share)

    def nearest(self, profile: Vector, count: int) -> list[tuple[int, float]]:
        """Rows of the sources with the most similar profiles, and how many standard deviations away they are."""
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
    """Profiles [n, d] as the fusion model takes them."""
    found: Vector = np.clip((profiles - centre) / scale, -PROFILE_REACH, PROFILE_REACH)
    return found


def basis_names(learner: PosteriorLearner) -> tuple[str, ...]:
    """What of an epoch's shared state says what its heads mean."""
    return ("mean", "scale", "directions") if learner.inputs.narrowed else ("mean", "scale")
