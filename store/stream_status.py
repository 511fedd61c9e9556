"""How the event streams are doing, partition by partition, in one round trip.

A partition is looked at in one step, so that within it everything adds up:

    enqueued + replayed = applied + voided + buried + waiting
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from store.connection import Store, as_int, as_text
from store.keys import LEARNERS, NamespaceKeys
from store.scripts import ScriptCall, load_script


@final
@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One partition at one moment."""

    partition: int
    #: Events not applied yet, whether delivered or not.
    waiting: int
    #: Those that a consumer was given and has not finished.
    pending: int
    consumers: int
    #: Token of the worker that reads it.
    owner: str | None
    #: Milliseconds since the oldest waiting event was stored; None when none waits.
    oldest_age_ms: int | None
    dead_letters: int
    counters: dict[str, int]


@final
class StreamStatus:
    """Looks at the event streams of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._keys = keys
        self._status = load_script(redis, "status")

    async def look(self, counters: Sequence[str]) -> list[PartitionStatus]:
        """Every partition, with the counters of these names."""
        partitions = range(self._keys.partitions)
        calls: list[ScriptCall] = [(self._keys_of(partition), [LEARNERS, *counters]) for partition in partitions]
        found = []
        for partition, reply in zip(partitions, await self._status.call_many(calls), strict=True):
            waiting, pending, consumers, owner, age, letters, *counted = reply
            found.append(
                PartitionStatus(
                    partition=partition,
                    waiting=as_int(waiting),
                    pending=as_int(pending),
                    consumers=as_int(consumers),
                    owner=None if owner is None else as_text(owner),
                    oldest_age_ms=None if as_int(age) < 0 else as_int(age),
                    dead_letters=as_int(letters),
                    counters={name: as_int(value, absent=0) for name, value in zip(counters, counted, strict=True)},
                )
            )
        return found

    def _keys_of(self, partition: int) -> list[str]:
        keys = self._keys
        return [keys.events(partition), keys.owner(partition), keys.counters(partition), keys.dead_letters(partition)]
