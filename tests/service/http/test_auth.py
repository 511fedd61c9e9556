"""Keys: who may call what."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import structlog

from metaban.service.http.auth import FreshKey, digest_of, grant_of
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1]}]}
ONE = {"decision_id": "d", "reward": 1}
CALLS = [("POST", "/recommend", ASK), ("POST", "/feedback", ONE), ("GET", "/metrics", None)]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_client_and_admin_keys(method: str, path: str, body: object) -> None:
    engine, client_key, admin_key = ScriptedEngine(), FreshKey.generate(), FreshKey.generate()
    async with scripted_app(engine, client_keys={client_key.digest}, admin_keys={admin_key.digest}) as client:
        for headers in (
            {},
            {"X-API-Key": ""},
            {"X-API-Key": "guess"},
            {"X-API-Key": client_key.digest},
            {b"X-API-Key": b"\xff\xfe"},
            {"X-API-Key": client_key.key[:-1]},
        ):
            response = await client.request(method, path, json=body, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401
            assert response.headers["content-type"] == "application/problem+json"
            assert response.headers["www-authenticate"] == "ApiKey"
        assert engine.calls == []
        for key in (client_key.key, admin_key.key):
            response = await client.request(method, path, json=body, headers={"X-API-Key": key})
            assert response.status_code in {200, 202}


async def test_health_and_docs_need_no_key() -> None:
    async with scripted_app(ScriptedEngine(), client_keys={digest_of("k")}) as client:
        for path in ("/health/live", "/health/ready", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200


async def test_without_keys_no_key_is_needed() -> None:
    async with scripted_app(ScriptedEngine()) as client:
        assert (await client.post("/recommend", json=ASK)).status_code == 200


async def test_body_is_not_read_without_a_valid_key() -> None:
    read = False

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"{}"

    async with scripted_app(ScriptedEngine(), client_keys={digest_of("k")}) as client:
        response = await client.post("/recommend", content=chunks(), headers={"Content-Type": "application/json"})
    assert response.status_code == 401
    assert not read


async def test_neither_keys_nor_bodies_are_logged() -> None:
    engine = ScriptedEngine()
    engine.error = RuntimeError("broken")
    with structlog.testing.capture_logs() as logs:
        async with scripted_app(engine, client_keys={digest_of("top-secret")}) as client:
            for key in ("top-secret", "top-secret-guess"):
                for path in ("/recommend", "/recommend?q=top-secret"):
                    await client.post(path, json={**ASK, "user_id": "private"}, headers={"X-API-Key": key})
    assert {entry["event"] for entry in logs} >= {"request", "unexpected_error"}
    assert "top-secret" not in str(logs)
    assert "private" not in str(logs)


def test_every_key_is_compared() -> None:
    keys = [FreshKey.generate() for _ in range(5)]
    seen: list[str] = []

    def digests() -> list[str]:
        for key in keys:
            seen.append(key.digest)
            yield key.digest  # type: ignore[misc]

    assert grant_of(keys[0].key, digests(), []) is not None
    assert len(seen) == 5
    assert grant_of("x", digests(), digests()) is None
    assert grant_of("x", [], []) is None


def test_permissions_of_keys() -> None:
    key, other = FreshKey.generate(), FreshKey.generate()
    here = grant_of(key.key, [f"shop:{key.digest}", f"news:{key.digest}", other.digest], [f"news:{key.digest}"])
    assert here is not None
    assert [here.covers(name, admin=False) for name in ("shop", "news", "default", None)] == [True, True, False, False]
    assert [here.covers(name, admin=True) for name in ("shop", "news", "default", None)] == [False, True, False, False]
    everywhere = grant_of(other.key, [], [other.digest])
    assert everywhere is not None
    assert all(everywhere.covers(name, admin=admin) for name in ("shop", None) for admin in (False, True))
