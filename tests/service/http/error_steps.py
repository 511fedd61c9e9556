"""Steps of the cases in `error_cases`: before a request, and while it is made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

from metaban.service.http.auth import FreshKey
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.events.stream import ARM_REWARDS_MAX, EventStream
from metaban.store.namespaces import NamespaceStore
from tests.service.apps import running_app
from tests.service.http.error_world import ASK, KEYS, USER, Step, World
from tests.service.transfer_jobs import keep
from tests.worker.workshop import make_event, soon

CLIENT, ADMIN, SHOP, SHOP_ADMIN = (FreshKey.generate() for _ in range(4))
SNAPSHOT = "20260301T060000Z-ab12cd"
LINES = b'{"id": "x", "features": [1, 2, 3]}\n'
NDJSON = {"Content-Type": "application/x-ndjson"}
REWARD = {"decision_id": "d", "reward": 1}
CATALOGUE = [{"id": f"arm {place}", "features": [1, 2, place]} for place in range(2)]


def key(fresh: FreshKey) -> dict[str, str]:
    return {"X-API-Key": fresh.key}


# Before the request


async def decided(world: World) -> None:
    await world.ok("POST", "/recommend", {**ASK, "decision_id": "d"})


async def told_of_the_user(world: World) -> None:
    await world.ok("POST", "/recommend", {**ASK, "user_features": [1, 2]})


async def deferred(world: World) -> None:
    await world.ok("POST", "/recommend", {**ASK, "decision_id": "d", "deferred": True})


async def began_anew(world: World) -> None:
    """The user has another incarnation than the decision, as after a restore."""
    await decided(world)
    await world.engine._users.forget(USER)


async def rewarded_often(world: World) -> None:
    """A decision with as many rewards as it takes."""
    await decided(world)
    rewards = [{**REWARD, "event_id": f"reward {number}"} for number in range(ARM_REWARDS_MAX)]
    await world.ok("POST", "/feedback", {"events": rewards})


async def long_ago(world: World) -> None:
    """A deferred decision that was made more than a reward window ago."""
    await deferred(world)
    stored = await DecisionStore(world.store, KEYS, ttl_s=60).get("d")
    assert stored is not None
    earlier = replace(stored, created_ms=stored.created_ms - 100_000_000)
    await world.store.execute_command("SET", KEYS.decision("d"), earlier.encode(), "KEEPTTL")


async def unreadable(world: World) -> None:
    """A decision that cannot be decoded."""
    await decided(world)
    await world.store.execute_command("SET", KEYS.decision("d"), b"junk", "KEEPTTL")


async def catalogued(world: World) -> None:
    for arm in CATALOGUE:
        await world.ok("POST", "/admin/arms", arm)


async def catalogued_and_decided(world: World) -> None:
    await catalogued(world)
    await decided(world)


async def buried(world: World) -> None:
    """A dead letter with a reward."""
    await decided(world)
    await world.ok("POST", "/feedback", REWARD)
    partition = KEYS.partition_of(USER)
    stream = EventStream(world.store, KEYS, dedupe_window_s=60, backlog_limit=100)
    [delivery] = await stream.read([partition], "one", count=9, block_ms=0)
    await stream.letters.bury(delivery, "one", "hopeless")
    await name_letter(world, partition)


async def name_letter(world: World, partition: int) -> None:
    [(letter, _)] = await world.store.xrange(KEYS.dead_letters(partition))
    world.names.update(partition=partition, letter=letter.decode())


async def no_reward_buried(world: World) -> None:
    await world.store.xadd(KEYS.dead_letters(1), {"this": "is none"})
    await name_letter(world, 1)


async def buried_and_told_again(world: World) -> None:
    """The dead letter's event id expired, and the event was sent again."""
    await buried(world)
    async for seen in world.store.scan_iter("*}:seen:*"):
        await world.store.delete(seen)
    await world.ok("POST", "/feedback", REWARD)


async def buried_while_others_wait(world: World) -> None:
    """Fill the backlog."""
    await buried(world)
    await world.ok("POST", "/recommend", {**ASK, "decision_id": "e"})
    await world.ok("POST", "/feedback", {**REWARD, "decision_id": "e"})


async def backlog(world: World) -> None:
    await decided(world)
    stream = EventStream(world.store, KEYS, dedupe_window_s=60, backlog_limit=100)
    await stream.enqueue([make_event(USER, 0)])


async def kept(world: World) -> None:
    """Three users with stored rewards, one of them with too few to be a target."""
    await keep(world.store, ["a", "b"])
    await keep(world.store, ["few"], samples=3)


async def shop(world: World) -> None:
    await world.ok("POST", "/admin/namespaces", {"name": "shop"})


async def guarded_shop(world: World) -> None:
    await world.ok("POST", "/admin/namespaces", {"name": "shop"}, headers=key(ADMIN))


async def misfit_shop(world: World) -> None:
    """A namespace whose stored learner settings this version does not allow."""
    async with running_app(world.own_valkey.url) as (_, elsewhere):
        assert (await elsewhere.post("/admin/namespaces", json={"name": "shop"})).is_success
    namespaces = NamespaceStore(world.store)
    record = await namespaces.load("shop")
    assert record is not None
    assert await namespaces.change(record, learner={**record.learner, "alpha": 1e30})


async def emptied(world: World) -> None:
    """The store was emptied, and the service has noticed it."""
    await decided(world)
    await world.store.flushall()
    assert (await world.http.get("/health/ready")).status_code == 503


# During the request


async def hanging(world: World) -> None:
    """The store accepts commands and does not answer."""
    world.own_valkey.pause()
    world.held.callback(world.own_valkey.resume)


async def away(world: World) -> None:
    """The store hangs, and the service has noticed it."""
    await hanging(world)

    async def noticed() -> bool:
        checks = (await world.http.get("/health/ready")).json()["checks"]
        return "store" in checks and not checks["store"]["ok"]

    await soon(noticed)


async def dead(world: World) -> None:
    world.own_valkey.kill()
    world.held.callback(world.own_valkey.start)


async def a_job_runs(world: World) -> None:
    """A snapshot job that waits for a lease."""
    await decided(world)
    await world.store.set(KEYS.lease, "somebody", px=60_000)
    await world.ok("POST", "/admin/snapshots")


async def a_file_comes(world: World) -> None:
    """An import whose body does not end."""
    begun = asyncio.Event()

    async def lines() -> AsyncIterator[bytes]:
        begun.set()
        yield LINES
        await asyncio.Event().wait()

    await world.hold("POST", "/admin/arms/import", content=lines(), headers=NDJSON)
    await begun.wait()


async def snapshots_are_verified(world: World) -> None:
    """A verification that hangs."""
    folder = world.data_dir / "snapshots"
    folder.mkdir()
    os.mkfifo(folder / f"{SNAPSHOT}.tar")
    first = asyncio.create_task(world.http.get("/admin/snapshots?verify=true"))

    async def release() -> None:
        await asyncio.to_thread((folder / f"{SNAPSHOT}.tar").write_bytes, b"")
        assert (await first).status_code == 200

    world.held.push_async_callback(release)

    async def verified() -> bool:
        return world.engine.snapshots._verifying is not None

    await soon(verified)


async def a_request_is_under_way(world: World) -> None:
    """A request that waits while another namespace is opened."""
    metrics, registry = world.app.state.metaban.metrics, world.app.state.metaban.recommenders
    await registry._opening.acquire()
    world.held.callback(registry._opening.release)
    await world.hold("POST", "/admin/namespaces", json={"name": "other"})

    async def under_way() -> bool:
        return bool(metrics.registry.get_sample_value("metaban_inflight_requests") == 1)

    await soon(under_way)


async def none_may_wait(world: World) -> None:
    world.monkeypatch.setattr("metaban.service.engine.model.batcher.WAITING_REQUESTS_MAX", 0)


def asked(times: int, **headers: str) -> Step:
    """Make this many requests first."""

    async def ask(world: World) -> None:
        for _ in range(times):
            assert (await world.http.get("/docs", headers=headers)).status_code == 200

    return ask


async def no_room_on_disk(world: World) -> None:
    world.data_dir.rmdir()
    world.data_dir.write_text("not a folder")


# Bodies


async def endless() -> AsyncIterator[bytes]:
    """One piece, and no end."""
    yield b"{"
    await asyncio.Event().wait()


async def unannounced() -> AsyncIterator[bytes]:
    """A long body without a Content-Length."""
    for _ in range(5):
        yield b" " * 1_000
