"""From a request for arms to a recorded decision."""

from __future__ import annotations

from typing import final
from uuid import uuid4

import numpy as np

from models.exploration import build_policy, decision_draws, draw_slate
from models.features import FeatureError, assemble
from service.breaker import StoreBreaker
from service.contracts import Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable
from service.metrics import NamespaceMetrics
from service.records import now_ms, recommendation_of
from service.served import ScoreRequest
from service.serving import Serving, ServingRoom
from service.settings import Settings
from store.decisions import DecidedItem, Decision, DecisionStore
from store.errors import StoreUnavailable
from store.users import UserStore


@final
class Decider:
    """Makes the decisions of one namespace."""

    def __init__(
        self,
        settings: Settings,
        seed: int,
        breaker: StoreBreaker,
        users: UserStore,
        decisions: DecisionStore,
        room: ServingRoom,
        metrics: NamespaceMetrics,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._room = room
        self._metrics = metrics
        self._policy = build_policy(settings.policy, epsilon=settings.epsilon, squarecb_gamma=settings.squarecb_gamma)

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        store = Errands(self._breaker, go_on=self._settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(lambda: self._decisions.get(decision_id))
            if earlier is not None:
                return recommendation_of(earlier, command.fingerprint, replayed=True)
        features = [arm.features for arm in command.arms]
        try:
            serving = self._room.serving or await self._begin(command)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        loaded = None
        if command.user_id not in serving.replica:
            # Not found, or not to be asked for now: the meta-learner answers.
            with self._metrics.stage("load"):
                states = await store.run(lambda: self._users.load([command.user_id])) or {}
                await serving.replica.take(states.values())
            loaded = states.get(command.user_id)
        with self._metrics.stage("score"):
            scores = await serving.scorer.score(ScoreRequest(command.user_id, inputs, loaded))
        sound = np.isfinite(scores.mean + scores.bonus)
        if not sound.all():
            raise InvalidInput(
                ("arms", int(sound.argmin()), "features"), "are too large for the learner to tell a score"
            )
        draws = decision_draws(self._seed, decision_id)
        slate = draw_slate(self._policy, scores.mean, scores.bonus, command.k, draws)
        decision = Decision(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=tuple(
                DecidedItem(
                    arm_id=command.arms[arm].id,
                    rank=place + 1,
                    score=float(scores.mean[arm] + scores.bonus[arm]),
                    mean=float(scores.mean[arm]),
                    bonus=float(scores.bonus[arm]),
                    propensity=propensity,
                    group_size=int(scores.group_size[arm]),
                )
                for place, (arm, propensity) in enumerate(zip(slate.chosen, slate.propensities, strict=True))
            ),
            features=inputs[list(slate.chosen)],
            phi=scores.phi[list(slate.chosen)],
            policy=self._policy.name,
            epoch=scores.epoch,
            user_version=scores.user_events,
            cold_start=None if scores.user_events else "meta",
            created_ms=now_ms(),
            incarnation=scores.incarnation,
        )
        # Whoever raced us with the same id and was first has decided for both.
        with self._metrics.stage("record"):
            standing = await store.run(lambda: self._decisions.put(decision))
        if standing is None:
            return recommendation_of(decision, command.fingerprint, replayed=False, logged=False)
        return recommendation_of(standing, command.fingerprint, replayed=standing is not decision)

    async def _begin(self, command: RecommendCommand) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._room.fix_layout(command))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error
