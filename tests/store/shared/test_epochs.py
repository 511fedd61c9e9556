"""Epochs follow one another, and only the holder of the lease publishes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from metaban.store.codec import encode_tensors
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared.epochs import REFUSALS, Epoch, EpochStore


@pytest.fixture
def epochs(redis: Redis, record: NamespaceRecord) -> EpochStore:
    return EpochStore(redis, record.keys, record.store_id)


def make_epoch(number: int) -> Epoch:
    return Epoch(number, 10 * number, {"mu": np.arange(3) * 0.5, "n": np.array(2)}, ("ann", "bø"), 123)


async def following(epochs: EpochStore, number: int) -> Epoch:
    """An epoch derived from the stored one, with any number."""
    current = await epochs.current()
    return replace(make_epoch(number), follows="" if current is None else current.stamp)


async def test_publish_and_read(redis: Redis, keys, epochs: EpochStore):
    assert await epochs.current() is None
    assert await epochs.log_head() == "0-0"
    assert await epochs.acquire_lease("me", 60_000)
    assert await epochs.publish(make_epoch(0), lease_token="me")
    assert await epochs.publish(await following(epochs, 1), lease_token="me")
    current = await epochs.current()
    assert current is not None
    assert (current.number, current.events, current.members, current.created_ms) == (1, 10, ("ann", "bø"), 123)
    assert current.tensors["mu"].tolist() == [0.0, 0.5, 1.0]
    log = await redis.xrange(keys.epoch_log)
    assert [fields for _, fields in log] == [{b"n": b"0"}, {b"n": b"1"}]
    assert await epochs.log_head() == log[-1][0].decode()


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_publish_compares_the_number(epochs: EpochStore, picture, number):
    await epochs.acquire_lease("me", 60_000)
    assert not await epochs.publish(make_epoch(1), lease_token="me")
    for n in (0, 1):
        assert await epochs.publish(await following(epochs, n), lease_token="me")
    before = await picture()
    assert not await epochs.publish(await following(epochs, number), lease_token="me")
    assert await picture() == before


async def test_publish_compares_the_stamp(redis: Redis, record, epochs: EpochStore, picture):
    """An epoch derived from a lost one may still have the next number."""
    await epochs.acquire_lease("me", 60_000)
    assert await epochs.publish(make_epoch(0), lease_token="me")
    lost = await following(epochs, 1)
    await redis.delete(record.keys.epoch)
    assert not await epochs.publish(lost, lease_token="me")
    assert await epochs.publish(make_epoch(0), lease_token="me")
    before = await picture()
    assert not await epochs.publish(lost, lease_token="me")
    assert not await epochs.publish(make_epoch(1), lease_token="me")
    assert await picture() == before
    assert await epochs.publish(await following(epochs, 1), lease_token="me")


async def test_every_publication_has_a_stamp(epochs: EpochStore):
    await epochs.acquire_lease("me", 60_000)
    assert await epochs.current_identity() is None
    stamps = [""]
    for number in range(3):
        assert await epochs.publish(await following(epochs, number), lease_token="me")
        current = await epochs.current()
        assert current is not None
        assert current.follows == stamps[-1]
        assert await epochs.current_identity() == (number, current.stamp)
        stamps.append(current.stamp)
    assert len(set(stamps)) == 4


async def test_an_epoch_stored_without_a_stamp(redis: Redis, record, epochs: EpochStore):
    await redis.hset(record.keys.epoch, mapping={"number": 4, "blob": make_epoch(4).encode()})
    current = await epochs.current()
    assert current is not None
    assert (current.number, current.stamp, current.follows) == (4, "", "")
    assert await epochs.current_identity() == (4, "")
    await epochs.acquire_lease("me", 60_000)
    assert await epochs.publish(await following(epochs, 5), lease_token="me")
    assert await epochs.current_identity() != (5, "")


async def test_every_refusal_is_logged(redis: Redis, record, epochs: EpochStore):
    await epochs.acquire_lease("me", 60_000)
    assert await epochs.publish(make_epoch(0), lease_token="me")
    with capture_logs() as logs:
        assert not await epochs.publish(await following(epochs, 1), lease_token="other")
        assert not await epochs.publish(await following(epochs, 3), lease_token="me")
        assert not await epochs.publish(make_epoch(1), lease_token="me")
        await redis.hset(record.keys.restoring, "generation", 1)
        assert not await epochs.publish(await following(epochs, 1), lease_token="me")
    assert [(line["event"], line["number"], line["reason"]) for line in logs] == [
        ("epoch_refused", 1, REFUSALS[b"lease"]),
        ("epoch_refused", 3, REFUSALS[b"number"]),
        ("epoch_refused", 1, REFUSALS[b"stamp"]),
        ("epoch_refused", 1, REFUSALS[b"restoring"]),
    ]


async def test_racing_publishers(redis: Redis, keys, epochs: EpochStore):
    await epochs.acquire_lease("me", 60_000)
    done = await asyncio.gather(*(epochs.publish(make_epoch(0), lease_token="me") for _ in range(8)))
    assert done.count(True) == 1
    assert await redis.xlen(keys.epoch_log) == 1


async def test_lost_lease_publishes_nothing(epochs: EpochStore, picture):
    assert not await epochs.publish(make_epoch(0), lease_token="me")
    assert await epochs.acquire_lease("me", 20)
    await asyncio.sleep(0.05)
    assert not await epochs.renew_lease("me", 60_000)
    assert await epochs.acquire_lease("other", 60_000)
    before = await picture()
    assert not await epochs.publish(make_epoch(0), lease_token="me")
    assert not await epochs.acquire_lease("me", 60_000)
    assert not await epochs.renew_lease("me", 60_000)
    assert not await epochs.release_lease("me")
    assert await picture() == before


async def test_lease_is_kept_and_given_back(redis: Redis, record, epochs: EpochStore):
    assert await epochs.acquire_lease("me", 1_000)
    assert await epochs.acquire_lease("me", 30_000)  # its reply was lost: the lease is still held
    assert await redis.pttl(record.keys.lease) > 1_000
    assert await epochs.renew_lease("me", 90_000)
    assert await redis.pttl(record.keys.lease) > 30_000
    assert await epochs.release_lease("me")
    assert await epochs.acquire_lease("other", 1_000)


async def test_publish_into_another_store(redis: Redis, record, epochs: EpochStore):
    foreign = EpochStore(redis, record.keys, "another store")
    await epochs.acquire_lease("me", 60_000)
    with pytest.raises(StoreReset):
        await foreign.publish(make_epoch(0), lease_token="me")
    await redis.flushall()
    with pytest.raises(StoreReset):
        await epochs.publish(make_epoch(0), lease_token="me")
    assert await redis.dbsize() == 0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"number":1,"events":1,"members":[1],"created_ms":1}'])
def test_corrupt_epoch(text):
    with pytest.raises(CorruptRecord):
        Epoch.decode(encode_tensors({}, {"epoch": text}))
    with pytest.raises(CorruptRecord):
        Epoch.decode(encode_tensors({}, {}))
