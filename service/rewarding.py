"""From rewards as clients send them to events that will be learned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import final

import structlog

from service.breaker import StoreBreaker
from service.contracts import FeedbackOutcome, Rejection, RewardCommand
from service.errors import InvalidInput
from service.live import LiveSettings
from service.metrics import NamespaceMetrics
from service.records import now_ms, reward_event
from service.serving import ServingRoom
from service.settings import Settings
from store.awaiting import Awaited, AwaitingStore
from store.connection import Confirmation, ServerInfo
from store.decisions import Decision, DecisionStore
from store.errors import StoreError
from store.events import Enqueued, EventStream, RewardEvent
from store.failpoints import reach
from store.users import UserStore

log = structlog.get_logger()


@final
class RewardDesk:
    """Takes the rewards of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        breaker: StoreBreaker,
        users: UserStore,
        decisions: DecisionStore,
        events: EventStream,
        awaiting: AwaitingStore,
        room: ServingRoom,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._awaiting = awaiting
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._events = events
        self._room = room
        self._metrics = metrics

    async def feedback(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, until the served parameters have them.

        InvalidInput, with nothing stored, when one lies outside of the namespace's range.
        """
        rules = self._live.rules
        allowed = rules.range
        for command in commands:
            if not allowed.takes(command.reward):
                raise InvalidInput(
                    (*command.path, "reward"), f"must lie between {allowed.least:g} and {allowed.greatest:g}"
                )
        window_ms = self._live.settings.reward_window_s * 1_000
        ids = list(dict.fromkeys(command.decision_id for command in commands))
        decisions = await self._breaker.call(lambda: asyncio.gather(*map(self._decisions.get, ids)))
        found = dict(zip(ids, decisions, strict=True))
        events: dict[int, RewardEvent] = {}
        rejected: dict[int, Rejection] = {}
        for index, command in enumerate(commands):
            outcome = reward_event(command, found[command.decision_id], index, rules, window_ms)
            if isinstance(outcome, Rejection):
                rejected[index] = outcome
            else:
                events[index] = outcome
        if wait_applied and events:
            # Before they are stored: a replica that begins to follow later may miss that they were applied.
            await self._breaker.call(self._room.opened)
        reach("server-before-enqueue")
        answers = await self._breaker.call(lambda: self._events.enqueue(list(events.values()))) if events else []
        reach("server-after-enqueue")
        stored = dict(zip(events, answers, strict=True))
        for index, entry in stored.items():
            if entry.status == "void":
                rejected[index] = Rejection(index, "user-reset", "the user began anew since: the reward has no effect")
            elif entry.status == "accepted":
                self._metrics.reward.observe(events[index].reward)
        if rules.default_reward is not None:
            await self._settle((events[index] for index, entry in stored.items() if entry.status == "accepted"), found)
        late = [found[commands[index].decision_id] for index, each in rejected.items() if each.code == "late"]
        await self._note_late([decision for decision in late if decision is not None], window_ms)
        applied: bool | None = None
        if wait_applied:
            waits = [self._wait(events[index], entry) for index, entry in stored.items() if index not in rejected]
            applied = bool(waits) and all(await asyncio.gather(*waits))
        accepted = sum(entry.status == "accepted" for entry in answers)
        duplicates = sum(entry.status == "duplicate" for entry in answers)
        return FeedbackOutcome(accepted, duplicates, tuple(rejected[index] for index in sorted(rejected)), applied)

    async def _settle(self, events: Iterable[RewardEvent], found: Mapping[str, Decision | None]) -> None:
        """Have arms that got their reward wait for none any more.

        Where that fails a worker sees to it, or makes a default reward that counts for nothing beside the true one.
        """
        awaited = []
        for event in events:
            decision = found[event.decision_id]
            awaited += [
                Awaited(event.decision_id, item.rank)
                for item in (decision.items if decision else ())
                if item.arm_id == event.arm_id
            ]
        try:
            await self._breaker.call(lambda: self._awaiting.settle_all(awaited))
        except StoreError as error:
            log.warning("rewards are still awaited", rewards=len(awaited), error=str(error))

    async def _note_late(self, decisions: list[Decision], window_ms: int) -> None:
        """Count and log rewards that came too late, each as often as it is sent; no answer fails for that."""
        if not decisions:
            return
        for decision in decisions:
            late_s = (now_ms() - decision.open_until_ms(window_ms)) / 1_000
            log.info("late reward", decision=decision.decision_id, late_s=round(late_s, 3))
        try:
            await self._breaker.call(lambda: self._users.count_late(decision.user_id for decision in decisions))
        except StoreError as error:
            log.warning("late rewards not counted", rewards=len(decisions), error=str(error))

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
        return await replica.wait_applied(entry.partition, entry.entry_id, self._live.settings.wait_applied_timeout_s)


def confirmation(settings: Settings, info: ServerInfo) -> Confirmation | None:
    """What an enqueued reward waits for before it is acknowledged."""
    if settings.durability != "replicated":
        return None
    if info.replicas < settings.replicas:
        log.warning("too few replicas", wanted=settings.replicas, connected=info.replicas, effect="503 to feedback")
    return Confirmation(settings.replicas, settings.replica_wait_ms, on_disk=info.aof)
