"""Task modeling in real processes: users of different tastes form clusters, and a job finds which of them help one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from metaban.service.process.local_deployment import Deployment

#: Tastes as directions. Clusters are sought from the 1,024th reward on, when each user has ten.
TASTES = np.array([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]])
USERS, ARMS, ROUNDS = 60, 5, 4
FOUND_WITHIN_S = 120.0


def send_rewards(client: httpx.Client, random: np.random.Generator) -> None:
    """Send rewards for all arms of some slates."""
    for _ in range(ROUNDS):
        offers = random.normal(size=(USERS, ARMS, 2))
        liked = (offers * TASTES[np.arange(USERS) % len(TASTES), None]).sum(-1)
        rewards = np.clip(0.5 + 0.2 * liked + 0.05 * random.normal(size=(USERS, ARMS)), 0, 1)
        asked = [
            {
                "user_id": f"user {user}",
                "arms": [{"id": str(arm), "features": offers[user, arm].tolist()} for arm in range(ARMS)],
                "k": ARMS,
            }
            for user in range(USERS)
        ]
        answer = client.post("/recommend/batch", json={"requests": asked})
        assert answer.status_code == 200, answer.text
        events = [
            {"decision_id": each["decision"]["decision_id"], "arm_id": str(arm), "reward": float(rewards[user, arm])}
            for user, each in enumerate(answer.json()["results"])
            for arm in range(ARMS)
        ]
        assert client.post("/feedback", json={"events": events}).json()["accepted"] == len(events)


def eventually(client: httpx.Client, path: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Repeat a call until its answer is as wanted; returns the answer."""
    end = time.monotonic() + FOUND_WITHIN_S
    while True:
        shown: dict[str, Any] = client.get(path).json()
        if wanted(shown):
            return shown
        assert time.monotonic() < end, shown
        time.sleep(0.1)


def wait_settled(client: httpx.Client) -> None:
    """Wait until all rewards are applied and the epochs they make due are served."""
    end = time.monotonic() + FOUND_WITHIN_S
    while True:
        lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
        shown = {name: float(value) for name, value in lines if 'namespace="default"' in name}
        enqueued, applied = (
            shown[f'metaban_events{{namespace="default",state="{state}"}}'] for state in ("enqueued", "applied")
        )
        if applied == enqueued and shown['metaban_epoch_due{namespace="default"}'] == 0:
            return
        assert time.monotonic() < end, (enqueued, applied)
        time.sleep(0.1)


@pytest.mark.slow
def test_clusters_are_found_and_asked_about(tmp_path: Path) -> None:
    with (
        Deployment(tmp_path, {"METABAN_PARTITIONS": "2"}) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        assert client.get("/admin/transfer").json()["clusters"] == 0
        send_rewards(client, np.random.default_rng(7))
        wait_settled(client)  # a later epoch may number the clusters anew
        shown = eventually(client, "/admin/transfer", lambda shown: bool(shown["clusters"] > 1))
        assert shown["clusters"] == len(TASTES)

        asked = client.post("/admin/transfer", json={"cluster": 1})
        assert asked.status_code == 202, asked.text
        job = f"/admin/transfer/{asked.json()['id']}"
        result = eventually(client, job, lambda shown: bool(shown["state"] == "done"))["result"]
        assert result["target"]["users"] == USERS // len(TASTES)
        users = {source["cluster"]: source["users"] for source in result["sources"]}
        assert users == {0: USERS // len(TASTES), 2: USERS // len(TASTES)}
