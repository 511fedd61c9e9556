"""A worker's tasks for one namespace: consumers of partitions, epochs, default rewards, fusion, transfer, retention."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, final

import structlog

from metaban.models.numerics.hardware import choose_device
from metaban.models.settings import stored_settings
from metaban.store.client.connection import Store
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.decisions.default_rewards import AwaitedRewardStore
from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.store.events.stream import EventStream
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.reward_rules import RewardRules
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.partition_leases import PartitionLeases
from metaban.store.shared.transfer import TransferStore
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.profiles import ProfileStore
from metaban.store.users.users import UserStore
from metaban.worker.epochs.epoch_trainer import EpochTrainer
from metaban.worker.jobs.fusion import FusionSchedule, FusionTrainer
from metaban.worker.jobs.fusion_sources import FusionSources
from metaban.worker.jobs.retention import Retention
from metaban.worker.jobs.transfer import TransferWorker
from metaban.worker.jobs.transfer_tasks import TransferTasks
from metaban.worker.learning.consumer import Consumer
from metaban.worker.learning.default_rewards import DefaultRewards
from metaban.worker.learning.fit_batcher import FitBatcher
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.outages import STORE_OUTAGE, StoreOutage, store_failed
from metaban.worker.learning.partitions import PARTITION_LEASE_MS, PartitionConsumers
from metaban.worker.learning.publisher import Publisher
from metaban.worker.learning.reader import EventReader

#: How often the parts are compared with the namespace's record.
RECORD_TICK_S: Final = 0.5

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker process; those of a namespace are in its record."""

    backlog_limit: int
    #: Written to records of an older version, which lack them; otherwise the record's are used.
    samples_kept: int
    candidate_pool: int
    rewards: RewardRules = field(default_factory=RewardRules)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: int = 1
    #: off: fusion is not trained, not even on request, unless the namespace's own setting says otherwise.
    fusion: Literal["auto", "off"] = "auto"
    fusion_interval_s: float = 3_600.0
    fusion_growth: float = 0.25
    fusion_min_sources: int = 50
    fusion_rounds: int | None = None
    #: 0: users are kept, unless the namespace's own setting says otherwise.
    user_retention_days: int = 0

    @property
    def fusion_schedule(self) -> FusionSchedule:
        """When fusion is trained, and how."""
        return FusionSchedule(
            interval_s=self.fusion_interval_s,
            growth=self.fusion_growth,
            min_sources=self.fusion_min_sources,
            threads=self.torch_threads,
            rounds=self.fusion_rounds,
            mode=self.fusion,
        )


@final
class NamespaceWorker:
    """Learns from the rewards of namespaces."""

    def __init__(
        self,
        redis: Store,
        reading: Store,
        settings: WorkerSettings,
        compute: Executor,
        deriving: Executor,
        modeling: Executor,
        *,
        token: str,
    ) -> None:
        """`reading` has a connection for each namespace, in a cluster for each partition, that waits for rewards.

        `compute` fits users to events, which wait for nothing else: epochs and refits run in `deriving`, transfer
        jobs in `modeling`.
        """
        self._redis = redis
        self._reading = reading
        self._settings = settings
        self._compute = compute
        self._deriving = deriving
        self._modeling = modeling
        self._token = token
        self._outages: dict[str, StoreOutage] = {}

    async def run(self, name: str, stopping: asyncio.Event) -> None:
        """Work on a namespace until asked to stop or until it is deleted; return at once when it is not ready.

        It also returns when a setting changes that its parts were built with: the next call uses the new value.

        Run it in a task of its own: it binds `namespace` to all log lines of the task and its children.
        Raises StoreReset when the store lost the namespace.
        """
        structlog.contextvars.bind_contextvars(namespace=name)
        STORE_OUTAGE.set(self._outages.setdefault(name, StoreOutage()))
        redis = self._redis
        try:
            record = await NamespaceStore(redis).load(name)
            if record is None or record.state != "ready":
                return
            settings = self._settings
            learner = {"samples_kept": settings.samples_kept, "candidate_pool": settings.candidate_pool}
            record = await NamespaceStore(redis).fill(record, learner=learner, rewards=settings.rewards)
            try:
                await self._learn(redis, record, stopping)
            except StoreReset:
                if not await _was_deleted(redis, record):
                    raise
                log.info("namespace_deleted")
        except StoreUnavailable as error:
            store_failed(error)

    async def _learn(self, redis: Store, record: NamespaceRecord, stopping: asyncio.Event) -> None:
        settings, token = self._settings, self._token
        built_with = _built_with(record)
        streams = EventStream(
            redis, record.keys, dedupe_window_s=built_with.dedupe_window_s, backlog_limit=settings.backlog_limit
        )
        users = UserStore(redis, record.keys, record.store_id, samples_kept=built_with.samples_kept)
        epochs = EpochStore(redis, record.keys, record.store_id)
        fusion_store = FusionStore(redis, record.keys, record.store_id)
        transfer_store = TransferStore(redis, record.keys, record.store_id)
        model = await asyncio.to_thread(
            NamespaceModel, NamespaceStore(redis), epochs, record, choose_device(settings.device)
        )
        await model.refresh_epoch()
        ending = asyncio.Event()
        epoch_trainer = EpochTrainer(
            users,
            epochs,
            model,
            self._deriving,
            ending,
            token=token,
            partitions=record.partitions,
            candidate_pool=built_with.candidate_pool,
        )
        fit_batcher = FitBatcher(self._compute, ending)
        awaiting = AwaitedRewardStore(redis, record.keys)
        publisher = Publisher(
            streams, users, awaiting, model, fit_batcher, consumer=token, samples_kept=built_with.samples_kept
        )
        waiting = EventStream(
            self._reading,
            record.keys,
            dedupe_window_s=built_with.dedupe_window_s,
            backlog_limit=settings.backlog_limit,
        )
        reader = EventReader(waiting, token)
        consumers = PartitionConsumers(
            PartitionLeases(redis, record.keys, token, ttl_ms=PARTITION_LEASE_MS),
            streams,
            ending,
            consumer=lambda partition, leaving: Consumer(
                partition,
                token,
                streams,
                reader if waiting.reads_together else EventReader(waiting, token),
                publisher,
                leaving,
                on_applied=epoch_trainer.count,
            ),
        )
        default_rewards = DefaultRewards(
            awaiting,
            DecisionStore(redis, record.keys, ttl_s=1),  # only read
            streams,
            model,
            ending,
            partitions=lambda: consumers.partitions,
        )
        fusion = FusionTrainer(
            users,
            fusion_store,
            FusionSources(users, ProfileStore(redis, record.keys), partitions=record.partitions),
            model,
            ending,
            token=token,
            schedule=settings.fusion_schedule,
        )
        transfer = TransferWorker(
            users,
            transfer_store,
            TransferTasks(users, self._modeling, partitions=record.partitions),
            model,
            self._modeling,
            ending,
            token=token,
        )
        retention = Retention(
            users,
            streams,
            DecisionStore(redis, record.keys, ttl_s=1),  # only deletes
            RemnantStore(redis, record.keys),
            (epochs, fusion_store, transfer_store),
            model,
            ending,
            days=settings.user_retention_days,
            partitions=lambda: consumers.partitions,
        )
        log.info("worker_ready", consumer=token, partitions=record.partitions)
        reset: BaseExceptionGroup[StoreReset] | None = None
        relay = asyncio.create_task(_relay(stopping, ending))
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (epoch_trainer, consumers, default_rewards, fusion, transfer, retention):
                    tasks.create_task(_run_then_end(part.run(), ending))
                tasks.create_task(_run_then_end(_until_changed(model, built_with, ending), ending))
        except* StoreReset as lost:
            reset = lost
        finally:
            relay.cancel()
        if reset is not None:
            # Several tasks may have raised it; one is enough.
            raise StoreReset(str(reset.exceptions[0])) from reset
        try:
            await streams.release_consumer(token)
        except StoreUnavailable as error:
            store_failed(error)
        log.info("worker_stopped", consumer=token)


@final
@dataclass(frozen=True, slots=True)
class _BuiltWith:
    """Settings of a namespace that the parts of a worker are built with."""

    samples_kept: int
    candidate_pool: int
    dedupe_window_s: float


def _built_with(record: NamespaceRecord) -> _BuiltWith:
    learner = stored_settings(record.learner)
    return _BuiltWith(learner.samples_kept, learner.candidate_pool, record.reward_rules.dedupe_window_s)


async def _until_changed(model: NamespaceModel, built_with: _BuiltWith, ending: asyncio.Event) -> None:
    """Wait until the record, which other parts keep up to date, has other values than the parts were built with."""
    known: NamespaceRecord | None = None
    while model.record is known or _built_with(model.record) == built_with:
        known = model.record
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_TICK_S):
                await ending.wait()
                return
    log.info("worker_rebuilt", **asdict(_built_with(model.record)))


async def _was_deleted(redis: Store, record: NamespaceRecord) -> bool:
    """Whether a namespace was deleted, and perhaps created again, rather than lost by the store."""
    found = await NamespaceStore(redis).load(record.name)
    return found is not None and (found.state == "deleted" or found.store_id != record.store_id)


async def _relay(stopping: asyncio.Event, ending: asyncio.Event) -> None:
    await stopping.wait()
    ending.set()


async def _run_then_end(work: Coroutine[None, None, None], ending: asyncio.Event) -> None:
    """Run one part and end all others with it. Cancellation is not enough: the Redis driver may swallow one."""
    try:
        await work
    finally:
        ending.set()
