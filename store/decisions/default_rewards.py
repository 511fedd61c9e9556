"""Decisions waiting for their rewards; without one in time they get the default reward.

Each chosen arm waits separately, in the partition of its decision. Several workers may take the same one: the event id
of a default reward makes it count once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self, final

from metaban.store.client.connection import Store, as_bytes, command, pipeline
from metaban.store.keys import NamespaceKeys

MEMBER: Final = re.compile(rb"([1-9][0-9]{0,8}):(.+)", re.DOTALL)


@final
@dataclass(frozen=True, slots=True)
class AwaitedReward:
    """One chosen arm of a decision that waits for a reward."""

    decision_id: str
    rank: int

    def encode(self) -> str:
        """Member of the sorted set."""
        return f"{self.rank}:{self.decision_id}"

    @classmethod
    def decode(cls, member: bytes) -> Self | None:
        """None for an invalid member."""
        found = MEMBER.fullmatch(member)
        try:
            return None if found is None else cls(found[2].decode(), int(found[1]))
        except UnicodeDecodeError:
            return None


@final
class AwaitedRewardStore:
    """Arms waiting for rewards in one namespace; `DecisionStore` adds them."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def overdue(self, partition: int, now_ms: int, *, count: int) -> list[bytes]:
        """Overdue members of a partition, the oldest first."""
        key = self._keys.awaiting(partition)
        found = await command(self._redis, "ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", 0, count)
        return [as_bytes(member) for member in found]

    async def any_overdue(self, partitions: Sequence[int], now_ms: int) -> list[int]:
        """Those of these partitions that have overdue members."""
        counts = await pipeline(
            self._redis, [("ZCOUNT", self._keys.awaiting(partition), "-inf", now_ms) for partition in partitions]
        )
        return [partition for partition, count in zip(partitions, counts, strict=True) if count]

    async def settle(self, partition: int, members: Sequence[bytes]) -> None:
        """Remove members: their rewards came, or the default reward was sent."""
        if members:
            await command(self._redis, "ZREM", self._keys.awaiting(partition), *members)

    async def settle_all(self, awaited: Iterable[AwaitedReward]) -> None:
        """Remove arms of any decisions."""
        by_partition: dict[int, list[str]] = {}
        for each in awaited:
            by_partition.setdefault(self._keys.partition_of(each.decision_id), []).append(each.encode())
        await pipeline(
            self._redis,
            [("ZREM", self._keys.awaiting(partition), *members) for partition, members in by_partition.items()],
        )
