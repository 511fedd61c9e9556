"""Invalid requests: the status, a problem document that names the field, and no call of the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from metaban.service.http.problems import MAX_DETAIL_CHARS, MAX_ERRORS, MAX_FIELD_CHARS
from metaban.service.http.schemas.recommend import RecommendRequest
from tests.service.scripted_engine import ScriptedEngine, scripted_app

JSON = {"Content-Type": "application/json"}
LONG = "x" * 257


def ask(**changes: Any) -> dict[str, Any]:
    arms = [{"id": "a", "features": [1, 2.5]}, {"id": "b", "features": [0, -1]}]
    return {"user_id": "u", "arms": arms, **changes}


def arms(*features: Any) -> dict[str, Any]:
    return ask(arms=[{"id": f"a{place}", "features": item} for place, item in enumerate(features)])


def reward(**changes: Any) -> dict[str, Any]:
    return {"decision_id": "d-1", "reward": 1, **changes}


#: Bodies (written by Python's json, which allows NaN and Infinity) and the field named in the error.
RECOMMEND = {
    "not an object": ([], ""),
    "null body": (None, ""),
    "no user": ({"arms": ask()["arms"]}, "user_id"),
    "empty arms": (ask(arms=[]), "arms"),
    "arms object": (ask(arms={}), "arms"),
    "arms and arm_ids": (ask(arm_ids=["a"]), "arm_ids"),
    "no arm_ids": ({"user_id": "u", "arm_ids": []}, "arm_ids"),
    "arm_ids text": ({"user_id": "u", "arm_ids": "abc"}, "arm_ids"),
    "arm_ids numbers": ({"user_id": "u", "arm_ids": ["a", 1]}, "arm_ids[1]"),
    "an empty arm id": ({"user_id": "u", "arm_ids": [""]}, "arm_ids[0]"),
    "duplicate arm_ids": ({"user_id": "u", "arm_ids": ["a", "b", "a"]}, "arm_ids[2]"),
    "too many arm_ids": ({"user_id": "u", "arm_ids": [str(n) for n in range(11)]}, "arm_ids"),
    "too many excluded": (ask(exclude=[str(n) for n in range(11)]), "exclude"),
    "exclude text": (ask(exclude="a"), "exclude"),
    "exclude holds a number": (ask(exclude=["a", 1]), "exclude[1]"),
    "exclude holds a control character": (ask(exclude=["a\n"]), "exclude[0]"),
    "k is more than is left": (ask(exclude=["a"], k=2), "k"),
    "all are excluded": (ask(exclude=["a", "b"]), "k"),
    "arm is a number": (ask(arms=[1]), "arms[0]"),
    "too many arms": (arms(*[[1]] * 11), "arms"),
    "unknown member": (ask(colour="red"), "colour"),
    "unknown member of an arm": (ask(arms=[{"id": "a", "features": [1], "x": 1}]), "arms[0].x"),
    "user is empty": (ask(user_id=""), "user_id"),
    "user is too long": (ask(user_id=LONG), "user_id"),
    "user is a number": (ask(user_id=7), "user_id"),
    "user is null": (ask(user_id=None), "user_id"),
    "user holds NUL": (ask(user_id="a\0b"), "user_id"),
    "user holds a line break": (ask(user_id="a\n"), "user_id"),
    "user holds a C1 control": (ask(user_id="a\x9f"), "user_id"),
    "user holds half a pair": (ask(user_id="a\ud800b"), "user_id"),
    "arm id is too long": (ask(arms=[{"id": LONG, "features": [1]}]), "arms[0].id"),
    "arm id is a boolean": (ask(arms=[{"id": True, "features": [1]}]), "arms[0].id"),
    "arm id holds half a pair": (ask(arms=[{"id": "\udc00", "features": [1]}]), "arms[0].id"),
    "duplicate arm ids": (ask(arms=[{"id": i, "features": [1]} for i in "aba"]), "arms[2].id"),
    "ragged arms": (arms([1, 2], [1, 2], [1]), "arms[2].features"),
    "lists and objects": (arms([1, 2], {"x": 1, "y": 2}), "arms[1].features"),
    "no features": (arms([1], []), "arms[1].features"),
    "no named features": (arms({}), "arms[0].features"),
    "features missing": (ask(arms=[{"id": "a"}]), "arms[0].features"),
    "features null": (arms(None), "arms[0].features"),
    "features text": (arms("1,2"), "arms[0].features"),
    "too many features": (arms([1.0] * 9), "arms[0].features"),
    "too many named features": (arms({str(i): 1 for i in range(9)}), "arms[0].features"),
    "NaN": (arms([1, 2], [1, float("nan")]), "arms[1].features[1]"),
    "Infinity": (arms([float("inf"), 2]), "arms[0].features[0]"),
    "-Infinity": (arms([1, float("-inf")]), "arms[0].features[1]"),
    "beyond float32": (arms([1, 2e30]), "arms[0].features[1]"),
    "far below zero": (arms([1, -2e30]), "arms[0].features[1]"),
    "huge integer": (arms([1, 10**400]), "arms[0].features[1]"),
    "boolean as number": (arms([1, True]), "arms[0].features[1]"),
    "number as text": (arms([1, "2"]), "arms[0].features[1]"),
    "null as number": (arms([1, None]), "arms[0].features[1]"),
    "list as number": (arms([1, [2]]), "arms[0].features[1]"),
    "named NaN": (arms({"x": float("nan")}), "arms[0].features.x"),
    "named too large": (arms({"x": 1e31}), "arms[0].features.x"),
    "named null": (arms({"x": 1, "y": None}), "arms[0].features.y"),
    "named list": (arms({"x": [1]}), "arms[0].features.x"),
    "named long text": (arms({"x": LONG}), "arms[0].features.x"),
    "long name": (arms({LONG: 1}), None),
    "k is zero": (ask(k=0), "k"),
    "k is too large": (ask(k=101), "k"),
    "k beyond the arms": (ask(k=3), "k"),
    "k is a boolean": (ask(k=True), "k"),
    "k is text": (ask(k="1"), "k"),
    "k is a fraction": (ask(k=1.5), "k"),
    "k is null": (ask(k=None), "k"),
    "context is text": (ask(context="rain"), "context"),
    "context NaN": (ask(context=[1, float("nan")]), "context[1]"),
    "context too long": (ask(context=[1] * 9), "context"),
    "context empty": (ask(context=[]), "context"),
    "user_features is text": (ask(user_features="old"), "user_features"),
    "user_features NaN": (ask(user_features={"age": float("nan")}), "user_features.age"),
    "user_features nested": (ask(user_features={"age": [1]}), "user_features.age"),
    "user_features too long": (ask(user_features=[1] * 9), "user_features"),
    "user_features empty": (ask(user_features={}), "user_features"),
    "decision id with a space": (ask(decision_id="a b"), "decision_id"),
    "decision id with a line break": (ask(decision_id="a\n"), "decision_id"),
    "decision id too long": (ask(decision_id="a" * 129), "decision_id"),
    "decision id empty": (ask(decision_id=""), "decision_id"),
    "deferred by a number": (ask(deferred=1), "deferred"),
    "deferred null": (ask(deferred=None), "deferred"),
}
FEEDBACK = {
    "not an object": ("x", ""),
    "empty": ({}, "decision_id"),
    "no reward": ({"decision_id": "d"}, "reward"),
    "reward too large for any range": (reward(reward=1.01e30), "reward"),
    "reward too low for any range": (reward(reward=-1.01e30), "reward"),
    "reward NaN": (reward(reward=float("nan")), "reward"),
    "reward Infinity": (reward(reward=float("inf")), "reward"),
    "reward boolean": (reward(reward=True), "reward"),
    "reward text": (reward(reward="1"), "reward"),
    "reward null": (reward(reward=None), "reward"),
    "unknown member": (reward(value=1), "value"),
    "decision id with NUL": (reward(decision_id="a\0"), "decision_id"),
    "arm id with NUL": (reward(arm_id="a\0"), "arm_id"),
    "arm id too long": (reward(arm_id=LONG), "arm_id"),
    "event id empty": (reward(event_id=""), "event_id"),
    "event id with an escape": (reward(event_id="\x1b[2J"), "event_id"),
    "one and many": ({"events": [reward()], "reward": 1}, "reward"),
    "no events": ({"events": []}, "events"),
    "events null": ({"events": None}, "events"),
    "too many events": ({"events": [reward()] * 1001}, "events"),
    "bad event": ({"events": [reward(), reward(reward="2")]}, "events[1].reward"),
    "event is a number": ({"events": [reward(), 3]}, "events[1]"),
    "unknown member of an event": ({"events": [reward(), reward(x=2)]}, "events[1].x"),
}
#: Raw bodies, with status and field.
RAW = {
    "empty": (b"", 400, None),
    "cut off": (b'{"user_id": "u', 400, None),
    "not JSON": (b"user_id=u", 400, None),
    "two documents": (b"{} {}", 400, None),
    "invalid UTF-8": (b'{"user_id": "\xff"}', 400, None),
    "surrogate in UTF-8": (b'{"user_id": "\xed\xa0\x80"}', 400, None),
    "raw NUL in text": (b'{"user_id": "\x00"}', 400, None),
    "1e999": (b'{"user_id":"u","arms":[{"id":"a","features":[0, 1e999]}]}', 422, "arms[0].features[1]"),
    "-1e999": (b'{"user_id":"u","arms":[{"id":"a","features":[-1e999]}]}', 422, "arms[0].features[0]"),
    "5000 digits": (b'{"user_id":"u","arms":[{"id":"a","features":[' + b"9" * 5000 + b"]}]}", 422, ""),
    "deep lists": (b"[" * 100_000, 422, ""),
    "deep lists, closed": (b"[" * 100_000 + b"]" * 100_000, 422, ""),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 422, ""),
    "lone surrogate": (b'{"user_id": "\\ud83d", "arms": []}', 422, "user_id"),
    "lone surrogate as a name": (b'{"\\udead": 1}', 422, "\udead"),
}


@pytest.fixture
async def api(scripted: ScriptedEngine) -> AsyncIterator[Any]:
    async with scripted_app(scripted, max_arms=10, max_dimension=8) as api:
        yield api


async def refuse(
    api: Any, scripted: ScriptedEngine, path: str, body: Any, status: int, field: str | None
) -> dict[str, Any]:
    """Send a body, check the common parts of a refusal, and return the document."""
    response = await api.post(path, content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = json.loads(response.content, parse_constant=pytest.fail)
    assert document["status"] == status
    assert document["type"].startswith("/problems/")
    assert document["instance"] == response.headers["x-request-id"]
    assert {"title", "detail"} <= document.keys()
    assert len(response.content) < 2_000
    if field is not None:
        assert field in [error["field"] for error in document["errors"]]
    assert scripted.calls == []
    return document


@pytest.mark.parametrize(("body", "field"), RECOMMEND.values(), ids=RECOMMEND)
async def test_invalid_recommend_is_refused(api: Any, scripted: ScriptedEngine, body: Any, field: str | None) -> None:
    await refuse(api, scripted, "/recommend", json.dumps(body).encode(), 422, field)


@pytest.mark.parametrize(("body", "field"), FEEDBACK.values(), ids=FEEDBACK)
async def test_invalid_feedback_is_refused(api: Any, scripted: ScriptedEngine, body: Any, field: str | None) -> None:
    await refuse(api, scripted, "/feedback", json.dumps(body).encode(), 422, field)


@pytest.mark.parametrize("path", ["/recommend", "/feedback"])
@pytest.mark.parametrize(("body", "status", "field"), RAW.values(), ids=RAW)
async def test_invalid_bytes_are_refused(
    api: Any, scripted: ScriptedEngine, path: str, body: bytes, status: int, field: str | None
) -> None:
    about_arms = bool(field) and "arms" in str(field)
    await refuse(api, scripted, path, body, status, None if path == "/feedback" and about_arms else field)


@pytest.mark.parametrize(
    ("body", "field", "detail"),
    [
        (ask(arms=["a"]), "arms[0]", "must be an object"),
        ({"user_id": "u", "arms": []}, "arms", "must have 1 or more elements"),
        ({"arms": [{"id": "a", "features": [1]}]}, "user_id", "is missing"),
        (ask(k=True), "k", "must be an integer"),
        (ask(k=101), "k", "must be at most 100"),
        (ask(k=9), "k", "is more than the number of arms to choose from, 2"),
        (arms([1e31]), "arms[0].features[0]", "must be at most 1e+30"),
        (arms({"": 1}), 'arms[0].features[""]', "its name must have 1 or more characters"),
        (arms({"[key]": LONG}), "arms[0].features.[key]", "must have 256 characters or fewer"),
        (ask(context={LONG: 1}), f"context.{LONG}"[:199] + "…", "its name must have 256 characters or fewer"),
        ({"": 1}, '[""]', f"is not a field here; the fields are {', '.join(sorted(RecommendRequest.model_fields))}"),
    ],
    ids=[
        "no object",
        "no arms",
        "no user",
        "a boolean",
        "a large k",
        "too few arms",
        "a large number",
        "an empty name",
        "a name of pydantic's",
        "a long name",
        "an empty member",
    ],
)
async def test_errors_use_words_of_json(api: Any, scripted: ScriptedEngine, body: Any, field: str, detail: str) -> None:
    document = await refuse(api, scripted, "/recommend", json.dumps(body).encode(), 422, None)
    assert document["errors"] == [{"field": field, "detail": detail}]


async def test_too_deep_nesting_is_refused(api: Any, scripted: ScriptedEngine) -> None:
    document = await refuse(api, scripted, "/recommend", b"[" * 300 + b"]" * 300, 422, "")
    assert document["detail"].startswith("is nested too deeply, at line 1 column ")


async def test_large_body_is_refused(api: Any, scripted: ScriptedEngine) -> None:
    await refuse(api, scripted, "/recommend", b"[" + b" " * 10_000_000 + b"]", 413, None)


@pytest.mark.parametrize("path", ["/recommend", "/feedback"])
async def test_large_chunked_body_is_refused(api: Any, scripted: ScriptedEngine, path: str) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(160):
            sent += 65_536
            yield b" " * 65_536

    await refuse(api, scripted, path, chunks(), 413, None)
    assert sent <= 1_048_576 + 2 * 65_536, "it went on reading past the cap"


async def test_error_does_not_repeat_long_input(api: Any, scripted: ScriptedEngine) -> None:
    document = await refuse(api, scripted, "/recommend", json.dumps({"q" * 100_000: 1}).encode(), 422, None)
    assert len(document["detail"]) <= MAX_DETAIL_CHARS
    assert len(document["errors"][0]["field"]) <= MAX_FIELD_CHARS
    response = await api.post("/recommend", json=arms({f"n{i}": None for i in range(8)}))
    assert len(response.json()["errors"]) <= MAX_ERRORS
    response = await api.post("/feedback?wait=" + "z" * 50_000, json=reward())
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "wait"
    assert len(response.content) < 1_000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", None])
async def test_other_media_types_are_refused(api: Any, scripted: ScriptedEngine, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = await api.post("/recommend", content=json.dumps(ask()).encode(), headers=headers)
    assert response.status_code == 415
    assert response.headers["content-type"] == "application/problem+json"
    assert scripted.calls == []


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_json_media_types_are_accepted(api: Any, kind: str) -> None:
    response = await api.post("/recommend", content=json.dumps(ask()).encode(), headers={"Content-Type": kind})
    assert response.status_code == 200
