"""What a learner is to the service, the worker and the benchmarks.

State comes in two kinds. *Per-user* tensors change when that user's events are applied, and only then; a learner names
them in `fields`. *Shared* tensors are derived from users' samples by `derive` and published as a numbered epoch;
nothing an event does touches them. Both are plain dictionaries of tensors, so that the store, the replica and the
benchmarks handle every learner alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: The tensors of one user (or, with a leading dimension, of many), by field name.
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class UserBatch:
    """Samples of B users side by side, padded to the longest."""

    features: Tensor  # [B, S, d], raw inputs of the chosen arms, oldest first
    rewards: Tensor  # [B, S]
    valid: Tensor  # [B, S] bool: which samples are real
    events: Tensor  # [B] int64: events ever applied, at least the samples kept
    draw: Tensor  # [B] int64 ≥ 0: a stable hash for whatever a learner chooses at random
    weight: Tensor  # [B] w_u of Eq. 5: how much this user teaches others
    phi: Tensor  # [B, S, q]: what `score` noted of the samples when they were chosen
    epochs: Tensor  # [B, S] int64: the epoch they were chosen under


@dataclass(frozen=True, slots=True)
class Query:
    """The arms of R requests end to end, with the asking users' states."""

    arms: Tensor  # [N, d] raw inputs
    request: Tensor  # [N] int64: the request an arm belongs to
    own: Mapping[str, Tensor]  # each [R, …]: states, or what `Learner.brief` made of them
    own_row: Tensor  # [R] int64: the asking user's row in the pool, −1 when they have none
    own_events: Tensor  # [R] int64

    @property
    def requests(self) -> int:
        """R."""
        return self.own_row.shape[0]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a learner thinks of each arm; the score of an arm is mean + bonus."""

    mean: Tensor  # [N]
    bonus: Tensor  # [N]
    group_size: Tensor  # [N] int64, the asking user included
    phi: Tensor  # [N, q]: numbers to keep with the decision, for `fit` to get back; q may be 0


def newest(valid: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Places of each user's newest `keep` samples, oldest first, and which of them are real, both [B, keep].

    Users' samples are padded behind, and differ in number; `valid` is [B, S].
    """
    counts = valid.sum(-1)  # [B]
    kept = counts.clamp_max(keep)
    place = torch.arange(keep, device=valid.device)
    index = ((counts - kept).unsqueeze(-1) + place).clamp_max(max(0, valid.shape[1] - 1))
    return index, place < kept.unsqueeze(-1)


class Learner(ABC):
    """A learner for one namespace: a fixed number of inputs, fixed settings."""

    #: Name and shape of each per-user tensor.
    fields: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    #: d, the length of a raw input.
    inputs_expected: int
    #: q, how many numbers `score` notes of an arm.
    noted: int = 0

    @abstractmethod
    def initial_shared(self) -> State:
        """The shared state of epoch 0, a pure function of the settings."""

    @abstractmethod
    def newborn(self, shared: State) -> State:
        """The state of a user without events, without a batch dimension."""

    @abstractmethod
    def fit(self, shared: State, batch: UserBatch, previous: State) -> State:
        """The users' states after the batch's samples; every tensor gains the batch dimension B."""

    def brief(self, shared: State, own: State) -> State:
        """What judging arms needs of asking users with states [R, …]; the same for a state as long as an epoch lasts.

        Whatever a learner can work out before it sees arms belongs here: the service keeps it between requests.
        """
        return own

    @abstractmethod
    def score_briefed(self, shared: State, pool: State, query: Query) -> Scores:
        """Judge the arms of a query whose `own` are briefs; the pool holds each field as [P, …]."""

    def score(self, shared: State, pool: State, query: Query) -> Scores:
        """Judge the arms of a query whose `own` are users' states."""
        return self.score_briefed(shared, pool, replace(query, own=self.brief(shared, dict(query.own))))

    @abstractmethod
    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether shared state derived at `epoch_events` applied events is due again at `total_events`."""

    @abstractmethod
    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether that new epoch changes the inputs, so that every user's state has to be fitted again."""

    @abstractmethod
    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        """Shared state of the next epoch, from users' samples."""
