"""The reward range changes while earlier rewards are stored."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis

from tests.service.engine.reward_calls import ARMS, ask, learned, served, users
from tests.service.engines import worker_running

#: Rewards of two users with the same sum, -2.
SAME = {"many": (-5, 3), "one": (-2,)}


async def set_range(service: httpx.AsyncClient, least: float | None, greatest: float | None) -> None:
    answer = await service.patch("/admin/config", json={"reward_min": least, "reward_max": greatest})
    assert answer.status_code == 200, answer.text


async def reward(service: httpx.AsyncClient, decision_id: str, sent: float, event_id: str) -> None:
    body = {"decision_id": decision_id, "reward": sent, "event_id": event_id}
    assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]


async def states(client: Redis) -> list[dict[str, Any]]:
    """The learned state of each user."""
    stored = await (await users(client)).load(SAME)
    return [{name: array.tolist() for name, array in stored[user].tensors.items()} for user in SAME]


async def test_learned_rewards_stay_when_the_range_changes(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _), worker_running(valkey_url):
        for user in SAME:
            for place in range(2):
                await ask(service, f"{user}-{place}", user_id=user, arms=[ARMS[place]])
        # Rewards follow at once: the worker may not know the new range yet.
        await set_range(service, -5, 5)
        for user, rewards in SAME.items():
            for number, sent in enumerate(rewards):
                await reward(service, f"{user}-0", sent, str(number))
        many, one = await states(client)
        assert many == one
        await set_range(service, None, None)
        for user in SAME:
            await reward(service, f"{user}-1", 0, "other")
        many, one = await states(client)
        assert many == one
        assert await learned(client, "one") == [(0.3, False), (0.0, False)]


async def test_shown_rewards_are_rescaled_as_learned(redis: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _), worker_running(valkey_url):
        await set_range(service, -5, 5)
        await ask(service, "d")
        for number, sent in enumerate((-5, 3)):
            await reward(service, "d", sent, str(number))
        # A sum of the sent rewards would fall to -5, which Prometheus takes for a restart.
        metrics = (await service.get("/metrics")).text
        assert 'metaban_reward_sum{namespace="shop"} 0.8' in metrics
        assert 'metaban_reward_count{namespace="shop"} 2.0' in metrics
        assert "# HELP metaban_reward Sum and number of accepted rewards, scaled to 0..1." in metrics
        shown = (await service.get("/admin/users/u?events=5")).json()["events"]
        assert [event["reward"] for event in shown] == [0.8], "the latest of the arm"
        schemas = (await service.get("/openapi.json")).json()["components"]["schemas"]
        for name in ("UserEventOut", "LetterEvent"):
            assert "0..1" in schemas[name]["properties"]["reward"]["description"]
