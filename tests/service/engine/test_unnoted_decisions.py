"""A decision that is not in the index of its user does not stay in the store."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from metaban.store.decisions.decisions import UNNOTED_MS, DecisionRecord
from tests.cluster_driver import ClusterDriver
from tests.service.engine.reward_calls import ARMS, KEYS, served

USER, DECISION = "ann-of-the-test", "decision-of-the-test"
PARTITION = KEYS.partition_of(USER)
TOMBSTONE = {KEYS.user(USER), KEYS.versions(PARTITION), KEYS.update_log(PARTITION)}


async def keys_with(redis: Redis | ClusterDriver, word: str) -> set[str]:
    """Keys that have a word in their name or content."""
    found = set()
    async for key in redis.scan_iter():
        match await redis.type(key):
            case b"string":
                held: Any = await redis.get(key)
            case b"hash":
                held = await redis.hgetall(key)
            case b"list":
                held = await redis.lrange(key, 0, -1)
            case b"zset":
                held = await redis.zrange(key, 0, -1)
            case b"set":
                held = await redis.smembers(key)
            case _:
                held = await redis.xrange(key)
        if word in f"{key!r} {held!r}":
            found.add(key.decode())
    return found


@pytest.mark.parametrize("rules", [{}, {"default_reward": 0.0, "reward_wait_s": 3_000}], ids=["plain", "awaited"])
async def test_user_with_a_damaged_index_can_be_forgotten(
    redis: Redis, valkey_url: str, rules: dict[str, Any], short_tails: None
) -> None:
    body = {"user_id": USER, "arms": ARMS, "decision_id": DECISION}
    async with served(valkey_url, redis_url=valkey_url, **rules) as (service, _):
        await redis.set(KEYS.decided(USER), "damaged")
        with structlog.testing.capture_logs() as logs:
            assert (await service.post("/recommend", json=body)).status_code == 500
        assert "unexpected_error" in {line["event"] for line in logs}
        assert await keys_with(redis, DECISION) == set()
        forgotten = await service.delete(f"/admin/users/{USER}")
        assert forgotten.status_code == 200, forgotten.text
        assert await keys_with(redis, DECISION) == set()
        assert await keys_with(redis, USER) == TOMBSTONE
        assert (await service.post("/recommend", json=body)).json()["logged"]
        assert KEYS.decision(DECISION) in await keys_with(redis, USER)


async def test_a_decision_that_will_be_retracted_is_not_repeated(redis: Redis, valkey_url: str) -> None:
    body = {"user_id": USER, "arms": ARMS, "decision_id": DECISION}
    key = KEYS.decision(DECISION)
    async with served(valkey_url, redis_url=valkey_url) as (service, _):
        await service.post("/recommend", json=body)
        before = await redis.get(key)
        assert (await service.delete(f"/admin/users/{USER}")).status_code == 200
        # As another process leaves it between its two steps when it does not know yet that the user was forgotten.
        await redis.set(key, before, px=UNNOTED_MS)
        answer = (await service.post("/recommend", json=body)).json()
        stored = DecisionRecord.decode(await redis.get(key))
        assert (answer["logged"], stored.incarnation) == (True, 1)
        assert [item["arm_id"] for item in answer["items"]] == [item.arm_id for item in stored.items]
        reward = {"decision_id": DECISION, "arm_id": stored.items[0].arm_id, "reward": 1}
        assert (await service.post("/feedback", json=reward)).json()["accepted"] == 1
