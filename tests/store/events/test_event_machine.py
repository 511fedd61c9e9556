"""Random orders of enqueue, delivery, crash, takeover, apply, dead letter, replay and forget, against a model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metaban.store.errors import BacklogFull, FenceLost
from metaban.store.events.event import Delivery, RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import LEARNERS
from metaban.store.namespaces import NamespaceStore
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import UserStore
from tests.cluster_driver import open_store

USERS = ("ann", "bob", "cid")
CONSUMERS = ("one", "two", "three")
BACKLOG_LIMIT = 12
INPUT = np.ones(1, np.float32)
#: More than any run applies, so that every effect stays visible.
SAMPLES_KEPT = 500
Result = TypeVar("Result")


class EventPath(RuleBasedStateMachine):
    """One partition, three users, three consumers that crash and stall at random."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.redis = open_store(url)
        # The model: the fate of every acknowledged event id.
        self.entry_of: dict[tuple[str, str], str] = {}
        self.waiting: dict[str, tuple[str, str]] = {}
        self.owner: dict[str, str] = {}
        self.applied: dict[str, list[str]] = {user: [] for user in USERS}
        self.incarnation = dict.fromkeys(USERS, 0)
        self.incarnation_of: dict[tuple[str, str], int] = {}
        self.buried: dict[str, tuple[str, str]] = {}
        self.ever = dict.fromkeys(("applied", "voided", "buried", "replayed", "forgotten"), 0)
        #: Entries each consumer believes to hold; this may be out of date.
        self.hands: dict[str, list[Delivery]] = {consumer: [] for consumer in CONSUMERS}
        #: Computed batches not written yet: those of a stalled consumer are written late.
        self.computed: list[tuple[str, list[Delivery], list[UserUpdate]]] = []

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run(work)

    @initialize()
    def open(self) -> None:
        self.run(self._open())

    async def _open(self) -> None:
        await self.redis.flushall()
        record = await NamespaceStore(self.redis).open_or_create("shop", partitions=1, seed=0, learner={})
        self.keys = record.keys
        self.stream = EventStream(self.redis, record.keys, dedupe_window_s=600, backlog_limit=BACKLOG_LIMIT)
        self.users = UserStore(self.redis, record.keys, record.store_id, samples_kept=SAMPLES_KEPT)

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.loop.close()

    @precondition(lambda self: len(self.waiting) < BACKLOG_LIMIT or not self.computed)
    @rule(
        batch=st.lists(st.tuples(st.sampled_from(USERS), st.integers(0, 30)), min_size=1, max_size=4),
        late=st.integers(0, 3),
    )
    def enqueue(self, batch: list[tuple[str, int]], late: int) -> None:
        """New and repeated events, also twice in one batch; refused as a whole when there is no room.

        `late`: decided for the previous incarnation, if there is one.
        """
        ids = [(user, f"e{number}") for user, number in batch]
        decided = {user: max(0, self.incarnation[user] - (late == 0)) for user in USERS}
        events = [
            RewardEvent(
                event,
                "d",
                user,
                f"{user}/{event}",
                np.ones(1, np.float32),
                0.5,
                1.0,
                0,
                0,
                0,
                incarnation=decided[user],
            )
            for user, event in ids
        ]
        stale = {user for user in USERS if decided[user] < self.incarnation[user]}
        fresh = {each for each in ids if each not in self.entry_of and each[0] not in stale}
        try:
            answers = self.run(self.stream.enqueue(events))
        except BacklogFull:
            assert fresh
            assert len(self.waiting) + len(fresh) > BACKLOG_LIMIT
            return
        assert not fresh or len(self.waiting) + len(fresh) <= BACKLOG_LIMIT
        for each, answer in zip(ids, answers, strict=True):
            if each in self.entry_of:
                assert (answer.status, answer.entry_id) == ("duplicate", self.entry_of[each])
            elif each[0] in stale:
                assert answer.status == "void"
            else:
                self.incarnation_of[each] = decided[each[0]]
                assert answer.status == "accepted"
                self.entry_of[each] = answer.entry_id
                self.waiting[answer.entry_id] = each

    @precondition(lambda self: len(self.owner) < len(self.waiting))
    @rule(consumer=st.sampled_from(CONSUMERS), count=st.integers(1, 5), batches=st.integers(0, 2))
    def deliver(self, consumer: str, count: int, batches: int) -> None:
        """Deliver new entries, oldest first; possibly compute at once, in one batch or two."""
        got = self.run(self.stream.read([0], consumer, count=count, block_ms=0))
        unread = [entry for entry in self.waiting if entry not in self.owner]
        assert [delivery.entry_id for delivery in got] == unread[:count]
        self._take(consumer, got)
        for number in range(batches):
            self._compute(consumer, got[number::batches])

    @precondition(lambda self: self.owner)
    @rule(consumer=st.sampled_from(CONSUMERS), count=st.integers(1, 9))
    def take_over(self, consumer: str, count: int) -> None:
        """Claim pending entries of any consumer; the idle time gives no protection."""
        got = self.run(self.stream.claim_stalled([0], consumer, min_idle_ms=0, count=count))
        assert {delivery.entry_id for delivery in got} <= self.owner.keys()
        assert len(got) == min(count, len(self.owner))
        self._take(consumer, got)

    def _take(self, consumer: str, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            assert delivery.event is not None
            each = self.waiting[delivery.entry_id]
            assert (delivery.event.user_id, delivery.event.event_id) == each
            self.owner[delivery.entry_id] = consumer
        known = {delivery.entry_id for delivery in deliveries}
        self.hands[consumer] = [held for held in self.hands[consumer] if held.entry_id not in known] + deliveries

    @precondition(lambda self: self.computed)
    @rule(consumer=st.sampled_from(CONSUMERS))
    def crash(self, consumer: str) -> None:
        """The consumer loses its entries; the store keeps them. A name is used once, so its computed batches are lost
        too."""
        self.hands[consumer] = []
        self.computed = [batch for batch in self.computed if batch[0] != consumer]

    @precondition(lambda self: any(self.hands.values()))
    @rule(place=st.integers(0, 2), held_back=st.integers(0, 2))
    def compute(self, place: int, held_back: int) -> None:
        """Load the users of the held entries and compute their next states, to be written later or never."""
        consumer = self._someone_with_something(place)
        self._compute(consumer, self.hands[consumer][held_back:] or self.hands[consumer])

    def _compute(self, consumer: str, held: list[Delivery]) -> None:
        if held:
            self.computed.append((consumer, held, self.run(self._updates(held))))
            self.hands[consumer] = [delivery for delivery in self.hands[consumer] if delivery not in held]

    def _someone_with_something(self, place: int) -> str:
        busy = [consumer for consumer in CONSUMERS if self.hands[consumer]]
        return busy[place % len(busy)]

    async def _updates(self, held: list[Delivery]) -> list[UserUpdate]:
        states = await self.users.load(USERS)
        standing = {
            user: (states[user].incarnation, states[user].version) if user in states else (0, 0) for user in USERS
        }
        events: dict[str, list[tuple[str, RewardEvent]]] = {}
        for delivery in held:
            event = delivery.event
            assert event is not None
            if event.incarnation == standing[event.user_id][0]:
                events.setdefault(event.user_id, []).append((delivery.entry_id, event))
        updates = []
        for user, theirs in events.items():
            incarnation, version = standing[user]
            tensors = {"n": np.array([version + len(theirs)])}
            state = UserState(user, incarnation, version + len(theirs), 0, tensors)
            samples, entries = [event.sample() for _, event in theirs], [entry for entry, _ in theirs]
            trail = states[user].trail if user in states else ""
            updates.append(UserUpdate(state, version, incarnation, samples, entries, trail))
        return updates

    @precondition(lambda self: self.computed)
    @rule(place=st.integers(0, 10), keep=st.booleans())
    def apply(self, place: int, keep: bool) -> None:
        """Write a computed batch, perhaps a second time (`keep`: its reply was lost): completely or not at all."""
        at = place % len(self.computed)
        consumer, held, updates = self.computed[at] if keep else self.computed.pop(at)
        ids = [delivery.entry_id for delivery in held]
        mine = all(self.owner.get(entry) == consumer for entry in ids)
        current = all(
            (update.expected_incarnation, update.expected_version)
            == (self.incarnation[update.state.user_id], len(self.applied[update.state.user_id]))
            for update in updates
        )
        refused: str | None = None
        try:
            self.run(self.users.apply(0, consumer, ids, updates))
        except FenceLost as lost:
            refused = lost.reason
        assert refused == (None if mine and current else "version" if mine else "not-pending")
        if refused:
            return
        for entry in ids:
            each = self.waiting.pop(entry)
            del self.owner[entry]
            if self.incarnation_of[each] == self.incarnation[each[0]]:
                self.applied[each[0]].append("/".join(each))
                self.ever["applied"] += 1
            else:
                self.ever["voided"] += 1

    @precondition(lambda self: any(self.hands.values()))
    @rule(place=st.integers(0, 2))
    def bury(self, place: int) -> None:
        """Turn one held event into a dead letter; only its current holder can."""
        consumer = self._someone_with_something(place)
        delivery = self.hands[consumer].pop()
        try:
            self.run(self.stream.letters.bury(delivery, consumer, "hopeless"))
        except FenceLost:
            assert self.owner.get(delivery.entry_id) != consumer
            return
        assert self.owner.pop(delivery.entry_id) == consumer
        each = self.waiting.pop(delivery.entry_id)
        if self.incarnation_of[each] < self.incarnation[each[0]]:
            self.ever["voided"] += 1  # no letter is kept of a forgotten user
            return
        self.buried[delivery.entry_id] = each
        self.ever["buried"] += 1

    @precondition(lambda self: self.buried)
    @rule(place=st.integers(0, 9), again=st.booleans())
    def replay(self, place: int, again: bool) -> None:
        """Replay a dead letter; a second replay finds none."""
        letters = {letter.entry_id: letter for letter in self.run(self.stream.letters.page(limit=99)).letters}
        assert letters.keys() == self.buried.keys()
        letter = letters[list(self.buried)[place % len(self.buried)]]
        try:
            outcome = self.run(self.stream.letters.replay(0, letter.letter_id))
        except BacklogFull:
            assert len(self.waiting) == BACKLOG_LIMIT
            return
        assert outcome.status == "replayed"
        each = self.buried.pop(letter.entry_id)
        self.waiting[outcome.detail] = each
        self.entry_of[each] = outcome.detail
        self.ever["replayed"] += 1
        if again:
            assert self.run(self.stream.letters.replay(0, letter.letter_id)).status == "unknown"

    @precondition(lambda self: self.ever["applied"])
    @rule(user=st.sampled_from(USERS))
    def forget(self, user: str) -> None:
        """The user's learned state and every effect of earlier decisions are gone."""
        self.incarnation[user] += 1
        assert self.run(self.users.forget(user)).incarnation == self.incarnation[user]
        self.ever["forgotten"] += len(self.applied[user])
        self.applied[user] = []

    @precondition(lambda self: self.computed)
    @rule()
    def lose_the_group(self) -> None:
        """No deliveries are pending any more, and all waiting entries are delivered again."""
        self.run(self.redis.xgroup_destroy(self.keys.events(0), LEARNERS))
        assert self.run(self.stream.pending(0)) == 0
        self.owner.clear()

    @invariant()
    def the_store_agrees(self) -> None:
        if hasattr(self, "stream"):
            self.run(self._agrees())

    async def _agrees(self) -> None:
        effects = {user: [sample.arm_id for sample in samples] for user, samples in (await self._samples()).items()}
        assert effects == {user: done for user, done in self.applied.items() if done}
        known = {user: (self.incarnation[user], len(self.applied[user])) for user in USERS}
        assert await self.users.versions(0) == {user: standing for user, standing in known.items() if any(standing)}
        counters = await self.users.counters()
        assert {name: counters[name] for name in self.ever} == self.ever
        assert counters["enqueued"] == len(self.entry_of)
        assert await self.stream.backlog() == len(self.waiting)
        ever = self.ever
        assert counters["enqueued"] + ever["replayed"] == ever["applied"] + ever["voided"] + ever["buried"] + len(
            self.waiting
        )
        assert await self.stream.pending(0) == len(self.owner)

    async def _samples(self) -> dict[str, list[Any]]:
        return dict(await self.users.load_samples(USERS))


def test_the_store_agrees_with_the_model_after_every_step(valkey_url: str) -> None:
    run_state_machine_as_test(
        lambda: EventPath(valkey_url),
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
