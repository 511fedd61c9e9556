"""Selects the arms of a decision: by the learner or, while the kill switch is on, by the baseline ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from metaban.models.policies import Policy, Slate, decision_draws, draw_slate
from metaban.models.posterior_draws import draws_seed
from metaban.service.engine.commands import Explanation, Recommendation, RecommendCommand
from metaban.service.engine.model.explain import ExplainRequest
from metaban.service.engine.model.lifecycle import ModelHost, Serving
from metaban.service.engine.model.types import ArmScores, ScoreRequest, UserStart
from metaban.service.engine.model.warm_starts import NewStart
from metaban.service.engine.recommend.candidates import CandidateFinder, Candidates
from metaban.service.engine.store_guard import StoreAccess
from metaban.service.engine.waiting import waiting
from metaban.service.errors import InvalidInput, Unavailable, VersionNotReached
from metaban.service.settings.namespace import LiveSettings
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.codec import now_ms
from metaban.store.decisions.decisions import BASELINE, DecidedItem, DecisionRecord
from metaban.store.users.users import UserStore

#: A user's profile as numbers.
Profile: TypeAlias = NDArray[np.float64]

NOT_REACHED: Final = "An epoch of this version is not served here yet; try again later."


@final
class Selector:
    """Selects arms for the users of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        users: UserStore,
        host: ModelHost,
        candidates: CandidateFinder,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._metrics = metrics
        self._users = users
        self._host = host
        self._candidates = candidates

    async def select(
        self, command: RecommendCommand, profile: Profile | None, decision_id: str, incarnation: int, store: StoreAccess
    ) -> Recommendation:
        """Make a decision that is not stored yet; `incarnation` is the user's where the learner does not know it."""
        if self._live.settings.serving == "baseline":
            return await self._by_baseline(command, decision_id, incarnation, store)
        serving, candidates = await self._candidates.gather(command, store)
        if command.min_version is not None:
            with waiting(self._live.settings.wait_applied_timeout_s) as timeout_s:
                reached = await serving.replica.wait_epoch(command.min_version, timeout_s)
            if not reached:
                raise VersionNotReached(NOT_REACHED)
        policy = self._live.policy
        asked, new = await self._score_request(command, profile, serving, candidates, store)
        if policy.draws:
            asked = replace(asked, draws=policy.draws, seed=draws_seed(self._live.record.seed, decision_id))
        draw = partial(self._draw, command, decision_id, candidates, policy)
        explanations: tuple[Explanation, ...] = ()
        if command.explain:
            request = ExplainRequest(asked, candidates.features_of, command.context)
            chosen, explanations = await serving.explainer.choose(request, draw)
        else:
            with self._metrics.stage("score"):
                chosen = await serving.batcher.choose(asked, draw)
        scores, rows = chosen.scores, list(chosen.slate.chosen)
        items = []
        for rank, row in enumerate(rows, start=1):
            mean, bonus = float(scores.mean[row]), float(scores.bonus[row])
            propensity, group_size = chosen.slate.propensities[rank - 1], chosen.group_sizes[rank - 1]
            items.append(DecidedItem(candidates.arm_id(row), rank, mean + bonus, mean, bonus, propensity, group_size))
        decision = DecisionRecord(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=tuple(items),
            features=candidates.inputs[rows],
            phi=scores.phi[rows],
            policy=policy.name,
            epoch=scores.epoch,
            user_version=scores.user_events,
            cold_start=scores.cold_start,
            created_ms=now_ms(),
            incarnation=scores.incarnation,
            deferred=command.deferred,
        )
        start = None if new is None or not scores.started else new.of(decision.incarnation, decision.created_ms)
        return Recommendation(decision, explanations, start)

    async def refresh(self, user_id: str, store: StoreAccess) -> None:
        """Load the newest state of a user."""
        if self._host.serving is not None and self._live.settings.serving != "baseline":
            # Without a time limit: it also waits for the model's thread.
            await store.run(partial(self._host.serving.replica.refresh, user_id), budget_s=None)

    async def explain(
        self, command: RecommendCommand, decision: DecisionRecord, store: StoreAccess
    ) -> tuple[Explanation | None, ...]:
        """Explain the items of a stored decision; None for each when the model that made it is not served here."""
        unknown = (None,) * len(decision.items)
        if self._live.settings.serving == "baseline" or decision.policy == BASELINE:
            return unknown
        try:
            serving, candidates = await self._candidates.gather(command, store)
        except (InvalidInput, Unavailable):
            return unknown
        places = candidates.rows_by_id()
        if not all(item.arm_id in places for item in decision.items):
            return unknown
        rows = [places[item.arm_id] for item in decision.items]
        if not np.array_equal(candidates.inputs[rows], decision.features):
            return unknown
        slate = Slate(tuple(rows), tuple(item.propensity for item in decision.items))

        def is_same_model(scores: ArmScores) -> bool:
            served = (scores.epoch, scores.incarnation, scores.user_events, scores.cold_start)
            return served == (decision.epoch, decision.incarnation, decision.user_version, decision.cold_start)

        # Without the profile: only the stored warm start counts, since one made now might differ.
        asked, _ = await self._score_request(command, None, serving, candidates, store)
        request = ExplainRequest(asked, candidates.features_of, command.context)
        return await serving.explainer.explain(request, slate, is_same_model) or unknown

    async def _by_baseline(
        self, command: RecommendCommand, decision_id: str, incarnation: int, store: StoreAccess
    ) -> Recommendation:
        """Decide without touching the learner, which may be broken."""
        arm_ids, k = await self._candidates.names(command, store)
        items = baseline_items(arm_ids, self._live.settings.baseline, k)
        # Nothing is learned from the decision: it stores no inputs.
        no_inputs = np.empty((len(items), 0), dtype=np.float32)
        decision = DecisionRecord(
            decision_id=decision_id,
            user_id=command.user_id,
            fingerprint=command.fingerprint,
            items=items,
            features=no_inputs,
            phi=no_inputs,
            policy=BASELINE,
            epoch=0,
            user_version=0,
            cold_start=None,
            created_ms=now_ms(),
            incarnation=incarnation,
            deferred=command.deferred,
        )
        return Recommendation(decision, (None,) * len(items) if command.explain else ())

    async def _score_request(
        self,
        command: RecommendCommand,
        profile: Profile | None,
        serving: Serving,
        candidates: Candidates,
        store: StoreAccess,
    ) -> tuple[ScoreRequest, NewStart | None]:
        """The request to the model, with the state or warm start of a user it does not hold.

        A user with a profile and without rewards gets a warm start, unless they have one.
        """
        user = command.user_id
        if user in serving.model:
            return ScoreRequest(user, candidates.inputs, arm_keys=candidates.keys), None
        # Without the store, or for an unknown user, the prior answers.
        with self._metrics.stage("load"):
            found = await store.run(partial(self._users.load_with_warm_starts, [user]))
            states, starts = found or ({}, {})
            if states:
                # Without a time limit: it also waits for the model's thread.
                put = partial(serving.replica.put, states.values())
                states |= await store.run(put, budget_s=None) or {}
        loaded, start, new = states.get(user), UserStart.of(starts[user]) if user in starts else None, None
        learned = loaded is not None and not loaded.forgotten
        if start is None and profile is not None and not learned and self._live.settings.fusion == "auto":
            new = await serving.fusion.start(profile)
            start = None if new is None else UserStart(new.values)
        return ScoreRequest(user, candidates.inputs, loaded, start, arm_keys=candidates.keys), new

    def _draw(
        self, command: RecommendCommand, decision_id: str, candidates: Candidates, policy: Policy, scores: ArmScores
    ) -> Slate:
        """Choose arms by their scores; runs on the model's thread."""
        if command.min_version is not None and scores.epoch < command.min_version:
            raise VersionNotReached(NOT_REACHED)  # it was served, but the store has lost it since
        finite = np.isfinite(scores.mean + scores.bonus)
        if scores.drawn is not None:
            finite &= np.isfinite(scores.drawn).all(1)
        if not finite.all():
            raise candidates.refusal(int(finite.argmin()), "are too large for the learner: the score is not finite")
        shares = decision_draws(self._live.record.seed, decision_id)
        return draw_slate(policy, scores.mean, scores.bonus, candidates.k, shares, scores.drawn)


def baseline_items(arm_ids: Sequence[str], ranking: Sequence[str], k: int) -> tuple[DecidedItem, ...]:
    """The first k arms of the baseline: ranked ones in the order of the ranking, then the others as in the request."""
    given, ranked = dict.fromkeys(arm_ids), dict.fromkeys(ranking)
    ordered = chain((arm for arm in ranked if arm in given), (arm for arm in arm_ids if arm not in ranked))
    return tuple(
        DecidedItem(arm, rank, score=0.0, mean=0.0, bonus=0.0, propensity=1.0, group_size=1)
        for rank, arm in enumerate(islice(ordered, k), start=1)
    )
