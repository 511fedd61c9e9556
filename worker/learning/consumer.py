"""Learns the events of a partition: new ones in batches, stalled ones alone; after too many attempts, dead letters.

A consumer that takes a partition over first processes the events its predecessor left pending, each alone, because one
of them may have killed the process. An event that was tried alone before waits until it is stalled, so that other
events are processed between two such crashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import final

import structlog

from metaban.store.errors import FenceLost, StoreReset, StoreUnavailable
from metaban.store.events.event import Delivery
from metaban.store.events.stream import EventStream
from metaban.store.failpoints import reach
from metaban.worker.learning.fit_batcher import FitAbandoned
from metaban.worker.learning.outages import store_failed
from metaban.worker.learning.publisher import Publisher
from metaban.worker.learning.reader import EventReader

#: Most events claimed at once from the predecessor; the others are claimed when they are stalled.
INHERITED_EVENTS = 256

#: Attempts on an event alone before it becomes a dead letter. Attempts in a batch do not count: another event of the
#: batch may be the cause.
SOLO_ATTEMPTS_MAX = 5

#: Pause after the store was unavailable.
UNAVAILABLE_PAUSE_S = 0.5

log = structlog.get_logger()


@final
class Consumer:
    """Has the events of one partition applied."""

    def __init__(
        self,
        partition: int,
        name: str,
        streams: EventStream,
        reader: EventReader,
        publisher: Publisher,
        stopping: asyncio.Event,
        *,
        on_applied: Callable[[int, int], None],
    ) -> None:
        self._partition = partition
        self._name = name
        self._streams = streams
        self._reader = reader
        self._publisher = publisher
        self._stopping = stopping
        self._on_applied = on_applied
        self._trying_alone: Delivery | None = None

    async def run(self) -> None:
        """Consume until asked to stop; the batch in progress is finished first, or left if its turn comes too late."""
        inherited = False
        while not self._stopping.is_set():
            try:
                await self._uncount_attempt()
                if not inherited:
                    await self._inherit()
                    inherited = True
                found = await self._reader.next(self._partition, self._stopping)
                await self._try_alone(found.stalled)
                if found.fresh:
                    reach("worker-after-read")
                    await self._learn(found.fresh)
            except StoreUnavailable as error:
                store_failed(error)
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            except FitAbandoned:
                # They stay pending for the worker that takes the partition over.
                log.info("events_left", partition=self._partition)
        with suppress(StoreUnavailable):
            await self._uncount_attempt()

    async def _uncount_attempt(self) -> None:
        """Take back the attempt that an outage of the store or a stop interrupted."""
        if self._trying_alone is not None:
            await self._streams.forgive_attempt(self._trying_alone, self._name)
            self._trying_alone = None

    async def _inherit(self) -> None:
        """Process pending events of earlier consumers at once, without waiting until they are stalled."""
        left = await self._streams.claim_stalled([self._partition], self._name, min_idle_ms=0, count=INHERITED_EVENTS)
        attempts = await self._streams.attempts(self._partition, [delivery.entry_id for delivery in left])
        await self._try_alone([delivery for delivery, tried in zip(left, attempts, strict=True) if not tried])

    async def _try_alone(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            # A stop does not end this loop: events claimed and left would have to become stalled again.
            attempt = await self._streams.count_attempt(delivery, self._name)
            if attempt > SOLO_ATTEMPTS_MAX:
                await self._give_up(delivery)
            elif attempt:
                # Counted before the attempt, because the event may kill the process.
                self._trying_alone = delivery
                await self._learn([delivery])
                self._trying_alone = None

    async def _learn(self, deliveries: list[Delivery]) -> None:
        try:
            applied = await self._publisher.publish(self._partition, deliveries)
            if applied is not None:
                self._on_applied(self._partition, applied)
        except (StoreUnavailable, StoreReset, FitAbandoned):
            raise
        except Exception:
            # They stay pending; once stalled each is tried alone, so that one bad event does not block the others.
            log.exception("events_failed", partition=self._partition, events=len(deliveries))

    async def _give_up(self, delivery: Delivery) -> None:
        reason = f"not applied after {SOLO_ATTEMPTS_MAX} attempts"
        log.warning("event_dead_lettered", partition=self._partition, entry=delivery.entry_id, reason=reason)
        try:
            await self._streams.letters.bury(delivery, self._name, reason)
        except FenceLost:
            log.info("event_claimed_elsewhere", partition=self._partition, entry=delivery.entry_id)
