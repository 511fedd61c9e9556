"""Retries of the client: when, after which pause, and which calls are never repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from metaban.client import (
    ApiError,
    AsyncMetaban,
    Conflict,
    ConnectionFailed,
    Metaban,
    NotFound,
    RateLimited,
    Unavailable,
)
from metaban.client.api import recommend
from metaban.client.transport import Pause, Policy, Send
from tests.client.scripted_server import (
    ARMS,
    HANG_UP,
    KEY,
    OK,
    PROBLEM,
    SILENCE,
    Answer,
    ScriptedServer,
    ask,
    create_snapshot,
    unused_port,
)


@pytest.mark.parametrize(
    ("answers", "call", "requests", "raised"),
    [
        ([HANG_UP, OK], ask, 2, None),
        ([Answer(503), Answer(429), Answer(502), Answer(504), OK], ask, 5, None),
        ([HANG_UP], ask, 5, ConnectionFailed),
        ([Answer(503)], ask, 5, Unavailable),
        ([Answer(429)], ask, 5, RateLimited),
        ([Answer(500), OK], ask, 1, ApiError),
        ([Answer(501), OK], ask, 1, ApiError),
        *[
            ([Answer(status), OK], ask, 1, ApiError)
            for status in (301, 400, 401, 403, 404, 405, 408, 409, 413, 422, 425)
        ],
        ([HANG_UP], create_snapshot, 1, ConnectionFailed),
        *[([Answer(status)], create_snapshot, 1, ApiError) for status in (429, 500, 502, 503, 504)],
    ],
)
def test_number_of_tries(
    answers: list[Answer],
    call: Callable[[ScriptedServer], object],
    requests: int,
    raised: type[Exception] | None,
    pauses: list[float],
) -> None:
    with ScriptedServer(answers) as server:
        if raised is None:
            call(server)
        else:
            with pytest.raises(raised):
                call(server)
    assert len(server.received) == requests
    assert len({request.body for request in server.received}) == 1, "every try is the same request"
    assert len(pauses) == requests - 1


def test_retries_can_be_turned_off(pauses: list[float]) -> None:
    with ScriptedServer([Answer(503)]) as server:
        with pytest.raises(Unavailable):
            ask(server, retries=0)
        assert len(server.received) == 1


@pytest.mark.parametrize(
    "call", [lambda metaban: metaban.recommend("u"), lambda metaban: metaban.admin.snapshots.create()]
)
def test_refused_connections_are_retried_for_every_call(call: Callable[[Metaban], object], pauses: list[float]) -> None:
    with Metaban(f"http://127.0.0.1:{unused_port()}") as metaban, pytest.raises(ConnectionFailed) as caught:
        call(metaban)
    assert not caught.value.sent
    assert "after 5 tries" in str(caught.value)
    assert len(pauses) == 4


def test_silent_service_times_out(pauses: list[float]) -> None:
    with ScriptedServer([SILENCE]) as server, pytest.raises(ConnectionFailed, match="ReadTimeout") as caught:
        ask(server, timeout_s=0.05, retries=1)
    assert caught.value.sent
    assert len(server.received) == 2


def test_pauses_double_with_jitter(pauses: list[float]) -> None:
    with ScriptedServer([Answer(503)]) as server, pytest.raises(Unavailable):
        ask(server, retries=7)
    for number, pause in enumerate(pauses):
        longest = min(0.1 * 2**number, 5.0)
        assert longest / 2 <= pause <= longest
    assert len(set(pauses)) == 7


@pytest.mark.parametrize(
    ("retry_after", "least"),
    [("3", 3.0), ("0", 0.0), (" 2 ", 2.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.05), ("-5", 0.05), ("1e9", 0.05)],
)
def test_retry_after(retry_after: str, least: float, pauses: list[float]) -> None:
    with ScriptedServer([Answer(503, PROBLEM, {"Retry-After": retry_after}), OK]) as server:
        ask(server)
    assert least <= pauses[0] <= least + 0.1


def test_no_pause_beyond_the_deadline(pauses: list[float]) -> None:
    with (
        ScriptedServer([Answer(429, PROBLEM, {"Retry-After": "40"}), OK]) as server,
        pytest.raises(RateLimited) as caught,
    ):
        ask(server, deadline_s=30.0)
    assert caught.value.retry_after_s == 40
    assert len(server.received) == 1
    assert pauses == []


def test_deadline_covers_all_tries() -> None:
    now, timeouts = 100.0, []
    steps = recommend("u").steps(Policy(clock=lambda: now, chance=lambda: 1.0, timeout_s=10, retries=50, deadline_s=25))

    def play() -> None:
        nonlocal now
        step = next(steps)
        while True:
            if isinstance(step, Send):
                timeouts.append(step.timeout_s)
                now += step.timeout_s
                step = steps.send(httpx.ReadTimeout("silence"))
            else:
                assert isinstance(step, Pause)
                now += step.seconds
                step = steps.send(None)

    with pytest.raises(ConnectionFailed, match="after 3 tries"):
        play()
    assert timeouts == [10, 10, pytest.approx(25 - 20 - 0.1 - 0.2)]
    assert now == pytest.approx(125)


def test_404_after_a_lost_delete_is_success(pauses: list[float]) -> None:
    for first in (HANG_UP, Answer(504)):
        with ScriptedServer([first, Answer(404, PROBLEM)]) as server, Metaban(server.url) as metaban:
            assert metaban.admin.arms.delete("a") is None
    for first in (Answer(404, PROBLEM), Answer(429)):
        with (
            ScriptedServer([first, Answer(404, PROBLEM)]) as server,
            Metaban(server.url) as metaban,
            pytest.raises(NotFound),
        ):
            metaban.admin.arms.delete("a")


async def test_asyncio_client_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def hurry(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", hurry)
    with ScriptedServer([HANG_UP, Answer(503, PROBLEM, {"Retry-After": "2"}), OK, Answer(409, PROBLEM)]) as server:
        async with AsyncMetaban(server.url, KEY) as metaban:
            decision = await metaban.recommend("u", ARMS)
            with pytest.raises(Conflict):
                await metaban.recommend("u", ARMS)
            assert KEY not in repr(metaban)
    assert decision.arm_id == "a"
    pauses = [pause for pause in slept if pause]
    assert len(server.received) == 4
    assert len({request.body for request in server.received[:3]}) == 1
    assert pauses[0] <= 0.1
    assert 2 <= pauses[1] <= 2.2
