"""The log line of each request."""

from __future__ import annotations

import pytest
import structlog

from metaban.service.http.auth import FreshKey
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1]}]}
#: A rate so low that no token returns during a test.
NEVER = 0.001


async def test_log_line_has_key_and_sizes_but_no_path() -> None:
    key = FreshKey.generate()
    with structlog.testing.capture_logs() as logs:
        async with scripted_app(ScriptedEngine(), client_keys={key.digest}, admin_keys={key.digest}) as client:
            client.headers["X-API-Key"] = key.key
            answer = await client.post("/recommend", json=ASK)
            await client.post("/recommend?q=private", json=ASK)
            await client.get("/private/path")
            await client.get("/admin/jobs/private%20job")
    lines = [line for line in logs if line["event"] == "request"]
    sent = len(answer.request.content)
    assert (lines[0]["bytes_in"], lines[0]["bytes_out"]) == (sent, len(answer.content))
    assert (lines[0]["key"], lines[0]["namespace"]) == (key.digest[:8], "default")
    assert [line["route"] for line in lines] == ["/recommend", "/recommend", "unmatched", "/admin/jobs/{job_id}"]
    assert "private" not in str([line for line in lines if line["status"] < 500])
    assert key.key not in str(logs)
    assert key.digest not in str(logs)


async def test_log_line_of_an_error_names_the_problem() -> None:
    with structlog.testing.capture_logs() as logs:
        async with scripted_app(ScriptedEngine(), max_body_bytes=1_024) as client:
            await client.post("/recommend", json=ASK)
            await client.post("/recommend", json={})
            await client.post("/recommend", content=b"a" * 1_025)
            await client.get("/nothing")
            await client.head("/recommend")
    lines = [line for line in logs if line["event"] == "request"]
    problems = [None, "invalid-input", "body-too-large", "not-found", "method-not-allowed"]
    assert [line.get("problem") for line in lines] == problems


async def test_refusals_do_not_flood_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.service.http.request_context.CHEAP_LINES_PER_S", NEVER)
    monkeypatch.setattr("metaban.service.http.request_context.CHEAP_LINES_AT_ONCE", 5)
    key = FreshKey.generate()
    with structlog.testing.capture_logs() as logs:
        async with scripted_app(ScriptedEngine(), client_keys={key.digest}) as client:
            for _ in range(30):
                await client.post("/recommend", json=ASK, headers={"X-API-Key": "guess"})
            await client.post("/recommend", json=ASK, headers={"X-API-Key": key.key})
    lines = [line for line in logs if line["event"] == "request"]
    assert [line["status"] for line in lines] == [401] * 5 + [200]
    assert lines[-1]["unwritten"] == 25
