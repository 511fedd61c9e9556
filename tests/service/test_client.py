"""The client by itself: what it sends, what it raises, and what it never shows."""

from __future__ import annotations

import inspect
import logging
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

import numpy as np
import pytest
from answering import HANG_UP, Answering, Say

from service import client as clients
from service.client import Ask, Metaban, Reward
from service.client_errors import (
    ApiError,
    Conflict,
    FieldError,
    Forbidden,
    InvalidInput,
    MetabanError,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    Unsendable,
)
from service.client_types import Decision, Item

KEY = "k3y-that-must-not-be-seen"
ITEM = {"arm_id": "a", "rank": 1, "score": 0.75, "mean": 0.5, "bonus": 0.25, "propensity": 1, "group_size": 2}
DECISION = {
    "decision_id": "d",
    "items": [ITEM],
    "policy": "ucb-floor",
    "model_version": 3,
    "user_version": 7,
    "cold_start": None,
    "logged": True,
    "took_ms": 2,
}
OK = Say(200, DECISION)
ARMS = {"a": [1.0, 0.0], "b": [0.0, 1.0]}
PROBLEM = {
    "type": "/problems/invalid-input",
    "title": "Invalid input",
    "status": 422,
    "detail": "k: is 3",
    "instance": "request-1",
    "errors": [{"field": "k", "detail": "is 3"}],
}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the blocking client would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def ask(server: Answering, **options: Any) -> Decision:
    with Metaban(server.url, **options) as metaban:
        return metaban.recommend("u", ARMS)


def create_snapshot(server: Answering, **options: Any) -> None:
    """A call that must not be repeated."""
    with Metaban(server.url, **options) as metaban:
        metaban.admin.snapshots.create()


def unused_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def test_it_is_cheap_to_import() -> None:
    heavy = ["torch", "fastapi", "uvicorn", "redis", "pydantic", "numpy", "starlette", "structlog"]
    code = f"import sys, service.client; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def methods_of(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(member))
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    kinds = [name for name in vars(clients) if hasattr(clients, f"Async{name}")]
    assert len(kinds) == 10
    for name in kinds:
        assert methods_of(getattr(clients, name)) == methods_of(getattr(clients, f"Async{name}"))
    assert list(inspect.signature(Metaban("http://host").recommend).parameters)[:2] == ["user_id", "arms"]


# What is sent and read


def test_a_question_as_it_is_sent() -> None:
    with Answering([OK]) as server, Metaban(server.url, KEY, "shop") as metaban:
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
    (heard,) = server.heard
    assert (heard.method, heard.path) == ("POST", "/recommend?namespace=shop")
    assert heard.headers["x-api-key"] == KEY
    assert heard.headers["content-type"] == "application/json"
    assert heard.json == {
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


def test_what_has_its_default_is_not_sent() -> None:
    with Answering([OK]) as server, Metaban(server.url) as metaban:
        metaban.recommend("u", arm_ids=["a"])
        metaban.recommend("u")
    first, second = (heard.json for heard in server.heard)
    assert set(first) == {"user_id", "decision_id", "arm_ids"}
    assert set(second) == {"user_id", "decision_id"}
    assert len(first["decision_id"]) == 32
    assert first["decision_id"] != second["decision_id"]
    assert "x-api-key" not in server.heard[0].headers
    assert server.heard[0].path == "/recommend"


def test_batches() -> None:
    refused = {"status": 422, "problem": PROBLEM}
    answer = Say(200, {"results": [{"status": 200, "decision": DECISION}, refused]})
    with Answering([answer]) as server, Metaban(server.url) as metaban:
        good, bad = metaban.recommend_batch([Ask("u", ARMS), Ask("v", ARMS, decision_id="mine")])
    assert good.get().decision_id == "d"
    with pytest.raises(InvalidInput, match="k: is 3"):
        bad.get()
    (heard,) = server.heard
    assert [entry["user_id"] for entry in heard.json["requests"]] == ["u", "v"]
    assert heard.json["requests"][1]["decision_id"] == "mine"
    assert len(heard.json["requests"][0]["decision_id"]) == 32


def test_rewards_as_they_are_sent() -> None:
    answer = {"accepted": 1, "duplicates": 0, "rejected": [{"index": 0, "code": "late", "detail": "x", "new": 1}]}
    with Answering([Say(202, answer)]) as server, Metaban(server.url) as metaban:
        result = metaban.feedback("d", 1, arm_id="a", wait_applied=True)
        metaban.feedback_batch([Reward("d", 0.5), Reward("e", 0, event_id="click-1")])
    assert result.rejected[0].code == "late"
    assert result.applied is None
    single, batch = server.heard
    assert single.path == "/feedback?wait=applied"
    assert single.json == {"decision_id": "d", "reward": 1, "arm_id": "a"}
    assert batch.json == {
        "events": [{"decision_id": "d", "reward": 0.5}, {"decision_id": "e", "reward": 0, "event_id": "click-1"}]
    }


def test_unknown_members_are_ignored() -> None:
    newer = {**DECISION, "novelty": 1, "items": [{**ITEM, "novelty": [1]}], "user_version": None}
    with Answering([Say(200, newer)]) as server:
        assert ask(server).user_version is None
    older = {name: value for name, value in DECISION.items() if name != "user_version"}
    with Answering([Say(200, older)]) as server:
        assert ask(server).user_version is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
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
def test_an_answer_that_cannot_be_read(body: Any, said: str) -> None:
    with Answering([Say(200, body)]) as server:
        with pytest.raises(UnexpectedAnswer, match=said):
            ask(server)
        assert len(server.heard) == 1, "an answer that came is not asked for again"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda metaban: metaban.recommend("u", {"a": [float("nan")]}), "Out of range float"),
        (lambda metaban: metaban.recommend("u", {"a": {"price": np.float32(2)}}), "float32 is not JSON"),
        (lambda metaban: metaban.recommend("u", {"a": [None]}), "a list of numbers"),
        (lambda metaban: metaban.recommend("u", {"a": 5}), "a list of numbers"),
        (lambda metaban: metaban.recommend("u", {"a": [1]}, k=np.int64(2)), "int64 is not JSON"),
        (lambda metaban: metaban.feedback("d", np.float32(1)), "float32 is not JSON"),
        (lambda metaban: metaban.feedback("d", float("inf")), "Out of range float"),
        (lambda metaban: metaban.admin.groups("u"), "arm_id"),
        (lambda metaban: metaban.admin.transfer.ask(), "name the target"),
    ],
)
def test_what_cannot_be_sent(call: Any, said: str) -> None:
    with Metaban("http://127.0.0.1:9") as metaban, pytest.raises(Unsendable, match=said) as caught:
        call(metaban)
    assert isinstance(caught.value, MetabanError)


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
    with Answering([Say(status, {**PROBLEM, "status": status})]) as server, pytest.raises(ApiError) as caught:
        ask(server, retries=0)
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.slug, error.instance) == (status, "invalid-input", "request-1")
    assert error.errors == (FieldError("k", "is 3"),)
    assert str(error) == f"{status} Invalid input: k: is 3 (request request-1)"


@pytest.mark.parametrize(
    "body", [b"<html>Bad gateway</html>", b"", b"[]", {"errors": 3, "type": None}, {"errors": [1]}]
)
def test_an_error_of_something_in_between(body: Any) -> None:
    with Answering([Say(502, body)]) as server, pytest.raises(Unavailable) as caught:
        ask(server, retries=0)
    assert (caught.value.type, caught.value.errors, str(caught.value)) == ("about:blank", (), "502 Bad Gateway")


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://user:secret@host", "http://host/?a=b"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="base_url must be") as caught:
        Metaban(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("options", [{"retries": -1}, {"timeout_s": 0}, {"deadline_s": float("inf")}])
def test_a_policy_that_is_none(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        Metaban("http://host", **options)


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY} ", f"{KEY}ü", ""])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(ValueError, match="key must be") as caught:
        Metaban("http://host", key=key)
    assert KEY not in str(caught.value)


def test_the_key_is_never_shown(caplog: pytest.LogCaptureFixture, pauses: list[float]) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with Answering([Say(401, PROBLEM), HANG_UP]) as server, Metaban(server.url, KEY, retries=1) as metaban:
        for _ in range(2):
            try:
                metaban.recommend("u", ARMS)
            except MetabanError as error:
                shown += ["".join(traceback.format_exception(error)), repr(error), repr(vars(error))]
        shown += [repr(metaban), str(metaban), repr(metaban.admin), repr(metaban._sender.address)]
        assert server.heard[0].headers["x-api-key"] == KEY
    assert len(shown) == 10
    assert "key: set" in repr(metaban)
    assert caplog.text, "httpx logs its requests"
    assert not [text for text in [*shown, caplog.text] if KEY in text]


def test_ids_in_paths_are_encoded() -> None:
    with Answering([Say(404, PROBLEM)]) as server, Metaban(f"{server.url}/behind/proxy/") as metaban:
        for user_id in ("a/b?c#d", "..", ".", "%2F", "Zoë 🙂", " "):
            with pytest.raises(NotFound):
                metaban.admin.user(user_id)
    assert [heard.path.removeprefix("/behind/proxy/admin/users/") for heard in server.heard] == [
        "a%2Fb%3Fc%23d",
        "%2E%2E",
        "%2E",
        "%252F",
        "Zo%C3%AB%20%F0%9F%99%82",
        "%20",
    ]


def test_a_closed_client_says_so() -> None:
    metaban = Metaban("http://127.0.0.1:9")
    metaban.close()
    with pytest.raises(RuntimeError, match="closed"):
        metaban.health.live()
