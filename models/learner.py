"""The interface between a learner and the service, the worker and the benchmarks.

User state changes only when that user's events are applied; a learner names its tensors in `fields`. Shared state is
derived from users' samples by `derive` and published as a numbered epoch. Both are plain dictionaries of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from metaban.models.explaining import Agreement, Contributions
from metaban.models.features import InputParts
from metaban.models.numerics.arrays import Array, Arrays, at_most, double, library_of, on_device
from metaban.models.numerics.slates import Slates
from metaban.models.posterior_draws import Draws

#: Key of an arm without an id: it is known by its features alone.
NO_ARM_KEY: Final = 0

#: Size of the cache of keys.
ARM_KEYS_CACHED: Final = 65_536

#: The tensors of one user (or, with a leading dimension, of many), by field name.
State = dict[str, Tensor]


@lru_cache(maxsize=ARM_KEYS_CACHED)
def arm_key(arm_id: str) -> int:
    """A number that stands for an arm's id in arrays, below 2⁶³; the same in every process and version."""
    if not arm_id:
        return NO_ARM_KEY
    return int.from_bytes(blake2b(arm_id.encode(), digest_size=8).digest(), "little") >> 1 or 1


@dataclass(frozen=True, slots=True)
class UserBatch:
    """Samples of B users, padded to the longest."""

    features: Array  # [B, S, d], raw inputs of the chosen arms, oldest first
    rewards: Array  # [B, S]
    valid: Array  # [B, S] bool: False for padding
    events: Array  # [B] int64: events ever applied, at least the number of samples
    draw: Array  # [B] int64 ≥ 0: a stable hash, the source of a learner's random choices
    weight: Array  # [B] w_u of Eq. 5 of the Meta-Ban paper: this user's influence on others
    phi: Array  # [B, S, q]: the notes that `score` returned with the decision
    epochs: Array  # [B, S] int64: the epoch of the decision
    starts: Array  # [B, start_size] float64: warm starts, 0 for users without one; [B, 0] when no user has one
    arm_keys: Array  # [B, S] int64: `arm_key` of the arm's id
    places: Array  # [B, S] int64: the arm's place in its slate, from 0


@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class Query:
    """The arms of R requests, concatenated, with the requesting users' states."""

    arms: Array  # [N, d] raw inputs
    slates: Slates  # the number of arms of each request
    own: Mapping[str, Array]  # each [R, …]: states, or the result of `ServedEpoch.prepare_users`
    own_row: Array  # [R] int64: the requesting user's row in the pool, −1 for none
    own_events: Array  # [R] int64
    draws: Draws | None = None  # posterior draws of each arm, if requested
    arm_keys: Array | None = None  # [N] int64: `arm_key` of each arm's id; None when arms have no ids

    @property
    def requests(self) -> int:
        """R."""
        return self.slates.requests

    @property
    def request(self) -> Tensor:
        """The request of each arm, [N] int64."""
        request: Tensor = self.slates.request(self.own_row)
        return request


@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class Scores:
    """Scores of arms; the score of an arm is mean + bonus."""

    mean: Array  # [N]
    bonus: Array  # [N]
    phi: Array  # [N, q]: notes to store with the decision; `fit` and `derive` receive them; q may be 0
    sigma: Array  # [N]: standard deviation of the mean
    #: Group sizes of the arms in these places, the requesting user included: a slice or [n] → [n] int64. Computed on
    #: call, because only the chosen arms need it; valid until the pool changes.
    agreeing: Callable[[Array | slice], Array]
    draws: Array | None = None  # [N, M] joint posterior draws of the arms of a request, if requested

    @property
    def group_size(self) -> Array:
        """Group size of each arm [N] int64."""
        return self.agreeing(slice(None))


def newest(valid: Array, keep: int) -> tuple[Array, Array]:
    """Places of each user's newest `keep` samples, oldest first, and which of them are real, both [B, keep].

    `valid` is [B, S]; padding is at the end.
    """
    counts = valid.sum(-1)  # [B]
    kept = at_most(counts, keep)
    place = library_of(valid).arange(keep, **on_device(valid))
    index = at_most((counts - kept)[:, None] + place, max(0, valid.shape[1] - 1))
    return index, place < kept[:, None]


class ServedEpoch(ABC):
    """An epoch as requests are scored under it."""

    def prepare_users(self, own: Arrays) -> Arrays:
        """The part of users' states [R, …] that scoring needs; valid until the state or the epoch changes.

        Work that does not depend on arms belongs here: the service keeps the result, a brief, between requests.
        """
        return own

    def prepare_draws(self, brief: Arrays) -> Arrays:
        """A brief extended by what posterior draws need; computed on demand and kept with the brief."""
        return brief

    @abstractmethod
    def score(self, pool: Arrays, query: Query) -> Scores:
        """Score the arms of a query whose `own` are briefs; the pool holds each field as [P, …]."""

    @abstractmethod
    def agreement(self, pool: Arrays, query: Query, rows: Array) -> Agreement:
        """The groups of some arms (Eq. 4): rows [n] int64 of a query of one request with briefs.

        The groups are those whose sizes `score` reports for the same query.
        """

    @abstractmethod
    def contributions(self, pool: Arrays, query: Query, rows: Array, agreement: Agreement) -> Contributions:
        """Blocks and columns of the arms' means, with the user, the group and the other arms fixed."""

    def looks(self, places: Array) -> Array:
        """How often places [n] int64, from 0, are looked at, relative to the first: float64 [n].

        Times the mean it is the expected reward at a place; 1 for a learner that does not distinguish places.
        """
        return double(places * 0) + 1


class Learner(ABC):
    """A learner for one namespace: a fixed number of inputs, fixed settings."""

    #: Name and shape of each per-user tensor.
    fields: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    #: d, the length of a raw input, and its parts.
    input_size: int
    parts: InputParts
    #: Parameters of the networks that all users share.
    network_size: int
    #: Tensors of the shared state with a row for each of something that is learned; all have the same number of rows.
    growing: frozenset[str] = frozenset()
    #: q, the number of notes that `score` returns with an arm.
    noted: int = 0
    #: Numbers of a warm start, the last of them its trust; 0 for a learner without warm starts.
    start_size: int = 0
    #: Whether `fit` and epochs accept numpy arrays as well as tensors.
    supports_numpy: bool = False
    #: Whether `fit` needs the users' previous states.
    continues: bool = False

    @abstractmethod
    def initial_shared(self) -> State:
        """The shared state of epoch 0; it depends on the settings alone."""

    def with_epoch_number(self, shared: State, number: int) -> State:
        """This shared state, to be published as epoch `number` (after a restore)."""
        return shared

    def misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Names of tensors that keep a shared state of these shapes from being used: unknown, missing or misshapen."""
        known = {name: tuple(tensor.shape) for name, tensor in self.initial_shared().items()}
        wrong = set(known) ^ set(shapes)
        for name in set(known) & set(shapes):
            grows = name in self.growing
            shape, own = (shapes[name][1:], known[name][1:]) if grows else (shapes[name], known[name])
            if shape != own or (grows and not shapes[name]):
                wrong.add(name)
        if len({shapes[name][:1] for name in self.growing & set(shapes)}) > 1:
            wrong |= self.growing & set(shapes)
        return sorted(wrong)

    @abstractmethod
    def initial_user(self, shared: State) -> State:
        """The state of a user without events, without a batch dimension."""

    def warm_started(self, shared: State, starts: Array) -> Arrays:
        """The states [B, …] of users without events from their warm starts [B, start_size]."""
        return {name: value.expand(starts.shape[0], *value.shape) for name, value in self.initial_user(shared).items()}

    @abstractmethod
    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        """The users' states after the batch's samples; every tensor has the batch dimension B."""

    @abstractmethod
    def prepare_epoch(self, shared: State, *, as_numpy: bool = False) -> ServedEpoch:
        """The epoch of a shared state, to score requests; `as_numpy` requires `supports_numpy`."""

    def score(self, shared: State, pool: State, query: Query) -> Scores:
        """Score the arms of a query whose `own` are users' states."""
        epoch = self.prepare_epoch(shared)
        brief = epoch.prepare_users(dict(query.own))
        return epoch.score(pool, replace(query, own=brief if query.draws is None else epoch.prepare_draws(brief)))

    @abstractmethod
    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether an epoch derived at `epoch_events` applied events has to be derived again at `total_events`."""

    @abstractmethod
    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether that epoch changes the inputs, so that every user's state has to be fitted again."""

    @abstractmethod
    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        """Shared state of the next epoch, from users' samples."""

    def clusters(self, shared: State) -> int:
        """Number of clusters that the users form; 1 until clusters were found."""
        return 1

    def cluster_of(self, shared: State, batch: UserBatch) -> Tensor:
        """The cluster of each user of a batch [B] int64, from 0."""
        return torch.zeros(batch.events.shape[0], dtype=torch.int64)
