"""Default rewards are created once for each arm without a reward in time, also when workers die or compete."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.decisions.decisions import BASELINE, DecidedItem, DecisionRecord, DecisionStore
from metaban.store.decisions.default_rewards import AwaitedRewardStore
from metaban.store.errors import BacklogFull, StoreUnavailable
from metaban.store.events.event import RewardEvent, default_event_id, plain_event_id
from metaban.store.events.stream import EventStream
from metaban.store.reward_rules import RewardRules
from metaban.worker.learning import default_rewards as default_rewards_module
from metaban.worker.learning.default_rewards import OVERDUE_TAKEN, DefaultRewards, now_ms
from metaban.worker.learning.trainer import FitInput
from tests.worker.workshop import OpenWorkshop, Workshop, features, notes, soon

RULES = RewardRules(reward_min=-1, reward_max=1, default_reward=-0.5, wait_s=60)
SCALED = 0.25


class Waiting:
    """A namespace with a default reward, and its DefaultRewards."""

    def __init__(self, shop: Workshop, streams: EventStream | None = None) -> None:
        self.shop = shop
        self.decisions = DecisionStore(shop.redis, shop.keys, ttl_s=600)
        self.awaiting = AwaitedRewardStore(shop.redis, shop.keys)
        self.default_rewards = DefaultRewards(
            self.awaiting,
            self.decisions,
            streams or shop.streams,
            shop.model,
            shop.stopping,
            partitions=lambda: range(shop.record.partitions),
        )

    async def decide(self, decision_id: str, *, user: str = "u", arms: int = 1, due: bool = True, **changes: Any):
        """Store a decision whose reward window is over (`due`) or not."""
        rows = np.stack([features(number) for number in range(arms)])
        decision = DecisionRecord(
            decision_id=decision_id,
            user_id=user,
            fingerprint="00",
            items=tuple(DecidedItem(f"arm {n}", n + 1, 1.0, 1.0, 0.0, 0.5, 1) for n in range(arms)),
            features=rows,
            phi=np.stack([notes(number) for number in range(arms)]),
            policy="ucb",
            epoch=0,
            user_version=0,
            cold_start=None,
            created_ms=now_ms() - 70_000,
        )
        decision = replace(decision, **changes)
        await self.decisions.put(decision, overdue_ms=now_ms() + (-1 if due else 60_000))
        return decision

    async def collect(self) -> int:
        return sum([await self.default_rewards.collect(partition) for partition in range(self.shop.record.partitions)])

    async def made(self) -> list[RewardEvent]:
        """Events in the streams, ordered by id."""
        found = []
        for partition in range(self.shop.record.partitions):
            for _, fields in await self.shop.redis.xrange(self.shop.keys.events(partition)):
                found.append(RewardEvent.decode(fields))
        return sorted(found, key=lambda event: event.event_id)

    async def left(self) -> set[bytes]:
        keys = self.shop.keys
        found = [await self.shop.redis.zrange(keys.awaiting(each), 0, -1) for each in range(keys.partitions)]
        return {member for members in found for member in members}


@pytest.fixture
async def waiting(open_workshop: OpenWorkshop) -> Waiting:
    shop = await open_workshop(partitions=3)
    await shop.namespaces.change(shop.record, rewards=RULES.to_json())
    return Waiting(shop)


async def test_overdue_arms_get_the_default_reward(waiting: Waiting) -> None:
    decision = await waiting.decide("d", arms=2)
    await waiting.decide("later", due=False)
    assert await waiting.collect() == 2
    made = await waiting.made()
    assert [event.event_id for event in made] == [default_event_id("d", f"arm {n}") for n in range(2)]
    for place, event in enumerate(made):
        assert event.by_default
        assert (event.reward, event.user_id, event.decision_id) == (SCALED, "u", "d")
        assert event.reward_range == RULES.range
        assert event.arm_id == decision.items[place].arm_id
        assert np.array_equal(event.features, decision.features[place])
        assert event.sample().by_default
    assert await waiting.left() == {b"1:later"}
    assert await waiting.collect() == 0


async def test_clients_cannot_use_the_id_of_a_default_reward(waiting: Waiting) -> None:
    assert default_event_id("d", "a")[0] == "\x1f"
    assert default_event_id("d", "a") != default_event_id("d", "b")


@pytest.mark.parametrize("event_id", [plain_event_id("d", "arm 1"), "own"])
async def test_a_rewarded_arm_gets_no_default_reward(waiting: Waiting, event_id: str) -> None:
    decision = await waiting.decide("d", arms=3)
    told = RewardEvent.of(decision, 1, 1.0, RULES.range, event_id=event_id, received_ms=now_ms())
    await waiting.shop.streams.enqueue([told])
    await waiting.collect()
    assert [event.arm_id for event in await waiting.made() if event.by_default] == ["arm 0", "arm 2"]
    assert await waiting.left() == set()


async def test_an_arm_waits_until_its_reward_is_applied(waiting: Waiting) -> None:
    shop = waiting.shop
    decision = await waiting.decide("d", arms=3, due=False)
    told = RewardEvent.of(decision, 1, 1.0, RULES.range, event_id="own", received_ms=now_ms())
    await shop.streams.enqueue([told])
    await shop.model.refresh_record()
    partition = shop.keys.partition_of("u")
    await shop.publisher().publish(partition, await shop.streams.read([partition], "c1", count=9, block_ms=1))
    assert await waiting.left() == {b"1:d", b"3:d"}


async def test_learning_goes_on_if_the_wait_cannot_be_ended(waiting: Waiting) -> None:
    shop = waiting.shop
    decision = await waiting.decide("d")
    for each in range(shop.record.partitions):
        await shop.redis.set(shop.keys.awaiting(each), "text")
    told = RewardEvent.of(decision, 0, 1.0, RULES.range, event_id="own", received_ms=now_ms())
    await shop.streams.enqueue([told])
    await shop.model.refresh_record()
    partition = shop.keys.partition_of("u")
    deliveries = await shop.streams.read([partition], "c1", count=9, block_ms=1)
    assert await shop.publisher().publish(partition, deliveries) == 1
    assert await shop.versions() == {"u": 1}


async def test_a_range_without_0(waiting: Waiting) -> None:
    record = await waiting.shop.namespaces.load(waiting.shop.record.name)
    assert record is not None
    rules = RewardRules(reward_min=1, reward_max=5, default_reward=0)
    await waiting.shop.namespaces.change(record, rewards=rules.to_json())
    await waiting.decide("d")
    await waiting.collect()
    assert [(event.reward, event.reward_range) for event in await waiting.made()] == [(0.0, rules.range)]


async def test_beside_a_reward_with_another_id_it_does_not_count(waiting: Waiting) -> None:
    shop = waiting.shop
    decision = await waiting.decide("d")
    await waiting.collect()
    told = RewardEvent.of(decision, 0, 1.0, RULES.range, event_id="own", received_ms=now_ms())
    await shop.streams.enqueue([told])
    partition = shop.keys.partition_of("u")
    await shop.publisher().publish(partition, await shop.streams.read([partition], "c1", count=9, block_ms=1))
    assert await shop.versions() == {"u": 2}
    trainer = shop.model.trainer
    assert trainer is not None
    batch = trainer.batch([FitInput("u", 2, (await shop.users.load_samples(["u"]))["u"], None)])
    assert batch.rewards.tolist() == [[1.0]]


async def test_created_twice_it_counts_once(waiting: Waiting) -> None:
    await waiting.decide("d", arms=2)
    other = Waiting(waiting.shop)
    await asyncio.gather(waiting.collect(), other.collect())
    assert len(await waiting.made()) == 2
    assert (await waiting.shop.users.counters())["enqueued"] == 2
    # as after a crash before the arms were settled
    await waiting.decide("e")
    members = await waiting.left()
    await waiting.collect()
    await waiting.shop.redis.zadd(
        waiting.shop.keys.awaiting(waiting.shop.keys.partition_of("e")), dict.fromkeys(members, 1)
    )
    assert await waiting.collect() == 1
    assert (await waiting.shop.users.counters())["enqueued"] == 3
    assert await waiting.left() == set()


async def test_entries_that_cannot_be_learned_are_removed(waiting: Waiting) -> None:
    shop = waiting.shop
    await waiting.decide("gone")
    await waiting.decide("damaged")
    await waiting.decide("reset", user="reset")
    await waiting.decide("good", user="good")
    await shop.redis.delete(shop.keys.decision("gone"))
    await shop.redis.set(shop.keys.decision("damaged"), "text")
    await shop.users.forget("reset")
    partition = shop.keys.partition_of("good")
    strangers = {"nonsense": 1, "7:good": 2, "0:good": 3, b"1:\xff": 4}
    await shop.redis.zadd(shop.keys.awaiting(partition), strangers)
    await waiting.collect()
    assert [event.user_id for event in await waiting.made()] == ["good"]
    assert await waiting.left() == set()


@pytest.mark.parametrize("change", [{"policy": BASELINE}, {"deferred": True}])
async def test_decisions_that_do_not_count_get_none(waiting: Waiting, change: dict[str, Any]) -> None:
    await waiting.decide("d", **change)
    partition = waiting.shop.keys.partition_of("d")
    await waiting.shop.redis.zadd(waiting.shop.keys.awaiting(partition), {"1:d": 1})
    assert await waiting.collect() == 1
    assert await waiting.made() == []


async def test_the_current_reward_rules_count(waiting: Waiting) -> None:
    """Also rules that the process has not read yet: it reads them first."""
    shop = waiting.shop
    assert shop.model.rules == RewardRules()
    await waiting.decide("d")
    await waiting.collect()
    assert [event.reward for event in await waiting.made()] == [SCALED]
    record = await shop.namespaces.load(shop.record.name)
    assert record is not None
    await shop.namespaces.change(record, rewards=RewardRules().to_json())
    await waiting.decide("off")
    await waiting.collect()
    assert len(await waiting.made()) == 1
    assert await waiting.left() == set()


async def test_a_full_backlog_is_waited_out(waiting: Waiting) -> None:
    shop = waiting.shop
    full = Waiting(shop, EventStream(shop.redis, shop.keys, dedupe_window_s=60, backlog_limit=1))
    for number in range(6):
        await full.decide(f"d{number}")
    outcomes = await asyncio.gather(*map(full.default_rewards.collect, range(3)), return_exceptions=True)
    assert any(isinstance(outcome, BacklogFull) for outcome in outcomes)
    assert await full.left() != set()
    await waiting.collect()
    assert len(await waiting.made()) == 6
    assert await waiting.left() == set()


async def test_many_are_created_in_turns(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_rewards_module, "CHECK_EVERY_S", 0.05)
    for number in range(OVERDUE_TAKEN + 10):
        await waiting.decide(f"d{number}", user=f"u{number % 7}", arms=3)
    running = asyncio.create_task(waiting.default_rewards.run())

    async def empty() -> bool:
        return not await waiting.left()

    await soon(empty, "all made")
    waiting.shop.stopping.set()
    await running
    assert len(await waiting.made()) == 3 * (OVERDUE_TAKEN + 10)


async def test_a_damaged_partition_does_not_stop_the_others(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_rewards_module, "CHECK_EVERY_S", 0.05)
    keys = waiting.shop.keys
    names = {keys.partition_of(f"d{number}"): f"d{number}" for number in range(20)}
    await waiting.shop.redis.set(keys.awaiting(0), "text")
    for partition in (1, 2):
        await waiting.decide(names[partition])
    running = asyncio.create_task(waiting.default_rewards.run())

    async def made() -> bool:
        return len(await waiting.made()) == 2

    await soon(made, "the others are made")
    waiting.shop.stopping.set()
    await running


async def test_an_outage_is_waited_out(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_rewards_module, "CHECK_EVERY_S", 0.05)
    await waiting.decide("d")
    ask, asked = waiting.awaiting.overdue, 0

    async def away(*arguments: Any, **options: Any) -> list[bytes]:
        nonlocal asked
        asked += 1
        if asked <= 6:
            raise StoreUnavailable("for a moment")
        return await ask(*arguments, **options)

    waiting.awaiting.overdue = away  # type: ignore[method-assign]
    running = asyncio.create_task(waiting.default_rewards.run())

    async def made() -> bool:
        return len(await waiting.made()) == 1

    await soon(made, "made after the outage")
    assert asked > 6
    waiting.shop.stopping.set()
    await running


@contextmanager
def worker(shop: Workshop, url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = shop.start_process(url, **environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(15)


async def test_workers_that_die_in_the_middle(waiting: Waiting, valkey_url: str, redis: Redis) -> None:
    """Real processes: one is killed between creating and settling default rewards; the next one goes on."""
    shop = waiting.shop
    for number in range(6):
        await waiting.decide(f"d{number}", user=f"u{number % 2}")
    with worker(shop, valkey_url, METABAN_FAILPOINTS="worker-before-settle=1") as dying:

        async def dead() -> bool:
            return dying.poll() is not None

        await soon(dead, "the worker dies")
    assert await waiting.left() != set()
    with worker(shop, valkey_url):

        async def learned() -> bool:
            return await shop.versions() == {"u0": 3, "u1": 3} and not await waiting.left()

        await soon(learned, "all are learned, each once")
    counters = await shop.users.counters()
    assert counters["enqueued"] == counters["applied"] == 6
    samples = await shop.users.load_samples(["u0", "u1"])
    assert {sample.by_default for kept in samples.values() for sample in kept} == {True}
