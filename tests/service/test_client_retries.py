"""When the client tries again, how long it waits, and what it must not repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from answering import HANG_UP, SILENCE, Answering, Say

from service.client import AsyncMetaban, Metaban
from service.client_calls import recommend
from service.client_core import Pause, Policy, Send
from service.client_errors import (
    ApiError,
    Conflict,
    ConnectionFailed,
    NotFound,
    RateLimited,
    Unavailable,
)
from tests.service.test_client import ARMS, KEY, OK, PROBLEM, ask, create_snapshot, pauses, unused_port

__all__ = ["pauses"]


@pytest.mark.parametrize(
    ("answers", "call", "requests", "raised"),
    [
        ([HANG_UP, OK], ask, 2, None),
        ([Say(503), Say(429), Say(502), Say(504), OK], ask, 5, None),
        ([HANG_UP], ask, 5, ConnectionFailed),
        ([Say(503)], ask, 5, Unavailable),
        ([Say(429)], ask, 5, RateLimited),
        ([Say(500), OK], ask, 1, ApiError),
        ([Say(501), OK], ask, 1, ApiError),
        *[([Say(status), OK], ask, 1, ApiError) for status in (301, 400, 401, 403, 404, 405, 408, 409, 413, 422, 425)],
        ([HANG_UP], create_snapshot, 1, ConnectionFailed),
        *[([Say(status)], create_snapshot, 1, ApiError) for status in (429, 500, 502, 503, 504)],
    ],
)
def test_tries(
    answers: list[Say],
    call: Callable[[Answering], object],
    requests: int,
    raised: type[Exception] | None,
    pauses: list[float],
) -> None:
    with Answering(answers) as server:
        if raised is None:
            call(server)
        else:
            with pytest.raises(raised):
                call(server)
    assert len(server.heard) == requests
    assert len({heard.body for heard in server.heard}) == 1, "every try is the same request"
    assert len(pauses) == requests - 1


def test_retries_can_be_turned_off(pauses: list[float]) -> None:
    with Answering([Say(503)]) as server:
        with pytest.raises(Unavailable):
            ask(server, retries=0)
        assert len(server.heard) == 1


@pytest.mark.parametrize(
    "call", [lambda metaban: metaban.recommend("u"), lambda metaban: metaban.admin.snapshots.create()]
)
def test_where_nobody_listens_even_what_must_not_be_repeated_is_tried_again(
    call: Callable[[Metaban], object], pauses: list[float]
) -> None:
    with Metaban(f"http://127.0.0.1:{unused_port()}") as metaban, pytest.raises(ConnectionFailed) as caught:
        call(metaban)
    assert not caught.value.sent
    assert "after 5 tries" in str(caught.value)
    assert len(pauses) == 4


def test_a_silent_service_is_given_up_on(pauses: list[float]) -> None:
    with Answering([SILENCE]) as server, pytest.raises(ConnectionFailed, match="ReadTimeout") as caught:
        ask(server, timeout_s=0.05, retries=1)
    assert caught.value.sent
    assert len(server.heard) == 2


def test_pauses_double_with_jitter(pauses: list[float]) -> None:
    with Answering([Say(503)]) as server, pytest.raises(Unavailable):
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
    with Answering([Say(503, PROBLEM, {"Retry-After": retry_after}), OK]) as server:
        ask(server)
    assert least <= pauses[0] <= least + 0.1


def test_a_pause_beyond_the_deadline_is_not_begun(pauses: list[float]) -> None:
    with Answering([Say(429, PROBLEM, {"Retry-After": "40"}), OK]) as server, pytest.raises(RateLimited) as caught:
        ask(server, deadline_s=30.0)
    assert caught.value.retry_after_s == 40
    assert len(server.heard) == 1
    assert pauses == []


def test_the_deadline_is_for_all_tries() -> None:
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


def test_what_an_earlier_try_deleted_is_deleted(pauses: list[float]) -> None:
    for first in (HANG_UP, Say(504)):
        with Answering([first, Say(404, PROBLEM)]) as server, Metaban(server.url) as metaban:
            assert metaban.admin.arms.delete("a") is None
    for first in (Say(404, PROBLEM), Say(429)):
        with Answering([first, Say(404, PROBLEM)]) as server, Metaban(server.url) as metaban, pytest.raises(NotFound):
            metaban.admin.arms.delete("a")


async def test_the_asyncio_client_tries_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def hurry(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", hurry)
    with Answering([HANG_UP, Say(503, PROBLEM, {"Retry-After": "2"}), OK, Say(409, PROBLEM)]) as server:
        async with AsyncMetaban(server.url, KEY) as metaban:
            decision = await metaban.recommend("u", ARMS)
            with pytest.raises(Conflict):
                await metaban.recommend("u", ARMS)
            assert KEY not in repr(metaban)
    assert decision.arm_id == "a"
    pauses = [pause for pause in slept if pause]
    assert len(server.heard) == 4
    assert len({heard.body for heard in server.heard[:3]}) == 1
    assert pauses[0] <= 0.1
    assert 2 <= pauses[1] <= 2.2
