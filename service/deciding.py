"""From a request for arms to a recorded decision."""

from __future__ import annotations

from functools import partial
from typing import Final, final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from models.exploration import build_policy, decision_draws, draw_slate
from models.features import FeatureError, assemble
from service.breaker import StoreBreaker
from service.contracts import Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable
from service.records import now_ms, recommendation_of
from service.served import ScoreRequest
from service.serving import Serving, ServingRoom
from service.settings import Settings
from store.decisions import DecidedItem, Decision, DecisionStore
from store.errors import FenceLost, StoreUnavailable
from store.profiles import ProfileMemo, encode_profile
from store.users import UserStore

#: Times that is decided for a user who begins anew while we decide.
DECISION_TRIES: Final = 2


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
        self._profiles = ProfileMemo()
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
        profile = None if command.user_features is None else encode_profile(command.user_features)
        for _ in range(DECISION_TRIES):
            decision = await self._decide(command, decision_id, serving, inputs, store)
            news = b"" if profile is None else self._profiles.news(command.user_id, decision.incarnation, profile)
            try:
                # Whoever raced us with the same id and was first has decided for both.
                standing = await store.run(partial(self._decisions.put, decision, profile=news))
            except FenceLost:
                # The user began anew meanwhile, and nothing was stored. What the log is about to tell is asked for
                # now, and decided for whom they are by then: an answer that no reward can follow helps nobody.
                await store.run(partial(serving.replica.refresh, command.user_id))
                continue
            if standing is None:
                break
            if news:
                self._profiles.stored(command.user_id, decision.incarnation, news)
            return recommendation_of(standing, command.fingerprint, replayed=standing is not decision)
        return recommendation_of(decision, command.fingerprint, replayed=False, logged=False)

    async def _decide(
        self,
        command: RecommendCommand,
        decision_id: str,
        serving: Serving,
        inputs: NDArray[np.float32],
        store: Errands,
    ) -> Decision:
        """Choose arms by what is known of the user now."""
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
        draws = decision_draws(self._seed, decision_id)
        slate = draw_slate(self._policy, scores.mean, scores.bonus, command.k, draws)
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
            policy=self._policy.name,
            epoch=scores.epoch,
            user_version=scores.user_events,
            cold_start=None if scores.user_events else "meta",
            created_ms=now_ms(),
            incarnation=scores.incarnation,
        )

    async def _begin(self, command: RecommendCommand) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._room.fix_layout(command))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error
