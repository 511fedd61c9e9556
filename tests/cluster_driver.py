"""For tests: the driver's client of a cluster, with ours in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster

from store.cluster import Cluster
from store.connection import Command, Confirmation, connect


class ClusterDriver(RedisCluster):
    """Sends what the store sends as `store.cluster` does; all the driver's own commands are for tests to look with."""

    ours: Cluster

    @classmethod
    def open(cls, url: str) -> ClusterDriver:
        """A client of `redis+cluster://…`."""
        client = cls.from_url(url.replace("redis+cluster", "redis").partition(",")[0])
        ours = connect(url)
        assert isinstance(client, cls)
        assert isinstance(ours, Cluster)
        client.ours = ours
        return client

    @property
    def socket_timeout_s(self) -> float:
        return self.ours.socket_timeout_s

    async def send(self, commands: Sequence[Command], confirm: Confirmation | None = None) -> list[Any]:
        return await self.ours.send(commands, confirm)

    async def primaries(self) -> list[Redis]:
        return await self.ours.primaries()

    async def replicas(self) -> list[Redis]:
        return await self.ours.replicas()

    async def aclose(self) -> None:
        await self.ours.aclose()
        await super().aclose()
