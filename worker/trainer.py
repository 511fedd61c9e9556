"""From users' samples to fitted learners, many users at once; sends no Redis command, so benchmarks run it as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from models.arrays import Array, as_arrays, numpy_kind
from models.learner import Arrays, Learner, Query, State, UserBatch
from models.slates import Slates
from store.codec import Sample
from store.reward_rules import RewardRules
from worker.rewards_view import learnable

#: Users fitted in one tensor program; more are fitted in turn, which bounds memory.
USERS_PER_FIT = 256
#: A state with larger numbers than this may be sound, where inputs are large; it has to show that it is.
LARGE_STATE = 1e6
#: What a sound learner says of ordinary arms stays far below this: rewards lie between 0 and 1.
SOUND_SCORE_MAX = 1e9
#: Larger inputs are no ordinary ones.
ORDINARY_INPUT_MAX = 1e3


@final
@dataclass(frozen=True, slots=True)
class Pupil:
    """A user to fit: all samples kept, newest last, the state before them (None: a new user), and the warm start."""

    user_id: str
    events: int
    samples: Sequence[Sample]
    previous: dict[str, np.ndarray] | None
    start: np.ndarray | None = None


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
@dataclass(frozen=True, slots=True)
class _Prior:
    """A shared state, as the learner takes it, and the state of a new user under it."""

    of: State
    shared: Arrays
    newborn: State


@final
class Trainer:
    """Runs a learner's user adaptation on a device."""

    def __init__(
        self,
        learner: Learner,
        device: torch.device,
        *,
        user_weight: float = 1.0,
        rules: RewardRules | None = None,
    ) -> None:
        self.learner = learner
        self.device = device
        self._rules = rules or RewardRules()
        self._user_weight = user_weight
        #: On a CPU whoever can fits in numpy.
        self._in_numpy = learner.knows_numpy and device.type == "cpu"
        self._known: _Prior | None = None

    def batch(self, pupils: Sequence[Pupil], *, as_numpy: bool = False) -> UserBatch:
        """Samples side by side, as the reward rules see them and padded to the longest user; there is a column even
        when nobody has any."""
        views = [learnable(pupil.samples, self._rules) for pupil in pupils]
        longest = max(map(len, views), default=0) or 1
        shape, kind = (len(pupils), longest), numpy_kind(self.learner.dtype)
        features = np.zeros((*shape, self.learner.inputs_expected), dtype=kind)
        phi = np.zeros((*shape, self.learner.noted), dtype=kind)
        rewards, epochs = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        counts = np.array([len(samples) for samples in views], dtype=np.int64)
        starts = np.zeros((len(pupils), self.learner.start_size))
        for row, pupil in enumerate(pupils):
            if pupil.start is not None and pupil.start.shape == starts.shape[1:]:  # not of another learner
                starts[row] = pupil.start
        valid = np.arange(longest) < counts[:, None]  # [B, S]
        samples = [sample for view in views for sample in view]  # in the order of what is valid
        if samples:
            features[valid] = _rows([sample.features for sample in samples], features.shape[-1])
            phi[valid] = _rows([sample.phi for sample in samples], phi.shape[-1])
            rewards[valid] = [sample.reward for sample in samples]
            epochs[valid] = [sample.epoch for sample in samples]
        given: Callable[[np.ndarray], Array] = (lambda array: array) if as_numpy else self._tensor
        return UserBatch(
            features=given(features),
            rewards=given(_cut(rewards, kind)),
            valid=given(valid),
            events=given(np.array([pupil.events for pupil in pupils], dtype=np.int64)),
            draw=given(np.array([_draw(pupil) for pupil in pupils], dtype=np.int64)),
            phi=given(phi),
            epochs=given(epochs),
            starts=given(starts),
            weight=given(np.full(len(pupils), self._user_weight, dtype=kind)),
        )

    def fit(self, shared: State, pupils: Sequence[Pupil]) -> Fitted:
        """Fit every pupil from the shared state; a learner that is not finite, or absurd, is put back to the prior."""
        prior = self._prior(shared)
        states: list[dict[str, np.ndarray]] = []
        quarantined: list[str] = []
        # What leaves the range of numbers is found below, and its learner put back.
        with torch.inference_mode(), np.errstate(all="ignore"):
            for start in range(0, len(pupils), USERS_PER_FIT):
                part = pupils[start : start + USERS_PER_FIT]
                previous = self._previous(prior.newborn, part) if self.learner.continues else {}
                batch = self.batch(part, as_numpy=self._in_numpy)
                fitted = self.learner.fit(prior.shared, batch, previous)
                arrays = {name: array if self._in_numpy else array.cpu().numpy() for name, array in fitted.items()}
                largest = _largest(arrays, len(part)).tolist()
                for row, pupil in enumerate(part):
                    state = {name: np.asarray(array[row]) for name, array in arrays.items()}
                    large = largest[row]  # NaN, too, is not below the limit
                    if not (large <= LARGE_STATE or (math.isfinite(large) and self._sound(prior, pupil, state))):
                        quarantined.append(pupil.user_id)
                        state = {name: tensor.cpu().numpy() for name, tensor in prior.newborn.items()}
                    states.append(state)
        return Fitted(states, tuple(quarantined))

    def _prior(self, shared: State) -> _Prior:
        """What a shared state is to a fit, worked out once for each: shared states are replaced, never changed."""
        if self._known is None or self._known.of is not shared:
            with torch.inference_mode():
                newborn = self.learner.newborn(shared)
            given = as_arrays(shared) if self._in_numpy else shared
            self._known = _Prior(shared, given, newborn)
        return self._known

    def _sound(self, prior: _Prior, pupil: Pupil, state: dict[str, np.ndarray]) -> bool:
        """Whether a finite state makes sense of ordinary arms: to its user, and to another who meets it.

        Numbers may be finite and still overflow once they are multiplied, and then for others in the group as well.
        """
        mine = {name: self._tensor(array) for name, array in state.items()}
        width = self.learner.inputs_expected
        newest = pupil.samples[-1].features if pupil.samples else np.zeros(width)
        arms = np.stack([np.zeros(width), np.ones(width), newest.clip(-ORDINARY_INPUT_MAX, ORDINARY_INPUT_MAX)])
        query = Query(
            arms=self._tensor(np.concatenate([arms, arms])).to(self.learner.dtype),
            slates=Slates([len(arms), len(arms)]),
            own={name: torch.stack([mine[name], start.to(mine[name])]) for name, start in prior.newborn.items()},
            own_row=self._tensor(np.array([0, -1])),
            own_events=self._tensor(np.array([pupil.events, 0])),
        )
        try:
            scores = self.learner.score(prior.of, {name: tensor.unsqueeze(0) for name, tensor in mine.items()}, query)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return False
        return bool((scores.mean.abs() + scores.bonus.abs() <= SOUND_SCORE_MAX).all())

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


def _rows(arrays: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Arrays of `width` numbers as rows [n, width]; np.stack, which looks at each one first, takes 3 times as long."""
    return np.concatenate(arrays).reshape(len(arrays), width)


def _cut(array: np.ndarray, kind: type[np.floating[Any]]) -> np.ndarray:
    """In another type; what that cannot hold is infinite, and found when its learner is not finite."""
    with np.errstate(over="ignore"):
        return array.astype(kind, copy=False)


def _largest(arrays: Arrays, rows: int) -> np.ndarray:
    """The largest magnitude in each row of all fields [B, …]; NaN where a row holds one [B]."""
    numbers = np.concatenate([array.reshape(rows, -1) for array in arrays.values()], axis=1)
    largest: np.ndarray = np.abs(numbers).max(1)
    return largest
