"""The client with a scripted server: requests, answers, errors and secrets."""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import logging
import subprocess
import sys
import traceback
from typing import Any

import numpy as np
import pytest

from metaban.client import (
    ApiError,
    Ask,
    Conflict,
    Contribution,
    Decision,
    FieldError,
    Forbidden,
    InvalidInput,
    Item,
    Metaban,
    MetabanError,
    NotFound,
    RateLimited,
    Reward,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    clients,
)
from metaban.service.http.schemas.recommend import EXPLANATION_EXAMPLE
from tests.client.scripted_server import ARMS, DECISION, HANG_UP, ITEM, KEY, OK, PROBLEM, Answer, ScriptedServer, ask


def test_import_loads_no_heavy_packages() -> None:
    heavy = ["torch", "fastapi", "uvicorn", "redis", "pydantic", "numpy", "starlette", "structlog"]
    code = f"import sys, metaban.client; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def methods_of(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(member))
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    kinds = [kind.__name__ for kind in clients.Resource.__subclasses__()]
    assert len(kinds) == 10
    for name in kinds:
        assert methods_of(getattr(clients, name)) == methods_of(getattr(clients, f"Async{name}"))
    assert list(inspect.signature(Metaban("http://host").recommend).parameters)[:2] == ["user_id", "arms"]


# Requests and answers


def test_request_of_recommend() -> None:
    with ScriptedServer([OK]) as server, Metaban(server.url, KEY, "shop") as metaban:
        decision = metaban.recommend(
            "Zoë 🙂",
            {"a": np.asarray([1, 0]), "b": (0, 1)},
            exclude=["x"],
            k=2,
            context={"hour": 8, "rain": True},
            user_features=[1],
            decision_id="order-1",
            explain=True,
            min_version=0,
            deferred=True,
        )
    (request,) = server.received
    assert (request.method, request.path) == ("POST", "/recommend?namespace=shop")
    assert request.headers["x-api-key"] == KEY
    assert request.headers["content-type"] == "application/json"
    assert request.json == {
        "user_id": "Zoë 🙂",
        "decision_id": "order-1",
        "arms": [{"id": "a", "features": [1.0, 0.0]}, {"id": "b", "features": [0.0, 1.0]}],
        "exclude": ["x"],
        "k": 2,
        "context": {"hour": 8, "rain": True},
        "user_features": [1.0],
        "min_version": 0,
        "explain": True,
        "deferred": True,
    }
    assert decision == Decision("d", (Item("a", 1, 0.75, 0.5, 0.25, 1.0, 2),), "ucb-floor", 3, None, True, 2.0, 7)
    assert decision.arm_id == "a"
    assert isinstance(decision.items[0].propensity, float)


def test_default_arguments_are_not_sent() -> None:
    with ScriptedServer([OK]) as server, Metaban(server.url) as metaban:
        metaban.recommend("u", arm_ids=["a"])
        metaban.recommend("u")
    first, second = (request.json for request in server.received)
    assert set(first) == {"user_id", "decision_id", "arm_ids"}
    assert set(second) == {"user_id", "decision_id"}
    assert len(first["decision_id"]) == 32
    assert first["decision_id"] != second["decision_id"]
    assert "x-api-key" not in server.received[0].headers
    assert server.received[0].path == "/recommend"


def test_batches() -> None:
    refused = {"status": 422, "problem": PROBLEM}
    answer = Answer(200, {"results": [{"status": 200, "decision": DECISION}, refused]})
    with ScriptedServer([answer]) as server, Metaban(server.url) as metaban:
        good, bad = metaban.recommend_batch([Ask("u", ARMS), Ask("v", ARMS, decision_id="mine")])
    assert good.get().decision_id == "d"
    with pytest.raises(InvalidInput, match="k: is 3"):
        bad.get()
    (request,) = server.received
    assert [entry["user_id"] for entry in request.json["requests"]] == ["u", "v"]
    assert request.json["requests"][1]["decision_id"] == "mine"
    assert len(request.json["requests"][0]["decision_id"]) == 32


def test_requests_of_feedback() -> None:
    answer = {"accepted": 1, "duplicates": 0, "rejected": [{"index": 0, "code": "late", "detail": "x", "new": 1}]}
    with ScriptedServer([Answer(202, answer)]) as server, Metaban(server.url) as metaban:
        result = metaban.feedback("d", 1, arm_id="a", wait_applied=True)
        metaban.feedback_batch([Reward("d", 0.5), Reward("e", 0, event_id="click-1")])
    assert result.rejected[0].code == "late"
    assert result.applied is None
    single, batch = server.received
    assert single.path == "/feedback?wait=applied"
    assert single.json == {"decision_id": "d", "reward": 1, "arm_id": "a"}
    assert batch.json == {
        "events": [{"decision_id": "d", "reward": 0.5}, {"decision_id": "e", "reward": 0, "event_id": "click-1"}]
    }


def test_unknown_members_of_answers_are_ignored() -> None:
    newer = {**DECISION, "novelty": 1, "items": [{**ITEM, "novelty": [1]}], "user_version": None}
    with ScriptedServer([Answer(200, newer)]) as server:
        assert ask(server).user_version is None
    older = {name: value for name, value in DECISION.items() if name != "user_version"}
    with ScriptedServer([Answer(200, older)]) as server:
        assert ask(server).user_version is None


def test_explanations() -> None:
    told = {**EXPLANATION_EXAMPLE, "novelty": 1}
    answer = {**DECISION, "items": [{**ITEM, "explanation": told}]}
    with ScriptedServer([Answer(200, answer)]) as server:
        explanation = ask(server).items[0].explanation
    assert explanation is not None
    assert dataclasses.asdict(explanation) | {"contributions": told["contributions"], "novelty": 1} == told
    assert explanation.contributions[0] == Contribution("kind=tea", 1.0, 0.027)
    older = {name: told[name] for name in told if name not in ("looks", "shared", "user", "arm", "taste", "absent")}
    answers = [{**DECISION, "items": [{**ITEM, "explanation": each}]} for each in (older, None)]
    with ScriptedServer([Answer(200, each) for each in answers]) as server:
        before = ask(server).items[0].explanation
        assert ask(server).items[0].explanation is None
    assert before is not None
    assert (before.memory, before.shared, before.looks) == (explanation.memory, None, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {**DECISION, "items": [{**ITEM, "explanation": {**EXPLANATION_EXAMPLE, "arm": "much"}}]},
            r"`items\[0\].explanation.arm` of the answer is not of type float",
        ),
        ({**DECISION, "items": [{**ITEM, "score": "high"}]}, r"`items\[0\].score` of the answer is not of type float"),
        ({**DECISION, "items": [{name: ITEM[name] for name in ITEM if name != "mean"}]}, r"no `items\[0\].mean`"),
        ({**DECISION, "model_version": True}, "`model_version` of the answer is not of type int"),
        ({**DECISION, "logged": 1}, "`logged` of the answer is not of type bool"),
        ({**DECISION, "items": {}}, "`items` of the answer is not a list"),
        ({**DECISION, "cold_start": 1}, "`cold_start` of the answer is not of type str"),
        ([DECISION], "the answer is not an object"),
        (b"<html>", "the answer is not JSON"),
        (b"", "the answer is not JSON"),
        (b"\xff{}", "the answer is not JSON"),
    ],
)
def test_unreadable_answer_raises_unexpected_answer(body: Any, message: str) -> None:
    with ScriptedServer([Answer(200, body)]) as server:
        with pytest.raises(UnexpectedAnswer, match=message):
            ask(server)
        assert len(server.received) == 1, "an answer that came is not asked for again"


# Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidInput),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (405, ApiError),
        (409, Conflict),
        (413, InvalidInput),
        (415, InvalidInput),
        (422, InvalidInput),
        (429, RateLimited),
        (500, ApiError),
        (503, Unavailable),
        (302, ApiError),
    ],
)
def test_errors_by_status(status: int, kind: type[ApiError]) -> None:
    with ScriptedServer([Answer(status, {**PROBLEM, "status": status})]) as server, pytest.raises(ApiError) as caught:
        ask(server, retries=0)
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.slug, error.instance) == (status, "invalid-input", "request-1")
    assert error.errors == (FieldError("k", "is 3"),)
    assert str(error) == f"{status} Invalid input: k: is 3 (request request-1)"


@pytest.mark.parametrize(
    "body", [b"<html>Bad gateway</html>", b"", b"[]", {"errors": 3, "type": None}, {"errors": [1]}]
)
def test_error_of_a_proxy(body: Any) -> None:
    with ScriptedServer([Answer(502, body)]) as server, pytest.raises(Unavailable) as caught:
        ask(server, retries=0)
    assert (caught.value.type, caught.value.errors, str(caught.value)) == ("about:blank", (), "502 Bad Gateway")


def test_the_key_is_never_shown(caplog: pytest.LogCaptureFixture, pauses: list[float]) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with ScriptedServer([Answer(401, PROBLEM), HANG_UP]) as server, Metaban(server.url, KEY, retries=1) as metaban:
        for _ in range(2):
            try:
                metaban.recommend("u", ARMS)
            except MetabanError as error:
                shown += ["".join(traceback.format_exception(error)), repr(error), repr(vars(error))]
        shown += [repr(metaban), str(metaban), repr(metaban.admin), repr(metaban._sender.address)]
        assert server.received[0].headers["x-api-key"] == KEY
    assert len(shown) == 10
    assert "key: set" in repr(metaban)
    assert caplog.text, "httpx logs its requests"
    assert not [text for text in [*shown, caplog.text] if KEY in text]


def test_ids_in_paths_are_encoded() -> None:
    with ScriptedServer([Answer(404, PROBLEM)]) as server, Metaban(f"{server.url}/behind/proxy/") as metaban:
        for user_id in ("a/b?c#d", "..", ".", "%2F", "Zoë 🙂", " "):
            with pytest.raises(NotFound):
                metaban.admin.user(user_id)
    assert [request.path.removeprefix("/behind/proxy/admin/users/") for request in server.received] == [
        "a%2Fb%3Fc%23d",
        "%2E%2E",
        "%2E",
        "%252F",
        "Zo%C3%AB%20%F0%9F%99%82",
        "%20",
    ]


@pytest.mark.parametrize(
    "arms",
    [
        {"a": [1, 0], "b": {"hot": True}},
        [{"id": "a", "features": (1, 0)}, {"features": {"hot": True}, "id": "b"}],
        [("a", np.asarray([1, 0])), ("b", {"hot": True})],
        iter([["a", iter([1, 0])], {"id": "b", "features": {"hot": True}}]),
    ],
)
def test_arms_may_be_given_in_several_forms(arms: Any) -> None:
    with ScriptedServer([OK]) as server, Metaban(server.url) as metaban:
        metaban.recommend("u", arms)
    expected = [{"id": "a", "features": [1.0, 0.0]}, {"id": "b", "features": {"hot": True}}]
    assert server.received[0].json["arms"] == expected


def test_answer_with_a_wrong_content_encoding() -> None:
    with ScriptedServer([Answer(200, b"plain", {"Content-Encoding": "gzip"})]) as server:
        with pytest.raises(UnexpectedAnswer, match="Content-Encoding"):
            ask(server)
        assert len(server.received) == 1
    with ScriptedServer([Answer(200, gzip.compress(OK.content), {"Content-Encoding": "gzip"})]) as server:
        assert ask(server).arm_id == "a"


def test_decision_without_items_has_no_arm_id() -> None:
    with (
        ScriptedServer([Answer(200, {**DECISION, "items": []})]) as server,
        pytest.raises(UnexpectedAnswer, match="no items"),
    ):
        _ = ask(server).arm_id
