"""A worker's share of the partitions: takes them by lease, consumes them, and releases them when workers join."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import structlog

from metaban.store.errors import StoreUnavailable
from metaban.store.events.stream import EventStream
from metaban.store.shared.partition_leases import PartitionLeases
from metaban.worker.learning.consumer import Consumer
from metaban.worker.learning.outages import store_answered, store_failed
from metaban.worker.learning.pauses import until_next

#: Lease of a partition. Short: after a worker was killed, events of its partitions wait until it expires.
PARTITION_LEASE_MS = 1_200

#: How often leases are renewed and the share is computed again.
RENEW_S = 0.4

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class _RunningConsumer:
    """The task of a partition's consumer, and the event that stops it."""

    task: asyncio.Task[None]
    stopping: asyncio.Event


@final
class PartitionConsumers:
    """Runs a consumer for each partition of this worker's share."""

    def __init__(
        self,
        leases: PartitionLeases,
        streams: EventStream,
        stopping: asyncio.Event,
        *,
        consumer: Callable[[int, asyncio.Event], Consumer],
    ) -> None:
        """`consumer` makes the consumer of a partition; it stops when the given event is set."""
        self._leases = leases
        self._streams = streams
        self._stopping = stopping
        self._consumer = consumer
        self._running: dict[int, _RunningConsumer] = {}
        self._woken = asyncio.Event()

    @property
    def partitions(self) -> list[int]:
        """Partitions consumed now."""
        return list(self._running)

    async def run(self) -> None:
        """Consume this worker's partitions until asked to stop, then finish the batches and release the leases."""
        stop = asyncio.create_task(self._stopping.wait())
        stop.add_done_callback(lambda _: self._woken.set())
        try:
            while not self._stopping.is_set():
                try:
                    await self._rebalance()
                    store_answered()
                except StoreUnavailable as error:
                    store_failed(error)
                await self._wait()
        finally:
            stop.cancel()
            try:
                await self._stop_all()
            finally:
                await self._leave()

    async def _leave(self) -> None:
        try:
            await self._leases.leave()
        except StoreUnavailable as error:
            store_failed(error)

    async def _rebalance(self) -> None:
        self._raise_failures()
        # A lease is kept until its consumer has ended: until then a batch may be in progress.
        share = await self._leases.renew(self._running)
        for partition, running in self._running.items():
            if partition not in share.partitions:
                running.stopping.set()
        taken = sorted(share.partitions - self._running.keys())
        for partition in taken:
            await self._delete_dead_consumers(partition, share.workers)
        for partition in taken:  # all at once, so that they share their first read
            stopping = asyncio.Event()
            task = asyncio.create_task(self._consumer(partition, stopping).run())
            task.add_done_callback(lambda _: self._woken.set())
            self._running[partition] = _RunningConsumer(task, stopping)
            log.debug("partition_taken", partition=partition)

    async def _delete_dead_consumers(self, partition: int, present: Sequence[str]) -> None:
        """Delete the stream consumers of workers that are gone, except those with pending events."""
        gone = [name for name in await self._streams.consumers(partition) if name not in present]
        await self._streams.release_from(partition, gone)

    async def _wait(self) -> None:
        """Wait for the next renewal, the stop, or the end of a consumer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(until_next(RENEW_S)):
                await self._woken.wait()
        self._woken.clear()

    def _raise_failures(self) -> None:
        """Forget the consumers that have ended; raise the error of one that failed."""
        ended = {partition: running for partition, running in self._running.items() if running.task.done()}
        for partition in ended:
            del self._running[partition]
        failures = [failure for running in ended.values() if (failure := running.task.exception()) is not None]
        if failures:
            raise failures[0]

    async def _stop_all(self) -> None:
        """Stop all consumers after their current batches."""
        for running in self._running.values():
            running.stopping.set()
        await asyncio.gather(*(running.task for running in self._running.values()), return_exceptions=True)
        self._raise_failures()
