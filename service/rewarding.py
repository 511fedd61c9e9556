"""From rewards as clients send them to events that will be learned."""

from __future__ import annotations

import asyncio
from typing import final

from service.breaker import StoreBreaker
from service.contracts import FeedbackOutcome, Rejection, RewardCommand
from service.metrics import NamespaceMetrics
from service.records import reward_event
from service.serving import ServingRoom
from service.settings import Settings
from store.decisions import DecisionStore
from store.events import Enqueued, EventStream, RewardEvent
from store.failpoints import reach
from store.users import UserStore


@final
class RewardDesk:
    """Takes the rewards of one namespace."""

    def __init__(
        self,
        settings: Settings,
        breaker: StoreBreaker,
        users: UserStore,
        decisions: DecisionStore,
        events: EventStream,
        room: ServingRoom,
        metrics: NamespaceMetrics,
    ) -> None:
        self._settings = settings
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._events = events
        self._room = room
        self._metrics = metrics

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them."""
        ids = list(dict.fromkeys(command.decision_id for command in commands))
        decisions = await self._breaker.call(lambda: asyncio.gather(*map(self._decisions.get, ids)))
        found = dict(zip(ids, decisions, strict=True))
        events: dict[int, RewardEvent] = {}
        rejected: dict[int, Rejection] = {}
        for index, command in enumerate(commands):
            outcome = reward_event(command, found[command.decision_id], index)
            if isinstance(outcome, Rejection):
                rejected[index] = outcome
            else:
                events[index] = outcome
        reach("server-before-enqueue")
        answers = await self._breaker.call(lambda: self._events.enqueue(list(events.values()))) if events else []
        reach("server-after-enqueue")
        stored = dict(zip(events, answers, strict=True))
        for index, entry in stored.items():
            if entry.status == "void":
                rejected[index] = Rejection(index, "user-reset", "the user began anew since: the reward has no effect")
            elif entry.status == "accepted":
                self._metrics.reward.observe(events[index].reward)
        applied: bool | None = None
        if wait_applied:
            waits = [self._wait(events[index], entry) for index, entry in stored.items() if index not in rejected]
            applied = bool(waits) and all(await asyncio.gather(*waits))
        accepted = sum(entry.status == "accepted" for entry in answers)
        duplicates = sum(entry.status == "duplicate" for entry in answers)
        return FeedbackOutcome(accepted, duplicates, tuple(rejected[index] for index in sorted(rejected)), applied)

    async def _wait(self, event: RewardEvent, entry: Enqueued) -> bool:
        """Whether a stored event is served within the time limit."""
        if self._room.serving is None:
            return False
        replica = self._room.serving.replica
        known = entry.status == "accepted" or replica.saw(entry.partition, entry.entry_id)
        if not known and not await self._breaker.call(lambda: self._events.exists(entry.partition, entry.entry_id)):
            # Finished before this process was told of it, perhaps before it was started.
            states = await self._breaker.call(lambda: self._users.load([event.user_id]))
            await replica.take(states.values())
            began_anew = event.user_id in states and states[event.user_id].incarnation != event.incarnation
            return not began_anew and not await self._breaker.call(
                lambda: self._events.buried(entry.partition, entry.entry_id)
            )
        return await replica.wait_applied(entry.partition, entry.entry_id, self._settings.wait_applied_timeout_s)
