"""Creates default rewards for decisions whose reward window is over.

Each worker does this for the partitions it consumes. Two workers on one partition, or a crash half way, do no harm: a
default reward is an event with its own id, and an id counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, final

import structlog

from metaban.store.decisions.decisions import BASELINE, DecisionStore
from metaban.store.decisions.default_rewards import AwaitedReward, AwaitedRewardStore
from metaban.store.errors import BacklogFull, StoreError, StoreReset, StoreUnavailable
from metaban.store.events.event import RewardEvent, default_event_id
from metaban.store.events.stream import EventStream
from metaban.store.failpoints import reach
from metaban.store.reward_rules import RewardRules
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.outages import store_failed
from metaban.worker.learning.pauses import QuietChecks, until_next

#: How often partitions are checked; more rarely while no decision is overdue.
CHECK_EVERY_S: Final = 1.0

#: Arms of one partition processed at once; few, because a decision may be large.
OVERDUE_TAKEN: Final = 64

log = structlog.get_logger()


@final
class DefaultRewards:
    """Creates default rewards when they are due."""

    def __init__(
        self,
        awaiting: AwaitedRewardStore,
        decisions: DecisionStore,
        streams: EventStream,
        model: NamespaceModel,
        stopping: asyncio.Event,
        *,
        partitions: Callable[[], Iterable[int]],
    ) -> None:
        """`partitions` returns the partitions this worker consumes now."""
        self._awaiting = awaiting
        self._decisions = decisions
        self._streams = streams
        self._model = model
        self._stopping = stopping
        self._partitions = partitions

    async def run(self) -> None:
        """Check the partitions until asked to stop."""
        checks = QuietChecks(CHECK_EVERY_S)
        while not self._stopping.is_set():
            if checks.due:
                due = await self._due()
                await asyncio.gather(*map(self._collect_all, due))
                checks.done(quiet=not due)
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next(CHECK_EVERY_S)):
                    await self._stopping.wait()

    async def _due(self) -> list[int]:
        """This worker's partitions with overdue decisions; all of its partitions when the store cannot tell."""
        partitions = sorted(self._partitions())
        try:
            return await self._awaiting.any_overdue(partitions, now_ms())
        except StoreError:
            return partitions  # one server of a cluster or one key may be broken, the others not

    async def _collect_all(self, partition: int) -> None:
        try:
            while not self._stopping.is_set() and await self.collect(partition) == OVERDUE_TAKEN:
                pass
        except StoreUnavailable as error:
            store_failed(error)
        except BacklogFull as error:
            log.warning("default_rewards_delayed", partition=partition, error=str(error))
        except StoreReset:
            raise
        except Exception:
            # Raising would also end the consumers, and learning does not need default rewards.
            log.exception("default_rewards_failed", partition=partition)

    async def collect(self, partition: int) -> int:
        """Create the default rewards of the arms that have waited longest; returns how many arms were processed."""
        members = await self._awaiting.overdue(partition, now_ms(), count=OVERDUE_TAKEN)
        if not members:
            return 0
        # The setting of now counts, not that of the decision.
        await self._model.refresh_record()
        rules = self._model.rules
        if (reward := rules.reward_of_silence) is not None:
            events = await self._events(members, rules, reward)
            if events:
                answers = await self._streams.enqueue(events)
                created = [answer for answer in answers if answer.status == "accepted"]
                await self._streams.count_defaults(created)
                log.info("default_rewards_created", partition=partition, rewards=len(created))
        reach("worker-before-settle")
        await self._awaiting.settle(partition, members)
        return len(members)

    async def _events(self, members: list[bytes], rules: RewardRules, reward: float) -> list[RewardEvent]:
        awaited = [each for each in map(AwaitedReward.decode, members) if each is not None]
        wanted = {each.decision_id for each in awaited}
        decisions = await self._decisions.load(wanted)
        if len(decisions) < len(wanted):
            log.warning("decisions_missing", decisions=len(wanted) - len(decisions))
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
        rewarded = await self._streams.rewarded((event.user_id, event.decision_id, event.arm_id) for event in events)
        return [event for event, known in zip(events, rewarded, strict=True) if not known]


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1_000)
