"""From a request for arms to a recorded decision."""

from __future__ import annotations

from functools import partial
from typing import Final, final
from uuid import uuid4

import numpy as np

from models.exploration import decision_draws, draw_slate
from service.baseline import baseline_items, nothing_seen
from service.breaker import StoreBreaker
from service.candidates import CandidateDesk
from service.contracts import Activation, Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import UnknownDecision
from service.live import LiveSettings
from service.records import now_ms, recommendation_of
from service.served import ScoreRequest
from service.serving import ServingRoom
from store.decisions import BASELINE, DecidedItem, Decision, DecisionStore
from store.errors import FenceLost
from store.profiles import ProfileMemo, encode_profile
from store.users import UserStore

#: Times that it is decided for a user who begins anew while we decide.
DECISION_TRIES: Final = 2


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
        candidates: CandidateDesk,
    ) -> None:
        self._live = live
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._room = room
        self._candidates = candidates
        self._profiles = ProfileMemo()

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        store = Errands(self._breaker, go_on=self._live.settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(lambda: self._decisions.get(decision_id))
            if earlier is not None:
                return recommendation_of(earlier, command.fingerprint, replayed=True)
        profile = None if command.user_features is None else encode_profile(command.user_features)
        incarnation = 0
        for _ in range(DECISION_TRIES):
            if self._live.settings.serving == "baseline":
                decision = await self._by_baseline(command, decision_id, store, incarnation)
            else:
                decision = await self._by_learner(command, decision_id, store)
            news = b"" if profile is None else self._profiles.news(command.user_id, decision.incarnation, profile)
            try:
                standing = await store.run(partial(self._put, decision, news))
            except FenceLost as fence:
                # The user began anew meanwhile, and nothing was stored. What the log is about to tell is asked for
                # now, and decided for whom they are by then: an answer that no reward can follow helps nobody.
                incarnation = int(fence.detail)
                await self._refresh(command.user_id, store)
                continue
            if standing is None:
                break
            if news:
                self._profiles.stored(command.user_id, decision.incarnation, news)
            return recommendation_of(standing, command.fingerprint, replayed=standing is not decision)
        return recommendation_of(decision, command.fingerprint, replayed=False, logged=False)

    async def _put(self, decision: Decision, profile: bytes) -> Decision:
        """Record a decision; whoever raced us with the same id and was first has decided for both."""
        overdue_ms = None if decision.deferred else self._live.rules.overdue_ms(decision.created_ms)
        return await self._decisions.put(decision, overdue_ms=overdue_ms, profile=profile)

    async def _refresh(self, user_id: str, store: Errands) -> None:
        """Serve the newest state of a user."""
        if self._room.serving is not None:
            await store.run(partial(self._room.serving.replica.refresh, user_id))

    async def _by_baseline(
        self, command: RecommendCommand, decision_id: str, store: Errands, incarnation: int
    ) -> Decision:
        """The kill switch is on: whatever is wrong with the learner, it is not asked."""
        arm_ids, k = await self._candidates.names(command, store)
        items = baseline_items(arm_ids, self._live.settings.baseline, k)
        return Decision(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=items,
            features=nothing_seen(items),
            phi=nothing_seen(items),
            policy=BASELINE,
            epoch=0,
            user_version=0,
            cold_start=None,
            created_ms=now_ms(),
            incarnation=incarnation,
            deferred=command.deferred,
        )

    async def _by_learner(self, command: RecommendCommand, decision_id: str, store: Errands) -> Decision:
        """Choose arms by what is known of the user now."""
        serving, candidates = await self._candidates.gather(command, store)
        loaded = None
        if command.user_id not in serving.replica:
            # Not found, or not to be asked for now: the meta-learner answers.
            states = await store.run(lambda: self._users.load([command.user_id])) or {}
            await serving.replica.take(states.values())
            loaded = states.get(command.user_id)
        scores = await serving.scorer.score(ScoreRequest(command.user_id, candidates.inputs, loaded))
        sound = np.isfinite(scores.mean + scores.bonus)
        if not sound.all():
            raise candidates.refusal(int(sound.argmin()), "are too large for the learner to tell a score")
        policy = self._live.policy
        draws = decision_draws(self._live.record.seed, decision_id)
        slate = draw_slate(policy, scores.mean, scores.bonus, candidates.k, draws)
        return Decision(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=tuple(
                DecidedItem(
                    arm_id=candidates.arm_id(arm),
                    rank=place + 1,
                    score=float(scores.mean[arm] + scores.bonus[arm]),
                    mean=float(scores.mean[arm]),
                    bonus=float(scores.bonus[arm]),
                    propensity=propensity,
                    group_size=int(scores.group_size[arm]),
                )
                for place, (arm, propensity) in enumerate(zip(slate.chosen, slate.propensities, strict=True))
            ),
            features=candidates.inputs[list(slate.chosen)],
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
