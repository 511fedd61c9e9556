"""POST /feedback without HTTP: turns rewards into events and enqueues them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import final

import structlog

from metaban.service.engine.commands import FeedbackOutcome, RejectedReward, RewardCommand
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.engine.waiting import waiting
from metaban.service.errors import InvalidInput
from metaban.service.settings.environment import WAITAOF_ADVICE, Settings, SettingsError
from metaban.service.settings.namespace import LiveSettings
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.client.connection import ServerInfo, Store, waitaof_refusal
from metaban.store.client.node import Confirmation
from metaban.store.codec import now_ms
from metaban.store.decisions.decisions import BASELINE, DecisionRecord, DecisionStore
from metaban.store.errors import StoreError
from metaban.store.events.event import RewardEvent, plain_event_id
from metaban.store.events.stream import ARM_REWARDS_MAX, Enqueued, EventStream
from metaban.store.failpoints import reach
from metaban.store.reward_rules import RewardRange
from metaban.store.users.users import UserStore

log = structlog.get_logger()


@final
class Feedback:
    """Takes the rewards of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        guard: StoreGuard,
        users: UserStore,
        decisions: DecisionStore,
        events: EventStream,
        host: ModelHost,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._guard = guard
        self._users = users
        self._decisions = decisions
        self._events = events
        self._host = host
        self._metrics = metrics
        self._log = log.bind(namespace=metrics.namespace)
        #: Rewards accepted by this process; the latest of them, scaled to 0..1, and how many in a row are equal to it.
        self.accepted = 0
        self.latest = 0.0
        self.equal = 0

    async def accept(self, commands: list[RewardCommand], *, wait_applied: bool) -> FeedbackOutcome:
        """Enqueue rewards for learning; with `wait_applied`, return when the served parameters include them.

        InvalidInput, with nothing stored, when one is outside of the namespace's range.
        """
        rules = self._live.rules
        allowed = rules.range
        ids: dict[str, None] = {}
        for command in commands:
            if not allowed.takes(command.reward):
                raise InvalidInput(
                    (*command.path, "reward"), f"must lie between {allowed.least:g} and {allowed.greatest:g}"
                )
            ids[command.decision_id] = None
        window_ms = round(rules.window_s * 1_000)
        decisions = await self._guard.call(lambda: self._decisions.load(ids))
        events: dict[int, RewardEvent] = {}
        rejected: dict[int, RejectedReward] = {}
        for index, command in enumerate(commands):
            decision = decisions.get(command.decision_id)
            if decision is None:
                detail = f"no such decision in namespace {self._metrics.namespace}, or it is not kept any more"
                rejected[index] = RejectedReward(index, "unknown-decision", detail)
                continue
            outcome = reward_event(command, decision, index, allowed, window_ms)
            if isinstance(outcome, RejectedReward):
                rejected[index] = outcome
            else:
                events[index] = outcome
        if wait_applied and events:
            # Before they are stored: a replica that starts to follow later may miss that they were applied.
            await self._guard.call(self._host.open_serving)
        reach("server-before-enqueue")
        entries = await self._guard.call(partial(self._events.enqueue, list(events.values()))) if events else []
        reach("server-after-enqueue")
        accepted = 0
        stored: list[tuple[RewardEvent, Enqueued]] = []
        for index, entry in zip(events, entries, strict=True):
            if entry.status == "void":
                detail = "the user was forgotten or restored after the decision: the reward has no effect"
                rejected[index] = RejectedReward(index, "user-reset", detail)
                continue
            if entry.status == "too-many":
                detail = (
                    f"the arm has {ARM_REWARDS_MAX:,} rewards with event ids of their own from this decision: add "
                    "rewards up before you send them"
                )
                rejected[index] = RejectedReward(index, "too-many-rewards", detail)
                continue
            if entry.status == "accepted":
                accepted += 1
                reward = events[index].reward
                self._metrics.reward.observe(reward)
                self.equal = self.equal + 1 if reward == self.latest else 1
                self.latest = reward
            stored.append((events[index], entry))
        self.accepted += accepted
        if rejected:
            await self._count_late(commands, rejected, decisions, window_ms)
        applied: bool | None = None
        if wait_applied:
            with waiting(self._live.settings.wait_applied_timeout_s) as timeout_s:
                waits = [self._wait(event, entry, timeout_s) for event, entry in stored]
                applied = bool(waits) and all(await asyncio.gather(*waits))
        refused = tuple(rejected[index] for index in sorted(rejected)) if rejected else ()
        return FeedbackOutcome(accepted, len(stored) - accepted, refused, applied)

    async def _count_late(
        self,
        commands: list[RewardCommand],
        rejected: Mapping[int, RejectedReward],
        decisions: Mapping[str, DecisionRecord],
        window_ms: int,
    ) -> None:
        """Count and log late rewards; a failure does not fail the request."""
        late = [decisions[commands[index].decision_id] for index, each in rejected.items() if each.code == "late"]
        if not late:
            return
        longest_s = (now_ms() - min(decision.open_until_ms(window_ms) for decision in late)) / 1_000
        self._log.info("rewards_late", rewards=len(late), longest_s=round(longest_s, 3))
        try:
            await self._guard.call(lambda: self._users.count_late([decision.user_id for decision in late]))
        except StoreError as error:
            self._log.warning("late_rewards_not_counted", rewards=len(late), error=str(error))

    async def _wait(self, event: RewardEvent, entry: Enqueued, timeout_s: float) -> bool:
        """Whether a stored event is in the served parameters within the time limit."""
        if self._host.serving is None:
            return False
        replica = self._host.serving.replica
        known = entry.status == "accepted" or replica.saw(entry.partition, entry.entry_id)
        if not known and not await self._guard.call(lambda: self._events.exists(entry.partition, entry.entry_id)):
            # It left the stream before this process saw it applied, perhaps before the process started.
            states = await self._guard.call(lambda: self._users.load([event.user_id]))
            await self._guard.call(lambda: replica.put(states.values()))
            was_reset = event.user_id in states and states[event.user_id].incarnation != event.incarnation
            return not was_reset and not await self._guard.call(
                lambda: self._events.letters.holds(entry.partition, entry.entry_id)
            )
        return await replica.wait_applied(entry.partition, entry.entry_id, timeout_s)


def reward_event(
    command: RewardCommand, decision: DecisionRecord, index: int, allowed: RewardRange, window_ms: int
) -> RewardEvent | RejectedReward:
    """The event of a reward, or why it is not learned; a decision takes rewards for `window_ms`."""
    arm_id, place = command.arm_id, None
    if arm_id is None:
        if len(decision.items) > 1:
            return RejectedReward(
                index, "arm-required", f"the decision chose {len(decision.items)} arms: name one in arm_id"
            )
        arm_id = decision.items[0].arm_id
    for number, item in enumerate(decision.items):
        if item.arm_id == arm_id:
            place = number
    if place is None:
        return RejectedReward(index, "unknown-arm", "the decision did not choose this arm")
    if decision.policy == BASELINE:
        return RejectedReward(index, "not-learned", "the decision is of the baseline, and nothing is learned from it")
    received_ms = now_ms()
    if received_ms > decision.open_until_ms(window_ms):
        return RejectedReward(index, "late", "the reward window is over: the reward is counted as late and not learned")
    if not decision.active:
        return RejectedReward(
            index, "not-activated", "the decision is deferred: activate it, then send the reward again"
        )
    return RewardEvent.of(
        decision,
        place,
        command.reward,
        allowed,
        event_id=command.event_id or plain_event_id(decision.decision_id, arm_id),
        received_ms=received_ms,
    )


async def confirmation(settings: Settings, redis: Store, info: ServerInfo) -> Confirmation | None:
    """What an enqueued reward waits for before it is acknowledged; SettingsError if the server cannot confirm it."""
    if settings.durability != "replicated":
        return None
    if info.aof and (refusal := await waitaof_refusal(redis)):
        raise SettingsError(f"METABAN_DURABILITY: {refusal}\n{WAITAOF_ADVICE}")
    if info.replicas < settings.replicas:
        log.warning(
            "replicas_missing",
            namespace=settings.namespace,
            wanted=settings.replicas,
            connected=info.replicas,
            effect="POST /feedback answers 503",
        )
    return Confirmation(settings.replicas, settings.replica_wait_ms, on_disk=info.aof)
