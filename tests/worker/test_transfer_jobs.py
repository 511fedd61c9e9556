"""Who helps a target is worked out under a lease, told while it goes on, and names nobody who was forgotten."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from models.transfer import TransferSettings
from models.transfer_nets import NetSettings
from store.connection import scan
from store.errors import StoreReset
from store.namespaces import Namespaces
from store.transfer import TARGET_SAMPLES_MIN, TransferJob, TransferQuestion
from tests.worker.conftest import OpenWorkshop
from tests.worker.transferring import (
    ASKED,
    EVENTS,
    EVERYONE,
    FOES,
    FRIENDS,
    TARGET,
    Gate,
    ask,
    live,
    look,
    open_transferring,
    tell_kinds,
    transfer_store,
    transfer_worker,
)
from tests.worker.workshop import Workshop, small, soon
from worker.transfer import BEGINNINGS_MAX, NICENESS, TransferWorker, modeling_thread, settings_for

pytestmark = pytest.mark.timeout(120)
FEW = 40


@pytest.fixture
async def shop(open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Everyone has met enough arms to be a target, and few enough to be quick; the models are poor ones."""
    monkeypatch.setattr("worker.transfer.NETS", NetSettings(hidden=4, steps=5))
    monkeypatch.setattr("worker.transfer.settings_for", lambda _: TransferSettings(subset_size=1, batches=1))
    return await open_transferring(open_workshop, events=FEW)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Never opened, it stands for work without an end."""
    return Gate(monkeypatch)


@asynccontextmanager
async def working(
    shop: Workshop, gate: Gate, worker: TransferWorker, question: TransferQuestion = ASKED
) -> AsyncIterator[TransferJob]:
    """A job that somebody is in the midst of; over at the end."""
    job = await ask(shop, question)
    ticking = asyncio.create_task(worker._tick())
    try:
        await gate.wait()
        yield job
        async with asyncio.timeout(20):
            await ticking
    finally:
        ticking.cancel()


async def done(shop: Workshop, compute: Executor, question: TransferQuestion) -> dict[str, Any]:
    """What comes of a question."""
    job = await ask(shop, question)
    await transfer_worker(shop, compute)._tick()
    found, result = await look(shop, job)
    assert (found.state, found.reason) == ("done", "")
    return result


async def refusal(shop: Workshop, compute: Executor, question: TransferQuestion) -> str:
    """Why nothing comes of a question."""
    job = await ask(shop, question)
    await transfer_worker(shop, compute)._tick()
    found, result = await look(shop, job)
    assert (found.state, result) == ("failed", {})
    assert found.finished_ms >= found.started_ms > 0
    return found.reason


class TestAnswers:
    async def test_friends_before_foes(self, open_workshop: OpenWorkshop, compute: Executor) -> None:
        shop = await open_transferring(open_workshop)
        asked = await ask(shop)
        await transfer_worker(shop, compute)._tick()
        job, result = await look(shop, asked)
        assert (job.state, job.progress, job.doing, job.reason, job.begun) == ("done", 1.0, "", "", 1)
        assert 0 < job.requested_ms <= job.started_ms <= job.finished_ms
        assert not await shop.redis.exists(shop.keys.transfer_lease)
        assert result["target"] == {"user_id": TARGET, "cluster": None, "users": 1, "events": EVENTS}
        ranked = [source["user_id"] for source in result["sources"]]
        assert (set(ranked[:3]), set(ranked[3:])) == (set(FRIENDS), set(FOES))
        chosen = {source["user_id"] for source in result["sources"] if source["selected"]}
        assert chosen
        assert chosen <= set(FRIENDS)
        for source in result["sources"]:
            assert source["low"] <= source["coefficient"] <= source["high"]
            assert source["predicted_gain"] == -source["coefficient"]
        alone = {source["user_id"]: source["gain"] for source in result["sources"]}  # measured, of one source each
        assert min(alone[user] for user in FRIENDS) > max(alone[user] for user in FOES)
        losses = result["losses"]
        assert losses["selected"] < losses["alone"]
        assert result["gain"] == pytest.approx(losses["alone"] - losses["selected"], abs=1e-6)
        assert (result["applies"], result["subsets"], result["metric"]) == (True, 48, "cross-entropy")
        assert 0 <= result["surrogate"]["error"] < result["surrogate"]["variance"]
        assert await done(shop, compute, ASKED) == result, "the same question has the same answer"

    async def test_kinds_of_users(self, shop: Workshop, compute: Executor) -> None:
        tell_kinds(shop.model, dict(zip(EVERYONE, (0, 1, 1, 0, 2, 2, 3), strict=True)))
        result = await done(shop, compute, TransferQuestion("mse", cluster=0))
        assert result["target"] == {"user_id": None, "cluster": 0, "users": 2, "events": 2 * FEW}
        counted = {(source["cluster"], source["users"], source["events"]) for source in result["sources"]}
        assert counted == {(1, 2, 2 * FEW), (2, 2, 2 * FEW), (3, 1, FEW)}
        assert [source["user_id"] for source in result["sources"]] == [None] * 3
        result = await done(shop, compute, TransferQuestion("mse", user_id=FOES[2]))
        assert {source["cluster"] for source in result["sources"]} == {0, 1, 2}, "without the target themself"
        result = await done(shop, compute, TransferQuestion("mse", cluster=0, sources=(FRIENDS[2], FOES[0])))
        assert result["target"]["users"] == 1, "whoever is a source by themself teaches as one"
        assert {source["user_id"] for source in result["sources"]} == {FRIENDS[2], FOES[0]}

    @pytest.mark.parametrize("metric", ["worst-group-accuracy", "demographic-parity", "equal-opportunity"])
    async def test_groups_are_users_of_the_target(self, shop: Workshop, compute: Executor, metric: str) -> None:
        tell_kinds(shop.model, dict(zip(EVERYONE, (0, 0, 0, 1, 1, 2, 3), strict=True)))
        result = await done(shop, compute, TransferQuestion(metric, cluster=0))
        assert 0 <= result["losses"]["alone"] <= 1
        assert "compares users" in await refusal(shop, compute, TransferQuestion(metric, cluster=3))

    async def test_by_turns(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        gate.open()
        first = await ask(shop)
        second = await ask(shop, replace(ASKED, metric="mse"))
        await transfer_worker(shop, compute)._tick()
        assert [(await look(shop, job))[0].state for job in (first, second)] == ["done", "queued"]
        await transfer_worker(shop, compute)._tick()
        assert (await look(shop, second))[0].state == "done"
        before = await shop.redis.hgetall(shop.keys.transfer_jobs)
        await transfer_worker(shop, compute)._tick()
        assert await shop.redis.hgetall(shop.keys.transfer_jobs) == before

    def test_few_sources_make_small_sets(self) -> None:
        sizes = [(settings_for(count).subset_size, settings_for(count).early_stop) for count in (2, 5, 10, 50)]
        assert sizes == [(1, False), (2, False), (5, False), (5, True)]


def test_the_thread_steps_back_and_no_other() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with modeling_thread() as compute:
        assert compute.submit(niceness).result() == min(19, before + NICENESS)
    assert niceness() == before


class TestRefusals:
    async def test_too_few_rewards(self, shop: Workshop, compute: Executor) -> None:
        await live(shop, ["newcomer"], events=TARGET_SAMPLES_MIN - 1)
        reason = await refusal(shop, compute, TransferQuestion("mse", user_id="newcomer", sources=FRIENDS))
        assert f"{TARGET_SAMPLES_MIN - 1} rewards" in reason
        assert f"at least {TARGET_SAMPLES_MIN}" in reason

    async def test_too_few_sources(self, shop: Workshop, compute: Executor) -> None:
        assert "at least 2 sources" in await refusal(shop, compute, TransferQuestion("mse", user_id=TARGET))
        await shop.redis.delete(shop.keys.samples(FRIENDS[0]))
        question = TransferQuestion("mse", user_id=TARGET, sources=FRIENDS[:2])
        assert "there are 1" in await refusal(shop, compute, question)

    async def test_no_such_kind(self, shop: Workshop, compute: Executor) -> None:
        assert "has 0 rewards" in await refusal(shop, compute, TransferQuestion("mse", cluster=7, sources=FRIENDS))

    async def test_nobody_yet(self, open_workshop: OpenWorkshop, compute: Executor) -> None:
        shop = await open_workshop(settings=small(), fixed=False)
        assert "nobody to learn from" in await refusal(shop, compute, TransferQuestion("mse", cluster=0))

    async def test_an_error_of_ours(self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("worker.transfer.model_transfer", lambda *_, **__: 1 // 0)
        assert "its log tells more" in await refusal(shop, compute, ASKED)

    async def test_what_is_not_finite(self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("worker.transfer.told", lambda *_: {"sources": [{"gain": float("nan")}]})
        assert "not finite" in await refusal(shop, compute, ASKED)


class TestInterruptions:
    async def test_it_is_told_how_far_it_is(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:

            async def half() -> bool:
                found, _ = await look(shop, job)
                return (found.state, found.doing) == ("running", "modeling") and 0.5 <= found.progress < 0.6

            await soon(half, "half of it")
            gate.open()
        assert (await look(shop, job))[0].state == "done"

    async def test_a_worker_that_stops_leaves_it_to_the_next(
        self, shop: Workshop, compute: Executor, gate: Gate
    ) -> None:
        stopping = asyncio.Event()
        async with working(shop, gate, transfer_worker(shop, compute, stopping=stopping)) as job:
            stopping.set()
        await gate.wait_for_end()
        assert (await look(shop, job))[0] == job, "as if it had not been begun"
        gate.open()
        await transfer_worker(shop, compute, "t2")._tick()
        assert (await look(shop, job))[0].state == "done"

    async def test_one_at_a_time(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:
            await transfer_worker(shop, compute, "t2")._tick()
            assert (await look(shop, job))[0].begun == 1
            gate.open()

    async def test_the_lease_is_lost(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:
            await shop.redis.set(shop.keys.transfer_lease, "another")
            theirs = replace(job, state="running", begun=2, doing="ours")
            assert await transfer_store(shop).put_job(theirs, lease_token="another")
        await gate.wait_for_end()
        assert (await look(shop, job))[0] == theirs
        assert await shop.redis.get(shop.keys.transfer_lease) == b"another"

    async def test_what_the_dead_left_is_begun_anew_but_not_for_ever(self, shop: Workshop, compute: Executor) -> None:
        waiting = await ask(shop, replace(ASKED, metric="mse"))
        left = await ask(shop)
        store = transfer_store(shop)
        assert await store.acquire_lease("the dead", 1)
        for begun, state in ((BEGINNINGS_MAX - 1, "done"), (BEGINNINGS_MAX, "failed")):
            await shop.redis.set(shop.keys.transfer_lease, "the dead")
            assert await store.put_job(replace(left, state="running", begun=begun), lease_token="the dead")
            await shop.redis.delete(shop.keys.transfer_lease)
            await transfer_worker(shop, compute)._tick()
            found, _ = await look(shop, left)
            assert (found.state, found.begun) == (state, BEGINNINGS_MAX)
        assert "3 workers ended" in found.reason
        assert (await look(shop, waiting))[0].state == "queued"

    async def test_a_namespace_that_is_deleted(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        with pytest.raises(StoreReset):
            async with working(shop, gate, transfer_worker(shop, compute)):
                await Namespaces(shop.redis).delete(shop.record)
        await gate.wait_for_end()
        left = [key async for found in scan(shop.redis, shop.keys.every_pattern) for key in found]
        assert left == [shop.keys.record.encode()]


class TestForgetting:
    @pytest.mark.parametrize("victim", [TARGET, FOES[1]])
    async def test_while_it_goes_on(self, shop: Workshop, compute: Executor, gate: Gate, victim: str) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)):
            await shop.users.forget(victim)
            assert await transfer_store(shop).strike([victim]) == 1
            gate.open()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)

    async def test_by_a_service_that_died_over_it(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        """Nobody has struck the job: whoever works on it does."""
        async with working(shop, gate, transfer_worker(shop, compute)):
            await shop.users.forget(FRIENDS[0])
            gate.open()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)

    async def test_before_it_began(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        worker = transfer_worker(shop, compute)
        await worker._tick()
        await ask(shop)
        await shop.users.forget(FRIENDS[0])
        await worker._tick()
        assert not gate.reached.is_set()
        assert not await shop.redis.exists(shop.keys.transfer_jobs)

    async def test_long_after(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        gate.open()
        await done(shop, compute, ASKED)
        await shop.users.forget(TARGET)
        await transfer_worker(shop, compute, "a new process")._tick()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)
