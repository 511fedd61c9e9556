"""Service and worker on a Valkey cluster that loses a server and gets it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis.crc import key_slot

from metaban.bench.worlds.environments import SyntheticGroups
from metaban.service.process.local_deployment import Deployment
from metaban.store.keys import NamespaceKeys
from tests.end_to_end.steps import eventually, play_over_http, send_reward
from tests.valkeys import DURABLE, ValkeyCluster, running_cluster

PARTITIONS = 16
KEYS = NamespaceKeys("default", PARTITIONS)


@contextmanager
def running_worker(folder: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `metaban worker` during a block."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METABAN_")}
    with (folder / "worker.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "metaban.service.cli.main", "worker"]
        worker = subprocess.Popen(command, env={**kept, "REDIS_URL": url}, stdout=log, stderr=log)
    try:
        yield worker
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, (folder / "worker.log").read_text()
    finally:
        worker.kill()
        worker.wait(30)


def applied_events(cluster: ValkeyCluster) -> int:
    """Number of applied events: the sum of all user versions."""
    total = 0
    for partition in range(PARTITIONS):
        key = KEYS.versions(partition)
        versions = cluster.node_of(key_slot(key.encode())).ask("HVALS", key)
        assert isinstance(versions, list)
        total += sum(int(version.split(b":")[1]) for version in versions)
    return total


@pytest.mark.slow
def test_rewards_are_learned_once_although_a_server_dies(tmp_path: Path) -> None:
    world = SyntheticGroups(seed=3)
    with (
        running_cluster(tmp_path / "servers", *DURABLE) as cluster,
        Deployment(tmp_path, {"REDIS_URL": cluster.url}, "--no-worker") as service,
        running_worker(tmp_path, cluster.url),
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        accepted = len(play_over_http(client, world, 0, 20))
        decisions = []
        for number in range(60):
            asked = world.next_round()
            arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
            body = {"user_id": asked.user_id, "arms": arms, "decision_id": f"later-{number}"}
            assert client.post("/recommend", json=body).status_code == 200
            decisions.append(f"later-{number}")
        users_served_by = {
            cluster.node_of(key_slot(KEYS.events(partition).encode())) for partition in range(PARTITIONS)
        }
        assert len(users_served_by) == 3

        told = [decision for decision in decisions[:30] if send_reward(client, decision)]
        assert len(told) == 30
        cluster.nodes[1].kill()
        while_away = {decision: send_reward(client, decision) for decision in decisions[30:]}
        assert not all(while_away.values())
        cluster.nodes[1].start()
        cluster.agree()
        for decision in decisions[30:]:
            assert eventually(lambda decision=decision: send_reward(client, decision))
        accepted += len(decisions)

        assert eventually(lambda: applied_events(cluster) == accepted), (
            f"{applied_events(cluster)} of {accepted} learned"
        )
        assert eventually(lambda: client.get("/health/ready").status_code == 200)
        for decision in decisions:
            answer = client.post("/feedback", json={"decision_id": decision, "reward": 1.0})
            assert answer.json()["duplicates"] == 1
        play_over_http(client, world, 1_000, 1_010)
        assert applied_events(cluster) == accepted + 10
