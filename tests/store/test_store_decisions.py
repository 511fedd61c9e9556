"""Decisions: the first record of an id is the one everybody gets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from store.codec import encode_tensors
from store.decisions import DecidedItem, Decision, DecisionStore
from store.errors import CorruptRecord
from store.keys import NamespaceKeys


def make_decision(decision_id: str = "d1", fingerprint: str = "00ff") -> Decision:
    items = tuple(DecidedItem(f"arm {n}", n + 1, 0.1 * n, 0.3, 0.2, 1 / 3, 4) for n in range(2))
    features = np.arange(6, dtype=np.float32).reshape(2, 3)
    return Decision(
        decision_id, "ann", fingerprint, items, features, features[:, :1] + 0.5, "ucb-floor", 3, 8, None, 1_234
    )


def same(one: Decision | None, two: Decision) -> bool:
    """Compared by value: the header of a record has no fixed order, so equal decisions may differ in bytes."""
    names = [name for name in Decision.__slots__ if name not in ("features", "phi")]
    return (
        one is not None
        and all(getattr(one, name) == getattr(two, name) for name in names)
        and np.array_equal(one.features, two.features)
        and np.array_equal(one.phi, two.phi)
    )


def test_round_trip():
    decision = replace(make_decision(), cold_start="prior")
    back = Decision.decode(decision.encode())
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


async def test_the_first_wins(redis: Redis, keys: NamespaceKeys):
    decisions = DecisionStore(redis, keys, ttl_s=60)
    answers = await asyncio.gather(*(decisions.put(make_decision("d", f"{n:02x}")) for n in range(8)))
    stored = await decisions.get("d")
    assert all(same(stored, answer) for answer in answers)


async def test_window_ends(redis: Redis, keys: NamespaceKeys):
    decisions = DecisionStore(redis, keys, ttl_s=0.02)
    await decisions.put(make_decision())
    await asyncio.sleep(0.05)
    assert await decisions.get("d1") is None


def test_rows_must_match_items():
    with pytest.raises(ValueError, match="rows"):
        replace(make_decision(), features=np.zeros((3, 3), dtype=np.float32)).encode()
    with pytest.raises(ValueError, match="rows"):
        replace(make_decision(), features=np.zeros(2, dtype=np.float32)).encode()


def test_corrupt_decisions():
    good = make_decision()
    fields = json.loads(
        json.dumps(
            {name: getattr(good, name) for name in Decision.__slots__ if name not in ("items", "features", "phi")}
        )
    )
    fields["items"] = []
    matrix = {"features": np.zeros((0, 3), dtype=np.float32), "phi": np.zeros((0, 1), dtype=np.float32)}
    assert Decision.decode(encode_tensors(matrix, {"decision": json.dumps(fields)})).items == ()
    for change in ({"user_id": 3}, {"epoch": "x"}, {"epoch": float("inf")}, {"items": [{}]}, {"items": 3}):
        with pytest.raises(CorruptRecord):
            Decision.decode(encode_tensors(matrix, {"decision": json.dumps({**fields, **change})}))
    wrong = [
        {"features": np.zeros((1, 3), np.float32)},
        {"features": np.zeros((0, 3))},
        {"phi": np.zeros(3, np.float32)},
    ]
    for tensors in ({}, *({**matrix, **part} for part in wrong)):
        with pytest.raises(CorruptRecord):
            Decision.decode(encode_tensors(tensors, {"decision": json.dumps(fields)}))
