"""For any arguments and any answer, the client raises MetabanError and nothing else."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaban.client import Ask, AsyncMetaban, Metaban, MetabanError, Reward, clients
from tests.client.scripted_server import DECISION, PROBLEM

#: Python objects that a caller may pass by mistake.
ODD = st.sampled_from(
    [
        object(),
        int,
        len,
        ...,
        NotImplemented,
        b"bytes",
        bytearray(b"a"),
        {1, 2},
        range(3),
        1j,
        10**400,
        float("nan"),
        float("inf"),
        decimal.Decimal("1.5"),
        datetime.datetime(2026, 1, 1),
        np.float32(1),
        np.int64(1),
        np.zeros(2),
        np.zeros((2, 2)),
        np.array(5),
        np.array(["a"]),
        Path("missing.ndjson"),
        Path("."),
        Path("\0"),
        StringIO("\ud800"),
        BytesIO(b"{}\n"),
        ValueError("an instance"),
        httpx.ReadTimeout("an instance"),
        "\ud800",
        "\0",
        "..",
        "u" * 70_000,
        Ask("u", {"a": [1]}),
        Ask(object(), 5, k="k"),  # type: ignore[arg-type]
        Reward("d", 1),
        Reward(None, "x"),  # type: ignore[arg-type]
    ]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.sampled_from(["id", "features", "user_id"]) | PLAIN.filter(lambda key: key == key)
ANYTHING = st.recursive(
    PLAIN | ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3).map(iter)
    ),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def methods_of(client: Metaban | AsyncMetaban) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All methods that make a call, by their path from the client."""
    resources: list[tuple[str, object]] = [("", client), *vars(client).items()]
    resources += [(f"admin.{name}", resource) for name, resource in vars(client.admin).items()]
    for path, resource in resources:
        if isinstance(resource, clients.Resource | clients.AsyncResource):
            for name in vars(type(resource)):
                if not name.startswith("_") and name != "close":
                    yield f"{path}.{name}".lstrip("."), getattr(resource, name)


#: The methods have the same names in both clients.
METHODS = sorted(name for name, _ in methods_of(Metaban("http://host")))


def draw_arguments(data: st.DataObject, method: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """An object for each required parameter, and for some of the others."""
    positional, named = [], {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            positional.append(data.draw(ANYTHING, parameter.name))
        elif data.draw(st.booleans(), f"{parameter.name} is given"):
            named[parameter.name] = data.draw(ANYTHING, parameter.name)
    return positional, named


def read_and_refuse(request: httpx.Request) -> httpx.Response:
    request.read()
    return httpx.Response(422, json=PROBLEM)


async def read_and_refuse_async(request: httpx.Request) -> httpx.Response:
    await request.aread()
    return httpx.Response(422, json=PROBLEM)


def test_all_methods_are_found() -> None:
    assert {"recommend", "health.live", "admin.user", "admin.arms.import_lines"} < set(METHODS)
    assert len(METHODS) == 45


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(METHODS))
def test_any_arguments_raise_only_metaban_errors(name: str, data: st.DataObject) -> None:
    with Metaban("http://host", transport=httpx.MockTransport(read_and_refuse)) as metaban:
        method = dict(methods_of(metaban))[name]
        positional, named = draw_arguments(data, method)

        def call() -> None:
            answer = method(*positional, **named)
            list(answer if isinstance(answer, Iterator) else [])

        with pytest.raises(MetabanError):
            call()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(METHODS))
def test_any_arguments_raise_only_metaban_errors_in_asyncio(name: str, data: st.DataObject) -> None:
    async def call() -> None:
        async with AsyncMetaban("http://host", transport=httpx.MockTransport(read_and_refuse_async)) as metaban:
            method = dict(methods_of(metaban))[name]
            positional, named = draw_arguments(data, method)
            answer = method(*positional, **named)
            if isinstance(answer, AsyncIterator):
                _ = [item async for item in answer]
            else:
                await answer

    with pytest.raises(MetabanError):
        asyncio.run(call())


@pytest.mark.parametrize("make", [Metaban, AsyncMetaban])
@settings(max_examples=150, deadline=None)
@given(
    base_url=st.just("http://host") | ANYTHING,
    named=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("key", "namespace", "timeout_s", "retries", "deadline_s", "transport"), ANYTHING),
    ),
)
def test_any_options_raise_only_metaban_errors(
    make: Callable[..., object], base_url: Any, named: dict[str, Any]
) -> None:
    with suppress(MetabanError):
        make(base_url, **named)


#: Bodies: any bytes, any JSON, and decisions with one member replaced.
BODIES = (
    st.binary(max_size=20)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda name, value: json.dumps({**DECISION, name: value}).encode(), st.sampled_from(sorted(DECISION)), JSON
    )
    | st.just(b"[" * 100_000)
    | st.just(b'{"took_ms":1' + b"0" * 400 + b"}")
    | st.just(b'{"results":[{"status":200}]}')
)
HEADERS = st.sampled_from(
    [
        {},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "zstd"},
        {"Content-Type": "application/json; charset=hex"},
        {"Retry-After": "99999999999999999999"},
        {"Location": "http://\ud7ff/"},
    ]
)
WITHOUT_ARGUMENTS: list[Callable[[Metaban], object]] = [
    lambda metaban: metaban.recommend("u", {"a": [1]}).arm_id,
    lambda metaban: [result.get() for result in metaban.recommend_batch([Ask("u")])],
    lambda metaban: metaban.feedback("d", 1),
    lambda metaban: metaban.health.ready().ok,
    lambda metaban: metaban.admin.arms.list(),
    lambda metaban: next(metaban.admin.arms.iterate(), None),
    lambda metaban: list(metaban.admin.arms.export()),
    lambda metaban: metaban.admin.user("u"),
    lambda metaban: metaban.admin.jobs.list(),
    lambda metaban: metaban.admin.transfer.overview(),
]


@pytest.mark.parametrize("call", WITHOUT_ARGUMENTS)
@settings(max_examples=60, deadline=None)
@given(status=st.sampled_from([200, 200, 200, 204, 302, 404, 422, 500, 599]), body=BODIES, headers=HEADERS)
def test_any_answer_raises_only_metaban_errors(
    call: Callable[[Metaban], object], status: int, body: bytes, headers: dict[str, str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return httpx.Response(status, headers=encoded, stream=httpx.ByteStream(body))

    with Metaban("http://host", transport=httpx.MockTransport(answer), retries=0) as metaban, suppress(MetabanError):
        call(metaban)


ERRORS = [
    kind
    for kind in vars(httpx).values()
    if isinstance(kind, type) and issubclass(kind, httpx.RequestError) and kind is not httpx.RequestError
]


@pytest.mark.parametrize("kind", ERRORS)
def test_any_httpx_error_becomes_a_metaban_error(kind: type[httpx.RequestError]) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise kind("fails")

    with Metaban("http://host", transport=httpx.MockTransport(fail), retries=0) as metaban:
        with pytest.raises(MetabanError):
            metaban.recommend("u")
        with pytest.raises(MetabanError):
            list(metaban.admin.arms.export())
