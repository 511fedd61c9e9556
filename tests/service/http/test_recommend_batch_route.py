"""POST /recommend/batch: each request is answered independently of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.engine.commands import Recommendation, RecommendCommand
from metaban.service.errors import Overloaded
from metaban.service.http.routes.recommend import CONCURRENT_REQUESTS
from metaban.store.errors import BacklogFull, NotReplicated, StoreReset, StoreUnavailable
from tests.service.apps import SHOP_ARMS as ARMS
from tests.service.apps import served
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ASK: dict[str, Any] = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2.5]}, {"id": "b", "features": [0, -1]}]}


async def test_results_are_in_order(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        good = {"user_id": "ann", "arms": ARMS}
        batch = [
            {**good, "decision_id": "d0", "k": 2},
            {**good, "arms": []},
            {**good, "user_id": "bob", "decision_id": "d2", "explain": True},
            {**good, "arms": [{"id": "a", "features": [1]}]},
            "nonsense",
            {**good, "decision_id": "d0", "k": 2},
            {**good, "decision_id": "d2"},
        ]
        await client.post("/recommend", json=good)
        answer = await client.post("/recommend/batch", json={"requests": batch}, headers={"X-Request-ID": "r-1"})
        assert answer.status_code == 200
        results = answer.json()["results"]
        assert [results[place]["status"] for place in (0, 1, 3, 4, 5)] == [200, 422, 422, 422, 200]
        assert [error["field"] for error in results[3]["problem"]["errors"]] == ["arms[0].features"]
        assert results[1]["problem"]["errors"][0]["field"] == "arms"
        assert results[4]["problem"]["errors"] == [{"field": "", "detail": "must be a JSON object"}]
        assert all(each["problem"]["instance"] == "r-1" for each in results if "problem" in each)
        assert all(("decision" in each) != ("problem" in each) for each in results)
        assert results[0]["decision"]["items"] == results[5]["decision"]["items"]
        # Two requests with one id and different bodies race.
        assert sorted(results[place]["status"] for place in (2, 6)) == [200, 409]
        winner = results[2] if results[2]["status"] == 200 else results[6]
        [item] = winner["decision"]["items"]
        assert ("explanation" in item) == (winner is results[2])
        # The answer of a single request.
        again = (await client.post("/recommend", json=batch[0])).json()
        assert again["items"] == results[0]["decision"]["items"]
        alone = await client.post("/recommend", json=batch[3])
        ours, theirs = results[3]["problem"], alone.json()
        assert ours.keys() == theirs.keys()
        assert {**ours, "instance": ""} == {**theirs, "instance": ""}
        lone = results[0]["decision"]
        assert lone.keys() == again.keys()


async def test_first_requests_of_a_namespace(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path) as client:
        batch = [{"user_id": f"u{n}", "arms": ARMS} for n in range(100)]
        results = (await client.post("/recommend/batch", json={"requests": batch})).json()["results"]
        assert [each["status"] for each in results] == [200] * 100
        assert len({each["decision"]["decision_id"] for each in results}) == 100


async def test_batch_runs_few_requests_at_once() -> None:
    """Each request may hold the inputs of a whole catalogue in memory."""

    class Counting(ScriptedEngine):
        under_way = most = 0

        async def recommend(self, command: RecommendCommand) -> Recommendation:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1
            return await super().recommend(command)

    engine = Counting()
    async with scripted_app(engine) as client:
        answer = await client.post("/recommend/batch", json={"requests": [ASK] * 100})
    assert [each["status"] for each in answer.json()["results"]] == [200] * 100
    assert 1 < engine.most <= CONCURRENT_REQUESTS < 100


@pytest.mark.parametrize(
    ("payload", "status", "field"),
    [
        ({"requests": []}, 422, "requests"),
        ({"requests": [ASK] * 101}, 422, "requests"),
        ({"requests": ASK}, 422, "requests"),
        ({}, 422, "requests"),
        ({"requests": [ASK], "k": 1}, 422, "k"),
        ([ASK], 422, ""),
        ("x", 422, ""),
    ],
)
async def test_malformed_batch_is_refused(payload: Any, status: int, field: str) -> None:
    engine = ScriptedEngine()
    async with scripted_app(engine) as client:
        answer = await client.post("/recommend/batch", json=payload)
        assert answer.status_code == status
        assert [error["field"] for error in answer.json()["errors"]] == [field]
        broken = await client.post("/recommend/batch", content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        assert engine.calls == []


async def test_body_limit_applies_to_the_batch() -> None:
    engine = ScriptedEngine()
    async with scripted_app(engine, max_body_bytes=1_024) as client:
        one = {"requests": [ASK]}
        assert (await client.post("/recommend/batch", json=one)).status_code == 200
        many = {"requests": [ASK] * 20}
        assert (await client.post("/recommend/batch", json=many)).status_code == 413
        assert len(engine.calls) == 1


class Moody(ScriptedEngine):
    """Raises the error that the user is named after."""

    errors: ClassVar[dict[str, Exception]] = {
        "overloaded": Overloaded("too much"),
        "away": StoreUnavailable("unix://secret"),
        "reset": StoreReset("gone"),
        "full": BacklogFull("full", retry_after_s=2),
        "lonely": NotReplicated("no"),
        "bug": ZeroDivisionError("secret"),
    }

    async def recommend(self, command: RecommendCommand) -> Any:
        if command.user_id in self.errors:
            raise self.errors[command.user_id]
        return await super().recommend(command)


async def test_errors_in_a_batch_equal_those_of_single_requests() -> None:
    users = [*Moody.errors, "u"]
    batch = [{**ASK, "user_id": user} for user in users]
    with structlog.testing.capture_logs() as lines:
        async with scripted_app(Moody()) as client:
            results = (await client.post("/recommend/batch", json={"requests": batch})).json()["results"]
            within = [line["event"] for line in lines]
            for user, result, request in zip(users, results, batch, strict=True):
                alone = await client.post("/recommend", json=request)
                assert result["status"] == alone.status_code, user
                if user != "u":
                    assert {**result["problem"], "instance": ""} == {**alone.json(), "instance": ""}
                    assert "secret" not in str(result)
    assert results[-1]["status"] == 200
    logged = {"store_unavailable", "store_reset", "backlog_full", "replication_not_confirmed", "unexpected_error"}
    assert logged <= set(within)


async def test_decisions_are_counted() -> None:
    async with scripted_app(ScriptedEngine()) as client:
        await client.post("/recommend/batch", json={"requests": [ASK, ASK, {}]})
        told = (await client.get("/metrics")).text
        assert 'metaban_decisions_total{cold_start="meta",namespace="default",policy="ucb-floor"} 2.0' in told
