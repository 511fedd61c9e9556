"""Explains scores: the parts of a mean and the group that agrees, computed on the model's thread.

A request with `explain` is scored, chosen and explained in one job of that thread, so that all three use the same
model.
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

from metaban.models.features import FeatureLayout, Features, InputNames
from metaban.models.policies import Slate
from metaban.service.engine.commands import Contribution, Explanation, GroupMember
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, Chosen, ColdStart, Draw, ScoreRequest
from metaban.service.errors import Overloaded

#: Contributions listed for an arm, the largest.
CONTRIBUTIONS_LISTED: Final = 10

#: Parts of a mean that add up to it.
BLOCKS: Final = ("shared", "user", "arm", "taste", "memory")

#: Most requests that wait to be explained; further ones are refused, since each takes a pass of its own.
EXPLAINING_MAX: Final = 512

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """The arms of one request, as the learner's inputs and as the client sent them."""

    asked: ScoreRequest
    features: Callable[[int], Features]
    context: Features | None


@final
@dataclass(frozen=True, slots=True)
class ArmGroup:
    """The group of a user on one arm; the nearest members, the user first."""

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
class _Parts:
    """The parts of n explanations as arrays."""

    chosen: Chosen
    rows: NDArray[np.int64]
    pool_size: int
    members_mean: NDArray[np.float64]
    members_spread: NDArray[np.float64]
    top: NDArray[np.int64]  # [n, 10] columns, the largest contribution first
    columns: NDArray[np.float64]  # [n, 10] their contributions
    absent: NDArray[np.float64]  # [n] contributions of features that the arm and the context do not have
    intercept: NDArray[np.float64]
    blocks: dict[str, NDArray[np.float64]]  # each [n]
    looks: NDArray[np.float64]


@final
class Explainer:
    """Explains scores and groups of the served model."""

    def __init__(self, model: ServedModel, layout: FeatureLayout, compute: Executor) -> None:
        self._model = model
        self._layout = layout
        self._compute = compute
        self._waiting = 0
        # One explanation at a time on the model's thread: other requests wait for at most one.
        self._turn = asyncio.Lock()

    async def choose(self, request: ExplainRequest, draw: Draw) -> tuple[Chosen, tuple[Explanation, ...]]:
        """Score a request, choose among its arms, and explain the chosen ones."""
        parts = await self._run(lambda: self._parts(request, draw))
        return parts.chosen, self._explanations(request, parts)

    async def explain(
        self, request: ExplainRequest, slate: Slate, is_same_model: Callable[[ArmScores], bool]
    ) -> tuple[Explanation, ...] | None:
        """Explain arms that were chosen earlier; None unless `is_same_model` accepts the scores of now."""

        def work() -> _Parts | None:
            [scores] = self._model.score([request.asked])
            return self._parts(request, lambda _: slate) if is_same_model(scores) else None

        parts = await self._run(work)
        return None if parts is None else self._explanations(request, parts)

    async def group(self, asked: ScoreRequest, limit: int) -> ArmGroup:
        """The group of a user on the only arm of a request, with at most `limit` members listed."""
        return await self._run(lambda: self._group(asked, limit))

    def _parts(self, request: ExplainRequest, draw: Draw) -> _Parts:
        model, asked = self._model, request.asked
        chosen = model.choose_one(asked, draw)
        rows = np.asarray(chosen.slate.chosen, dtype=np.int64)
        view = model.view(asked)
        places = model.to_learner(rows)
        with model.computing():
            agreement = view.epoch.agreement(view.pool, view.query, places)
            contributions = view.epoch.contributions(view.pool, view.query, places, agreement)
            looks = view.epoch.looks(model.to_learner(np.arange(rows.shape[0])))
        members = model.to_numpy(agreement.members, np.bool_)
        own = model.to_numpy(agreement.prediction, np.float64)
        # Users who are not members may predict anything, even numbers that are not finite.
        predictions = np.where(members, model.to_numpy(agreement.predictions, np.float64), own[:, None])
        size = members.sum(-1) + 1
        # Distances of non-members and of the asking user are 0 in both sums.
        away = predictions - own[:, None]
        shift = away.sum(-1) / size
        squares = (away * away).sum(-1) / size - shift * shift
        columns = model.to_numpy(contributions.columns, np.float64)
        columns = np.where(np.isfinite(columns), columns, 0.0)
        intercept = model.to_numpy(contributions.intercept, np.float64)
        if self._layout.intercept:
            # The layout's constant input is part of the intercept.
            intercept, columns = intercept + columns[:, -1], columns[:, :-1]
        names = InputNames(self._layout, request.context)
        present = np.stack([names.present(request.features(row)) for row in rows.tolist()])
        absent, columns = np.where(present, 0.0, columns).sum(-1), np.where(present, columns, 0.0)
        top = _largest(columns)
        return _Parts(
            chosen=chosen,
            rows=rows,
            pool_size=members.shape[1] + (not view.in_pool),
            members_mean=own + shift,
            members_spread=np.sqrt(np.maximum(squares, 0.0)),
            top=top,
            columns=np.take_along_axis(columns, top, 1),
            absent=absent,
            intercept=intercept,
            blocks={name: model.to_numpy(getattr(contributions, name), np.float64) for name in BLOCKS},
            looks=model.to_numpy(looks, np.float64),
        )

    def _explanations(self, request: ExplainRequest, parts: _Parts) -> tuple[Explanation, ...]:
        names, scores = InputNames(self._layout, request.context), parts.chosen.scores
        made = []
        for place, row in enumerate(parts.rows.tolist()):
            inputs, mean = request.asked.inputs[row], float(scores.mean[row])
            intercept, absent = float(parts.intercept[place]), float(parts.absent[place])
            blocks = {name: float(values[place]) for name, values in parts.blocks.items()}
            top, columns = parts.top[place].tolist(), parts.columns[place].tolist()
            named = names.of(request.features(row), top)
            contributions = tuple(
                Contribution(name, sign * float(inputs[column]), contribution)
                for column, contribution, (name, sign) in zip(top, columns, named, strict=True)
                if contribution
            )
            explained = [intercept, absent, blocks["arm"], blocks["taste"], blocks["memory"]]
            explained += [each.contribution for each in contributions]
            size = parts.chosen.group_sizes[place]
            made.append(
                Explanation(
                    group_size=size,
                    pool_size=parts.pool_size,
                    agreement=size / parts.pool_size,
                    members_mean=float(parts.members_mean[place]),
                    members_spread=float(parts.members_spread[place]),
                    mean=mean,
                    bonus=float(scores.bonus[row]),
                    sigma=float(scores.sigma[row]),
                    looks=float(parts.looks[place]),
                    **blocks,
                    contributions=contributions,
                    absent=absent,
                    intercept=intercept,
                    other=math.fsum([mean, *(-each for each in explained)]),
                )
            )
        return tuple(made)

    def _group(self, asked: ScoreRequest, limit: int) -> ArmGroup:
        model = self._model
        view = model.view(asked)
        with model.computing():
            agreement = view.epoch.agreement(view.pool, view.query, model.to_learner(np.zeros(1, dtype=np.int64)))
        own, members = float(agreement.prediction[0]), model.to_numpy(agreement.members, np.bool_)[0]
        near = np.flatnonzero(members)
        predictions = model.to_numpy(agreement.predictions, np.float64)[0][near]
        distances = np.abs(predictions - own)
        nearest = np.argsort(distances, kind="stable")[: max(0, limit - 1)]
        listed = [GroupMember(asked.user_id, own, 0.0, view.version.version)]
        for place in nearest.tolist():
            user = view.pool_users[near[place]]
            held = model.holds(user)
            events = 0 if held is None else held.version
            listed.append(GroupMember(user, float(predictions[place]), float(distances[place]), events))
        return ArmGroup(
            prediction=own,
            threshold=float(agreement.threshold[0]),
            group_size=len(near) + 1,
            pool_size=len(members) + (not view.in_pool),
            pool_chosen=model.pool_chosen,
            pool_full=model.pool_full,
            members=tuple(listed),
            epoch=model.epoch_number,
            user_events=view.version.version,
            cold_start=view.version.cold_start,
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
    """Columns of the largest absolute values of each row, the largest first: [n, d] → [n, at most 10]."""
    sizes, count = np.abs(columns), min(CONTRIBUTIONS_LISTED, columns.shape[1])
    some = np.argpartition(-sizes, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(sizes, some, 1), axis=1, kind="stable")
    return np.take_along_axis(some, order, 1)
