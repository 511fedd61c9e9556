"""What the service does, without HTTP: decide, record, enqueue, and say how it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Self, TypeVar, final

import structlog

from models.settings import LearnerSettings, stored_settings
from models.threads import use_threads
from service.breaker import StoreBreaker
from service.contracts import (
    CheckResult,
    FeedbackOutcome,
    Recommendation,
    RecommendCommand,
    RewardCommand,
    UserDescription,
)
from service.deciding import Decider
from service.metrics import Metrics, NamespaceMetrics
from service.records import now_ms
from service.rewarding import RewardDesk
from service.serving import Serving, ServingRoom
from service.settings import Settings, SettingsError, learner_settings
from service.snapshots import SnapshotDesk
from store.cluster import is_cluster_url
from store.connection import Confirmation, ServerInfo, check_server, connect, drop_idle
from store.decisions import DecisionStore
from store.epochs import EpochStore
from store.errors import NamespaceConflict, StoreReset, StoreUnavailable
from store.events import EventStream
from store.namespaces import NamespaceRecord, Namespaces
from store.stream_state import stream_state
from store.users import UserStore

#: Connections to the store beside those that follow the partitions' logs.
REQUEST_CONNECTIONS: Final = 128

log = structlog.get_logger()
Result = TypeVar("Result")


@final
class Engine:
    """One namespace, served."""

    def __init__(self, settings: Settings, redis_url: str, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics.of(settings.namespace)
        self._redis = connect(redis_url, max_connections=REQUEST_CONNECTIONS + settings.partitions)
        # Connections of their own: those that wait for a replica that hangs must leave some to everyone else.
        self._confirming = connect(redis_url) if settings.durability == "replicated" else self._redis
        # One of its own, so that a probe never waits for those whom the store keeps waiting.
        self._probing = connect(redis_url, max_connections=1)
        # A cluster whose one server is away goes on with the others.
        self._clustered = is_cluster_url(redis_url)
        self._breaker = StoreBreaker(self._probe, trust_calls=not self._clustered)
        self._metrics.store_up.set_function(lambda: self._breaker.away is None)
        self._namespaces = Namespaces(self._redis)
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._room: ServingRoom | None = None
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
        self._room = ServingRoom(
            settings, self._namespaces, self._record, self._users, self._epochs, self._compute, self._metrics
        )
        self._decider = Decider(
            settings, self._record.seed, self._breaker, self._users, self._decisions, self._room, self._metrics
        )
        self._rewards = RewardDesk(
            settings, self._breaker, self._users, self._decisions, self._events, self._room, self._metrics
        )
        await self._room.start()
        self._breaker.start()
        log.info("engine ready", store=info.version, namespace=self._record.name, preset=learner.preset)

    async def stop(self) -> None:
        """Let go of the store; what was acknowledged is in it."""
        if self._desk is not None:
            await self._desk.jobs.stop()
        await self._breaker.stop()
        if self._room is not None:
            await self._room.stop()
        self._compute.shutdown()
        await self._redis.aclose()
        await self._confirming.aclose()
        await self._probing.aclose()

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        return await self._decider.recommend(command)

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them."""
        return await self._rewards.feedback(commands, wait_applied=wait_applied)

    @property
    def namespace(self) -> str:
        """The namespace that is served."""
        return self._metrics.namespace

    @property
    def metrics(self) -> NamespaceMetrics:
        """What is counted of it."""
        return self._metrics

    @property
    def _serving(self) -> Serving | None:
        """What serves, once the feature layout is known."""
        return None if self._room is None else self._room.serving

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
        state = await self._breaker.call(lambda: stream_state(self._redis, self._record.keys))
        self._metrics.backlog.set(state.waiting)
        self._metrics.backlog_fill.set(state.fullest / self._settings.backlog_limit)
        age_ms = 0 if state.oldest_ms is None else max(0, now_ms() - state.oldest_ms)
        self._metrics.oldest_event_age.set(age_ms / 1_000)
        self._metrics.dead_letters.set(state.dead_letters)
        self._metrics.set_events(await self._breaker.call(self._users.counters))

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
