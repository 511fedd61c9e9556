"""The catalogue: increasing revisions, its limit, and reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.store import catalogue
from metaban.store.catalogue import BATCH_ARMS, ArmWrite, CatalogueStore, decode_features, in_batches
from metaban.store.errors import ArmConflict, ArmLimitExceeded, CorruptRecord
from metaban.store.namespaces import NamespaceRecord
from tests.store.helpers import MakeCatalogue, put_arms, remove_arms


class TestVersions:
    async def test_increase_with_every_change(self, arms: CatalogueStore) -> None:
        assert await put_arms(arms, "a", "b") == [1, 1]
        assert await put_arms(arms, "a", at=2) == [2]
        assert await remove_arms(arms, "a") == [3]
        assert await put_arms(arms, "a", at=2) == [4]
        stored = await arms.get("a")
        assert stored is not None
        assert (stored.features, stored.version, stored.updated_ms) == ([2.0], 4, 5)

    async def test_do_not_change_without_a_difference(self, arms: CatalogueStore, picture: Any) -> None:
        await put_arms(arms, "a", ms=5)
        before, standing = await picture(), await arms.standing()
        [outcome] = await arms.change([ArmWrite.put("a", [1.0])], now_ms=9)
        assert (outcome.before, outcome.version, outcome.changed) == (1, 1, False)
        assert await remove_arms(arms, "nobody") == [0]
        assert await picture() == before
        assert await arms.standing() == standing

    async def test_stay_above_those_of_removed_tombstones(self, make_catalogue: MakeCatalogue) -> None:
        arms = make_catalogue(tombstones_kept=1)
        for at in range(4):
            await put_arms(arms, "a", at=at)
        assert await remove_arms(arms, "a") == [5]
        await put_arms(arms, "b")
        await remove_arms(arms, "b")  # the tombstone of `a` is removed
        assert await put_arms(arms, "a") == [6]
        assert await put_arms(arms, "c") == [6], "a new id also starts above removed tombstones"

    async def test_are_compared(self, arms: CatalogueStore, picture: Any) -> None:
        await put_arms(arms, "a", "b")
        await put_arms(arms, "b", at=2)
        before = await picture()
        for expected in (0, 2):
            with pytest.raises(ArmConflict) as refused:
                await arms.change(
                    [ArmWrite.put("b", [3.0], expected=2), ArmWrite.put("a", [3.0], expected=expected)], now_ms=7
                )
            assert (refused.value.arm_id, refused.value.version) == ("a", 1)
        with pytest.raises(ArmConflict) as refused:
            await arms.change([ArmWrite.remove("c", expected=1)], now_ms=7)
        assert refused.value.version == 0
        assert await picture() == before, "nothing is written when one is refused"
        [done] = await arms.change([ArmWrite.put("c", [1.0], expected=0)], now_ms=7)
        assert (done.before, done.version) == (0, 1)

    async def test_one_of_racing_writers_wins(self, arms: CatalogueStore) -> None:
        await put_arms(arms, "a")
        outcomes = await asyncio.gather(
            *(arms.change([ArmWrite.put("a", [float(n + 2)], expected=1)], now_ms=7) for n in range(8)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, ArmConflict) for outcome in outcomes) == 7
        assert (await arms.standing()).revision == 2


class TestLimit:
    async def test_nothing_is_written_beyond_the_limit(self, make_catalogue: MakeCatalogue, picture: Any) -> None:
        arms = make_catalogue(arms_max=3)
        await put_arms(arms, "a", "b")
        before = await picture()
        with pytest.raises(ArmLimitExceeded):
            await put_arms(arms, "c", "d")
        assert await picture() == before
        await arms.change([ArmWrite.remove("a"), ArmWrite.put("c", [1.0]), ArmWrite.put("d", [1.0])], now_ms=7)
        assert await arms.count() == 3

    async def test_existing_arms_can_change_above_a_lowered_limit(self, make_catalogue: MakeCatalogue) -> None:
        await put_arms(make_catalogue(), "a", "b", "c")
        arms = make_catalogue(arms_max=1)
        assert await put_arms(arms, "a", at=2) == [2]
        assert await remove_arms(arms, "b") == [2]
        with pytest.raises(ArmLimitExceeded):
            await put_arms(arms, "b")

    async def test_limit_of_a_batch(self, arms: CatalogueStore) -> None:
        for writes in ([ArmWrite.remove(str(n)) for n in range(BATCH_ARMS + 1)], [ArmWrite.remove("a")] * 2):
            with pytest.raises(ValueError, match="batch"):
                await arms.change(writes, now_ms=1)


class TestReading:
    async def test_pages_in_the_order_of_ids(self, arms: CatalogueStore) -> None:
        ids = ["", "a/b", "b", "é", "{x}", "z", "[", "(", "-", "+", "\U0001f642", "A", "aa"]
        for arm in ids[1:]:
            await put_arms(arms, arm)
        seen: list[str] = []
        cursor = None
        while True:
            page = await arms.page(limit=5, cursor=cursor)
            seen += [arm.id for arm in page.arms]
            cursor = page.cursor
            if cursor is None:
                break
        assert seen == sorted(ids[1:]) == await arms.ids()
        assert await arms.count() == len(seen)
        for arm in ids[1:]:
            found = await arms.get(arm)
            assert found is not None
            assert found.id == arm
        assert await arms.get("a") is None

    async def test_a_page_ends_with_the_last(self, arms: CatalogueStore) -> None:
        assert (await arms.page(limit=2)).arms == ()
        await put_arms(arms, "a", "b")
        assert (await arms.page(limit=2)).cursor is None
        assert (await arms.page(limit=2, cursor="b")).arms == ()

    async def test_large_arms_make_short_pages(self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalogue, "BATCH_BYTES", 10)
        await arms.change([ArmWrite.put(arm, {"name": "x" * 10}) for arm in "abc"], now_ms=1)
        page = await arms.page(limit=3)
        assert ([arm.id for arm in page.arms], page.cursor) == (["a"], "a")
        assert (await arms.page(limit=3, cursor="b")).cursor is None

    async def test_all_ids(self, arms: CatalogueStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalogue, "IDS_READ", 4)
        for count in (0, 3, 4, 8, 9):
            await put_arms(arms, *(f"{n:02d}" for n in range(count))) if count else None
            assert await arms.ids() == [f"{n:02d}" for n in range(count)]

    @pytest.mark.parametrize(
        "blob",
        [b"", b"{", b"[]", b"{}", b"1", b"null", b"[NaN]", b"[1e999]", b"[true]", b'["a"]', b"[[1]]", b'{"a":null}',
         b'{"a":[1]}', b'{"a":NaN}', b"[" * 100_000, b"\xff", b"[1" + b"0" * 400 + b"]"],
    )  # fmt: skip
    def test_features_are_decoded_strictly(self, blob: bytes) -> None:
        with pytest.raises(CorruptRecord):
            decode_features(blob)

    @pytest.mark.parametrize("features", [[1.0, -0.1], {"a": 1.5, "b": "é", "c": False, "d": -3.0}])
    async def test_features_come_back_as_they_were(self, arms: CatalogueStore, features: Any) -> None:
        await arms.change([ArmWrite.put("a", features)], now_ms=1)
        stored = await arms.get("a")
        assert stored is not None
        assert repr(stored.features) == repr(features)

    async def test_invalid_versions_are_refused(
        self, redis: Redis, record: NamespaceRecord, arms: CatalogueStore
    ) -> None:
        await put_arms(arms, "a", "b")
        for line in (b"", b"x:1", b"1", b"-1:5"):
            await redis.hset(record.keys.arm_versions, "a", line)
            with pytest.raises(CorruptRecord):
                await put_arms(arms, "b", "a", at=2)
        await redis.hdel(record.keys.arm_versions, "a")
        with pytest.raises(CorruptRecord):
            await arms.get("a")
        with pytest.raises(CorruptRecord):
            await put_arms(arms, "b", "a", at=2)
        stored = await arms.get("b")
        assert stored is not None
        assert stored.version == 1


def test_batches() -> None:
    writes = [ArmWrite(str(n), b"x" * size) for n, size in enumerate([1] * 1_200 + [600_000, 600_000, 2_000_000, 1])]
    batches = list(in_batches(writes))
    assert [write for batch in batches for write in batch] == writes
    assert [len(batch) for batch in batches] == [500, 500, 201, 1, 1, 1]
    assert list(in_batches([])) == []
