"""Transfer jobs: queued, run under a lease, kept for a while, and deleted with the users they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from metaban.store.client.connection import scan
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.transfer import (
    REMEMBERED,
    REMEMBERED_MS,
    WAITING_MAX,
    TransferJobRecord,
    TransferQuestion,
    TransferRequestResult,
    TransferStore,
)

NOW = 1_772_344_800_000
ANN = TransferQuestion("mse", user_id="ann", sources=('"cem"', "bø }{"))
CLUSTER = TransferQuestion("margin", cluster=3)


@pytest.fixture
def transfer(redis: Redis, record: NamespaceRecord) -> TransferStore:
    return TransferStore(redis, record.keys, record.store_id)


async def ask(transfer: TransferStore, question: TransferQuestion, now_ms: int = NOW) -> TransferJobRecord:
    job = (await transfer.request(question, dict.fromkeys(question.named, 2), now_ms)).job
    assert job is not None
    return job


async def finish(transfer: TransferStore, job: TransferJobRecord, result: Any = None) -> TransferJobRecord:
    assert await transfer.acquire_lease("me", 60_000)
    done = replace(job, state="done", progress=1.0, finished_ms=NOW + 5)
    assert await transfer.put_job(done, lease_token="me", result=result or {"gain": 0.25})
    return done


class TestAsking:
    async def test_round_trip(self, transfer: TransferStore) -> None:
        assert (await transfer.jobs(NOW), await transfer.job("x", NOW)) == ([], None)
        job = await ask(transfer, ANN)
        assert job == TransferJobRecord(job.id, ANN, dict.fromkeys(ANN.named, 2), NOW, number=1)
        assert job.users == {"ann": 2, "bø }{": 2, '"cem"': 2}
        assert await transfer.job(job.id, NOW) == (job, None)
        assert not job.ended

    async def test_equal_requests_share_one_job(self, transfer: TransferStore) -> None:
        first = await ask(transfer, ANN)
        turned = replace(ANN, sources=("bø }{", '"cem"'))
        again = await transfer.request(turned, dict.fromkeys(ANN.named, 7), NOW + 1)
        assert (again.new, again.job and again.job.id) == (False, first.id)
        assert await transfer.acquire_lease("me", 60_000)
        running = replace(first, state="running", started_ms=NOW + 2, progress=0.5, doing="modeling", begun=1)
        assert await transfer.put_job(running, lease_token="me")
        assert (await ask(transfer, ANN, NOW + 3)).progress == 0.5
        for other in (replace(ANN, metric="margin"), replace(ANN, sources=("bø }{", "dee")), CLUSTER):
            assert (await ask(transfer, other)).id != first.id
        await finish(transfer, first)
        assert (await ask(transfer, ANN, NOW + 4)).id != first.id, "a finished job is not reused for a new request"

    async def test_jobs_of_one_millisecond_keep_their_order(
        self, redis: Redis, record: NamespaceRecord, transfer: TransferStore
    ) -> None:
        old = [
            TransferJobRecord(f"old {number}", replace(CLUSTER, cluster=number), {}, NOW - 9 + number)
            for number in (0, 1)
        ]
        for job in old:  # stored by a version without numbers
            await redis.hset(record.keys.transfer_jobs, job.id, job.encode())
        asked = []
        for number in range(2, 30):
            question = replace(CLUSTER, cluster=number)
            asked.append((await transfer.request(question, {}, NOW, waiting_max=100)).job)
        assert await transfer.jobs(NOW) == [*reversed(asked), *reversed(old)]

    async def test_the_queue_is_limited(self, transfer: TransferStore) -> None:
        jobs = [await ask(transfer, replace(CLUSTER, cluster=number), NOW + number) for number in range(WAITING_MAX)]
        assert await transfer.request(ANN, dict.fromkeys(ANN.named, 0), NOW) == TransferRequestResult(None)
        assert [job.id for job in await transfer.jobs(NOW)] == [job.id for job in reversed(jobs)]
        await finish(transfer, jobs[0])
        assert (await transfer.request(ANN, dict.fromkeys(ANN.named, 0), NOW + 99)).new

    async def test_the_number_of_kept_jobs_is_limited(self, redis: Redis, record, transfer: TransferStore) -> None:
        ended = [
            await finish(transfer, await ask(transfer, replace(CLUSTER, cluster=number), NOW + number))
            for number in range(REMEMBERED + 3)
        ]
        waiting = [await ask(transfer, replace(CLUSTER, cluster=100 + number), NOW + 99) for number in range(3)]
        kept = [job.id for job in await transfer.jobs(NOW)]
        assert len(kept) == REMEMBERED
        assert set(kept) == {job.id for job in (*ended[6:], *waiting)}
        assert await redis.hlen(record.keys.transfer_results) == REMEMBERED - 3
        assert await transfer.job(ended[0].id, NOW) is None

    async def test_jobs_are_kept_for_a_day(self, redis: Redis, record, transfer: TransferStore) -> None:
        old = await finish(transfer, await ask(transfer, ANN))
        assert await transfer.job(old.id, NOW + REMEMBERED_MS - 1) is not None
        later = NOW + REMEMBERED_MS
        assert (await transfer.job(old.id, later), await transfer.jobs(later)) == (None, [])
        new = await ask(transfer, CLUSTER, later)
        assert await redis.hkeys(record.keys.transfer_jobs) == [new.id.encode()]
        assert await redis.hlen(record.keys.transfer_results) == 0
        assert 0 < await redis.pttl(record.keys.transfer_jobs) <= REMEMBERED_MS

    async def test_incarnations_are_stored_for_all_named_users(self, transfer: TransferStore) -> None:
        with pytest.raises(ValueError, match="question names"):
            await transfer.request(ANN, {"ann": 0}, NOW)


class TestWork:
    async def test_only_the_holder_of_the_lease_writes(self, transfer: TransferStore) -> None:
        job = await ask(transfer, ANN)
        running = replace(job, state="running", begun=1)
        assert not await transfer.put_job(running, lease_token="me")
        assert await transfer.acquire_lease("another", 60_000)
        assert not await transfer.put_job(running, lease_token="me", result={})
        assert await transfer.job(job.id, NOW) == (job, None)

    async def test_the_result_is_stored(self, transfer: TransferStore) -> None:
        result = {"sources": [{"user_id": "bø }{", "coefficient": -1.5}]}
        done = await finish(transfer, await ask(transfer, ANN), result)
        assert await transfer.job(done.id, NOW) == (done, result)

    async def test_leases(self, redis: Redis, record, transfer: TransferStore) -> None:
        assert await transfer.acquire_lease("me", 60_000)
        assert not await transfer.acquire_lease("another", 60_000)
        assert await transfer.renew_lease("me", 60_000)
        assert not await transfer.release_lease("another")
        assert await transfer.release_lease("me")
        assert not await transfer.renew_lease("me", 60_000)
        await redis.hset(record.keys.restoring, "generation", "1")
        assert not await transfer.acquire_lease("me", 60_000), "not during a restore"

    @pytest.mark.parametrize(
        ("part", "other"),
        [
            ('"state": "queued"', '"state": "odd"'),
            ('"progress": 0.0', '"progress": "x"'),
            ('"begun": 0', '"begun": true'),
            ('"begun": 0', '"began": 0'),
            ('"doing": ""', '"doing": 3'),
            ('"users": {', '"users": {"dee": "x", '),
            ('"asked": "', '"asked": "x'),
        ],
    )
    async def test_damage_is_found(self, redis: Redis, record, transfer: TransferStore, part: str, other: str) -> None:
        job = await ask(transfer, ANN)
        stored = (await redis.hget(record.keys.transfer_jobs, job.id)).decode()
        assert part in stored
        await redis.hset(record.keys.transfer_jobs, job.id, stored.replace(part, other))
        with pytest.raises(CorruptRecord):
            await transfer.job(job.id, NOW)
        assert await transfer.jobs(NOW) == []

    @pytest.mark.parametrize("result", ["{", "[]", "3"])
    async def test_a_damaged_result(self, redis: Redis, record, transfer: TransferStore, result: str) -> None:
        done = await finish(transfer, await ask(transfer, ANN))
        await redis.hset(record.keys.transfer_results, done.id, result)
        with pytest.raises(CorruptRecord):
            await transfer.job(done.id, NOW)

    async def test_unreadable_jobs_are_removed_first(self, redis: Redis, record, transfer: TransferStore) -> None:
        for name, junk in (("a", "{"), ("b", "3"), ("c", '{"state": "queued"}')):
            await redis.hset(record.keys.transfer_jobs, name, junk)
        job = await ask(transfer, ANN)
        assert await redis.hkeys(record.keys.transfer_jobs) == [job.id.encode()]


class TestForgetting:
    async def test_a_job_is_deleted_with_any_user_it_names(self, redis: Redis, record, transfer: TransferStore) -> None:
        for victim in ANN.named:
            kept = await finish(transfer, await ask(transfer, CLUSTER))
            target = await finish(transfer, await ask(transfer, ANN))
            other = await ask(transfer, TransferQuestion("mse", user_id="dee", sources=("eve", "fay")))
            assert await transfer.strike([victim, "stranger"]) == 1
            assert {job.id for job in await transfer.jobs(NOW)} == {kept.id, other.id}
            assert await redis.hkeys(record.keys.transfer_results) == [kept.id.encode()]
            assert await transfer.job(target.id, NOW) is None
            assert await transfer.named() == {"dee": 2, "eve": 2, "fay": 2}
            await redis.delete(record.keys.transfer_jobs, record.keys.transfer_results)

    async def test_a_running_job_does_not_bring_a_name_back(
        self, redis: Redis, record, transfer: TransferStore
    ) -> None:
        job = await ask(transfer, ANN)
        assert await transfer.acquire_lease("me", 60_000)
        assert await transfer.put_job(replace(job, state="running"), lease_token="me")
        assert await transfer.strike(["ann"]) == 1
        assert not await transfer.put_job(replace(job, state="done"), lease_token="me", result={"user_id": "ann"})
        assert not await redis.exists(record.keys.transfer_jobs, record.keys.transfer_results)
        assert await transfer.renew_lease("me", 60_000)

    async def test_other_users_change_nothing(self, transfer: TransferStore) -> None:
        job = await finish(transfer, await ask(transfer, ANN))
        assert (await transfer.strike(["cem", "a"]), await transfer.strike([])) == (0, 0)
        assert await transfer.job(job.id, NOW) is not None

    async def test_unreadable_jobs_are_deleted_with_any_user(
        self, redis: Redis, record, transfer: TransferStore
    ) -> None:
        await redis.hset(record.keys.transfer_jobs, "a", '{"users": ["ann"')
        assert await transfer.strike(["ann"]) == 1
        assert not await redis.exists(record.keys.transfer_jobs)


async def test_deleting_the_namespace_deletes_all_of_it(redis: Redis, record, transfer: TransferStore) -> None:
    job = await finish(transfer, await ask(transfer, ANN))
    await NamespaceStore(redis).delete(record)
    left = [key async for found in scan(redis, record.keys.every_pattern) for key in found]
    assert left == [record.keys.record.encode()]
    for write in (
        transfer.request(CLUSTER, {}, NOW),
        transfer.put_job(job, lease_token="me"),
    ):
        with pytest.raises(StoreReset):
            await write
    assert [key async for found in scan(redis, record.keys.every_pattern) for key in found] == left
