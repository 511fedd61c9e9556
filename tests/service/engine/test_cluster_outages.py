"""A cluster without one of its primaries: requests for its partitions are refused, others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from metaban.service.engine.engine import Connections, Engine
from metaban.service.engine.model import replica as replica_module
from metaban.service.telemetry.metrics import Metrics
from metaban.store.errors import StoreUnavailable
from metaban.store.keys import NamespaceKeys
from tests.service.engines import ask, reward, settings
from tests.valkeys import ValkeyCluster, running_cluster
from tests.worker.workshop import soon

PARTITIONS = 8
KEYS = NamespaceKeys("shop", PARTITIONS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    with running_cluster(tmp_path, "--cluster-require-full-coverage", "no") as cluster:
        yield cluster


def id_in(partition: int, what: str) -> str:
    """An id of a user or decision in a partition."""
    return next(name for name in (f"{what}{number}" for number in range(1_000)) if KEYS.partition_of(name) == partition)


async def test_outage_of_one_primary(cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "UNAVAILABLE_PAUSE_S", 0.05)
    monkeypatch.setattr(replica_module, "TAIL_BLOCK_MS", 100)
    nodes = {partition: cluster.node_of(key_slot(KEYS.events(partition).encode())) for partition in range(PARTITIONS)}
    central = cluster.node_of(key_slot(KEYS.record.encode()))
    dead = next(node for node in nodes.values() if node is not central)
    lost = next(partition for partition, node in nodes.items() if node is dead)
    sound = next(partition for partition, node in nodes.items() if node is not dead)
    connections = Connections(cluster.url)
    engine = Engine.from_settings(settings(partitions=PARTITIONS), connections, Metrics())
    await engine.start()
    try:
        for partition in (lost, sound):
            assert (
                await engine.decider.recommend(ask(id_in(partition, "u"), decision_id=id_in(partition, "d")))
            ).logged
        dead.kill()
        for number in range(5):
            there = await engine.decider.recommend(ask(id_in(lost, "u"), decision_id=id_in(lost, f"there-{number}-")))
            assert not there.logged
            with pytest.raises(StoreUnavailable):
                await engine.feedback.accept([reward(id_in(lost, "d"))], wait_applied=False)
            here = await engine.decider.recommend(ask(id_in(sound, "u"), decision_id=id_in(sound, f"here-{number}-")))
            assert here.logged
            outcome = await engine.feedback.accept([reward(here.decision.decision_id)], wait_applied=False)
            assert outcome.accepted == 1

        assert engine.serving is not None
        replica = engine.serving.replica
        behind = {f"partition {partition}" for partition, node in nodes.items() if node is dead}

        async def only_these_are_behind() -> bool:
            return replica._failing == behind

        await soon(only_these_are_behind)
        await asyncio.sleep(0.5)  # all have compared their state with the store
        await soon(only_these_are_behind)
        assert (await engine.readiness())["store"].ok
    finally:
        async with asyncio.timeout(30):
            await engine.stop()
        await connections.aclose()
