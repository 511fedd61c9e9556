"""/admin/transfer: requests, jobs and results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from metaban.client import AsyncMetaban, InvalidInput, JobFailed, Reward
from metaban.models.transfer.metrics import METRICS
from metaban.models.transfer.nets import NetSettings
from metaban.service.http.app_state import state_of
from metaban.service.http.schemas.admin import MetricName
from metaban.store.shared.transfer import SOURCES_MAX, TARGET_SAMPLES_MIN, WAITING_MAX, TransferQuestion
from metaban.worker.namespace import WorkerSettings
from metaban.worker.process import work_until_signal
from tests.service.apps import ARMS, running_app
from tests.service.transfer_jobs import KEYS, RESULT, keep, transfer_store

USERS = ("ann", "bo", "cem", "dee")
ASK = {"user_id": "ann", "sources": ["bo", "cem"]}
GROUPED = sorted(metric for metric in METRICS if metric not in {"mse", "cross-entropy", "margin"})


@pytest.fixture
async def app(redis: Redis, valkey_url: str, short_tails: None) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    async with running_app(valkey_url) as (app, client):
        await keep(redis, USERS)
        yield app, client


@pytest.fixture
def http(app: tuple[FastAPI, httpx.AsyncClient]) -> httpx.AsyncClient:
    return app[1]


async def serve_clusters(app: tuple[FastAPI, httpx.AsyncClient], clusters: int) -> None:
    """Serve an epoch with this many clusters of users."""
    await app[1].post("/recommend", json={"user_id": "u", "arms": ARMS})
    serving = state_of(app[0]).recommenders.default.serving
    assert serving is not None
    serving.model.clusters = clusters


async def shown(http: httpx.AsyncClient, path: str = "") -> Any:
    answer = await http.get(f"/admin/transfer{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_without_jobs(http: httpx.AsyncClient) -> None:
    assert await shown(http) == {"jobs": [], "clusters": 0, "model_version": 0}
    await http.post("/recommend", json={"user_id": "u", "arms": ARMS})
    assert await shown(http) == {"jobs": [], "clusters": 1, "model_version": 0}


async def test_request_creates_one_job(http: httpx.AsyncClient, redis: Redis) -> None:
    """Repeated requests make one job in the store, for any worker; the audit entry names no user."""
    first = await http.post("/admin/transfer", json=ASK)
    assert first.status_code == 202
    asked = first.json()
    assert asked == {
        "id": asked["id"], "state": "queued", "progress": 0.0, "doing": "", "requested_ms": asked["requested_ms"],
        "started_ms": None, "finished_ms": None, "reason": None, "result": None,
        "request": {"user_id": "ann", "cluster": None, "sources": ["bo", "cem"], "metric": "mse"},
    }  # fmt: skip
    again = await http.post("/admin/transfer", json={**ASK, "sources": ["cem", "bo"], "metric": "mse"})
    assert (again.status_code, again.json()) == (202, asked)
    other = (await http.post("/admin/transfer", json={**ASK, "metric": "margin"})).json()
    assert {job["id"] for job in (await shown(http))["jobs"]} == {asked["id"], other["id"]}
    assert "result" not in (await shown(http))["jobs"][0]
    assert await shown(http, f"/{asked['id']}") == asked
    lines = (await http.get("/admin/audit")).json()["lines"]
    assert [line["action"] for line in lines] == ["POST /admin/transfer"] * 3
    assert lines[0]["detail"] == {"metric": "margin", "cluster": None, "sources": 2}
    assert "ann" not in str(lines)


async def test_states_of_a_job(http: httpx.AsyncClient, redis: Redis) -> None:
    asked = (await http.post("/admin/transfer", json=ASK)).json()
    store = await transfer_store(redis)
    [job] = await store.jobs(asked["requested_ms"])
    assert await store.acquire_lease("worker", 60_000)
    running = replace(job, state="running", started_ms=asked["requested_ms"] + 5, progress=0.25, doing="modeling")
    assert await store.put_job(running, lease_token="worker")
    assert (await http.post("/admin/transfer", json=ASK)).json() == asked | {
        "state": "running", "progress": 0.25, "doing": "modeling", "started_ms": asked["requested_ms"] + 5,
    }  # fmt: skip
    done = replace(running, state="done", progress=1.0, doing="", finished_ms=running.started_ms + 9)
    assert await store.put_job(done, lease_token="worker", result=RESULT)
    found = await shown(http, f"/{job.id}")
    assert (found["state"], found["finished_ms"], found["result"]) == ("done", done.finished_ms, RESULT)
    assert await store.put_job(done, lease_token="worker", result={"of": "another version"})
    assert (await shown(http, f"/{job.id}"))["result"] is None
    failed = replace(running, state="failed", reason="too few rewards")
    assert await store.put_job(failed, lease_token="worker")
    assert (await shown(http))["jobs"][0]["reason"] == "too few rewards"
    assert (await http.post("/admin/transfer", json=ASK)).json()["id"] != job.id, "and may be asked for again"
    await redis.hset(KEYS.transfer_jobs, job.id, "{")
    assert (await http.get(f"/admin/transfer/{job.id}")).status_code == 404
    assert len((await shown(http))["jobs"]) == 1


async def test_clusters_of_users(app: tuple[FastAPI, httpx.AsyncClient], http: httpx.AsyncClient) -> None:
    await serve_clusters(app, 3)
    assert (await shown(http))["clusters"] == 3
    for body in ({"cluster": 2}, {"user_id": "ann"}, {"cluster": 0, "sources": ["ann", "bo"]}):
        answer = await http.post("/admin/transfer", json=body)
        assert answer.status_code == 202, answer.text
    for metric in GROUPED:
        assert (await http.post("/admin/transfer", json={"cluster": 0, "metric": metric})).status_code == 202


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"sources": ["bo", "cem"]}, "user_id", "either user_id or cluster"),
        ({**ASK, "cluster": 0}, "user_id", "not both"),
        ({**ASK, "metric": "accuracy"}, "metric", "'mse'"),
        ({**ASK, "metric": None}, "metric", "'mse'"),
        ({**ASK, "sources": ["bo"]}, "sources", "must have 2 or more"),
        ({**ASK, "sources": []}, "sources", "must have 2 or more"),
        ({**ASK, "sources": [f"u{n}" for n in range(SOURCES_MAX + 1)]}, "sources", f"{SOURCES_MAX} elements or fewer"),
        ({**ASK, "sources": ["bo", "cem", "bo"]}, "sources[2]", "twice"),
        ({**ASK, "sources": ["bo", "ann"]}, "sources[1]", "target itself"),
        ({**ASK, "sources": ["bo", "nobody"]}, "sources[1]", "a source needs rewards"),
        ({**ASK, "sources": ["bo", "a\x00b"]}, "sources[1]", "control"),
        ({**ASK, "user_id": "nobody"}, "user_id", f"0 stored rewards, and a target needs at least {30}"),
        ({**ASK, "user_id": "newcomer"}, "user_id", "29 stored rewards"),
        ({**ASK, "user_id": ""}, "user_id", ""),
        ({"cluster": 3}, "cluster", "form 3 clusters"),
        ({"cluster": -1}, "cluster", "at least 0"),
        ({"cluster": True}, "cluster", "integer"),
        ({"cluster": 0.5}, "cluster", "integer"),
        *(({**ASK, "metric": metric}, "metric", "needs a cluster") for metric in GROUPED),
        ({**ASK, "subsets": 3}, "subsets", "not a field here"),
        ([], "", "object"),
    ],
)
async def test_bad_input(
    app: tuple[FastAPI, httpx.AsyncClient], redis: Redis, body: Any, field: str, said: str
) -> None:
    """Invalid requests are refused at once, with the requirement."""
    await serve_clusters(app, 3)
    await keep(redis, ["newcomer"], samples=TARGET_SAMPLES_MIN - 1)
    answer = await app[1].post("/admin/transfer", json=body)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-input"), answer.text
    [error] = answer.json()["errors"]
    assert error["field"] == field
    assert said in error["detail"]
    assert not await redis.exists(KEYS.transfer_jobs)


async def test_unknown_clusters_are_refused(app: tuple[FastAPI, httpx.AsyncClient], http: httpx.AsyncClient) -> None:
    async def refusal(body: dict[str, Any]) -> tuple[str, str]:
        answer = await http.post("/admin/transfer", json=body)
        assert answer.status_code == 422
        [error] = answer.json()["errors"]
        return error["field"], error["detail"]

    assert await refusal({"cluster": 0}) == ("cluster", "does not exist: nothing is learned yet")
    field, detail = await refusal({"user_id": "ann"})
    assert (field, "name at least 2 users" in detail) == ("sources", True)
    await serve_clusters(app, 2)
    assert (await http.post("/admin/transfer", json={"user_id": "ann"})).status_code == 202
    field, detail = await refusal({"cluster": 1})
    assert (field, "the served epoch has 1" in detail) == ("sources", True)
    await http.post("/recommend", json={"user_id": "u", "arms": ARMS})
    assert (await refusal({"cluster": 2}))[0] == "cluster"


async def test_number_of_waiting_jobs_is_limited(http: httpx.AsyncClient, redis: Redis) -> None:
    others = [f"u{number}" for number in range(WAITING_MAX)]
    await keep(redis, others)
    for user in others:
        assert (await http.post("/admin/transfer", json={**ASK, "user_id": user})).status_code == 202
    refused = await http.post("/admin/transfer", json=ASK)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
    assert "8 transfer jobs are waiting" in refused.json()["detail"]
    assert (await http.post("/admin/transfer", json={**ASK, "user_id": "u3"})).status_code == 202, "it waits already"


class TestForgetting:
    @pytest.mark.parametrize("victim", ["ann", "cem"])
    async def test_forgetting_a_user_deletes_its_jobs(self, http: httpx.AsyncClient, redis: Redis, victim: str) -> None:
        asked = (await http.post("/admin/transfer", json=ASK)).json()
        await keep(redis, ["eve"])
        other = (await http.post("/admin/transfer", json={"user_id": "dee", "sources": ["bo", "eve"]})).json()
        assert (await http.delete(f"/admin/users/{victim}")).status_code == 200
        assert (await http.get(f"/admin/transfer/{asked['id']}")).status_code == 404
        assert [job["id"] for job in (await shown(http))["jobs"]] == [other["id"]]
        assert (await http.get(f"/admin/users/{victim}")).json()["traces"]["transfer"] is False
        assert (await http.post("/admin/transfer", json=ASK)).status_code == 422

    async def test_remaining_job_is_listed_in_remnants(self, http: httpx.AsyncClient, redis: Redis) -> None:
        """As left by a killed process."""
        await http.post("/admin/transfer", json=ASK)
        await redis.hset(KEYS.user("ann"), mapping={"incarnation": 1, "version": 0, "forgot": 1})
        await redis.hdel(KEYS.user("ann"), "epoch")
        assert (await http.get("/admin/users/ann")).json()["traces"]["transfer"] is True
        await http.delete("/admin/users/ann")
        assert (await http.get("/admin/users/ann")).json()["traces"]["transfer"] is False

    async def test_user_forgotten_while_the_job_is_stored(
        self, app: tuple[FastAPI, httpx.AsyncClient], redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A user is forgotten after the lookup and before the job is stored."""
        desk = state_of(app[0]).recommenders.default.transfer
        request = desk._transfer.request

        async def late(*arguments: Any, **more: Any) -> Any:
            await app[1].delete("/admin/users/cem")
            return await request(*arguments, **more)

        monkeypatch.setattr(desk._transfer, "request", late)
        answer = await app[1].post("/admin/transfer", json=ASK)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "sources[1]")
        assert not await redis.exists(KEYS.transfer_jobs)


def test_metrics_are_those_of_the_models() -> None:
    assert set(get_args(MetricName)) == set(METRICS)


async def test_ranking_from_real_rewards(
    redis: Redis, valkey_url: str, short_tails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole service and worker, through the client."""
    generator = np.random.default_rng(0)
    kept = 40
    settings = WorkerSettings(samples_kept=kept, backlog_limit=1_000, candidate_pool=100, device="cpu")
    monkeypatch.setattr("metaban.worker.jobs.transfer.TICK_S", 0.05)
    monkeypatch.setattr("metaban.worker.jobs.transfer.NETS", NetSettings(hidden=4, steps=5))
    async with running_app(valkey_url, samples_kept=kept) as (_, http):
        worker = asyncio.create_task(work_until_signal(valkey_url, settings))
        try:
            async with AsyncMetaban("http://localhost", transport=http._transport) as metaban:
                for user in USERS:
                    rewards = []
                    for number in range(kept):
                        arm = generator.normal(size=3).tolist()
                        decision = await metaban.recommend(user, {f"arm {number}": arm})
                        rewards.append(Reward(decision.decision_id, float(arm[0] > 0)))
                    await metaban.feedback_batch(rewards, wait_applied=True)
                with pytest.raises(InvalidInput, match="twice"):
                    await metaban.admin.transfer.ask(user_id="ann", sources=["bo", "bo"])
                with pytest.raises(ValueError, match="either user_id or cluster"):
                    await metaban.admin.transfer.ask(user_id="ann", cluster=0)
                asked = await metaban.admin.transfer.ask(user_id="ann", sources=USERS[1:])
                seen = []
                job = await metaban.admin.transfer.wait(asked.id, on_progress=seen.append, timeout_s=60)
                assert (job.id, job.state, job.progress) == (asked.id, "done", 1.0)
                assert seen[-1] == job == await metaban.admin.transfer.get(asked.id)
                assert job.result is not None
                assert job.result.target.events == kept
                assert {source.user_id for source in job.result.sources} == set(USERS[1:])
                ranked = [source.coefficient for source in job.result.sources]
                assert ranked == sorted(ranked)
                assert job.request.sources == USERS[1:]
                overview = await metaban.admin.transfer.overview()
                assert [each.id for each in overview.jobs] == [asked.id]
                assert overview.jobs[0].result is None
                asked = await metaban.admin.transfer.ask(cluster=0, sources=USERS[1:])
                found = (await metaban.admin.transfer.wait(asked.id, timeout_s=60)).result
                assert found is not None
                assert (found.target.cluster, found.target.users, found.target.events) == (0, 1, kept)
                await redis.delete(KEYS.samples("bo"), KEYS.samples("cem"))
                # Only the worker can check this.
                store = await transfer_store(redis)
                question = TransferQuestion("margin", user_id="ann", sources=USERS[1:3])
                other = (await store.request(question, dict.fromkeys(question.named, 0), asked.requested_ms)).job
                assert other is not None
                with pytest.raises(JobFailed, match="at least 2 sources"):
                    await metaban.admin.transfer.wait(other.id, timeout_s=60)
        finally:
            while not (await asyncio.wait([worker], timeout=0.5))[0]:
                worker.cancel()
