"""Rewards on their way to the learners: one stream per partition, read by one consumer group.

An event is stored once per event id within the dedupe window, stays in its stream until `UserStore.apply` or
`EventStream.bury` removes it, and is delivered again when its consumer stalls. Streams are never trimmed,
which would drop unread events: a full backlog is refused instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

import numpy as np
from redis.asyncio import Redis

from store.codec import FLOAT32, Sample, nothing_noted
from store.connection import (
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
from store.errors import BacklogFull, CorruptRecord, FenceLost, StoreError, StoreReset, translate_errors
from store.keys import LEARNERS, NamespaceKeys
from store.scripts import load_script

__all__ = ["Delivery", "Enqueued", "EventStream", "RewardEvent", "Sample", "create_groups"]

EVENT_FORMAT: Final = b"1"
INT64_MAX: Final = 2**63 - 1
#: What a refused caller is told to wait: about the time the workers take for a good part of a backlog.
RETRY_AFTER_S: Final = 2.0
#: Fields of a foreign entry that its dead letter keeps.
DEAD_LETTER_FIELDS: Final = 1_000
#: Dead letters looked at in one go.
DEAD_LETTERS_READ: Final = 256


@final
@dataclass(frozen=True, slots=True, eq=False)
class RewardEvent:
    """One reward, with all that is needed to learn from it."""

    event_id: str
    decision_id: str
    user_id: str
    arm_id: str
    features: np.ndarray  # float32 [d]: the raw assembled input of the chosen arm
    reward: float
    propensity: float
    epoch: int  # of the model that decided
    decided_ms: int
    received_ms: int
    phi: np.ndarray = field(default_factory=nothing_noted)  # float32 [q]: noted by the learner at decision time

    def encode(self) -> dict[bytes, bytes]:
        """The fields of a stream entry."""
        return {
            b"f": EVENT_FORMAT,
            b"id": self.event_id.encode(),
            b"d": self.decision_id.encode(),
            b"u": self.user_id.encode(),
            b"a": self.arm_id.encode(),
            b"x": np.ascontiguousarray(self.features, dtype=FLOAT32).tobytes(),
            b"h": np.ascontiguousarray(self.phi, dtype=FLOAT32).tobytes(),
            b"r": repr(float(self.reward)).encode(),
            b"p": repr(float(self.propensity)).encode(),
            b"m": str(int(self.epoch)).encode(),
            b"t0": str(int(self.decided_ms)).encode(),
            b"t1": str(int(self.received_ms)).encode(),
        }

    @staticmethod
    def decode(fields: Mapping[bytes, bytes]) -> RewardEvent:
        """The event of a stream entry; fields of others beside ours are ignored."""
        try:
            if fields[b"f"] != EVENT_FORMAT:
                raise CorruptRecord(f"an event has the unknown format {fields[b'f']!r}")
            event = RewardEvent(
                event_id=fields[b"id"].decode(),
                decision_id=fields[b"d"].decode(),
                user_id=fields[b"u"].decode(),
                arm_id=fields[b"a"].decode(),
                features=np.frombuffer(fields[b"x"], dtype=FLOAT32).copy(),
                reward=float(fields[b"r"]),
                propensity=float(fields[b"p"]),
                epoch=int(fields[b"m"]),
                decided_ms=int(fields[b"t0"]),
                received_ms=int(fields[b"t1"]),
                phi=np.frombuffer(fields[b"h"], dtype=FLOAT32).copy(),
            )
        except (KeyError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            raise CorruptRecord(f"not a reward event: {error!r}") from error
        if not all(abs(number) <= INT64_MAX for number in (event.epoch, event.decided_ms, event.received_ms)):
            raise CorruptRecord("a number of a reward event is out of range")
        numbers = np.concatenate([[event.reward, event.propensity], event.features, event.phi])
        if not np.isfinite(numbers).all():
            raise CorruptRecord("a reward event is not finite")
        return event

    def sample(self) -> Sample:
        """What the log of the user keeps."""
        return Sample(self.features, self.reward, self.propensity, self.epoch, self.received_ms, self.arm_id, self.phi)


@final
@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of one event; a duplicate names the entry that the first one got."""

    status: Literal["accepted", "duplicate"]
    partition: int
    entry_id: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """An entry handed to a consumer; `event` is None when its fields are not an event (poison)."""

    partition: int
    entry_id: str
    event: RewardEvent | None
    raw: Mapping[bytes, bytes]
    deliveries: int


@final
class EventStream:
    """The event streams of one namespace."""

    def __init__(self, redis: Redis, keys: NamespaceKeys, *, dedupe_window_s: float, backlog_limit: int) -> None:
        """`backlog_limit` is the number of events that may wait in one partition."""
        if dedupe_window_s <= 0 or backlog_limit <= 0:
            raise ValueError("the dedupe window and the backlog limit must be positive")
        self._redis = redis
        self._keys = keys
        self._window_ms = max(1, round(dedupe_window_s * 1_000))
        self._limit = backlog_limit
        self._enqueue = load_script(redis, "enqueue")
        self._attempt = load_script(redis, "attempt")
        self._bury = load_script(redis, "bury")
        self._keep = load_script(redis, "keep")
        self._release = load_script(redis, "release")

    async def enqueue(self, events: Sequence[RewardEvent]) -> list[Enqueued]:
        """Store events, each event id of a user once; the answers in order.

        Raises BacklogFull when a partition has no room for its share of the batch. Other partitions may have
        taken theirs by then: sending the whole batch again is safe, they answer `duplicate`.
        """
        shares: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            shares.setdefault(self._keys.partition_of(event.user_id), []).append(index)
        replies = await self._enqueue.call_many(
            self._enqueue_call(partition, [events[index] for index in indices]) for partition, indices in shares.items()
        )
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
            for index, accepted, entry_id in zip(indices, rest[0::2], rest[1::2], strict=True):
                outcome: Literal["accepted", "duplicate"] = "accepted" if accepted else "duplicate"
                answers[index] = Enqueued(outcome, partition, as_text(entry_id))
        return [answers[index] for index in range(len(events))]

    def _enqueue_call(self, partition: int, events: Sequence[RewardEvent]) -> tuple[list[str], list[bytes | int]]:
        keys = [self._keys.marker(partition), self._keys.events(partition), self._keys.counters(partition)]
        keys += [self._keys.seen(event.user_id, event.event_id) for event in events]
        fields = [part for event in events for pair in event.encode().items() for part in pair]
        return keys, [self._limit, self._window_ms, len(fields) // len(events), *fields]

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
                return [
                    _delivery(partition, entry_id, fields, deliveries=1) for entry_id, fields in stream_entries(reply)
                ]
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
        ids = [entry_id for entry_id, _ in claimed]
        counts = await self._delivery_counts(key, consumer, ids)
        return [
            _delivery(partition, entry_id, fields, deliveries=deliveries)
            for (entry_id, fields), deliveries in zip(claimed, counts, strict=True)
        ]

    async def _delivery_counts(self, key: str, consumer: str, entry_ids: Sequence[str]) -> list[int]:
        replies = await pipeline(
            self._redis,
            [("XPENDING", key, LEARNERS, entry_id, entry_id, 1, consumer) for entry_id in entry_ids],
        )
        # one that has left us again since was still delivered at least twice
        return [as_int(reply[0][3]) if reply else 2 for reply in replies]

    async def _heal_group(self, partition: int, error: StoreError) -> None:
        """Make the group anew if that is what `error` complains of; raise it otherwise."""
        if refusal_code(error) != "NOGROUP":
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

    async def pending(self, partition: int) -> int:
        """Events of a partition that a consumer was given and has not finished."""
        try:
            reply = await command(self._redis, "XPENDING", self._keys.events(partition), LEARNERS)
        except StoreError as error:
            await self._heal_group(partition, error)
            return 0
        return as_int(reply[0])

    async def release_consumer(self, consumer: str) -> bool:
        """Forget a consumer where nothing is pending for it; whether that was everywhere."""
        replies = await self._release.call_many(
            ([self._keys.events(partition)], [LEARNERS, consumer]) for partition in range(self._keys.partitions)
        )
        return all(replies)

    async def keep(self, partition: int, consumer: str, entry_ids: Sequence[str]) -> int:
        """Say that these deliveries are still being worked on; how many of them are still the consumer's."""
        return as_int(await self._keep.call([self._keys.events(partition)], [LEARNERS, consumer, *entry_ids]))

    async def count_attempt(self, delivery: Delivery) -> int:
        """Count an attempt made on this event alone; 0 when the event is gone."""
        keys = [self._keys.events(delivery.partition), self._keys.attempts(delivery.partition)]
        return as_int(await self._attempt.call(keys, [delivery.entry_id, 1]))

    async def forgive_attempt(self, delivery: Delivery) -> None:
        """Take back an attempt that failed for no fault of the event's."""
        keys = [self._keys.events(delivery.partition), self._keys.attempts(delivery.partition)]
        await self._attempt.call(keys, [delivery.entry_id, -1])

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> None:
        """Move an event that is given up to the dead letters; FenceLost when it is not this consumer's."""
        partition = delivery.partition
        keys = [
            self._keys.events(partition),
            self._keys.dead_letters(partition),
            self._keys.attempts(partition),
            self._keys.counters(partition),
        ]
        now_ms = int(time.time() * 1_000)
        done = await self._bury.call(keys, [LEARNERS, consumer, delivery.entry_id, reason, now_ms, DEAD_LETTER_FIELDS])
        if not done:
            raise FenceLost("not-pending", delivery.entry_id)

    async def exists(self, partition: int, entry_id: str) -> bool:
        """Whether an event is still in its stream: neither applied nor buried."""
        key = self._keys.events(partition)
        return bool(await command(self._redis, "XRANGE", key, entry_id, entry_id, "COUNT", 1))

    async def buried(self, partition: int, entry_id: str) -> bool:
        """Whether an event was given up on; looks through the dead letters that came after it."""
        start = entry_id
        while True:
            key = self._keys.dead_letters(partition)
            rows = parse_entries(await command(self._redis, "XRANGE", key, start, "+", "COUNT", DEAD_LETTERS_READ))
            if any(fields.get(b"dead_entry") == entry_id.encode() for _, fields in rows):
                return True
            if len(rows) < DEAD_LETTERS_READ:
                return False
            start = f"({rows[-1][0]}"


async def create_groups(redis: Redis, keys: NamespaceKeys, partitions: Iterable[int]) -> None:
    """Create the consumer group of these partitions at `0`, so that nothing stored is skipped."""
    replies = await pipeline_with_errors(
        redis,
        [("XGROUP", "CREATE", keys.events(partition), LEARNERS, "0", "MKSTREAM") for partition in partitions],
    )
    for reply in replies:
        if isinstance(reply, Exception) and refusal_code(reply) != "BUSYGROUP":
            with translate_errors():
                raise reply


def _delivery(partition: int, entry_id: str, fields: dict[bytes, bytes], *, deliveries: int) -> Delivery:
    event: RewardEvent | None
    try:
        event = RewardEvent.decode(fields)
    except CorruptRecord:
        event = None
    return Delivery(partition, entry_id, event, fields, deliveries)
