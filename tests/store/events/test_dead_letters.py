"""Dead letters: listed in order, replayed at most once each, discarded on request."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from metaban.store.errors import BacklogFull, StoreError, StoreReset
from metaban.store.events import dead_letters as module
from metaban.store.events.dead_letters import DeadLetter, ReplayedLetters
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.users.records import UserUpdate
from metaban.store.users.users import UserStore
from tests.store.helpers import MakeEvent, Picture


async def bury(stream: EventStream, events: list[RewardEvent]) -> list[str]:
    """Turn events into dead letters; returns their entry ids."""
    answers = await stream.enqueue(events)
    for partition in sorted({answer.partition for answer in answers}):
        for delivery in await stream.read([partition], "one", count=999, block_ms=0):
            await stream.letters.bury(delivery, "one", "hopeless")
    return [answer.entry_id for answer in answers]


async def all_letters(stream: EventStream, *, limit: int = 100, newest_first: bool = True) -> list[DeadLetter]:
    """All dead letters, page by page."""
    found: list[DeadLetter] = []
    cursor = None
    while True:
        page = await stream.letters.page(limit=limit, cursor=cursor, newest_first=newest_first)
        assert len(page.letters) <= limit
        found += page.letters
        cursor = page.cursor
        if cursor is None:
            return found


def names(letters: list[DeadLetter]) -> list[str]:
    return [letter.event.event_id if letter.event else "" for letter in letters]


@pytest.fixture
async def letter(stream: EventStream, make_event: MakeEvent, neighbours: list[str]) -> DeadLetter:
    """A dead letter that can be replayed."""
    await stream.enqueue([make_event(neighbours[0], "a", reward=0.7)])
    [delivery] = await stream.read([0], "one", count=9, block_ms=0)
    await stream.count_attempt(delivery, "one")
    await stream.letters.bury(delivery, "one", "hopeless")
    [letter] = await all_letters(stream)
    return letter


class TestListing:
    @pytest.mark.parametrize("peeked", [1, 2, 8])
    @pytest.mark.parametrize("limit", [1, 3, 7, 100])
    async def test_all_partitions_in_order(
        self, stream: EventStream, make_event: MakeEvent, limit: int, peeked: int, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(module, "LETTERS_PEEKED", peeked)
        for n in range(20):
            await bury(stream, [make_event(f"user {n}", f"{n}")])
        oldest = names(await all_letters(stream, limit=limit, newest_first=False))
        newest = names(await all_letters(stream, limit=limit))
        assert sorted(oldest, key=int) == [str(n) for n in range(20)]
        assert newest == oldest[::-1]

    async def test_letters_of_one_moment_in_several_partitions(self, redis: Redis, stream: EventStream, keys):
        for partition in (0, 1):
            for sequence in range(3):
                await redis.xadd(keys.dead_letters(partition), {"dead_reason": "x"}, id=f"7-{sequence}")
        for newest_first in (True, False):
            found = await all_letters(stream, limit=1, newest_first=newest_first)
            assert len({(letter.partition, letter.letter_id) for letter in found}) == len(found) == 6

    async def test_fields_of_a_dead_letter(self, letter: DeadLetter, neighbours: list[str]):
        assert (letter.partition, letter.reason, letter.attempts) == (0, "hopeless", 1)
        assert letter.event is not None
        assert (letter.event.user_id, letter.event.reward) == (neighbours[0], 0.7)
        assert letter.buried_ms > 0

    async def test_invalid_entries_are_listed(self, redis: Redis, stream: EventStream, keys):
        await redis.xadd(keys.dead_letters(1), {b"\xff": b"\x00", "dead_reason": b"\xff", "dead_attempts": "many"})
        [letter] = await all_letters(stream)
        assert (letter.event, letter.attempts, letter.reason) == (None, 0, "\ufffd")
        assert letter.buried_ms == int(letter.letter_id.split("-")[0])

    @pytest.mark.parametrize(
        "cursor",
        ["", "1", "1-1", "1-1-x", "-1-1-1", f"{2**64}-0-0", "1-1-1\n", "٣-0-0", "0-0-1", f"{2**64 - 1}-{2**64 - 1}-0"],
    )
    async def test_invalid_cursors_are_refused(self, stream: EventStream, cursor: str):
        for newest_first in (True, False):
            with pytest.raises(ValueError, match="cursor"):
                await stream.letters.page(limit=1, cursor=cursor, newest_first=newest_first)
        with pytest.raises(ValueError, match="cursor"):
            await stream.letters.replay_everything(cursor=cursor)

    @pytest.mark.single_node("one server counts what it sends")
    async def test_a_page_reads_little_of_each_partition(self, redis: Redis, stream: EventStream, keys):
        """Each partition is read for a few letters; only the one with more to show is read again."""
        for number in range(100):
            await redis.xadd(keys.dead_letters(1), {"dead_reason": "x"}, id=f"{2 * number + 1}-0")
            await redis.xadd(keys.dead_letters(0), {"dead_reason": "x", "inputs": b"x" * 10_000}, id=f"{number + 1}-0")
        await redis.config_resetstat()
        page = await stream.letters.page(limit=50)
        assert [letter.partition for letter in page.letters] == [1] * 50
        sent = int((await redis.info("stats"))["total_net_output_bytes"])
        assert sent < 200_000, "few letters were read that are not shown"

    async def test_an_empty_list(self, stream: EventStream):
        page = await stream.letters.page(limit=1)
        assert (page.letters, page.cursor) == ((), None)


class TestReplay:
    async def test_a_replay_is_a_new_event(
        self, redis: Redis, stream: EventStream, users: UserStore, keys, letter: DeadLetter, make_event, neighbours
    ):
        answer = await stream.letters.replay(0, letter.letter_id)
        assert answer.status == "replayed"
        assert await all_letters(stream) == []
        [delivery] = await stream.read([0], "two", count=9, block_ms=0)
        assert delivery.entry_id == answer.detail
        assert delivery.event is not None
        assert letter.event is not None
        [(_, fields)] = await redis.xrange(keys.events(0))
        assert fields == letter.event.encode(), "no dead letter is left"
        assert not await redis.exists(keys.attempts(0))
        counters = await users.counters()
        assert (counters["buried"], counters["replayed"], counters["enqueued"]) == (1, 1, 1)
        # a client that sends it again gets the entry id of the replay
        [again] = await stream.enqueue([make_event(neighbours[0], "a")])
        assert (again.status, again.entry_id) == ("duplicate", answer.detail)
        assert await redis.pttl(keys.seen(neighbours[0], "a")) > 0

    async def test_repeated_replays_count_once(
        self, stream: EventStream, users: UserStore, letter: DeadLetter, make_state, neighbours
    ):
        answers = await asyncio.gather(*(stream.letters.replay(0, letter.letter_id) for _ in range(20)))
        assert sorted(answer.status for answer in answers) == ["replayed"] + ["unknown"] * 19
        [delivery] = await stream.read([0], "two", count=9, block_ms=0)
        update = UserUpdate(make_state(neighbours[0], 1), 0, 0, [], [delivery.entry_id])
        assert await users.apply(0, "two", [delivery.entry_id], [update]) == 1
        assert (await stream.letters.replay(0, letter.letter_id)).status == "unknown"
        assert await stream.backlog() == 0

    async def test_a_replay_that_fails_again_can_be_replayed_again(self, stream: EventStream, letter: DeadLetter):
        await stream.letters.replay(0, letter.letter_id)
        [delivery] = await stream.read([0], "one", count=9, block_ms=0)
        await stream.letters.bury(delivery, "one", "still hopeless")
        [again] = await all_letters(stream)
        assert again.reason == "still hopeless"
        assert await stream.letters.holds(0, delivery.entry_id)
        assert (await stream.letters.replay(0, again.letter_id)).status == "replayed"

    async def test_an_event_that_came_again_after_the_dedupe_window(
        self, redis: Redis, stream: EventStream, keys, letter: DeadLetter, make_event, neighbours, picture: Picture
    ):
        await redis.delete(keys.seen(neighbours[0], "a"))
        [accepted] = await stream.enqueue([make_event(neighbours[0], "a")])
        assert accepted.status == "accepted"
        before = await picture()
        answer = await stream.letters.replay(0, letter.letter_id)
        assert (answer.status, accepted.entry_id in answer.detail) == ("refused", True)
        assert await picture() == before

    async def test_a_replay_after_the_dedupe_window_renews_the_dedupe_key(
        self, redis: Redis, stream: EventStream, keys, letter: DeadLetter, make_event, neighbours
    ):
        await redis.delete(keys.seen(neighbours[0], "a"))
        assert (await stream.letters.replay(0, letter.letter_id)).status == "replayed"
        assert [a.status for a in await stream.enqueue([make_event(neighbours[0], "a")])] == ["duplicate"]

    async def test_invalid_entries_are_not_replayed(self, redis: Redis, stream: EventStream, keys, make_event, picture):
        poison = await redis.xadd(keys.dead_letters(0), {"dead_reason": "x", "u": "nobody"})
        stranger = next(f"user {n}" for n in range(99) if keys.partition_of(f"user {n}") == 1)
        astray = await redis.xadd(keys.dead_letters(0), make_event(stranger, "e").encode())
        before = await picture()
        for letter_id, reason in ((poison, "reward event"), (astray, "partition")):
            answer = await stream.letters.replay(0, letter_id.decode())
            assert (answer.status, reason in answer.detail) == ("refused", True)
        assert await stream.letters.replay_everything() == ReplayedLetters(0, 2)
        assert await picture() == before

    @pytest.mark.parametrize(
        ("partition", "letter_id"),
        [(0, "1-1"), (1, "1-1"), (2, "1-1"), (-1, "1-1"), (0, ""), (0, "-"), (0, "+"), (0, "1"), (0, f"{2**64}-0")],
    )
    async def test_unknown_letters(self, stream: EventStream, letter, partition: int, letter_id: str):
        assert (await stream.letters.replay(partition, letter_id)).status == "unknown"
        assert not await stream.letters.discard(partition, letter_id)
        assert len(await all_letters(stream)) == 1

    async def test_a_full_backlog(self, redis: Redis, keys, letter: DeadLetter, make_event, neighbours, picture):
        stream = EventStream(redis, keys, dedupe_window_s=60, backlog_limit=1)
        await stream.enqueue([make_event(neighbours[1], "b")])
        before = await picture()
        with pytest.raises(BacklogFull):
            await stream.letters.replay(0, letter.letter_id)
        with pytest.raises(BacklogFull):
            await stream.letters.replay_everything()
        assert await picture() == before

    async def test_another_store(self, redis: Redis, stream: EventStream, keys, letter: DeadLetter, picture: Picture):
        await redis.delete(keys.marker(0))
        before = await picture()
        with pytest.raises(StoreReset):
            await stream.letters.replay(0, letter.letter_id)
        assert await picture() == before

    @pytest.mark.parametrize("spoiled", ["counters", "events"])
    async def test_a_key_of_another_type(self, redis, stream, keys, letter: DeadLetter, picture, spoiled: str):
        await redis.delete(getattr(keys, spoiled)(0))
        await redis.set(getattr(keys, spoiled)(0), "spoiled")
        before = await picture()
        with pytest.raises(StoreError):
            await stream.letters.replay(0, letter.letter_id)
        assert await picture() == before

    async def test_all_of_them(
        self, stream: EventStream, users: UserStore, make_event, keys: NamespaceKeys, redis: Redis, monkeypatch
    ):
        monkeypatch.setattr(module, "LETTERS_READ", 3)
        await bury(stream, [make_event(f"user {n}", f"{n}") for n in range(20)])
        for _ in range(4):
            await redis.xadd(keys.dead_letters(0), {"dead_reason": "poison"})
        assert await stream.letters.replay_everything() == ReplayedLetters(20, 4)
        assert await stream.letters.replay_everything() == ReplayedLetters(0, 4)
        assert await stream.backlog() == 20
        counters = await users.counters()
        assert (counters["enqueued"], counters["buried"], counters["replayed"]) == (20, 20, 20)

    @pytest.mark.parametrize("most", [1, 4, 7, 24])
    async def test_some_of_them_at_a_time(
        self, stream: EventStream, make_event, keys: NamespaceKeys, redis: Redis, monkeypatch, most: int
    ):
        monkeypatch.setattr(module, "LETTERS_READ", 3)
        for _ in range(4):
            await redis.xadd(keys.dead_letters(0), {"dead_reason": "poison"})
        await bury(stream, [make_event(f"user {n}", f"{n}") for n in range(20)])
        replayed = refused = 0
        cursor = None
        while True:
            done = await stream.letters.replay_everything(most=most, cursor=cursor)
            assert done.replayed + done.refused <= most
            replayed, refused, cursor = replayed + done.replayed, refused + done.refused, done.cursor
            if cursor is None:
                break
        assert (replayed, refused) == (20, 4)
        assert await stream.backlog() == 20


async def test_discard(stream: EventStream, letter: DeadLetter):
    assert await stream.letters.discard(0, letter.letter_id)
    assert not await stream.letters.discard(0, letter.letter_id)
    assert (await stream.letters.replay(0, letter.letter_id)).status == "unknown"
    assert await all_letters(stream) == []
