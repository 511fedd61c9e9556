"""Valid requests: the commands for the engine, the answers, and errors of the engine."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import structlog
import uvicorn

from metaban.service.engine.commands import ArmInput, FeedbackOutcome, RecommendCommand, RejectedReward, RewardCommand
from metaban.service.errors import DecisionConflict, InvalidInput, NotFound, Overloaded, UnknownDecision
from metaban.service.http.app import create_app
from metaban.service.http.problems import MAX_DETAIL_CHARS
from metaban.service.http.protocol import LimitedProtocol
from metaban.service.settings.environment import Settings
from metaban.store.errors import BacklogFull, CorruptRecord, StoreReset, StoreUnavailable
from tests.service.scripted_engine import ASK, ONE_REWARD, OneEngine, ScriptedEngine, scripted_app


async def test_recommend(api: Any, scripted: ScriptedEngine) -> None:
    named = {"price": 2, "kind": "tea", "vegan": True}
    body = {
        "user_id": "Zoë 🙂",
        "arms": [{"id": "a", "features": named}, {"id": "b", "features": named}],
        "k": 2,
        "context": [1, 2],
        "user_features": {"age": 41, "kind": "new"},
        "decision_id": "order:1",
    }
    response = await api.post("/recommend", json=body)
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
    (command,) = scripted.calls
    assert isinstance(command, RecommendCommand)
    assert command.user_id == "Zoë 🙂"
    assert command.arms == (ArmInput("a", named), ArmInput("b", named))
    assert isinstance(command.arms[0].features, dict)
    assert command.arms[0].features["vegan"] is True
    assert isinstance(command.arms[0].features["price"], float)
    assert command.context == [1.0, 2.0]
    assert command.user_features == {"age": 41.0, "kind": "new"}


async def test_fingerprint_ignores_spelling(api: Any, scripted: ScriptedEngine) -> None:
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
        assert (await api.post("/recommend", json=body)).status_code == 200
    prints = [call.fingerprint for call in scripted.calls if isinstance(call, RecommendCommand)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 1 + len(others)
    assert all(len(text) == 64 for text in prints)


async def test_recommend_from_the_catalogue(api: Any, scripted: ScriptedEngine) -> None:
    for body, arm_ids, exclude in (
        ({}, None, set()),
        ({"arms": None, "arm_ids": None, "exclude": None}, None, set()),
        ({"arm_ids": ["b", "a"], "k": 5}, ("b", "a"), set()),
        ({"exclude": ["x", "x", "y"]}, None, {"x", "y"}),
    ):
        assert (await api.post("/recommend", json={"user_id": "u", **body})).status_code == 200
        command = scripted.calls[-1]
        assert isinstance(command, RecommendCommand)
        assert (command.arms, command.arm_ids, command.exclude) == ((), arm_ids, exclude)


async def test_feedback(api: Any, scripted: ScriptedEngine) -> None:
    response = await api.post("/feedback", json={**ONE_REWARD, "arm_id": "a", "event_id": "e"})
    assert (response.status_code, response.json()) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
    scripted.outcome = FeedbackOutcome(1, 2, (RejectedReward(1, "unknown-decision", "never made"),), True)
    response = await api.post(
        "/feedback?wait=applied", json={"events": [ONE_REWARD, {"decision_id": "x", "reward": 0}]}
    )
    assert response.status_code == 202
    assert response.json() == {
        "accepted": 1,
        "duplicates": 2,
        "rejected": [{"index": 1, "code": "unknown-decision", "detail": "never made"}],
        "applied": True,
    }
    assert scripted.calls == [
        [RewardCommand("d", "a", 1.0, "e")],
        [
            RewardCommand("d", None, 1.0, None, ("events", 0)),
            RewardCommand("x", None, 0.0, None, ("events", 1)),
        ],
    ]
    assert scripted.waited == [False, True]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unknown-decision", 404, "/problems/unknown-decision"),
        ("unknown-arm", 422, "/problems/invalid-input"),
        ("arm-required", 422, "/problems/invalid-input"),
        ("user-reset", 409, "/problems/user-reset"),
        ("not-activated", 409, "/problems/not-activated"),
        ("too-many-rewards", 409, "/problems/too-many-rewards"),
    ],
)
async def test_one_rejected_reward_is_an_error(
    api: Any, scripted: ScriptedEngine, code: str, status: int, kind: str
) -> None:
    scripted.outcome = FeedbackOutcome(0, 0, (RejectedReward(0, code, "says the engine"),), None)
    response = await api.post("/feedback", json=ONE_REWARD)
    assert (response.status_code, response.json()["type"]) == (status, kind)
    assert (await api.post("/feedback", json={"events": [ONE_REWARD]})).status_code == 202


@pytest.mark.parametrize("code", ["late", "not-learned"])
async def test_reward_that_is_not_learned_is_listed(api: Any, scripted: ScriptedEngine, code: str) -> None:
    scripted.outcome = FeedbackOutcome(0, 0, (RejectedReward(0, code, "not learned"),), None)
    response = await api.post("/feedback", json=ONE_REWARD)
    assert response.status_code == 202
    assert response.json()["rejected"][0]["code"] == code


async def test_idempotency_key_replaces_missing_event_ids(api: Any, scripted: ScriptedEngine) -> None:
    for key in ("k", "!" + "~" * 199):
        scripted.calls.clear()
        header = {"Idempotency-Key": key}
        own = {**ONE_REWARD, "event_id": "own"}
        for body in (ONE_REWARD, own, {"events": [ONE_REWARD, own, ONE_REWARD]}):
            assert (await api.post("/feedback", json=body, headers=header)).status_code == 202
        ids = [[command.event_id for command in call] for call in scripted.calls if isinstance(call, list)]
        assert ids == [[key], ["own"], [f"{key}:0", "own", f"{key}:2"]]


@pytest.mark.parametrize("key", [b"", b"a b", b"k" * 201, b"a\tb", b"\xe9", b"a\x7f"])
async def test_invalid_idempotency_key_is_refused(api: Any, scripted: ScriptedEngine, key: bytes) -> None:
    response = await api.post("/feedback", json=ONE_REWARD, headers=[(b"Idempotency-Key", key)])
    assert (response.status_code, response.json()["type"]) == (422, "/problems/invalid-input")
    assert [error["field"] for error in response.json()["errors"]] == ["Idempotency-Key"]
    assert scripted.calls == []


async def test_activation(api: Any, scripted: ScriptedEngine) -> None:
    response = await api.post("/decisions/a.b:c-d_1/activate")
    assert (response.status_code, response.json()) == (200, {"decision_id": "a.b:c-d_1", "activated_ms": 1_234})
    for path in ("a%20b", "a" * 129, "%C3%A9"):
        response = await api.post(f"/decisions/{path}/activate")
        assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "decision_id")
    scripted.error = UnknownDecision("never made")
    response = await api.post("/decisions/d/activate")
    assert (response.status_code, response.json()["type"]) == (404, "/problems/unknown-decision")
    assert scripted.activated == ["a.b:c-d_1", "d"]


async def test_deferred_is_passed_on_and_in_the_fingerprint(api: Any, scripted: ScriptedEngine) -> None:
    bodies: list[dict[str, Any]] = [ASK, {**ASK, "deferred": False}, {**ASK, "deferred": True}]
    for body in bodies:
        assert (await api.post("/recommend", json=body)).status_code == 200
    commands = [call for call in scripted.calls if isinstance(call, RecommendCommand)]
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
        (StoreReset("secret"), 503, "10", "emptied or replaced"),
        (CorruptRecord("secret"), 500, None, "The service failed"),
        (ZeroDivisionError("secret"), 500, None, "The service failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize(("path", "body"), [("/recommend", ASK), ("/feedback", ONE_REWARD)])
async def test_errors_of_the_engine(
    api: Any,
    scripted: ScriptedEngine,
    path: str,
    body: Any,
    error: Exception,
    status: int,
    retry_after: str | None,
    shown: str,
) -> None:
    scripted.error = error
    with structlog.testing.capture_logs() as logs:
        response = await api.post(path, json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers.get("retry-after") == retry_after
    assert shown in response.json()["detail"]
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert any(entry.get("exc_info") for entry in logs) == (status == 500)


async def test_every_response_has_the_common_headers(api: Any, scripted: ScriptedEngine) -> None:
    scripted.error = RuntimeError()
    for path in ("/health/live", "/health/ready", "/nowhere", "/docs", "/openapi.json"):
        response = await api.get(path)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert len(response.headers["x-request-id"]) == 32
    assert response.status_code == 200


@pytest.mark.parametrize("offered", ["trace-1.A_b", "x" * 64])
async def test_request_id_is_kept(api: Any, offered: str) -> None:
    response = await api.get("/nowhere", headers={"X-Request-ID": offered})
    assert response.headers["x-request-id"] == offered
    assert response.json()["instance"] == offered


@pytest.mark.parametrize("offered", ["", "a b", "x" * 65, "a\tb", "{}", "é".encode().decode("latin-1")])
async def test_harmful_request_id_is_replaced(api: Any, offered: str) -> None:
    response = await api.get("/nowhere", headers={"X-Request-ID": offered.encode("latin-1")})
    assert len(response.headers["x-request-id"]) == 32


async def test_unknown_paths_and_methods(api: Any) -> None:
    response = await api.get("/nowhere")
    assert (response.status_code, response.json()["type"]) == (404, "/problems/not-found")
    assert response.json()["title"] == NotFound.title
    assert "/nowhere" in response.json()["detail"]
    assert len((await api.get("/nowhere" * 1_000)).json()["detail"]) <= MAX_DETAIL_CHARS
    response = await api.get("/recommend")
    assert (response.status_code, response.json()["type"]) == (405, "/problems/method-not-allowed")
    assert response.headers["allow"] == "POST"
    assert response.json()["detail"] == "Allowed here: POST."
    assert (await api.post("/docs")).json()["detail"] == "Allowed here: GET, HEAD."
    assert (await api.post("/recommend/", json=ASK)).status_code == 404


async def test_openapi_describes_bodies_and_limits() -> None:
    async with scripted_app(ScriptedEngine(), max_arms=77, max_dimension=55) as api:
        schema = (await api.get("/openapi.json")).json()
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


async def test_openapi_examples_are_accepted(api: Any) -> None:
    schema = (await api.get("/openapi.json")).json()
    for example in schema["components"]["schemas"]["RecommendRequest"]["examples"]:
        assert (await api.post("/recommend", json=example)).status_code == 200
    content = schema["paths"]["/feedback"]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        assert (await api.post("/feedback", json=example["value"])).status_code == 202


async def test_requests_over_a_real_socket() -> None:
    """A chunked body over the cap is answered before it ends, and its rest is dropped; the next request is served."""
    scripted = ScriptedEngine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(Settings(max_body_bytes=4096), OneEngine(scripted))  # type: ignore[arg-type]
        config = uvicorn.Config(app, log_config=None, lifespan="on", http=LimitedProtocol)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server._serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"1\r\n \r\n")
        status, document = await _response(reader)
        assert (status, document["type"]) == (413, "/problems/body-too-large")
        writer.write(chunk * 100 + b"0\r\n\r\n")
        body = json.dumps(ASK).encode()
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await _response(reader))[0] == 200
        assert len(scripted.calls) == 1
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(running, 30)


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
