"""Which worker reads which partition: a lease each, so that workers share the work instead of racing for it.

Leases save work and nothing depends on them: two workers that both believe a partition theirs are kept apart by what
`UserStore.apply` checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import final

from redis.asyncio import Redis

from store.connection import Store, as_text
from store.errors import StoreUnavailable
from store.keys import NamespaceKeys
from store.scripts import ScriptCall, load_script


@final
class Ownership:
    """The workers of one namespace and their partitions, as one of them (`token`) sees and changes it."""

    def __init__(self, redis: Store, keys: NamespaceKeys, token: str, *, ttl_ms: int) -> None:
        """What is not renewed for `ttl_ms` is free again."""
        self._single = isinstance(redis, Redis)
        self._keys = keys
        self._token = token
        self._ttl_ms = ttl_ms
        self._attend = load_script(redis, "attend")
        self._lease = load_script(redis, "lease")

    async def attend(self) -> list[str]:
        """Be counted; the tokens of all workers that are there, in order."""
        return await self._present(self._ttl_ms)

    async def leave(self) -> list[str]:
        """Be counted no more; the others."""
        return await self._present(0)

    async def _present(self, ttl_ms: int) -> list[str]:
        return sorted(map(as_text, await self._attend.call([self._keys.workers], [self._token, ttl_ms])))

    async def hold(self, partitions: Iterable[int]) -> set[int]:
        """Take or keep the leases of these partitions; those that are ours now."""
        return await self._each("acquire", partitions)

    async def release(self, partitions: Iterable[int]) -> set[int]:
        """Give leases back; those that were still ours."""
        return await self._each("release", partitions)

    async def _each(self, verb: str, partitions: Iterable[int]) -> set[int]:
        wanted = list(partitions)
        calls: list[ScriptCall] = [
            ([self._keys.owner(partition)], [verb, self._token, self._ttl_ms]) for partition in wanted
        ]
        try:
            replies = await self._lease.call_many(calls)
        except StoreUnavailable:
            if self._single:
                raise
            # One server of a cluster is away: the partitions of the others are still ours to hold.
            outcomes = await asyncio.gather(*(self._lease.call(*call) for call in calls), return_exceptions=True)
            replies = [not isinstance(outcome, BaseException) and outcome for outcome in outcomes]
        return {partition for partition, held in zip(wanted, replies, strict=True) if held}


def fair_share(partitions: int, token: str, present: Iterable[str]) -> set[int]:
    """The partitions that are a worker's when all who are there share them evenly."""
    everyone = sorted({*present, token})
    return set(range(everyone.index(token), partitions, len(everyone)))
