"""From a request for arms to a recorded decision."""

from __future__ import annotations

from typing import final
from uuid import uuid4

import numpy as np

from models.exploration import decision_draws, draw_slate
from models.features import FeatureError, assemble
from service.baseline import BASELINE_POLICY, baseline_items, nothing_seen
from service.breaker import StoreBreaker
from service.contracts import Activation, Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable, UnknownDecision
from service.live import LiveSettings
from service.records import now_ms, recommendation_of
from service.served import ScoreRequest
from service.serving import Serving, ServingRoom
from store.decisions import DecidedItem, Decision, DecisionStore
from store.errors import StoreUnavailable
from store.users import UserStore


@final
class Decider:
    """Makes the decisions of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        breaker: StoreBreaker,
        users: UserStore,
        decisions: DecisionStore,
        room: ServingRoom,
    ) -> None:
        self._live = live
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._room = room

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        store = Errands(self._breaker, go_on=self._live.settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(lambda: self._decisions.get(decision_id))
            if earlier is not None:
                return recommendation_of(earlier, command.fingerprint, replayed=True)
        if self._live.settings.serving == "baseline":
            decision = self._by_baseline(command, decision_id)
        else:
            decision = await self._by_learner(command, decision_id, store)
        # Whoever raced us with the same id and was first has decided for both.
        overdue_ms = None if decision.deferred else self._live.rules.overdue_ms(decision.created_ms)
        standing = await store.run(lambda: self._decisions.put(decision, overdue_ms=overdue_ms))
        if standing is None:
            return recommendation_of(decision, command.fingerprint, replayed=False, logged=False)
        return recommendation_of(standing, command.fingerprint, replayed=standing is not decision)

    def _by_baseline(self, command: RecommendCommand, decision_id: str) -> Decision:
        """The kill switch is on: whatever is wrong with the learner, it is not asked."""
        items = baseline_items([arm.id for arm in command.arms], self._live.settings.baseline, command.k)
        return Decision(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=items,
            features=nothing_seen(items),
            phi=nothing_seen(items),
            policy=BASELINE_POLICY,
            epoch=0,
            user_version=0,
            cold_start=None,
            created_ms=now_ms(),
            deferred=command.deferred,
        )

    async def _by_learner(self, command: RecommendCommand, decision_id: str, store: Errands) -> Decision:
        features = [arm.features for arm in command.arms]
        try:
            serving = self._room.serving or await self._begin(command)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        loaded = None
        if command.user_id not in serving.replica:
            # Not found, or not to be asked for now: the meta-learner answers.
            states = await store.run(lambda: self._users.load([command.user_id])) or {}
            await serving.replica.take(states.values())
            loaded = states.get(command.user_id)
        scores = await serving.scorer.score(ScoreRequest(command.user_id, inputs, loaded))
        sound = np.isfinite(scores.mean + scores.bonus)
        if not sound.all():
            raise InvalidInput(
                ("arms", int(sound.argmin()), "features"), "are too large for the learner to tell a score"
            )
        policy = self._live.policy
        draws = decision_draws(self._live.record.seed, decision_id)
        slate = draw_slate(policy, scores.mean, scores.bonus, command.k, draws)
        return Decision(
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
            policy=policy.name,
            epoch=scores.epoch,
            user_version=scores.user_events,
            cold_start=None if scores.user_events else "meta",
            created_ms=now_ms(),
            incarnation=scores.incarnation,
            deferred=command.deferred,
        )

    async def activate(self, decision_id: str) -> Activation:
        """Have a deferred decision count from now on; one that counts already goes on as it is."""
        activated_ms = now_ms()
        decision = await self._breaker.call(
            lambda: self._decisions.activate(
                decision_id,
                activated_ms,
                window_ms=self._live.settings.reward_window_s * 1_000,
                overdue_ms=self._live.rules.overdue_ms(activated_ms),
            )
        )
        if decision is None:
            raise UnknownDecision("no such decision, or its reward window is over")
        return Activation(decision.decision_id, decision.since_ms)

    async def _begin(self, command: RecommendCommand) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._room.fix_layout(command))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error
