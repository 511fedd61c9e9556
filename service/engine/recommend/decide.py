"""POST /recommend without HTTP: select arms, store the decision, answer."""

from __future__ import annotations

from functools import partial
from typing import Final, final
from uuid import uuid4

from metaban.service.engine.commands import Recommendation, RecommendCommand
from metaban.service.engine.recommend.profiles import ProfileReader
from metaban.service.engine.recommend.select import Selector
from metaban.service.engine.store_guard import StoreAccess, StoreGuard
from metaban.service.errors import DecisionConflict, UnknownDecision
from metaban.service.settings.namespace import LiveSettings
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.codec import now_ms
from metaban.store.decisions.decisions import BASELINE, DecisionRecord, DecisionStore
from metaban.store.errors import FenceLost
from metaban.store.users.profiles import ProfileMemo, encode_profile

#: Attempts for a user whose incarnation changes during the request.
DECISION_TRIES: Final = 2


@final
class Decider:
    """Makes the decisions of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        guard: StoreGuard,
        decisions: DecisionStore,
        selector: Selector,
        profiles: ProfileReader,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._guard = guard
        self._decisions = decisions
        self._selector = selector
        self._profiles = profiles
        self._metrics = metrics
        self._stored_profiles = ProfileMemo()
        #: Decisions of this process that take rewards, since they are stored, active and made by the learner.
        self.decided = 0

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Select arms for a user and store the decision before answering; `logged` is False when it was not stored."""
        store = StoreAccess(self._guard, go_on=self._live.settings.store_outage == "serve")
        decision_id = command.decision_id or uuid4().hex
        if command.decision_id is not None:
            earlier = await store.run(partial(self._decisions.standing, decision_id))
            if earlier is not None:
                return await self._replay(command, earlier, store)
        profile, encoded = None, b""
        if command.user_features is not None:
            profile = await self._profiles.read(command.user_features, store)
            encoded = encode_profile(command.user_features)
        incarnation = 0
        for _ in range(DECISION_TRIES):
            made = await self._selector.select(command, profile, decision_id, incarnation, store)
            decision = made.decision
            overdue_ms = None if decision.deferred else self._live.rules.overdue_ms(decision.created_ms)
            changed = self._stored_profiles.news(command.user_id, decision.incarnation, encoded) if encoded else b""
            put = partial(self._decisions.put, decision, overdue_ms=overdue_ms, profile=changed, start=made.start)
            try:
                with self._metrics.stage("record"):
                    stored = await store.run(put)
            except FenceLost as fence:
                # The user's incarnation changed and nothing was stored. Load the new state and decide again: a
                # decision of the old incarnation could not take rewards.
                incarnation = int(fence.detail)
                await self._selector.refresh(command.user_id, store)
                continue
            if stored is None:
                break
            if changed:
                self._stored_profiles.stored(command.user_id, decision.incarnation, changed)
            if stored is not decision:
                return await self._replay(command, stored, store)
            made.logged = True
            self.decided += decision.policy != BASELINE and not decision.deferred
            break
        return made

    async def activate(self, decision_id: str) -> DecisionRecord:
        """Let a deferred decision take rewards from now on; an active one is returned unchanged."""
        activated_ms = now_ms()
        decision = await self._guard.call(
            lambda: self._decisions.activate(
                decision_id,
                activated_ms,
                window_ms=round(self._live.rules.window_s * 1_000),
                overdue_ms=self._live.rules.overdue_ms(activated_ms),
            )
        )
        if decision is None:
            raise UnknownDecision(
                f"no such decision in namespace {self._live.record.name}, or its reward window is over"
            )
        self.decided += decision.activated_ms == activated_ms and decision.policy != BASELINE
        return decision

    async def _replay(self, command: RecommendCommand, decision: DecisionRecord, store: StoreAccess) -> Recommendation:
        """Answer with a stored decision; DecisionConflict when it was made for another request body."""
        if decision.fingerprint != command.fingerprint:
            raise DecisionConflict("this decision_id belongs to a request with another body")
        explanations = await self._selector.explain(command, decision, store) if command.explain else ()
        return Recommendation(decision, explanations, replayed=True, logged=True)
