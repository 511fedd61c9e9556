"""The breaker by itself: what trips it, what it spares, and what closes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from service import breaker as breaker_module
from service.breaker import StoreBreaker
from store.errors import BacklogFull, StoreError, StoreReset, StoreUnavailable
from tests.worker.workshop import soon


class Store:
    """Does what it is told to: answers, fails with an error, or keeps everyone waiting."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.calls = 0
        self.probes = 0
        self.probing = 0
        self.probing_at_once = 0

    async def work(self) -> str:
        self.calls += 1
        return await self._answer()

    async def probe(self) -> None:
        self.probes += 1
        self.probing += 1
        self.probing_at_once = max(self.probing_at_once, self.probing)
        try:
            await self._answer()
        finally:
            self.probing -= 1

    async def _answer(self) -> str:
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return "done"


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def breaker(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoreBreaker]:
    monkeypatch.setattr(breaker_module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(breaker_module, "PROBE_BUDGET_S", 0.05)
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(breaker_module, "DOUBT_S", 0.05)
    monkeypatch.setattr(breaker_module, "STEP_S", 0.01)
    breaker = StoreBreaker(store.probe)
    breaker.start()
    await until(lambda: store.probes == 1 and not store.probing)
    yield breaker
    async with asyncio.timeout(30):
        await breaker.stop()


async def until(holds: Callable[[], bool]) -> None:
    async def holds_now() -> bool:
        return holds()

    await soon(holds_now)


async def test_answers_pass(store: Store, breaker: StoreBreaker) -> None:
    assert await breaker.call(store.work) == "done"
    assert await breaker.call(store.work, budget_s=1.0) == "done"
    assert breaker.away is None


async def test_after_a_failure_nobody_asks_until_a_probe_was_answered(store: Store, breaker: StoreBreaker) -> None:
    store.error = StoreUnavailable("refused")
    with pytest.raises(StoreUnavailable):
        await breaker.call(store.work)
    assert str(breaker.away) == "refused"
    store.answering.clear()  # whoever touched it now would wait
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="refused"):
            await breaker.call(store.work)
    assert store.calls == 1
    probes = store.probes
    store.answering.set()
    await until(lambda: store.probes > probes + 3)
    assert breaker.away is not None
    store.error = None
    await until(lambda: breaker.away is None)
    assert await breaker.call(store.work) == "done"
    assert store.probing_at_once == 1


async def test_a_budget_that_ran_out_is_a_failure(store: Store, breaker: StoreBreaker) -> None:
    store.answering.clear()
    with pytest.raises(StoreUnavailable, match="in time"):
        await breaker.call(store.work, budget_s=0.05)
    assert breaker.away is not None
    store.answering.set()
    await until(lambda: breaker.away is None)


async def test_calls_that_are_not_trusted_fail_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(breaker_module, "PROBE_EVERY_S", 60.0)
    monkeypatch.setattr(breaker_module, "STEP_S", 0.01)
    breaker = StoreBreaker(store.probe, trust_calls=False)
    breaker.start()
    await until(lambda: store.probes == 1 and not store.probing)

    async def one_server_away() -> None:
        raise StoreUnavailable("one of several")

    with pytest.raises(StoreUnavailable, match="one of several"):
        await breaker.call(one_server_away)
    with pytest.raises(StoreUnavailable, match="in time"):
        await breaker.call(asyncio.Event().wait, budget_s=0.02)
    assert await breaker.call(store.work) == "done"
    await until(lambda: store.probes >= 2 and not store.probing)
    assert breaker.away is None
    store.error = StoreUnavailable("all of them")
    with pytest.raises(StoreUnavailable, match="one of several"):
        await breaker.call(one_server_away)
    await until(lambda: breaker.away is store.error)
    await breaker.stop()


async def test_what_waits_without_a_budget_is_given_up_when_a_probe_fails(store: Store, breaker: StoreBreaker) -> None:
    store.answering.clear()
    waiting = [asyncio.create_task(breaker.call(store.work)) for _ in range(5)]
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 5
    assert store.calls == 5
    assert breaker.away is not None


async def test_a_call_may_take_its_time_while_probes_are_answered(store: Store, breaker: StoreBreaker) -> None:
    passing = asyncio.Event()

    async def slow() -> str:
        await passing.wait()
        return "done"

    waiting = asyncio.create_task(breaker.call(slow))
    probes = store.probes
    await until(lambda: store.probes > probes)
    await asyncio.sleep(0.1)
    assert breaker.away is None
    passing.set()
    assert await waiting == "done"


async def test_a_cancellation_that_got_lost_is_repeated(store: Store, breaker: StoreBreaker) -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
        await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable, match="in time"):
        await asyncio.wait_for(breaker.call(deaf, budget_s=0.05), 30)
    assert lost == 3
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_outage_is_noticed_without_a_call(
    store: Store, breaker: StoreBreaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 0.02)
    await breaker.stop()
    watching = StoreBreaker(store.probe)
    watching.start()
    store.error = StoreUnavailable("refused")
    await until(lambda: watching.away is not None)
    store.error = None
    await until(lambda: watching.away is None)
    await watching.stop()


async def test_what_the_store_refuses_for_a_reason_is_no_outage(store: Store, breaker: StoreBreaker) -> None:
    for error in (StoreError("no such command"), BacklogFull("full", retry_after_s=1), ValueError("ours")):
        store.error = error
        with pytest.raises(type(error)):
            await breaker.call(store.work)
        assert breaker.away is None


async def test_a_probe_that_finds_another_store(store: Store, breaker: StoreBreaker) -> None:
    store.error = StoreReset("another one")
    await breaker.check()
    assert isinstance(breaker.away, StoreReset)
    with pytest.raises(StoreReset, match="another one"):
        await breaker.call(store.work)
    store.error = None
    await until(lambda: breaker.away is None)


@pytest.mark.parametrize("error", [StoreError("wrong password"), KeyError("unheard of")])
async def test_whatever_a_probe_fails_with_the_store_is_away(
    store: Store, breaker: StoreBreaker, error: Exception
) -> None:
    store.error = error
    await breaker.check()
    assert isinstance(breaker.away, StoreUnavailable)
    store.error = None
    await until(lambda: breaker.away is None)


async def test_a_failure_from_before_the_outage_is_old_news(store: Store, breaker: StoreBreaker) -> None:
    late, passing = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        late.set()
        await passing.wait()
        raise StoreUnavailable("cut")

    async def failing() -> None:
        raise StoreUnavailable("cut")

    waiting = asyncio.create_task(breaker.call(slow))
    await late.wait()
    with pytest.raises(StoreUnavailable):
        await breaker.call(failing)
    await until(lambda: breaker.away is None)
    passing.set()
    with pytest.raises(StoreUnavailable):
        await waiting
    assert breaker.away is None


async def test_an_answer_to_an_earlier_question_does_not_close_it(store: Store, breaker: StoreBreaker) -> None:
    store.answering.clear()
    checking = asyncio.create_task(breaker.check())
    await until(lambda: store.probing == 1)

    async def failing() -> None:
        raise StoreUnavailable("cut")

    with pytest.raises(StoreUnavailable):
        await breaker.call(failing)
    probes = store.probes
    store.answering.set()
    await checking
    assert breaker.away is not None
    await until(lambda: breaker.away is None)
    assert store.probes > probes


async def test_a_loop_that_was_held_up_does_not_blame_the_store(store: Store, breaker: StoreBreaker) -> None:
    async def answered_meanwhile() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, answer.set_result, "done")
        time.sleep(0.3)  # noqa: ASYNC251 - the answer and the end of the budget are both due when this is over
        return await answer

    assert await breaker.call(answered_meanwhile, budget_s=0.05) == "done"
    assert breaker.away is None


async def test_one_who_is_cancelled_is_no_outage(store: Store, breaker: StoreBreaker) -> None:
    store.answering.clear()
    waiting = asyncio.create_task(breaker.call(store.work, budget_s=10.0))
    await until(lambda: store.calls == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert breaker.away is None
