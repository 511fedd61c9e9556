"""Fits many users' learners at once to their samples. Sends no Redis command, so benchmarks run the same code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from metaban.models.learner import Learner, Query, State, UserBatch, arm_key
from metaban.models.numerics.arrays import Array, Arrays, as_arrays, numpy_kind
from metaban.models.numerics.slates import Slates
from metaban.store.codec import Sample
from metaban.store.reward_rules import RewardRules
from metaban.worker.learning.samples import combine_rewards

#: Users fitted in one tensor operation; limits memory.
USERS_PER_FIT = 256

#: A state with larger numbers is checked by scoring test arms: large inputs may explain it.
LARGE_STATE = 1e6

#: Largest valid score of a test arm; rewards lie between 0 and 1.
VALID_SCORE_MAX = 1e9

#: Inputs of test arms are clipped to this magnitude.
TEST_INPUT_MAX = 1e3


@final
@dataclass(frozen=True, slots=True)
class FitInput:
    """A user to fit: kept samples (newest last), previous state (None for a new user) and warm start."""

    user_id: str
    events: int
    samples: Sequence[Sample]
    previous: dict[str, np.ndarray] | None
    start: np.ndarray | None = None


@final
@dataclass(frozen=True, slots=True)
class FitResult:
    """Fitted states in the order of the inputs, and the users that were reset to the prior."""

    states: list[dict[str, np.ndarray]]
    quarantined: tuple[str, ...]

    def part(self, start: int, end: int, fit_inputs: Sequence[FitInput]) -> FitResult:
        """The result of the inputs `start` to `end` of the batch."""
        users = {fit_input.user_id for fit_input in fit_inputs}
        return FitResult(self.states[start:end], tuple(user for user in self.quarantined if user in users))


@final
@dataclass(frozen=True, slots=True)
class _Prior:
    """A shared state, its arrays as the learner takes them, and the state of a new user under it."""

    state: State
    shared: Arrays
    new_user: State


@final
class Trainer:
    """Runs a learner's `fit` on a device."""

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
        self._in_numpy = learner.supports_numpy and device.type == "cpu"
        self._cached_prior: _Prior | None = None

    def batch(self, fit_inputs: Sequence[FitInput], *, as_numpy: bool = False) -> UserBatch:
        """Users' samples, combined by the reward rules and padded to the longest user [B, S], S ≥ 1."""
        views = [combine_rewards(fit_input.samples, self._rules) for fit_input in fit_inputs]
        longest = max(map(len, views), default=0) or 1
        shape, kind = (len(fit_inputs), longest), numpy_kind(self.learner.dtype)
        features = np.zeros((*shape, self.learner.input_size), dtype=kind)
        phi = np.zeros((*shape, self.learner.noted), dtype=kind)
        rewards = np.zeros(shape)
        epochs, arm_keys, places = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        counts = np.array([len(samples) for samples in views], dtype=np.int64)
        starts = np.zeros((len(fit_inputs), self.learner.start_size))
        for row, fit_input in enumerate(fit_inputs):
            # A warm start of another shape belongs to another learner.
            if fit_input.start is not None and fit_input.start.shape == starts.shape[1:]:
                starts[row] = fit_input.start
        valid = np.arange(longest) < counts[:, None]  # [B, S]
        samples = [sample for view in views for sample in view]  # in the order of `valid`
        if samples:
            features[valid] = _rows([sample.features for sample in samples], features.shape[-1])
            phi[valid] = _rows([sample.phi for sample in samples], phi.shape[-1])
            rewards[valid] = [sample.reward for sample in samples]
            epochs[valid] = [sample.epoch for sample in samples]
            arm_keys[valid] = [arm_key(sample.arm_id) for sample in samples]
            places[valid] = [sample.place for sample in samples]
        given: Callable[[np.ndarray], Array] = (lambda array: array) if as_numpy else self._tensor
        return UserBatch(
            features=given(features),
            rewards=given(_cast(rewards, kind)),
            valid=given(valid),
            events=given(np.array([fit_input.events for fit_input in fit_inputs], dtype=np.int64)),
            draw=given(np.array([seed_of(fit_input) for fit_input in fit_inputs], dtype=np.int64)),
            phi=given(phi),
            epochs=given(epochs),
            starts=given(starts),
            arm_keys=given(arm_keys),
            places=given(places),
            weight=given(np.full(len(fit_inputs), self._user_weight, dtype=kind)),
        )

    def readable(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples with inputs and notes of this learner's sizes; `batch` and `fit` take no others."""
        sizes = {(sample.features.size, sample.phi.size) for sample in samples}
        own = (self.learner.input_size, self.learner.noted)
        if sizes <= {own}:  # nearly always
            return samples
        return [sample for sample in samples if (sample.features.size, sample.phi.size) == own]

    def fit(self, shared: State, fit_inputs: Sequence[FitInput]) -> FitResult:
        """Fit all users under a shared state. A state that is not finite or scores absurdly is reset to the prior."""
        prior = self._prior(shared)
        states: list[dict[str, np.ndarray]] = []
        quarantined: list[str] = []
        # Overflows are found below.
        with torch.inference_mode(), np.errstate(all="ignore"):
            for start in range(0, len(fit_inputs), USERS_PER_FIT):
                part = fit_inputs[start : start + USERS_PER_FIT]
                previous = self._previous(prior.new_user, part) if self.learner.continues else {}
                batch = self.batch(part, as_numpy=self._in_numpy)
                fitted = self.learner.fit(prior.shared, batch, previous)
                arrays = {name: array if self._in_numpy else array.cpu().numpy() for name, array in fitted.items()}
                largest = _largest(arrays, len(part)).tolist()
                for row, fit_input in enumerate(part):
                    state = {name: np.asarray(array[row]) for name, array in arrays.items()}
                    large = largest[row]  # NaN compares as False
                    if not (large <= LARGE_STATE or (math.isfinite(large) and self._is_valid(prior, fit_input, state))):
                        quarantined.append(fit_input.user_id)
                        state = {name: tensor.cpu().numpy() for name, tensor in prior.new_user.items()}
                    states.append(state)
        return FitResult(states, tuple(quarantined))

    def _prior(self, shared: State) -> _Prior:
        """Prior of a shared state, cached: shared states are replaced, never changed in place."""
        prior = self._cached_prior  # read once: events and refits are fitted on two threads
        if prior is None or prior.state is not shared:
            with torch.inference_mode():
                new_user = self.learner.initial_user(shared)
            given = as_arrays(shared) if self._in_numpy else shared
            self._cached_prior = prior = _Prior(shared, given, new_user)
        return prior

    def _is_valid(self, prior: _Prior, fit_input: FitInput, state: dict[str, np.ndarray]) -> bool:
        """Whether a finite state gives valid scores of test arms, for its own user and for a new user.

        Finite numbers may overflow when multiplied, which would also affect other users of the group.
        """
        mine = {name: self._tensor(array) for name, array in state.items()}
        width = self.learner.input_size
        newest = fit_input.samples[-1].features if fit_input.samples else np.zeros(width)
        arms = np.stack([np.zeros(width), np.ones(width), newest.clip(-TEST_INPUT_MAX, TEST_INPUT_MAX)])
        query = Query(
            arms=self._tensor(np.concatenate([arms, arms])).to(self.learner.dtype),
            slates=Slates([len(arms), len(arms)]),
            own={name: torch.stack([mine[name], start.to(mine[name])]) for name, start in prior.new_user.items()},
            own_row=self._tensor(np.array([0, -1])),
            own_events=self._tensor(np.array([fit_input.events, 0])),
        )
        try:
            pool = {name: tensor.unsqueeze(0) for name, tensor in mine.items()}
            scores = self.learner.score(prior.state, pool, query)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return False
        return bool((scores.mean.abs() + scores.bonus.abs() <= VALID_SCORE_MAX).all())

    def _previous(self, new_user: State, fit_inputs: Sequence[FitInput]) -> State:
        def stack(name: str, start: Tensor) -> Tensor:
            states = [fit_input.previous for fit_input in fit_inputs]
            rows = [start if state is None else self._tensor(state[name]).to(start) for state in states]
            return torch.stack(rows)

        return {name: stack(name, start) for name, start in new_user.items()}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def seed_of(fit_input: FitInput) -> int:
    """Seed of a learner's random choices: fixed for a user at a version."""
    digest = blake2b(f"{fit_input.user_id}:{fit_input.events}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _rows(arrays: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Arrays of `width` numbers as rows [n, width]; three times as fast as np.stack."""
    return np.concatenate(arrays).reshape(len(arrays), width)


def _cast(array: np.ndarray, kind: type[np.floating[Any]]) -> np.ndarray:
    """Cast to another type. Overflows become infinite and are found when the fitted state is checked."""
    with np.errstate(over="ignore"):
        return array.astype(kind, copy=False)


def _largest(arrays: Arrays, rows: int) -> np.ndarray:
    """Largest magnitude per row over all fields [B, …] → [B]; NaN where a row contains NaN."""
    numbers = np.concatenate([array.reshape(rows, -1) for array in arrays.values()], axis=1)
    largest: np.ndarray = np.abs(numbers).max(1)
    return largest
