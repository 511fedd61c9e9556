"""Steps shared by the tests with real processes: play rounds, send rewards, read the store, wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from redis import ConnectionError as StoreGone
from redis import Redis

from metaban.bench.worlds.environments import EnvironmentRound, SyntheticGroups
from metaban.service.process.local_deployment import Deployment

#: Longest time that `eventually` waits.
HEAL_S = 90.0


@dataclass
class Play:
    """One round: question, chosen arm and reward."""

    asked: EnvironmentRound
    arm: int
    reward: float


def play_over_http(
    client: httpx.Client, world: SyntheticGroups, first: int, last: int, *, epochs: Sequence[int] = ()
) -> list[Play]:
    """Play rounds first … last−1; each reward is applied before the next request.

    With `epochs`, the lowest epoch that may answer each round.
    """
    plays = []
    for number in range(first, last):
        asked = world.next_round()
        arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
        body: dict[str, object] = {"user_id": asked.user_id, "arms": arms, "decision_id": f"round-{number}"}
        if epochs:
            body["min_version"] = epochs[number - first]
        answer = client.post("/recommend", json=body)
        assert answer.status_code == 200, answer.text
        arm = int(answer.json()["items"][0]["arm_id"])
        reward = world.reward(asked, arm)
        answer = client.post(
            "/feedback", params={"wait": "applied"}, json={"decision_id": f"round-{number}", "reward": reward}
        )
        assert answer.status_code == 202, answer.text
        assert answer.json() == {"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}
        plays.append(Play(asked, arm, reward))
    return plays


def scores_for_all_users(client: httpx.Client, world: SyntheticGroups) -> list[dict[str, object]]:
    """Scores of a whole slate for every user."""
    asked = world.next_round()
    arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
    answers = []
    for user in range(12):
        answer = client.post("/recommend", json={"user_id": f"user-{user}", "arms": arms, "k": len(arms)})
        items = sorted(answer.json()["items"], key=lambda item: item["arm_id"])
        answers += [{"user": user, **{key: item[key] for key in ("mean", "bonus", "group_size")}} for item in items]
    return answers


def eventually(holds: Callable[[], bool]) -> bool:
    """Wait until `holds` is true; False after HEAL_S."""
    deadline = time.monotonic() + HEAL_S
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False


def epoch_served(deployment: Deployment, events: int) -> bool:
    """Wait until an epoch that was derived from so many events is served; False after HEAL_S.

    Scores and stored state change with an epoch, some time after the event that made it due.
    """

    def served() -> bool:
        lines = [line for line in deployment.log().splitlines() if '"event": "epoch_served"' in line]
        return any(json.loads(line)["events"] >= events for line in lines)

    return eventually(served)


def applied_events(deployment: Deployment) -> int:
    """Number of applied events; −1 while the store is unavailable."""
    try:
        with Redis(unix_socket_path=str(next(deployment.data_dir.glob("run/*.sock"))), protocol=2) as redis:
            hashes = [redis.hvals(key) for key in redis.scan_iter("metaban:*:versions")]
    except (StoreGone, StopIteration):
        return -1
    return sum(int(version.split(b":")[1]) for versions in hashes for version in versions)


def valkey_pid(deployment: Deployment) -> int:
    with Redis(unix_socket_path=str(next(deployment.data_dir.glob("run/*.sock"))), protocol=2) as redis:
        return int(redis.info("server")["process_id"])


def send_reward(client: httpx.Client, decision: str) -> bool:
    """Send a reward; whether it was acknowledged. A retry is safe: it would be a duplicate."""
    try:
        return client.post("/feedback", json={"decision_id": decision, "reward": 1.0}).status_code == 202
    except httpx.TransportError:
        return False
