"""Dead letters: events that were given up on, to be looked at, put back or thrown away.

A letter that is put back leaves the dead letters in the same step, so an event is in one place at any time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from store.connection import Store, as_int, as_text, command, parse_entries, pipeline
from store.errors import BacklogFull, CorruptRecord, StoreReset
from store.keys import NamespaceKeys
from store.rewards import RewardEvent
from store.scripts import ScriptCall, load_script

#: Letters read in one go where all of them are looked through.
LETTERS_READ: Final = 256
#: Letters of each partition read at a time for a page.
LETTERS_PEEKED: Final = 8
#: What a refused caller is told to wait: about the time the workers take for a good part of a backlog.
RETRY_AFTER_S: Final = 2.0
UINT64_MAX: Final = 2**64 - 1
LETTER_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
CURSOR: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})-([0-9]{1,4})")

#: Time, number within the millisecond, partition: no two letters have the same.
_Place: TypeAlias = tuple[int, int, int]
#: A letter as it is read.
_Row: TypeAlias = tuple[_Place, str, dict[bytes, bytes]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeadLetter:
    """One event given up on; `event` is None for what never was one."""

    partition: int
    letter_id: str
    reason: str
    entry_id: str
    attempts: int
    buried_ms: int
    event: RewardEvent | None

    @staticmethod
    def decode(partition: int, letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """Takes whatever is in the stream: a letter that cannot be shown could not be thrown away."""
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
    """Some letters, and where to go on; no cursor when these were the last."""

    letters: tuple[DeadLetter, ...]
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a letter that was to be put back; `detail` is its new entry id, or why not."""

    status: Literal["replayed", "unknown", "refused"]
    detail: str


@final
@dataclass(frozen=True, slots=True)
class ReplayedLetters:
    """How many letters were put back and how many cannot be; a cursor when there may be more to try."""

    replayed: int
    refused: int
    cursor: str | None = None


@final
class DeadLetters:
    """The dead letters of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, *, window_ms: int, backlog_limit: int) -> None:
        self._redis = redis
        self._keys = keys
        self._window_ms = window_ms
        self._limit = backlog_limit
        self._replay = load_script(redis, "replay")

    async def page(self, *, limit: int, cursor: str | None, newest_first: bool) -> LetterPage:
        """Letters of all partitions by the time of their burial; ValueError for a cursor that is none of ours."""
        if limit < 1:
            raise ValueError("a page has at least one letter")
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
        """The next letters of partitions after these places; a few of each, since letters hold all their inputs."""
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
        """Put one letter back into the stream of events, its attempts forgotten.

        BacklogFull and StoreReset as when it was enqueued; nothing was written then.
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
        """Put back all letters that there are now, or try so many of them, after those that an earlier call tried.

        A letter that comes back meanwhile is not tried again. BacklogFull when there is no room for more: what was
        put back until then is, and the next call goes on. ValueError for a cursor that is none of ours.
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
        """Delete a letter; whether it was there."""
        if not self._names_a_letter(partition, letter_id):
            return False
        return bool(await command(self._redis, "XDEL", self._keys.dead_letters(partition), letter_id))

    async def holds(self, partition: int, entry_id: str) -> bool:
        """Whether an event of this entry id was given up on; looks through the letters that came after it."""
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
        """Put letters of one partition back, in one round trip."""
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
        """Why no worker could take a letter, whatever happened meanwhile."""
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
        return keys, [letter_id, self._limit, self._window_ms]

    def _answer(self, partition: int, reply: Sequence[bytes | int]) -> Replay:
        status, *rest = reply
        if status == b"reset":
            raise StoreReset(f"partition {partition} of {self._keys.namespace} has lost its marker")
        if status == b"full":
            raise BacklogFull(
                f"{as_int(rest[0])} events wait in partition {partition}: no more than {self._limit} may",
                retry_after_s=RETRY_AFTER_S,
            )
        if status == b"gone":
            return Replay("unknown", "no such letter")
        if status == b"stored-again":
            return Replay("refused", f"its event id was accepted again since, as entry {as_text(rest[0])}")
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
        raise ValueError("not a cursor of the dead letters: no letter comes before or after it")
    return milliseconds, sequence, partition


def _span(partition: int, after: _Place | None, newest_first: bool) -> tuple[str, str]:
    """The ids of a partition that come after a place in the order."""
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
