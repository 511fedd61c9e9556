"""Reads events for the consumers of a worker, in one command for all that wait where the store allows it.

A consumer that waits costs nothing. A read blocks until the end of the current period: reads that were started one
after the other, while their consumers were busy in between, end together, and the next one is for all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from metaban.store.events.event import Delivery
from metaban.store.events.stream import EventStream
from metaban.worker.learning.pauses import QuietChecks

#: Most events of one read of a partition.
BATCH_EVENTS = 64

#: Period of the reads: the longest wait for new events. Shorter than the lease of a partition, so that a worker that
#: stalls gets no event after another one has taken over; also the longest delay of a stop when idle.
READ_BLOCK_MS = 800

#: A pending event is stalled, and claimed by another consumer, after this time.
STALLED_AFTER_MS = 2_000

#: How often stalled events are claimed after events were read or claimed, and how many at once.
CLAIM_EVERY_S = 1.0
CLAIM_EVENTS = 64


@final
@dataclass(frozen=True, slots=True)
class FoundEvents:
    """Events of one partition."""

    fresh: list[Delivery] = field(default_factory=list)
    stalled: list[Delivery] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class _Waiting:
    """A consumer that waits, and whether it is asked to stop."""

    found: asyncio.Future[FoundEvents]
    stopping: asyncio.Event


@final
class EventReader:
    """Reads events for the consumers of one worker, which have the stream consumer `name`."""

    def __init__(self, streams: EventStream, name: str) -> None:
        self._streams = streams
        self._name = name
        self._waiting: dict[int, _Waiting] = {}
        #: The running reads, and the partitions they are for.
        self._reads: dict[asyncio.Task[None], Sequence[int]] = {}
        self._period_end_s = 0.0
        self._claims: dict[int, QuietChecks] = {}

    async def next(self, partition: int, stopping: asyncio.Event) -> FoundEvents:
        """Events of a partition as soon as there are some, new ones or stalled ones; none when asked to stop."""
        found: asyncio.Future[FoundEvents] = asyncio.get_running_loop().create_future()
        self._waiting[partition] = _Waiting(found, stopping)
        # In the next turn of the event loop: others may begin to wait in this one.
        asyncio.get_running_loop().call_soon(self._start_read)
        return await found

    def _start_read(self) -> None:
        """Read for all consumers that wait and are in no running read."""
        now_s = time.monotonic()
        if self._reads and now_s >= self._period_end_s:
            return  # these reads end now; the last of them calls again
        read = {partition for partitions in self._reads.values() for partition in partitions}
        unread = [partition for partition in self._waiting if partition not in read]
        if not unread:
            return
        if now_s >= self._period_end_s:
            self._period_end_s = now_s + READ_BLOCK_MS / 1_000
        task = asyncio.create_task(self._read(unread))
        self._reads[task] = unread
        task.add_done_callback(self._end_read)

    def _end_read(self, task: asyncio.Task[None]) -> None:
        del self._reads[task]
        self._start_read()

    async def _read(self, partitions: Sequence[int]) -> None:
        """Wake the consumers for which there are events, and those that are asked to stop."""
        try:
            found = await self._find(partitions)
        except Exception as error:
            for partition in partitions:
                waiting = self._waiting.pop(partition)
                if not waiting.found.done():
                    waiting.found.set_exception(error)
            return
        for partition in partitions:
            if partition in found or self._waiting[partition].stopping.is_set():
                waiting = self._waiting.pop(partition)
                if not waiting.found.done():
                    waiting.found.set_result(found.get(partition) or FoundEvents())

    async def _find(self, partitions: Sequence[int]) -> Mapping[int, FoundEvents]:
        found: dict[int, FoundEvents] = {}
        for delivery in await self._claim_stalled(partitions):
            found.setdefault(delivery.partition, FoundEvents()).stalled.append(delivery)
        if found:
            return found
        block_ms = math.ceil(max(1.0, 1_000 * (self._period_end_s - time.monotonic())))
        for delivery in await self._streams.read(partitions, self._name, count=BATCH_EVENTS, block_ms=block_ms):
            found.setdefault(delivery.partition, FoundEvents()).fresh.append(delivery)
        for partition in found:
            self._claims[partition].hurry()  # they may fail
        return found

    async def _claim_stalled(self, partitions: Sequence[int]) -> list[Delivery]:
        for partition in partitions:
            self._claims.setdefault(partition, QuietChecks(CLAIM_EVERY_S))
        due = [partition for partition in partitions if self._claims[partition].due]
        if not due:
            return []
        claimed = await self._streams.claim_stalled(due, self._name, min_idle_ms=STALLED_AFTER_MS, count=CLAIM_EVENTS)
        stalled = {delivery.partition for delivery in claimed}
        for partition in due:
            self._claims[partition].done(quiet=partition not in stalled)
        return claimed
