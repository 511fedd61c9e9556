"""Transfer jobs run under a lease, report progress, and never name a forgotten user."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info

from metaban.models.numerics.hardware import use_threads
from metaban.models.transfer.nets import NetSettings
from metaban.models.transfer.task_modeling import TransferSettings
from metaban.store.client.connection import scan
from metaban.store.errors import StoreReset
from metaban.store.namespaces import NamespaceStore
from metaban.store.shared.transfer import TARGET_SAMPLES_MIN, WAITING_MAX, TransferJobRecord, TransferQuestion
from metaban.worker.jobs import transfer as transfer_module
from metaban.worker.jobs.transfer import NICENESS, STARTS_MAX, TransferWorker, modeling_thread, settings_for
from tests.worker.jobs.transfer_setup import (
    ASKED,
    EVENTS,
    EVERYONE,
    FOES,
    FRIENDS,
    TARGET,
    Gate,
    apply_rewards,
    job_status,
    open_transfer_users,
    request_job,
    set_clusters,
    transfer_store,
    transfer_worker,
)
from tests.worker.workshop import OpenWorkshop, Workshop, soon

FEW = 40


@pytest.fixture
async def shop(open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Users have just enough rewards to be targets; the models are small."""
    monkeypatch.setattr(transfer_module, "NETS", NetSettings(hidden=4, steps=5))
    monkeypatch.setattr(transfer_module, "settings_for", lambda _: TransferSettings(subset_size=1, batches=1))
    return await open_transfer_users(open_workshop, events=FEW)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A closed gate: work without an end."""
    return Gate(monkeypatch)


@asynccontextmanager
async def working(
    shop: Workshop, gate: Gate, worker: TransferWorker, question: TransferQuestion = ASKED
) -> AsyncIterator[TransferJobRecord]:
    """A running job; it is over at the end of the block."""
    job = await request_job(shop, question)
    ticking = asyncio.create_task(worker.tick())
    try:
        await gate.wait()
        yield job
        async with asyncio.timeout(20):
            await ticking
    finally:
        ticking.cancel()


async def done(shop: Workshop, compute: Executor, question: TransferQuestion) -> dict[str, Any]:
    """Result of a job."""
    job = await request_job(shop, question)
    await transfer_worker(shop, compute).tick()
    found, result = await job_status(shop, job)
    assert (found.state, found.reason) == ("done", "")
    return result


async def refusal(shop: Workshop, compute: Executor, question: TransferQuestion) -> str:
    """Reason of a failed job."""
    job = await request_job(shop, question)
    await transfer_worker(shop, compute).tick()
    found, result = await job_status(shop, job)
    assert (found.state, result) == ("failed", {})
    assert found.finished_ms >= found.started_ms > 0
    return found.reason


class TestAnswers:
    async def test_users_who_agree_are_ranked_first(self, open_workshop: OpenWorkshop, compute: Executor) -> None:
        shop = await open_transfer_users(open_workshop)
        asked = await request_job(shop)
        await transfer_worker(shop, compute).tick()
        job, result = await job_status(shop, asked)
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
        alone = {source["user_id"]: source["gain"] for source in result["sources"]}  # measured with one source each
        assert min(alone[user] for user in FRIENDS) > max(alone[user] for user in FOES)
        losses = result["losses"]
        assert losses["selected"] < losses["alone"]
        assert result["gain"] == pytest.approx(losses["alone"] - losses["selected"], abs=1e-6)
        # Six sources have 20 sets of three; 48 are drawn.
        assert (result["applies"], result["subsets"] <= 20, result["metric"]) == (True, True, "cross-entropy")
        assert 0 <= result["surrogate"]["error"] < result["surrogate"]["variance"]
        assert await done(shop, compute, ASKED) == result, "equal requests have equal results"

    async def test_clusters_of_users(self, shop: Workshop, compute: Executor) -> None:
        set_clusters(shop.model, dict(zip(EVERYONE, (0, 1, 1, 0, 2, 2, 3), strict=True)))
        result = await done(shop, compute, TransferQuestion("mse", cluster=0))
        assert result["target"] == {"user_id": None, "cluster": 0, "users": 2, "events": 2 * FEW}
        counted = {(source["cluster"], source["users"], source["events"]) for source in result["sources"]}
        assert counted == {(1, 2, 2 * FEW), (2, 2, 2 * FEW), (3, 1, FEW)}
        assert [source["user_id"] for source in result["sources"]] == [None] * 3
        result = await done(shop, compute, TransferQuestion("mse", user_id=FOES[2]))
        assert {source["cluster"] for source in result["sources"]} == {0, 1, 2}, "without the target"
        result = await done(shop, compute, TransferQuestion("mse", cluster=0, sources=(FRIENDS[2], FOES[0])))
        assert result["target"]["users"] == 1, "a user named as a source is not part of the target"
        assert {source["user_id"] for source in result["sources"]} == {FRIENDS[2], FOES[0]}

    @pytest.mark.parametrize("metric", ["worst-group-accuracy", "demographic-parity", "equal-opportunity"])
    async def test_fairness_groups_are_the_users_of_the_target(
        self, shop: Workshop, compute: Executor, metric: str
    ) -> None:
        set_clusters(shop.model, dict(zip(EVERYONE, (0, 0, 0, 1, 1, 2, 3), strict=True)))
        result = await done(shop, compute, TransferQuestion(metric, cluster=0))
        assert 0 <= result["losses"]["alone"] <= 1
        assert "compares users" in await refusal(shop, compute, TransferQuestion(metric, cluster=3))

    async def test_jobs_run_in_turn(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        gate.open()
        first = await request_job(shop)
        second = await request_job(shop, replace(ASKED, metric="mse"))
        await transfer_worker(shop, compute).tick()
        assert [(await job_status(shop, job))[0].state for job in (first, second)] == ["done", "queued"]
        await transfer_worker(shop, compute).tick()
        assert (await job_status(shop, second))[0].state == "done"
        before = await shop.redis.hgetall(shop.keys.transfer_jobs)
        await transfer_worker(shop, compute).tick()
        assert await shop.redis.hgetall(shop.keys.transfer_jobs) == before

    async def test_jobs_of_one_millisecond_run_in_the_order_of_their_requests(
        self, shop: Workshop, compute: Executor
    ) -> None:
        now_ms, asked = int(time.time() * 1_000), []
        for number in range(WAITING_MAX):
            empty = TransferQuestion("mse", cluster=100 + number)  # fails at once
            request = await transfer_store(shop).request(empty, {}, now_ms)
            assert request.job is not None
            asked.append(request.job)
        for ended in range(1, WAITING_MAX + 1):
            await transfer_worker(shop, compute).tick()
            states = [(await job_status(shop, job))[0].state for job in asked]
            assert states == ["failed"] * ended + ["queued"] * (WAITING_MAX - ended)

    def test_few_sources_give_small_sets(self) -> None:
        sizes = [(settings_for(count).subset_size, settings_for(count).early_stop) for count in (2, 5, 10, 50)]
        assert sizes == [(1, False), (2, False), (5, False), (5, True)]


def test_only_the_modeling_thread_has_lower_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with modeling_thread() as compute:
        assert compute.submit(niceness).result() == min(19, before + NICENESS)
    assert niceness() == before


async def test_running_job_leaves_the_threads_of_the_process(shop: Workshop, gate: Gate, compute: Executor) -> None:
    def threads() -> list[int]:
        blas = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
        return [torch.get_num_threads(), *blas]

    def of_a_new_thread() -> list[int]:
        with ThreadPoolExecutor(1) as new:
            return new.submit(threads).result()

    use_threads(2)
    try:
        before = of_a_new_thread()
        assert len(before) > 1
        async with working(shop, gate, transfer_worker(shop, compute)):
            during = of_a_new_thread()
            gate.open()
        assert during == before
    finally:
        use_threads(1)


class TestRefusals:
    async def test_too_few_rewards(self, shop: Workshop, compute: Executor) -> None:
        await apply_rewards(shop, ["newcomer"], events=TARGET_SAMPLES_MIN - 1)
        reason = await refusal(shop, compute, TransferQuestion("mse", user_id="newcomer", sources=FRIENDS))
        assert f"{TARGET_SAMPLES_MIN - 1} stored rewards" in reason
        assert f"at least {TARGET_SAMPLES_MIN}" in reason

    async def test_too_few_sources(self, shop: Workshop, compute: Executor) -> None:
        assert "at least 2 sources" in await refusal(shop, compute, TransferQuestion("mse", user_id=TARGET))
        await shop.redis.delete(shop.keys.samples(FRIENDS[0]))
        question = TransferQuestion("mse", user_id=TARGET, sources=FRIENDS[:2])
        assert "there are 1" in await refusal(shop, compute, question)

    async def test_an_unknown_cluster(self, shop: Workshop, compute: Executor) -> None:
        assert "has 0 stored rewards" in await refusal(
            shop, compute, TransferQuestion("mse", cluster=7, sources=FRIENDS)
        )

    async def test_a_namespace_without_users(self, open_workshop: OpenWorkshop, compute: Executor) -> None:
        shop = await open_workshop(fixed=False)
        assert "no users yet" in await refusal(shop, compute, TransferQuestion("mse", cluster=0))

    async def test_an_unexpected_error(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_module, "model_transfer", lambda *_, **__: 1 // 0)
        assert "see its log" in await refusal(shop, compute, ASKED)

    async def test_non_finite_results(self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfer_module, "result_json", lambda *_: {"sources": [{"gain": float("nan")}]})
        assert "not finite" in await refusal(shop, compute, ASKED)


class TestInterruptions:
    async def test_progress_is_reported(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:

            async def half() -> bool:
                found, _ = await job_status(shop, job)
                return (found.state, found.doing) == ("running", "modeling") and 0.5 <= found.progress < 0.6

            await soon(half, "half of it")
            gate.open()
        assert (await job_status(shop, job))[0].state == "done"

    async def test_a_stopped_job_is_continued_by_the_next_worker(
        self, shop: Workshop, compute: Executor, gate: Gate
    ) -> None:
        stopping = asyncio.Event()
        async with working(shop, gate, transfer_worker(shop, compute, stopping=stopping)) as job:
            stopping.set()
        await gate.wait_for_end()
        assert (await job_status(shop, job))[0] == job, "as if it had not started"
        gate.open()
        await transfer_worker(shop, compute, "t2").tick()
        assert (await job_status(shop, job))[0].state == "done"

    async def test_one_at_a_time(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:
            await transfer_worker(shop, compute, "t2").tick()
            assert (await job_status(shop, job))[0].begun == 1
            gate.open()

    async def test_the_lease_is_lost(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)) as job:
            await shop.redis.set(shop.keys.transfer_lease, "another")
            theirs = replace(job, state="running", begun=2, doing="ours")
            assert await transfer_store(shop).put_job(theirs, lease_token="another")
        await gate.wait_for_end()
        assert (await job_status(shop, job))[0] == theirs
        assert await shop.redis.get(shop.keys.transfer_lease) == b"another"

    async def test_a_job_of_dead_workers_is_started_again_a_limited_number_of_times(
        self, shop: Workshop, compute: Executor
    ) -> None:
        waiting = await request_job(shop, replace(ASKED, metric="mse"))
        left = await request_job(shop)
        store = transfer_store(shop)
        assert await store.acquire_lease("the dead", 1)
        for begun, state in ((STARTS_MAX - 1, "done"), (STARTS_MAX, "failed")):
            await shop.redis.set(shop.keys.transfer_lease, "the dead")
            assert await store.put_job(replace(left, state="running", begun=begun), lease_token="the dead")
            await shop.redis.delete(shop.keys.transfer_lease)
            await transfer_worker(shop, compute).tick()
            found, _ = await job_status(shop, left)
            assert (found.state, found.begun) == (state, STARTS_MAX)
        assert "3 workers ended" in found.reason
        assert (await job_status(shop, waiting))[0].state == "queued"

    async def test_a_namespace_that_is_deleted(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        with pytest.raises(StoreReset):
            async with working(shop, gate, transfer_worker(shop, compute)):
                await NamespaceStore(shop.redis).delete(shop.record)
        await gate.wait_for_end()
        left = [key async for found in scan(shop.redis, shop.keys.every_pattern) for key in found]
        assert left == [shop.keys.record.encode()]


class TestForgetting:
    @pytest.mark.parametrize("victim", [TARGET, FOES[1]])
    async def test_forgotten_while_it_runs(self, shop: Workshop, compute: Executor, gate: Gate, victim: str) -> None:
        async with working(shop, gate, transfer_worker(shop, compute)):
            await shop.users.forget(victim)
            assert await transfer_store(shop).strike([victim]) == 1
            gate.open()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)

    async def test_forgotten_by_a_service_that_died(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        """The job was not deleted yet; the worker deletes it."""
        async with working(shop, gate, transfer_worker(shop, compute)):
            await shop.users.forget(FRIENDS[0])
            gate.open()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)

    async def test_forgotten_before_it_started(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        worker = transfer_worker(shop, compute)
        await worker.tick()
        await request_job(shop)
        await shop.users.forget(FRIENDS[0])
        await worker.tick()
        assert not gate.reached.is_set()
        assert not await shop.redis.exists(shop.keys.transfer_jobs)

    async def test_forgotten_after_the_result(self, shop: Workshop, compute: Executor, gate: Gate) -> None:
        gate.open()
        await done(shop, compute, ASKED)
        await shop.users.forget(TARGET)
        await transfer_worker(shop, compute, "a new process").tick()
        assert not await shop.redis.exists(shop.keys.transfer_jobs, shop.keys.transfer_results)
