"""The fusion model of a process: new and older versions, refusals, outages of the store and forgotten users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from structlog.testing import capture_logs

from metaban.service.engine.commands import Features, Recommendation
from metaban.service.engine.engine import Connections, Engine
from metaban.service.engine.model.warm_starts import ServedFusion
from metaban.service.telemetry.metrics import Metrics
from metaban.store.client.connection import connect, drop_idle
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.engine.fusion_models import fusion_store, publish
from tests.service.engines import ask, hold_puts, settings
from tests.worker.workshop import soon

ANN: Features = [0.7, -1.1]


@pytest.fixture
def valkey() -> Iterator[OwnValkey]:
    with own_valkey() as server:
        yield server


@pytest.fixture
async def store(valkey: OwnValkey) -> AsyncIterator[Redis]:
    store = connect(valkey.url)
    yield store
    await store.aclose()


@pytest.fixture
async def engine(valkey: OwnValkey, store: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine that serves a fusion model."""
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
    monkeypatch.setattr("metaban.service.engine.model.replica.UNAVAILABLE_PAUSE_S", 0.02)
    monkeypatch.setattr("metaban.service.engine.store_guard.PROBE_EVERY_S", 0.05)
    connections = Connections(valkey.url)
    engine = Engine.from_settings(settings(), connections, Metrics())
    await engine.start()
    await decide(engine, "somebody", [0.0, 0.0])
    await publish(store, namespace="shop")
    await serves(engine, 1)
    yield engine
    async with asyncio.timeout(30):
        await engine.stop()
        await connections.aclose()


async def decide(engine: Engine, user: str, profile: Features | None = None) -> Recommendation:
    return await engine.decider.recommend(replace(ask(user), user_features=profile))


def fusion(engine: Engine) -> ServedFusion:
    assert engine.serving is not None
    return engine.serving.fusion


async def serves(engine: Engine, version: int | None) -> None:
    async def does() -> bool:
        return fusion(engine).version == version

    await soon(does, f"fusion {version} served")


async def refused(store: Redis, version: int, **changes: Any) -> list[Any]:
    """The log lines of publishing a version that is refused."""
    with capture_logs() as logs:
        await publish(store, version, namespace="shop", **changes)
        await soon(lambda: is_told(logs), "refused")
    return logs


async def is_told(logs: list[Any]) -> bool:
    return any(line["event"] == "fusion_refused" for line in logs)


@pytest.mark.parametrize(
    "changes",
    [
        {"trust": np.array(2.0)},
        {"trust": np.zeros(3)},
        {"prior_mean": np.zeros(2)},
        {"fusion.inducing": np.full((1, 2), np.nan)},
        {"fusion.widths": np.zeros((0,), dtype=np.int64)},
        {"profile_centre": np.zeros(9)},
        {"basis.scale": np.zeros(1, dtype=np.uint8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_invalid_fusion_model_is_refused(engine: Engine, store: Redis, changes: dict[str, np.ndarray]) -> None:
    """The previous version stays in use until the next valid one."""
    logs = await refused(store, 2, **changes)
    assert [line["version"] for line in logs if line["event"] == "fusion_refused"] == [2]
    assert fusion(engine).version == 1
    assert (await decide(engine, "ann", ANN)).decision.cold_start == "fusion"
    assert (await engine.readiness())["replica"].ok
    await publish(store, 3, namespace="shop")
    await serves(engine, 3)


async def test_damaged_fusion_model_is_refused(engine: Engine, store: Redis, valkey: OwnValkey) -> None:
    keys = engine.live.record.keys
    for name in ("blob", "sources", "report"):
        await store.hset(keys.fusion, mapping={name: b"nonsense", "stamp": f"of {name}"})
        with capture_logs() as logs:
            await store.xadd(keys.epoch_log, {"n": 0})
            await soon(partial(is_told, logs), name)
        assert fusion(engine).version == 1
        shown = await engine.fusion.describe()
        assert (shown.record, shown.served) == (None, 1)
    # A new process has no fusion model and still serves.
    connections = Connections(valkey.url)
    other = Engine.from_settings(settings(), connections, Metrics())
    try:
        await other.start()
        assert fusion(other).version is None
        assert (await decide(other, "bob", ANN)).decision.cold_start == "meta"
    finally:
        await other.stop()
        await connections.aclose()


async def test_fusion_model_is_loaded_at_the_start(engine: Engine, valkey: OwnValkey) -> None:
    connections = Connections(valkey.url)
    other = Engine.from_settings(settings(), connections, Metrics())
    try:
        await other.start()
        assert fusion(other).version == 1
        assert (await decide(other, "bob", ANN)).decision.cold_start == "fusion"
    finally:
        await other.stop()
        await connections.aclose()


async def test_rolled_back_store(engine: Engine, store: Redis, valkey: OwnValkey) -> None:
    """The process follows to an older version, and to another one of the same number."""
    valkey.keep()
    for rounds in range(2):
        await publish(store, 2, namespace="shop", trust=np.array(0.1 + rounds / 10))
        await serves(engine, 2)
        valkey.set_back()
        await drop_idle(store)
        await serves(engine, 1)
    assert (await (await fusion_store(store, "shop")).identity() or (0,))[0] == 1


async def test_fusion_model_missing_in_the_store(engine: Engine, store: Redis) -> None:
    keys = engine.live.record.keys
    await store.delete(keys.fusion, keys.fusion_sources)
    await store.xadd(keys.epoch_log, {"n": 0})
    await serves(engine, None)
    assert (await decide(engine, "ann", ANN)).decision.cold_start == "meta"


async def test_all_sources_forgotten(engine: Engine, store: Redis) -> None:
    sources = await fusion_store(store, "shop")
    await sources.strike((await sources.everyone()).values())
    await serves(engine, None)
    assert (await decide(engine, "ann", ANN)).decision.cold_start == "meta"


async def test_warm_starts_during_an_outage(engine: Engine, store: Redis, valkey: OwnValkey) -> None:
    """Without the store a new warm start is used but not stored, and a stored one is not read."""
    await decide(engine, "ann", ANN)
    valkey.pause()
    try:
        async with asyncio.timeout(30):
            new, known = await decide(engine, "bob", ANN), await decide(engine, "ann")
    finally:
        valkey.resume()
    assert (new.decision.cold_start, new.logged) == ("fusion", False)
    assert (known.decision.cold_start, known.logged) == ("meta", False)

    async def logs() -> bool:
        return (await decide(engine, "bob")).logged

    await soon(logs)
    assert not await store.exists(engine.live.record.keys.start("bob"))
    assert (await decide(engine, "ann")).decision.cold_start == "fusion"


async def test_user_forgotten_during_a_decision(engine: Engine, store: Redis) -> None:
    """Scored before the user is forgotten, stored after: the warm start is made again for the new incarnation."""
    held = hold_puts(engine, times=1)
    deciding = asyncio.create_task(decide(engine, "ann", ANN))
    await held.come.wait()
    await engine.users.forget("ann")
    held.passing.set()
    answer = await deciding
    assert (answer.logged, answer.decision.cold_start, held.incarnations) == (True, "fusion", [0, 1])
    assert await store.hget(engine.live.record.keys.start("ann"), "incarnation") == b"1"


async def test_user_forgotten_repeatedly_during_a_decision(engine: Engine, store: Redis) -> None:
    held = hold_puts(engine, times=2)
    deciding = asyncio.create_task(decide(engine, "ann", ANN))
    for _ in range(2):
        await held.come.wait()
        held.come.clear()
        await engine.users.forget("ann")
        held.passing.set()
    assert not (await deciding).logged
    assert not await store.exists(engine.live.record.keys.start("ann"))


async def test_user_forgotten_by_another_process(engine: Engine, store: Redis) -> None:
    """A warm start read while its user is forgotten is not used for the new incarnation."""
    await decide(engine, "ann", ANN)
    read = engine._users.load_with_warm_starts

    async def late(ids: Any) -> Any:
        found = await read(ids)
        await engine.users.forget("ann")
        return found

    engine._users.load_with_warm_starts = late  # type: ignore[method-assign]
    answer = await decide(engine, "ann")
    assert (answer.decision.cold_start, answer.logged) == ("meta", True)
    assert not await store.exists(engine.live.record.keys.start("ann"))


async def test_profile_needs_no_extra_store_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a profile makes as many store calls as one without, with and without a warm start."""
    sent: list[Any] = []
    send = AbstractConnection.send_packed_command

    async def counted(self: AbstractConnection, *arguments: Any, **more: Any) -> Any:
        sent.append(asyncio.current_task())
        return await send(self, *arguments, **more)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)

    async def round_trips(user: str, profile: Features | None, decision_id: str | None = None) -> int:
        before = sent.count(asyncio.current_task())
        answer = await engine.decider.recommend(replace(ask(user, decision_id=decision_id), user_features=profile))
        assert answer.logged
        assert (answer.decision.cold_start == "fusion") == (profile is not None or user == "ann")
        return sent.count(asyncio.current_task()) - before

    without = await round_trips("bob", None)
    assert without == 2, "load the user, record the decision"
    assert await round_trips("ann", ANN) == without
    assert await round_trips("ann", ANN) == without
    assert await round_trips("ann", None) == without
    assert await round_trips("eve", ANN, decision_id="d") == without + 1, "is it decided already?"
