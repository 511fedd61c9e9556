"""Decisions: all readers of an id get the first record stored under it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from metaban.store.client.connection import connect
from metaban.store.codec import encode_tensors
from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.errors import CorruptRecord, StoreUnavailable
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from tests.store.helpers import make_decision, same
from tests.valkeys import Valkey, eventually, running_cluster
from tests.worker.workshop import soon


def test_round_trip():
    decision = replace(make_decision(), cold_start="prior")
    back = DecisionRecord.decode(decision.encode())
    assert same(back, decision)
    assert back.items == decision.items
    assert back.cold_start == "prior"
    assert np.array_equal(back.features, decision.features)


async def test_put_and_get(redis: Redis, keys: NamespaceKeys):
    decisions = DecisionStore(redis, keys, ttl_s=60)
    assert await decisions.get("d1") is None
    decision = make_decision()
    assert await decisions.put(decision) is decision
    assert same(await decisions.get("d1"), decision)
    assert 0 < await redis.pttl(keys.decision("d1")) <= 60_000


async def test_the_first_record_of_an_id_is_kept(redis: Redis, keys: NamespaceKeys):
    decisions = DecisionStore(redis, keys, ttl_s=60)
    answers = await asyncio.gather(*(decisions.put(make_decision("d", f"{n:02x}")) for n in range(8)))
    stored = await decisions.get("d")
    assert all(same(stored, answer) for answer in answers)


async def test_a_decision_expires_with_its_reward_window(redis: Redis, keys: NamespaceKeys):
    decisions = DecisionStore(redis, keys, ttl_s=1)  # on a busy machine a shorter time ends before it is noted
    await decisions.put(make_decision())
    assert await decisions.get("d1") is not None

    async def expired() -> bool:
        return await decisions.get("d1") is None

    await soon(expired)


def sets_of(server: Valkey) -> int:
    """Number of SET commands that a server has run."""
    with server.client() as client:
        return int(client.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"])


async def put_without_index(
    decisions: DecisionStore, decision: DecisionRecord, key: str, holder: Valkey, indexer: Valkey, *, killed: bool
) -> None:
    """Store a decision while the server of the index does not answer, until it has expired."""
    before = sets_of(holder)
    indexer.pause()
    try:
        putting = asyncio.create_task(decisions.put(decision))
        await asyncio.to_thread(eventually, lambda: sets_of(holder) > before, "it is stored")
        if killed:
            putting.cancel()  # nothing more is sent
        await asyncio.to_thread(eventually, lambda: holder.ask("EXISTS", key) == 0, "it expires")
    finally:
        indexer.resume()
    # The driver may turn a cancellation into an error of the connection.
    with pytest.raises((asyncio.CancelledError, StoreUnavailable)):
        await putting


async def test_a_decision_expires_unless_it_gets_into_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("metaban.store.decisions.decisions.UNNOTED_MS", 300)
    # Full coverage is not required: the others have to answer, however long the paused server is missed.
    with running_cluster(tmp_path, "--cluster-require-full-coverage", "no") as cluster:
        client = connect(cluster.url)
        try:
            record = await NamespaceStore(client).open_or_create("shop", partitions=8, seed=0, learner={})
            decisions, decision = DecisionStore(client, record.keys, ttl_s=60), make_decision()
            key, index = record.keys.decision(decision.decision_id), record.keys.decided(decision.user_id)
            holder, indexer = (cluster.node_of(key_slot(name.encode())) for name in (key, index))
            assert holder is not indexer
            for killed in (True, False):
                await put_without_index(decisions, decision, key, holder, indexer, killed=killed)
                cluster.agree()
            assert await decisions.put(decision) is decision
            assert holder.ask("PTTL", key) > 30_000
        finally:
            await client.aclose()


def test_rows_must_match_items():
    with pytest.raises(ValueError, match="rows"):
        replace(make_decision(), features=np.zeros((3, 3), dtype=np.float32)).encode()
    with pytest.raises(ValueError, match="rows"):
        replace(make_decision(), features=np.zeros(2, dtype=np.float32)).encode()


def test_corrupt_decisions():
    good = make_decision()
    fields = json.loads(
        json.dumps(
            {name: getattr(good, name) for name in DecisionRecord.__slots__ if name not in ("items", "features", "phi")}
        )
    )
    fields["items"] = []
    matrix = {"features": np.zeros((0, 3), dtype=np.float32), "phi": np.zeros((0, 1), dtype=np.float32)}
    assert DecisionRecord.decode(encode_tensors(matrix, {"decision": json.dumps(fields)})).items == ()
    for change in ({"user_id": 3}, {"epoch": "x"}, {"epoch": float("inf")}, {"items": [{}]}, {"items": 3}):
        with pytest.raises(CorruptRecord):
            DecisionRecord.decode(encode_tensors(matrix, {"decision": json.dumps({**fields, **change})}))
    wrong = [
        {"features": np.zeros((1, 3), np.float32)},
        {"features": np.zeros((0, 3))},
        {"phi": np.zeros(3, np.float32)},
    ]
    for tensors in ({}, *({**matrix, **part} for part in wrong)):
        with pytest.raises(CorruptRecord):
            DecisionRecord.decode(encode_tensors(tensors, {"decision": json.dumps(fields)}))
