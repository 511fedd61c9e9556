"""Default rewards in real processes: a decision without a reward is learned after a restart."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from metaban.service.process.local_deployment import Deployment

pytestmark = pytest.mark.slow

SOON_S = 30.0
ARMS = [{"id": f"a{n}", "features": [n, 1 - n]} for n in range(2)]
#: Seconds: not due before the service was stopped.
PATIENT = "2"


def learned(client: httpx.Client, user: str) -> int:
    answer = client.get(f"/admin/users/{user}")
    return int(answer.json()["version"]) if answer.status_code == 200 else 0


def wait_for(client: httpx.Client, user: str, version: int) -> None:
    end = time.monotonic() + SOON_S
    while learned(client, user) != version:
        assert time.monotonic() < end, f"{user} is at {learned(client, user)}, not {version}"
        time.sleep(0.05)


def test_default_rewards_survive_a_restart(tmp_path: Path) -> None:
    service = Deployment(tmp_path, {"METABAN_DEFAULT_REWARD": "0", "METABAN_REWARD_WAIT_S": PATIENT})
    with service:
        with httpx.Client(base_url=service.url, timeout=60) as client:
            assert client.post("/recommend", json={"user_id": "u", "arms": ARMS}).status_code == 200
        assert service.stop() == 0
        service.start()
        with httpx.Client(base_url=service.url, timeout=60) as client:
            wait_for(client, "u", 1)
