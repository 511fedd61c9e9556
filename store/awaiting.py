"""Decisions that wait for their rewards, to be learned with the default one when none comes.

Each chosen arm waits by itself, in the partition of its decision. Nothing depends on who takes it from there, or how
often: what a default reward does is done once, by the event id it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self, final

from store.connection import Store, as_bytes, command, pipeline
from store.keys import NamespaceKeys

MEMBER: Final = re.compile(rb"([1-9][0-9]{0,8}):(.+)", re.DOTALL)


@final
@dataclass(frozen=True, slots=True)
class Awaited:
    """One chosen arm of a decision, by its rank."""

    decision_id: str
    rank: int

    def encode(self) -> str:
        """As a member of the sorted set."""
        return f"{self.rank}:{self.decision_id}"

    @classmethod
    def decode(cls, member: bytes) -> Self | None:
        """None for what is no such member."""
        found = MEMBER.fullmatch(member)
        try:
            return None if found is None else cls(found[2].decode(), int(found[1]))
        except UnicodeDecodeError:
            return None


@final
class AwaitingStore:
    """What waits in one namespace; `DecisionStore` puts it there."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def overdue(self, partition: int, now_ms: int, *, count: int) -> list[bytes]:
        """Members of a partition that have waited long enough, the longest first."""
        key = self._keys.awaiting(partition)
        found = await command(self._redis, "ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", 0, count)
        return [as_bytes(member) for member in found]

    async def any_overdue(self, partitions: Sequence[int], now_ms: int) -> list[int]:
        """Those of these partitions where something has waited long enough."""
        counts = await pipeline(
            self._redis, [("ZCOUNT", self._keys.awaiting(partition), "-inf", now_ms) for partition in partitions]
        )
        return [partition for partition, count in zip(partitions, counts, strict=True) if count]

    async def settle(self, partition: int, members: Sequence[bytes]) -> None:
        """Have these wait no more."""
        if members:
            await command(self._redis, "ZREM", self._keys.awaiting(partition), *members)

    async def settle_all(self, awaited: Iterable[Awaited]) -> None:
        """The same for arms of any decisions."""
        by_partition: dict[int, list[str]] = {}
        for each in awaited:
            by_partition.setdefault(self._keys.partition_of(each.decision_id), []).append(each.encode())
        await pipeline(
            self._redis,
            [("ZREM", self._keys.awaiting(partition), *members) for partition, members in by_partition.items()],
        )
