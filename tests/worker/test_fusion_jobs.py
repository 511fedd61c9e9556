"""Fusion is trained in a process of its own, published under a lease, and whatever ends that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from models.settings import named_settings
from models.warm_starts import GuardReport, WarmStarter
from store.connection import scan
from store.errors import StoreReset
from store.fusion import FusionJob, FusionRecord, FusionSource
from tests.worker.conftest import OpenWorkshop
from tests.worker.fusing import (
    FEW,
    PLAN,
    PROFILES,
    Gate,
    fusion_store,
    open_fusing,
    populate,
    profile_of,
    saying,
    sources_of,
    tell,
    trained,
    trainer,
)
from tests.worker.workshop import Workshop, make_event, soon
from worker.fusion import FusionTrainer
from worker.fusion_child import COMMAND
from worker.fusion_sources import EVENTS_MIN
from worker.fusion_task import LENGTH, encode_answer

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_fusing(open_workshop)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Never opened, it stands for a training without an end."""
    return Gate(tmp_path)


@pytest.fixture
async def real_gate(shop: Workshop, tmp_path: Path) -> Gate:
    """Answers with what was really trained."""
    return Gate(tmp_path, await trained(shop))


@asynccontextmanager
async def training(
    shop: Workshop, gate: Gate, fusion: FusionTrainer | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """A training that was asked for, when its process has begun; over at the end."""
    await fusion_store(shop).request(5)
    ticking = asyncio.create_task((fusion or trainer(shop, command=gate.command))._tick())
    try:
        await gate.wait()
        yield ticking
        async with asyncio.timeout(20):
            await ticking
    finally:
        ticking.cancel()


async def job_is(shop: Workshop, holds: Callable[[FusionJob], bool]) -> bool:
    return holds(await fusion_store(shop).job())


async def names(shop: Workshop) -> set[str]:
    """Users whom the current version names, which are those of its rows."""
    current = await fusion_store(shop).current()
    assert current is not None
    everyone = await fusion_store(shop).everyone()
    assert everyone.keys() == {source.token for source in current.sources}
    return set(everyone.values())


class TestTraining:
    async def test_what_is_asked_for_is_trained_and_published(self, shop: Workshop) -> None:
        fusion = fusion_store(shop)
        await fusion.request(5)
        ticking = asyncio.create_task(trainer(shop)._tick())
        await soon(lambda: job_is(shop, lambda job: job.doing == "training"), "told what is done")
        async with asyncio.timeout(200):
            await ticking
        job = await fusion.job()
        assert (job.state, job.by, job.requested_ms, job.progress, job.reason) == ("done", "request", 5, 1.0, "")
        assert 0 < job.started_ms <= job.finished_ms
        current = await fusion.current()
        assert current is not None
        assert (current.version, current.events, len(current.sources)) == (1, FEW * EVENTS_MIN, FEW)
        assert GuardReport.from_json(current.report).held_out > 0
        assert await names(shop) == {f"user {number}" for number in range(FEW)}
        by_token = await fusion.everyone()
        for source in current.sources:
            number = int(by_token[source.token].removeprefix("user "))
            assert np.array_equal(source.profile, profile_of(number).astype(float))
        assert shop.model.trainer is not None
        rows = np.stack([source.profile for source in current.sources])
        starter = WarmStarter.from_arrays(shop.model.trainer.learner, current.arrays, rows)
        assert np.isfinite(starter.start(rows[0])).all()
        assert not await shop.redis.exists(shop.keys.fusion_lease)

    async def test_tokens_are_the_same_in_the_next_version(self, shop: Workshop, real_gate: Gate) -> None:
        real_gate.open()
        async with training(shop, real_gate):
            pass
        before = await fusion_store(shop).everyone()
        await populate(shop, range(FEW, FEW + 2))
        async with training(shop, real_gate):
            pass
        after = await fusion_store(shop).everyone()
        assert len(after) == FEW + 2
        assert before.items() <= after.items()
        assert (await fusion_store(shop).identity() or ())[0] == 2

    async def test_a_request_while_one_runs_is_that_one(self, shop: Workshop, real_gate: Gate) -> None:
        async with training(shop, real_gate):
            asked = await fusion_store(shop).request(99)
            assert (asked.state, asked.requested_ms) == ("running", 5)
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        await trainer(shop, command=saying("must not run"))._tick()
        assert (await fusion_store(shop).job()).requested_ms == 5

    async def test_an_epoch_meanwhile_does_no_harm(self, shop: Workshop, real_gate: Gate) -> None:
        """What was trained is of inputs as they are sent, whatever the epochs make of them."""
        before = await shop.epoch_number()
        async with training(shop, real_gate):
            await populate(shop, range(FEW, FEW + 40))
            await shop.meta("m2", model=shop.new_model())._tick()
            now = await shop.epoch_number()
            assert before is not None
            assert now is not None
            assert now > before
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        assert await shop.epoch_number() == now
        cursor_lines = await shop.epochs.tail("0-0", 0)
        assert cursor_lines[-1][1] == now, "services are told, and find the same epoch"

    async def test_it_is_told_how_far_it_is(self, shop: Workshop, gate: Gate) -> None:
        stopping = asyncio.Event()
        async with training(shop, gate, trainer(shop, command=gate.command, stopping=stopping)):
            await soon(lambda: job_is(shop, lambda job: 0.4 < job.progress < 0.6), "half of it")
            stopping.set()


class TestSources:
    async def test_who_is_one(self, shop: Workshop) -> None:
        await populate(shop, [100], events=EVENTS_MIN - 1)
        await tell(shop, "user 1", [1.0, 2.0, 3.0])
        await tell(shop, "user 2", {"named": 1})
        await tell(shop, "user 3", [1.0, 1e300])
        await tell(shop, "user 4", [1.0, "two"])
        await tell(shop, "user 5", [10**400, 1])
        for number, told in ((6, b"damaged"), (7, b"3")):
            await shop.redis.set(shop.keys.profile(f"user {number}"), told)
        await shop.redis.delete(shop.keys.profile("user 8"))
        await shop.users.forget("user 9")
        found = await sources_of(shop).find(PROFILES)
        kept = {0, *range(10, FEW)}
        assert {source.user_id for source in found} == {f"user {number}" for number in kept}
        some = await sources_of(shop).find(PROFILES, most=7)
        assert [source.user_id for source in some] == [source.user_id for source in found[:7]]
        assert all(source.version == EVENTS_MIN and source.incarnation == 0 for source in found)

    async def test_without_what_fusion_said_itself(self, shop: Workshop) -> None:
        """Users who began with a start teach by their rewards alone."""
        learner = shop.model.trainer
        assert learner is not None
        await shop.redis.hset(shop.keys.start("user 1"), mapping={"incarnation": "0", "start": b"x"})
        found = await sources_of(shop).find(PROFILES)
        await shop.redis.delete(shop.keys.samples(found[3].user_id))
        await shop.redis.rpush(shop.keys.samples(found[4].user_id), b"damaged")
        kept, batches = await sources_of(shop).batches(learner, found)
        assert kept == [*found[:3], *found[5:]]
        assert [len(batch["rewards"]) for batch in batches] == [len(kept)]
        assert not any(batch["starts"].any() for batch in batches)

    async def test_too_few(self, shop: Workshop) -> None:
        await shop.users.forget("user 3")
        await fusion_store(shop).request(5)
        await trainer(shop, command=saying("must not run"))._tick()
        job = await fusion_store(shop).job()
        assert job.state == "failed"
        assert f"need {FEW} users" in job.reason
        assert f"there are {FEW - 1}" in job.reason
        assert await fusion_store(shop).current() is None

    async def test_a_learner_that_takes_no_starts(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=named_settings("paper"))
        await fusion_store(shop).request(5)
        await trainer(shop)._tick()
        assert "takes no warm starts" in (await fusion_store(shop).job()).reason

    @pytest.mark.parametrize("fixed", [True, False])
    async def test_a_namespace_that_knows_no_profiles(self, open_workshop: OpenWorkshop, fixed: bool) -> None:
        shop = await open_workshop(settings=named_settings("default"), fixed=fixed)
        await fusion_store(shop).request(5)
        await trainer(shop)._tick()
        job = await fusion_store(shop).job()
        assert (job.state, job.reason.startswith("nothing was")) == ("failed", True)


class TestBadProcesses:
    @pytest.mark.parametrize(
        ("said", "status", "reason"),
        [
            ("", 0, "status 0 and no answer"),
            ("", 3, "status 3 and no answer"),
            ("garbage\n", 0, "something else"),
            ("x" * 100_000, 0, "something else"),
            ('{"progress": 7}\n', 0, "something else"),
            ('["blob"]\n', 0, "something else"),
            ('{"blob": -1}\n', 0, "something else"),
            ('{"blob": 99999999999}\n', 0, "something else"),
            ('{"progress": 0.5}\n{"blob": 100}\nshort', 0, "before its answer was out"),
            ('{"blob": 5}\nwrong', 0, "something else than a fusion"),
            ('{"blob": 5}\nwrong', 4, "status 4 after its answer"),
            ('{"failed": "no luck"}\n', 1, "no luck"),
            ("[" * 9_000 + "\n", 0, "something else"),
        ],
    )
    async def test_its_words(self, shop: Workshop, said: str, status: int, reason: str) -> None:
        await fusion_store(shop).request(5)
        await trainer(shop, command=saying(said, status))._tick()
        job = await fusion_store(shop).job()
        assert job.state == "failed"
        assert reason in job.reason
        assert await fusion_store(shop).current() is None
        assert not await shop.redis.exists(shop.keys.fusion_lease)

    @pytest.mark.parametrize(("said", "reason"), [("", "something else"), ('{"failed": "no luck"}\n', "no luck")])
    async def test_one_that_writes_without_end(self, shop: Workshop, said: str, reason: str) -> None:
        """More than pipes and buffers take: it is not waited for."""
        await fusion_store(shop).request(5)
        await trainer(shop, command=saying(said, more=10_000_000))._tick()
        assert reason in (await fusion_store(shop).job()).reason

    async def test_what_is_no_fusion_of_this_learner(self, shop: Workshop, tmp_path: Path) -> None:
        gate = Gate(tmp_path, encode_answer({"w": np.zeros(3)}, {}))
        gate.open()
        async with training(shop, gate):
            pass
        assert "no fusion of this learner" in (await fusion_store(shop).job()).reason
        assert await fusion_store(shop).current() is None

    async def test_killed(self, shop: Workshop, gate: Gate) -> None:
        async with training(shop, gate):
            os.kill(gate.pid, signal.SIGKILL)
        job = await fusion_store(shop).job()
        assert (job.state, "status -9" in job.reason) == ("failed", True)

    def test_the_real_one_ends_with_who_asked(self) -> None:
        """However that one died: its end of the pipe is closed."""
        half = LENGTH.pack(1 << 20) + b"half of a task"
        ended = subprocess.run([*COMMAND], input=half, capture_output=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (1, b"")

    async def test_one_that_takes_too_long(self, shop: Workshop, gate: Gate) -> None:
        async with training(shop, gate, trainer(shop, command=gate.command, limit_s=1.5)):
            pass
        job = await fusion_store(shop).job()
        assert (job.state, "longer than 1.5 s" in job.reason) == ("failed", True)
        assert gate.ended()


class TestInterruptions:
    async def test_the_worker_stops(self, shop: Workshop, gate: Gate) -> None:
        stopping = asyncio.Event()
        async with training(shop, gate, trainer(shop, command=gate.command, stopping=stopping)):
            stopping.set()
        assert gate.ended()
        assert await fusion_store(shop).job() == FusionJob("queued", requested_ms=5, by="request")
        assert not await shop.redis.exists(shop.keys.fusion_lease)

    async def test_the_lease_is_lost(self, shop: Workshop, gate: Gate) -> None:
        fusion = fusion_store(shop)
        async with training(shop, gate):
            await shop.redis.set(shop.keys.fusion_lease, "another")
            theirs = FusionJob("running", started_ms=77, by="request")
            assert await fusion.put_job(theirs, lease_token="another")
        assert gate.ended()
        assert await fusion.job() == theirs
        assert await shop.redis.get(shop.keys.fusion_lease) == b"another"

    async def test_the_lease_is_lost_at_the_last_moment(self, shop: Workshop, real_gate: Gate) -> None:
        fusion, waited = fusion_store(shop), trainer(shop, command=real_gate.command)
        publish = waited._fusion.publish

        async def too_late(record: FusionRecord, named: dict[str, str], *, lease_token: str) -> bool:
            await shop.redis.set(shop.keys.fusion_lease, "another")
            return await publish(record, named, lease_token=lease_token)

        waited._fusion.publish = too_late  # type: ignore[method-assign,assignment]
        async with training(shop, real_gate, waited):
            real_gate.open()
        assert await fusion.current() is None
        assert (await fusion.job()).state == "running", "for the other one to say"

    async def test_a_job_left_by_the_dead_is_begun_anew(self, shop: Workshop, real_gate: Gate) -> None:
        fusion = fusion_store(shop)
        await fusion.acquire_lease("the dead", 300)
        await fusion.put_job(FusionJob("running", requested_ms=5, by="growth"), lease_token="the dead")
        real_gate.open()
        other = trainer(shop, command=real_gate.command)
        await other._tick()
        assert (await fusion.job()).state == "running", "its lease has not run out"

        async def over() -> bool:
            await other._tick()
            return (await fusion.job()).state == "done"

        await soon(over)
        assert (await fusion.job()).by == "growth"

    async def test_the_namespace_is_deleted(self, shop: Workshop, gate: Gate) -> None:
        await fusion_store(shop).request(5)
        running = asyncio.create_task(trainer(shop, command=gate.command).run())
        await gate.wait()
        await shop.namespaces.delete(shop.record)
        with pytest.raises(StoreReset):
            await asyncio.wait_for(running, 20)
        assert gate.ended()
        left = [key async for found in scan(shop.redis, shop.keys.every_pattern) for key in found]
        assert left == [shop.keys.record.encode()]

    async def test_only_one_trains(self, shop: Workshop, real_gate: Gate) -> None:
        async with training(shop, real_gate):
            await trainer(shop, "t2", command=saying("must not run"))._tick()
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"

    async def test_a_task_that_is_cancelled_leaves_no_process(self, shop: Workshop, gate: Gate) -> None:
        await fusion_store(shop).request(5)
        ticking = asyncio.create_task(trainer(shop, command=gate.command)._tick())
        await gate.wait()
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking
        assert gate.ended()


class TestForgotten:
    async def test_while_it_is_trained(self, shop: Workshop, real_gate: Gate) -> None:
        """Forgotten, and forgotten and back with another profile: neither is a source of what comes out."""
        async with training(shop, real_gate):
            for user in ("user 2", "user 3"):
                await shop.users.forget(user)
                await fusion_store(shop).strike([user])
            await tell(shop, "user 3", [9.0, 9.0], incarnation=1)
            learner = shop.model.trainer
            assert learner is not None
            again = make_event("user 3", 5, incarnation=1, phi=np.zeros(learner.learner.noted, dtype=np.float32))
            partition = shop.keys.partition_of("user 3")
            await shop.publisher().publish(partition, await shop.give([again], partition=partition))
            assert (await shop.users.versions(partition))["user 3"] == (1, 1)
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        assert await names(shop) == {f"user {number}" for number in range(FEW)} - {"user 2", "user 3"}

    async def test_a_trainer_that_died_before_it_looked_is_made_up_for(self, shop: Workshop) -> None:
        fusion = fusion_store(shop)
        named = {"t2": "user 2", "t4": "user 4"}
        rows = tuple(FusionSource(token, np.zeros(2)) for token in named)
        await shop.users.forget("user 2")
        await fusion.acquire_lease("the dead", 60_000)
        assert await fusion.publish(FusionRecord(1, {}, rows, {}, 1), named, lease_token="the dead")
        await trainer(shop)._tick()
        assert await names(shop) == {"user 4"}


def test_the_plan_is_what_a_training_takes() -> None:
    from models.warm_start_training import LEAST_SOURCES
    from service.settings import Settings

    least = next(each.ge for each in Settings.model_fields["fusion_min_sources"].metadata if hasattr(each, "ge"))
    assert least == LEAST_SOURCES == FEW
    assert PLAN.least_sources == FEW
