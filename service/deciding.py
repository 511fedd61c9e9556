"""From a request for arms to a recorded decision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import final
from uuid import uuid4

import numpy as np

from models.exploration import Slate, build_policy, decision_draws, draw_slate
from models.features import FeatureError, Vectors, assemble
from service.breaker import StoreBreaker
from service.contracts import Explanation, Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable, VersionNotReached
from service.explaining import Question
from service.records import now_ms, recommendation_of
from service.served import ArmScores, ScoreRequest
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
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._room = room
        self._policy = build_policy(settings.policy, epsilon=settings.epsilon, squarecb_gamma=settings.squarecb_gamma)

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        store = Errands(self._breaker, go_on=self._settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(lambda: self._decisions.get(decision_id))
            if earlier is not None:
                return await self._replayed(command, earlier, store)
        features = [arm.features for arm in command.arms]
        try:
            serving = self._room.serving or await self._begin(command)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        if command.min_version is not None:
            await self._reach(serving, command.min_version)
        asked = await self._asked(command, serving, inputs, store)
        explanations: tuple[Explanation, ...] = ()
        choose = partial(self._choose, command, decision_id)
        if command.explain:
            question = Question(asked, features, command.context)
            scores, slate, explanations = await serving.explainer.choose(question, choose)
        else:
            scores = await serving.scorer.score(asked)
            slate = choose(scores)
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
        standing = await store.run(lambda: self._decisions.put(decision))
        if standing is not None and standing is not decision:
            return await self._replayed(command, standing, store)
        answer = recommendation_of(decision, command.fingerprint, replayed=False, logged=standing is not None)
        return replace(answer, explanations=explanations)

    async def _asked(
        self, command: RecommendCommand, serving: Serving, inputs: Vectors, store: Errands
    ) -> ScoreRequest:
        """What the model is asked, with the state of a user whom it does not hold."""
        loaded = None
        if command.user_id not in serving.replica:
            # Not found, or not to be asked for now: the meta-learner answers.
            states = await store.run(lambda: self._users.load([command.user_id])) or {}
            await serving.replica.take(states.values())
            loaded = states.get(command.user_id)
        return ScoreRequest(command.user_id, inputs, loaded)

    def _choose(self, command: RecommendCommand, decision_id: str, scores: ArmScores) -> Slate:
        if command.min_version is not None and scores.epoch < command.min_version:
            raise _not_reached()  # it was, and the store has lost it since
        sound = np.isfinite(scores.mean + scores.bonus)
        if not sound.all():
            raise InvalidInput(
                ("arms", int(sound.argmin()), "features"), "are too large for the learner to tell a score"
            )
        draws = decision_draws(self._seed, decision_id)
        return draw_slate(self._policy, scores.mean, scores.bonus, command.k, draws)

    async def _reach(self, serving: Serving, version: int) -> None:
        """Wait until an epoch is served that is at least this one."""
        if not await serving.replica.wait_epoch(version, self._settings.wait_applied_timeout_s):
            raise _not_reached()

    async def _replayed(self, command: RecommendCommand, decision: Decision, store: Errands) -> Recommendation:
        """A decision that was made before, by whomever."""
        answer = recommendation_of(decision, command.fingerprint, replayed=True)
        if not command.explain:
            return answer
        told = await self._explained_anew(command, decision, store)
        return replace(answer, explanations=told or (None,) * len(decision.items))

    async def _explained_anew(
        self, command: RecommendCommand, decision: Decision, store: Errands
    ) -> tuple[Explanation, ...] | None:
        """Why a decision was made; None when the model that made it is not served, here or any more."""
        features, places = [arm.features for arm in command.arms], {arm.id: at for at, arm in enumerate(command.arms)}
        if not all(item.arm_id in places for item in decision.items):
            return None
        try:
            serving = self._room.serving or await self._begin(command)
            inputs = assemble(serving.layout, features, command.context)
        except (FeatureError, Unavailable):
            return None
        rows = [places[item.arm_id] for item in decision.items]
        if not np.array_equal(inputs[rows], decision.features):
            return None

        def still(scores: ArmScores) -> bool:
            served = (scores.epoch, scores.incarnation, scores.user_events)
            return served == (decision.epoch, decision.incarnation, decision.user_version)

        asked = await self._asked(command, serving, inputs, store)
        return await serving.explainer.explain(Question(asked, features, command.context), rows, still)

    async def _begin(self, command: RecommendCommand) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._room.fix_layout(command))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error


def _not_reached() -> VersionNotReached:
    return VersionNotReached("An epoch of this number is not served here yet; try again later.")
