"""Reading events: new ones in batches, stalled ones alone, hopeless ones to the dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import final

import structlog

from store.errors import FenceLost, StoreError, StoreReset, StoreUnavailable
from store.events import Delivery, EventStream
from store.failpoints import reach
from worker.publisher import Publisher

#: Events taken in one read.
BATCH_EVENTS = 64
#: Longest wait for new events; also how long a stop may take when idle.
READ_BLOCK_MS = 500
#: An event whose consumer has not finished it for this long is taken over.
STALLED_AFTER_MS = 4_000
#: How often a partition is searched for stalled events.
CLAIM_EVERY_S = 1.0
#: Stalled events tried, each alone, before new ones are read again.
CLAIM_EVENTS = 16
#: Attempts on an event alone before it is given up. Attempts in a batch do not count: the fault may be a neighbour's.
SOLO_ATTEMPTS_MAX = 5
#: Pause after the store did not answer.
UNAVAILABLE_PAUSE_S = 0.5

log = structlog.get_logger()


@final
class Consumer:
    """The reading end of one partition."""

    def __init__(
        self,
        partition: int,
        name: str,
        streams: EventStream,
        publisher: Publisher,
        stopping: asyncio.Event,
        *,
        on_applied: Callable[[int, int], None],
    ) -> None:
        self._partition = partition
        self._name = name
        self._streams = streams
        self._publisher = publisher
        self._stopping = stopping
        self._on_applied = on_applied
        self._on_trial: Delivery | None = None

    async def run(self) -> None:
        """Consume until asked to stop; the batch at hand is finished first."""
        next_claim = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= next_claim:
                    next_claim = time.monotonic() + CLAIM_EVERY_S
                    await self._take_over()
                fresh = await self._streams.read(
                    self._partition, self._name, count=BATCH_EVENTS, block_ms=READ_BLOCK_MS
                )
                if fresh:
                    reach("worker-after-read")
                    await self._learn(fresh)
            except StoreUnavailable as error:
                log.warning("store unavailable", partition=self._partition, error=str(error))
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)

    async def _take_over(self) -> None:
        if self._on_trial is not None:
            await self._streams.forgive_attempt(self._on_trial)
            self._on_trial = None
        for _ in range(CLAIM_EVENTS):
            if self._stopping.is_set():
                return
            # One at a time: claimed together, the others would have to stall anew when the first one kills us.
            stalled = await self._streams.claim_stalled(
                self._partition, self._name, min_idle_ms=STALLED_AFTER_MS, count=1
            )
            if not stalled:
                return
            [delivery] = stalled
            attempt = await self._streams.count_attempt(delivery)
            if attempt > SOLO_ATTEMPTS_MAX:
                await self._give_up(delivery)
            elif attempt:
                # Counted before it is tried, since the event may kill the process; an outage is not its fault.
                self._on_trial = delivery
                await self._learn([delivery])
                self._on_trial = None

    async def _learn(self, deliveries: list[Delivery]) -> None:
        finished = asyncio.Event()
        heartbeat = asyncio.create_task(self._keep(deliveries, finished))
        try:
            applied = await self._publisher.publish(self._partition, deliveries)
            if applied is not None:
                self._on_applied(self._partition, applied)
        except (StoreUnavailable, StoreReset):
            raise
        except Exception:
            # Left pending: taken over once stalled, then alone, so that one bad event cannot hold up its neighbours.
            log.exception("events not applied", partition=self._partition, events=len(deliveries))
        finally:
            finished.set()
            await heartbeat

    async def _keep(self, deliveries: list[Delivery], finished: asyncio.Event) -> None:
        """While a long fit is under way, keep others from taking its events for stalled."""
        entry_ids = [delivery.entry_id for delivery in deliveries]
        while True:
            try:
                async with asyncio.timeout(STALLED_AFTER_MS / 3_000):
                    await finished.wait()
                return
            except TimeoutError:
                pass
            try:
                await self._streams.keep(self._partition, self._name, entry_ids)
            except StoreError as error:
                log.warning("events may be taken over", partition=self._partition, error=str(error))

    async def _give_up(self, delivery: Delivery) -> None:
        reason = f"not applied after {SOLO_ATTEMPTS_MAX} attempts"
        log.warning("event buried", partition=self._partition, entry=delivery.entry_id, reason=reason)
        try:
            await self._streams.bury(delivery, self._name, reason)
        except FenceLost:
            log.info("event claimed elsewhere", partition=self._partition, entry=delivery.entry_id)
