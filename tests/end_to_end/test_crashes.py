"""Processes killed under way: what was acknowledged is learned once, and everything comes back by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from redis import ConnectionError as StoreGone
from redis import Redis

from bench.deployment import Deployment
from bench.environments import SyntheticGroups
from tests.end_to_end.test_loop import PATIENT_WAITS, play_over_http

HEAL_S = 30.0


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HEAL_S
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False


def learned(deployment: Deployment) -> int:
    """Σ versions: the events that have had their effect; −1 while the store is away."""
    try:
        with Redis(unix_socket_path=str(next(deployment.data_dir.glob("run/*.sock"))), protocol=2) as redis:
            hashes = [redis.hvals(key) for key in redis.scan_iter("metaban:*:versions")]
    except (StoreGone, StopIteration):
        return -1
    return sum(int(version.split(b":")[1]) for versions in hashes for version in versions)


def valkey_pid(deployment: Deployment) -> int:
    with Redis(unix_socket_path=str(next(deployment.data_dir.glob("run/*.sock"))), protocol=2) as redis:
        return int(redis.info("server")["process_id"])


def tell(client: httpx.Client, decision: str) -> bool:
    """Whether a reward was acknowledged; sent again it would be a duplicate, so trying again is safe."""
    try:
        return client.post("/feedback", json={"decision_id": decision, "reward": 1.0}).status_code == 202
    except httpx.TransportError:
        return False


def test_a_killed_worker_and_a_killed_store_lose_nothing(tmp_path: Path) -> None:
    world = SyntheticGroups(seed=3)
    settings = {**PATIENT_WAITS, "METABAN_DURABILITY": "always"}
    with (
        Deployment(tmp_path, settings) as service,
        httpx.Client(base_url=service.url, timeout=30) as client,
    ):
        accepted = len(play_over_http(client, world, 0, 20))
        decisions = []
        for number in range(60):
            asked = world.next_round()
            arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
            body = {"user_id": asked.user_id, "arms": arms, "decision_id": f"later-{number}"}
            assert client.post("/recommend", json=body).status_code == 200
            decisions.append(f"later-{number}")
        for decision in decisions[:30]:
            assert tell(client, decision)
            accepted += 1
        os.kill(service.worker_pid, signal.SIGKILL)
        for decision in decisions[30:]:
            assert tell(client, decision)
            accepted += 1
        os.kill(valkey_pid(service), signal.SIGKILL)

        assert eventually(lambda: learned(service) == accepted), f"{learned(service)} of {accepted} learned"
        assert eventually(lambda: client.get("/health/ready").status_code == 200)
        # Sent again, every one of them is known: nothing acknowledged was lost, nothing is learned twice.
        for decision in decisions:
            answer = client.post("/feedback", json={"decision_id": decision, "reward": 1.0})
            assert answer.json()["duplicates"] == 1
        play_over_http(client, world, 1_000, 1_010)
        assert learned(service) == accepted + 10


def test_a_killed_parent_leaves_nothing_that_hinders_the_next_start(tmp_path: Path) -> None:
    service = Deployment(tmp_path, {**PATIENT_WAITS, "METABAN_DURABILITY": "always"})
    service.start()
    with httpx.Client(base_url=service.url, timeout=30) as client:
        play_over_http(client, SyntheticGroups(seed=3), 0, 10)
    left_over = valkey_pid(service)
    service.kill()
    with service:
        assert valkey_pid(service) != left_over
        assert learned(service) == 10
        with httpx.Client(base_url=service.url, timeout=30) as client:
            play_over_http(client, SyntheticGroups(seed=4), 100, 105)
        assert learned(service) == 15
