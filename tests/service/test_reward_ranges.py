"""A range that changes while rewards of before are kept, over HTTP, with a real store and a real worker."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis

from tests.service.test_engine import worker_running
from tests.service.test_rewarding import ARMS, ask, learned, served, users

#: Rewards of one arm that mean the same: -2, of a range from -5 to 5.
SAME = {"many": (-5, 3), "one": (-2,)}


async def set_range(service: httpx.AsyncClient, least: float | None, greatest: float | None) -> None:
    answer = await service.patch("/admin/config", json={"reward_min": least, "reward_max": greatest})
    assert answer.status_code == 200, answer.text


async def reward(service: httpx.AsyncClient, decision_id: str, sent: float, event_id: str) -> None:
    body = {"decision_id": decision_id, "reward": sent, "event_id": event_id}
    assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]


async def states(client: Redis) -> list[dict[str, Any]]:
    """What is learned of the users, of each."""
    stored = await (await users(client)).load(SAME)
    return [{name: array.tolist() for name, array in stored[user].tensors.items()} for user in SAME]


async def test_what_was_learned_under_one_range_stays_under_the_next(
    redis: Redis, client: Redis, valkey_url: str
) -> None:
    async with served(valkey_url) as (service, _), worker_running(valkey_url):
        for user in SAME:
            for place in range(2):
                await ask(service, f"{user}-{place}", user_id=user, arms=[ARMS[place]])
        # Rewards follow at once: the worker may not know of the range yet.
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


async def test_what_is_shown_of_rewards_is_as_they_are_learned_and_says_so(redis: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _), worker_running(valkey_url):
        await set_range(service, -5, 5)
        await ask(service, "d")
        for number, sent in enumerate((-5, 3)):
            await reward(service, "d", sent, str(number))
        # A sum of what was sent would have fallen to -5, which a rate takes for a restart.
        metrics = (await service.get("/metrics")).text
        assert 'metaban_reward_sum{namespace="shop"} 0.8' in metrics
        assert 'metaban_reward_count{namespace="shop"} 2.0' in metrics
        assert "# HELP metaban_reward Accepted rewards as they are learned, from 0 to 1" in metrics
        shown = (await service.get("/admin/users/u?events=5")).json()["events"]
        assert [event["reward"] for event in shown] == [0.8, 0.0]
        schemas = (await service.get("/openapi.json")).json()["components"]["schemas"]
        for name in ("UserEventOut", "LetterEvent"):
            assert "from 0 to 1" in schemas[name]["properties"]["reward"]["description"]
