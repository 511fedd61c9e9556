"""The parameters that answer requests: every user of the candidate pool, the guests asked about lately, one epoch.

Knows tensors only. One thread changes it and scores with it, so nothing here is locked; others may ask who is held,
which single look-ups answer.
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

from models.arrays import Array, as_arrays, joined, numpy_kind, stacked
from models.bank import UserBank
from models.drawing import Draws
from models.learner import Arrays, Learner, Query, Scores, State
from models.slates import Slates
from service.scoring import ArmScores, Chosen, Draw, ScoreRequest, Sight, Standing, WarmStart, drawn_by
from store.users import UserState

#: Users whose briefs are kept between requests; the oldest go first.
BRIEFS_MAX = 4_096
#: Users briefed between two batches of requests.
BRIEFS_A_TURN = 64
#: Users remembered to have begun anew; a load that is still under way then takes a moment, not thousands of them.
BEGAN_MAX = 65_536


#: No state is in doubt: newer ones replace older ones.
NOTHING_DOUBTED: Final[Mapping[str, Standing]] = MappingProxyType({})


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
        #: On a CPU whoever can judges in numpy.
        self._in_numpy = learner.knows_numpy and device.type == "cpu"
        self._kind = numpy_kind(learner.dtype)
        self._newborn = self._plain(learner.newborn(self._shared))
        self._outline = learner.outline(self._shared, as_numpy=self._in_numpy)
        #: Who teaches whom by the epoch; None where that was not looked at.
        self.teaching = learner.teaching(self._shared)
        self._members: frozenset[str] = frozenset()
        self._pool = UserBank(learner.fields, learner.dtype, device, as_numpy=self._in_numpy)
        self._guests: OrderedDict[str, Arrays] = OrderedDict()
        self._standing: dict[str, Standing] = {}
        #: The incarnation that users have been in who began anew lately: nothing older of them is taken any more.
        self._began: OrderedDict[str, int] = OrderedDict()
        #: What was worked out of users asked about lately, the latest last; and whose is out of date.
        self._briefs: OrderedDict[str, Arrays] = OrderedDict()
        self._stale: dict[str, None] = {}
        self._stranger: Arrays | None = None
        #: Whether briefs have what draws need, and whether anybody wanted draws since the epoch began.
        self._with_draws = self._draws_wanted = False

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

    @property
    def pool_chosen(self) -> bool:
        """Whether the epoch says who is in the pool, there being more users than it holds."""
        return bool(self._members)

    @property
    def pool_full(self) -> bool:
        """Whether the pool takes nobody more."""
        return len(self._pool) >= self._pool_max

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
        self.adopt_learner(self.learner)
        self.epoch_number, self.epoch_events = number, events
        self._members = frozenset(members)
        if self._members:
            for user in [user for user in self._pool.users if user not in self._members]:
                self._pool.remove(user)
                del self._standing[user]
            for user in [user for user in self._guests if user in self._members]:
                state = self._guests.pop(user)
                self._pool.put([user], {name: array[None] for name, array in state.items()})
        return True

    def adopt_learner(self, learner: Learner) -> None:
        """Judge by this learner from now on, to whom all that is held means what it meant to the one before."""
        self.learner = learner
        self._newborn = self._plain(learner.newborn(self._shared))
        self._outline = learner.outline(self._shared, as_numpy=self._in_numpy)
        self.teaching = learner.teaching(self._shared)
        self._with_draws, self._draws_wanted = self._draws_wanted, False
        self._doubt_briefs()

    def _doubt_briefs(self) -> None:
        """Have everyone briefed again."""
        self._stranger = None
        self._stale = dict.fromkeys(reversed(self._briefs))  # asked about last, briefed first

    def put(self, states: Sequence[UserState], doubted: Mapping[str, Standing] = NOTHING_DOUBTED) -> None:
        """Take over states that are as new as what is held; a state that does not fit the learner is refused.

        Who is still held as `doubted` says is replaced by an older state too. Of a forgotten user nothing is held any
        more.
        """
        pooled: dict[str, UserState] = {}
        for state in states:
            if state.forgotten:
                self.begin([(state.user_id, state.incarnation)])
            elif self._acceptable(state, doubted.get(state.user_id)):
                self._standing[state.user_id] = Standing.of(state)
                if state.user_id in self._briefs:
                    self._stale[state.user_id] = None
                if state.user_id in pooled or self._into_pool(state.user_id, len(pooled)):
                    pooled[state.user_id] = state
                else:
                    self._put_guest(state)
        if pooled:
            held = {name: stacked([state.tensors[name] for state in pooled.values()]) for name in self.learner.fields}
            self._pool.put(list(pooled), {name: self.given(array) for name, array in held.items()})

    def begin(self, began: Iterable[tuple[str, int]]) -> None:
        """Users are in these incarnations, or later ones: drop what is held of an earlier, and take no more of it.

        A load that was under way when a user was forgotten may still bring the old state.
        """
        for user, incarnation in began:
            self._began[user] = max(incarnation, self._began.pop(user, 0))
            held = self._standing.get(user)
            if held is not None and held.incarnation < incarnation:
                self.remove(user)
        while len(self._began) > BEGAN_MAX:
            self._began.popitem(last=False)

    def doubt_beginnings(self, concerned: Callable[[str], bool]) -> None:
        """Take any incarnation of these users again: the store may have lost that they began anew."""
        for user in [user for user in self._began if concerned(user)]:
            del self._began[user]

    def remove(self, user: str) -> None:
        """Let go of a user."""
        if user in self._pool:
            self._pool.remove(user)
        self._guests.pop(user, None)
        self._standing.pop(user, None)
        self._briefs.pop(user, None)
        self._stale.pop(user, None)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ArmScores]:
        """Judge the arms of several requests in one pass."""
        with self.computing():
            return self._judged(requests)[1]

    def choose(self, asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        """Judge the arms of several requests in one pass, and have some of each chosen; or why that was not done.

        Who agrees about arms is counted for those that were chosen: nobody is told it of the others.
        """
        found: list[Chosen | Exception] = []
        places: list[int] = []
        start = 0
        with self.computing():
            scores, judged = self._judged([request for request, _ in asked])
            for theirs, (request, draw) in zip(judged, asked, strict=True):
                slate = drawn_by(draw, theirs)
                if isinstance(slate, Exception):
                    found.append(slate)
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
        """How many agree about the arms in these places; one alone, which is the usual case, is not looked up."""
        if not places:
            return []
        which = slice(places[0], places[0] + 1) if len(places) == 1 else self.given(np.array(places))
        sizes: list[int] = self.taken(scores.agreeing(which), np.int64).tolist()
        return sizes

    def choose_one(self, request: ScoreRequest, draw: Draw) -> Chosen:
        """The same for one request."""
        [chosen] = self.choose([(request, draw)])
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    def _judged(self, requests: Sequence[ScoreRequest]) -> tuple[Scores, list[ArmScores]]:
        """What the learner says of all arms, and of each request's."""
        query, standings = self._posed(requests)
        scores = self.learner.score_briefed(self._outline, self._pool.view(), query)
        mean, bonus = self.taken(scores.mean, np.float64), self.taken(scores.bonus, np.float64)
        phi, sigma = self.taken(scores.phi, np.float32), self.taken(scores.sigma, np.float32)
        drawn = None if scores.draws is None else self.taken(scores.draws, np.float64)
        found, end = [], 0
        for size, standing, request in zip(query.slates.sizes, standings, requests, strict=True):
            part, end = slice(end, end + size), end + size
            theirs = drawn[part, : request.draws] if drawn is not None and request.draws else None
            judged = mean[part], bonus[part], phi[part], sigma[part], theirs
            found.append(
                ArmScores(*judged, standing.version, self.epoch_number, standing.incarnation, standing.started)
            )
        return scores, found

    def look(self, request: ScoreRequest) -> Sight:
        """What a request is scored with, to see more of it than scores."""
        query, [standing] = self._posed([request])
        return Sight(self._outline, self._pool.view(), query, standing, self._pool.users, request.user_id in self._pool)

    def _posed(self, requests: Sequence[ScoreRequest]) -> tuple[Query, list[Standing]]:
        """Requests as one query, and which state of each asking user it is about."""
        # Those who want none get some, too, when they stand beside others: that happens while a policy is changed.
        draws = max(request.draws for request in requests)
        if draws and not self._with_draws:
            self._with_draws = True
            self._doubt_briefs()
        self._draws_wanted |= draws > 0
        asking = [self._brief_of(request) for request in requests]
        arms = np.concatenate([request.inputs for request in requests]) if len(requests) > 1 else requests[0].inputs
        query = Query(
            arms=self.given(arms.astype(self._kind, copy=False)),
            slates=Slates([request.inputs.shape[0] for request in requests]),
            own=joined([brief for brief, _ in asking]),
            own_row=self.given(np.array([self._row(request.user_id) for request in requests])),
            own_events=self.given(np.array([standing.version for _, standing in asking])),
            draws=Draws(draws, [request.seed for request in requests]) if draws else None,
        )
        return query, [standing for _, standing in asking]

    def refresh(self, most: int) -> int:
        """Brief again at most so many of those asked about lately whose state or epoch has changed; how many are left.

        Who is asked about is likely to be asked about again. Done between requests, this spares the next one the work;
        a request that comes first does it itself.
        """
        users = [user for user, _ in zip(self._stale, range(most), strict=False)]
        for user in users:
            del self._stale[user]
            if user not in self._standing:
                del self._briefs[user]
        held = [user for user in users if user in self._standing]
        if held:
            states = [self._own(user) for user in held]
            self._briefs |= zip(held, self._briefs_of(states), strict=True)
        return len(self._stale)

    def _brief_of(self, request: ScoreRequest) -> tuple[Arrays, Standing]:
        """The brief [1, …] and standing of an asking user, who may be new."""
        user, loaded = request.user_id, request.loaded
        standing = self._standing.get(user)
        if standing is None:
            began = self._began.get(user, 0)
            # A state of an epoch to come would mean something else under this one.
            known = loaded is not None and loaded.incarnation >= began and loaded.epoch <= self.epoch_number
            if loaded is not None and known and self._fits(loaded):
                return self._briefs_of([self._given_state(loaded)])[0], Standing.of(loaded)
            incarnation = max(began, loaded.incarnation if loaded else 0)
            if request.start is not None and request.start.incarnation in (None, incarnation):
                begun = self._begun(request.start)
                if begun is not None:
                    return begun, Standing(incarnation, 0, self.epoch_number, started=True)
            if self._stranger is None:
                self._stranger = self._briefs_of([self._newborn])[0]
            return self._stranger, Standing(incarnation, 0, self.epoch_number)
        if user in self._guests:
            self._guests.move_to_end(user)
        if user not in self._briefs or user in self._stale:
            self._briefs[user] = self._briefs_of([self._own(user)])[0]
            self._stale.pop(user, None)
        self._briefs.move_to_end(user)
        while len(self._briefs) > BRIEFS_MAX:
            dropped, _ = self._briefs.popitem(last=False)
            self._stale.pop(dropped, None)
        return self._briefs[user], standing

    def _begun(self, start: WarmStart) -> Arrays | None:
        """The brief of a user who begins from a warm start; None when it is of another learner, or no good."""
        if start.values.shape != (self.learner.start_size,):
            return None
        with torch.inference_mode():
            state = self.learner.started(self._shared, torch.from_numpy(start.values[None]).to(self._device))
        if not all(tensor.isfinite().all() for tensor in state.values()):
            return None
        return self._briefed(self._plain(state))

    def _briefs_of(self, states: Sequence[Arrays]) -> list[Arrays]:
        """What judging needs of users with these states, each [1, …]."""
        # Copies even one: a brief may hold parts of it, and rows of the pool are written over.
        stack: Callable[[list[Array]], Array] = np.array if self._in_numpy else torch.stack
        made = self._briefed({name: stack([state[name] for state in states]) for name in self.learner.fields})
        return [{name: array[row : row + 1] for name, array in made.items()} for row in range(len(states))]

    def _briefed(self, states: Arrays) -> Arrays:
        with self.computing():
            brief = self.learner.brief(self._outline, states)
            return self.learner.brief_draws(brief) if self._with_draws else brief

    def computing(self) -> AbstractContextManager[None]:
        """No gradients in torch, and in numpy no warning of what leaves the range of numbers: whoever asked is told."""
        return np.errstate(all="ignore") if self._in_numpy else torch.inference_mode()

    def given(self, array: NDArray[Any]) -> Array:
        """An array as the learner takes it."""
        return array if self._in_numpy else torch.from_numpy(array).to(self._device)

    def _plain(self, tensors: Mapping[str, Tensor]) -> Arrays:
        """Tensors as the learner takes them."""
        return as_arrays(tensors) if self._in_numpy else tensors

    def taken(self, array: Array, kind: type[np.generic]) -> NDArray[Any]:
        """An array that the learner gave."""
        found: NDArray[Any] = array if self._in_numpy else array.cpu().numpy()
        return found.astype(kind, copy=False)

    def _row(self, user: str) -> int:
        row = self._pool.row(user)
        return -1 if row is None else row

    def _own(self, user: str) -> Arrays:
        """The state of a user who is held."""
        return self._pool.state(user) if user in self._pool else self._guests[user]

    def _acceptable(self, state: UserState, doubted: Standing | None) -> bool:
        """Newer than what is held, of the right shape and finite: bad parameters must not replace good ones."""
        held = self._standing.get(state.user_id)
        newer = held is None or held == doubted or held.precedes(Standing.of(state))
        return newer and state.incarnation >= self._began.get(state.user_id, 0) and self._fits(state)

    def _fits(self, state: UserState) -> bool:
        fields, tensors = self.learner.fields, state.tensors
        if not all(name in tensors and tensors[name].shape == shape for name, shape in fields.items()):
            return False
        # All numbers in one pass: what a call costs before it has looked at any is most of it.
        return bool(np.isfinite(np.concatenate([tensors[name].ravel() for name in fields])).all())

    def _into_pool(self, user: str, arriving: int) -> bool:
        """Whether a user belongs into the pool, which others are arriving in too."""
        if user in self._pool or user in self._members:
            return True
        return not self._members and len(self._pool) + arriving < self._pool_max and user not in self._guests

    def _put_guest(self, state: UserState) -> None:
        self._guests[state.user_id] = self._given_state(state)
        self._guests.move_to_end(state.user_id)
        while len(self._guests) > self._guests_max:
            oldest, _ = self._guests.popitem(last=False)
            del self._standing[oldest]

    def _given_state(self, state: UserState) -> Arrays:
        return {name: self.given(state.tensors[name].astype(self._kind, copy=False)) for name in self.learner.fields}
