"""/admin/users shows the decisions that still accept rewards."""

from __future__ import annotations

import httpx
from redis.asyncio import Redis

from metaban.store.decisions.decisions import DecisionStore
from tests.service.engine.reward_calls import KEYS, WINDOW_MS, ask, backdate, codes, served, tell


async def shown(service: httpx.AsyncClient) -> dict[str, int]:
    """The open decisions of the user, and when they close."""
    answer = await service.get("/admin/users/u")
    assert answer.status_code == 200, answer.text
    return {each["decision_id"]: each["expires_ms"] for each in answer.json()["decisions"]}


async def test_decision_is_open_until_the_reward_window_ends(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _):
        for name in ("late", "open"):
            await ask(service, name)
        await backdate(client, "late", WINDOW_MS + 5_000)
        await backdate(client, "open", WINDOW_MS - 60_000)
        made = await DecisionStore(client, KEYS, ttl_s=60).get("open")
        assert made is not None
        assert await shown(service) == {"open": made.created_ms + WINDOW_MS}
        assert codes(await tell(service, "late")) == ["late"]
        assert codes(await tell(service, "open")) == []


async def test_deferred_decision_can_be_activated_within_the_window(
    redis: Redis, client: Redis, valkey_url: str
) -> None:
    async with served(valkey_url) as (service, _):
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS - 60_000)
        [until_ms] = (await shown(service)).values()
        activated_ms = (await service.post("/decisions/d/activate")).json()["activated_ms"]
        assert until_ms < activated_ms + 60_001
        assert await shown(service) == {"d": activated_ms + WINDOW_MS}


async def test_user_with_only_an_expired_decision_is_known(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _):
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert await shown(service) == {}
        await client.delete(KEYS.decision("d"))
        assert (await service.get("/admin/users/u")).status_code == 404
