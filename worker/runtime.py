"""The worker process: a consumer for each partition of its share, one meta-trainer, one eye on overdue rewards, one
thread for tensors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, final
from uuid import uuid4

import structlog
import uvloop

from models.device import choose_device
from models.threads import use_threads
from store.awaiting import AwaitingStore
from store.connection import check_server, connect
from store.decisions import DecisionStore
from store.epochs import EpochStore
from store.errors import StoreReset, StoreUnavailable
from store.events import EventStream
from store.failpoints import armed
from store.namespaces import Namespaces
from store.ownership import Ownership
from store.users import UserStore
from worker.consumer import Consumer
from worker.desk import FittingDesk
from worker.meta import MetaTrainer
from worker.model import NamespaceModel, wait_for_namespace
from worker.overdue import OverdueRewards
from worker.publisher import Publisher
from worker.shares import PARTITION_LEASE_MS, PartitionShares

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker has to know beside the namespace's own record."""

    namespace: str
    samples_kept: int
    dedupe_window_s: int
    backlog_limit: int
    candidate_pool: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: int = 1


def run_worker(redis_url: str, settings: WorkerSettings) -> None:
    """Work until SIGTERM or SIGINT; the batch at hand is finished first."""
    use_threads(settings.torch_threads)
    uvloop.run(_run(redis_url, settings))


async def _run(redis_url: str, settings: WorkerSettings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    redis = connect(redis_url)
    try:
        await check_server(redis)
        namespaces = Namespaces(redis)
        record = await wait_for_namespace(namespaces, settings.namespace, stopping)
        if record is None:
            return
        # Unique to the process: a name used twice would let two processes acknowledge each other's events.
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        streams = EventStream(
            redis, record.keys, dedupe_window_s=settings.dedupe_window_s, backlog_limit=settings.backlog_limit
        )
        users = UserStore(redis, record.keys, record.store_epoch, samples_kept=settings.samples_kept)
        epochs = EpochStore(redis, record.keys, record.store_epoch)
        model = NamespaceModel(namespaces, epochs, record, choose_device(settings.device))
        await model.refresh_epoch()
        reset: BaseExceptionGroup[StoreReset] | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors") as compute:
            meta = MetaTrainer(
                users,
                epochs,
                model,
                compute,
                stopping,
                token=name,
                partitions=record.partitions,
                candidate_pool=settings.candidate_pool,
            )
            desk = FittingDesk(compute)
            publisher = Publisher(streams, users, model, desk, consumer=name, samples_kept=settings.samples_kept)
            shares = PartitionShares(
                Ownership(redis, record.keys, name, ttl_ms=PARTITION_LEASE_MS),
                streams,
                name,
                stopping,
                partitions=record.partitions,
                consumer=lambda partition, ending: Consumer(
                    partition, name, streams, publisher, ending, on_applied=meta.count
                ),
            )
            overdue = OverdueRewards(
                AwaitingStore(redis, record.keys),
                DecisionStore(redis, record.keys, ttl_s=1),  # writes none
                streams,
                model,
                stopping,
                partitions=lambda: shares.partitions,
            )
            if armed():
                log.warning("failpoints are armed: this process will kill itself")
            log.info("worker ready", consumer=name, namespace=record.name, partitions=record.partitions)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_until_the_end(meta.run(), stopping))
                    tasks.create_task(_until_the_end(shares.run(), stopping))
                    tasks.create_task(_until_the_end(overdue.run(), stopping))
            except* StoreReset as lost:
                reset = lost
        if reset is not None:
            # Several tasks may have found out at once; one tells it.
            raise StoreReset(str(reset.exceptions[0])) from reset
        try:
            await streams.release_consumer(name)
        except StoreUnavailable as error:
            log.warning("store unavailable", error=str(error))
        log.info("worker stopped", consumer=name)
    finally:
        await redis.aclose()


async def _until_the_end(work: Coroutine[None, None, None], stopping: asyncio.Event) -> None:
    """Have all work end when one part does: cancellations alone do not see to it, the driver may swallow one."""
    try:
        await work
    finally:
        stopping.set()
