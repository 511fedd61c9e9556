"""A worker's share of the partitions: takes them by lease, reads them, gives them up when others come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import structlog

from store.errors import StoreUnavailable
from store.events import EventStream
from store.ownership import Ownership, fair_share
from worker.consumer import Consumer

#: A worker that is not heard of for this long has lost its partitions: short, since their events wait meanwhile.
PARTITION_LEASE_MS = 1_200
#: How often leases are renewed and the share is looked at again.
RENEW_S = 0.3

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class _Reading:
    """A partition that is being read, and how to end that."""

    task: asyncio.Task[None]
    stopping: asyncio.Event


@final
class PartitionShares:
    """Reads the partitions that are this worker's."""

    def __init__(
        self,
        ownership: Ownership,
        streams: EventStream,
        token: str,
        stopping: asyncio.Event,
        *,
        partitions: int,
        consumer: Callable[[int, asyncio.Event], Consumer],
    ) -> None:
        """`consumer` makes the reader of a partition, to be ended by the event it is given."""
        self._ownership = ownership
        self._streams = streams
        self._token = token
        self._stopping = stopping
        self._partitions = partitions
        self._consumer = consumer
        self._readings: dict[int, _Reading] = {}

    @property
    def partitions(self) -> list[int]:
        """Those that are read now."""
        return list(self._readings)

    async def run(self) -> None:
        """Read what is ours until asked to stop, then finish the batches at hand and let go."""
        try:
            while not self._stopping.is_set():
                try:
                    await self._turn()
                except StoreUnavailable as error:
                    log.warning("store unavailable", error=str(error))
                await self._wait()
        finally:
            try:
                await self._end_all()
            finally:
                await self._leave()

    async def _leave(self) -> None:
        try:
            await self._ownership.leave()
        except StoreUnavailable as error:
            log.warning("store unavailable", error=str(error))

    async def _turn(self) -> None:
        present = await self._ownership.attend()
        wanted = fair_share(self._partitions, self._token, present)
        await self._let_go()
        # Kept until its reader has ended: whoever comes next would find a batch in its hands.
        held = await self._ownership.hold(wanted | self._readings.keys())
        for partition, reading in self._readings.items():
            if partition not in wanted or partition not in held:
                reading.stopping.set()
        for partition in sorted((held & wanted) - self._readings.keys()):
            await self._forget_the_dead(partition, present)
            stopping = asyncio.Event()
            task = asyncio.create_task(self._consumer(partition, stopping).run())
            self._readings[partition] = _Reading(task, stopping)
            log.debug("partition taken", partition=partition)

    async def _forget_the_dead(self, partition: int, present: list[str]) -> None:
        """Names of workers that were killed would pile up; one that something is pending for is needed until then."""
        gone = [name for name in await self._streams.consumers(partition) if name not in present]
        await self._streams.release_from(partition, gone)

    async def _wait(self) -> None:
        """Until the next turn, the stop, or the end of a reader."""
        stop = asyncio.create_task(self._stopping.wait())
        tasks = [reading.task for reading in self._readings.values()]
        try:
            await asyncio.wait([stop, *tasks], timeout=RENEW_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _let_go(self) -> None:
        """Give back the leases of partitions whose readers have ended; an error that ended one is raised."""
        ended = {partition: reading for partition, reading in self._readings.items() if reading.task.done()}
        for partition in ended:
            del self._readings[partition]
        try:
            await self._ownership.release(ended)
        except StoreUnavailable as error:
            log.warning("store unavailable", error=str(error))
        failures = [failure for reading in ended.values() if (failure := reading.task.exception()) is not None]
        if failures:
            raise failures[0]

    async def _end_all(self) -> None:
        """Have all readers finish their batches."""
        for reading in self._readings.values():
            reading.stopping.set()
        await asyncio.gather(*(reading.task for reading in self._readings.values()), return_exceptions=True)
        await self._let_go()
