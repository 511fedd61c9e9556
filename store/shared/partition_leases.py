"""Partition leases: each partition is read by one worker, so that workers share the work.

Correctness does not depend on them: if two workers read one partition, the fence of `UserStore.apply` decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from metaban.store.client.connection import Store, as_int, as_text
from metaban.store.client.scripts import load_script
from metaban.store.keys import NamespaceKeys


@final
@dataclass(frozen=True, slots=True)
class Share:
    """A worker's share of the partitions."""

    #: Tokens of all registered workers.
    workers: tuple[str, ...]
    #: Partitions leased to this worker.
    partitions: frozenset[int]


@final
class PartitionLeases:
    """Partition leases of one worker, identified by its `token`, in one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, token: str, *, ttl_ms: int) -> None:
        """The leases of a worker that does not renew them expire after `ttl_ms`."""
        self._keys = keys
        self._token = token
        self._ttl_ms = ttl_ms
        self._share = load_script(redis, "share")

    async def renew(self, in_use: Iterable[int] = ()) -> Share:
        """Register this worker and renew its leases; returns its share, an equal part of all partitions.

        A partition of the share is missing while another worker still uses it. Partitions `in_use` that are no longer
        part of the share stay leased; all others are released.
        """
        return await self._call(self._ttl_ms, in_use)

    async def leave(self) -> None:
        """Unregister this worker and release its leases."""
        await self._call(0, ())

    async def _call(self, ttl_ms: int, in_use: Iterable[int]) -> Share:
        keys = [self._keys.workers, self._keys.owners]
        used = " ".join(map(str, in_use))
        workers, share = await self._share.call(keys, [self._token, ttl_ms, self._keys.partitions, used])
        return Share(tuple(map(as_text, workers)), frozenset(map(as_int, share)))
