"""Following the catalogue: changes told once and whole, whatever is compacted, set back or emptied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from store import catalogue
from store.catalogue import (
    ArmWrite,
    CatalogueStore,
    Standing,
    decode_features,
)
from store.errors import StoreReset
from store.namespaces import NamespaceRecord, Namespaces
from tests.store.test_store_catalogue import MakeCatalogue, arms, make, put, remove

__all__ = ["arms", "make"]


class Reader:
    """A process that follows."""

    def __init__(self, store: CatalogueStore) -> None:
        self.store = store
        self.standing = Standing()
        self.arms: dict[str, Any] = {}
        self.anew = 0

    async def follow(self) -> dict[str, Any]:
        changes = await self.store.changes_since(self.standing)
        if changes.anew:
            self.arms = {}
            self.anew += 1
        for arm, blob in changes.arms.items():
            if blob is None:
                self.arms.pop(arm, None)
            else:
                self.arms[arm] = decode_features(blob)
        self.standing = changes.standing
        return self.arms


class TestFollowing:
    async def test_only_what_changed_is_told(self, arms: CatalogueStore) -> None:
        await put(arms, "a", "b", "c")
        reader = Reader(arms)
        await reader.follow()
        await put(arms, "b", at=2)
        await remove(arms, "c")
        await put(arms, "d")
        changes = await arms.changes_since(reader.standing)
        assert not changes.anew
        assert changes.arms == {"b": b"[2]", "c": None, "d": b"[1.0]"}
        assert changes.standing == await arms.standing()
        assert (await arms.changes_since(changes.standing)).arms == {}
        assert set(await reader.follow()) == {"a", "b", "d"}
        assert reader.anew == 1

    async def test_many_pages(self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch) -> None:
        late = Reader(arms)
        for start in range(0, 700, 70):
            await put(arms, *(f"{n:03d}" for n in range(start, start + 70)))
        monkeypatch.setattr(catalogue, "BATCH_ARMS", 70)  # pages of 71, each of which would cut a revision
        assert len(await late.follow()) == 700
        await remove(arms, *(f"{n:03d}" for n in range(60)))
        await put(arms, *(f"{n:03d}" for n in range(60, 120)), at=2)
        arms_now = await late.follow()
        assert sorted(arms_now) == [f"{n:03d}" for n in range(60, 700)]
        assert arms_now["119"] == [2.0]
        assert late.anew == 1

    async def test_enough_bytes_end_a_page_behind_a_revision(
        self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for names in ("abc", "de", "f"):
            await put(arms, *names)
        page = await arms._changes_page(Standing(), 0)
        assert page is not None
        assert (set(page.arms), page.after, page.more) == (set("abc"), 1, True)
        assert set(await Reader(arms).follow()) == set("abcdef")

    async def test_what_changes_during_a_walk_is_told_in_it(
        self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for name in "abcde":
            await put(arms, name)
        told = arms._changes_page
        pages = 0

        async def meanwhile(anchor: Standing, after: int) -> Any:
            nonlocal pages
            pages += 1
            if pages == 3:  # both have been told already
                await remove(arms, "a")
                await put(arms, "b", at=2)
            return await told(anchor, after)

        monkeypatch.setattr(arms, "_changes_page", meanwhile)
        reader = Reader(arms)
        assert await reader.follow() == {"b": [2], "c": [1.0], "d": [1.0], "e": [1.0]}
        assert reader.standing == await arms.standing()

    async def test_a_reader_from_before_a_compaction_begins_anew(self, make: MakeCatalogue) -> None:
        arms = make(tombstones_kept=2)
        await put(arms, *"abcdef")
        early, late = Reader(arms), Reader(arms)
        await early.follow()
        await remove(arms, "a")
        await late.follow()
        await remove(arms, "b", "c")  # the tombstone of `a` goes
        assert set(await late.follow()) == set(await early.follow()) == set("def")
        assert (early.anew, late.anew) == (2, 1)

    async def test_tombstones_do_not_pile_up(self, redis: Redis, record: NamespaceRecord, make: MakeCatalogue) -> None:
        arms = make(tombstones_kept=3, stamps_kept=5)
        await put(arms, "stays")
        for n in range(20):
            await put(arms, f"a{n}", f"b{n}")
            await remove(arms, f"a{n}", f"b{n}")
        keys = record.keys
        assert await redis.zcard(keys.arm_removals) == 3
        assert await redis.zcard(keys.arm_changes) == await redis.hlen(keys.arm_versions) == 4
        assert await redis.zcard(keys.arm_order) == await redis.hlen(keys.arms) == 1
        assert await redis.llen(keys.catalogue_log) == 5
        # The only arm is of a revision that neither tombstones nor stamps reach back to.
        reader = Reader(arms)
        assert list(await reader.follow()) == ["stays"]
        await put(arms, "b19")
        assert await redis.zcard(keys.arm_removals) == 2
        assert set(await reader.follow()) == {"stays", "b19"}
        assert reader.anew == 1

    async def test_a_walk_over_an_old_catalogue_ends(
        self, make: MakeCatalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Arms older than all that is kept of the history are told in several pages, without beginning anew."""
        arms = make(tombstones_kept=1, stamps_kept=2)
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 1)
        for name in "abcdef":
            await put(arms, name)
        for n in range(5):
            await put(arms, f"x{n}")
            await remove(arms, f"x{n}")
        assert set(await Reader(arms).follow()) == set("abcdef")

    async def test_a_store_set_back_gives_a_revision_twice(
        self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore
    ) -> None:
        await put(arms, "a", "b")
        keys = record.keys
        names = [keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_order, keys.arm_versions, keys.arm_changes]
        before = {name: await redis.dump(name) for name in names}
        await remove(arms, "a")
        reader = Reader(arms)
        assert set(await reader.follow()) == {"b"}
        for name, dump in before.items():
            await redis.restore(name, 0, dump, replace=True)
        await redis.delete(keys.arm_removals)
        await put(arms, "b", at=2)
        assert (await arms.standing()).revision == reader.standing.revision
        assert await arms.standing() != reader.standing
        assert await reader.follow() == {"a": [1.0], "b": [2]}
        ahead = Reader(arms)
        await put(arms, "c")
        await ahead.follow()
        for name, dump in before.items():
            await redis.restore(name, 0, dump, replace=True)
        assert await ahead.follow() == {"a": [1.0], "b": [1.0]}

    async def test_another_store(self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore) -> None:
        await put(arms, "a")
        reader = Reader(arms)
        await reader.follow()
        await redis.flushall()
        assert await arms.standing() == Standing()
        for _ in range(2):
            with pytest.raises(StoreReset):
                await reader.follow()
            with pytest.raises(StoreReset):
                await put(arms, "b")
            await Namespaces(redis).open_or_create("shop", partitions=2, seed=7, learner={})

    async def test_a_key_of_another_type_writes_nothing(
        self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore, picture: Any
    ) -> None:
        await put(arms, "a", "b")
        keys = record.keys
        for name in (keys.catalogue_log, keys.arm_order, keys.arm_changes, keys.arm_removals):
            kept = await redis.dump(name)
            await redis.set(name, "text")
            before = await picture()
            with pytest.raises(Exception, match="WRONGTYPE"):
                await put(arms, "a", at=3)
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
async def test_readers_have_what_a_ledger_has(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, history: Any, tombstones: int, stamps: int, page: int
) -> None:
    """Two readers at different paces, under changes, removals and compactions."""
    await redis.flushall()
    record = await Namespaces(redis).open_or_create("shop", partitions=1, seed=0, learner={})
    store = CatalogueStore(
        redis, record.keys, record.store_epoch, arms_max=100, tombstones_kept=tombstones, stamps_kept=stamps
    )
    monkeypatch.setattr(catalogue, "BATCH_BYTES", page)
    ledger: dict[str, list[float]] = {}
    latest: dict[str, int] = {}
    readers = [Reader(store), Reader(store)]
    for kind, what, value in history:
        if kind == "read":
            assert await readers[what].follow() == ledger
            continue
        writes = [ArmWrite.put(arm, [value]) if kind == "put" else ArmWrite.remove(arm) for arm in sorted(what)]
        outcomes = await store.change(writes, now_ms=1)
        for arm, outcome in zip(sorted(what), outcomes, strict=True):
            same = ledger.get(arm) == ([value] if kind == "put" else None)
            assert outcome.changed == (not same)
            assert same or outcome.version > latest.get(arm, 0)
            latest[arm] = max(outcome.version, latest.get(arm, 0))
            if kind == "put":
                ledger[arm] = [value]
            else:
                ledger.pop(arm, None)
    for reader in readers:
        assert await reader.follow() == ledger
    assert await store.ids() == sorted(ledger)
