"""What the service does, without HTTP: decide, record, enqueue, and say how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, TypeVar, final
from uuid import uuid4

import numpy as np
import structlog

from models.device import choose_device
from models.exploration import build_policy, decision_draws, draw_slate
from models.features import FeatureError, FeatureLayout, assemble, infer_layout
from models.presets import build_learner
from models.settings import LearnerSettings, stored_settings
from models.threads import use_threads
from service.breaker import StoreBreaker
from service.contracts import (
    CheckResult,
    FeedbackOutcome,
    Recommendation,
    RecommendCommand,
    Rejection,
    RewardCommand,
    UserDescription,
)
from service.errands import Errands
from service.errors import InvalidInput, Unavailable
from service.metrics import Metrics
from service.records import now_ms, recommendation_of, reward_event
from service.replica import Replica
from service.scorer import Scorer
from service.served import ScoreRequest, ServedModel
from service.settings import Settings, SettingsError, learner_settings
from service.snapshots import SnapshotDesk
from store.cluster import is_cluster_url
from store.connection import Confirmation, ServerInfo, check_server, connect, drop_idle
from store.decisions import DecidedItem, Decision, DecisionStore
from store.epochs import EpochStore
from store.errors import NamespaceConflict, StoreReset, StoreUnavailable
from store.events import Enqueued, EventStream, RewardEvent
from store.failpoints import reach
from store.namespaces import NamespaceRecord, Namespaces
from store.users import UserStore

#: Connections to the store beside those that follow the partitions' logs.
REQUEST_CONNECTIONS: Final = 128

log = structlog.get_logger()
Result = TypeVar("Result")


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
        self._redis = connect(redis_url, max_connections=REQUEST_CONNECTIONS + settings.partitions)
        # Connections of their own: those that wait for a replica that hangs must leave some to everyone else.
        self._confirming = connect(redis_url) if settings.durability == "replicated" else self._redis
        # One of its own, so that a probe never waits for those whom the store keeps waiting.
        self._probing = connect(redis_url, max_connections=1)
        # A cluster whose one server is away goes on with the others.
        self._clustered = is_cluster_url(redis_url)
        self._breaker = StoreBreaker(self._probe, trust_calls=not self._clustered)
        self._namespaces = Namespaces(self._redis)
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._opening = asyncio.Lock()
        self._serving: Serving | None = None
        self._desk: SnapshotDesk | None = None

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
            self._confirming,
            keys,
            dedupe_window_s=settings.dedupe_window_s,
            backlog_limit=settings.backlog_limit,
            confirm=self._confirmation(info),
        )
        self._desk = SnapshotDesk(self._redis, settings, self._record)
        if self._record.layout is not None:
            self._serving = await self._open(FeatureLayout.from_json(self._record.layout))
        self._breaker.start()
        log.info("engine ready", store=info.version, namespace=self._record.name, preset=learner.preset)

    async def stop(self) -> None:
        """Let go of the store; what was acknowledged is in it."""
        if self._desk is not None:
            await self._desk.jobs.stop()
        await self._breaker.stop()
        if self._serving is not None:
            await self._serving.replica.stop()
        self._compute.shutdown()
        await self._redis.aclose()
        await self._confirming.aclose()
        await self._probing.aclose()

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
            serving = self._serving or await self._begin(command)
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
            created_ms=now_ms(),
            incarnation=scores.incarnation,
        )
        # Whoever raced us with the same id and was first has decided for both.
        standing = await store.run(lambda: self._decisions.put(decision))
        if standing is None:
            return recommendation_of(decision, command.fingerprint, replayed=False, logged=False)
        return recommendation_of(standing, command.fingerprint, replayed=standing is not decision)

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them."""
        ids = list(dict.fromkeys(command.decision_id for command in commands))
        decisions = await self._breaker.call(lambda: asyncio.gather(*map(self._decisions.get, ids)))
        found = dict(zip(ids, decisions, strict=True))
        events: dict[int, RewardEvent] = {}
        rejected: dict[int, Rejection] = {}
        for index, command in enumerate(commands):
            outcome = reward_event(command, found[command.decision_id], index)
            if isinstance(outcome, Rejection):
                rejected[index] = outcome
            else:
                events[index] = outcome
        reach("server-before-enqueue")
        answers = await self._breaker.call(lambda: self._events.enqueue(list(events.values()))) if events else []
        reach("server-after-enqueue")
        stored = dict(zip(events, answers, strict=True))
        for index, entry in stored.items():
            if entry.status == "void":
                rejected[index] = Rejection(index, "user-reset", "the user began anew since: the reward has no effect")
        applied: bool | None = None
        if wait_applied:
            waits = [self._wait(events[index], entry) for index, entry in stored.items() if index not in rejected]
            applied = bool(waits) and all(await asyncio.gather(*waits))
        accepted = sum(entry.status == "accepted" for entry in answers)
        duplicates = sum(entry.status == "duplicate" for entry in answers)
        return FeedbackOutcome(accepted, duplicates, tuple(rejected[index] for index in sorted(rejected)), applied)

    async def _wait(self, event: RewardEvent, entry: Enqueued) -> bool:
        """Whether a stored event is served within the time limit."""
        if self._serving is None:
            return False
        replica = self._serving.replica
        known = entry.status == "accepted" or replica.saw(entry.partition, entry.entry_id)
        if not known and not await self._breaker.call(lambda: self._events.exists(entry.partition, entry.entry_id)):
            # Finished before this process was told of it, perhaps before it was started.
            states = await self._breaker.call(lambda: self._users.load([event.user_id]))
            await replica.take(states.values())
            began_anew = event.user_id in states and states[event.user_id].incarnation != event.incarnation
            return not began_anew and not await self._breaker.call(
                lambda: self._events.buried(entry.partition, entry.entry_id)
            )
        return await replica.wait_applied(entry.partition, entry.entry_id, self._settings.wait_applied_timeout_s)

    @property
    def snapshots(self) -> SnapshotDesk:
        """The snapshots of the namespace, once started."""
        if self._desk is None:
            raise RuntimeError("the engine has not started")
        return self._desk

    def require_store(self) -> None:
        """StoreUnavailable while the store is away; one that was emptied can be asked, since it can be restored."""
        if isinstance(self._breaker.away, StoreUnavailable):
            raise StoreUnavailable(str(self._breaker.away))

    async def ask_events(self, work: Callable[[EventStream], Awaitable[Result]]) -> Result:
        """Have something done about the rewards on their way, or about those that were given up on."""
        return await self._breaker.call(lambda: work(self._events))

    async def describe_user(self, user_id: str) -> UserDescription | None:
        """What is stored of a user; None for one never seen."""
        summary = await self._breaker.call(lambda: self._users.summary(user_id))
        resident = self._serving is not None and user_id in self._serving.replica
        return None if summary is None else UserDescription(summary, resident)

    async def forget_user(self, user_id: str) -> int:
        """Forget a user, dead letters included; the incarnation that begins."""
        incarnation = await self._breaker.call(lambda: self._users.forget(user_id))
        if self._serving is not None:
            replica = self._serving.replica
            # The log would tell it in a moment; nobody who was answered finds the old state here.
            await self._breaker.call(lambda: replica.refresh(user_id))
        letters = await self.ask_events(lambda events: events.discard_of(user_id))
        log.info("user forgotten", user=user_id, incarnation=incarnation, dead_letters=letters)
        return incarnation

    async def readiness(self) -> dict[str, CheckResult]:
        """Whether requests can be answered and rewards taken, check by check."""
        await self._breaker.check()
        restore = None
        with suppress(StoreUnavailable, StoreReset):  # told of below
            restore = await self._breaker.call(self.snapshots.check)
        # What is in memory answers requests without the store, if it may.
        vital = self._serving is None or self._settings.store_outage == "refuse"
        away = self._breaker.away
        if away is None:
            checks = {"store": CheckResult(True, "answers")}
        else:
            checks = {"store": CheckResult(False, str(away), vital=vital or isinstance(away, StoreReset))}
        if restore is not None:
            checks["restore"] = restore
        if self._serving is not None:
            healthy = self._serving.replica.healthy
            detail = "follows the updates" if healthy else "is behind the updates"
            checks["replica"] = CheckResult(healthy, detail, vital=vital)
        return checks

    async def refresh_gauges(self) -> None:
        """Bring the gauges that live in the store up to date."""
        self._metrics.backlog.set(await self._breaker.call(self._events.backlog))
        for name, value in (await self._breaker.call(self._users.counters)).items():
            self._metrics.events.labels(name).set(value)

    def _confirmation(self, info: ServerInfo) -> Confirmation | None:
        """What an enqueued reward waits for before it is acknowledged."""
        settings = self._settings
        if settings.durability != "replicated":
            return None
        if info.replicas < settings.replicas:
            log.warning("too few replicas", wanted=settings.replicas, connected=info.replicas, effect="503 to feedback")
        return Confirmation(settings.replicas, settings.replica_wait_ms, on_disk=info.aof)

    async def _probe(self) -> None:
        """Whether the store is still ours; after an outage, whether it takes decisions too.

        Of a cluster only the server is asked that has the namespace's record: decisions lie on all of them.
        """
        record = await Namespaces(self._probing).load(self._record.name)
        if record is None or record.store_epoch != self._record.store_epoch:
            raise StoreReset("lost this namespace or is another store: restart the service to begin anew")
        if self._breaker.away is not None:
            if not self._clustered:
                await DecisionStore(self._probing, record.keys, ttl_s=1).rehearse()
            # Connections made before the outage may lead nowhere; each would cost somebody the whole budget.
            await drop_idle(self._redis)
            await drop_idle(self._confirming)

    async def _begin(self, command: RecommendCommand) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._first_layout(command))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error

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
