"""From users' samples to fitted learners, many users at once; sends no Redis command, so benchmarks run it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import final

import numpy as np
import torch
from torch import Tensor

from models.learner import Learner, State, UserBatch
from store.codec import Sample

#: Users fitted in one tensor program; more are fitted in turn, which bounds memory.
USERS_PER_FIT = 256


@final
@dataclass(frozen=True, slots=True)
class Pupil:
    """A user to fit: all samples kept, newest last, and the state before them (None: a new user)."""

    user_id: str
    events: int
    samples: Sequence[Sample]
    previous: dict[str, np.ndarray] | None


@final
@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted states in the order of the pupils, and who had to be put back to the prior."""

    states: list[dict[str, np.ndarray]]
    quarantined: tuple[str, ...]

    def part(self, start: int, end: int, pupils: Sequence[Pupil]) -> Fitted:
        """The share of some pupils, who stand from `start` to `end` in the batch."""
        users = {pupil.user_id for pupil in pupils}
        return Fitted(self.states[start:end], tuple(user for user in self.quarantined if user in users))


@final
class Trainer:
    """Runs a learner's user adaptation on a device."""

    def __init__(self, learner: Learner, device: torch.device, *, user_weight: float = 1.0) -> None:
        self.learner = learner
        self.device = device
        self._user_weight = user_weight
        self._born: tuple[State, State] | None = None

    def batch(self, pupils: Sequence[Pupil]) -> UserBatch:
        """Samples side by side, padded to the longest user; there is a column even when nobody has any."""
        longest = max((len(pupil.samples) for pupil in pupils), default=0) or 1
        features = np.zeros((len(pupils), longest, self.learner.inputs_expected), dtype=np.float32)
        phi = np.zeros((len(pupils), longest, self.learner.noted), dtype=np.float32)
        rewards = np.zeros((len(pupils), longest), dtype=np.float64)
        valid = np.zeros((len(pupils), longest), dtype=np.bool_)
        epochs = np.zeros((len(pupils), longest), dtype=np.int64)
        for row, pupil in enumerate(pupils):
            count = len(pupil.samples)
            if not count:
                continue
            features[row, :count] = [sample.features for sample in pupil.samples]
            phi[row, :count] = [sample.phi for sample in pupil.samples]
            rewards[row, :count] = [sample.reward for sample in pupil.samples]
            epochs[row, :count] = [sample.epoch for sample in pupil.samples]
            valid[row, :count] = True
        dtype = self.learner.dtype
        return UserBatch(
            features=self._tensor(features).to(dtype),
            rewards=self._tensor(rewards).to(dtype),
            valid=self._tensor(valid),
            events=self._tensor(np.array([pupil.events for pupil in pupils], dtype=np.int64)),
            draw=self._tensor(np.array([_draw(pupil) for pupil in pupils], dtype=np.int64)),
            phi=self._tensor(phi).to(dtype),
            epochs=self._tensor(epochs),
            weight=torch.full((len(pupils),), self._user_weight, dtype=dtype, device=self.device),
        )

    def fit(self, shared: State, pupils: Sequence[Pupil]) -> Fitted:
        """Fit every pupil from the shared state; a learner that turns non-finite is put back to the prior."""
        newborn = self._newborn(shared)
        states: list[dict[str, np.ndarray]] = []
        quarantined: list[str] = []
        with torch.inference_mode():
            for start in range(0, len(pupils), USERS_PER_FIT):
                part = pupils[start : start + USERS_PER_FIT]
                fitted = self.learner.fit(shared, self.batch(part), self._previous(newborn, part))
                finite = [tensor.isfinite().reshape(len(part), -1).all(1) for tensor in fitted.values()]
                sound = torch.stack(finite).all(0)  # [B]
                quarantined += [pupil.user_id for pupil, ok in zip(part, sound.tolist(), strict=True) if not ok]
                fitted = {
                    name: torch.where(_columns(sound, tensor), tensor, newborn[name]) for name, tensor in fitted.items()
                }
                states += _rows(fitted, len(part))
        return Fitted(states, tuple(quarantined))

    def _newborn(self, shared: State) -> State:
        """The prior that a shared state gives, worked out once for each: shared states are replaced, never changed."""
        if self._born is None or self._born[0] is not shared:
            with torch.inference_mode():
                self._born = shared, self.learner.newborn(shared)
        return self._born[1]

    def _previous(self, newborn: State, pupils: Sequence[Pupil]) -> State:
        def stack(name: str, start: Tensor) -> Tensor:
            rows = [
                start if pupil.previous is None else self._tensor(pupil.previous[name]).to(start) for pupil in pupils
            ]
            return torch.stack(rows)

        return {name: stack(name, start) for name, start in newborn.items()}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def _draw(pupil: Pupil) -> int:
    """A number that belongs to this user at this version, for whatever the learner chooses at random."""
    digest = blake2b(f"{pupil.user_id}:{pupil.events}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _columns(rows: Tensor, like: Tensor) -> Tensor:
    """[B] shaped to broadcast against [B, …]."""
    return rows.reshape(-1, *[1] * (like.ndim - 1))


def _rows(states: State, count: int) -> list[dict[str, np.ndarray]]:
    arrays = {name: tensor.cpu().numpy() for name, tensor in states.items()}
    return [{name: np.asarray(array[row]) for name, array in arrays.items()} for row in range(count)]
