"""The parameters that answer requests: the users of the candidate pool, recently asked guests, and one epoch.

Only the model's thread changes it and scores with it, so nothing is locked. Other threads may look up which users are
held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metaban.models.learner import NO_ARM_KEY, Learner, Query, Scores, State
from metaban.models.numerics.arrays import Array, Arrays, as_arrays, joined, numpy_kind, stacked
from metaban.models.numerics.slates import Slates
from metaban.models.numerics.stacked_users import UserBank
from metaban.models.posterior_draws import Draws
from metaban.service.engine.model.types import ArmScores, Chosen, Draw, ModelView, ScoreRequest, StateVersion, UserStart
from metaban.store.users.records import UserState

#: Users whose briefs (what scoring needs of their state) are kept between requests; the oldest go first.
BRIEFS_MAX: Final = 4_096

#: Briefs renewed between two batches of requests.
BRIEFS_A_TURN: Final = 64

#: Users whose latest incarnation is remembered, to refuse older states that are still being loaded.
INCARNATIONS_MAX: Final = 65_536

#: No held state may be replaced by an older one.
NONE_REPLACEABLE: Final[Mapping[str, StateVersion]] = MappingProxyType({})


@final
class ServedModel:
    """Scores requests with the states it holds."""

    def __init__(self, learner: Learner, device: torch.device, *, pool_max: int, guests_max: int) -> None:
        self.learner = learner
        self.epoch_number = 0
        self.epoch_events = 0
        self._device = device
        #: May change while it serves; a smaller pool takes effect with the next epoch.
        self.pool_max = pool_max
        self._guests_max = guests_max
        self._shared: State = {name: tensor.to(device) for name, tensor in learner.initial_shared().items()}
        #: On a CPU a learner that can scores in numpy, which costs less per call.
        self._in_numpy = learner.supports_numpy and device.type == "cpu"
        self._kind = numpy_kind(learner.dtype)
        self._new_user = self._plain(learner.initial_user(self._shared))
        self._epoch = learner.prepare_epoch(self._shared, as_numpy=self._in_numpy)
        #: Number of clusters that the users form in the epoch.
        self.clusters = learner.clusters(self._shared)
        self._members: frozenset[str] = frozenset()
        self._pool = UserBank(learner.fields, learner.dtype, device, as_numpy=self._in_numpy)
        self._guests: OrderedDict[str, Arrays] = OrderedDict()
        self._versions: dict[str, StateVersion] = {}
        #: Latest incarnation of users who were forgotten or restored recently; older states are refused.
        self._incarnations: OrderedDict[str, int] = OrderedDict()
        #: Briefs of recently asked users, the latest last, and which of them are out of date.
        self._briefs: OrderedDict[str, Arrays] = OrderedDict()
        self._stale: dict[str, None] = {}
        self._new_user_brief: Arrays | None = None
        #: Whether briefs contain what draws need, and whether a request asked for draws since the epoch began.
        self._with_draws = self._draws_wanted = False

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, user: str) -> bool:
        return user in self._versions

    def holds(self, user: str) -> StateVersion | None:
        """The version of the held state of a user; None when none is held."""
        return self._versions.get(user)

    def users(self) -> list[str]:
        """All users held."""
        return list(self._versions)

    @property
    def pool_chosen(self) -> bool:
        """Whether the epoch lists the users of the pool, because there are more users than it holds."""
        return bool(self._members)

    @property
    def pool_full(self) -> bool:
        """Whether the pool takes no more users."""
        return len(self._pool) >= self.pool_max

    def wants(self, user: str) -> bool:
        """Whether a new state of a user is worth loading: they are held, or belong to the pool."""
        if user in self._versions or user in self._members:
            return True
        return not self._members and len(self._pool) < self.pool_max

    def adopt_epoch(
        self, number: int, events: int, tensors: Mapping[str, NDArray[np.generic]], members: Iterable[str]
    ) -> bool:
        """Serve an epoch; False if it is not finite or does not fit the learner. Then everything stays as it was.

        Users who left the pool are dropped until asked about.
        """
        shapes = {name: array.shape for name, array in tensors.items()}
        if self.learner.misfits(shapes) or not all(np.isfinite(array).all() for array in tensors.values()):
            return False
        self._shared = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in tensors.items()}
        self.adopt_learner(self.learner)
        self.epoch_number, self.epoch_events = number, events
        self._members = frozenset(members)
        if self._members:
            for user in [user for user in self._pool.users if user not in self._members]:
                self._pool.remove(user)
                del self._versions[user]
            for user in [user for user in self._guests if user in self._members]:
                state = self._guests.pop(user)
                self._pool.put([user], {name: array[None] for name, array in state.items()})
        return True

    def adopt_learner(self, learner: Learner) -> None:
        """Score with this learner from now on. It must interpret the held states as the previous one did."""
        self.learner = learner
        self._new_user = self._plain(learner.initial_user(self._shared))
        self._epoch = learner.prepare_epoch(self._shared, as_numpy=self._in_numpy)
        self.clusters = learner.clusters(self._shared)
        self._with_draws, self._draws_wanted = self._draws_wanted, False
        self._expire_briefs()

    def _expire_briefs(self) -> None:
        """Mark all briefs as out of date."""
        self._new_user_brief = None
        self._stale = dict.fromkeys(reversed(self._briefs))  # the latest asked first

    def put(self, states: Sequence[UserState], replaceable: Mapping[str, StateVersion] = NONE_REPLACEABLE) -> None:
        """Hold states that are newer than the held ones; a state that does not fit the learner is refused.

        A user whose held version is the one in `replaceable` may be replaced by an older state. A forgotten user is
        dropped.
        """
        pooled: dict[str, UserState] = {}
        for state in states:
            if state.forgotten:
                self.begin_incarnations([(state.user_id, state.incarnation)])
            elif self._acceptable(state, replaceable.get(state.user_id)):
                self._versions[state.user_id] = StateVersion.of(state)
                if state.user_id in self._briefs:
                    self._stale[state.user_id] = None
                if state.user_id in pooled or self._into_pool(state.user_id, len(pooled)):
                    pooled[state.user_id] = state
                else:
                    self._put_guest(state)
        if pooled:
            held = {name: stacked([state.tensors[name] for state in pooled.values()]) for name in self.learner.fields}
            self._pool.put(list(pooled), {name: self.to_learner(array) for name, array in held.items()})

    def begin_incarnations(self, began: Iterable[tuple[str, int]]) -> None:
        """Drop states of earlier incarnations than these, and refuse them from now on.

        A load in progress may still deliver the old state of a forgotten user.
        """
        for user, incarnation in began:
            self._incarnations[user] = max(incarnation, self._incarnations.pop(user, 0))
            held = self._versions.get(user)
            if held is not None and held.incarnation < incarnation:
                self.remove(user)
        while len(self._incarnations) > INCARNATIONS_MAX:
            self._incarnations.popitem(last=False)

    def accept_any_incarnation(self, concerned: Callable[[str], bool]) -> None:
        """Accept any incarnation of these users again: the store may have lost their latest one."""
        for user in [user for user in self._incarnations if concerned(user)]:
            del self._incarnations[user]

    def remove(self, user: str) -> None:
        """Drop a user."""
        if user in self._pool:
            self._pool.remove(user)
        self._guests.pop(user, None)
        self._versions.pop(user, None)
        self._briefs.pop(user, None)
        self._stale.pop(user, None)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ArmScores]:
        """Score the arms of several requests in one pass."""
        with self.computing():
            return self._score_all(requests)[1]

    def choose(self, asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        """Score the arms of several requests in one pass and choose among each request's arms.

        An error of one request's `draw` is its result and does not affect the others. Group sizes are computed for the
        chosen arms only.
        """
        found: list[Chosen | Exception] = []
        places: list[int] = []
        start = 0
        with self.computing():
            scores, scored = self._score_all([request for request, _ in asked])
            for theirs, (request, draw) in zip(scored, asked, strict=True):
                try:
                    slate = draw(theirs)
                except Exception as error:
                    found.append(error)
                else:
                    found.append(Chosen(theirs, slate, []))
                    places += [start + arm for arm in slate.chosen]
                start += request.inputs.shape[0]
            sizes = iter(self._agreeing(scores, places))
        for each in found:
            if isinstance(each, Chosen):
                each.group_sizes = list(islice(sizes, len(each.slate.chosen)))
        return found

    def _agreeing(self, scores: Scores, places: list[int]) -> list[int]:
        """Group sizes of the arms at these rows; a single one, the usual case, is a slice."""
        if not places:
            return []
        which = slice(places[0], places[0] + 1) if len(places) == 1 else self.to_learner(np.array(places))
        sizes: list[int] = self.to_numpy(scores.agreeing(which), np.int64).tolist()
        return sizes

    def choose_one(self, request: ScoreRequest, draw: Draw) -> Chosen:
        """As `choose`, for one request; raises its error."""
        [chosen] = self.choose([(request, draw)])
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    def _score_all(self, requests: Sequence[ScoreRequest]) -> tuple[Scores, list[ArmScores]]:
        """The learner's scores of all arms, and those of each request."""
        query, versions = self._query(requests)
        scores = self._epoch.score(self._pool.view(), query)
        mean, bonus = self.to_numpy(scores.mean, np.float64), self.to_numpy(scores.bonus, np.float64)
        phi, sigma = self.to_numpy(scores.phi, np.float32), self.to_numpy(scores.sigma, np.float32)
        drawn = None if scores.draws is None else self.to_numpy(scores.draws, np.float64)
        found, end = [], 0
        for size, version, request in zip(query.slates.sizes, versions, requests, strict=True):
            part, end = slice(end, end + size), end + size
            theirs = drawn[part, : request.draws] if drawn is not None and request.draws else None
            scored = mean[part], bonus[part], phi[part], sigma[part], theirs
            found.append(
                ArmScores(
                    *scored,
                    user_events=version.version,
                    epoch=self.epoch_number,
                    incarnation=version.incarnation,
                    started=version.started,
                    cold_start=version.cold_start,
                )
            )
        return scores, found

    def view(self, request: ScoreRequest) -> ModelView:
        """The learner's arguments for a request, for questions beyond scores."""
        query, [version] = self._query([request])
        pool = self._pool
        return ModelView(self._epoch, pool.view(), query, version, pool.users, request.user_id in pool)

    def _query(self, requests: Sequence[ScoreRequest]) -> tuple[Query, list[StateVersion]]:
        """Requests as one query, and the version of each asking user's state."""
        # All requests of a batch get the same number; they differ only while a policy is being changed.
        draws = max(request.draws for request in requests)
        if draws and not self._with_draws:
            self._with_draws = True
            self._expire_briefs()
        self._draws_wanted |= draws > 0
        asking = [self._brief_of(request) for request in requests]
        arms = np.concatenate([request.inputs for request in requests]) if len(requests) > 1 else requests[0].inputs
        query = Query(
            arms=self.to_learner(arms.astype(self._kind, copy=False)),
            slates=Slates([request.inputs.shape[0] for request in requests]),
            own=joined([brief for brief, _ in asking]),
            own_row=self.to_learner(np.array([self._row(request.user_id) for request in requests])),
            own_events=self.to_learner(np.array([version.version for _, version in asking])),
            draws=Draws(draws, [request.seed for request in requests]) if draws else None,
            arm_keys=self._arm_keys(requests),
        )
        return query, [version for _, version in asking]

    def _arm_keys(self, requests: Sequence[ScoreRequest]) -> Array | None:
        """The keys of all arms [N]; None when no request has any."""
        if len(requests) == 1:
            keys = requests[0].arm_keys
        elif all(request.arm_keys is None for request in requests):
            keys = None
        else:
            keys = np.concatenate(
                [
                    np.full(request.inputs.shape[0], NO_ARM_KEY) if request.arm_keys is None else request.arm_keys
                    for request in requests
                ]
            )
        return None if keys is None else self.to_learner(keys)

    def refresh(self, most: int) -> int:
        """Renew at most `most` briefs that are out of date; returns how many are left.

        Done between requests, because recently asked users are likely to be asked again. A request that comes first
        renews its user's brief itself.
        """
        users = [user for user, _ in zip(self._stale, range(most), strict=False)]
        for user in users:
            del self._stale[user]
            if user not in self._versions:
                del self._briefs[user]
        held = [user for user in users if user in self._versions]
        if held:
            states = [self._own(user) for user in held]
            self._briefs |= zip(held, self._briefs_of(states), strict=True)
        return len(self._stale)

    def _brief_of(self, request: ScoreRequest) -> tuple[Arrays, StateVersion]:
        """The brief [1, …] and state version of an asking user, who may be new."""
        user, loaded = request.user_id, request.loaded
        version = self._versions.get(user)
        if version is None:
            oldest = self._incarnations.get(user, 0)
            # A state fitted under a later epoch has another meaning under this one.
            known = loaded is not None and loaded.incarnation >= oldest and loaded.epoch <= self.epoch_number
            if loaded is not None and known and self._fits(loaded):
                return self._briefs_of([self._state_arrays(loaded)])[0], StateVersion.of(loaded)
            incarnation = max(oldest, loaded.incarnation if loaded else 0)
            if request.start is not None and request.start.incarnation in (None, incarnation):
                brief = self._started_brief(request.start)
                if brief is not None:
                    return brief, StateVersion(incarnation, 0, self.epoch_number, started=True)
            if self._new_user_brief is None:
                self._new_user_brief = self._briefs_of([self._new_user])[0]
            return self._new_user_brief, StateVersion(incarnation, 0, self.epoch_number)
        if user in self._guests:
            self._guests.move_to_end(user)
        if user not in self._briefs or user in self._stale:
            self._briefs[user] = self._briefs_of([self._own(user)])[0]
            self._stale.pop(user, None)
        self._briefs.move_to_end(user)
        while len(self._briefs) > BRIEFS_MAX:
            dropped, _ = self._briefs.popitem(last=False)
            self._stale.pop(dropped, None)
        return self._briefs[user], version

    def _started_brief(self, start: UserStart) -> Arrays | None:
        """The brief of a user with a warm start; None when it does not fit the learner or is not finite."""
        if start.values.shape != (self.learner.start_size,):
            return None
        with torch.inference_mode():
            state = self.learner.warm_started(self._shared, torch.from_numpy(start.values[None]).to(self._device))
        if not all(tensor.isfinite().all() for tensor in state.values()):
            return None
        return self._briefed(self._plain(state))

    def _briefs_of(self, states: Sequence[Arrays]) -> list[Arrays]:
        """Briefs of users with these states, each [1, …]."""
        # Copies even a single state: a brief may hold parts of it, and rows of the pool are overwritten.
        stack: Callable[[list[Array]], Array] = np.array if self._in_numpy else torch.stack
        made = self._briefed({name: stack([state[name] for state in states]) for name in self.learner.fields})
        return [{name: array[row : row + 1] for name, array in made.items()} for row in range(len(states))]

    def _briefed(self, states: Arrays) -> Arrays:
        with self.computing():
            brief = self._epoch.prepare_users(states)
            return self._epoch.prepare_draws(brief) if self._with_draws else brief

    def computing(self) -> AbstractContextManager[None]:
        """Context of learner calls: no gradients in torch; no overflow warnings in numpy, since results are checked."""
        return np.errstate(all="ignore") if self._in_numpy else torch.inference_mode()

    def to_learner(self, array: NDArray[Any]) -> Array:
        """A numpy array in the learner's representation."""
        return array if self._in_numpy else torch.from_numpy(array).to(self._device)

    def _plain(self, tensors: Mapping[str, Tensor]) -> Arrays:
        """Tensors in the learner's representation."""
        return as_arrays(tensors) if self._in_numpy else tensors

    def to_numpy(self, array: Array, kind: type[np.generic]) -> NDArray[Any]:
        """An array of the learner as numpy."""
        found: NDArray[Any] = array if self._in_numpy else array.cpu().numpy()
        return found.astype(kind, copy=False)

    def _row(self, user: str) -> int:
        row = self._pool.row(user)
        return -1 if row is None else row

    def _own(self, user: str) -> Arrays:
        """The state of a held user."""
        return self._pool.state(user) if user in self._pool else self._guests[user]

    def _acceptable(self, state: UserState, replaceable: StateVersion | None) -> bool:
        """Whether a state is new enough, of the right shape and finite."""
        held = self._versions.get(state.user_id)
        newer = held is None or held == replaceable or held.precedes(StateVersion.of(state))
        return newer and state.incarnation >= self._incarnations.get(state.user_id, 0) and self._fits(state)

    def _fits(self, state: UserState) -> bool:
        fields, tensors = self.learner.fields, state.tensors
        if not all(name in tensors and tensors[name].shape == shape for name, shape in fields.items()):
            return False
        # One call for all numbers: the cost per call dominates.
        return bool(np.isfinite(np.concatenate([tensors[name].ravel() for name in fields])).all())

    def _into_pool(self, user: str, arriving: int) -> bool:
        """Whether a user belongs to the pool, which `arriving` others enter too."""
        if user in self._pool or user in self._members:
            return True
        return not self._members and len(self._pool) + arriving < self.pool_max and user not in self._guests

    def _put_guest(self, state: UserState) -> None:
        self._guests[state.user_id] = self._state_arrays(state)
        self._guests.move_to_end(state.user_id)
        while len(self._guests) > self._guests_max:
            dropped, _ = self._guests.popitem(last=False)
            del self._versions[dropped]

    def _state_arrays(self, state: UserState) -> Arrays:
        tensors, kind = state.tensors, self._kind
        return {name: self.to_learner(tensors[name].astype(kind, copy=False)) for name in self.learner.fields}
