"""The store guard alone: what opens it, what it prevents, and what closes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from metaban.service.engine import store_guard as breaker_module
from metaban.service.engine.store_guard import StoreGuard
from metaban.store.errors import BacklogFull, StoreError, StoreReset, StoreUnavailable
from tests.worker.workshop import soon


class Store:
    """A store that answers, fails with an error, or hangs."""

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
async def breaker(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoreGuard]:
    monkeypatch.setattr(breaker_module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(breaker_module, "PROBE_BUDGET_S", 0.05)
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(breaker_module, "DOUBT_S", 0.05)
    monkeypatch.setattr(breaker_module, "STEP_S", 0.01)
    breaker = StoreGuard(store.probe)
    breaker.start()
    await until(lambda: store.probes == 1 and not store.probing)
    yield breaker
    async with asyncio.timeout(30):
        await breaker.stop()


async def until(holds: Callable[[], bool]) -> None:
    async def holds_now() -> bool:
        return holds()

    await soon(holds_now)


async def test_results_are_returned(store: Store, breaker: StoreGuard) -> None:
    assert await breaker.call(store.work) == "done"
    assert await breaker.call(store.work, budget_s=1.0) == "done"
    assert breaker.outage is None


async def test_no_calls_after_a_failure_until_a_probe_succeeds(store: Store, breaker: StoreGuard) -> None:
    store.error = StoreUnavailable("refused")
    with pytest.raises(StoreUnavailable):
        await breaker.call(store.work)
    assert str(breaker.outage) == "refused"
    store.answering.clear()  # a call would hang now
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="refused"):
            await breaker.call(store.work)
    assert store.calls == 1
    probes = store.probes
    store.answering.set()
    await until(lambda: store.probes > probes + 3)
    assert breaker.outage is not None
    store.error = None
    await until(lambda: breaker.outage is None)
    assert await breaker.call(store.work) == "done"
    assert store.probing_at_once == 1


async def test_timeout_is_a_failure(store: Store, breaker: StoreGuard) -> None:
    store.answering.clear()
    with pytest.raises(StoreUnavailable, match="in time"):
        await breaker.call(store.work, budget_s=0.05)
    assert breaker.outage is not None
    store.answering.set()
    await until(lambda: breaker.outage is None)


async def test_untrusted_calls_fail_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(breaker_module, "PROBE_EVERY_S", 60.0)
    monkeypatch.setattr(breaker_module, "STEP_S", 0.01)
    breaker = StoreGuard(store.probe, trust_calls=False)
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
    assert breaker.outage is None
    store.error = StoreUnavailable("all of them")
    with pytest.raises(StoreUnavailable, match="one of several"):
        await breaker.call(one_server_away)
    await until(lambda: breaker.outage is store.error)
    await breaker.stop()


async def test_calls_without_a_budget_are_cancelled_when_a_probe_fails(store: Store, breaker: StoreGuard) -> None:
    store.answering.clear()
    waiting = [asyncio.create_task(breaker.call(store.work)) for _ in range(5)]
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 5
    assert store.calls == 5
    assert breaker.outage is not None


async def test_slow_call_continues_while_probes_succeed(store: Store, breaker: StoreGuard) -> None:
    passing = asyncio.Event()

    async def slow() -> str:
        await passing.wait()
        return "done"

    waiting = asyncio.create_task(breaker.call(slow))
    probes = store.probes
    await until(lambda: store.probes > probes)
    await asyncio.sleep(0.1)
    assert breaker.outage is None
    passing.set()
    assert await waiting == "done"


async def test_lost_cancellation_is_repeated(store: Store, breaker: StoreGuard) -> None:
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


async def test_outage_is_noticed_without_a_call(
    store: Store, breaker: StoreGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "HEARTBEAT_S", 0.02)
    await breaker.stop()
    watching = StoreGuard(store.probe)
    watching.start()
    store.error = StoreUnavailable("refused")
    await until(lambda: watching.outage is not None)
    store.error = None
    await until(lambda: watching.outage is None)
    await watching.stop()


async def test_refusal_by_the_store_is_no_outage(store: Store, breaker: StoreGuard) -> None:
    for error in (StoreError("no such command"), BacklogFull("full", retry_after_s=1), ValueError("ours")):
        store.error = error
        with pytest.raises(type(error)):
            await breaker.call(store.work)
        assert breaker.outage is None


async def test_probe_that_finds_another_store(store: Store, breaker: StoreGuard) -> None:
    store.error = StoreReset("another one")
    await breaker.check()
    assert isinstance(breaker.outage, StoreReset)
    with pytest.raises(StoreReset, match="another one"):
        await breaker.call(store.work)
    store.error = None
    await until(lambda: breaker.outage is None)


@pytest.mark.parametrize("error", [StoreError("wrong password"), KeyError("unheard of")])
async def test_any_error_of_a_probe_is_an_outage(store: Store, breaker: StoreGuard, error: Exception) -> None:
    store.error = error
    await breaker.check()
    assert isinstance(breaker.outage, StoreUnavailable)
    store.error = None
    await until(lambda: breaker.outage is None)


async def test_failure_of_an_older_call_is_ignored(store: Store, breaker: StoreGuard) -> None:
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
    await until(lambda: breaker.outage is None)
    passing.set()
    with pytest.raises(StoreUnavailable):
        await waiting
    assert breaker.outage is None


async def test_success_of_an_older_call_does_not_close_the_guard(store: Store, breaker: StoreGuard) -> None:
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
    assert breaker.outage is not None
    await until(lambda: breaker.outage is None)
    assert store.probes > probes


async def test_blocked_event_loop_is_no_outage(store: Store, breaker: StoreGuard) -> None:
    async def answered_meanwhile() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, answer.set_result, "done")
        time.sleep(0.3)  # noqa: ASYNC251 - the answer and the end of the budget are both due when this is over
        return await answer

    assert await breaker.call(answered_meanwhile, budget_s=0.05) == "done"
    assert breaker.outage is None


async def test_cancelled_call_is_no_outage(store: Store, breaker: StoreGuard) -> None:
    store.answering.clear()
    waiting = asyncio.create_task(breaker.call(store.work, budget_s=10.0))
    await until(lambda: store.calls == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert breaker.outage is None
