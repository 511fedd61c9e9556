"""Admission: keys, hosts, rates, concurrency and bodies; and the headers of every answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog

from metaban.service.engine.commands import Recommendation, RecommendCommand
from metaban.service.http import admission as gate
from metaban.service.http.app import create_app
from metaban.service.http.auth import FreshKey
from metaban.service.http.response_headers import CONTENT_POLICY, DOCS_POLICY
from metaban.service.settings.environment import Settings, SettingsError, load_settings
from metaban.service.telemetry.metrics import Metrics
from tests.service.scripted_engine import OneEngine, ScriptedEngine, scripted_app

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1]}]}
JSON = {"Content-Type": "application/json"}
#: A rate so low that no token returns during a test.
NEVER = 0.001


def problem(response: httpx.Response) -> str:
    """Check a problem document and return its slug."""
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == response.status_code
    assert set(document) <= {"type", "title", "status", "detail", "instance", "errors"}
    return document["type"].removeprefix("/problems/")


class BusyEngine(ScriptedEngine):
    """Decides once `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.entered = asyncio.Semaphore(0)

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        self.entered.release()
        await self.go_on.wait()
        return await super().recommend(command)


async def test_rate_limit_per_key() -> None:
    one, other = FreshKey.generate(), FreshKey.generate()
    keys = {one.digest, other.digest}
    async with scripted_app(ScriptedEngine(), client_keys=keys, rate_limit=NEVER, rate_burst=2) as client:

        async def ask(key: str) -> httpx.Response:
            return await client.post("/recommend", json=ASK, headers={"X-API-Key": key})

        assert [(await ask(one.key)).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(one.key)
        assert problem(refused) == "rate-limited"
        assert int(refused.headers["retry-after"]) > 900
        assert (await ask(other.key)).status_code == 200
        assert [(await client.get("/health/live")).status_code for _ in range(5)] == [200] * 5
        text = (await client.get("/metrics", headers={"X-API-Key": other.key})).text
    assert 'metaban_rejected_requests_total{reason="rate-limited"} 2.0' in text


@asynccontextmanager
async def from_addresses(*addresses: str, **settings: Any) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of one app at several addresses."""
    app = create_app(Settings(**settings), OneEngine(ScriptedEngine()))  # type: ignore[arg-type]
    transports = [httpx.ASGITransport(app, client=(address, 5_000)) for address in addresses]
    clients = [httpx.AsyncClient(transport=each, base_url="http://localhost") for each in transports]
    yield clients
    for client in clients:
        await client.aclose()


async def test_rate_limit_per_address_without_keys() -> None:
    async with from_addresses("127.0.0.1", "127.0.0.2", rate_limit=NEVER, rate_burst=2) as (one, other):
        assert [(await one.post("/recommend", json=ASK)).status_code for _ in range(3)] == [200, 200, 429]
        assert (await other.post("/recommend", json=ASK)).status_code == 200


async def test_no_rate_limit_unless_set() -> None:
    async with scripted_app(ScriptedEngine()) as client:
        assert {(await client.post("/recommend", json=ASK)).status_code for _ in range(100)} == {200}


async def test_guessing_keys_is_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "UNKNOWN_KEYS_RATE", NEVER)
    known = FreshKey.generate()
    addresses = ("203.0.113.7", "198.51.100.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    async with from_addresses(*addresses, client_keys={known.digest}) as clients:
        guesser, elsewhere, host, neighbour, other_network = clients

        async def guess(client: httpx.AsyncClient, number: int) -> httpx.Response:
            headers = {"X-API-Key": f"guess-{number}"} if number % 3 else {}
            return await client.post("/recommend", json=ASK, headers=headers)

        statuses = [(await guess(guesser, number)).status_code for number in range(100)]
        assert statuses == [401] * gate.UNKNOWN_KEYS_BURST + [429] * (100 - gate.UNKNOWN_KEYS_BURST)
        refused = await guess(guesser, 1)
        assert problem(refused) == "rate-limited"
        assert int(refused.headers["retry-after"]) > 0
        # Other clients behind the same proxy share its address.
        for _ in range(30):
            answer = await guesser.post("/recommend", json=ASK, headers={"X-API-Key": known.key})
            assert answer.status_code == 200
        assert (await guesser.get("/health/live")).status_code == 200
        assert (await guess(elsewhere, 1)).status_code == 401
        # One machine may use many addresses of its network.
        for number in range(gate.UNKNOWN_KEYS_BURST):
            assert (await guess((host, neighbour)[number % 2], 1)).status_code == 401
        assert (await guess(host, 1)).status_code == 429
        assert (await guess(other_network, 1)).status_code == 401


async def test_very_long_key_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(gate, "digest_of", lambda key: hashed.append(len(key)) or "digest")
    known = FreshKey.generate()
    async with scripted_app(ScriptedEngine(), client_keys={known.digest}) as client:
        for length in (43, gate.KEY_CHARS_MAX, gate.KEY_CHARS_MAX + 1, 60_000):
            answer = await client.post("/recommend", json=ASK, headers={"X-API-Key": "k" * length})
            assert answer.status_code == 401
    assert hashed == [43, gate.KEY_CHARS_MAX]


# Hosts


async def host_status(client: httpx.AsyncClient, *hosts: str, path: str = "/openapi.json") -> int:
    request = client.build_request("GET", path)
    request.headers = httpx.Headers([("Host", host) for host in hosts])
    response = await client.send(request)
    if response.status_code != 200:
        assert problem(response) == "wrong-host"
    return response.status_code


async def test_dns_rebinding_is_refused() -> None:
    async with scripted_app(ScriptedEngine()) as client:
        for host in ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000", "localhost."):
            assert await host_status(client, host) == 200
        for host in (
            "evil.example",
            "localhost.evil.example:8000",
            "127.0.0.1.evil.example",
            "",
            "[::1].evil",
            "[::1]x:80",
            "localhost:80:80",
            "10.1.1.1",
        ):
            assert await host_status(client, host) == 421
        assert await host_status(client, "localhost", "evil.example") == 421
        assert await host_status(client, "evil.example", path="/health/live") == 200


async def test_own_address_is_an_allowed_host() -> None:
    app = create_app(Settings(), OneEngine(ScriptedEngine()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://[fd00::7]:90") as client:
        assert (await client.get("/openapi.json")).status_code == 200


async def test_more_hosts_may_be_allowed() -> None:
    async with scripted_app(ScriptedEngine(), allowed_hosts={"api.example.com"}) as client:
        assert await host_status(client, "api.example.com:443") == 200
        assert await host_status(client, "localhost") == 200
        assert await host_status(client, "example.com") == 421
    keys = {FreshKey.generate().digest}
    async with scripted_app(ScriptedEngine(), client_keys=keys) as client:
        assert await host_status(client, "anything.example") == 200
    async with scripted_app(ScriptedEngine(), client_keys=keys, allowed_hosts={"api.example.com"}) as client:
        assert await host_status(client, "api.example.com") == 200
        assert await host_status(client, "localhost") == 421


# Concurrency


async def test_too_many_concurrent_requests_are_refused_before_reading_bodies() -> None:
    engine, read = BusyEngine(), False

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"{}"

    async with scripted_app(engine, max_concurrent=2) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.post("/recommend", json=ASK)) for _ in range(2)]
        for _ in asked:
            await engine.entered.acquire()
        refused = await client.post("/recommend", content=body(), headers=JSON)
        assert problem(refused) == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert not read
        assert (await client.get("/health/ready")).status_code == 200
        engine.go_on.set()
        assert [(await each).status_code for each in asked] == [200, 200]
        assert (await client.post("/recommend", json=ASK)).status_code == 200
        text = (await client.get("/metrics")).text
    assert 'metaban_rejected_requests_total{reason="overloaded"} 1.0' in text
    assert "metaban_inflight_requests 1.0" in text  # this request


async def test_slow_bodies_do_not_count_as_concurrent() -> None:
    engine, come = BusyEngine(), asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"user_id": "u", '
        begun.release()
        await come.wait()
        yield b'"arms": [{"id": "a", "features": [1]}]}'

    async with scripted_app(engine, max_concurrent=1) as client, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(client.post("/recommend", content=slowly(), headers=JSON)) for _ in range(5)]
        for _ in waiting:
            await begun.acquire()
        quick = tasks.create_task(client.post("/recommend", json=ASK))
        await engine.entered.acquire()
        come.set()  # all bodies have arrived, and one request is running
        assert {problem(await each) for each in waiting} == {"overloaded"}
        engine.go_on.set()
        assert (await quick).status_code == 200


async def test_memory_of_all_bodies_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODIES_BYTES", 0)
    engine = BusyEngine()
    long = {**ASK, "arms": [{"id": "a", "features": [1] * 450}]}  # most of a kibibyte
    async with scripted_app(engine, max_body_bytes=1_024) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.post("/recommend", json=long)) for _ in range(gate.BODIES)]
        for _ in asked:
            await engine.entered.acquire()
        assert problem(await client.post("/recommend", json=long)) == "overloaded"
        assert problem(await client.post("/recommend", content=b" " * 1_025, headers=JSON)) == "body-too-large"
        engine.go_on.set()
        assert [(await each).status_code for each in asked] == [200] * gate.BODIES
        assert (await client.post("/recommend", json=long)).status_code == 200


async def test_missing_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_GRACE_S", 0.05)
    never = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b'{"user_id": '
        await never.wait()

    async with scripted_app(ScriptedEngine()) as client:
        assert problem(await client.post("/recommend", content=half(), headers=JSON)) == "body-timeout"
        text = (await client.get("/metrics")).text
    assert 'metaban_rejected_requests_total{reason="body-timeout"} 1.0' in text


async def test_long_body_that_keeps_arriving_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_GRACE_S", 0.0)
    monkeypatch.setattr(gate, "BODY_BYTES_PER_S", 10)

    async def steadily() -> AsyncIterator[bytes]:
        yield b'{"user_id": "u", "arms": '
        await asyncio.sleep(0.2)  # 25 bytes are good for 2.5 s
        yield b'[{"id": "a", "features": [1]}]}'

    async with scripted_app(ScriptedEngine()) as client:
        assert (await client.post("/recommend", content=steadily(), headers=JSON)).status_code == 200


# Headers of answers


async def test_security_headers() -> None:
    async with scripted_app(ScriptedEngine()) as client:
        for path in ("/health/live", "/nowhere", "/openapi.json", "/docs"):
            headers = (await client.get(path)).headers
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-frame-options"] == "DENY"
            assert headers["content-security-policy"] == (DOCS_POLICY if path == "/docs" else CONTENT_POLICY)
            assert "strict-transport-security" not in headers
            assert "access-control-allow-origin" not in headers
        page = (await client.get("/docs")).text
    for source in {part.split('"')[0] for part in page.split('="https://')[1:]}:
        assert f"https://{source.split('/')[0]}" in DOCS_POLICY


async def test_cors_for_named_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "UNKNOWN_KEYS_RATE", NEVER)
    key = FreshKey.generate()
    origin = "https://shop.example.com"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key,content-type"}
    async with scripted_app(ScriptedEngine(), client_keys={key.digest}, cors_origins={origin}) as client:
        for _ in range(2 * gate.UNKNOWN_KEYS_BURST):  # browsers send preflights without a key, without a limit
            preflight = await client.options("/recommend", headers={"Origin": origin, **asked})
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin
        answer = await client.post("/recommend", json=ASK, headers={"Origin": origin, "X-API-Key": key.key})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        refused = await client.post("/recommend", json=ASK, headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        strange = await client.options("/recommend", headers={"Origin": "https://evil.example", **asked})
        assert strange.status_code == 400
        assert "access-control-allow-origin" not in strange.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("METABAN_CORS_ORIGINS", "*"),
        ("METABAN_CORS_ORIGINS", "shop.example.com"),
        ("METABAN_CORS_ORIGINS", "https://shop.example.com/"),
        ("METABAN_ALLOWED_HOSTS", "https://api.example.com"),
        ("METABAN_ALLOWED_HOSTS", "api.example.com:80"),
        ("METABAN_OTLP_ENDPOINT", "collector:4318"),
        ("METABAN_RATE_LIMIT", "-1"),
    ],
)
def test_harmful_and_useless_settings_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=rf"^{name}: "):
        load_settings()


def test_settings_of_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_CORS_ORIGINS", "*")
    monkeypatch.setenv("METABAN_CLIENT_KEYS", FreshKey.generate().digest)
    monkeypatch.setenv("METABAN_ALLOWED_HOSTS", "[::1], API.example.com")
    settings = load_settings()
    assert settings.cors_origins == {"*"}
    assert settings.allowed_hosts == {"[::1]", "api.example.com"}


class BrokenEngine(ScriptedEngine):
    """Every method fails."""

    def __getattribute__(self, name: str) -> Any:
        if name in {"start", "stop", "namespace", "metrics", "running", "__class__", "__dict__"}:
            return super().__getattribute__(name)
        raise RuntimeError("secret-detail at /secret/place.py")


async def test_internal_errors_show_no_details() -> None:
    metrics = Metrics()
    engine = BrokenEngine()
    app = create_app(Settings(), OneEngine(engine), metrics)  # type: ignore[arg-type]
    # Without configuration, the log would print the engine's repr.
    with structlog.testing.capture_logs():
        statuses = await _statuses_of_all(app)
    assert statuses.count(500) >= 8


async def _statuses_of_all(app: Any) -> list[int]:
    statuses = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for pattern, methods in app.openapi()["paths"].items():
            path = re.sub(r"{(\w+)}", lambda found: "1-1" if "letter" in found[1] else "1", pattern)
            for method in methods:
                body = {"decision_id": "d", "reward": 1} if path == "/feedback" else ASK
                response = await client.request(method, path, json=body)
                if response.status_code >= 400:
                    problem(response)
                assert "secret" not in response.text
                assert "Traceback" not in response.text
                statuses.append(response.status_code)
    return statuses
