"""Following the catalogue: each change is read once and completely, also after compaction, rollback or FLUSHALL."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from metaban.store import catalogue
from metaban.store.catalogue import ArmWrite, CatalogueRevision, CatalogueStore, decode_features
from metaban.store.errors import StoreReset
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.store.helpers import MakeCatalogue, put_arms, remove_arms


class Reader:
    """A process that follows the catalogue."""

    def __init__(self, store: CatalogueStore) -> None:
        self.store = store
        self.standing = CatalogueRevision()
        self.arms: dict[str, Any] = {}
        self.restarts = 0

    async def follow(self) -> dict[str, Any]:
        changes = await self.store.changes_since(self.standing)
        if changes.anew:
            self.arms = {}
            self.restarts += 1
        for arm, blob in changes.arms.items():
            if blob is None:
                self.arms.pop(arm, None)
            else:
                self.arms[arm] = decode_features(blob)
        self.standing = changes.standing
        return self.arms


class TestFollowing:
    async def test_only_changes_are_read(self, arms: CatalogueStore) -> None:
        await put_arms(arms, "a", "b", "c")
        reader = Reader(arms)
        await reader.follow()
        await put_arms(arms, "b", at=2)
        await remove_arms(arms, "c")
        await put_arms(arms, "d")
        changes = await arms.changes_since(reader.standing)
        assert not changes.anew
        assert changes.arms == {"b": b"[2]", "c": None, "d": b"[1.0]"}
        assert changes.standing == await arms.standing()
        assert (await arms.changes_since(changes.standing)).arms == {}
        assert set(await reader.follow()) == {"a", "b", "d"}
        assert reader.restarts == 1

    async def test_many_pages(self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch) -> None:
        late = Reader(arms)
        for start in range(0, 700, 70):
            await put_arms(arms, *(f"{n:03d}" for n in range(start, start + 70)))
        monkeypatch.setattr(catalogue, "BATCH_ARMS", 70)  # pages of 71, each of which would cut a revision
        assert len(await late.follow()) == 700
        await remove_arms(arms, *(f"{n:03d}" for n in range(60)))
        await put_arms(arms, *(f"{n:03d}" for n in range(60, 120)), at=2)
        arms_now = await late.follow()
        assert sorted(arms_now) == [f"{n:03d}" for n in range(60, 700)]
        assert arms_now["119"] == [2.0]
        assert late.restarts == 1

    async def test_a_page_with_enough_bytes_ends_after_a_revision(
        self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for names in ("abc", "de", "f"):
            await put_arms(arms, *names)
        page = await arms.changes_page(CatalogueRevision(), 0)
        assert page is not None
        assert (set(page.arms), page.after, page.more) == (set("abc"), 1, True)
        assert set(await Reader(arms).follow()) == set("abcdef")

    async def test_changes_during_a_walk_are_part_of_it(
        self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for name in "abcde":
            await put_arms(arms, name)
        told = arms.changes_page
        pages = 0

        async def meanwhile(anchor: CatalogueRevision, after: int) -> Any:
            nonlocal pages
            pages += 1
            if pages == 3:  # both have been read already
                await remove_arms(arms, "a")
                await put_arms(arms, "b", at=2)
            return await told(anchor, after)

        monkeypatch.setattr(arms, "changes_page", meanwhile)
        reader = Reader(arms)
        assert await reader.follow() == {"b": [2], "c": [1.0], "d": [1.0], "e": [1.0]}
        assert reader.standing == await arms.standing()

    async def test_a_reader_behind_a_compaction_starts_again(self, make_catalogue: MakeCatalogue) -> None:
        arms = make_catalogue(tombstones_kept=2)
        await put_arms(arms, *"abcdef")
        early, late = Reader(arms), Reader(arms)
        await early.follow()
        await remove_arms(arms, "a")
        await late.follow()
        await remove_arms(arms, "b", "c")  # the tombstone of `a` is removed
        assert set(await late.follow()) == set(await early.follow()) == set("def")
        assert (early.restarts, late.restarts) == (2, 1)

    async def test_the_number_of_tombstones_is_limited(
        self, redis: Redis, record: NamespaceRecord, make_catalogue: MakeCatalogue
    ) -> None:
        arms = make_catalogue(tombstones_kept=3, stamps_kept=5)
        await put_arms(arms, "stays")
        for n in range(20):
            await put_arms(arms, f"a{n}", f"b{n}")
            await remove_arms(arms, f"a{n}", f"b{n}")
        keys = record.keys
        assert await redis.zcard(keys.arm_removals) == 3
        assert await redis.zcard(keys.arm_changes) == await redis.hlen(keys.arm_versions) == 4
        assert await redis.zcard(keys.arm_order) == await redis.hlen(keys.arms) == 1
        assert await redis.llen(keys.catalogue_log) == 5
        # The only arm has a revision older than all tombstones and stamps.
        reader = Reader(arms)
        assert list(await reader.follow()) == ["stays"]
        await put_arms(arms, "b19")
        assert await redis.zcard(keys.arm_removals) == 2
        assert set(await reader.follow()) == {"stays", "b19"}
        assert reader.restarts == 1

    async def test_a_walk_over_an_old_catalogue_ends(
        self, make_catalogue: MakeCatalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Arms older than the kept history are read in several pages, without starting again."""
        arms = make_catalogue(tombstones_kept=1, stamps_kept=2)
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for name in "abcdef":
            await put_arms(arms, name)
        for n in range(5):
            await put_arms(arms, f"x{n}")
            await remove_arms(arms, f"x{n}")
        assert set(await Reader(arms).follow()) == set("abcdef")

    async def test_a_store_set_back_reuses_a_revision(
        self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore
    ) -> None:
        await put_arms(arms, "a", "b")
        keys = record.keys
        names = [keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_order, keys.arm_versions, keys.arm_changes]
        before = {name: await redis.dump(name) for name in names}
        await remove_arms(arms, "a")
        reader = Reader(arms)
        assert set(await reader.follow()) == {"b"}
        for name, dump in before.items():
            await redis.restore(name, 0, dump, replace=True)
        await redis.delete(keys.arm_removals)
        await put_arms(arms, "b", at=2)
        assert (await arms.standing()).revision == reader.standing.revision
        assert await arms.standing() != reader.standing
        assert await reader.follow() == {"a": [1.0], "b": [2]}
        ahead = Reader(arms)
        await put_arms(arms, "c")
        await ahead.follow()
        for name, dump in before.items():
            await redis.restore(name, 0, dump, replace=True)
        assert await ahead.follow() == {"a": [1.0], "b": [1.0]}

    async def test_another_store(self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore) -> None:
        await put_arms(arms, "a")
        reader = Reader(arms)
        await reader.follow()
        await redis.flushall()
        assert await arms.standing() == CatalogueRevision()
        for _ in range(2):
            with pytest.raises(StoreReset):
                await reader.follow()
            with pytest.raises(StoreReset):
                await put_arms(arms, "b")
            await NamespaceStore(redis).open_or_create("shop", partitions=2, seed=7, learner={})

    async def test_a_key_of_another_type_writes_nothing(
        self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore, picture: Any
    ) -> None:
        await put_arms(arms, "a", "b")
        keys = record.keys
        for name in (keys.catalogue_log, keys.arm_order, keys.arm_changes, keys.arm_removals):
            kept = await redis.dump(name)
            await redis.set(name, "text")
            before = await picture()
            with pytest.raises(Exception, match="WRONGTYPE"):
                await put_arms(arms, "a", at=3)
            assert await picture() == before
            await redis.delete(name)
            if kept is not None:
                await redis.restore(name, 0, kept)


names = st.sampled_from("abcdefg")
steps = st.one_of(
    st.tuples(st.just("put"), st.sets(names, min_size=1), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.sets(names, min_size=1), st.just(0)),
    st.tuples(st.just("read"), st.integers(0, 1), st.just(0)),
)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=40), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 20, 10_000]))
async def test_readers_agree_with_a_model(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, history: Any, tombstones: int, stamps: int, page: int
) -> None:
    """Two readers at different paces, under changes, removals and compactions."""
    await redis.flushall()
    record = await NamespaceStore(redis).open_or_create("shop", partitions=1, seed=0, learner={})
    store = CatalogueStore(
        redis, record.keys, record.store_id, arms_max=100, tombstones_kept=tombstones, stamps_kept=stamps
    )
    monkeypatch.setattr(catalogue, "BATCH_BYTES", page)
    model: dict[str, list[float]] = {}
    latest: dict[str, int] = {}
    readers = [Reader(store), Reader(store)]
    for kind, what, value in history:
        if kind == "read":
            assert await readers[what].follow() == model
            continue
        writes = [ArmWrite.put(arm, [value]) if kind == "put" else ArmWrite.remove(arm) for arm in sorted(what)]
        outcomes = await store.change(writes, now_ms=1)
        for arm, outcome in zip(sorted(what), outcomes, strict=True):
            same = model.get(arm) == ([value] if kind == "put" else None)
            assert outcome.changed == (not same)
            assert same or outcome.version > latest.get(arm, 0)
            latest[arm] = max(outcome.version, latest.get(arm, 0))
            if kind == "put":
                model[arm] = [value]
            else:
                model.pop(arm, None)
    for reader in readers:
        assert await reader.follow() == model
    assert await store.ids() == sorted(model)
