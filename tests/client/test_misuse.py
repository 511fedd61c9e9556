"""Mistakes of the caller: wrong arguments, wrong options, and unusable clients."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from metaban.client import (
    Ask,
    AsyncMetaban,
    ClientUnusable,
    Decision,
    InvalidArgument,
    Metaban,
    MetabanError,
)
from tests.client.scripted_server import ARMS, KEY, OK, Answer, ScriptedServer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda metaban: metaban.recommend("u", {"a": [float("nan")]}),
            "features of arm 'a' must be .*: JSON has no NaN",
        ),
        (lambda metaban: metaban.recommend("u", {"a": {"price": float("nan")}}), "JSON has no NaN"),
        (lambda metaban: metaban.recommend("u", {"a": {"price": np.float32(2)}}), r"not float32 \(float\(x\) converts"),
        (
            lambda metaban: metaban.recommend("u", {"a": {"price": None}}),
            "'price' in .* or a boolean, not NoneType",
        ),
        (lambda metaban: metaban.recommend("u", {"a": {1: 2}}), "each name in features of arm 'a' must be a string"),
        (lambda metaban: metaban.recommend("u", {"a": [None]}), "features of arm 'a' must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", {"a": ["1"]}), "must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", {"a": "12"}), "must be a list of finite numbers .*, not str"),
        (lambda metaban: metaban.recommend("u", {"a": {1.0, 2.0}}), "must be a list of finite numbers .*, not set"),
        (lambda metaban: metaban.recommend("u", {"a": [[1, 2]]}), "must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", {"a": [10**400]}), "must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", {"a": 5}), "must be a list of finite numbers .*, not int"),
        (lambda metaban: metaban.recommend("u", {1: [1]}), "the id of an arm must be a string, not int"),
        (lambda metaban: metaban.recommend("u", [{"id": "a"}]), r'arms must be \{"tea": features.*\[\{"id": "tea"'),
        (lambda metaban: metaban.recommend("u", [{"id": "a", "features": [1], "price": 3}]), "arms must be"),
        (lambda metaban: metaban.recommend("u", ["a", "b"]), "arms of the catalogue are chosen with arm_ids"),
        (lambda metaban: metaban.recommend("u", "a"), "arms must be .*, not str"),
        (lambda metaban: metaban.recommend("u", 5), "arms must be .*, not int"),
        (lambda metaban: metaban.recommend("u", arm_ids="abc"), r'arm_ids must be a list of strings such as \["tea"\]'),
        (lambda metaban: metaban.recommend("u", arm_ids=["a", 1]), r"arm_ids\[1\] must be a string, not int"),
        (lambda metaban: metaban.recommend("u", exclude=5), "exclude must be a list of strings"),
        (lambda metaban: metaban.recommend("u", context=5), "context must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", user_features=[{}]), "user_features must be a list of finite numbers"),
        (lambda metaban: metaban.recommend("u", explain=np.zeros(2)), "explain must be True or False"),
        (lambda metaban: metaban.recommend("u", k=np.zeros(2)), "k must be an integer"),
        (lambda metaban: metaban.recommend("u", {"a": [1]}, k=np.int64(2)), r"not int64 \(int\(x\) converts"),
        (lambda metaban: metaban.recommend(5), "user_id must be a string, not int"),
        (lambda metaban: metaban.recommend("\ud800"), "user_id must be valid Unicode"),
        (
            lambda metaban: metaban.recommend_batch([{"user_id": "u"}]),
            r"a list of Ask\(.*, and has .* dict",
        ),
        (lambda metaban: metaban.recommend_batch(Ask("u")), r"asks must be a list of Ask\(user_id, arms, …\), not Ask"),
        (lambda metaban: metaban.feedback("d", np.float32(1)), "reward must be a finite number, not float32"),
        (lambda metaban: metaban.feedback("d", float("inf")), "reward must be a finite number: JSON has no NaN"),
        (lambda metaban: metaban.feedback("d", "1"), "reward must be a finite number, not str"),
        (lambda metaban: metaban.feedback("d", 10**400), "reward must be a finite number"),
        (
            lambda metaban: metaban.feedback_batch([("d", 1)]),
            r"a list of Reward\(.*, and has .* tuple",
        ),
        (lambda metaban: metaban.activate(None), "decision_id must be a string"),
        (lambda metaban: metaban.admin.user("u" * 70_000), "do not fit into a URL"),
        (lambda metaban: metaban.admin.user("\ud800"), "user_id must be valid Unicode"),
        (lambda metaban: metaban.admin.user("u", events=1.5), "events must be a string, an integer or a boolean"),
        (lambda metaban: metaban.admin.arms.list(limit=10**5000), "cannot be written as JSON"),
        (lambda metaban: metaban.admin.arms.import_lines("arms.ndjson"), r'import_lines\(Path\("arms.ndjson"\)\)'),
        (lambda metaban: metaban.admin.arms.import_lines(Path("missing.ndjson")), "cannot be read: .*No such file"),
        (lambda metaban: metaban.admin.arms.import_lines(5), "arms to import must be"),
        (lambda metaban: metaban.admin.config.patch([1]), "changes must be a mapping"),
        (lambda metaban: metaban.admin.config.patch({"epsilon": object()}), "object is not JSON"),
        (lambda metaban: metaban.admin.wait_for_job("j", on_progress=3), "on_progress must be a function"),
        (lambda metaban: metaban.admin.wait_for_job("j", timeout_s="1"), "timeout_s must be a finite number"),
        (lambda metaban: metaban.admin.groups("u"), "either arm_id"),
        (lambda metaban: metaban.admin.transfer.ask(), "either user_id or cluster"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with Metaban("http://127.0.0.1:9") as metaban, pytest.raises(InvalidArgument, match=message) as caught:
        call(metaban)
    assert isinstance(caught.value, MetabanError)
    assert isinstance(caught.value, ValueError)


# Wrong options


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://user:secret@host",
        "http://host/?a=b",
        "http://host:port",
        "http://[::1",
        "http://\ud800",
        "http://ho\nst",
        5,
        None,
        b"http://host",
    ],
)
def test_invalid_base_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidArgument, match="base_url must be") as caught:
        Metaban(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"retries": -1},
        {"retries": 1.5},
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"deadline_s": float("inf")},
        {"deadline_s": None},
        {"namespace": 3},
        {"transport": 3},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidArgument, match=f"{next(iter(options))} .*must be|must be .*{next(iter(options))}|must be"
    ):
        Metaban("http://host", **options)


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY} ", f"{KEY}ü", "", KEY.encode(), 5])
def test_invalid_key_is_refused_without_showing_it(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="key must be") as caught:
        Metaban("http://host", key=key)
    assert KEY not in str(caught.value)


# Unusable clients


async def test_closed_client_is_unusable() -> None:
    metaban = Metaban("http://127.0.0.1:9")
    metaban.close()
    with pytest.raises(ClientUnusable, match="closed") as caught:
        metaban.health.live()
    assert isinstance(caught.value, RuntimeError)
    waiting = AsyncMetaban("http://127.0.0.1:9")
    await waiting.close()
    with pytest.raises(ClientUnusable, match="closed"):
        await waiting.health.live()


def test_client_closed_during_an_export() -> None:
    line = b'{"id":"a","features":[1.0],"version":1,"updated_ms":1}\n'
    with ScriptedServer([Answer(200, line * 50_000)]) as server:
        metaban = Metaban(server.url)
        arms = metaban.admin.arms.export()
        assert next(arms).id == "a"
        metaban.close()
        with pytest.raises(MetabanError):
            list(arms)


def test_asyncio_client_is_refused_in_another_loop() -> None:
    with ScriptedServer([OK]) as server:
        metaban = AsyncMetaban(server.url)
        asyncio.run(_recommend(metaban))
        with pytest.raises(ClientUnusable, match="another event loop"):
            asyncio.run(_recommend(metaban))


async def _recommend(metaban: AsyncMetaban) -> Decision:
    return await metaban.recommend("u", ARMS)


@pytest.mark.parametrize("make", [Metaban, AsyncMetaban])
def test_invalid_proxy_variable_is_refused(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "gopher://user:secret@host")
    with pytest.raises(InvalidArgument, match="HTTP_PROXY") as caught:
        make("http://host")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_transport_of_the_other_client_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="handle_request"):
        Metaban("http://host", transport=httpx.AsyncHTTPTransport())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="handle_async_request"):
        AsyncMetaban("http://host", transport=httpx.HTTPTransport())  # type: ignore[arg-type]
