"""Fusion versions are published under a lease, and forgotten users are removed from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.client.connection import scan
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.shared.fusion import (
    FusionJobRecord,
    FusionRecord,
    FusionSource,
    FusionStanding,
    FusionStore,
    new_token,
)

NAMES = {"t1": "ann", "t2": "bø }{", "t3": "cem"}


@pytest.fixture
def fusion(redis: Redis, record: NamespaceRecord) -> FusionStore:
    return FusionStore(redis, record.keys, record.store_id)


def make_record(version: int, tokens: tuple[str, ...] = tuple(NAMES)) -> FusionRecord:
    sources = tuple(FusionSource(token, np.array([1 / 3, -1e-300, n]), n) for n, token in enumerate(tokens))
    return FusionRecord(version, {"w": np.arange(3.0)}, sources, {"verdict": "fusion"}, 123, events=99)


async def publish(fusion: FusionStore, version: int = 1) -> None:
    assert await fusion.acquire_lease("me", 60_000)
    assert await fusion.publish(make_record(version), NAMES, lease_token="me")


Stored = Callable[[], Awaitable[list[object]]]


@pytest.fixture
def stored(redis: Redis, record: NamespaceRecord) -> Stored:
    """All keys of fusion, field by field: the dump of a large hash has no fixed order."""

    async def look() -> list[object]:
        hashes = (record.keys.fusion, record.keys.fusion_sources, record.keys.fusion_job)
        return [*[await redis.hgetall(key) for key in hashes], await redis.xlen(record.keys.epoch_log)]

    return look


class TestPublishing:
    async def test_round_trip(self, fusion: FusionStore) -> None:
        assert (await fusion.current(), await fusion.identity(), await fusion.standing()) == (None, None, None)
        assert await fusion.everyone() == {}
        await publish(fusion)
        found = await fusion.current()
        assert found is not None
        assert (found.version, found.report, found.created_ms, found.events) == (1, {"verdict": "fusion"}, 123, 99)
        assert found.arrays["w"].tolist() == [0.0, 1.0, 2.0]
        for source, given in zip(found.sources, make_record(1).sources, strict=True):
            assert (source.token, source.incarnation) == (given.token, given.incarnation)
            assert np.array_equal(source.profile, given.profile)
        assert await fusion.identity() == (1, found.stamp)
        assert await fusion.everyone() == NAMES
        assert await fusion.names(["t2", "unknown", "t2"]) == {"t2": NAMES["t2"]}
        assert await fusion.names([]) == {}

    async def test_the_update_log_announces_a_version(self, redis: Redis, record, fusion: FusionStore) -> None:
        epochs = EpochStore(redis, record.keys, record.store_id)
        await epochs.acquire_lease("meta", 60_000)
        assert await epochs.publish(Epoch(0, 0, {"mu": np.zeros(1)}, (), 1), lease_token="meta")
        await publish(fusion)
        assert [fields for _, fields in await redis.xrange(record.keys.epoch_log)] == [{b"n": b"0"}] * 2
        assert (await epochs.current_identity() or ())[0] == 0

    @pytest.mark.parametrize("version", [0, 1, 3])
    async def test_versions_follow_one_another(self, fusion: FusionStore, stored: Stored, version: int) -> None:
        await publish(fusion)
        before = await stored()
        assert not await fusion.publish(make_record(version), NAMES, lease_token="me")
        assert await stored() == before
        assert await fusion.publish(make_record(2), NAMES, lease_token="me")

    async def test_only_under_the_lease(self, fusion: FusionStore, stored: Stored) -> None:
        assert not await fusion.publish(make_record(1), NAMES, lease_token="me")
        await fusion.acquire_lease("another", 60_000)
        before = await stored()
        assert not await fusion.publish(make_record(1), NAMES, lease_token="me")
        assert not await fusion.put_job(FusionJobRecord("running"), lease_token="me")
        assert await stored() == before

    async def test_not_while_a_restore_is_unfinished(self, redis: Redis, record, fusion: FusionStore) -> None:
        await fusion.acquire_lease("me", 60_000)
        await redis.hset(record.keys.restoring, "generation", "1")
        assert not await fusion.publish(make_record(1), NAMES, lease_token="me")
        assert await fusion.renew_lease("me", 60_000)
        await fusion.release_lease("me")
        assert not await fusion.acquire_lease("me", 60_000), "the training would be useless"

    async def test_names_are_exactly_those_of_the_sources(self, fusion: FusionStore) -> None:
        for names in ({"t1": "ann"}, {**NAMES, "t4": "dee"}):
            with pytest.raises(ValueError, match="source"):
                await fusion.publish(make_record(1), names, lease_token="me")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("blob", b"no"),
            ("sources", b"{"),
            ("sources", b'[["t", "!", 0]]'),
            ("sources", b"[[1, 2]]"),
            ("report", b"[]"),
            ("report", b"{"),
        ],
    )
    async def test_damage_is_found(self, redis: Redis, record, fusion: FusionStore, field: str, value: bytes) -> None:
        await publish(fusion)
        await redis.hset(record.keys.fusion, field, value)
        with pytest.raises(CorruptRecord):
            await fusion.current()


class TestForgetting:
    async def test_only_the_row_and_name_of_the_user_are_removed(
        self, redis: Redis, record, fusion: FusionStore
    ) -> None:
        await publish(fusion)
        before = await fusion.current()
        assert before is not None
        head = await redis.xlen(record.keys.epoch_log)
        assert await fusion.strike([NAMES["t2"], "stranger"]) == 1
        found = await fusion.current()
        assert found is not None
        assert [source.token for source in found.sources] == ["t1", "t3"]
        assert np.array_equal(found.sources[1].profile, before.sources[2].profile)
        assert found.sources[1].incarnation == 2
        assert await fusion.everyone() == {"t1": "ann", "t3": "cem"}
        assert await fusion.standing() == FusionStanding(1, 123, 99, count=3, struck=1)
        # Services hold the profiles, so they have to read again.
        assert found.stamp != before.stamp
        assert await redis.xlen(record.keys.epoch_log) == head + 1

    async def test_forgetting_all_sources(self, fusion: FusionStore) -> None:
        await publish(fusion)
        assert await fusion.strike(NAMES.values()) == 3
        found = await fusion.current()
        assert found is not None
        assert found.sources == ()
        assert await fusion.everyone() == {}

    async def test_other_users_change_nothing(self, fusion: FusionStore, stored: Stored) -> None:
        assert await fusion.strike(["ann"]) == 0
        await publish(fusion)
        before = await stored()
        assert (await fusion.strike(["t1"]), await fusion.strike([])) == (0, 0)
        assert await stored() == before

    async def test_the_name_in_an_earlier_version_is_removed_too(self, fusion: FusionStore) -> None:
        await publish(fusion)
        only = {"t1": "ann"}
        assert await fusion.publish(make_record(2, ("t1",)), only, lease_token="me")
        assert await fusion.names(["t2"]) == {"t2": NAMES["t2"]}, "earlier warm starts still name it"
        assert await fusion.strike([NAMES["t2"]]) == 1
        assert await fusion.everyone() == {**only, "t3": "cem"}
        assert await fusion.standing() == FusionStanding(2, 123, 99, count=1, struck=0), (
            "it was not a source of this version"
        )

    def test_tokens_are_unique(self) -> None:
        assert len({new_token() for _ in range(100)}) == 100


class TestJob:
    async def test_a_request_waits_for_a_worker(self, fusion: FusionStore) -> None:
        assert await fusion.job() == FusionJobRecord()
        queued = FusionJobRecord(state="queued", requested_ms=5, by="request")
        assert await fusion.request(5) == queued == await fusion.job()
        assert await fusion.request(6) == queued, "one job is enough"
        await fusion.acquire_lease("me", 60_000)
        running = replace(queued, state="running", started_ms=7, progress=0.25, doing="training")
        assert await fusion.put_job(running, lease_token="me")
        assert await fusion.request(8) == running
        failed = replace(running, state="failed", finished_ms=9, reason="too few")
        assert await fusion.put_job(failed, lease_token="me")
        assert await fusion.job() == failed
        assert (
            await fusion.request(10)
            == FusionJobRecord(state="queued", requested_ms=10, by="request")
            == await fusion.job()
        )

    @pytest.mark.parametrize(
        ("field", "value"), [("state", "odd"), ("by", "odd"), ("progress", "x"), ("started_ms", "x")]
    )
    async def test_damage_is_found(self, redis: Redis, record, fusion: FusionStore, field: str, value: str) -> None:
        await fusion.request(5)
        await redis.hset(record.keys.fusion_job, field, value)
        with pytest.raises(CorruptRecord):
            await fusion.job()


async def test_leases(fusion: FusionStore) -> None:
    assert await fusion.acquire_lease("me", 60_000)
    assert not await fusion.acquire_lease("another", 60_000)
    assert await fusion.renew_lease("me", 60_000)
    assert not await fusion.release_lease("another")
    assert await fusion.release_lease("me")
    assert not await fusion.renew_lease("me", 60_000)


async def test_deleting_the_namespace_deletes_all_of_it(redis: Redis, record, fusion: FusionStore) -> None:
    await publish(fusion)
    await fusion.request(1)
    await redis.hset(record.keys.start("ann"), "incarnation", "0")
    await NamespaceStore(redis).delete(record)
    left = [key async for found in scan(redis, record.keys.every_pattern) for key in found]
    assert left == [record.keys.record.encode()]
    for write in (
        fusion.request(2),
        fusion.put_job(FusionJobRecord(), lease_token="me"),
        fusion.publish(make_record(1), NAMES, lease_token="me"),
    ):
        with pytest.raises(StoreReset):
            await write
    assert [key async for found in scan(redis, record.keys.every_pattern) for key in found] == left


class TestProfileLayout:
    async def test_the_first_profile_fixes_the_layout(self, redis: Redis, record: NamespaceRecord) -> None:
        namespaces = NamespaceStore(redis)
        assert record.profile_layout is None
        assert b"profile_layout" not in record.encode(), "as in older records"
        fixed = await namespaces.set_profile_layout(record, {"arm": 3})
        assert fixed.profile_layout == {"arm": 3}
        assert await namespaces.load(record.name) == fixed
        for seen in (record, fixed):
            assert (await namespaces.set_profile_layout(seen, {"arm": 4})).profile_layout == {"arm": 3}
        assert (await namespaces.load(record.name)) == fixed

    async def test_concurrent_changes_of_the_record_are_kept(self, redis: Redis, record: NamespaceRecord) -> None:
        namespaces = NamespaceStore(redis)
        await namespaces.set_layout(record, {"arm": 1})
        fixed = await namespaces.set_profile_layout(record, {"arm": 3})
        assert (fixed.layout, fixed.profile_layout) == ({"arm": 1}, {"arm": 3})

    async def test_it_is_deleted_with_the_namespace(self, redis: Redis, record: NamespaceRecord) -> None:
        namespaces = NamespaceStore(redis)
        gone = await namespaces.mark_deleted(await namespaces.set_profile_layout(record, {"arm": 3}))
        assert gone.profile_layout is None

    def test_anything_but_an_object_is_refused(self, record: NamespaceRecord) -> None:
        blob = replace(record, profile_layout={}).encode().replace(b'"profile_layout":{}', b'"profile_layout":3')
        with pytest.raises(CorruptRecord):
            NamespaceRecord.decode(blob)
