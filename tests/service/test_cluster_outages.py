"""A cluster that has lost one of its primaries: what lies there is refused, and all else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from service import replica as replica_module
from service.engine import Engine
from service.metrics import Metrics
from store.errors import StoreUnavailable
from store.keys import NamespaceKeys
from tests.service.test_engine import ask, reward, settings
from tests.valkeys import ValkeyCluster, running_cluster
from tests.worker.workshop import soon

PARTITIONS = 8
KEYS = NamespaceKeys("shop", PARTITIONS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    with running_cluster(tmp_path, "--cluster-require-full-coverage", "no") as cluster:
        yield cluster


def somebody(partition: int, what: str) -> str:
    """An id of a user or decision that a partition holds."""
    return next(name for name in (f"{what}{number}" for number in range(1_000)) if KEYS.partition_of(name) == partition)


async def test_one_primary_away(cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "UNAVAILABLE_PAUSE_S", 0.05)
    monkeypatch.setattr(replica_module, "TAIL_BLOCK_MS", 100)
    nodes = {partition: cluster.node_of(key_slot(KEYS.events(partition).encode())) for partition in range(PARTITIONS)}
    central = cluster.node_of(key_slot(KEYS.record.encode()))
    dead = next(node for node in nodes.values() if node is not central)
    lost = next(partition for partition, node in nodes.items() if node is dead)
    sound = next(partition for partition, node in nodes.items() if node is not dead)
    engine = Engine.from_settings(settings(partitions=PARTITIONS), cluster.url, Metrics())
    await engine.start()
    try:
        for partition in (lost, sound):
            assert (await engine.recommend(ask(somebody(partition, "u"), decision_id=somebody(partition, "d")))).logged
        dead.kill()
        for number in range(5):
            there = await engine.recommend(ask(somebody(lost, "u"), decision_id=somebody(lost, f"there-{number}-")))
            assert not there.logged
            with pytest.raises(StoreUnavailable):
                await engine.feedback([reward(somebody(lost, "d"))], wait_applied=False)
            here = await engine.recommend(ask(somebody(sound, "u"), decision_id=somebody(sound, f"here-{number}-")))
            assert here.logged
            outcome = await engine.feedback([reward(here.decision_id)], wait_applied=False)
            assert outcome.accepted == 1

        assert engine._serving is not None
        replica = engine._serving.replica
        behind = {f"partition {partition}" for partition, node in nodes.items() if node is dead}

        async def only_these_are_behind() -> bool:
            return replica._failing == behind

        await soon(only_these_are_behind)
        await asyncio.sleep(0.5)  # all have compared what they have with the store
        await soon(only_these_are_behind)
        assert (await engine.readiness())["store"].ok
    finally:
        async with asyncio.timeout(30):
            await engine.stop()
