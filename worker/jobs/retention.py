"""Retention: forgets users who were not seen for the time that the setting `user_retention_days` allows.

Seen means that a decision for the user was stored; the store keeps the day of the latest one. Each worker does this for
the partitions it consumes. Two workers on one partition do no harm: the script that forgets a user compares the day.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

import structlog

from metaban.store.decisions.decisions import DecisionStore
from metaban.store.errors import StoreUnavailable
from metaban.store.events.stream import EventStream
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.transfer import TransferStore
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.users import UserStore
from metaban.worker.jobs.leased_job import run_periodically
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.outages import store_failed

#: How often partitions are checked.
TICK_S: Final = 10.0

#: Users of one partition forgotten at once.
EXPIRED_TAKEN: Final = 64

DAY_S: Final = 86_400

log = structlog.get_logger()


@final
class Retention:
    """Forgets unseen users while the setting is on."""

    def __init__(
        self,
        users: UserStore,
        streams: EventStream,
        decisions: DecisionStore,
        remnants: RemnantStore,
        shared: Sequence[EpochStore | FusionStore | TransferStore],
        model: NamespaceModel,
        stopping: asyncio.Event,
        *,
        days: int,
        partitions: Callable[[], Iterable[int]],
    ) -> None:
        """`shared` names users too; `days` counts unless the namespace has its own setting.

        `partitions` returns the partitions this worker consumes now.
        """
        self._users = users
        self._streams = streams
        self._decisions = decisions
        self._remnants = remnants
        self._shared = shared
        self._model = model
        self._stopping = stopping
        self._days = days
        self._partitions = partitions
        #: Partition → position among its users, who are all visited again and again, a page at each tick.
        self._cursors: dict[int, str] = {}

    async def run(self) -> None:
        """Check the partitions until asked to stop."""
        await run_periodically(
            lambda: self.tick(int(time.time()) // DAY_S), self._stopping, TICK_S, failure_event="retention_failed"
        )

    async def tick(self, today: int) -> None:
        """Forget a page of unseen users of each partition; `today` counts days from 1970."""
        days = self._model.record.overrides.get("user_retention_days", self._days)
        for partition in sorted(self._partitions()) if days else ():
            try:
                # The day of the decision and today do not count: between them lie `days` whole days.
                await self._expire(partition, today, today - days - 1)
            except StoreUnavailable as error:
                # One server of a cluster may be away, the others not.
                store_failed(error)

    async def _expire(self, partition: int, today: int, last_day: int) -> None:
        cursor = self._cursors.get(partition, "0")
        self._cursors[partition] = await self._users.mark_unknown(partition, cursor, today)
        oldest_ms = await self._streams.oldest_ms(partition)
        if oldest_ms is not None and oldest_ms // (1_000 * DAY_S) < today:
            # Workers were away. A reward of someone unseen since may wait, and forgetting would make it void.
            return
        unseen = await self._users.unseen(partition, last_day, count=EXPIRED_TAKEN)
        # Someone who has been seen meanwhile is kept.
        expired = await self._users.expire(unseen, last_day) if unseen else {}
        if not expired:
            return
        for user_id, incarnation in expired.items():
            await self._decisions.forget_of(user_id, incarnation)
        await self._remnants.delete_letters(partition, expired)
        for store in self._shared:
            await store.strike(expired)
        log.info("users_expired", partition=partition, users=len(expired))
