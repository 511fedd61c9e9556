"""Which arms: by what was learned, or by the baseline while the kill switch is on; and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from models.drawing import draws_seed
from models.exploration import Policy, Slate, decision_draws, draw_slate
from service.baseline import baseline_items, nothing_seen
from service.candidates import CandidateDesk, Candidates
from service.contracts import Explanation, RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable, VersionNotReached
from service.explaining import Question
from service.live import LiveSettings
from service.metrics import NamespaceMetrics
from service.records import now_ms
from service.scoring import ArmScores, ScoreRequest, WarmStart
from service.serving import Serving, ServingRoom
from service.warm_starts import NewStart
from store.decisions import BASELINE, DecidedItem, Decision
from store.starts import Start
from store.users import UserStore

#: Why each item was chosen; None where that cannot be told any more, and empty when nobody asked.
Explanations: TypeAlias = tuple[Explanation | None, ...]
#: What is known of a user who asks, as numbers.
Profile: TypeAlias = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A decision, why it was made, and the start that it was made for the user, to be stored with it."""

    decision: Decision
    explanations: Explanations = ()
    start: Start | None = None


@final
class Chooser:
    """Chooses arms for the users of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        users: UserStore,
        room: ServingRoom,
        candidates: CandidateDesk,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._metrics = metrics
        self._users = users
        self._room = room
        self._candidates = candidates

    async def choose(
        self, command: RecommendCommand, profile: Profile | None, decision_id: str, incarnation: int, store: Errands
    ) -> Choice:
        """Choose arms; `incarnation` is the user's where no learner tells it."""
        if self._switched_off:
            decision = await self._by_baseline(command, decision_id, incarnation, store)
            return Choice(decision, (None,) * len(decision.items) if command.explain else ())
        return await self._by_learner(command, profile, decision_id, store)

    @property
    def _switched_off(self) -> bool:
        """Whether the learner is not to be asked, whatever for."""
        return self._live.settings.serving == "baseline"

    async def refresh(self, user_id: str, store: Errands) -> None:
        """Have the newest state of a user served."""
        if self._room.serving is not None and not self._switched_off:
            await store.run(partial(self._room.serving.replica.refresh, user_id))

    async def explain(self, command: RecommendCommand, decision: Decision, store: Errands) -> Explanations | None:
        """Why a decision was made; None when the model that made it is not served, here or any more."""
        if self._switched_off or decision.policy == BASELINE:
            return None
        try:
            serving, candidates = await self._candidates.gather(command, store)
        except (InvalidInput, Unavailable):
            return None
        places = candidates.rows_by_id()
        if not all(item.arm_id in places for item in decision.items):
            return None
        rows = [places[item.arm_id] for item in decision.items]
        if not np.array_equal(candidates.inputs[rows], decision.features):
            return None
        slate = Slate(tuple(rows), tuple(item.propensity for item in decision.items))

        def still(scores: ArmScores) -> bool:
            served = (scores.epoch, scores.incarnation, scores.user_events, scores.cold_start)
            return served == (decision.epoch, decision.incarnation, decision.user_version, decision.cold_start)

        # By the start that was stored, if any: one made now might be another.
        asked, _ = await self._asked(command, None, serving, candidates, store)
        return await serving.explainer.explain(Question(asked, candidates.features_of, command.context), slate, still)

    async def _by_baseline(
        self, command: RecommendCommand, decision_id: str, incarnation: int, store: Errands
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

    async def _by_learner(
        self, command: RecommendCommand, profile: Profile | None, decision_id: str, store: Errands
    ) -> Choice:
        """Choose by what is known of the user now."""
        serving, candidates = await self._candidates.gather(command, store)
        if command.min_version is not None:
            await self._reach(serving, command.min_version)
        policy = self._live.policy
        asked, new = await self._asked(command, profile, serving, candidates, store)
        if policy.draws:
            asked = replace(asked, draws=policy.draws, seed=draws_seed(self._live.record.seed, decision_id))
        draw = partial(self._draw, command, decision_id, candidates, policy)
        explanations: Explanations = ()
        if command.explain:
            question = Question(asked, candidates.features_of, command.context)
            chosen, explanations = await serving.explainer.choose(question, draw)
        else:
            with self._metrics.stage("score"):
                chosen = await serving.scorer.choose(asked, draw)
        scores, slate = chosen.scores, chosen.slate
        decision = Decision(
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
                    group_size=size,
                )
                for place, (arm, propensity, size) in enumerate(
                    zip(slate.chosen, slate.propensities, chosen.group_sizes, strict=True)
                )
            ),
            features=candidates.inputs[list(slate.chosen)],
            phi=scores.phi[list(slate.chosen)],
            policy=policy.name,
            epoch=scores.epoch,
            user_version=scores.user_events,
            cold_start=scores.cold_start,
            created_ms=now_ms(),
            incarnation=scores.incarnation,
            deferred=command.deferred,
        )
        start = None if new is None or not scores.started else new.of(decision.incarnation, decision.created_ms)
        return Choice(decision, explanations, start)

    async def _asked(
        self,
        command: RecommendCommand,
        profile: Profile | None,
        serving: Serving,
        candidates: Candidates,
        store: Errands,
    ) -> tuple[ScoreRequest, NewStart | None]:
        """What the model is asked, with the state or start of a user whom it does not hold.

        With a profile one of whom nothing is learned gets a start, if they have none.
        """
        user = command.user_id
        if user in serving.replica:
            return ScoreRequest(user, candidates.inputs), None
        # Not found, or not to be asked for now: the meta-learner answers.
        with self._metrics.stage("load"):
            found = await store.run(lambda: self._users.load_with_starts([user]))
            states, starts = found or ({}, {})
            await serving.replica.take(states.values())
        loaded, start, new = states.get(user), WarmStart.of(starts.get(user)), None
        learned = loaded is not None and not loaded.forgotten
        if start is None and profile is not None and not learned and self._live.settings.fusion == "auto":
            new = await serving.fusion.start(profile)
            start = None if new is None else WarmStart(new.values)
        return ScoreRequest(user, candidates.inputs, loaded, start), new

    def _draw(
        self, command: RecommendCommand, decision_id: str, candidates: Candidates, policy: Policy, scores: ArmScores
    ) -> Slate:
        if command.min_version is not None and scores.epoch < command.min_version:
            raise _not_reached()  # it was, and the store has lost it since
        sound = np.isfinite(scores.mean + scores.bonus)
        if scores.drawn is not None:
            sound &= np.isfinite(scores.drawn).all(1)
        if not sound.all():
            raise candidates.refusal(int(sound.argmin()), "are too large for the learner to tell a score")
        shares = decision_draws(self._live.record.seed, decision_id)
        return draw_slate(policy, scores.mean, scores.bonus, candidates.k, shares, scores.drawn)

    async def _reach(self, serving: Serving, version: int) -> None:
        """Wait until an epoch is served that is at least this one."""
        if not await serving.replica.wait_epoch(version, self._live.settings.wait_applied_timeout_s):
            raise _not_reached()


def _not_reached() -> VersionNotReached:
    return VersionNotReached("An epoch of this version is not served here yet; try again later.")
