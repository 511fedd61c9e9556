"""Fusion is trained in a child process and published under a lease; no interruption leaves a process or job behind."""

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

from metaban.models.fusion.warm_starts import GuardReport, WarmStarter
from metaban.models.settings import named_settings
from metaban.store.client.connection import scan
from metaban.store.errors import StoreReset
from metaban.store.shared.fusion import FusionJobRecord, FusionRecord, FusionSource
from metaban.worker.jobs.fusion import FusionTrainer
from metaban.worker.jobs.fusion_sources import EVENTS_MIN
from metaban.worker.jobs.fusion_task import COMMAND, LENGTH, encode_answer
from tests.worker.epochs.epoch_checks import published
from tests.worker.jobs.fusion_setup import (
    FEW,
    PROFILES,
    SCHEDULE,
    Gate,
    fusion_store,
    open_fusion_users,
    populate,
    profile_of,
    sources_of,
    store_profile,
    trained,
    trainer,
    writing_command,
)
from tests.worker.workshop import OpenWorkshop, Workshop, make_event, soon


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_fusion_users(open_workshop)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A closed gate: a training without an end."""
    return Gate(tmp_path)


@pytest.fixture
async def real_gate(shop: Workshop, tmp_path: Path) -> Gate:
    """A gate with a real answer."""
    return Gate(tmp_path, await trained(shop))


@asynccontextmanager
async def training(
    shop: Workshop, gate: Gate, fusion: FusionTrainer | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Request a training and wait for its process; it is over at the end of the block."""
    await fusion_store(shop).request(5)
    ticking = asyncio.create_task((fusion or trainer(shop, command=gate.command)).tick())
    try:
        await gate.wait()
        yield ticking
        async with asyncio.timeout(20):
            await ticking
    finally:
        ticking.cancel()


async def job_is(shop: Workshop, holds: Callable[[FusionJobRecord], bool]) -> bool:
    return holds(await fusion_store(shop).job())


async def names(shop: Workshop) -> set[str]:
    """Users named by the current version."""
    current = await fusion_store(shop).current()
    assert current is not None
    everyone = await fusion_store(shop).everyone()
    assert everyone.keys() == {source.token for source in current.sources}
    return set(everyone.values())


class TestTraining:
    async def test_a_request_is_trained_and_published(self, shop: Workshop) -> None:
        fusion = fusion_store(shop)
        await fusion.request(5)
        ticking = asyncio.create_task(trainer(shop).tick())
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

    async def test_tokens_are_kept_in_the_next_version(self, shop: Workshop, real_gate: Gate) -> None:
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

    async def test_a_request_during_a_training_joins_it(self, shop: Workshop, real_gate: Gate) -> None:
        async with training(shop, real_gate):
            asked = await fusion_store(shop).request(99)
            assert (asked.state, asked.requested_ms) == ("running", 5)
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        await trainer(shop, command=writing_command("must not run")).tick()
        assert (await fusion_store(shop).job()).requested_ms == 5

    async def test_an_epoch_during_the_training(self, shop: Workshop, real_gate: Gate) -> None:
        """The training uses raw inputs, independent of the epoch."""
        before = await shop.epoch_number()
        async with training(shop, real_gate):
            await populate(shop, range(FEW, FEW + 40))
            await shop.epoch_trainer("m2", model=shop.new_model()).tick()
            now = await shop.epoch_number()
            assert before is not None
            assert now is not None
            assert now > before
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        assert await shop.epoch_number() == now
        assert (await published(shop))[-1] == now, "the log announces it, with the same epoch"

    async def test_progress_is_reported(self, shop: Workshop, gate: Gate) -> None:
        stopping = asyncio.Event()
        async with training(shop, gate, trainer(shop, command=gate.command, stopping=stopping)):
            await soon(lambda: job_is(shop, lambda job: 0.4 < job.progress < 0.6), "half of it")
            stopping.set()


class TestSources:
    async def test_which_users_are_sources(self, shop: Workshop) -> None:
        await populate(shop, [100], events=EVENTS_MIN - 1)
        await store_profile(shop, "user 1", [1.0, 2.0, 3.0])
        await store_profile(shop, "user 2", {"named": 1})
        await store_profile(shop, "user 3", [1.0, 1e300])
        await store_profile(shop, "user 4", [1.0, "two"])
        await store_profile(shop, "user 5", [10**400, 1])
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

    async def test_warm_starts_of_sources_are_ignored(self, shop: Workshop) -> None:
        """Warm starts of the sources are not used."""
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

    async def test_too_few_sources(self, shop: Workshop) -> None:
        await shop.users.forget("user 3")
        await fusion_store(shop).request(5)
        await trainer(shop, command=writing_command("must not run")).tick()
        job = await fusion_store(shop).job()
        assert job.state == "failed"
        assert f"need {FEW} users" in job.reason
        assert f"there are {FEW - 1}" in job.reason
        assert await fusion_store(shop).current() is None

    async def test_a_learner_without_warm_starts(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop(settings=named_settings("paper"))
        await fusion_store(shop).request(5)
        await trainer(shop).tick()
        assert "does not support warm starts" in (await fusion_store(shop).job()).reason

    @pytest.mark.parametrize("fixed", [True, False])
    async def test_a_namespace_without_profiles(self, open_workshop: OpenWorkshop, fixed: bool) -> None:
        shop = await open_workshop(settings=named_settings("default"), fixed=fixed)
        await fusion_store(shop).request(5)
        await trainer(shop).tick()
        job = await fusion_store(shop).job()
        expected = "no user has a profile yet" if fixed else "the namespace has no users yet"
        assert (job.state, job.reason.startswith(expected)) == ("failed", True)


class TestBadProcesses:
    @pytest.mark.parametrize(
        ("said", "status", "reason"),
        [
            ("", 0, "status 0 and no answer"),
            ("", 3, "status 3 and no answer"),
            ("garbage\n", 0, "an invalid line"),
            ("x" * 100_000, 0, "an invalid line"),
            ('{"progress": 7}\n', 0, "an invalid line"),
            ('["blob"]\n', 0, "an invalid line"),
            ('{"blob": -1}\n', 0, "an invalid line"),
            ('{"blob": 99999999999}\n', 0, "an invalid line"),
            ('{"progress": 0.5}\n{"blob": 100}\nshort', 0, "within its answer"),
            ('{"blob": 5}\nwrong', 0, "invalid answer"),
            ('{"blob": 5}\nwrong', 4, "status 4 after its answer"),
            ('{"failed": "no luck"}\n', 1, "no luck"),
            ("[" * 9_000 + "\n", 0, "an invalid line"),
        ],
    )
    async def test_invalid_output(self, shop: Workshop, said: str, status: int, reason: str) -> None:
        await fusion_store(shop).request(5)
        await trainer(shop, command=writing_command(said, status)).tick()
        job = await fusion_store(shop).job()
        assert job.state == "failed"
        assert reason in job.reason
        assert await fusion_store(shop).current() is None
        assert not await shop.redis.exists(shop.keys.fusion_lease)

    @pytest.mark.parametrize(("said", "reason"), [("", "an invalid line"), ('{"failed": "no luck"}\n', "no luck")])
    async def test_endless_output(self, shop: Workshop, said: str, reason: str) -> None:
        """More output than the pipe holds does not block."""
        await fusion_store(shop).request(5)
        await trainer(shop, command=writing_command(said, more=10_000_000)).tick()
        assert reason in (await fusion_store(shop).job()).reason

    async def test_a_fusion_of_another_learner(self, shop: Workshop, tmp_path: Path) -> None:
        gate = Gate(tmp_path, encode_answer({"w": np.zeros(3)}, {}))
        gate.open()
        async with training(shop, gate):
            pass
        assert "does not fit the learner" in (await fusion_store(shop).job()).reason
        assert await fusion_store(shop).current() is None

    async def test_killed(self, shop: Workshop, gate: Gate) -> None:
        async with training(shop, gate):
            os.kill(gate.pid, signal.SIGKILL)
        job = await fusion_store(shop).job()
        assert (job.state, "status -9" in job.reason) == ("failed", True)

    def test_the_real_child_ends_with_its_parent(self) -> None:
        """Its end of the pipe is closed, however it died."""
        half = LENGTH.pack(1 << 20) + b"half of a task"
        ended = subprocess.run([*COMMAND], input=half, capture_output=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (1, b"")

    async def test_time_limit(self, shop: Workshop, gate: Gate) -> None:
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
        assert await fusion_store(shop).job() == FusionJobRecord("queued", requested_ms=5, by="request")
        assert not await shop.redis.exists(shop.keys.fusion_lease)

    async def test_the_lease_is_lost(self, shop: Workshop, gate: Gate) -> None:
        fusion = fusion_store(shop)
        async with training(shop, gate):
            await shop.redis.set(shop.keys.fusion_lease, "another")
            theirs = FusionJobRecord("running", started_ms=77, by="request")
            assert await fusion.put_job(theirs, lease_token="another")
        assert gate.ended()
        assert await fusion.job() == theirs
        assert await shop.redis.get(shop.keys.fusion_lease) == b"another"

    async def test_the_lease_is_lost_at_the_last_moment(self, shop: Workshop, real_gate: Gate) -> None:
        fusion = fusion_store(shop)
        waited = trainer(shop, command=real_gate.command, fusion=fusion)
        publish = fusion.publish

        async def too_late(record: FusionRecord, named: dict[str, str], *, lease_token: str) -> bool:
            await shop.redis.set(shop.keys.fusion_lease, "another")
            return await publish(record, named, lease_token=lease_token)

        fusion.publish = too_late  # type: ignore[method-assign,assignment]
        async with training(shop, real_gate, waited):
            real_gate.open()
        assert await fusion.current() is None
        assert (await fusion.job()).state == "running", "only the new holder reports the result"

    async def test_a_job_of_a_dead_worker_is_started_again(self, shop: Workshop, real_gate: Gate) -> None:
        fusion = fusion_store(shop)
        await fusion.acquire_lease("the dead", 300)
        await fusion.put_job(FusionJobRecord("running", requested_ms=5, by="growth"), lease_token="the dead")
        real_gate.open()
        other = trainer(shop, command=real_gate.command)
        await other.tick()
        assert (await fusion.job()).state == "running", "its lease has not expired"

        async def over() -> bool:
            await other.tick()
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
            await trainer(shop, "t2", command=writing_command("must not run")).tick()
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"

    async def test_a_task_that_is_cancelled_leaves_no_process(self, shop: Workshop, gate: Gate) -> None:
        await fusion_store(shop).request(5)
        ticking = asyncio.create_task(trainer(shop, command=gate.command).tick())
        await gate.wait()
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking
        assert gate.ended()


class TestForgotten:
    async def test_forgotten_during_the_training(self, shop: Workshop, real_gate: Gate) -> None:
        """A forgotten user, also one who is back with another profile, is not a source of the published version."""
        async with training(shop, real_gate):
            for user in ("user 2", "user 3"):
                await shop.users.forget(user)
                await fusion_store(shop).strike([user])
            await store_profile(shop, "user 3", [9.0, 9.0], incarnation=1)
            learner = shop.model.trainer
            assert learner is not None
            again = make_event("user 3", 5, incarnation=1, phi=np.zeros(learner.learner.noted, dtype=np.float32))
            partition = shop.keys.partition_of("user 3")
            await shop.publisher().publish(partition, await shop.give([again], partition=partition))
            assert (await shop.users.versions(partition))["user 3"] == (1, 1)
            real_gate.open()
        assert (await fusion_store(shop).job()).state == "done"
        assert await names(shop) == {f"user {number}" for number in range(FEW)} - {"user 2", "user 3"}

    async def test_forgotten_users_missed_by_a_dead_trainer_are_removed(self, shop: Workshop) -> None:
        fusion = fusion_store(shop)
        named = {"t2": "user 2", "t4": "user 4"}
        rows = tuple(FusionSource(token, np.zeros(2)) for token in named)
        await shop.users.forget("user 2")
        await fusion.acquire_lease("the dead", 60_000)
        assert await fusion.publish(FusionRecord(1, {}, rows, {}, 1), named, lease_token="the dead")
        await trainer(shop).tick()
        assert await names(shop) == {"user 4"}


def test_the_plan_matches_the_training() -> None:
    from metaban.models.fusion.warm_start_training import LEAST_SOURCES
    from metaban.service.settings.environment import Settings

    least = next(each.ge for each in Settings.model_fields["fusion_min_sources"].metadata if hasattr(each, "ge"))
    assert least == LEAST_SOURCES == FEW
    assert SCHEDULE.min_sources == FEW
