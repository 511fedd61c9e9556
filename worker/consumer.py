"""Reading events: new ones in batches, stalled ones alone, hopeless ones to the dead letters.

Whoever takes a partition over first inherits what its last reader left unfinished, each event alone: one of them may
have been the reader's end. An event that was tried alone before waits until it counts as stalled, so that its
neighbours and new events get their turn between two deaths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

import structlog

from store.errors import FenceLost, StoreReset, StoreUnavailable
from store.events import Delivery, EventStream
from store.failpoints import reach
from worker.publisher import Publisher

#: Events taken in one read.
BATCH_EVENTS = 64
#: Longest wait for new events; also how long a stop may take when idle.
READ_BLOCK_MS = 500
#: An event whose consumer has not finished it for this long is taken over.
STALLED_AFTER_MS = 2_000
#: How often a partition is searched for stalled events, and how many are taken in one go.
CLAIM_EVERY_S = 1.0
CLAIM_EVENTS = 64
#: Events inherited from the last reader; any others are found once they are stalled.
INHERITED_EVENTS = 256
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
        next_claim, inherited = 0.0, False
        while not self._stopping.is_set():
            try:
                await self._forgive()
                if not inherited:
                    await self._inherit()
                    inherited = True
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
        with suppress(StoreUnavailable):
            await self._forgive()

    async def _forgive(self) -> None:
        """An event that was on trial when the store went away is not to blame for it."""
        if self._on_trial is not None:
            await self._streams.forgive_attempt(self._on_trial, self._name)
            self._on_trial = None

    async def _inherit(self) -> None:
        """Finish what earlier readers of the partition left, without waiting until it is stalled."""
        left = await self._streams.claim_stalled(self._partition, self._name, min_idle_ms=0, count=INHERITED_EVENTS)
        attempts = await self._streams.attempts(self._partition, [delivery.entry_id for delivery in left])
        await self._try_alone([delivery for delivery, tried in zip(left, attempts, strict=True) if not tried])

    async def _take_over(self) -> None:
        await self._try_alone(
            await self._streams.claim_stalled(
                self._partition, self._name, min_idle_ms=STALLED_AFTER_MS, count=CLAIM_EVENTS
            )
        )

    async def _try_alone(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            # All of them, even when told to stop meanwhile: what was claimed and left would wait once more.
            attempt = await self._streams.count_attempt(delivery, self._name)
            if attempt > SOLO_ATTEMPTS_MAX:
                await self._give_up(delivery)
            elif attempt:
                # Counted before it is tried, since the event may kill the process; an outage is not its fault.
                self._on_trial = delivery
                await self._learn([delivery])
                self._on_trial = None

    async def _learn(self, deliveries: list[Delivery]) -> None:
        try:
            applied = await self._publisher.publish(self._partition, deliveries)
            if applied is not None:
                self._on_applied(self._partition, applied)
        except (StoreUnavailable, StoreReset):
            raise
        except Exception:
            # Left pending: taken over once stalled, then alone, so that one bad event cannot hold up its neighbours.
            log.exception("events not applied", partition=self._partition, events=len(deliveries))

    async def _give_up(self, delivery: Delivery) -> None:
        reason = f"not applied after {SOLO_ATTEMPTS_MAX} attempts"
        log.warning("event buried", partition=self._partition, entry=delivery.entry_id, reason=reason)
        try:
            await self._streams.bury(delivery, self._name, reason)
        except FenceLost:
            log.info("event claimed elsewhere", partition=self._partition, entry=delivery.entry_id)
