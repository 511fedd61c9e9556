"""Rewards on their way to the learners: one stream per partition, read by one consumer group.

An event is stored once per event id within the dedupe window, unless its user began a new incarnation since the
decision. It stays in its stream until `UserStore.apply` or `EventStream.bury` removes it, and is delivered again when
its consumer stalls. Streams are never trimmed, which would drop unread events: a full backlog is refused instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from store.codec import Sample
from store.connection import (
    Argument,
    Confirmation,
    Store,
    as_int,
    as_text,
    block_arguments,
    command,
    parse_entries,
    pipeline,
    pipeline_with_errors,
    refusal_code,
    stream_entries,
)
from store.dead_letters import RETRY_AFTER_S, DeadLetters, LetterPage, Replay, ReplayedLetters
from store.errors import BacklogFull, CorruptRecord, FenceLost, StoreError, StoreReset, translate_errors
from store.keys import LEARNERS, NamespaceKeys
from store.rewards import RewardEvent
from store.scripts import load_script
from store.stream_status import PartitionStatus, StreamStatus

__all__ = ["Delivery", "Enqueued", "EventStream", "RewardEvent", "Sample", "create_groups"]

#: Fields of a foreign entry that its dead letter keeps.
DEAD_LETTER_FIELDS: Final = 1_000
EnqueueStatus: TypeAlias = Literal["accepted", "duplicate", "void"]
#: What the numbers mean that the enqueue script answers with.
STATUSES: Final[tuple[EnqueueStatus, ...]] = ("duplicate", "accepted", "void")


@final
@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of one event; a duplicate names the entry that the first one got.

    A void one was decided for an earlier incarnation of its user: it was not stored, and has no entry id.
    """

    status: EnqueueStatus
    partition: int
    entry_id: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """An entry handed to a consumer; `event` is None when its fields are not an event (poison)."""

    partition: int
    entry_id: str
    event: RewardEvent | None


@final
class EventStream:
    """The event streams of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        *,
        dedupe_window_s: float,
        backlog_limit: int,
        confirm: Confirmation | None = None,
    ) -> None:
        """`backlog_limit` is the number of events that may wait in one partition; with `confirm` nothing counts as
        enqueued before the replicas have it."""
        if dedupe_window_s <= 0 or backlog_limit <= 0:
            raise ValueError("the dedupe window and the backlog limit must be positive")
        self._redis = redis
        self._keys = keys
        self._window_ms = max(1, round(dedupe_window_s * 1_000))
        self._limit = backlog_limit
        self._confirm = confirm
        self._enqueue = load_script(redis, "enqueue")
        self._attempt = load_script(redis, "attempt")
        self._bury = load_script(redis, "bury")
        self._release = load_script(redis, "release")
        self._status = StreamStatus(redis, keys)
        self._letters = DeadLetters(redis, keys, window_ms=self._window_ms, backlog_limit=backlog_limit)

    async def enqueue(self, events: Sequence[RewardEvent]) -> list[Enqueued]:
        """Store events, each event id of a user once; the answers in order.

        Raises BacklogFull when a partition has no room for its share of the batch, and NotReplicated when replicas
        do not confirm in time. Events may have been taken by then: sending the whole batch again is safe, those are
        answered `duplicate`, and their replicas are waited for as well.
        """
        shares: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            shares.setdefault(self._keys.partition_of(event.user_id), []).append(index)
        calls = [
            self._enqueue_call(partition, [events[index] for index in indices]) for partition, indices in shares.items()
        ]
        replies = await self._enqueue.call_many(calls, confirm=self._confirm)
        for (partition, indices), (status, *rest) in zip(shares.items(), replies, strict=True):
            if status == b"reset":
                raise StoreReset(f"partition {partition} of {self._keys.namespace} has lost its marker")
            if status == b"full":
                raise BacklogFull(
                    f"{as_int(rest[0])} events wait in partition {partition}: {len(indices)} more would "
                    f"exceed {self._limit}",
                    retry_after_s=RETRY_AFTER_S,
                )
        answers: dict[int, Enqueued] = {}
        for (partition, indices), (_, *rest) in zip(shares.items(), replies, strict=True):
            for index, status, entry_id in zip(indices, rest[0::2], rest[1::2], strict=True):
                answers[index] = Enqueued(STATUSES[status], partition, as_text(entry_id))
        return [answers[index] for index in range(len(events))]

    def _enqueue_call(self, partition: int, events: Sequence[RewardEvent]) -> tuple[list[str], list[Argument]]:
        keys = [
            self._keys.marker(partition),
            self._keys.events(partition),
            self._keys.counters(partition),
            self._keys.versions(partition),
        ]
        keys += [self._keys.seen(event.user_id, event.event_id) for event in events]
        encoded = [event.encode() for event in events]
        always_write = int(self._confirm is not None)
        arguments: list[Argument] = [self._limit, self._window_ms, always_write, 2 * len(encoded[0])]
        for event, fields in zip(events, encoded, strict=True):
            arguments += [event.user_id, event.incarnation]
            arguments += [part for pair in fields.items() for part in pair]
        return keys, arguments

    async def read(self, partition: int, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        """Entries that no consumer was given yet; waits at most `block_ms`, and below the socket time-out."""
        key = self._keys.events(partition)
        wait = block_arguments(self._redis, block_ms)
        arguments = ("GROUP", LEARNERS, consumer, "COUNT", count, *wait, "STREAMS", key, ">")
        for _ in range(2):
            try:
                reply = await command(self._redis, "XREADGROUP", *arguments)
            except StoreError as error:
                await self._heal_group(partition, error)
            else:
                return [_delivery(partition, entry_id, fields) for entry_id, fields in stream_entries(reply)]
        return []  # the group was destroyed again meanwhile; it is there now, for the next read

    async def claim_stalled(self, partition: int, consumer: str, *, min_idle_ms: int, count: int) -> list[Delivery]:
        """Take over entries whose consumer has not finished them for `min_idle_ms`."""
        key = self._keys.events(partition)
        claimed: list[tuple[str, dict[bytes, bytes]]] = []
        cursor = "0-0"
        while len(claimed) < count:
            wanted = count - len(claimed)
            arguments = (key, LEARNERS, consumer, min_idle_ms, cursor, "COUNT", wanted)
            try:
                reply = await command(self._redis, "XAUTOCLAIM", *arguments)
            except StoreError as error:
                await self._heal_group(partition, error)
                return []  # a group made anew has nothing pending
            cursor = as_text(reply[0])
            claimed += parse_entries(reply[1])
            if cursor == "0-0":
                break
        return [_delivery(partition, entry_id, fields) for entry_id, fields in claimed]

    async def _heal_group(self, partition: int, error: StoreError) -> None:
        """Make the group anew if that is what `error` complains of; raise it otherwise."""
        # Without its stream, a group is missed in other words by the commands that only look.
        if refusal_code(error) != "NOGROUP" and "no such key" not in str(error):
            raise error
        if not await command(self._redis, "EXISTS", self._keys.marker(partition)):
            raise StoreReset(f"partition {partition} of {self._keys.namespace} has lost its marker") from error
        await create_groups(self._redis, self._keys, [partition])

    async def backlog(self) -> int:
        """Events of all partitions that are not applied yet, whether delivered or not."""
        lengths = await pipeline(
            self._redis,
            [("XLEN", self._keys.events(partition)) for partition in range(self._keys.partitions)],
        )
        return sum(as_int(length) for length in lengths)

    async def status(self, counters: Sequence[str]) -> list[PartitionStatus]:
        """How each partition is doing, with the counters of these names."""
        return await self._status.look(counters)

    async def pending(self, partition: int) -> int:
        """Events of a partition that a consumer was given and has not finished."""
        try:
            reply = await command(self._redis, "XPENDING", self._keys.events(partition), LEARNERS)
        except StoreError as error:
            await self._heal_group(partition, error)
            return 0
        return as_int(reply[0])

    async def consumers(self, partition: int) -> list[str]:
        """Everyone who ever read a partition and was not forgotten."""
        try:
            reply = await command(self._redis, "XINFO", "CONSUMERS", self._keys.events(partition), LEARNERS)
        except StoreError as error:
            await self._heal_group(partition, error)
            return []
        rows = [row if isinstance(row, dict) else dict(zip(row[0::2], row[1::2], strict=True)) for row in reply]
        return [as_text(row[b"name"]) for row in rows]

    async def release_from(self, partition: int, consumers: Iterable[str]) -> None:
        """Forget consumers of a partition, except those that something is pending for."""
        await self._release.call_many(([self._keys.events(partition)], [LEARNERS, name]) for name in consumers)

    async def release_consumer(self, consumer: str) -> bool:
        """Forget a consumer where nothing is pending for it; whether that was everywhere."""
        replies = await self._release.call_many(
            ([self._keys.events(partition)], [LEARNERS, consumer]) for partition in range(self._keys.partitions)
        )
        return all(replies)

    async def attempts(self, partition: int, entry_ids: Sequence[str]) -> list[int]:
        """Attempts made so far on each of these events alone."""
        if not entry_ids:
            return []
        counts = await command(self._redis, "HMGET", self._keys.attempts(partition), *entry_ids)
        return [as_int(count, absent=0) for count in counts]

    async def count_attempt(self, delivery: Delivery, consumer: str) -> int:
        """Count an attempt made on this event alone; 0 when the event is gone or not this consumer's any more."""
        return await self._add_attempts(delivery, consumer, 1)

    async def forgive_attempt(self, delivery: Delivery, consumer: str) -> None:
        """Take back an attempt that failed for no fault of the event's."""
        await self._add_attempts(delivery, consumer, -1)

    async def _add_attempts(self, delivery: Delivery, consumer: str, number: int) -> int:
        keys = [self._keys.events(delivery.partition), self._keys.attempts(delivery.partition)]
        return as_int(await self._attempt.call(keys, [LEARNERS, consumer, delivery.entry_id, number]))

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> None:
        """Move an event that is given up to the dead letters; FenceLost when it is not this consumer's.

        One of a user who began anew since is dropped, and counts as voided.
        """
        partition = delivery.partition
        keys = [
            self._keys.events(partition),
            self._keys.dead_letters(partition),
            self._keys.attempts(partition),
            self._keys.counters(partition),
            self._keys.versions(partition),
        ]
        now_ms = int(time.time() * 1_000)
        done = await self._bury.call(keys, [LEARNERS, consumer, delivery.entry_id, reason, now_ms, DEAD_LETTER_FIELDS])
        if not done:
            raise FenceLost("not-pending", delivery.entry_id)

    async def seen(self, ids: Iterable[tuple[str, str]]) -> list[bool]:
        """Of each user id and event id, whether that event was taken within the dedupe window."""
        return [
            bool(reply) for reply in await pipeline(self._redis, [("EXISTS", self._keys.seen(*pair)) for pair in ids])
        ]

    async def exists(self, partition: int, entry_id: str) -> bool:
        """Whether an event is still in its stream: neither applied nor buried."""
        key = self._keys.events(partition)
        return bool(await command(self._redis, "XRANGE", key, entry_id, entry_id, "COUNT", 1))

    async def buried(self, partition: int, entry_id: str) -> bool:
        """Whether an event was given up on."""
        return await self._letters.holds(partition, entry_id)

    async def dead_letters(self, *, limit: int, cursor: str | None = None, newest_first: bool = True) -> LetterPage:
        """A page of the dead letters of all partitions; ValueError for a cursor that is none of ours."""
        return await self._letters.page(limit=limit, cursor=cursor, newest_first=newest_first)

    async def replay(self, partition: int, letter_id: str) -> Replay:
        """Put a dead letter back as a fresh event, which still counts once."""
        return await self._letters.replay(partition, letter_id)

    async def replay_everything(self, *, most: int | None = None, cursor: str | None = None) -> ReplayedLetters:
        """Put back all dead letters there are now, or the next so many of them."""
        return await self._letters.replay_everything(most=most, cursor=cursor)

    async def discard(self, partition: int, letter_id: str) -> bool:
        """Delete a dead letter; whether it was there."""
        return await self._letters.discard(partition, letter_id)


async def create_groups(redis: Store, keys: NamespaceKeys, partitions: Iterable[int]) -> None:
    """Create the consumer group of these partitions at `0`, so that nothing stored is skipped."""
    replies = await pipeline_with_errors(
        redis,
        [("XGROUP", "CREATE", keys.events(partition), LEARNERS, "0", "MKSTREAM") for partition in partitions],
    )
    for reply in replies:
        if isinstance(reply, Exception) and refusal_code(reply) != "BUSYGROUP":
            with translate_errors():
                raise reply


def _delivery(partition: int, entry_id: str, fields: dict[bytes, bytes]) -> Delivery:
    event: RewardEvent | None
    try:
        event = RewardEvent.decode(fields)
    except CorruptRecord:
        event = None
    return Delivery(partition, entry_id, event)
