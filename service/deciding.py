"""From a request for arms to a recorded decision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final, final
from uuid import uuid4

from service.breaker import StoreBreaker
from service.choosing import Choice, Chooser
from service.contracts import Activation, Recommendation, RecommendCommand
from service.errands import Errands
from service.errors import UnknownDecision
from service.live import LiveSettings
from service.metrics import NamespaceMetrics
from service.profiling import ProfileDesk
from service.records import now_ms, recommendation_of
from store.decisions import Decision, DecisionStore
from store.errors import FenceLost
from store.profiles import ProfileMemo, encode_profile

#: Times that it is decided for a user who begins anew while we decide.
DECISION_TRIES: Final = 2


@final
class Decider:
    """Makes the decisions of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        breaker: StoreBreaker,
        decisions: DecisionStore,
        chooser: Chooser,
        profiles: ProfileDesk,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._breaker = breaker
        self._decisions = decisions
        self._chooser = chooser
        self._profiles = profiles
        self._metrics = metrics
        self._told = ProfileMemo()

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        store = Errands(self._breaker, go_on=self._live.settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(lambda: self._decisions.get(decision_id))
            if earlier is not None:
                return await self._replayed(command, earlier, store)
        told, profile = b"", None
        if command.user_features is not None:
            profile = await self._profiles.read(command.user_features, store)
            told = encode_profile(command.user_features)
        incarnation = 0
        for _ in range(DECISION_TRIES):
            choice = await self._chooser.choose(command, profile, decision_id, incarnation, store)
            decision = choice.decision
            news = self._told.news(command.user_id, decision.incarnation, told) if told else b""
            try:
                with self._metrics.stage("record"):
                    standing = await store.run(partial(self._put, choice, news))
            except FenceLost as fence:
                # The user began anew meanwhile, and nothing was stored. What the log is about to tell is asked for
                # now, and decided for whom they are by then: an answer that no reward can follow helps nobody.
                incarnation = int(fence.detail)
                await self._chooser.refresh(command.user_id, store)
                continue
            if standing is None:
                break
            if news:
                self._told.stored(command.user_id, decision.incarnation, news)
            if standing is not decision:
                return await self._replayed(command, standing, store)
            answer = recommendation_of(decision, command.fingerprint, replayed=False)
            return replace(answer, explanations=choice.explanations)
        answer = recommendation_of(decision, command.fingerprint, replayed=False, logged=False)
        return replace(answer, explanations=choice.explanations)

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

    async def _put(self, choice: Choice, profile: bytes) -> Decision:
        """Record a decision; whoever raced us with the same id and was first has decided for both."""
        decision = choice.decision
        overdue_ms = None if decision.deferred else self._live.rules.overdue_ms(decision.created_ms)
        return await self._decisions.put(decision, overdue_ms=overdue_ms, profile=profile, start=choice.start)

    async def _replayed(self, command: RecommendCommand, decision: Decision, store: Errands) -> Recommendation:
        """A decision that was made before, by whomever."""
        answer = recommendation_of(decision, command.fingerprint, replayed=True)
        if not command.explain:
            return answer
        told = await self._chooser.explain(command, decision, store)
        return replace(answer, explanations=told or (None,) * len(decision.items))
