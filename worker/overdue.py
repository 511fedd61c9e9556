"""Rewards that did not come in time: decisions that have waited long enough are learned with the default reward.

Each worker looks after the partitions it reads. Two that look after the same one do no harm, nor does one that dies
half way: a default reward is an event like any other, under an id of its own, and an id counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, final

import structlog

from store.awaiting import Awaited, AwaitingStore
from store.decisions import BASELINE, DecisionStore
from store.errors import BacklogFull, StoreError, StoreReset, StoreUnavailable
from store.events import EventStream, RewardEvent
from store.failpoints import reach
from store.reward_rules import RewardRules
from store.rewards import default_event_id, plain_event_id
from worker.model import NamespaceModel

#: How often partitions are looked at.
LOOK_EVERY_S: Final = 1.0
#: Arms of one partition taken in one go; few, since a decision may be large.
OVERDUE_TAKEN: Final = 64

log = structlog.get_logger()


@final
class OverdueRewards:
    """Makes default rewards when they are due."""

    def __init__(
        self,
        awaiting: AwaitingStore,
        decisions: DecisionStore,
        streams: EventStream,
        model: NamespaceModel,
        stopping: asyncio.Event,
        *,
        partitions: Callable[[], Iterable[int]],
    ) -> None:
        """`partitions` tells which are this worker's, at the moment."""
        self._awaiting = awaiting
        self._decisions = decisions
        self._streams = streams
        self._model = model
        self._stopping = stopping
        self._partitions = partitions

    async def run(self) -> None:
        """Look after the partitions until asked to stop."""
        while not self._stopping.is_set():
            await asyncio.gather(*map(self._serve, await self._due()))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._stopping.wait()

    async def _due(self) -> list[int]:
        """Partitions of ours where something is overdue; all of them when not all could be asked."""
        partitions = sorted(self._partitions())
        try:
            return await self._awaiting.any_overdue(partitions, now_ms())
        except StoreError:
            return partitions  # one server of a cluster may be away, or one key damaged, and the others not

    async def _serve(self, partition: int) -> None:
        try:
            while not self._stopping.is_set() and await self.collect(partition) == OVERDUE_TAKEN:
                pass
        except (StoreUnavailable, BacklogFull) as error:
            log.warning("overdue rewards wait", partition=partition, error=str(error))
        except StoreReset:
            raise
        except Exception:
            # What came in time is learned all the same; the consumers would end with this task.
            log.exception("overdue rewards not made", partition=partition)

    async def collect(self, partition: int) -> int:
        """Make the default rewards of the arms that have waited longest; how many were looked at."""
        members = await self._awaiting.overdue(partition, now_ms(), count=OVERDUE_TAKEN)
        if not members:
            return 0
        # Whether there is a default reward is asked now: what was agreed on meanwhile counts, on or off.
        await self._model.refresh_record()
        rules = self._model.rules
        if rules.default_reward is not None:
            events = await self._events(members, rules, rules.default_reward)
            if events:
                answers = await self._streams.enqueue(events)
                made = sum(answer.status == "accepted" for answer in answers)
                log.info("default rewards made", partition=partition, rewards=made)
        reach("worker-before-settle")
        await self._awaiting.settle(partition, members)
        return len(members)

    async def _events(self, members: list[bytes], rules: RewardRules, reward: float) -> list[RewardEvent]:
        awaited = [each for each in map(Awaited.decode, members) if each is not None]
        wanted = {each.decision_id for each in awaited}
        decisions = await self._decisions.load(wanted)
        if len(decisions) < len(wanted):
            log.warning("overdue decisions are gone", decisions=len(wanted) - len(decisions))
        received_ms = now_ms()
        events = []
        for each in awaited:
            decision = decisions.get(each.decision_id)
            if decision is None or not decision.active or decision.policy == BASELINE:
                continue
            if not 1 <= each.rank <= len(decision.items):
                continue
            arm_id = decision.items[each.rank - 1].arm_id
            events.append(
                RewardEvent.of(
                    decision,
                    each.rank - 1,
                    reward,
                    rules.range,
                    event_id=default_event_id(each.decision_id, arm_id),
                    received_ms=received_ms,
                    by_default=True,
                )
            )
        came = await self._streams.seen(
            (event.user_id, plain_event_id(event.decision_id, event.arm_id)) for event in events
        )
        return [event for event, seen in zip(events, came, strict=True) if not seen]


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1_000)
