"""Influence of users in real processes: the worker finds users whose rewards contradict the others; administrators see
them and can request which users help a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from metaban.service.process.local_deployment import Deployment

#: Kinds are searched early and again at the 512th reward, when each user has six.
USERS, CONTRARY, ARMS, ROUNDS = 80, 20, 2, 4
FOUND_WITHIN_S = 120.0


def send_rewards(client: httpx.Client, random: np.random.Generator) -> None:
    """Send rewards for all arms of some slates; the first users have the opposite taste of the others."""
    for _ in range(ROUNDS):
        offers = random.normal(size=(USERS, ARMS, 2))
        rewards = np.clip(0.4 + 0.3 * offers[..., 0] + 0.05 * random.normal(size=(USERS, ARMS)), 0, 1)
        rewards[:CONTRARY] = 1 - rewards[:CONTRARY]
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


def some_user_has_no_influence(shown: dict[str, Any]) -> bool:
    return shown["teaching"] is not None and min(shown["teaching"]["weights"]) < 1


@pytest.mark.slow
def test_users_who_contradict_the_others_lose_influence(tmp_path: Path) -> None:
    with (
        Deployment(tmp_path, {"METABAN_PARTITIONS": "2", "METABAN_LEARNER": '{"teaching": true}'}) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        assert client.get("/admin/transfer").json()["teaching"] is None
        send_rewards(client, np.random.default_rng(7))
        wait_settled(client)  # a later epoch may number the clusters anew
        taught = eventually(client, "/admin/transfer", some_user_has_no_influence)["teaching"]
        assert taught["clusters"] == len(taught["weights"])
        assert set(taught["weights"]) == {0.0, 1.0}, taught
        assert taught["gain"] > 2 * taught["gain_error"] > 0

        target = taught["weights"].index(1.0)
        asked = client.post("/admin/transfer", json={"cluster": target})
        assert asked.status_code == 202, asked.text
        job = f"/admin/transfer/{asked.json()['id']}"
        result = eventually(client, job, lambda shown: bool(shown["state"] == "done"))["result"]
        users = {source["cluster"]: source["users"] for source in result["sources"]} | {
            target: result["target"]["users"]
        }
        silent = [users[cluster] for cluster, weight in enumerate(taught["weights"]) if not weight and cluster in users]
        assert sum(silent) == CONTRARY
        assert sum(users.values()) == USERS
