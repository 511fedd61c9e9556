"""Event streams, one per partition, read by one consumer group; and their status.

An event is stored once per event id within the dedupe window, unless its user has a new incarnation since the decision.
It stays in the stream until `UserStore.apply` or `DeadLetterStore.bury` removes it, and is delivered again if its
consumer stalls. Streams are never trimmed, since that would drop unread events: if the backlog is full, new events are
refused.

The status of a partition, except its owner, is read by one script, so that its numbers add up:

    enqueued + replayed = applied + voided + buried + waiting
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, TypeAlias, final

from metaban.store.client.connection import (
    Store,
    as_int,
    as_text,
    block_arguments,
    command,
    entries_by_key,
    parse_entries,
    pipeline,
    pipeline_with_errors,
    reads_together,
    refusal_code,
)
from metaban.store.client.node import Argument, Command, Confirmation
from metaban.store.client.scripts import ScriptCall, load_script
from metaban.store.errors import BacklogFull, CorruptRecord, StoreError, StoreReset, raise_translated
from metaban.store.events.dead_letters import RETRY_AFTER_S, DeadLetterStore
from metaban.store.events.event import Delivery, RewardEvent, plain_event_id
from metaban.store.keys import LEARNERS, NamespaceKeys


@final
@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Status of one partition at one moment."""

    partition: int
    #: Events not applied yet, whether delivered or not.
    waiting: int
    #: Events delivered to a consumer and not finished.
    pending: int
    consumers: int
    #: Token of the worker that holds its lease.
    owner: str | None
    #: Milliseconds since the oldest waiting event was stored; None if none waits.
    oldest_age_ms: int | None
    dead_letters: int
    counters: dict[str, int]


#: Most rewards with event ids of their own for one arm of one decision.
ARM_REWARDS_MAX: Final = 1_000

EnqueueStatus: TypeAlias = Literal["accepted", "duplicate", "void", "too-many"]

#: Statuses by the numbers that the enqueue script replies.
STATUSES: Final[tuple[EnqueueStatus, ...]] = ("duplicate", "accepted", "void", "too-many")


@final
@dataclass(frozen=True, slots=True)
class Enqueued:
    """Result for one event; a duplicate has the entry id of the first one.

    A void event belongs to another incarnation of its user; with `too-many`, its arm had ARM_REWARDS_MAX rewards in
    its decision. Neither was stored nor has an entry id.
    """

    status: EnqueueStatus
    partition: int
    entry_id: str


@final
class EventStream:
    """Event streams of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        *,
        dedupe_window_s: float,
        backlog_limit: int,
        confirm: Confirmation | None = None,
    ) -> None:
        """`backlog_limit` is the most events that may wait in one partition. With `confirm`, an event counts as
        enqueued once the replicas have it."""
        if backlog_limit <= 0:
            raise ValueError("the backlog limit must be positive")
        self._redis = redis
        self._keys = keys
        self._limit = backlog_limit
        self._confirm = confirm
        self._enqueue = load_script(redis, "enqueue")
        self._attempt = load_script(redis, "attempt")
        self._release = load_script(redis, "release")
        self._status = load_script(redis, "status")
        self._owners = load_script(redis, "owners")
        #: Events that could not be applied.
        self.letters = DeadLetterStore(redis, keys, backlog_limit=backlog_limit)
        self.set_dedupe_window(dedupe_window_s)

    def set_dedupe_window(self, dedupe_window_s: float) -> None:
        """Change how long the ids of events that are stored from now on are remembered."""
        if dedupe_window_s <= 0:
            raise ValueError("the dedupe window must be positive")
        self._window_ms = self.letters.window_ms = max(1, round(dedupe_window_s * 1_000))

    async def enqueue(self, events: Sequence[RewardEvent]) -> list[Enqueued]:
        """Store events, each event id of a user once. Returns the results in order.

        Raises BacklogFull if a partition has no room for its share of the batch, and NotReplicated if replicas do not
        confirm in time. Some events may be stored then. Sending the whole batch again is safe: those are answered
        `duplicate`, after their replicas confirmed too.
        """
        shares: dict[int, list[int]] = {}
        calls: dict[int, tuple[list[str], list[Argument]]] = {}
        for index, event in enumerate(events):
            partition = self._keys.partition_of(event.user_id)
            shares.setdefault(partition, []).append(index)
            fields = event.encode()
            if partition not in calls:
                calls[partition] = self._enqueue_call(partition, len(fields))
            keys, arguments = calls[partition]
            seen = self._keys.seen(event.user_id, event.event_id)
            plain = plain_event_id(event.decision_id, event.arm_id)
            # An arm of a decision has one reward without an id of its own, and one default reward.
            single = event.by_default or event.event_id == plain
            keys += [seen, seen if single else self._keys.rewarded(event.user_id, plain)]
            arguments += [event.user_id, event.incarnation, *chain.from_iterable(fields.items())]
        replies = await self._enqueue.call_many(calls.values(), confirm=self._confirm)
        for (partition, indices), (status, *rest) in zip(shares.items(), replies, strict=True):
            if status == b"reset":
                raise StoreReset(f"partition {partition} of {self._keys.namespace} lost its marker")
            if status == b"full":
                raise BacklogFull(
                    f"{as_int(rest[0])} events wait in partition {partition}: {len(indices)} more would "
                    f"exceed the limit of {self._limit}",
                    retry_after_s=RETRY_AFTER_S,
                )
        answers: dict[int, Enqueued] = {}
        for (partition, indices), (_, *rest) in zip(shares.items(), replies, strict=True):
            for index, status, entry_id in zip(indices, rest[0::2], rest[1::2], strict=True):
                answers[index] = Enqueued(STATUSES[status], partition, as_text(entry_id))
        return [answers[index] for index in range(len(events))]

    def _enqueue_call(self, partition: int, event_fields: int) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of the script for one partition, before those of the events."""
        keys = [
            self._keys.marker(partition),
            self._keys.events(partition),
            self._keys.counters(partition),
            self._keys.versions(partition),
        ]
        always_write = int(self._confirm is not None)
        return keys, [self._limit, self._window_ms, always_write, ARM_REWARDS_MAX, 2 * event_fields]

    @property
    def reads_together(self) -> bool:
        """Whether `read` takes several partitions."""
        return reads_together(self._redis)

    async def read(self, partitions: Sequence[int], consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        """Entries not delivered to any consumer yet, at most `count` of each partition.

        Waits at most `block_ms`, and less than the socket time-out.
        """
        streams = {self._keys.events(partition): partition for partition in partitions}
        wait = block_arguments(self._redis, block_ms)
        arguments = ("GROUP", LEARNERS, consumer, "COUNT", count, *wait, "STREAMS", *streams, *(">" for _ in streams))
        for _ in range(2):
            try:
                reply = await command(self._redis, "XREADGROUP", *arguments)
            except StoreError as error:
                await self._recreate_groups(partitions, error)
            else:
                return [
                    _delivery(streams[key], entry_id, fields)
                    for key, entries in entries_by_key(reply).items()
                    for entry_id, fields in entries
                ]
        return []  # the groups were destroyed twice; they exist for the next read

    async def claim_stalled(
        self, partitions: Sequence[int], consumer: str, *, min_idle_ms: int, count: int
    ) -> list[Delivery]:
        """Claim entries that their consumer has not finished for `min_idle_ms`, at most `count` of each partition."""
        claimed: list[Delivery] = []
        cursors, wanted = dict.fromkeys(partitions, "0-0"), dict.fromkeys(partitions, count)
        while cursors:
            replies = await pipeline_with_errors(
                self._redis,
                [
                    (
                        "XAUTOCLAIM",
                        self._keys.events(each),
                        LEARNERS,
                        consumer,
                        min_idle_ms,
                        cursor,
                        "COUNT",
                        wanted[each],
                    )
                    for each, cursor in cursors.items()
                ],
            )
            for partition, reply in zip(list(cursors), replies, strict=True):
                if isinstance(reply, Exception):
                    await self._recreate_groups([partition], reply)
                    del cursors[partition]  # a new group has nothing pending
                    continue
                found = parse_entries(reply[1])
                claimed += [_delivery(partition, entry_id, fields) for entry_id, fields in found]
                wanted[partition] -= len(found)
                cursors[partition] = as_text(reply[0])
                if cursors[partition] == "0-0" or wanted[partition] <= 0:
                    del cursors[partition]
        return claimed

    async def _recreate_groups(self, partitions: Sequence[int], error: Exception) -> None:
        """Create missing groups again if `error` says that one is missing; otherwise raise `error`."""
        # XPENDING and XINFO report a missing stream in other words.
        if refusal_code(error) != "NOGROUP" and "no such key" not in str(error):
            raise_translated(error)
        markers = await pipeline(self._redis, [("EXISTS", self._keys.marker(partition)) for partition in partitions])
        for partition, marker in zip(partitions, markers, strict=True):
            if not marker:
                raise StoreReset(f"partition {partition} of {self._keys.namespace} lost its marker") from error
        await create_groups(self._redis, self._keys, partitions)

    async def backlog(self) -> int:
        """Number of events of all partitions that are not applied yet, whether delivered or not."""
        lengths = await pipeline(
            self._redis,
            [("XLEN", self._keys.events(partition)) for partition in range(self._keys.partitions)],
        )
        return sum(as_int(length) for length in lengths)

    async def status(self, counters: Sequence[str]) -> list[PartitionStatus]:
        """Status of each partition, with these counters."""
        partitions = range(self._keys.partitions)
        leased = await self._owners.call([self._keys.workers, self._keys.owners], [])
        owners = dict(zip(map(as_int, leased[0::2]), map(as_text, leased[1::2]), strict=True))
        calls: list[ScriptCall] = [(self._status_keys(partition), [LEARNERS, *counters]) for partition in partitions]
        found = []
        for partition, reply in zip(partitions, await self._status.call_many(calls), strict=True):
            waiting, pending, consumers, age, letters, *counted = reply
            found.append(
                PartitionStatus(
                    partition=partition,
                    waiting=as_int(waiting),
                    pending=as_int(pending),
                    consumers=as_int(consumers),
                    owner=owners.get(partition),
                    oldest_age_ms=None if as_int(age) < 0 else as_int(age),
                    dead_letters=as_int(letters),
                    counters={name: as_int(value, absent=0) for name, value in zip(counters, counted, strict=True)},
                )
            )
        return found

    def _status_keys(self, partition: int) -> list[str]:
        return [self._keys.events(partition), self._keys.counters(partition), self._keys.dead_letters(partition)]

    async def oldest_ms(self, partition: int) -> int | None:
        """When the oldest waiting event of a partition was stored; None if none waits."""
        rows = parse_entries(await command(self._redis, "XRANGE", self._keys.events(partition), "-", "+", "COUNT", 1))
        return int(rows[0][0].partition("-")[0]) if rows else None

    async def pending(self, partition: int) -> int:
        """Number of events of a partition that are delivered and not finished."""
        try:
            reply = await command(self._redis, "XPENDING", self._keys.events(partition), LEARNERS)
        except StoreError as error:
            await self._recreate_groups([partition], error)
            return 0
        return as_int(reply[0])

    async def consumers(self, partition: int) -> list[str]:
        """Names of all consumers of a partition."""
        try:
            reply = await command(self._redis, "XINFO", "CONSUMERS", self._keys.events(partition), LEARNERS)
        except StoreError as error:
            await self._recreate_groups([partition], error)
            return []
        rows = [row if isinstance(row, dict) else dict(zip(row[0::2], row[1::2], strict=True)) for row in reply]
        return [as_text(row[b"name"]) for row in rows]

    async def release_from(self, partition: int, consumers: Iterable[str]) -> None:
        """Delete consumers of a partition, except those with pending entries."""
        await self._release.call_many(([self._keys.events(partition)], [LEARNERS, name]) for name in consumers)

    async def release_consumer(self, consumer: str) -> bool:
        """Delete a consumer from all partitions where nothing is pending for it; returns whether that was all."""
        replies = await self._release.call_many(
            ([self._keys.events(partition)], [LEARNERS, consumer]) for partition in range(self._keys.partitions)
        )
        return all(replies)

    async def attempts(self, partition: int, entry_ids: Sequence[str]) -> list[int]:
        """Number of solo attempts so far on each of these events."""
        if not entry_ids:
            return []
        counts = await command(self._redis, "HMGET", self._keys.attempts(partition), *entry_ids)
        return [as_int(count, absent=0) for count in counts]

    async def count_attempt(self, delivery: Delivery, consumer: str) -> int:
        """Count a solo attempt on this event; 0 if the event is gone or no longer pending for this consumer."""
        return await self._add_attempts(delivery, consumer, 1)

    async def forgive_attempt(self, delivery: Delivery, consumer: str) -> None:
        """Uncount an attempt that failed for reasons other than the event."""
        await self._add_attempts(delivery, consumer, -1)

    async def _add_attempts(self, delivery: Delivery, consumer: str, number: int) -> int:
        keys = [self._keys.events(delivery.partition), self._keys.attempts(delivery.partition)]
        return as_int(await self._attempt.call(keys, [LEARNERS, consumer, delivery.entry_id, number]))

    async def count_defaults(self, created: Iterable[Enqueued]) -> None:
        """Count default rewards that were enqueued. For monitoring only."""
        counts = Counter(each.partition for each in created)
        commands = [("HINCRBY", self._keys.counters(each), "defaulted", count) for each, count in counts.items()]
        await pipeline(self._redis, commands)

    async def rewarded(self, arms: Iterable[tuple[str, str, str]]) -> list[bool]:
        """For each (user id, decision id, arm id), whether a reward was accepted within the dedupe window.

        Default rewards do not count.
        """
        commands: list[Command] = []
        for user_id, decision_id, arm_id in arms:
            plain = plain_event_id(decision_id, arm_id)
            commands.append(("EXISTS", self._keys.seen(user_id, plain), self._keys.rewarded(user_id, plain)))
        return [bool(reply) for reply in await pipeline(self._redis, commands)]

    async def exists(self, partition: int, entry_id: str) -> bool:
        """Whether an event is still in its stream: neither applied nor buried."""
        key = self._keys.events(partition)
        return bool(await command(self._redis, "XRANGE", key, entry_id, entry_id, "COUNT", 1))


async def create_groups(redis: Store, keys: NamespaceKeys, partitions: Iterable[int]) -> None:
    """Create the consumer group of these partitions at `0`, so that no stored event is skipped."""
    replies = await pipeline_with_errors(
        redis,
        [("XGROUP", "CREATE", keys.events(partition), LEARNERS, "0", "MKSTREAM") for partition in partitions],
    )
    for reply in replies:
        if isinstance(reply, Exception) and refusal_code(reply) != "BUSYGROUP":
            raise_translated(reply)


def _delivery(partition: int, entry_id: str, fields: dict[bytes, bytes]) -> Delivery:
    event: RewardEvent | None
    try:
        event = RewardEvent.decode(fields)
    except CorruptRecord:
        event = None
    return Delivery(partition, entry_id, event)
