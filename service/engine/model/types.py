"""Records that go to and come from the served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from metaban.models.learner import Query, ServedEpoch
from metaban.models.numerics.arrays import Arrays
from metaban.models.policies import Slate
from metaban.store.users.records import UserState
from metaban.store.users.warm_starts import StoredWarmStart

#: What scores a user without rewards: the prior of all users, or their warm start.
ColdStart: TypeAlias = Literal["meta", "fusion"]


@final
@dataclass(frozen=True, slots=True)
class UserStart:
    """The warm start of a user without rewards, and the incarnation it is for; None means any."""

    values: NDArray[np.float64]  # [start_size]
    incarnation: int | None = None

    @staticmethod
    def of(stored: StoredWarmStart) -> UserStart:
        """The warm start that is stored for a user."""
        return UserStart(stored.values, stored.incarnation)


@final
@dataclass(slots=True)  # not frozen: one per request, and freezing takes three times as long
class ScoreRequest:
    """The arms of one request as inputs of the learner, with the keys of their ids.

    `loaded` is the asking user's state if it was loaded for this request; the model may not hold it. `draws` posterior
    draws are made of each arm, from `seed`.
    """

    user_id: str
    inputs: NDArray[np.float32]  # [k, d]
    loaded: UserState | None = None
    start: UserStart | None = None
    draws: int = 0
    seed: int = 0
    arm_keys: NDArray[np.int64] | None = None  # [k]; None when arms have no ids


@final
@dataclass(slots=True)  # not frozen: one per request, and freezing takes three times as long
class ArmScores:
    """Scores of the arms of one request, and the state of the asking user that they are for."""

    mean: NDArray[np.float64]  # [k]
    bonus: NDArray[np.float64]  # [k]
    phi: NDArray[np.float32]  # [k, q]: stored with the decision for the learner
    sigma: NDArray[np.float32]  # [k]
    drawn: NDArray[np.float64] | None  # [k, M]
    user_events: int
    epoch: int
    incarnation: int = 0
    #: Whether a warm start was used.
    started: bool = False
    #: None for a user with rewards.
    cold_start: ColdStart | None = None


@final
@dataclass(frozen=True, slots=True)
class StateVersion:
    """Which state of a user is held. For a user who is not held, whether a warm start is used."""

    incarnation: int
    version: int
    epoch: int
    started: bool = False

    @staticmethod
    def of(state: UserState) -> StateVersion:
        return StateVersion(state.incarnation, state.version, state.epoch)

    def precedes(self, other: StateVersion) -> bool:
        """Whether `other` is newer."""
        return (self.incarnation, self.version, self.epoch) < (other.incarnation, other.version, other.epoch)

    @property
    def cold_start(self) -> ColdStart | None:
        """What scores the user, if they have no rewards."""
        if self.version:
            return None
        return "fusion" if self.started else "meta"


#: Chooses arms by their scores; runs on the model's thread.
Draw: TypeAlias = Callable[[ArmScores], Slate]


@final
@dataclass(slots=True)  # not frozen: one per request, and freezing takes three times as long
class Chosen:
    """The chosen arms of a request, the scores they were chosen by, and the group size of each chosen arm."""

    scores: ArmScores
    slate: Slate
    group_sizes: list[int]


@final
@dataclass(frozen=True, slots=True)
class ModelView:
    """An epoch and its arguments for one request; valid until the model changes."""

    epoch: ServedEpoch
    pool: Arrays
    query: Query
    version: StateVersion
    pool_users: Sequence[str]
    in_pool: bool
