"""What the served model is asked about the arms of a request, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from models.exploration import Slate
from models.learner import Arrays, Query
from store.starts import Start
from store.users import UserState

#: What a user began from of whom nothing is learned: what everyone begins from, or their warm start.
ColdStart: TypeAlias = Literal["meta", "fusion"]


@final
@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a user begins from of whom nothing is learned, and in which incarnation; None: in any."""

    values: NDArray[np.float64]  # [start_size]
    incarnation: int | None = None

    @staticmethod
    def of(stored: Start | None) -> WarmStart | None:
        """The start that is stored of a user, if any."""
        return None if stored is None else WarmStart(stored.values, stored.incarnation)


@final
@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class ScoreRequest:
    """The arms of one request as the learner sees them, inputs float32 [k, d].

    `loaded` is the asking user's state if it was loaded for this request: it may not be held any more, or not yet. So
    many `draws` of each arm are made as are wanted, from `seed`.
    """

    user_id: str
    inputs: NDArray[np.float32]
    loaded: UserState | None = None
    start: WarmStart | None = None
    draws: int = 0
    seed: int = 0


@final
@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class ArmScores:
    """One request's arms judged, what the learner noted of each [k, q], and whom of the asking user it was for."""

    mean: NDArray[np.float64]
    bonus: NDArray[np.float64]
    phi: NDArray[np.float32]
    sigma: NDArray[np.float32]
    drawn: NDArray[np.float64] | None  # [k, M]
    user_events: int
    epoch: int
    incarnation: int = 0
    started: bool = False

    @property
    def cold_start(self) -> ColdStart | None:
        """What a user began from of whom nothing is learned: their warm start, or what everyone begins from."""
        return cold_start(self.user_events, started=self.started)


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Which state of a user is held; later ones compare greater. Of one who is not, whether they have a start."""

    incarnation: int
    version: int
    epoch: int
    started: bool = False

    @staticmethod
    def of(state: UserState) -> Standing:
        return Standing(state.incarnation, state.version, state.epoch)

    def precedes(self, other: Standing) -> bool:
        """Whether `other` is at least as new."""
        return (self.incarnation, self.version, self.epoch) <= (other.incarnation, other.version, other.epoch)


#: How arms are chosen by their scores; it is called on the thread that scores, which waits for it.
Draw: TypeAlias = Callable[[ArmScores], Slate]


def drawn_by(draw: Draw, scores: ArmScores) -> Slate | Exception:
    """What is chosen, or why nothing is: whose request it was is told, and the others of a batch are chosen for."""
    try:
        return draw(scores)
    except Exception as error:
        return error


@final
@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class Chosen:
    """What was chosen of a request's arms, by which scores, and how many agree about each of the chosen ones."""

    scores: ArmScores
    slate: Slate
    group_sizes: list[int]


@final
@dataclass(frozen=True, slots=True)
class Sight:
    """One request as the learner is asked it, and whom the pool is of; good until the model changes."""

    outline: Any
    pool: Arrays
    query: Query
    standing: Standing
    pool_users: Sequence[str]
    in_pool: bool


def cold_start(user_events: int, *, started: bool) -> ColdStart | None:
    """What a user began from of whom nothing is learned: their warm start, or what everyone begins from."""
    if user_events:
        return None
    return "fusion" if started else "meta"
