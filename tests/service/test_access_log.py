"""The line that each request has in the log."""

from __future__ import annotations

import pytest
import structlog
from edge_engine import EdgeEngine, edge

from service.auth import FreshKey

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1]}]}
#: So slow that no token comes back while a test runs.
NEVER = 0.001


async def test_a_line_of_the_log_tells_who_and_how_much_and_no_path() -> None:
    key = FreshKey.generate()
    with structlog.testing.capture_logs() as logs:
        async with edge(EdgeEngine(), client_keys={key.digest}, admin_keys={key.digest}) as client:
            client.headers["X-API-Key"] = key.key
            answer = await client.post("/recommend?q=private", json=ASK)
            await client.get("/private/path")
            await client.get("/admin/jobs/private%20job")
    lines = [line for line in logs if line["event"] == "request"]
    sent = len(answer.request.content)
    assert (lines[0]["bytes_in"], lines[0]["bytes_out"]) == (sent, len(answer.content))
    assert (lines[0]["key"], lines[0]["namespace"]) == (key.digest[:8], "default")
    assert [line["route"] for line in lines] == ["/recommend", "unmatched", "/admin/jobs/{job_id}"]
    assert "private" not in str([line for line in lines if line["status"] < 500])
    assert key.key not in str(logs)
    assert key.digest not in str(logs)


async def test_refusals_do_not_flood_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.middleware.CHEAP_LINES_PER_S", NEVER)
    monkeypatch.setattr("service.middleware.CHEAP_LINES_AT_ONCE", 5)
    key = FreshKey.generate()
    with structlog.testing.capture_logs() as logs:
        async with edge(EdgeEngine(), client_keys={key.digest}) as client:
            for _ in range(30):
                await client.post("/recommend", json=ASK, headers={"X-API-Key": "guess"})
            await client.post("/recommend", json=ASK, headers={"X-API-Key": key.key})
    lines = [line for line in logs if line["event"] == "request"]
    assert [line["status"] for line in lines] == [401] * 5 + [200]
    assert lines[-1]["unwritten"] == 25
