"""The parameters that answer requests: every user of the candidate pool, the guests asked about lately, one epoch.

Knows tensors only. One thread changes it and scores with it, so nothing here is locked; others may ask who is held,
which single look-ups answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from models.bank import UserBank
from models.learner import Learner, Query, State
from store.users import UserState

#: Users whose briefs are kept between requests; the oldest go first.
BRIEFS_MAX = 4_096


@final
@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The arms of one request as the learner sees them, inputs float32 [k, d].

    `loaded` is the asking user's state if it was loaded for this request: it may not be held any more, or not yet.
    """

    user_id: str
    inputs: NDArray[np.float32]
    loaded: UserState | None = None


@final
@dataclass(frozen=True, slots=True)
class ArmScores:
    """One request's arms judged, what the learner noted of each [k, q], and the asking user's events."""

    mean: NDArray[np.float64]
    bonus: NDArray[np.float64]
    group_size: NDArray[np.int64]
    phi: NDArray[np.float32]
    user_events: int
    epoch: int


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Which state of a user is held; later ones compare greater."""

    incarnation: int
    version: int
    epoch: int

    @staticmethod
    def of(state: UserState) -> Standing:
        return Standing(state.incarnation, state.version, state.epoch)

    def precedes(self, other: Standing) -> bool:
        """Whether `other` is at least as new."""
        return (self.incarnation, self.version, self.epoch) <= (other.incarnation, other.version, other.epoch)


@final
class ServedModel:
    """Scores requests with the states it was given."""

    def __init__(self, learner: Learner, device: torch.device, *, pool_max: int, guests_max: int) -> None:
        self.learner = learner
        self.epoch_number = 0
        self.epoch_events = 0
        self._device = device
        self._pool_max = pool_max
        self._guests_max = guests_max
        self._shared: State = {name: tensor.to(device) for name, tensor in learner.initial_shared().items()}
        self._newborn = learner.newborn(self._shared)
        self._members: frozenset[str] = frozenset()
        self._pool = UserBank(learner.fields, learner.dtype, device)
        self._guests: OrderedDict[str, tuple[State, int]] = OrderedDict()
        self._standing: dict[str, Standing] = {}
        self._briefs: dict[str, tuple[tuple[Standing, int], State]] = {}

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, user: str) -> bool:
        return user in self._standing

    def holds(self, user: str) -> Standing | None:
        """The state held of a user."""
        return self._standing.get(user)

    def users(self) -> list[str]:
        """Everyone held."""
        return list(self._standing)

    def wants(self, user: str) -> bool:
        """Whether news of a user are worth loading: they are held, or belong into the pool."""
        if user in self._standing or user in self._members:
            return True
        return not self._members and len(self._pool) < self._pool_max

    def adopt_epoch(
        self, number: int, events: int, tensors: Mapping[str, NDArray[np.generic]], members: Iterable[str]
    ) -> bool:
        """Serve a new epoch, unless it is not finite; who is no longer in the pool is dropped until asked about."""
        if not all(np.isfinite(array).all() for array in tensors.values()):
            return False
        self._shared = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in tensors.items()}
        self._newborn = self.learner.newborn(self._shared)
        self.epoch_number, self.epoch_events = number, events
        self._briefs.clear()
        self._members = frozenset(members)
        if self._members:
            for user in [user for user in self._pool.users if user not in self._members]:
                self._pool.remove(user)
                del self._standing[user]
            for user in [user for user in self._guests if user in self._members]:
                state, version = self._guests.pop(user)
                self._pool.put([user], {name: tensor.unsqueeze(0) for name, tensor in state.items()}, [version])
        return True

    def put(self, states: Sequence[UserState]) -> None:
        """Take over states that are as new as what is held; a state that does not fit the learner is refused."""
        pooled: dict[str, UserState] = {}
        for state in states:
            if self._acceptable(state):
                self._standing[state.user_id] = Standing.of(state)
                if state.user_id in pooled or self._into_pool(state.user_id, len(pooled)):
                    pooled[state.user_id] = state
                else:
                    self._put_guest(state)
        if pooled:
            names, held = self.learner.fields, pooled.values()
            stacked = {name: torch.from_numpy(np.stack([state.tensors[name] for state in held])) for name in names}
            self._pool.put(list(pooled), stacked, [state.version for state in held])

    def remove(self, user: str) -> None:
        """Forget a user."""
        if user in self._pool:
            self._pool.remove(user)
        self._guests.pop(user, None)
        self._standing.pop(user, None)
        self._briefs.pop(user, None)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ArmScores]:
        """Judge the arms of several requests in one pass."""
        counts = [request.inputs.shape[0] for request in requests]
        own = [self._own(request) for request in requests]
        briefs = self._briefed(requests, own)
        arms = np.concatenate([request.inputs for request in requests]) if len(requests) > 1 else requests[0].inputs
        query = Query(
            arms=torch.from_numpy(arms).to(self._device, self.learner.dtype),
            request=torch.from_numpy(np.repeat(np.arange(len(requests)), counts)).to(self._device),
            own=briefs[0]
            if len(briefs) == 1
            else {name: torch.cat([row[name] for row in briefs]) for name in briefs[0]},
            own_row=torch.tensor([self._row(request.user_id) for request in requests], device=self._device),
            own_events=torch.tensor([events for _, events in own], dtype=torch.int64, device=self._device),
        )
        with torch.inference_mode():
            scores = self.learner.score_briefed(self._shared, self._pool.view(), query)
        mean, bonus = scores.mean.cpu().double().numpy(), scores.bonus.cpu().double().numpy()
        sizes, phi = scores.group_size.cpu().numpy(), scores.phi.cpu().float().numpy()
        ends = np.cumsum(counts)
        return [
            ArmScores(mean[start:end], bonus[start:end], sizes[start:end], phi[start:end], events, self.epoch_number)
            for start, end, (_, events) in zip([0, *ends[:-1]], ends, own, strict=True)
        ]

    def _briefed(self, requests: Sequence[ScoreRequest], own: Sequence[tuple[State, int]]) -> list[State]:
        """The briefs of asking users, each [1, …]; worked out for whoever has none of this state and epoch."""
        standings = [self._standing.get(request.user_id) for request in requests]
        held = [self._briefs.get(request.user_id) for request in requests]
        found = [
            old[1] if old is not None and standing is not None and old[0] == (standing, self.epoch_number) else None
            for old, standing in zip(held, standings, strict=True)
        ]
        missing = [place for place, brief in enumerate(found) if brief is None]
        if missing:
            states = {name: torch.stack([own[place][0][name] for place in missing]) for name in self.learner.fields}
            with torch.inference_mode():
                made = self.learner.brief(self._shared, states)
            for row, place in enumerate(missing):
                brief = {name: tensor[row : row + 1] for name, tensor in made.items()}
                found[place] = brief
                standing = standings[place]
                if standing is not None:
                    self._briefs[requests[place].user_id] = (standing, self.epoch_number), brief
            while len(self._briefs) > BRIEFS_MAX:
                del self._briefs[next(iter(self._briefs))]
        return [brief for brief in found if brief is not None]

    def _row(self, user: str) -> int:
        row = self._pool.row(user)
        return -1 if row is None else row

    def _own(self, request: ScoreRequest) -> tuple[State, int]:
        """The state and events of an asking user, who may be new."""
        user = request.user_id
        if user in self._pool:
            return self._pool.state(user), self._pool.events(user)
        if user in self._guests:
            self._guests.move_to_end(user)
            return self._guests[user]
        if request.loaded is not None and self._fits(request.loaded):
            return self._on_device(request.loaded), request.loaded.version
        return self._newborn, 0

    def _acceptable(self, state: UserState) -> bool:
        """Newer than what is held, of the right shape and finite: bad parameters must not replace good ones."""
        held = self._standing.get(state.user_id)
        return (held is None or held.precedes(Standing.of(state))) and self._fits(state)

    def _fits(self, state: UserState) -> bool:
        return all(
            name in state.tensors and state.tensors[name].shape == shape and np.isfinite(state.tensors[name]).all()
            for name, shape in self.learner.fields.items()
        )

    def _into_pool(self, user: str, arriving: int) -> bool:
        """Whether a user belongs into the pool, which others are arriving in too."""
        if user in self._pool or user in self._members:
            return True
        return not self._members and len(self._pool) + arriving < self._pool_max and user not in self._guests

    def _put_guest(self, state: UserState) -> None:
        self._guests[state.user_id] = (self._on_device(state), state.version)
        self._guests.move_to_end(state.user_id)
        while len(self._guests) > self._guests_max:
            oldest, _ = self._guests.popitem(last=False)
            del self._standing[oldest]

    def _on_device(self, state: UserState) -> State:
        return {
            name: torch.from_numpy(state.tensors[name]).to(self._device, self.learner.dtype)
            for name in self.learner.fields
        }
