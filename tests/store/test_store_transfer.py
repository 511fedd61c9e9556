"""Transfer jobs wait, are worked on under a lease, are remembered for a while, and go with whomever they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from store.connection import scan
from store.errors import CorruptRecord, StoreReset
from store.namespaces import NamespaceRecord, Namespaces
from store.transfer import REMEMBERED, REMEMBERED_MS, WAITING_MAX, Asked, TransferJob, TransferQuestion, TransferStore

NOW = 1_772_344_800_000
ANN = TransferQuestion("mse", user_id="ann", sources=('"cem"', "bø }{"))
CLUSTER = TransferQuestion("margin", cluster=3)


@pytest.fixture
def transfer(redis: Redis, record: NamespaceRecord) -> TransferStore:
    return TransferStore(redis, record.keys, record.store_epoch)


async def ask(transfer: TransferStore, question: TransferQuestion, now_ms: int = NOW) -> TransferJob:
    job = (await transfer.request(question, dict.fromkeys(question.named, 2), now_ms)).job
    assert job is not None
    return job


async def finish(transfer: TransferStore, job: TransferJob, result: Any = None) -> TransferJob:
    assert await transfer.acquire_lease("me", 60_000)
    done = replace(job, state="done", progress=1.0, finished_ms=NOW + 5)
    assert await transfer.put_job(done, lease_token="me", result=result or {"gain": 0.25})
    return done


class TestAsking:
    async def test_there_and_back(self, transfer: TransferStore) -> None:
        assert (await transfer.jobs(NOW), await transfer.job("x", NOW)) == ([], None)
        job = await ask(transfer, ANN)
        assert job == TransferJob(job.id, ANN, dict.fromkeys(ANN.named, 2), NOW)
        assert job.users == {"ann": 2, "bø }{": 2, '"cem"': 2}
        assert await transfer.job(job.id, NOW) == (job, None)
        assert not job.ended

    async def test_the_same_question_has_one_job(self, transfer: TransferStore) -> None:
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
        assert (await ask(transfer, ANN, NOW + 4)).id != first.id, "one that is done is no answer to a new question"

    async def test_so_many_may_wait(self, transfer: TransferStore) -> None:
        jobs = [await ask(transfer, replace(CLUSTER, cluster=number), NOW + number) for number in range(WAITING_MAX)]
        assert await transfer.request(ANN, dict.fromkeys(ANN.named, 0), NOW) == Asked(None)
        assert [job.id for job in await transfer.jobs(NOW)] == [job.id for job in reversed(jobs)]
        await finish(transfer, jobs[0])
        assert (await transfer.request(ANN, dict.fromkeys(ANN.named, 0), NOW + 99)).new

    async def test_so_many_are_remembered(self, redis: Redis, record, transfer: TransferStore) -> None:
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

    async def test_for_a_day(self, redis: Redis, record, transfer: TransferStore) -> None:
        old = await finish(transfer, await ask(transfer, ANN))
        assert await transfer.job(old.id, NOW + REMEMBERED_MS - 1) is not None
        later = NOW + REMEMBERED_MS
        assert (await transfer.job(old.id, later), await transfer.jobs(later)) == (None, [])
        new = await ask(transfer, CLUSTER, later)
        assert await redis.hkeys(record.keys.transfer_jobs) == [new.id.encode()]
        assert await redis.hlen(record.keys.transfer_results) == 0
        assert 0 < await redis.pttl(record.keys.transfer_jobs) <= REMEMBERED_MS

    async def test_incarnations_are_of_those_named(self, transfer: TransferStore) -> None:
        with pytest.raises(ValueError, match="named"):
            await transfer.request(ANN, {"ann": 0}, NOW)


class TestWork:
    async def test_only_by_the_holder_of_the_lease(self, transfer: TransferStore) -> None:
        job = await ask(transfer, ANN)
        running = replace(job, state="running", begun=1)
        assert not await transfer.put_job(running, lease_token="me")
        assert await transfer.acquire_lease("another", 60_000)
        assert not await transfer.put_job(running, lease_token="me", result={})
        assert await transfer.job(job.id, NOW) == (job, None)

    async def test_what_came_of_it(self, transfer: TransferStore) -> None:
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
        assert not await transfer.acquire_lease("me", 60_000), "users are not what they will be"

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

    async def test_what_cannot_be_read_makes_room(self, redis: Redis, record, transfer: TransferStore) -> None:
        for name, junk in (("a", "{"), ("b", "3"), ("c", '{"state": "queued"}')):
            await redis.hset(record.keys.transfer_jobs, name, junk)
        job = await ask(transfer, ANN)
        assert await redis.hkeys(record.keys.transfer_jobs) == [job.id.encode()]


class TestForgetting:
    async def test_whoever_is_named_takes_the_job_along(self, redis: Redis, record, transfer: TransferStore) -> None:
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

    async def test_not_even_a_running_job_brings_a_name_back(
        self, redis: Redis, record, transfer: TransferStore
    ) -> None:
        job = await ask(transfer, ANN)
        assert await transfer.acquire_lease("me", 60_000)
        assert await transfer.put_job(replace(job, state="running"), lease_token="me")
        assert await transfer.strike(["ann"]) == 1
        assert not await transfer.put_job(replace(job, state="done"), lease_token="me", result={"user_id": "ann"})
        assert not await redis.exists(record.keys.transfer_jobs, record.keys.transfer_results)
        assert await transfer.renew_lease("me", 60_000)

    async def test_strangers_change_nothing(self, transfer: TransferStore) -> None:
        job = await finish(transfer, await ask(transfer, ANN))
        assert (await transfer.strike(["cem", "a"]), await transfer.strike([])) == (0, 0)
        assert await transfer.job(job.id, NOW) is not None

    async def test_what_cannot_be_read_may_name_anybody(self, redis: Redis, record, transfer: TransferStore) -> None:
        await redis.hset(record.keys.transfer_jobs, "a", '{"users": ["ann"')
        assert await transfer.strike(["ann"]) == 1
        assert not await redis.exists(record.keys.transfer_jobs)


async def test_deleting_the_namespace_takes_all_of_it(redis: Redis, record, transfer: TransferStore) -> None:
    job = await finish(transfer, await ask(transfer, ANN))
    await Namespaces(redis).delete(record)
    left = [key async for found in scan(redis, record.keys.every_pattern) for key in found]
    assert left == [record.keys.record.encode()]
    for write in (
        transfer.request(CLUSTER, {}, NOW),
        transfer.put_job(job, lease_token="me"),
    ):
        with pytest.raises(StoreReset):
            await write
    assert [key async for found in scan(redis, record.keys.every_pattern) for key in found] == left
