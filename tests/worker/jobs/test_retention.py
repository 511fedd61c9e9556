"""Users who were not seen for long are forgotten, if the setting says so."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.shared.epochs import Epoch
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.transfer import TransferStore
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.warm_starts import StoredWarmStart
from metaban.worker.jobs import retention as retention_module
from metaban.worker.jobs.retention import DAY_S, Retention
from tests.worker.workshop import Workshop, make_event

#: The clock of these tests: a day long before that of the server, which dates decisions.
TODAY = 10_000
DAYS = 30
#: Latest day of which an unseen user is forgotten today.
LAST_DAY = TODAY - DAYS - 1


def retention(shop: Workshop, *, days: int = DAYS) -> Retention:
    more = (shop.redis, shop.keys, shop.record.store_id)
    return Retention(
        shop.users,
        shop.streams,
        DecisionStore(shop.redis, shop.keys, ttl_s=1),
        RemnantStore(shop.redis, shop.keys),
        (shop.epochs, FusionStore(*more), TransferStore(*more)),
        shop.model,
        shop.stopping,
        days=days,
        partitions=lambda: range(shop.record.partitions),
    )


async def decide(shop: Workshop, user: str, incarnation: int = 0, *, profile: bytes = b"", **more: Any) -> None:
    """Store a decision for a user, as a service does; its day is that of the server's clock."""
    decision = DecisionRecord(
        f"d of {user} in {incarnation}",
        user,
        "",
        (),
        np.empty((0, 2), dtype=np.float32),
        np.empty((0, 0), dtype=np.float32),
        "ucb",
        0,
        0,
        None,
        0,
        incarnation=incarnation,
    )
    store = DecisionStore(shop.redis, shop.keys, ttl_s=60, store_id=shop.record.store_id)
    await store.put(decision, profile=profile, **more)


async def seen_on(shop: Workshop, user: str, day: int) -> None:
    await shop.redis.zadd(shop.keys.last_seen(shop.keys.partition_of(user)), {user: day})


async def days(shop: Workshop) -> dict[str, int]:
    """The day on which each user of partition 0 was seen."""
    rows = await shop.redis.zrange(shop.keys.last_seen(0), 0, -1, withscores=True)
    return {user.decode(): int(day) for user, day in rows}


async def contents(shop: Workshop) -> dict[bytes, Any]:
    return {key: await shop.redis.dump(key) async for key in shop.redis.scan_iter()}


async def counters(shop: Workshop) -> dict[str, int]:
    """The counters of events; checks that each event was counted exactly once."""
    found = await shop.users.counters()
    finished = found["applied"] + found["voided"] + found["buried"]
    assert found["enqueued"] + found["replayed"] == finished + await shop.streams.backlog()
    assert found["applied"] == sum((await shop.versions()).values()) + found["forgotten"]
    return found


async def test_a_user_unseen_for_so_long_is_forgotten(shop: Workshop) -> None:
    await shop.learn({"old": 3, "recent": 2})
    for user, day in (("old", LAST_DAY), ("recent", LAST_DAY + 1)):
        await decide(shop, user, profile=b"[1]")
        await seen_on(shop, user, day)
    assert await shop.epochs.acquire_lease("m1", 60_000)
    await shop.epochs.publish(Epoch(0, 5, {"m": np.zeros(1)}, ("old", "recent"), 0), lease_token="m1")
    await retention(shop).tick(TODAY)
    assert await shop.users.versions(0) == {"old": (1, 0), "recent": (0, 2)}
    assert (await shop.users.load(["old"]))["old"].forgotten
    assert (await shop.users.load_samples(["old", "recent"])).keys() == {"recent"}
    keys = shop.keys
    assert not await shop.redis.exists(keys.profile("old"), keys.decision("d of old in 0"), keys.decided("old"))
    assert await shop.redis.exists(keys.profile("recent"), keys.decision("d of recent in 0")) == 2
    assert await shop.epochs.members() == ("recent",)
    assert await days(shop) == {"recent": LAST_DAY + 1}
    found = await counters(shop)
    assert (found["expired"], found["forgotten"], found["applied"]) == (1, 3, 5)
    # Its line in the update log makes services drop the user.
    line = (await shop.users.tail(0, "0-0", block_ms=0, count=99))[-1]
    assert (line.user_id, line.incarnation, line.version) == ("old", 1, 0)


async def test_a_user_who_comes_back_starts_as_new(shop: Workshop) -> None:
    await shop.learn({"u": 3})
    waiting = await shop.give([make_event("u", 10)])
    await seen_on(shop, "u", LAST_DAY)
    await retention(shop).tick(TODAY)
    await shop.publisher().publish(0, waiting)
    assert (await counters(shop))["voided"] == 1
    await decide(shop, "u", incarnation=1)
    await shop.publisher().publish(0, await shop.give([make_event("u", 11, incarnation=1)]))
    assert await shop.users.versions(0) == {"u": (1, 1)}
    assert [sample.arm_id for sample in (await shop.users.load_samples(["u"]))["u"]] == ["11"]
    assert (await counters(shop))["forgotten"] == 3
    await retention(shop).tick((await days(shop))["u"] + DAYS)
    assert await shop.users.versions(0) == {"u": (1, 1)}


async def test_a_reward_that_waits_for_days_is_learned_first(shop: Workshop) -> None:
    await shop.learn({"u": 1})
    await decide(shop, "u")
    later = (await days(shop))["u"] + DAYS + 9
    waiting = await shop.give([make_event("u", 10)])
    await retention(shop).tick(later)
    await shop.publisher().publish(0, waiting)
    assert await shop.users.versions(0) == {"u": (0, 2)}
    await retention(shop).tick(later)
    assert await shop.users.versions(0) == {"u": (1, 0)}
    assert (await counters(shop))["voided"] == 0


async def test_a_user_without_rewards_leaves_nothing(shop: Workshop) -> None:
    start = StoredWarmStart(0, np.ones(3), 1, (), 0)
    await decide(shop, "u", profile=b"[1]", start=start)
    assert await shop.redis.exists(shop.keys.profile("u"), shop.keys.start("u")) == 2
    await seen_on(shop, "u", LAST_DAY)
    await shop.redis.delete(shop.keys.decided("u"), shop.keys.decision("d of u in 0"))  # expired by themselves
    await retention(shop).tick(TODAY)
    assert [key async for key in shop.redis.scan_iter("*:u")] == []
    assert await days(shop) == await shop.users.versions(0) == {}
    assert (await counters(shop))["expired"] == 1
    await decide(shop, "u")
    await shop.learn({"u": 1})
    assert await shop.users.versions(0) == {"u": (0, 1)}


async def test_a_user_seen_on_an_unknown_day_counts_as_seen_today(shop: Workshop) -> None:
    """As those stored by an earlier version."""
    await shop.learn({"known": 1, "unknown": 1, "forgotten": 1})
    await shop.users.forget("forgotten")
    await seen_on(shop, "known", TODAY - 5)
    sweep = retention(shop)
    await sweep.tick(TODAY)
    assert await days(shop) == {"known": TODAY - 5, "unknown": TODAY}
    await sweep.tick(TODAY + DAYS)
    assert await shop.users.versions(0) == {"known": (1, 0), "unknown": (0, 1), "forgotten": (1, 0)}
    await sweep.tick(TODAY + DAYS + 1)
    assert await shop.users.versions(0) == {"known": (1, 0), "unknown": (1, 0), "forgotten": (1, 0)}
    assert (await counters(shop))["expired"] == 2


async def test_a_user_seen_meanwhile_is_kept(shop: Workshop) -> None:
    await shop.learn({"u": 1})
    await seen_on(shop, "u", LAST_DAY)
    unseen = await shop.users.unseen(0, LAST_DAY, count=9)
    await decide(shop, "u")
    before = await contents(shop)
    assert unseen == ["u"]
    assert await shop.users.expire(unseen, LAST_DAY) == {}
    assert await contents(shop) == before


async def test_a_decision_stores_its_day(shop: Workshop) -> None:
    for earlier in (None, 100, 1):
        first = int(time.time()) // DAY_S
        if earlier is not None:
            await seen_on(shop, "u", first - earlier)
        await decide(shop, "u")
        assert first <= (await days(shop))["u"] <= int(time.time()) // DAY_S


async def test_dead_letters_are_deleted(shop: Workshop) -> None:
    await shop.learn({"u": 1, "v": 1})
    await shop.publisher().publish(0, await shop.give([make_event(user, 7, reward=5.0) for user in ("u", "v")]))
    await seen_on(shop, "u", LAST_DAY)
    await retention(shop).tick(TODAY)
    assert [letter[b"u"] for letter in await shop.dead_letters()] == [b"v"]


async def test_a_page_at_each_tick(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "EXPIRED_TAKEN", 2)
    for place, user in enumerate("abc"):
        await shop.learn({user: 1}, first=place)
        await seen_on(shop, user, LAST_DAY - place)
    sweep = retention(shop)
    await sweep.tick(TODAY)
    assert await days(shop) == {"a": LAST_DAY}
    await sweep.tick(TODAY)
    assert await days(shop) == {}


@pytest.mark.parametrize(
    ("deployment", "override", "forgotten"),
    [(0, None, False), (DAYS, None, True), (0, DAYS, True), (DAYS, 0, False), (DAYS, DAYS + 1, False)],
)
async def test_the_setting(shop: Workshop, deployment: int, override: int | None, forgotten: bool) -> None:
    """Off by default; the namespace's own value counts first."""
    await shop.learn({"u": 1})
    await seen_on(shop, "u", LAST_DAY)
    if override is not None:
        await shop.namespaces.change(
            shop.record, overrides={"user_retention_days": override}, learner=shop.record.learner, rewards=None
        )
        await shop.model.refresh_record()
    before = await contents(shop)
    await retention(shop, days=deployment).tick(TODAY)
    assert (await contents(shop) != before) == forgotten
    assert ((await shop.users.versions(0))["u"] == (1, 0)) == forgotten
