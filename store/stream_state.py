"""How the event streams of a namespace are doing, seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from store.connection import Command, Store, as_int, parse_entries, pipeline
from store.keys import NamespaceKeys


@final
@dataclass(frozen=True, slots=True)
class StreamState:
    """What waits, and what was given up on."""

    #: Events not applied yet, whether delivered or not; and those of the fullest partition.
    waiting: int
    fullest: int
    #: When the event that has waited longest was enqueued, by the store's clock; None when none waits.
    oldest_ms: int | None
    dead_letters: int


async def stream_state(redis: Store, keys: NamespaceKeys) -> StreamState:
    """All partitions in one round trip."""
    partitions = range(keys.partitions)
    asked: list[Command] = []
    for partition in partitions:
        asked.append(("XLEN", keys.events(partition)))
        asked.append(("XRANGE", keys.events(partition), "-", "+", "COUNT", 1))
        asked.append(("XLEN", keys.dead_letters(partition)))
    replies = await pipeline(redis, asked)
    lengths = [as_int(reply) for reply in replies[0::3]]
    firsts = [parse_entries(reply) for reply in replies[1::3]]
    oldest = [int(rows[0][0].partition("-")[0]) for rows in firsts if rows]
    return StreamState(
        waiting=sum(lengths),
        fullest=max(lengths),
        oldest_ms=min(oldest, default=None),
        dead_letters=sum(as_int(reply) for reply in replies[2::3]),
    )
