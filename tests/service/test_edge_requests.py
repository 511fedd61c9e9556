"""Requests that are well: what the engine is asked, what the client is told, and how errors behind it look."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
import uvicorn
from edge_engine import EdgeEngine, Lone, edge

from service.app import create_app
from service.contracts import ArmInput, FeedbackOutcome, RecommendCommand, Rejection, RewardCommand
from service.errors import DecisionConflict, InvalidInput, NotFound, Overloaded, UnknownDecision
from service.problems import MAX_DETAIL_CHARS
from service.protocol import BoundedProtocol
from service.settings import Settings
from store.errors import BacklogFull, CorruptRecord, StoreReset, StoreUnavailable

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2.5]}, {"id": "b", "features": [0, -1]}]}
ONE = {"decision_id": "d", "reward": 1}


@pytest.fixture
def engine() -> EdgeEngine:
    return EdgeEngine()


@pytest.fixture
async def client(engine: EdgeEngine) -> AsyncIterator[Any]:
    async with edge(engine) as client:
        yield client


async def test_recommend(client: Any, engine: EdgeEngine) -> None:
    named = {"price": 2, "kind": "tea", "vegan": True}
    body = {
        "user_id": "Zoë 🙂",
        "arms": [{"id": "a", "features": named}, {"id": "b", "features": named}],
        "k": 2,
        "context": [1, 2],
        "user_features": {"age": 41, "kind": "new"},
        "decision_id": "order:1",
    }
    response = await client.post("/recommend", json=body)
    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("took_ms") >= 0
    item = {"score": 0.75, "mean": 0.5, "bonus": 0.25, "propensity": 0.98, "group_size": 1}
    assert answer == {
        "decision_id": "order:1",
        "items": [{"arm_id": "a", "rank": 1, **item}, {"arm_id": "b", "rank": 2, **item}],
        "policy": "ucb-floor",
        "model_version": 3,
        "user_version": 0,
        "cold_start": "meta",
        "logged": True,
    }
    (command,) = engine.calls
    assert isinstance(command, RecommendCommand)
    assert command.user_id == "Zoë 🙂"
    assert command.arms == (ArmInput("a", named), ArmInput("b", named))
    assert isinstance(command.arms[0].features, dict)
    assert command.arms[0].features["vegan"] is True
    assert isinstance(command.arms[0].features["price"], float)
    assert command.context == [1.0, 2.0]
    assert command.user_features == {"age": 41.0, "kind": "new"}


async def test_fingerprint_is_of_the_meaning(client: Any, engine: EdgeEngine) -> None:
    named = {"user_id": "u", "arms": [{"id": "a", "features": {"x": 1, "y": "z"}}]}
    same = [
        named,
        {"arms": [{"features": {"y": "z", "x": 1.0}, "id": "a"}], "user_id": "u", "k": 1, "decision_id": "d"},
    ]
    others = [
        {**named, "user_id": "v"},
        {**named, "context": {"x": 1}},
        {**named, "context": [1]},
        {**named, "user_features": [1]},
        {**named, "user_features": {"x": 1}},
        {**named, "context": {"x": 1}, "user_features": {"x": 1}},
        {**named, "arms": [{"id": "a", "features": {"x": True, "y": "z"}}]},
        {**named, "arms": [{"id": "a", "features": {"x": "1", "y": "z"}}]},
        {**named, "arms": [{"id": "b", "features": {"x": 1, "y": "z"}}]},
        {"user_id": "u", "arms": ASK["arms"]},
        {"user_id": "u", "arms": ASK["arms"], "k": 2},
        {"user_id": "u", "arms": ASK["arms"][::-1]},
        {"user_id": "u", "arms": ASK["arms"], "exclude": ["a"]},
        {"user_id": "u"},
        {"user_id": "u", "exclude": ["a", "b"]},
        {"user_id": "u", "exclude": ["b", "a"]},
        {"user_id": "u", "arm_ids": ["a", "b"]},
        {"user_id": "u", "arm_ids": ["a"], "exclude": ["b"]},
        {"user_id": "u", "arm_ids": ["a", "exclude", "b"]},
        {"user_id": "u", "arm_ids": ["ab"]},
    ]
    for body in [*same, *others]:
        assert (await client.post("/recommend", json=body)).status_code == 200
    prints = [call.fingerprint for call in engine.calls if isinstance(call, RecommendCommand)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 1 + len(others)
    assert all(len(text) == 64 for text in prints)


async def test_recommend_from_the_catalogue(client: Any, engine: EdgeEngine) -> None:
    for body, arm_ids, exclude in (
        ({}, None, set()),
        ({"arms": None, "arm_ids": None, "exclude": None}, None, set()),
        ({"arm_ids": ["b", "a"], "k": 5}, ("b", "a"), set()),
        ({"exclude": ["x", "x", "y"]}, None, {"x", "y"}),
    ):
        assert (await client.post("/recommend", json={"user_id": "u", **body})).status_code == 200
        command = engine.calls[-1]
        assert isinstance(command, RecommendCommand)
        assert (command.arms, command.arm_ids, command.exclude) == ((), arm_ids, exclude)


async def test_feedback(client: Any, engine: EdgeEngine) -> None:
    response = await client.post("/feedback", json={**ONE, "arm_id": "a", "event_id": "e"})
    assert (response.status_code, response.json()) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
    engine.outcome = FeedbackOutcome(1, 2, (Rejection(1, "unknown-decision", "never made"),), True)
    response = await client.post("/feedback?wait=applied", json={"events": [ONE, {"decision_id": "x", "reward": 0}]})
    assert response.status_code == 202
    assert response.json() == {
        "accepted": 1,
        "duplicates": 2,
        "rejected": [{"index": 1, "code": "unknown-decision", "detail": "never made"}],
        "applied": True,
    }
    assert engine.calls == [
        [RewardCommand("d", "a", 1.0, "e")],
        [
            RewardCommand("d", None, 1.0, None, ("events", 0)),
            RewardCommand("x", None, 0.0, None, ("events", 1)),
        ],
    ]
    assert engine.waited == [False, True]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unknown-decision", 404, "/problems/unknown-decision"),
        ("unknown-arm", 422, "/problems/invalid-input"),
        ("arm-required", 422, "/problems/invalid-input"),
        ("user-reset", 409, "/problems/user-reset"),
        ("not-activated", 409, "/problems/not-activated"),
    ],
)
async def test_one_rejected_reward_is_an_error(
    client: Any, engine: EdgeEngine, code: str, status: int, kind: str
) -> None:
    engine.outcome = FeedbackOutcome(0, 0, (Rejection(0, code, "says the engine"),), None)
    response = await client.post("/feedback", json=ONE)
    assert (response.status_code, response.json()["type"]) == (status, kind)
    assert (await client.post("/feedback", json={"events": [ONE]})).status_code == 202


@pytest.mark.parametrize("code", ["late", "not-learned"])
async def test_a_reward_that_is_welcome_and_not_learned_is_listed(client: Any, engine: EdgeEngine, code: str) -> None:
    engine.outcome = FeedbackOutcome(0, 0, (Rejection(0, code, "not learned"),), None)
    response = await client.post("/feedback", json=ONE)
    assert response.status_code == 202
    assert response.json()["rejected"][0]["code"] == code


async def test_a_key_stands_for_event_ids_that_are_left_out(client: Any, engine: EdgeEngine) -> None:
    for key in ("k", "!" + "~" * 199):
        engine.calls.clear()
        header = {"Idempotency-Key": key}
        own = {**ONE, "event_id": "own"}
        for body in (ONE, own, {"events": [ONE, own, ONE]}):
            assert (await client.post("/feedback", json=body, headers=header)).status_code == 202
        ids = [[command.event_id for command in call] for call in engine.calls if isinstance(call, list)]
        assert ids == [[key], ["own"], [f"{key}:0", "own", f"{key}:2"]]


@pytest.mark.parametrize("key", [b"", b"a b", b"k" * 201, b"a\tb", b"\xe9", b"a\x7f"])
async def test_a_key_that_is_none(client: Any, engine: EdgeEngine, key: bytes) -> None:
    response = await client.post("/feedback", json=ONE, headers=[(b"Idempotency-Key", key)])
    assert (response.status_code, response.json()["type"]) == (422, "/problems/invalid-input")
    assert [error["field"] for error in response.json()["errors"]] == ["Idempotency-Key"]
    assert engine.calls == []


async def test_activation(client: Any, engine: EdgeEngine) -> None:
    response = await client.post("/decisions/a.b:c-d_1/activate")
    assert (response.status_code, response.json()) == (200, {"decision_id": "a.b:c-d_1", "activated_ms": 1_234})
    for path in ("a%20b", "a" * 129, "%C3%A9"):
        response = await client.post(f"/decisions/{path}/activate")
        assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "decision_id")
    engine.error = UnknownDecision("never made")
    response = await client.post("/decisions/d/activate")
    assert (response.status_code, response.json()["type"]) == (404, "/problems/unknown-decision")
    assert engine.activated == ["a.b:c-d_1", "d"]


async def test_deferred_is_handed_on_and_part_of_the_request(client: Any, engine: EdgeEngine) -> None:
    bodies: list[dict[str, Any]] = [ASK, {**ASK, "deferred": False}, {**ASK, "deferred": True}]
    for body in bodies:
        assert (await client.post("/recommend", json=body)).status_code == 200
    commands = [call for call in engine.calls if isinstance(call, RecommendCommand)]
    assert [command.deferred for command in commands] == [False, False, True]
    prints = [command.fingerprint for command in commands]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "shown"),
    [
        (InvalidInput(("arms", 0, "features"), "must have 3 numbers"), 422, None, "must have 3 numbers"),
        (DecisionConflict("another body"), 409, None, "another body"),
        (Overloaded("busy", retry_after_s=2.2), 503, "3", "busy"),
        (BacklogFull("p03 at redis://secret", retry_after_s=0.1), 503, "1", "wait to be learned"),
        (StoreUnavailable("redis://secret"), 503, "1", "does not answer"),
        (StoreReset("secret"), 503, "10", "emptied or exchanged"),
        (CorruptRecord("secret"), 500, None, "on our side"),
        (ZeroDivisionError("secret"), 500, None, "on our side"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize(("path", "body"), [("/recommend", ASK), ("/feedback", ONE)])
async def test_errors_of_the_engine(
    client: Any,
    engine: EdgeEngine,
    path: str,
    body: Any,
    error: Exception,
    status: int,
    retry_after: str | None,
    shown: str,
) -> None:
    engine.error = error
    with structlog.testing.capture_logs() as logs:
        response = await client.post(path, json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers.get("retry-after") == retry_after
    assert shown in response.json()["detail"]
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert any(entry.get("exc_info") for entry in logs) == (status == 500)


async def test_every_response_has_its_headers(client: Any, engine: EdgeEngine) -> None:
    engine.error = RuntimeError()
    for path in ("/health/live", "/health/ready", "/nowhere", "/docs", "/openapi.json"):
        response = await client.get(path)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert len(response.headers["x-request-id"]) == 32
    assert response.status_code == 200


@pytest.mark.parametrize("offered", ["trace-1.A_b", "x" * 64])
async def test_request_id_is_kept(client: Any, offered: str) -> None:
    response = await client.get("/nowhere", headers={"X-Request-ID": offered})
    assert response.headers["x-request-id"] == offered
    assert response.json()["instance"] == offered


@pytest.mark.parametrize("offered", ["", "a b", "x" * 65, "a\tb", "{}", "é".encode().decode("latin-1")])
async def test_harmful_request_id_is_replaced(client: Any, offered: str) -> None:
    response = await client.get("/nowhere", headers={"X-Request-ID": offered.encode("latin-1")})
    assert len(response.headers["x-request-id"]) == 32


async def test_unknown_paths_and_methods(client: Any) -> None:
    response = await client.get("/nowhere")
    assert (response.status_code, response.json()["type"]) == (404, "/problems/not-found")
    assert response.json()["title"] == NotFound.title
    assert "/nowhere" in response.json()["detail"]
    assert len((await client.get("/nowhere" * 1_000)).json()["detail"]) <= MAX_DETAIL_CHARS
    response = await client.get("/recommend")
    assert (response.status_code, response.json()["type"]) == (405, "/problems/method-not-allowed")
    assert response.headers["allow"] == "POST"
    assert response.json()["detail"] == "Allowed here: POST."
    assert (await client.post("/docs")).json()["detail"] == "Allowed here: GET, HEAD."
    assert (await client.post("/recommend/", json=ASK)).status_code == 404


async def test_openapi_describes_bodies_and_limits() -> None:
    async with edge(EdgeEngine(), max_arms=77, max_dimension=55) as client:
        schema = (await client.get("/openapi.json")).json()
    models = schema["components"]["schemas"]
    assert models["RecommendRequest"]["properties"]["arms"]["anyOf"][0]["maxItems"] == 77
    assert models["ArmIn"]["properties"]["features"]["oneOf"][0]["maxItems"] == 55
    for path in ("/recommend", "/feedback"):
        call = schema["paths"][path]["post"]
        assert call["requestBody"]["content"]["application/json"]["schema"]
        assert "application/problem+json" in call["responses"]["422"]["content"]
        assert "Retry-After" in call["responses"]["429"]["headers"]
    assert "429" not in schema["paths"]["/health/live"]["get"]["responses"]
    text = json.dumps(schema)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in models


async def test_the_examples_of_the_documentation_work(client: Any) -> None:
    schema = (await client.get("/openapi.json")).json()
    for example in schema["components"]["schemas"]["RecommendRequest"]["examples"]:
        assert (await client.post("/recommend", json=example)).status_code == 200
    content = schema["paths"]["/feedback"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        assert (await client.post("/feedback", json=example["value"])).status_code == 202


async def test_over_a_real_socket() -> None:
    """A chunked body over the cap is answered before it ends, and its rest is not read; the next request is served."""
    engine = EdgeEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(Settings(max_body_bytes=4096), Lone(engine))  # type: ignore[arg-type]
        config = uvicorn.Config(app, log_config=None, lifespan="on", http=BoundedProtocol)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server._serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"1\r\n \r\n")
        status, document = await _response(reader)
        assert (status, document["type"]) == (413, "/problems/body-too-large")
        writer.write(chunk * 100)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        body = json.dumps(ASK).encode()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await _response(reader))[0] == 200
        assert len(engine.calls) == 1
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(running, 30)


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
