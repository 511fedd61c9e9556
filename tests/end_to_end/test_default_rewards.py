"""Decisions that nobody answers, in real processes: learned by themselves, also after a restart of everything."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from bench.deployment import Deployment

SOON_S = 30.0
ARMS = [{"id": f"a{n}", "features": [n, 1 - n]} for n in range(2)]
#: Seconds: due at once, and not before the service was stopped.
HURRIED, PATIENT = ("0.1", "2")


def learned(client: httpx.Client, user: str) -> int:
    answer = client.get(f"/admin/users/{user}")
    return int(answer.json()["version"]) if answer.status_code == 200 else 0


def wait_for(client: httpx.Client, user: str, version: int) -> None:
    end = time.monotonic() + SOON_S
    while learned(client, user) != version:
        assert time.monotonic() < end, f"{user} is at {learned(client, user)}, not {version}"
        time.sleep(0.05)


def test_default_rewards_are_learned(tmp_path: Path) -> None:
    with (
        Deployment(tmp_path, {"METABAN_DEFAULT_REWARD": "0", "METABAN_REWARD_WAIT_S": HURRIED}) as service,
        httpx.Client(base_url=service.url, timeout=30) as client,
    ):
        for number in range(3):
            body = {"user_id": "u", "arms": ARMS, "k": 2, "decision_id": f"d{number}", "deferred": number == 2}
            assert client.post("/recommend", json=body).status_code == 200
        wait_for(client, "u", 4)
        assert client.post("/decisions/d2/activate").status_code == 200
        wait_for(client, "u", 6)


def test_they_outlive_the_processes(tmp_path: Path) -> None:
    service = Deployment(tmp_path, {"METABAN_DEFAULT_REWARD": "0", "METABAN_REWARD_WAIT_S": PATIENT})
    with service:
        with httpx.Client(base_url=service.url, timeout=30) as client:
            assert client.post("/recommend", json={"user_id": "u", "arms": ARMS}).status_code == 200
        assert service.stop() == 0
        service.start()
        with httpx.Client(base_url=service.url, timeout=30) as client:
            wait_for(client, "u", 1)
