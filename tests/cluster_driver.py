"""Clients of the test store: a single server, or a cluster by the driver with the store's own routing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster

from metaban.store.client.cluster import Cluster
from metaban.store.client.connection import connect
from metaban.store.client.node import Command, Confirmation

#: Whether this run tests against a cluster.
ON_CLUSTER = os.environ.get("METABAN_TEST_TOPOLOGY", "single") == "cluster"


class ClusterDriver(RedisCluster):
    """Routes the store's commands with `metaban.store.client.cluster`; tests inspect with the driver's commands."""

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

    def separate(self) -> Cluster:
        return self.ours.separate()

    async def aclose(self) -> None:
        await self.ours.aclose()
        await super().aclose()


def open_store(url: str) -> Redis | ClusterDriver:
    """A client like that of service and worker, which tests may also use with the driver's commands."""
    if ON_CLUSTER:
        return ClusterDriver.open(url)
    client = connect(url)
    assert isinstance(client, Redis)
    return client
