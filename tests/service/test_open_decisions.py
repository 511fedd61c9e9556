"""The decisions shown of a user are those that rewards are taken for, over HTTP and with a real store."""

from __future__ import annotations

import httpx
from redis.asyncio import Redis

from store.decisions import DecisionStore
from tests.service.test_rewarding import KEYS, WINDOW_MS, ask, backdate, codes, served, tell


async def shown(service: httpx.AsyncClient) -> dict[str, int]:
    """The open decisions of the user, and until when they are."""
    answer = await service.get("/admin/users/u")
    assert answer.status_code == 200, answer.text
    return {each["decision_id"]: each["expires_ms"] for each in answer.json()["decisions"]}


async def test_until_the_reward_window_is_over(redis: Redis, client: Redis, valkey_url: str) -> None:
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


async def test_a_deferred_one_can_be_activated_until_then(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _):
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS - 60_000)
        [until_ms] = (await shown(service)).values()
        activated_ms = (await service.post("/decisions/d/activate")).json()["activated_ms"]
        assert until_ms < activated_ms + 60_001
        assert await shown(service) == {"d": activated_ms + WINDOW_MS}


async def test_who_has_only_one_that_is_too_late_is_still_known(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _):
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert await shown(service) == {}
        await client.delete(KEYS.decision("d"))
        assert (await service.get("/admin/users/u")).status_code == 404
