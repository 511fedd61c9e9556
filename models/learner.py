"""What a learner is to the service, the worker and the benchmarks.

State comes in two kinds. *Per-user* tensors change when that user's events are applied, and only then; a learner names
them in `fields`. *Shared* tensors are derived from users' samples by `derive` and published as a numbered epoch;
nothing an event does touches them. Both are plain dictionaries of tensors, so that the store, the replica and the
benchmarks handle every learner alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.arrays import Array, at_most, library_of, on_device
from models.drawing import Draws
from models.explaining import Agreement, Contributions
from models.slates import Slates
from models.teaching import Teaching

#: The tensors of one user (or, with a leading dimension, of many), by field name.
State = dict[str, Tensor]
#: The same while arms are judged: tensors, or numpy arrays.
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class UserBatch:
    """Samples of B users side by side, padded to the longest."""

    features: Array  # [B, S, d], raw inputs of the chosen arms, oldest first
    rewards: Array  # [B, S]
    valid: Array  # [B, S] bool: which samples are real
    events: Array  # [B] int64: events ever applied, at least the samples kept
    draw: Array  # [B] int64 ≥ 0: a stable hash for whatever a learner chooses at random
    weight: Array  # [B] w_u of Eq. 5: how much this user teaches others
    phi: Array  # [B, S, q]: what `score` noted of the samples when they were chosen
    epochs: Array  # [B, S] int64: the epoch they were chosen under
    starts: Array  # [B, start_size] float64: warm starts, 0 for who has none; [B, 0] where nobody has any


@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class Query:
    """The arms of R requests end to end, with the asking users' states."""

    arms: Array  # [N, d] raw inputs
    slates: Slates  # which of them belong to one request
    own: Mapping[str, Array]  # each [R, …]: states, or what `Learner.brief` made of them
    own_row: Array  # [R] int64: the asking user's row in the pool, −1 when they have none
    own_events: Array  # [R] int64
    draws: Draws | None = None  # of each arm, if any are wanted

    @property
    def requests(self) -> int:
        """R."""
        return self.slates.requests

    @property
    def request(self) -> Tensor:
        """The request that each arm belongs to, [N] int64."""
        request: Tensor = self.slates.request(self.own_row)
        return request


@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class Scores:
    """What a learner thinks of each arm; the score of an arm is mean + bonus."""

    mean: Array  # [N]
    bonus: Array  # [N]
    phi: Array  # [N, q]: numbers to keep with the decision, for `fit` to get back; q may be 0
    sigma: Array  # [N]: how little is known of the mean, as a standard deviation
    #: How many agree about the arms in these places, the asking users included: a slice, or [n] → [n] int64. Asked of
    #: what was chosen only, it is worked out where that takes time; good until the pool changes.
    agreeing: Callable[[Array | slice], Array]
    draws: Array | None = None  # [N, M] what the arms may be worth, jointly for the arms of a request; if asked for

    @property
    def group_size(self) -> Array:
        """How many agree about each arm [N] int64."""
        return self.agreeing(slice(None))


def newest(valid: Array, keep: int) -> tuple[Array, Array]:
    """Places of each user's newest `keep` samples, oldest first, and which of them are real, both [B, keep].

    Users' samples are padded behind, and differ in number; `valid` is [B, S].
    """
    counts = valid.sum(-1)  # [B]
    kept = at_most(counts, keep)
    place = library_of(valid).arange(keep, **on_device(valid))
    index = at_most((counts - kept)[:, None] + place, max(0, valid.shape[1] - 1))
    return index, place < kept[:, None]


class Learner(ABC):
    """A learner for one namespace: a fixed number of inputs, fixed settings."""

    #: Name and shape of each per-user tensor.
    fields: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    #: d, the length of a raw input.
    inputs_expected: int
    #: Numbers in the networks that all users share.
    network_size: int
    #: q, how many numbers `score` notes of an arm.
    noted: int = 0
    #: Numbers of a warm start, the last of them how far it is trusted; 0 for a learner that takes none.
    start_size: int = 0
    #: Whether `fit`, `brief` and `score_briefed` take numpy arrays as well as tensors.
    knows_numpy: bool = False
    #: Whether `fit` goes on from users' states before; otherwise it is given none.
    continues: bool = False

    @abstractmethod
    def initial_shared(self) -> State:
        """The shared state of epoch 0, a pure function of the settings."""

    def renumbered(self, shared: State, number: int) -> State:
        """Shared state that is published, out of turn, as epoch `number`."""
        return shared

    @abstractmethod
    def newborn(self, shared: State) -> State:
        """The state of a user without events, without a batch dimension."""

    def started(self, shared: State, starts: Array) -> Arrays:
        """The states [B, …] of users without events who have these warm starts [B, start_size]."""
        return {name: value.expand(starts.shape[0], *value.shape) for name, value in self.newborn(shared).items()}

    @abstractmethod
    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        """The users' states after the batch's samples; every tensor gains the batch dimension B."""

    def outline(self, shared: State, *, as_numpy: bool = False) -> Any:
        """What judging arms needs of an epoch, laid out for it; `as_numpy` only where the learner knows numpy."""
        return shared

    def brief(self, outline: Any, own: Arrays) -> Arrays:
        """What judging arms needs of asking users with states [R, …]; the same for a state as long as an epoch lasts.

        Whatever a learner can work out before it sees arms belongs here: the service keeps it between requests.
        """
        return own

    def brief_draws(self, brief: Arrays) -> Arrays:
        """A brief, with what draws need of it; it is made once it is asked for, and then kept like the rest."""
        return brief

    @abstractmethod
    def score_briefed(self, outline: Any, pool: Arrays, query: Query) -> Scores:
        """Judge the arms of a query whose `own` are briefs; the pool holds each field as [P, …]."""

    def score(self, shared: State, pool: State, query: Query) -> Scores:
        """Judge the arms of a query whose `own` are users' states."""
        outline = self.outline(shared)
        brief = self.brief(outline, dict(query.own))
        own = brief if query.draws is None else self.brief_draws(brief)
        return self.score_briefed(outline, pool, replace(query, own=own))

    @abstractmethod
    def agreement(self, outline: Any, pool: Arrays, query: Query, rows: Array) -> Agreement:
        """Who agrees with the asking user on some arms, rows [n] int64 of a query of one request with briefs.

        The groups are those whose sizes `score_briefed` tells of the same query.
        """

    @abstractmethod
    def contributions(
        self, outline: Any, pool: Arrays, query: Query, rows: Array, agreement: Agreement
    ) -> Contributions:
        """What the means of these arms are made of, with the user, the group and the other arms held fixed."""

    @abstractmethod
    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether shared state derived at `epoch_events` applied events is due again at `total_events`."""

    @abstractmethod
    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether that new epoch changes the inputs, so that every user's state has to be fitted again."""

    @abstractmethod
    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        """Shared state of the next epoch, from users' samples."""

    def kinds(self, shared: State, batch: UserBatch) -> Tensor:
        """The kind of each user of a batch [B] int64, from 0; all are of one until kinds were told apart."""
        return torch.zeros(batch.events.shape[0], dtype=torch.int64)

    def teaching(self, shared: State) -> Teaching | None:
        """Who teaches whom, by kind; None where that was not looked at."""
        return None
