"""What a worker does for one namespace: a consumer for each partition of its share, one meta-trainer, one fusion
trainer, one who answers transfer jobs, one eye on overdue rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, final

import structlog

from models.device import choose_device
from store.awaiting import AwaitingStore
from store.connection import Store, connect
from store.decisions import DecisionStore
from store.epochs import EpochStore
from store.errors import StoreReset, StoreUnavailable
from store.events import EventStream
from store.fusion import FusionStore
from store.namespaces import NamespaceRecord, Namespaces
from store.ownership import Ownership
from store.profiles import ProfileStore
from store.transfer import TransferStore
from store.users import UserStore
from worker.consumer import Consumer
from worker.desk import FittingDesk
from worker.fusion import FusionPlan, FusionTrainer
from worker.fusion_sources import FusionSources
from worker.meta import MetaTrainer
from worker.model import NamespaceModel
from worker.overdue import OverdueRewards
from worker.publisher import Publisher
from worker.shares import PARTITION_LEASE_MS, PartitionShares
from worker.transfer import TransferWorker
from worker.transfer_tasks import TransferTasks

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker has to know beside the namespaces' own records."""

    samples_kept: int
    dedupe_window_s: int
    backlog_limit: int
    candidate_pool: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: int = 1
    #: off: where a namespace does not say otherwise, fusion is not trained, not even when it is asked for.
    fusion: Literal["auto", "off"] = "auto"
    fusion_interval_s: float = 3_600.0
    fusion_growth: float = 0.25
    fusion_min_sources: int = 50
    fusion_rounds: int | None = None

    @property
    def fusion_plan(self) -> FusionPlan:
        """When fusion is trained."""
        return FusionPlan(
            interval_s=self.fusion_interval_s,
            growth=self.fusion_growth,
            least_sources=self.fusion_min_sources,
            threads=self.torch_threads,
            rounds=self.fusion_rounds,
            wanted=self.fusion,
        )


@final
class NamespaceWork:
    """Learns from the rewards of namespaces, each with connections of its own."""

    def __init__(
        self, redis_url: str, settings: WorkerSettings, compute: Executor, modeling: Executor, *, token: str
    ) -> None:
        """`compute` is for tensors that learning waits for, `modeling` for those that it does not wait for."""
        self._redis_url = redis_url
        self._settings = settings
        self._compute = compute
        self._modeling = modeling
        self._token = token

    async def on(self, name: str, stopping: asyncio.Event) -> None:
        """Work on a namespace until asked to stop, or until it is deleted or not ready yet.

        StoreReset when the store has lost it.
        """
        redis = connect(self._redis_url)
        try:
            record = await Namespaces(redis).load(name)
            if record is None or record.state != "ready":
                return
            try:
                await self._learn(redis, record, stopping)
            except StoreReset:
                if not await _was_deleted(redis, record):
                    raise
                log.info("namespace deleted", namespace=name)
        except StoreUnavailable as error:
            log.warning("store unavailable", namespace=name, error=str(error))
        finally:
            await redis.aclose()

    async def _learn(self, redis: Store, record: NamespaceRecord, stopping: asyncio.Event) -> None:
        settings, token = self._settings, self._token
        streams = EventStream(
            redis, record.keys, dedupe_window_s=settings.dedupe_window_s, backlog_limit=settings.backlog_limit
        )
        users = UserStore(redis, record.keys, record.store_epoch, samples_kept=settings.samples_kept)
        epochs = EpochStore(redis, record.keys, record.store_epoch)
        model = await asyncio.to_thread(
            NamespaceModel, Namespaces(redis), epochs, record, choose_device(settings.device)
        )
        await model.refresh_epoch()
        ending = asyncio.Event()
        meta = MetaTrainer(
            users,
            epochs,
            model,
            self._compute,
            ending,
            token=token,
            partitions=record.partitions,
            candidate_pool=settings.candidate_pool,
        )
        desk = FittingDesk(self._compute)
        publisher = Publisher(streams, users, model, desk, consumer=token, samples_kept=settings.samples_kept)
        shares = PartitionShares(
            Ownership(redis, record.keys, token, ttl_ms=PARTITION_LEASE_MS),
            streams,
            token,
            ending,
            partitions=record.partitions,
            consumer=lambda partition, leaving: Consumer(
                partition, token, streams, publisher, leaving, on_applied=meta.count
            ),
        )
        overdue = OverdueRewards(
            AwaitingStore(redis, record.keys),
            DecisionStore(redis, record.keys, ttl_s=1),  # writes none
            streams,
            model,
            ending,
            partitions=lambda: shares.partitions,
        )
        fusion = FusionTrainer(
            users,
            FusionStore(redis, record.keys, record.store_epoch),
            FusionSources(users, ProfileStore(redis, record.keys), partitions=record.partitions),
            model,
            ending,
            token=token,
            plan=settings.fusion_plan,
        )
        transfer = TransferWorker(
            users,
            TransferStore(redis, record.keys, record.store_epoch),
            TransferTasks(users, self._modeling, partitions=record.partitions),
            model,
            self._modeling,
            ending,
            token=token,
        )
        log.info("worker ready", consumer=token, namespace=record.name, partitions=record.partitions)
        reset: BaseExceptionGroup[StoreReset] | None = None
        relay = asyncio.create_task(_relay(stopping, ending))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_until_the_end(meta.run(), ending))
                tasks.create_task(_until_the_end(shares.run(), ending))
                tasks.create_task(_until_the_end(overdue.run(), ending))
                tasks.create_task(_until_the_end(fusion.run(), ending))
                tasks.create_task(_until_the_end(transfer.run(), ending))
        except* StoreReset as lost:
            reset = lost
        finally:
            relay.cancel()
        if reset is not None:
            # Several tasks may have found out at once; one tells it.
            raise StoreReset(str(reset.exceptions[0])) from reset
        try:
            await streams.release_consumer(token)
        except StoreUnavailable as error:
            log.warning("store unavailable", namespace=record.name, error=str(error))
        log.info("worker stopped", consumer=token, namespace=record.name)


async def _was_deleted(redis: Store, record: NamespaceRecord) -> bool:
    """Whether a namespace is gone because somebody deleted it, and perhaps made it anew."""
    found = await Namespaces(redis).load(record.name)
    return found is not None and (found.state == "deleted" or found.store_epoch != record.store_epoch)


async def _relay(stopping: asyncio.Event, ending: asyncio.Event) -> None:
    await stopping.wait()
    ending.set()


async def _until_the_end(work: Coroutine[None, None, None], ending: asyncio.Event) -> None:
    """Have all work end when one part does: cancellations alone do not see to it, the driver may swallow one."""
    try:
        await work
    finally:
        ending.set()
