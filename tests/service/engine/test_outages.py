"""The engine during and after outages of the store: killed, stopped, silent, or out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from metaban.service.engine.commands import CheckResult
from metaban.service.engine.engine import Connections, Engine
from metaban.service.errors import Unavailable
from metaban.service.telemetry.metrics import Metrics
from metaban.store.errors import NotReplicated, StoreUnavailable
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.engines import ask, reward, settings, worker_running
from tests.worker.workshop import soon

#: Socket time-out of the driver. Requests that return within AT_ONCE_S have not waited for it.
SOCKET_TIMEOUT_S = 120
AT_ONCE_S = 40.0
#: More requests than there are connections to the store.
CROWD = 160
MakeEngine = Callable[..., Engine]


@pytest.fixture
def valkey() -> Iterator[OwnValkey]:
    with own_valkey() as server:
        yield server


@pytest.fixture
async def make_engine(valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeEngine]:
    """Makes engines on the test's own Valkey and stops them after the test."""
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
    monkeypatch.setattr("metaban.service.engine.store_guard.PROBE_EVERY_S", 0.05)
    made: list[Engine] = []
    connected: list[Connections] = []

    def make(url: str | None = None, **changes: Any) -> Engine:
        connected.append(Connections(f"{url or valkey.url}?socket_timeout={SOCKET_TIMEOUT_S}"))
        made.append(Engine.from_settings(settings(**changes), connected[-1], Metrics()))
        return made[-1]

    yield make
    for engine, connections in zip(made, connected, strict=True):
        async with asyncio.timeout(30):
            await engine.stop()
            await connections.aclose()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> Engine:
    """An engine that has served a request."""
    engine = make_engine()
    await engine.start()
    await engine.decider.recommend(ask())
    return engine


async def is_ready(engine: Engine) -> bool:
    return all(check.ok for check in (await engine.readiness()).values())


async def logs(engine: Engine) -> bool:
    return (await engine.decider.recommend(ask("someone"))).logged


@pytest.mark.parametrize("how", ["killed", "stopped"])
class TestAway:
    def go(self, valkey: OwnValkey, how: str) -> None:
        valkey.kill() if how == "killed" else valkey.pause()

    def come_back(self, valkey: OwnValkey, how: str) -> None:
        valkey.start() if how == "killed" else valkey.resume()

    async def test_answers_from_memory_are_marked_unlogged(self, engine: Engine, valkey: OwnValkey, how: str) -> None:
        async with worker_running(valkey.url):
            await engine.decider.recommend(ask("known", decision_id="d1"))
            await engine.feedback.accept([reward("d1")], wait_applied=True)
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            known = await engine.decider.recommend(ask("known"))
            new = await engine.decider.recommend(ask("new"))
            repeated = [await engine.decider.recommend(ask("known", k=3, decision_id="again")) for _ in range(2)]
        assert (known.logged, known.decision.cold_start, len(known.decision.items)) == (False, None, 1)
        assert (new.logged, new.decision.cold_start) == (False, "meta")
        assert [answer.logged for answer in repeated] == [False, False]
        assert repeated[0].decision.items == repeated[1].decision.items
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(StoreUnavailable):
                await engine.feedback.accept([reward("d1", event="another")], wait_applied=False)
            with pytest.raises(StoreUnavailable):
                await engine.refresh_gauges()
            checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, False)

        self.come_back(valkey, how)
        await soon(lambda: logs(engine))
        await soon(lambda: is_ready(engine))
        outcome = await engine.feedback.accept([reward("d1")], wait_applied=False)
        assert outcome.duplicates == 1, "what was acknowledged before is still known"
        outcome = await engine.feedback.accept(
            [reward("d1", event="another"), reward(new.decision.decision_id)], wait_applied=False
        )
        assert (outcome.accepted, outcome.duplicates) == (1, 0)
        assert [rejection.code for rejection in outcome.rejected] == ["unknown-decision"]
        decided = await engine.decider.recommend(ask("known", k=3, decision_id="again"))
        assert (decided.logged, decided.replayed) == (True, False)
        assert [item.arm_id for item in decided.decision.items] == [item.arm_id for item in repeated[0].decision.items]

    async def test_requests_return_quickly_and_leave_no_connection(
        self, engine: Engine, valkey: OwnValkey, how: str
    ) -> None:
        await engine.decider.recommend(ask(decision_id="d"))
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            for _ in range(3):
                asked = [engine.decider.recommend(ask(f"user {number}")) for number in range(CROWD)]
                told = [engine.feedback.accept([reward("d")], wait_applied=False) for _ in range(CROWD)]
                answers = await asyncio.gather(*asked)
                refusals = await asyncio.gather(*told, return_exceptions=True)
                assert not any(answer.logged for answer in answers)
                assert {type(refusal) for refusal in refusals} == {StoreUnavailable}
        self.come_back(valkey, how)
        await soon(lambda: logs(engine))
        async with asyncio.timeout(AT_ONCE_S):
            answers = await asyncio.gather(
                *(engine.decider.recommend(ask(f"user {number}")) for number in range(CROWD))
            )
        assert all(answer.logged for answer in answers)

    async def test_store_outage_refuse(self, make_engine: MakeEngine, valkey: OwnValkey, how: str) -> None:
        engine = make_engine(store_outage="refuse")
        await engine.start()
        assert (await engine.decider.recommend(ask())).logged
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            for number in range(5):
                with pytest.raises(StoreUnavailable):
                    await engine.decider.recommend(ask(decision_id=f"d{number}"))
            checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, True)
        self.come_back(valkey, how)
        await soon(lambda: is_ready(engine))
        assert (await engine.decider.recommend(ask())).logged

    async def test_outage_before_the_first_request(self, make_engine: MakeEngine, valkey: OwnValkey, how: str) -> None:
        engine = make_engine()
        await engine.start()
        self.go(valkey, how)
        async with asyncio.timeout(AT_ONCE_S):
            firsts = [engine.decider.recommend(ask(decision_id=f"d{number}")) for number in range(20)]
            refusals = await asyncio.gather(*firsts, return_exceptions=True)
            checks = await engine.readiness()
        assert {type(refusal) for refusal in refusals} == {Unavailable}
        assert (checks["store"].ok, checks["store"].vital) == (False, True)
        self.come_back(valkey, how)
        await soon(lambda: is_ready(engine))
        assert (await engine.decider.recommend(ask())).logged


async def test_decision_whose_write_reply_was_lost(engine: Engine, valkey: OwnValkey) -> None:
    async with worker_running(valkey.url):
        await engine.decider.recommend(ask("u", decision_id="d"))
        await engine.feedback.accept([reward("d")], wait_applied=True)
    valkey.pause()
    answer = await engine.decider.recommend(ask("u", k=2))  # in memory: the store gets only the write
    assert not answer.logged
    valkey.resume()
    await soon(lambda: logs(engine))
    with valkey.client() as client:
        written = list(client.scan_iter(f"*decision:{answer.decision.decision_id}"))
    assert len(written) == 1, "the bytes had been sent"
    repeated = await engine.decider.recommend(ask("u", k=2, decision_id=answer.decision.decision_id))
    assert (repeated.replayed, repeated.logged, repeated.decision.items) == (True, True, answer.decision.items)


async def test_outage_during_the_readiness_check(
    engine: Engine, valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = engine.snapshots.check

    async def look_too_late() -> CheckResult | None:
        valkey.kill()
        return await look()

    monkeypatch.setattr(engine.snapshots, "check", look_too_late)
    checks = await engine.readiness()
    assert (checks["store"].ok, checks["store"].vital) == (False, False)


async def test_store_out_of_memory(engine: Engine, valkey: OwnValkey) -> None:
    with valkey.client() as client:
        client.config_set("maxmemory", 1)
        assert not (await engine.decider.recommend(ask())).logged
        await asyncio.sleep(0.3)  # several probes
        checks = await engine.readiness()
        assert (checks["store"].ok, checks["store"].vital) == (False, False)
        with pytest.raises(StoreUnavailable):
            await engine.feedback.accept([reward("d")], wait_applied=False)
        client.config_set("maxmemory", 0)
    await soon(lambda: logs(engine))


class Proxy:
    """A proxy between service and store that can silently drop data."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._deaf: set[int] = set()
        self.connections = 0

    def swallow(self) -> None:
        """Drop all data of the existing connections."""
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


async def test_dead_connections_are_replaced(
    make_engine: MakeEngine, valkey: OwnValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaban.service.engine.store_guard.HEARTBEAT_S", 60.0)
    async with proxy_to(valkey, tmp_path / "p.sock") as proxy:
        engine = make_engine(f"unix://{tmp_path}/p.sock")
        await engine.start()
        await asyncio.gather(*(engine.decider.recommend(ask(f"user {number}")) for number in range(30)))
        proxy.swallow()
        async with asyncio.timeout(AT_ONCE_S):
            assert not (await engine.decider.recommend(ask())).logged
            await soon(lambda: logs(engine))
            # No old idle connection is used; each would leave a decision unrecorded.
            for _ in range(20):
                assert (await engine.decider.recommend(ask())).logged


async def test_dead_connections_that_wait_for_replicas_are_replaced(
    make_engine: MakeEngine, valkey: OwnValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaban.service.engine.store_guard.HEARTBEAT_S", 60.0)
    async with proxy_to(valkey, tmp_path / "p.sock") as proxy:
        engine = make_engine(
            f"unix://{tmp_path}/p.sock", redis_url=valkey.url, durability="replicated", replica_wait_ms=100
        )
        await engine.start()
        await engine.decider.recommend(ask(decision_id="d"))
        with pytest.raises(NotReplicated):  # the store has no replica
            await engine.feedback.accept([reward("d")], wait_applied=False)
        proxy.swallow()
        async with asyncio.timeout(AT_ONCE_S):
            assert not (await engine.decider.recommend(ask())).logged
            await soon(lambda: logs(engine))
            with pytest.raises(NotReplicated):
                await engine.feedback.accept([reward("d")], wait_applied=False)
