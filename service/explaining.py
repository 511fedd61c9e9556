"""Why a result: what means are made of and who agrees, seen with the served model on the thread that owns it.

An answer that is explained is scored, chosen and explained in one turn of that thread, so that all three see the same
model. Requests that ask for no explanation do not come here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from models.exploration import Slate
from models.features import FeatureLayout, Features, InputNames
from service.contracts import Contribution, Explanation, GroupMember
from service.errors import Overloaded
from service.scoring import ArmScores, Chosen, ColdStart, Draw, ScoreRequest, cold_start
from service.served import ServedModel

#: Contributions told of an arm, the largest.
CONTRIBUTIONS_TOLD: Final = 10
#: Requests that may wait to be explained; more are turned away, since each is a pass of its own.
EXPLAINING_MAX: Final = 512

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True)
class Question:
    """The arms of one request, as the learner sees them and as the client called them."""

    asked: ScoreRequest
    features: Callable[[int], Features]
    context: Features | None


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Who agrees with a user on one arm; members are the nearest ones, the user first."""

    prediction: float
    threshold: float
    group_size: int
    pool_size: int
    pool_chosen: bool
    pool_full: bool
    members: tuple[GroupMember, ...]
    epoch: int
    user_events: int
    cold_start: ColdStart | None


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """Of the n arms that are explained: all that is told, as arrays."""

    chosen: Chosen
    rows: NDArray[np.int64]
    pool_size: int
    members_mean: NDArray[np.float64]
    members_spread: NDArray[np.float64]
    top: NDArray[np.int64]  # [n, 10] columns, the largest contribution first
    columns: NDArray[np.float64]  # [n, 10] their contributions
    intercept: NDArray[np.float64]
    memory: NDArray[np.float64]


@final
class Explainer:
    """Explains what the served model says."""

    def __init__(self, model: ServedModel, layout: FeatureLayout, compute: Executor) -> None:
        self._model = model
        self._layout = layout
        self._compute = compute
        self._waiting = 0
        # One at a time is handed to the thread: requests that need no explanation wait for no more than that.
        self._turn = asyncio.Lock()

    async def choose(self, question: Question, draw: Draw) -> tuple[Chosen, tuple[Explanation, ...]]:
        """Score a request, choose of its arms, and explain those that were chosen."""
        seen = await self._run(lambda: self._see(question.asked, draw))
        return seen.chosen, self._told(question, seen)

    async def explain(
        self, question: Question, slate: Slate, still: Callable[[ArmScores], bool]
    ) -> tuple[Explanation, ...] | None:
        """Explain arms that were chosen before; None unless `still` holds of how they are judged now."""

        def work() -> _Seen | None:
            [scores] = self._model.score([question.asked])
            return self._see(question.asked, lambda _: slate) if still(scores) else None

        seen = await self._run(work)
        return None if seen is None else self._told(question, seen)

    async def group(self, asked: ScoreRequest, limit: int) -> Group:
        """Who agrees with a user on the only arm of a request, at most so many of them by name."""
        return await self._run(lambda: self._group(asked, limit))

    def _see(self, asked: ScoreRequest, draw: Draw) -> _Seen:
        model = self._model
        chosen = model.choose_one(asked, draw)
        rows = np.asarray(chosen.slate.chosen, dtype=np.int64)
        sight = model.look(asked)
        places = model.given(rows)
        with model.computing():
            agreement = model.learner.agreement(sight.outline, sight.pool, sight.query, places)
            parts = model.learner.contributions(sight.outline, sight.pool, sight.query, places, agreement)
        members = model.taken(agreement.members, np.bool_)
        own = model.taken(agreement.prediction, np.float64)
        # Whoever is no member may predict anything, not finite numbers among it.
        predictions = np.where(members, model.taken(agreement.predictions, np.float64), own[:, None])
        size = members.sum(-1) + 1
        # Everyone else counts as 0 away, in both sums; the asking user is 0 away, too.
        away = predictions - own[:, None]
        shift = away.sum(-1) / size
        squares = (away * away).sum(-1) / size - shift * shift
        columns = model.taken(parts.columns, np.float64)
        columns = np.where(np.isfinite(columns), columns, 0.0)
        intercept = model.taken(parts.intercept, np.float64)
        if self._layout.intercept:
            # A constant that the layout adds says as little about the arm as one that the learner adds.
            intercept, columns = intercept + columns[:, -1], columns[:, :-1]
        top = _largest(columns)
        return _Seen(
            chosen=chosen,
            rows=rows,
            pool_size=members.shape[1] + (not sight.in_pool),
            members_mean=own + shift,
            members_spread=np.sqrt(np.maximum(squares, 0.0)),
            top=top,
            columns=np.take_along_axis(columns, top, 1),
            intercept=intercept,
            memory=model.taken(parts.memory, np.float64),
        )

    def _told(self, question: Question, seen: _Seen) -> tuple[Explanation, ...]:
        names, scores = InputNames(self._layout, question.context), seen.chosen.scores
        told = []
        for place, row in enumerate(seen.rows.tolist()):
            inputs, mean = question.asked.inputs[row], float(scores.mean[row])
            intercept, memory = float(seen.intercept[place]), float(seen.memory[place])
            top, columns = seen.top[place].tolist(), seen.columns[place].tolist()
            named = names.of(question.features(row), top)
            contributions = tuple(
                Contribution(name, sign * float(inputs[column]), contribution)
                for column, contribution, (name, sign) in zip(top, columns, named, strict=True)
                if contribution
            )
            size = seen.chosen.group_sizes[place]
            told.append(
                Explanation(
                    group_size=size,
                    pool_size=seen.pool_size,
                    agreement=size / seen.pool_size,
                    members_mean=float(seen.members_mean[place]),
                    members_spread=float(seen.members_spread[place]),
                    mean=mean,
                    bonus=float(scores.bonus[row]),
                    sigma=float(scores.sigma[row]),
                    contributions=contributions,
                    intercept=intercept,
                    memory=memory,
                    other=math.fsum([mean, -intercept, -memory, *(-each.contribution for each in contributions)]),
                )
            )
        return tuple(told)

    def _group(self, asked: ScoreRequest, limit: int) -> Group:
        model = self._model
        sight = model.look(asked)
        with model.computing():
            agreement = model.learner.agreement(
                sight.outline, sight.pool, sight.query, model.given(np.zeros(1, dtype=np.int64))
            )
        own, members = float(agreement.prediction[0]), model.taken(agreement.members, np.bool_)[0]
        near = np.flatnonzero(members)
        predictions = model.taken(agreement.predictions, np.float64)[0][near]
        distances = np.abs(predictions - own)
        nearest = np.argsort(distances, kind="stable")[: max(0, limit - 1)]
        listed = [GroupMember(asked.user_id, own, 0.0, sight.standing.version)]
        for place in nearest.tolist():  # as many as are listed
            user = sight.pool_users[near[place]]
            held = model.holds(user)
            events = 0 if held is None else held.version
            listed.append(GroupMember(user, float(predictions[place]), float(distances[place]), events))
        return Group(
            prediction=own,
            threshold=float(agreement.threshold[0]),
            group_size=len(near) + 1,
            pool_size=len(members) + (not sight.in_pool),
            pool_chosen=model.pool_chosen,
            pool_full=model.pool_full,
            members=tuple(listed),
            epoch=model.epoch_number,
            user_events=sight.standing.version,
            cold_start=cold_start(sight.standing.version, started=sight.standing.started),
        )

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._waiting >= EXPLAINING_MAX:
            raise Overloaded(f"{EXPLAINING_MAX} requests are waiting to be explained")
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.get_running_loop().run_in_executor(self._compute, work)
        finally:
            self._waiting -= 1


def _largest(columns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of the largest absolute values of each row, the largest first: [n, d] → [n, at most 10]."""
    sizes, count = np.abs(columns), min(CONTRIBUTIONS_TOLD, columns.shape[1])
    some = np.argpartition(-sizes, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(sizes, some, 1), axis=1, kind="stable")
    return np.take_along_axis(some, order, 1)
