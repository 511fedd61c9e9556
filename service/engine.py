"""What the service does, without HTTP: decide, record, enqueue, and say how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, Self, TypeVar, final

import structlog

from models.calibration import Reliability
from models.threads import use_threads
from service.arms import ArmDesk
from service.breaker import StoreBreaker
from service.candidates import CandidateDesk
from service.catalogue import Catalogue
from service.choosing import Chooser
from service.contracts import (
    Activation,
    CheckResult,
    FeedbackOutcome,
    GroupQuery,
    GroupView,
    Recommendation,
    RecommendCommand,
    RewardCommand,
    UserDescription,
    UserForgotten,
)
from service.deciding import Decider
from service.fusing import FusionDesk
from service.grouping import GroupDesk
from service.learner_checks import check_size
from service.live import LiveSettings, overridden
from service.metrics import Metrics, NamespaceMetrics
from service.profiling import ProfileDesk
from service.reconciling import reconcile
from service.rewarding import RewardDesk, confirmation
from service.serving import Serving, ServingRoom
from service.settings import Settings, SettingsError, learner_settings, reward_rules
from service.snapshots import SnapshotDesk
from service.tensors import TensorThread
from service.transferring import TransferDesk
from service.user_desk import UserDesk
from store.audit import AuditLine, AuditLog
from store.awaiting import AwaitingStore
from store.catalogue import CatalogueStore
from store.cluster import is_cluster_url
from store.connection import check_server, connect, drop_idle
from store.decisions import DecisionStore
from store.embedded import server_folder
from store.epochs import EpochStore
from store.errors import NamespaceConflict, StoreReset, StoreUnavailable
from store.events import EventStream
from store.fusion import FusionStore
from store.namespaces import MAX_RACES, NamespaceRecord, Namespaces
from store.transfer import TransferStore
from store.users import COUNTERS, UserStore

#: Connections to the store beside those that follow the partitions' logs.
REQUEST_CONNECTIONS: Final = 128

log = structlog.get_logger()
Result = TypeVar("Result")


@final
class Engine:
    """One namespace, served."""

    def __init__(self, settings: Settings, redis_url: str, metrics: Metrics) -> None:
        self._deployment = settings
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
        self._compute = TensorThread()
        self._room: ServingRoom | None = None
        self._adopting: asyncio.Task[None] | None = None
        #: Whether the namespace was deleted on purpose, and perhaps made anew.
        self.succeeded = False
        self._desk: SnapshotDesk | None = None

    @classmethod
    def from_settings(cls, settings: Settings, redis_url: str, metrics: Metrics) -> Self:
        """An engine that has not connected yet."""
        use_threads(settings.torch_threads)
        return cls(settings, redis_url, metrics)

    async def start(self, made: NamespaceRecord | None = None) -> None:
        """Open the namespace and load what it has learned; without its record it is created where there is none."""
        info = await check_server(self._redis)
        stored = await self._namespaces.load(self.namespace) if made is None else made
        settings = self._settings_of({} if stored is None else stored.overrides)
        learner = learner_settings(settings)
        check_size(learner, None if stored is None else stored.layout)
        if made is None:
            record = await self._namespaces.open_or_create(
                self.namespace, partitions=settings.partitions, seed=settings.seed, learner=learner.to_json()
            )
        else:
            record = await self._namespaces.open(made)
        rules = reward_rules(settings)
        reconciled = await reconcile(self._namespaces, record, learner)
        self._live = LiveSettings(self._deployment, await self._namespaces.set_reward_rules(reconciled, rules))
        keys, store_epoch = self._live.record.keys, self._live.record.store_epoch
        self._users = UserStore(self._redis, keys, store_epoch, samples_kept=settings.samples_kept)
        self._epochs = EpochStore(self._redis, keys, store_epoch)
        self._decisions = DecisionStore(
            self._redis,
            keys,
            ttl_s=settings.reward_window_s + settings.late_window_s,
            store_epoch=store_epoch,
        )
        self._events = EventStream(
            self._confirming,
            keys,
            dedupe_window_s=settings.dedupe_window_s,
            backlog_limit=settings.backlog_limit,
            confirm=confirmation(self._deployment, info),
        )
        self._audit = AuditLog(self._redis, keys, store_epoch)
        fusion = FusionStore(self._redis, keys, store_epoch)
        transfer = TransferStore(self._redis, keys, store_epoch)
        self._room = ServingRoom(
            self._live, self._namespaces, self._users, self._epochs, fusion, self._compute, self._metrics
        )
        self._desk = SnapshotDesk(self._redis, settings, self._live.record)
        catalogue_store = CatalogueStore(self._redis, keys, store_epoch, arms_max=settings.max_catalogue)
        self._catalogue = Catalogue(catalogue_store)
        self._arms = ArmDesk(settings, self._breaker, catalogue_store, self._room, self._desk.jobs)
        candidates = CandidateDesk(self._breaker, self._room, self._catalogue)
        chooser = Chooser(self._live, self._users, self._room, candidates, self._metrics)
        profiles = ProfileDesk(self._live, self._namespaces, self._room)
        self._decider = Decider(self._live, self._breaker, self._decisions, chooser, profiles, self._metrics)
        self._rewards = RewardDesk(
            self._live,
            self._breaker,
            self._users,
            self._decisions,
            self._events,
            AwaitingStore(self._redis, keys),
            self._room,
            self._metrics,
        )
        self._user_desk = UserDesk(
            self._live,
            self._redis,
            keys,
            self._breaker,
            self._users,
            self._decisions,
            self._epochs,
            fusion,
            transfer,
            self._room,
            private_folder=server_folder(settings.data_dir) if settings.redis_url is None else None,
        )
        self._fusion = FusionDesk(self._live, self._breaker, fusion, self._room)
        self._transfer = TransferDesk(self._breaker, self._users, transfer, self._room)
        self._groups = GroupDesk(self._breaker, self._users, self._room)
        await self._room.start()
        await self._catalogue.start()
        self._breaker.start()
        log.info("engine ready", store=info.version, namespace=self.namespace, preset=learner.preset)

    async def stop(self) -> None:
        """Let go of the store; what was acknowledged is in it. Requests that still come fail in a foreseen way."""
        if self._desk is not None:
            await self._desk.jobs.stop()
            await self._user_desk.stop()
        await self._breaker.stop()
        self._breaker.retire("the namespace was closed")
        if self._adopting is not None:
            self._adopting.cancel()
            await asyncio.gather(self._adopting, return_exceptions=True)
        if self._room is not None:
            await self._room.stop()
        # Not here: what it has to finish would hold up everybody.
        await asyncio.to_thread(self._compute.shutdown)
        await self._redis.aclose()
        await self._confirming.aclose()
        await self._probing.aclose()

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        """Choose arms for a user and record the decision before answering; the answer says when it could not be."""
        return await self._decider.recommend(command)

    async def activate(self, decision_id: str) -> Activation:
        """Have a deferred decision count from now on; one that counts already goes on as it is."""
        return await self._decider.activate(decision_id)

    async def inspect_group(self, query: GroupQuery) -> GroupView:
        """Who agrees with a user on an arm."""
        return await self._groups.inspect(query)

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them."""
        return await self._rewards.feedback(commands, wait_applied=wait_applied)

    @property
    def metrics(self) -> NamespaceMetrics:
        """What is counted of it."""
        return self._metrics

    @property
    def _serving(self) -> Serving | None:
        """What serves, once the feature layout is known."""
        return None if self._room is None else self._room.serving

    @property
    def namespace(self) -> str:
        """The name of the namespace."""
        return self._deployment.namespace

    @property
    def lost(self) -> bool:
        """Whether the store has another namespace of this name by now, or none."""
        return isinstance(self._breaker.away, StoreReset)

    @property
    def live(self) -> LiveSettings:
        """The settings as they are now."""
        return self._live

    async def change_settings(self, patch: Mapping[str, Any], *, revision: int | None = None) -> LiveSettings:
        """Override some settings of the namespace, for every process; None gives one back to the deployment.

        SettingsError when they cannot be used, NamespaceConflict when the record is not of the revision any more.
        """
        for _ in range(MAX_RACES):
            current = await self._breaker.call(lambda: self._namespaces.reload(self._live.record))
            if revision not in (None, current.revision):
                break
            self._take(current)
            if not patch or await self._change(patch):
                return self._live
        raise NamespaceConflict("the settings were changed meanwhile: look at them again")

    async def _change(self, patch: Mapping[str, Any]) -> bool:
        """Override some settings in the record as it is known here; False when it is another one by now."""
        known = self._live.record
        overrides, settings = self._live.proposed(patch)
        learner, rewards = learner_settings(settings).to_json(), reward_rules(settings).to_json()
        changed = await self._breaker.call(
            lambda: self._namespaces.change(known, overrides=overrides, learner=learner, rewards=rewards)
        )
        if changed is not None:
            self._take(changed)
            if changed.learner != known.learner:
                await self._follow()
        return changed is not None

    async def audit(self, line: AuditLine) -> None:
        """Write down what an admin did."""
        await self._breaker.call(lambda: self._audit.add(line))

    async def audited(self, count: int, *, before: str | None) -> list[AuditLine]:
        """What admins did, the newest first."""
        return await self._breaker.call(lambda: self._audit.newest(count, before=before))

    @property
    def snapshots(self) -> SnapshotDesk:
        """The snapshots of the namespace, once started."""
        if self._desk is None:
            raise RuntimeError("the engine has not started")
        return self._desk

    @property
    def arms(self) -> ArmDesk:
        """The arms of the catalogue, once started."""
        return self._arms

    @property
    def calibration(self) -> tuple[int, Reliability | None]:
        """The served epoch, and how reliable predictions were by it."""
        serving = self._serving
        return (0, None) if serving is None else (serving.model.epoch_number, serving.replica.reliability)

    @property
    def fusion(self) -> FusionDesk:
        """What new users begin from, once started."""
        return self._fusion

    @property
    def transfer(self) -> TransferDesk:
        """Who helps whom, once started."""
        return self._transfer

    def require_store(self) -> None:
        """StoreUnavailable while the store is away; one that was emptied can be asked, since it can be restored."""
        if isinstance(self._breaker.away, StoreUnavailable):
            raise StoreUnavailable(str(self._breaker.away))

    async def ask_events(self, work: Callable[[EventStream], Awaitable[Result]]) -> Result:
        """Have something done about the rewards on their way, or about those that were given up on."""
        return await self._breaker.call(lambda: work(self._events))

    async def describe_user(self, user_id: str, *, events: int = 0) -> UserDescription | None:
        """What is stored of a user, with so many of the latest rewards; None when there is nothing."""
        return await self._user_desk.describe(user_id, events=events)

    async def forget_user(self, user_id: str) -> UserForgotten:
        """Forget a user: what was removed, and what workers and the store's history still have to do."""
        return await self._user_desk.forget(user_id)

    async def readiness(self) -> dict[str, CheckResult]:
        """Whether requests can be answered and rewards taken, check by check."""
        await self._breaker.check()
        restore = None
        with suppress(StoreUnavailable, StoreReset):  # told of below
            restore = await self._breaker.call(self.snapshots.check)
        # What is in memory answers requests without the store, if it may.
        vital = self._serving is None or self._live.settings.store_outage == "refuse"
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
        partitions = await self.ask_events(lambda events: events.status(COUNTERS))
        self._metrics.backlog.set(sum(each.waiting for each in partitions))
        self._metrics.backlog_fill.set(max(each.waiting for each in partitions) / self._deployment.backlog_limit)
        self._metrics.oldest_event_age.set(max(each.oldest_age_ms or 0 for each in partitions) / 1_000)
        self._metrics.dead_letters.set(sum(each.dead_letters for each in partitions))
        self._metrics.set_events({name: sum(each.counters[name] for each in partitions) for name in COUNTERS})

    def _settings_of(self, overrides: Mapping[str, Any]) -> Settings:
        try:
            return overridden(self._deployment, self.namespace, overrides)
        except SettingsError as error:
            if not overrides:
                raise
            raise SettingsError(
                f"namespace {self.namespace} overrides {', '.join(sorted(overrides))}, which does not go with the "
                f"environment: {error}\nSet what the environment was, and take the overrides back with null in "
                "PATCH /admin/config first"
            ) from None

    def _take(self, record: NamespaceRecord) -> None:
        """Go by a record that somebody changed."""
        try:
            if self._room is not None:
                self._room.take(record)
        except SettingsError as error:
            # Made by a version that knows other settings; what holds here goes on to hold.
            log.error("settings not adopted", namespace=self.namespace, reason=str(error))

    async def _follow(self) -> None:
        """Have the learner go by the settings as they are now; what fails is tried again after the next probe."""
        try:
            if self._room is not None:
                await self._room.follow()
        except Exception as error:
            log.error("learner does not follow its settings", namespace=self.namespace, exc_info=error)

    async def _probe(self) -> None:
        """Whether the store is still ours; after an outage, whether it takes decisions too.

        Of a cluster only the server is asked that has the namespace's record: decisions lie on all of them.
        """
        record = await Namespaces(self._probing).load(self.namespace)
        known = self._live.record
        if record is None or record.store_epoch != known.store_epoch:
            # One that was made in its place goes on counting; one of another store begins at 0.
            self.succeeded = record is not None and record.revision > known.revision
            raise StoreReset("lost this namespace or is another store: restart the service to begin anew")
        if record.state == "deleted":
            self.succeeded = True
            raise StoreReset("the namespace was deleted")
        self._take(record)
        if self._room is not None and self._room.behind and (self._adopting is None or self._adopting.done()):
            # Not waited for: a layout that is just being fixed is loaded first, and that may take longer than a probe.
            self._adopting = asyncio.create_task(self._follow(), context=Context())
        if self._breaker.away is not None:
            if not self._clustered:
                await DecisionStore(self._probing, record.keys, ttl_s=1).rehearse()
            # Connections made before the outage may lead nowhere; each would cost somebody the whole budget.
            await drop_idle(self._redis)
            await drop_idle(self._confirming)
