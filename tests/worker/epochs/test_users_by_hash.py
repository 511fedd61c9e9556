"""UsersByHash: the same users as a sort of everybody, for the price of what changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from metaban.store.client.connection import pipeline
from metaban.store.snapshots.records import UserRecord
from metaban.store.snapshots.restore_intent import RestoreStore, Restoring
from metaban.store.users.records import UpdateEntry
from metaban.store.users.users import UserStore
from metaban.worker.epochs import users_by_hash as module
from metaban.worker.epochs.derive_shared import choose_by_hash
from metaban.worker.epochs.users_by_hash import UsersByHash
from tests.worker.workshop import OpenWorkshop, Workshop, make_event

PARTITIONS = 4


class Watched:
    """A user store that counts what is read."""

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self.scanned = self.lines = self.calls = 0

    async def scan_versions(self, partition: int) -> AsyncIterator[dict[str, tuple[int, int]]]:
        async for page in self._users.scan_versions(partition):
            self.scanned += len(page)
            yield page

    async def lines_after(self, partition: int, cursor: str, *, count: int) -> list[UpdateEntry] | None:
        self.calls += 1
        lines = await self._users.lines_after(partition, cursor, count=count)
        self.lines += len(lines or ())
        return lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._users, name)

    def reset(self) -> None:
        self.scanned = self.lines = self.calls = 0


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_workshop(partitions=PARTITIONS)


@pytest.fixture
def watched(shop: Workshop) -> Watched:
    return Watched(shop.users)


def by_hash(users: Any, most: int) -> UsersByHash:
    return UsersByHash(users, partitions=PARTITIONS, most=most)


async def add(shop: Workshop, names: list[str]) -> None:
    """Users with one applied event each, without states: quick to write."""
    for partition in range(PARTITIONS):
        mine = [name for name in names if shop.keys.partition_of(name) == partition]
        for start in range(0, len(mine), 5_000):
            flat = [part for name in mine[start : start + 5_000] for part in (name, "0:1")]
            await pipeline(shop.redis, [("HSET", shop.keys.versions(partition), *flat)])


async def expected(shop: Workshop, most: int) -> dict[str, tuple[int, int]]:
    """The slow and obviously right answer: sort everybody."""
    versions: dict[str, tuple[int, int]] = {}
    for partition in range(PARTITIONS):
        versions |= {user: version for user, version in (await shop.users.versions(partition)).items() if version[1]}
    return {user: versions[user] for user in choose_by_hash(list(versions), most)}


async def agrees(shop: Workshop, found: UsersByHash, most: int) -> None:
    assert list((await found.first()).items()) == list((await expected(shop, most)).items())


async def test_very_many_users_are_read_once(shop: Workshop, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    await shop.learn({f"active {number}": 1 for number in range(50)})
    await add(shop, [f"user {number}" for number in range(50_000)])
    found = by_hash(watched, 1_000)
    await found.first()
    assert watched.scanned >= 50_050

    hashed: list[str] = []
    hash_order = module.hash_order
    monkeypatch.setattr(module, "hash_order", lambda user: hashed.append(user) or hash_order(user))  # type: ignore[func-returns-value]
    watched.reset()
    await shop.learn({**{f"active {number}": 1 for number in range(20)}, "newcomer": 2}, first=100)
    await agrees(shop, found, 1_000)
    assert (watched.scanned, watched.lines) == (0, 21)
    assert len(hashed) <= 21
    watched.reset()
    await found.first()
    assert (watched.lines, watched.calls) == (0, PARTITIONS)


async def test_users_come_go_and_come_back(shop: Workshop, watched: Watched) -> None:
    names = [f"user {number}" for number in range(30)]
    await shop.learn(dict.fromkeys(names, 1))
    found = by_hash(watched, 10)
    await agrees(shop, found, 10)
    watched.reset()
    leaving = choose_by_hash(names, 4)
    for user in leaving:
        await shop.users.forget(user)
    await agrees(shop, found, 10)
    assert not set(leaving) & set(await found.first())
    back = leaving[0]
    partition = shop.keys.partition_of(back)
    given = await shop.give([make_event(back, 70, incarnation=1)], partition=partition)
    await shop.publisher().publish(partition, given)
    await agrees(shop, found, 10)
    assert (await found.first())[back] == (1, 1)
    assert not watched.scanned


async def test_restored_and_dropped_users(shop: Workshop, watched: Watched) -> None:
    names = [f"user {number}" for number in range(30)]
    await shop.learn(dict.fromkeys(names, 1))
    found = by_hash(watched, 10)
    await agrees(shop, found, 10)
    watched.reset()
    dropped, restored = choose_by_hash(names, 2)
    store = RestoreStore(shop.redis, shop.keys, shop.record.store_id)
    state = (await shop.users.load([restored]))[restored].encode()
    for record in (UserRecord(dropped, 0, 0, 0, b""), UserRecord(restored, 0, 7, 0, state)):
        partition = shop.keys.partition_of(record.user_id)
        assert await store.write(Restoring("s", 1, 1), partition, [record], applied=0) == [True]
    await agrees(shop, found, 10)
    assert next(iter((await found.first()).items())) == (restored, (1, 7))
    assert not watched.scanned


async def test_users_beyond_those_kept_replace_forgotten_ones(shop: Workshop, watched: Watched) -> None:
    """Of many users few are kept: when too many of them were forgotten, all users are read again."""
    names = [f"user {number}" for number in range(200)]
    await shop.learn(dict.fromkeys(names, 1))
    found = by_hash(watched, 20)
    await agrees(shop, found, 20)
    watched.reset()
    ordered = choose_by_hash(names, len(names))
    for user in ordered[:20]:
        await shop.users.forget(user)
    await agrees(shop, found, 20)
    assert not watched.scanned, "those in reserve are enough"
    for user in ordered[20:90]:
        await shop.users.forget(user)
    await agrees(shop, found, 20)
    assert watched.scanned


async def test_a_trimmed_log_is_noticed(shop: Workshop, watched: Watched) -> None:
    await shop.learn({f"user {number}": 1 for number in range(40)})
    found = by_hash(watched, 10)
    await agrees(shop, found, 10)
    await shop.learn({f"later {number}": 1 for number in range(40)}, first=50)
    watched.reset()
    for user in choose_by_hash([f"user {number}" for number in range(40)], 3):
        await shop.users.forget(user)
    partition = 1
    await shop.redis.xtrim(shop.keys.update_log(partition), maxlen=1, approximate=False)
    await agrees(shop, found, 10)
    assert watched.scanned == len(await shop.users.versions(partition)), "only the partition that lost lines is read"


async def test_pages_of_lines(shop: Workshop, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_PER_PAGE", 3)
    await shop.learn({"first": 1})
    found = by_hash(watched, 10)
    await found.first()
    await shop.learn({f"user {number}": 1 for number in range(40)}, first=50)
    await found.first()
    watched.reset()
    await shop.learn({f"user {number}": 1 for number in range(40)}, first=100)
    await agrees(shop, found, 10)
    assert (watched.scanned, watched.lines) == (0, 40)


async def test_users_that_change_during_the_first_read(shop: Workshop) -> None:
    names = [f"user {number}" for number in range(20)]
    await shop.learn(dict.fromkeys(names, 1))

    class Meanwhile(Watched):
        async def scan_versions(self, partition: int) -> AsyncIterator[dict[str, tuple[int, int]]]:
            pages = [page async for page in self._users.scan_versions(partition)]
            await shop.learn({f"during {partition}": 1, names[0]: 1}, first=50 + 10 * partition)
            await shop.users.forget(names[partition + 1])
            for page in pages:
                yield page

    found = by_hash(Meanwhile(shop.users), 10)
    await found.first()
    await agrees(shop, found, 10)


async def test_a_read_that_failed_is_repeated(shop: Workshop) -> None:
    await shop.learn({f"user {number}": 1 for number in range(20)})

    class Failing(Watched):
        broken = True

        async def scan_versions(self, partition: int) -> AsyncIterator[dict[str, tuple[int, int]]]:
            async for page in self._users.scan_versions(partition):
                if self.broken and partition == PARTITIONS - 1:
                    raise ConnectionError
                yield page

    failing = Failing(shop.users)
    found = by_hash(failing, 10)
    with pytest.raises(ConnectionError):
        await found.first()
    failing.broken = False
    await agrees(shop, found, 10)
