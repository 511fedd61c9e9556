"""Dead letters: events that could not be applied. They can be listed, put back or deleted.

An event moves between the stream and the dead letters in one script, so it is in one place at any time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from metaban.store.client.connection import Store, as_int, as_text, command, parse_entries, pipeline
from metaban.store.client.node import Argument
from metaban.store.client.scripts import ScriptCall, load_script
from metaban.store.codec import now_ms
from metaban.store.errors import BacklogFull, CorruptRecord, FenceLost, StoreReset
from metaban.store.events.event import Delivery, RewardEvent
from metaban.store.keys import LEARNERS, NamespaceKeys

#: Letters read at a time when all are visited.
LETTERS_READ: Final = 256

#: Letters of each partition read at a time for a page.
LETTERS_PEEKED: Final = 8

#: Most fields that the letter of an entry of unknown format keeps.
DEAD_LETTER_FIELDS: Final = 1_000

#: Retry-After of a refused caller: about the time that workers need for a good part of a backlog.
RETRY_AFTER_S: Final = 2.0
UINT64_MAX: Final = 2**64 - 1
LETTER_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
CURSOR: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})-([0-9]{1,4})")

#: (milliseconds, number within the millisecond, partition): unique to a letter.
_Place: TypeAlias = tuple[int, int, int]

#: A letter as read from the stream.
_Row: TypeAlias = tuple[_Place, str, dict[bytes, bytes]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeadLetter:
    """One dead letter; `event` is None if the entry cannot be decoded."""

    partition: int
    letter_id: str
    reason: str
    entry_id: str
    attempts: int
    buried_ms: int
    event: RewardEvent | None

    @staticmethod
    def decode(partition: int, letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """Decodes any entry: a letter that cannot be shown could not be deleted."""
        event: RewardEvent | None
        try:
            event = RewardEvent.decode(fields)
        except CorruptRecord:
            event = None
        return DeadLetter(
            partition=partition,
            letter_id=letter_id,
            reason=_shown(fields.get(b"dead_reason", b"")),
            entry_id=_shown(fields.get(b"dead_entry", b"")),
            attempts=_number(fields.get(b"dead_attempts", b"")),
            buried_ms=_number(fields.get(b"dead_ms", b"")) or int(letter_id.partition("-")[0]),
            event=event,
        )


@final
@dataclass(frozen=True, slots=True)
class LetterPage:
    """Letters, and the cursor of the next page; None if these were the last."""

    letters: tuple[DeadLetter, ...]
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """Result of putting a letter back; `detail` is its new entry id or the reason of the refusal."""

    status: Literal["replayed", "unknown", "refused"]
    detail: str


@final
@dataclass(frozen=True, slots=True)
class ReplayedLetters:
    """Numbers of letters put back and refused; a cursor if there may be more."""

    replayed: int
    refused: int
    cursor: str | None = None


@final
class DeadLetterStore:
    """The dead letters of one namespace."""

    #: How long the ids of replayed events are remembered; set by the stream.
    window_ms: int

    def __init__(self, redis: Store, keys: NamespaceKeys, *, backlog_limit: int) -> None:
        self._redis = redis
        self._keys = keys
        self._limit = backlog_limit
        self._bury = load_script(redis, "bury")
        self._replay = load_script(redis, "replay")

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> None:
        """Move an event to the dead letters; FenceLost if it is not pending for this consumer.

        An event of an earlier incarnation of its user is dropped and counted as voided.
        """
        partition = delivery.partition
        keys = [
            self._keys.events(partition),
            self._keys.dead_letters(partition),
            self._keys.attempts(partition),
            self._keys.counters(partition),
            self._keys.versions(partition),
        ]
        arguments: list[Argument] = [LEARNERS, consumer, delivery.entry_id, reason, now_ms(), DEAD_LETTER_FIELDS]
        done = await self._bury.call(keys, arguments)
        if not done:
            raise FenceLost("not-pending", delivery.entry_id)

    async def page(self, *, limit: int, cursor: str | None = None, newest_first: bool = True) -> LetterPage:
        """Letters of all partitions, ordered by time; ValueError for an invalid cursor."""
        if limit < 1:
            raise ValueError("limit must be at least 1")
        after = None if cursor is None else _place(cursor)
        places = dict.fromkeys(range(self._keys.partitions), after)
        waiting = await self._peek(places, newest_first=newest_first)
        chosen: list[_Row] = []
        while waiting and len(chosen) < limit:
            partition = (max if newest_first else min)(waiting, key=lambda each: waiting[each][0][0])
            row = waiting[partition].popleft()
            chosen.append(row)
            if not waiting[partition]:
                del waiting[partition]
                waiting |= await self._peek({partition: row[0]}, newest_first=newest_first)
        letters = tuple(DeadLetter.decode(place[2], letter_id, fields) for place, letter_id, fields in chosen)
        return LetterPage(letters, "-".join(map(str, chosen[-1][0])) if waiting else None)

    async def _peek(self, places: Mapping[int, _Place | None], *, newest_first: bool) -> dict[int, deque[_Row]]:
        """Next letters of partitions after these places; a few of each, since letters hold their inputs."""
        name = "XREVRANGE" if newest_first else "XRANGE"
        replies = await pipeline(
            self._redis,
            [
                (
                    name,
                    self._keys.dead_letters(partition),
                    *_span(partition, after, newest_first),
                    "COUNT",
                    LETTERS_PEEKED,
                )
                for partition, after in places.items()
            ],
        )
        return {
            partition: deque((_order(row[0], partition), *row) for row in parse_entries(reply))
            for partition, reply in zip(places, replies, strict=True)
            if reply
        }

    async def replay(self, partition: int, letter_id: str) -> Replay:
        """Put one letter back into the event stream, without its attempts.

        Raises BacklogFull and StoreReset as `enqueue` does; nothing was written then.
        """
        if not self._names_a_letter(partition, letter_id):
            return Replay("unknown", "no such letter")
        key = self._keys.dead_letters(partition)
        rows = parse_entries(await command(self._redis, "XRANGE", key, letter_id, letter_id))
        [answer] = await self._replay_all(partition, [DeadLetter.decode(partition, *row) for row in rows]) or [
            Replay("unknown", "no such letter")
        ]
        return answer

    async def replay_everything(self, *, most: int | None = None, cursor: str | None = None) -> ReplayedLetters:
        """Put back all present letters, or the next `most` of them after `cursor`.

        A letter buried again meanwhile is not tried again. Raises BacklogFull if there is no room for more; the letters
        put back by then stay so. ValueError for an invalid cursor.
        """
        first, start, left = 0, "-", most
        if cursor is not None:
            milliseconds, sequence, first = _place(cursor)
            start = f"({milliseconds}-{sequence}"
        counts = {"replayed": 0, "refused": 0}
        for partition in range(first, self._keys.partitions):
            key = self._keys.dead_letters(partition)
            newest = parse_entries(await command(self._redis, "XREVRANGE", key, "+", "-", "COUNT", 1))
            end = newest[0][0] if newest else None
            while end is not None:
                count = LETTERS_READ if left is None else min(LETTERS_READ, left)
                rows = parse_entries(await command(self._redis, "XRANGE", key, start, end, "COUNT", count))
                letters = [DeadLetter.decode(partition, *row) for row in rows]
                for answer in await self._replay_all(partition, letters):
                    if answer.status in counts:
                        counts[answer.status] += 1
                left = None if left is None else left - len(rows)
                if left == 0:
                    return ReplayedLetters(counts["replayed"], counts["refused"], f"{rows[-1][0]}-{partition}")
                if len(rows) < count:
                    break
                start = f"({rows[-1][0]}"
            start = "-"
        return ReplayedLetters(counts["replayed"], counts["refused"])

    async def discard(self, partition: int, letter_id: str) -> bool:
        """Delete a letter; returns whether it existed."""
        if not self._names_a_letter(partition, letter_id):
            return False
        return bool(await command(self._redis, "XDEL", self._keys.dead_letters(partition), letter_id))

    async def holds(self, partition: int, entry_id: str) -> bool:
        """Whether the event of this entry id is a dead letter; reads the letters stored after it."""
        start = entry_id
        while True:
            key = self._keys.dead_letters(partition)
            rows = parse_entries(await command(self._redis, "XRANGE", key, start, "+", "COUNT", LETTERS_READ))
            if any(fields.get(b"dead_entry") == entry_id.encode() for _, fields in rows):
                return True
            if len(rows) < LETTERS_READ:
                return False
            start = f"({rows[-1][0]}"

    async def _replay_all(self, partition: int, letters: Sequence[DeadLetter]) -> list[Replay]:
        """Put letters of one partition back in one round trip."""
        refusals = [self._refusal(letter) for letter in letters]
        replies = iter(
            await self._replay.call_many(
                self._call(letter.partition, letter.letter_id, letter.event)
                for letter, refusal in zip(letters, refusals, strict=True)
                if refusal is None and letter.event is not None
            )
        )
        return [
            Replay("refused", refusal) if refusal is not None else self._answer(partition, next(replies))
            for refusal in refusals
        ]

    def _refusal(self, letter: DeadLetter) -> str | None:
        """Reason why a letter can never be applied; None if it can."""
        if letter.event is None:
            return "it is not a reward event"
        if self._keys.partition_of(letter.event.user_id) != letter.partition:
            return "its user belongs to another partition"
        return None

    def _call(self, partition: int, letter_id: str, event: RewardEvent) -> ScriptCall:
        keys = [
            self._keys.marker(partition),
            self._keys.events(partition),
            self._keys.dead_letters(partition),
            self._keys.counters(partition),
            self._keys.seen(event.user_id, event.event_id),
        ]
        return keys, [letter_id, self._limit, self.window_ms]

    def _answer(self, partition: int, reply: Sequence[bytes | int]) -> Replay:
        status, *rest = reply
        if status == b"reset":
            raise StoreReset(f"partition {partition} of {self._keys.namespace} lost its marker")
        if status == b"full":
            raise BacklogFull(
                f"{as_int(rest[0])} events wait in partition {partition}: the limit is {self._limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        if status == b"gone":
            return Replay("unknown", "no such letter")
        if status == b"stored-again":
            return Replay("refused", f"its event id was accepted again, as entry {as_text(rest[0])}")
        return Replay("replayed", as_text(rest[0]))

    def _names_a_letter(self, partition: int, letter_id: str) -> bool:
        parts = LETTER_ID.fullmatch(letter_id)
        return (
            0 <= partition < self._keys.partitions
            and parts is not None
            and all(int(part) <= UINT64_MAX for part in parts.groups())
        )


def _order(letter_id: str, partition: int) -> _Place:
    milliseconds, _, sequence = letter_id.partition("-")
    return int(milliseconds), int(sequence), partition


def _place(cursor: str) -> _Place:
    parts = CURSOR.fullmatch(cursor)
    if parts is None or any(int(part) > UINT64_MAX for part in parts.groups()):
        raise ValueError("not a cursor of the dead letters")
    milliseconds, sequence, partition = map(int, parts.groups())
    if (milliseconds, sequence) in {(0, 0), (UINT64_MAX, UINT64_MAX)}:
        raise ValueError("not a cursor of the dead letters: out of range")
    return milliseconds, sequence, partition


def _span(partition: int, after: _Place | None, newest_first: bool) -> tuple[str, str]:
    """First and last id of the letters of a partition after a place."""
    ends = ("+", "-") if newest_first else ("-", "+")
    if after is None:
        return ends
    milliseconds, sequence, last = after
    passed = partition >= last if newest_first else partition <= last
    return f"{'(' if passed else ''}{milliseconds}-{sequence}", ends[1]


def _shown(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < 20 else 0
