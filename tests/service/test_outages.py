"""The engine while its store is away: killed, stopped, swallowing bytes, out of memory; and after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.contracts import CheckResult
from service.engine import Engine
from service.errors import Unavailable
from service.metrics import Metrics
from store.errors import NotReplicated, StoreUnavailable
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.test_engine import ask, reward, settings, worker_running
from tests.worker.workshop import soon

#: Below the time-out of the driver's sockets: whoever waited for that would be too late.
AT_ONCE_S = 4.0
#: More at once than there are connections to the store.
CROWD = 160
MakeEngine = Callable[..., Engine]


@pytest.fixture
def valkey() -> Iterator[OwnValkey]:
    with own_valkey() as server:
        yield server


@pytest.fixture
async def make_engine(valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeEngine]:
    """Makes engines on the test's own Valkey, and stops them in the end."""
    monkeypatch.setattr("service.replica.TAIL_BLOCK_MS", 100)
    monkeypatch.setattr("service.breaker.PROBE_EVERY_S", 0.05)
    made: list[Engine] = []

    def make(url: str | None = None, **changes: Any) -> Engine:
        made.append(Engine.from_settings(settings(**changes), url or valkey.url, Metrics()))
        return made[-1]

    yield make
    for engine in made:
        async with asyncio.timeout(30):
            await engine.stop()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> Engine:
    """One that serves."""
    engine = make_engine()
    await engine.start()
    await engine.recommend(ask())
    return engine


async def is_ready(engine: Engine) -> bool:
    return all(check.ok for check in (await engine.readiness()).values())


async def logs(engine: Engine) -> bool:
    return (await engine.recommend(ask("someone"))).logged


@pytest.mark.parametrize("how", ["killed", "stopped"])
class TestAway:
    def go(self, valkey: OwnValkey, how: str) -> None:
        valkey.kill() if how == "killed" else valkey.pause()

    def come_back(self, valkey: OwnValkey, how: str) -> None:
        valkey.start() if how == "killed" else valkey.resume()

    async def test_answers_come_from_memory_and_say_so(self, engine: Engine, valkey: OwnValkey, how: str) -> None:
        async with worker_running(valkey.url):
            await engine.recommend(ask("known", decision_id="d1"))
            await engine.feedback([reward("d1")], wait_applied=True)
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            known = await engine.recommend(ask("known"))
            new = await engine.recommend(ask("new"))
            repeated = [await engine.recommend(ask("known", k=3, decision_id="again")) for _ in range(2)]
        assert (known.logged, known.cold_start, len(known.items)) == (False, None, 1)
        assert (new.logged, new.cold_start) == (False, "meta")
        assert [answer.logged for answer in repeated] == [False, False]
        assert repeated[0].items == repeated[1].items
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(StoreUnavailable):
                await engine.feedback([reward("d1", event="another")], wait_applied=False)
            with pytest.raises(StoreUnavailable):
                await engine.refresh_gauges()
            checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, False)

        self.come_back(valkey, how)
        await soon(lambda: logs(engine))
        await soon(lambda: is_ready(engine))
        outcome = await engine.feedback([reward("d1")], wait_applied=False)
        assert outcome.duplicates == 1, "what was acknowledged before is still known"
        outcome = await engine.feedback([reward("d1", event="another"), reward(new.decision_id)], wait_applied=False)
        assert (outcome.accepted, outcome.duplicates) == (1, 0)
        assert [rejection.code for rejection in outcome.rejected] == ["unknown-decision"]
        decided = await engine.recommend(ask("known", k=3, decision_id="again"))
        assert (decided.logged, decided.replayed) == (True, False)
        assert [item.arm_id for item in decided.items] == [item.arm_id for item in repeated[0].items]

    async def test_nobody_waits_long_and_no_connection_stays_behind(
        self, engine: Engine, valkey: OwnValkey, how: str
    ) -> None:
        await engine.recommend(ask(decision_id="d"))
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            for _ in range(3):
                asked = [engine.recommend(ask(f"user {number}")) for number in range(CROWD)]
                told = [engine.feedback([reward("d")], wait_applied=False) for _ in range(CROWD)]
                answers = await asyncio.gather(*asked)
                refusals = await asyncio.gather(*told, return_exceptions=True)
                assert not any(answer.logged for answer in answers)
                assert {type(refusal) for refusal in refusals} == {StoreUnavailable}
        self.come_back(valkey, how)
        await soon(lambda: logs(engine))
        async with asyncio.timeout(AT_ONCE_S):
            answers = await asyncio.gather(*(engine.recommend(ask(f"user {number}")) for number in range(CROWD)))
        assert all(answer.logged for answer in answers)

    async def test_refusing(self, make_engine: MakeEngine, valkey: OwnValkey, how: str) -> None:
        engine = make_engine(store_outage="refuse")
        await engine.start()
        assert (await engine.recommend(ask())).logged
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            for number in range(5):
                with pytest.raises(StoreUnavailable):
                    await engine.recommend(ask(decision_id=f"d{number}"))
            checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, True)
        self.come_back(valkey, how)
        await soon(lambda: is_ready(engine))
        assert (await engine.recommend(ask())).logged

    async def test_before_the_first_request_there_is_nothing_to_answer_from(
        self, make_engine: MakeEngine, valkey: OwnValkey, how: str
    ) -> None:
        engine = make_engine()
        await engine.start()
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            firsts = [engine.recommend(ask(decision_id=f"d{number}")) for number in range(20)]
            refusals = await asyncio.gather(*firsts, return_exceptions=True)
            checks = await engine.readiness()
        assert {type(refusal) for refusal in refusals} == {Unavailable}
        assert (checks["store"].ok, checks["store"].vital) == (False, True)
        self.come_back(valkey, how)
        await soon(lambda: is_ready(engine))
        assert (await engine.recommend(ask())).logged


async def test_a_write_whose_reply_was_lost_is_the_decision_that_was_answered(
    engine: Engine, valkey: OwnValkey
) -> None:
    async with worker_running(valkey.url):
        await engine.recommend(ask("u", decision_id="d"))
        await engine.feedback([reward("d")], wait_applied=True)
    valkey.pause()
    answer = await engine.recommend(ask("u", k=2))  # in memory: the write is all that is asked of the store
    assert not answer.logged
    valkey.resume()
    await soon(lambda: logs(engine))
    with valkey.client() as client:
        written = list(client.scan_iter(f"*decision:{answer.decision_id}"))
    assert len(written) == 1, "the bytes had been sent"
    repeated = await engine.recommend(ask("u", k=2, decision_id=answer.decision_id))
    assert (repeated.replayed, repeated.logged, repeated.items) == (True, True, answer.items)


async def test_a_store_that_goes_away_while_readiness_is_asked_for(
    engine: Engine, valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = engine.snapshots.check

    async def look_too_late() -> CheckResult | None:
        valkey.kill()
        return await look()

    monkeypatch.setattr(engine.snapshots, "check", look_too_late)
    checks = await engine.readiness()
    assert (checks["store"].ok, checks["store"].vital) == (False, False)


async def test_a_store_without_memory(engine: Engine, valkey: OwnValkey) -> None:
    with valkey.client() as client:
        client.config_set("maxmemory", 1)
        assert not (await engine.recommend(ask())).logged
        await asyncio.sleep(0.3)  # several probes
        checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, False)
        with pytest.raises(StoreUnavailable):
            await engine.feedback([reward("d")], wait_applied=False)
        client.config_set("maxmemory", 0)
    await soon(lambda: logs(engine))


class Proxy:
    """Between service and store; connections can be made to swallow what is sent."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._deaf: set[int] = set()
        self.connections = 0

    def swallow(self) -> None:
        """Every connection there is: the network has forgotten it, and tells nobody."""
        self._deaf = set(range(self.connections))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        onward, back = await asyncio.open_unix_connection(self._target)
        await asyncio.gather(self._pass(number, reader, back), self._pass(number, onward, writer))

    async def _pass(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                if number not in self._deaf:
                    writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxy_to(valkey: OwnValkey, path: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(valkey.url.removeprefix("unix://"))
    server = await asyncio.start_unix_server(proxy.serve, path)
    try:
        yield proxy
    finally:
        server.close()


async def test_connections_that_lead_nowhere_are_replaced(
    make_engine: MakeEngine, valkey: OwnValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.breaker.HEARTBEAT_S", 60.0)
    async with proxy_to(valkey, tmp_path / "p.sock") as proxy:
        engine = make_engine(f"unix://{tmp_path}/p.sock")
        await engine.start()
        await asyncio.gather(*(engine.recommend(ask(f"user {number}")) for number in range(30)))
        proxy.swallow()
        async with asyncio.timeout(AT_ONCE_S):
            assert not (await engine.recommend(ask())).logged
            await soon(lambda: logs(engine))
            # None of the idle connections of before is tried, each of which would cost an answer its record.
            for _ in range(20):
                assert (await engine.recommend(ask())).logged


async def test_nor_are_those_that_wait_for_replicas(
    make_engine: MakeEngine, valkey: OwnValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.breaker.HEARTBEAT_S", 60.0)
    async with proxy_to(valkey, tmp_path / "p.sock") as proxy:
        engine = make_engine(
            f"unix://{tmp_path}/p.sock", redis_url=valkey.url, durability="replicated", replica_wait_ms=100
        )
        await engine.start()
        await engine.recommend(ask(decision_id="d"))
        with pytest.raises(NotReplicated):  # there is no replica, as the store says
            await engine.feedback([reward("d")], wait_applied=False)
        proxy.swallow()
        async with asyncio.timeout(AT_ONCE_S):
            assert not (await engine.recommend(ask())).logged
            await soon(lambda: logs(engine))
            with pytest.raises(NotReplicated):
                await engine.feedback([reward("d")], wait_applied=False)
