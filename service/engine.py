"""What the service does, without HTTP: decide, record, enqueue, and say how it is."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, final
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import structlog

from models.device import choose_device
from models.exploration import build_policy, decision_draws, draw_slate
from models.features import FeatureError, FeatureLayout, assemble, infer_layout
from models.presets import build_learner
from models.settings import LearnerSettings, stored_settings
from models.threads import use_threads
from service.contracts import (
    CheckResult,
    FeedbackOutcome,
    Recommendation,
    RecommendCommand,
    Rejection,
    RewardCommand,
)
from service.errors import DecisionConflict, InvalidInput
from service.metrics import Metrics
from service.replica import Replica
from service.scorer import Scorer
from service.served import ScoreRequest, ServedModel
from service.settings import Settings, SettingsError, learner_settings
from store.connection import check_server, connect
from store.decisions import DecidedItem, Decision, DecisionStore
from store.epochs import EpochStore
from store.errors import NamespaceConflict, StoreError
from store.events import Enqueued, EventStream, RewardEvent
from store.failpoints import reach
from store.namespaces import NamespaceRecord, Namespaces
from store.users import UserStore

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the feature layout is known."""

    layout: FeatureLayout
    replica: Replica
    scorer: Scorer


@final
class Engine:
    """One namespace, served."""

    def __init__(self, settings: Settings, redis_url: str, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._policy = build_policy(settings.policy, epsilon=settings.epsilon, squarecb_gamma=settings.squarecb_gamma)
        self._redis = connect(redis_url)
        self._namespaces = Namespaces(self._redis)
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._opening = asyncio.Lock()
        self._serving: Serving | None = None

    @classmethod
    def from_settings(cls, settings: Settings, redis_url: str, metrics: Metrics) -> Self:
        """An engine that has not connected yet."""
        use_threads(settings.torch_threads)
        return cls(settings, redis_url, metrics)

    async def start(self) -> None:
        """Open the namespace and load what it has learned."""
        info = await check_server(self._redis)
        settings = self._settings
        learner = learner_settings(settings)
        record = await self._namespaces.open_or_create(
            settings.namespace, partitions=settings.partitions, seed=settings.seed, learner=learner.to_json()
        )
        self._record = await self._reconcile(record, learner)
        keys, store_epoch = self._record.keys, self._record.store_epoch
        self._users = UserStore(self._redis, keys, store_epoch, samples_kept=settings.samples_kept)
        self._epochs = EpochStore(self._redis, keys, store_epoch)
        self._decisions = DecisionStore(self._redis, keys, ttl_s=settings.reward_window_s)
        self._events = EventStream(
            self._redis, keys, dedupe_window_s=settings.dedupe_window_s, backlog_limit=settings.backlog_limit
        )
        if self._record.layout is not None:
            self._serving = await self._open(FeatureLayout.from_json(self._record.layout))
        log.info("engine ready", store=info.version, namespace=self._record.name, preset=learner.preset)

    async def stop(self) -> None:
        """Let go of the store; what was acknowledged is in it."""
        if self._serving is not None:
            await self._serving.replica.stop()
        self._compute.shutdown()
        await self._redis.aclose()

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering."""
        if command.decision_id is not None:
            earlier = await self._decisions.get(command.decision_id)
            if earlier is not None:
                return _recommendation(earlier, command.fingerprint, replayed=True)
        decision_id = command.decision_id or uuid4().hex
        features = [arm.features for arm in command.arms]
        try:
            serving = self._serving or await self._first_layout(command)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        loaded = await serving.replica.ensure(command.user_id)
        scores = await serving.scorer.score(ScoreRequest(command.user_id, inputs, loaded))
        sound = np.isfinite(scores.mean + scores.bonus)
        if not sound.all():
            raise InvalidInput(
                ("arms", int(sound.argmin()), "features"), "are too large for the learner to tell a score"
            )
        draws = decision_draws(self._record.seed, decision_id)
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
            created_ms=_now_ms(),
        )
        # Whoever raced us with the same id and was first has decided for both.
        standing = await self._decisions.put(decision)
        return _recommendation(standing, command.fingerprint, replayed=standing is not decision)

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them."""
        ids = list(dict.fromkeys(command.decision_id for command in commands))
        found = dict(zip(ids, await asyncio.gather(*map(self._decisions.get, ids)), strict=True))
        events: list[RewardEvent] = []
        rejected: list[Rejection] = []
        for index, command in enumerate(commands):
            outcome = _event(command, found[command.decision_id], index)
            if isinstance(outcome, Rejection):
                rejected.append(outcome)
            else:
                events.append(outcome)
        reach("server-before-enqueue")
        stored = await self._events.enqueue(events) if events else []
        reach("server-after-enqueue")
        applied: bool | None = None
        if wait_applied:
            waits = [self._wait(event, entry) for event, entry in zip(events, stored, strict=True)]
            applied = bool(waits) and all(await asyncio.gather(*waits))
        accepted = sum(entry.status == "accepted" for entry in stored)
        return FeedbackOutcome(accepted, len(stored) - accepted, tuple(rejected), applied)

    async def _wait(self, event: RewardEvent, entry: Enqueued) -> bool:
        """Whether a stored event is served within the time limit."""
        if self._serving is None:
            return False
        replica = self._serving.replica
        known = entry.status == "accepted" or replica.saw(entry.partition, entry.entry_id)
        if not known and not await self._events.exists(entry.partition, entry.entry_id):
            # Finished before this process was told of it, perhaps before it was started.
            await replica.refresh(event.user_id)
            return not await self._events.buried(entry.partition, entry.entry_id)
        return await replica.wait_applied(entry.partition, entry.entry_id, self._settings.wait_applied_timeout_s)

    async def readiness(self) -> dict[str, CheckResult]:
        """Whether requests can be answered and rewards taken, check by check."""
        checks = {"store": await self._check_store()}
        if self._serving is not None:
            healthy = self._serving.replica.healthy
            checks["replica"] = CheckResult(healthy, "follows the updates" if healthy else "is behind the updates")
        return checks

    async def refresh_gauges(self) -> None:
        """Bring the gauges that live in the store up to date."""
        self._metrics.backlog.set(await self._events.backlog())
        for name, value in (await self._users.counters()).items():
            self._metrics.events.labels(name).set(value)

    async def _check_store(self) -> CheckResult:
        try:
            record = await self._namespaces.load(self._record.name)
        except StoreError as error:
            return CheckResult(False, f"does not answer: {error}")
        if record is None or record.store_epoch != self._record.store_epoch:
            return CheckResult(False, "lost this namespace or is another store: restart the service to begin anew")
        return CheckResult(True, "answers")

    async def _first_layout(self, command: RecommendCommand) -> Serving:
        """Fix the feature layout by the first request; of several first requests one wins."""
        async with self._opening:
            if self._serving is None:
                settings = self._settings
                layout = infer_layout(
                    [arm.features for arm in command.arms],
                    command.context,
                    products=settings.context_products,
                    intercept=settings.intercept,
                    hash_dimension=settings.hash_dimension,
                    max_dimension=settings.max_dimension,
                )
                # Nothing is fixed by a request that does not fit even its own layout.
                assemble(layout, [arm.features for arm in command.arms], command.context)
                current = await self._namespaces.load(self._record.name) or self._record
                if current.layout is None:
                    current = await self._namespaces.set_layout(current, layout.to_json())
                self._record = current
                self._serving = await self._open(FeatureLayout.from_json(current.layout or layout.to_json()))
                log.info("feature layout fixed", **(current.layout or {}))
            return self._serving

    async def _open(self, layout: FeatureLayout) -> Serving:
        settings = self._settings
        learner = build_learner(stored_settings(self._record.learner), layout.dimension)
        model = ServedModel(
            learner,
            choose_device(settings.device),
            pool_max=settings.candidate_pool,
            guests_max=settings.active_users_max,
        )
        replica = Replica(
            self._users, self._epochs, model, self._compute, self._metrics, partitions=self._record.partitions
        )
        await replica.start()
        return Serving(layout, replica, Scorer(model, self._compute))

    async def _reconcile(self, record: NamespaceRecord, wanted: LearnerSettings) -> NamespaceRecord:
        """Take over changed learner settings, unless stored learners would no longer mean the same."""
        stored = stored_settings(record.learner)
        if stored == wanted:
            return record
        if stored.structure() != wanted.structure() and record.layout is not None:
            changed = {
                name: (value, wanted.structure()[name])
                for name, value in stored.structure().items()
                if value != wanted.structure()[name]
            }
            told = ", ".join(f"{name} from {old!r} to {new!r}" for name, (old, new) in changed.items())
            raise SettingsError(
                f"namespace {record.name} has learners that a change of {told} would void: "
                "set the old values, or use another METABAN_NAMESPACE"
            )
        try:
            return await self._namespaces.replace_learner(record, wanted.to_json())
        except NamespaceConflict:
            # Another service that starts at the same time was first.
            current = await self._namespaces.load(record.name)
            if current is None or current.revision == record.revision:
                raise
            return await self._reconcile(current, wanted)


def _event(command: RewardCommand, decision: Decision | None, index: int) -> RewardEvent | Rejection:
    if decision is None:
        return Rejection(index, "unknown-decision", "no such decision, or its reward window is over")
    arms = {item.arm_id: place for place, item in enumerate(decision.items)}
    arm_id = command.arm_id
    if arm_id is None:
        if len(arms) > 1:
            return Rejection(index, "arm-required", f"the decision chose {len(arms)} arms: name one in arm_id")
        arm_id = decision.items[0].arm_id
    if arm_id not in arms:
        return Rejection(index, "unknown-arm", "the decision did not choose this arm")
    item = decision.items[arms[arm_id]]
    return RewardEvent(
        # A colon may stand in both ids; quoted, it ends the first.
        event_id=command.event_id or f"{quote(decision.decision_id)}:{arm_id}",
        decision_id=decision.decision_id,
        user_id=decision.user_id,
        arm_id=arm_id,
        features=decision.features[arms[arm_id]],
        reward=command.reward,
        propensity=item.propensity,
        epoch=decision.epoch,
        decided_ms=decision.created_ms,
        received_ms=_now_ms(),
        phi=decision.phi[arms[arm_id]],
    )


def _recommendation(decision: Decision, fingerprint: str, *, replayed: bool) -> Recommendation:
    if decision.fingerprint != fingerprint:
        raise DecisionConflict("this decision_id belongs to a request with another body")
    return Recommendation(
        decision_id=decision.decision_id,
        items=decision.items,
        policy=decision.policy,
        model_version=decision.epoch,
        cold_start=decision.cold_start,
        replayed=replayed,
    )


def _now_ms() -> int:
    return int(time.time() * 1_000)
