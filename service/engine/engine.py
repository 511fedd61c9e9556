"""The engine of one namespace: builds its parts, starts and stops them, and checks their state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, Self, TypeVar, final

import structlog

from metaban.models.default.calibration import ReliabilityTable
from metaban.models.numerics.hardware import use_threads
from metaban.service.engine.admin.arms import ArmAdmin
from metaban.service.engine.admin.groups import GroupAdmin
from metaban.service.engine.admin.snapshots import SnapshotAdmin
from metaban.service.engine.admin.transfer import TransferAdmin
from metaban.service.engine.admin.users import UserAdmin
from metaban.service.engine.admin.warm_starts import FusionAdmin
from metaban.service.engine.commands import CheckResult
from metaban.service.engine.feedback import Feedback, confirmation
from metaban.service.engine.model.lifecycle import ModelHost, Serving, TensorThread
from metaban.service.engine.recommend.candidates import CandidateFinder
from metaban.service.engine.recommend.catalogue import Catalogue
from metaban.service.engine.recommend.decide import Decider
from metaban.service.engine.recommend.profiles import ProfileReader
from metaban.service.engine.recommend.select import Selector
from metaban.service.engine.reward_watch import RewardWatch
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.settings.environment import (
    WAITAOF_ADVICE,
    Settings,
    SettingsError,
    learner_settings,
    reward_rules,
)
from metaban.service.settings.namespace import (
    LiveSettings,
    check_size,
    complete,
    differences,
    log_difference,
    replace_invalid_learner,
)
from metaban.service.telemetry.metrics import Metrics
from metaban.store.audit import AuditLog, AuditRecord
from metaban.store.catalogue import CatalogueStore
from metaban.store.client.cluster import is_cluster_url
from metaban.store.client.connection import NO_LIMIT, check_server, connect, drop_idle, waitaof_refusal
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.errors import NamespaceConflict, StoreReset, StoreUnavailable
from metaban.store.events.stream import EventStream
from metaban.store.namespaces import MAX_RACES, NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.transfer import TransferStore
from metaban.store.users.logs import NamespaceLogs
from metaban.store.users.users import COUNTERS, UserStore
from metaban.store.valkey.server import server_folder

#: Most connections for requests.
REQUEST_CONNECTIONS: Final = 128

log = structlog.get_logger()

Result = TypeVar("Result")


@final
class Connections:
    """The clients of the store, for all namespaces of a process. Each connects on first use."""

    def __init__(self, redis_url: str) -> None:
        self.requests = connect(redis_url, max_connections=REQUEST_CONNECTIONS)
        # Separate ones: calls that wait for a hanging replica must not use up the connections of other requests, a
        # probe must not wait for a free connection, and a replica holds one all the time.
        self.confirming = connect(redis_url)
        self.probing = connect(redis_url, max_connections=NO_LIMIT)
        self.following = connect(redis_url, max_connections=NO_LIMIT)
        self.clustered = is_cluster_url(redis_url)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (self.requests, self.confirming, self.probing, self.following):
            await client.aclose()


@final
class Engine:
    """One served namespace."""

    #: The current settings; these and the parts below exist once started.
    live: LiveSettings
    #: Answers /recommend and takes /feedback.
    decider: Decider
    feedback: Feedback
    #: Tells when nothing can be learned from the rewards.
    watch: RewardWatch
    arms: ArmAdmin
    users: UserAdmin
    groups: GroupAdmin
    fusion: FusionAdmin
    transfer: TransferAdmin
    snapshots: SnapshotAdmin

    def __init__(self, settings: Settings, connections: Connections, metrics: Metrics) -> None:
        self._deployment = settings
        self.namespace = settings.namespace
        self.metrics = metrics.of(settings.namespace)
        self._redis = connections.requests
        self._confirming = connections.confirming if settings.durability == "replicated" else self._redis
        self._probing = connections.probing
        self._following = connections.following
        self._clustered = connections.clustered
        # One failed server of a cluster does not make the others unavailable.
        self._guard = StoreGuard(self._probe, trust_calls=not self._clustered, namespace=settings.namespace)
        self.metrics.store_up.set_function(lambda: self._guard.outage is None)
        self._namespaces = NamespaceStore(self._redis)
        self._compute = TensorThread()
        self._host: ModelHost | None = None
        self._updating: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        #: Whether the namespace was deleted on purpose; it may have been created again.
        self.succeeded = False
        self._log = log.bind(namespace=settings.namespace)

    @classmethod
    def from_settings(cls, settings: Settings, connections: Connections, metrics: Metrics) -> Self:
        """An engine that is not started yet."""
        use_threads(settings.torch_threads)
        return cls(settings, connections, metrics)

    async def start(self, made: NamespaceRecord | None = None) -> None:
        """Open the namespace and load its state; without `made`, its record, it is created if there is none."""
        info = await check_server(self._redis)
        confirm = await confirmation(self._deployment, self._redis, info)
        live = LiveSettings(self._deployment, await self._open(made))
        settings, learner, rules = live.settings, live.learner, live.rules
        check_size(learner, live.record.layout)
        for found in differences(self._deployment, live.record):
            log_difference(self._log, found)
        keys, store_id = live.record.keys, live.record.store_id
        guard, users = self._guard, UserStore(self._redis, keys, store_id, samples_kept=learner.samples_kept)
        epochs = EpochStore(self._redis, keys, store_id)
        fusion = FusionStore(self._redis, keys, store_id)
        transfer = TransferStore(self._redis, keys, store_id)
        decisions = DecisionStore(self._redis, keys, ttl_s=rules.window_s + settings.late_window_s, store_id=store_id)
        catalogue_store = CatalogueStore(self._redis, keys, store_id, arms_max=settings.max_catalogue)
        logs = NamespaceLogs(self._following, keys)
        host = ModelHost(live, self._namespaces, users, epochs, fusion, logs, self._compute, self.metrics)
        self.live, self._users, self._decisions, self._host = live, users, decisions, host
        self._waits_for_disk = confirm is not None and confirm.on_disk
        self._events = EventStream(
            self._confirming,
            keys,
            dedupe_window_s=rules.dedupe_window_s,
            backlog_limit=settings.backlog_limit,
            confirm=confirm,
        )
        self._audit = AuditLog(self._redis, keys, store_id)
        self._catalogue = Catalogue(catalogue_store)
        selector = Selector(live, users, host, CandidateFinder(guard, host, self._catalogue), self.metrics)
        profiles = ProfileReader(live, self._namespaces, host)
        self.decider = Decider(live, guard, decisions, selector, profiles, self.metrics)
        self.feedback = Feedback(live, guard, users, decisions, self._events, host, self.metrics)
        self.watch = RewardWatch(live, guard, users, self.decider, self.feedback, self.metrics)
        self.snapshots = SnapshotAdmin(self._redis, settings, live.record)
        self.arms = ArmAdmin(settings, guard, catalogue_store, host, self.snapshots.jobs)
        self.users = UserAdmin(
            live,
            self._redis,
            keys,
            guard,
            users,
            decisions,
            epochs,
            fusion,
            transfer,
            host,
            private_folder=server_folder(settings.data_dir) if settings.redis_url is None else None,
        )
        self.fusion = FusionAdmin(live, guard, fusion, host)
        self.transfer = TransferAdmin(guard, users, transfer, host)
        self.groups = GroupAdmin(guard, users, host)
        await host.start()
        await self._catalogue.start()
        guard.start()
        # An empty context: its log lines must not carry the id of the request that opened the namespace.
        self._watching = asyncio.create_task(self.watch.run(), context=Context())
        self._log.info("engine_ready", store=info.version, preset=learner.preset)

    async def _open(self, made: NamespaceRecord | None) -> NamespaceRecord:
        """The record of the opened namespace, completed if an older version stored it."""
        if made is not None:
            return await complete(self._namespaces, await self._namespaces.open(made), self._deployment)
        deployment, learner = self._deployment, learner_settings(self._deployment)
        check_size(learner, None)
        record = await self._namespaces.open_or_create(
            self.namespace,
            partitions=deployment.partitions,
            seed=deployment.seed,
            learner=learner.to_json(),
            rewards=reward_rules(deployment),
        )
        record = await complete(self._namespaces, record, deployment)
        return await replace_invalid_learner(self._namespaces, record, learner)

    async def stop(self) -> None:
        """Stop all parts; later calls fail with a 503."""
        if self._host is not None:
            await self.snapshots.jobs.stop()
            await self.users.stop()
        await self._guard.stop()
        self._guard.retire("the namespace was closed")
        for task in (self._updating, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()
        # Off the event loop: it waits for the job in progress.
        await asyncio.to_thread(self._compute.shutdown)

    @property
    def serving(self) -> Serving | None:
        """The parts that serve, once the feature layout is known."""
        return None if self._host is None else self._host.serving

    @property
    def lost(self) -> bool:
        """Whether the store now has no namespace of this name, or another one."""
        return isinstance(self._guard.outage, StoreReset)

    async def change_settings(self, patch: Mapping[str, Any], *, revision: int | None = None) -> LiveSettings:
        """Override settings of the namespace for all processes; None removes an override.

        SettingsError when they are invalid, NamespaceConflict when the record has another revision.
        """
        for _ in range(MAX_RACES):
            current = await self._guard.call(lambda: self._namespaces.reload(self.live.record))
            if revision not in (None, current.revision):
                break
            self._adopt(current)
            if not patch or await self._change(patch):
                return self.live
        raise NamespaceConflict("the settings were changed meanwhile: read them again")

    async def _change(self, patch: Mapping[str, Any]) -> bool:
        """Override settings in the record as this process knows it; False when it has changed meanwhile."""
        known = self.live.record
        proposed = self.live.proposed(patch)
        changed = await self._guard.call(lambda: self._namespaces.change(known, **proposed))
        if changed is not None:
            self._adopt(changed)
            if changed.learner != known.learner:
                await self._update_learner()
        return changed is not None

    async def audit(self, line: AuditRecord) -> None:
        """Add a line to the audit log."""
        await self._guard.call(lambda: self._audit.add(line))

    async def audited(self, count: int, *, before: str | None) -> list[AuditRecord]:
        """Lines of the audit log, the newest first."""
        return await self._guard.call(lambda: self._audit.newest(count, before=before))

    @property
    def calibration(self) -> tuple[int, ReliabilityTable | None]:
        """The served epoch and the reliability of its predictions."""
        serving = self.serving
        return (0, None) if serving is None else (serving.model.epoch_number, serving.replica.reliability)

    def require_store(self) -> None:
        """StoreUnavailable while the store is unavailable. A reset one is allowed, because it can be restored."""
        if isinstance(self._guard.outage, StoreUnavailable):
            raise StoreUnavailable(str(self._guard.outage))

    async def ask_events(self, work: Callable[[EventStream], Awaitable[Result]]) -> Result:
        """Run a call on the event stream and its dead letters."""
        return await self._guard.call(lambda: work(self._events))

    async def readiness(self) -> dict[str, CheckResult]:
        """The readiness checks: can requests be answered and rewards be stored?"""
        await self._guard.check()
        restore, refusal = None, ""
        with suppress(StoreUnavailable, StoreReset):  # reported below
            restore = await self._guard.call(self.snapshots.check)
            if self._waits_for_disk:
                # Checked at the start too, but the address may lead to another server since.
                refusal = await self._guard.call(lambda: waitaof_refusal(self._redis))
        # A loaded model answers without the store, unless the setting refuses that.
        vital = self.serving is None or self.live.settings.store_outage == "refuse"
        outage = self._guard.outage
        if outage is None:
            checks = {"store": CheckResult(True, "answers")}
        else:
            checks = {"store": CheckResult(False, str(outage), vital=vital or isinstance(outage, StoreReset))}
        if restore is not None:
            checks["restore"] = restore
        if refusal:
            checks["durability"] = CheckResult(False, f"rewards are refused: {refusal}. {WAITAOF_ADVICE}", vital=vital)
        if self.serving is not None:
            healthy = self.serving.replica.healthy
            detail = "follows the updates" if healthy else "is behind the updates"
            checks["replica"] = CheckResult(healthy, detail, vital=vital)
        return checks

    async def refresh_gauges(self) -> None:
        """Update the gauges whose values are in the store."""
        partitions = await self.ask_events(lambda events: events.status(COUNTERS))
        self.metrics.backlog.set(sum(each.waiting for each in partitions))
        self.metrics.backlog_fill.set(max(each.waiting for each in partitions) / self._deployment.backlog_limit)
        self.metrics.oldest_event_age.set(max(each.oldest_age_ms or 0 for each in partitions) / 1_000)
        self.metrics.dead_letters.set(sum(each.dead_letters for each in partitions))
        self.metrics.set_events({name: sum(each.counters[name] for each in partitions) for name in COUNTERS})
        if self.serving is not None:
            self.metrics.epoch_due.set(self.serving.replica.epoch_due)

    def _adopt(self, record: NamespaceRecord) -> None:
        """Use the settings of a changed record."""
        try:
            if self._host is not None:
                self._host.adopt(record)
        except SettingsError as error:
            # Written by a version with other settings; the current ones stay.
            self._log.error("settings_not_adopted", reason=str(error))
        rules = self.live.rules
        self._events.set_dedupe_window(rules.dedupe_window_s)
        self._decisions.set_ttl(rules.window_s + self._deployment.late_window_s)

    async def _update_learner(self) -> None:
        """Use the current settings in the learner; after a failure the next probe tries again."""
        try:
            if self._host is not None:
                await self._host.update()
        except Exception as error:
            self._log.error("learner_update_failed", exc_info=error)

    async def _probe(self) -> None:
        """Check that the store still has this namespace and, after an outage, that it accepts decisions.

        In a cluster only the server with the namespace's record is asked; decisions are spread over all servers.
        """
        record = await NamespaceStore(self._probing).load(self.namespace)
        known = self.live.record
        if record is None or record.store_id != known.store_id:
            # A namespace created in place of this one continues its revisions; one of another store starts at 0.
            self.succeeded = record is not None and record.revision > known.revision
            raise StoreReset("has lost this namespace, or is another store: restart the service to create it again")
        if record.state == "deleted":
            self.succeeded = True
            raise StoreReset("the namespace was deleted")
        self._adopt(record)
        if self._host is not None and self._host.outdated and (self._updating is None or self._updating.done()):
            # Not awaited: it may wait for a layout that is being fixed, and take longer than a probe may.
            self._updating = asyncio.create_task(self._update_learner(), context=Context())
        if self._guard.outage is not None:
            if not self._clustered:
                await DecisionStore(self._probing, record.keys, ttl_s=1).rehearse()
            # Connections from before the outage may be dead; each would cost a request its whole time limit.
            await drop_idle(self._redis)
            await drop_idle(self._confirming)
