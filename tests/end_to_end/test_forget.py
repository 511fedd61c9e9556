"""Forgetting in real processes: afterwards only a tombstone of the user is left in store, logs and files."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from redis import Redis

from metaban.service.process.local_deployment import Deployment
from metaban.store.client.connection import connect
from metaban.store.codec import Sample
from metaban.store.events.event import RewardEvent
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceStore
from metaban.store.shared.fusion import FusionRecord, FusionSource, FusionStore
from metaban.store.shared.transfer import TransferQuestion, TransferStore
from metaban.store.users.warm_starts import StoredWarmStart

USERS = ("anna.q7x-kowalska", "bela.z3v-lugosi", "carl.w9k-sagan")
INPUTS = 3
KEYS = NamespaceKeys("default", 2)
NOTHING_LEFT = {
    "decisions": 0, "waiting": 0, "dead_letters": 0, "samples": 0, "log_lines": 0, "pool": False, "fusion": False,
    "transfer": False,
}  # fmt: skip
#: A tombstone: the name of the user's key, their field among the versions, and the line of the update log.
TOMBSTONE_PLACES = 3


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A service with a candidate pool smaller than its number of users and full logging."""
    settings = {
        "METABAN_PRESET": "paper",
        "METABAN_WIDTH": "6",
        "METABAN_PARTITIONS": str(KEYS.partitions),
        "METABAN_CANDIDATE_POOL": "2",
        "METABAN_LOG_LEVEL": "debug",
    }
    with Deployment(tmp_path, settings) as service:
        yield service


@pytest.fixture
def client(deployment: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.url, timeout=60) as client:
        yield client


@pytest.fixture
def valkey(deployment: Deployment) -> Iterator[Redis]:
    path = next(deployment.data_dir.glob("run/*.sock"))
    with Redis(unix_socket_path=str(path), protocol=2) as redis:
        yield redis


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"not within half a minute: {what}"
        time.sleep(0.05)


def identifying_strings(user: str) -> list[bytes]:
    """Strings that identify a user."""
    profile = profile_of(user).tobytes()
    words = [user.encode(), f"profile of {user}".encode(), f"arm-{user}".encode(), f"event-{user}".encode()]
    # As it is stored in warm starts (a dump may quote it), and as JSON has it, where a slash may be escaped.
    return [*words, profile, repr(profile)[2:-1].encode(), *b64encode(profile).split(b"/")[:1]]


def live(client: httpx.Client, user: str, *, times: int = 4) -> None:
    """Decisions with and without rewards of a user with a profile."""
    body = {
        "user_id": user,
        "arms": [{"id": f"arm-{user}-{n}", "features": [float(n), 1.0, -1.0]} for n in range(3)],
        "user_features": {"told": f"profile of {user}", "age": 41},
    }
    for number in range(times):
        decision = f"decision-{USERS.index(user)}-{number}"
        answer = client.post("/recommend", json={**body, "decision_id": decision})
        assert answer.status_code == 200, answer.text
        assert answer.json()["logged"]
        if number:
            reward = {"decision_id": decision, "reward": number / times, "event_id": f"event-{user}-{number}"}
            told = client.post("/feedback", params={"wait": "applied"}, json=reward)
            assert (told.status_code, told.json()["applied"]) == (202, True), told.text


def raw_event(user: str, number: int, *, reward: float = 1.0) -> dict[bytes, bytes]:
    """An event as the service writes it."""
    x = np.ones(INPUTS + 1, dtype=np.float32)
    return RewardEvent(
        f"event-{user}-raw-{number}", "decision", user, f"arm-{user}-0", x, reward, 1.0, 0, 0, 0
    ).encode()


def add(valkey: Redis, event: dict[bytes, bytes], user: str) -> None:
    valkey.xadd(KEYS.events(KEYS.partition_of(user)), event)  # type: ignore[arg-type]


def waiting(valkey: Redis) -> int:
    return sum(int(valkey.xlen(KEYS.events(partition))) for partition in range(KEYS.partitions))


def dump(valkey: Redis) -> dict[bytes, bytes]:
    """All keys with their contents as text."""
    readers: dict[bytes, Callable[[bytes], Any]] = {
        b"string": valkey.get,
        b"hash": valkey.hgetall,
        b"list": lambda key: valkey.lrange(key, 0, -1),
        b"zset": lambda key: valkey.zrange(key, 0, -1, withscores=True),
        b"set": lambda key: valkey.smembers(key),
        b"stream": lambda key: valkey.xrange(key),
    }
    found: dict[bytes, bytes] = {}
    for key in valkey.scan_iter(count=1_000):
        held = readers[valkey.type(key)](key)
        found[key] = held if isinstance(held, bytes) else repr(held).encode()
    return found


def profile_of(user: str) -> np.ndarray:
    """Features that identify a user."""
    return np.random.default_rng(list(user.encode())).normal(size=4)


async def transfers(transfer: TransferStore) -> None:
    """A finished transfer job for every user, with the next user as a source."""
    assert await transfer.acquire_lease("test", 60_000)
    for place, user in enumerate(USERS):
        other = USERS[place - 1]
        question = TransferQuestion("mse", user_id=user, sources=(other,))
        job = (await transfer.request(question, {user: 0, other: 0}, int(time.time() * 1_000))).job
        assert job is not None
        result = {"target": {"user_id": user}, "sources": [{"user_id": other, "coefficient": -1.0}]}
        assert await transfer.put_job(replace(job, state="done"), lease_token="test", result=result)
    await transfer.release_lease("test")


def warm(valkey: Redis) -> None:
    """Store fusion, warm starts and transfer jobs that name every user, in the formats of the service."""
    socket = valkey.connection_pool.connection_kwargs["path"]

    async def write() -> None:
        redis = connect(f"unix://{socket}")
        try:
            record = await NamespaceStore(redis).load(KEYS.namespace)
            assert record is not None
            fusion = FusionStore(redis, KEYS, record.store_id)
            names = {f"token of {place}": user for place, user in enumerate(USERS)}
            sources = tuple(FusionSource(token, profile_of(user)) for token, user in names.items())
            assert await fusion.acquire_lease("test", 60_000)
            made = FusionRecord(1, {"w": np.zeros(1)}, sources, {}, 1)
            assert await fusion.publish(made, names, lease_token="test")
            await fusion.release_lease("test")
            await transfers(TransferStore(redis, KEYS, record.store_id))
        finally:
            await redis.aclose()

    asyncio.run(write())
    for user in USERS:
        start = StoredWarmStart(
            0, profile_of(user), 1, tuple((f"token of {place}", 1.0) for place in range(len(USERS))), 1
        )
        valkey.hset(KEYS.start(user), mapping={"incarnation": 0, "start": start.encode()})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def holders(places: dict[Any, bytes], user: str) -> set[Any]:
    """Keys whose name or contents identify a user."""
    words = identifying_strings(user)
    return {
        name
        for name, content in places.items()
        if any(word in content or word in (name if isinstance(name, bytes) else name.encode()) for word in words)
    }


def check_only_a_tombstone(deployment: Deployment, valkey: Redis, user: str) -> None:
    partition = KEYS.partition_of(user)
    tombstone = {KEYS.user(user).encode(), KEYS.versions(partition).encode(), KEYS.update_log(partition).encode()}
    assert holders(dump(valkey), user) == tombstone
    assert set(valkey.hgetall(KEYS.user(user))) == {b"incarnation", b"version", b"forgot"}
    lines = [fields for _, fields in valkey.xrange(KEYS.update_log(partition)) if fields[b"u"] == user.encode()]
    assert [(line[b"v"], line[b"e"]) for line in lines] == [(b"0", b"")]
    found = files(deployment.data_dir)
    history = {name for name in found if name.startswith("valkey/appendonlydir/")}
    assert holders(found, user) <= history
    assert sum(found[name].count(user.encode()) for name in history) <= TOMBSTONE_PLACES
    for word in identifying_strings(user)[1:]:
        assert not any(word in content for content in found.values()), word


def test_nothing_is_left_but_a_tombstone(deployment: Deployment, client: httpx.Client, valkey: Redis) -> None:
    for user in USERS:
        live(client, user)
        add(valkey, raw_event(user, 0, reward=7.0), user)  # cannot be learned: a dead letter
    eventually(lambda: waiting(valkey) == 0, "all events learned or buried")
    eventually(lambda: json.loads(valkey.hget(KEYS.epoch, "members") or b"[]"), "a pool that not everyone is in")
    members = json.loads(valkey.hget(KEYS.epoch, "members") or b"[]")
    victim = members[0]
    neighbours = [user for user in USERS if user != victim]
    warm(valkey)
    before = {user: client.get(f"/admin/users/{user}", params={"events": 9}).json() for user in USERS}
    held = holders(dump(valkey), victim)
    named_in = (KEYS.start(victim), KEYS.fusion, KEYS.fusion_sources, KEYS.transfer_jobs, KEYS.transfer_results)
    assert {key.encode() for key in named_in} <= held
    assert {name: len(before[victim][name]) for name in ("events", "decisions")} == {"events": 3, "decisions": 4}
    # The search below finds the user now: in the store under many keys, and in its file many times.
    assert len(holders(dump(valkey), victim)) > 10
    assert sum(content.count(victim.encode()) for content in files(deployment.data_dir).values()) > 10

    forgotten = client.delete(f"/admin/users/{victim}")
    assert (forgotten.status_code, forgotten.json()) == (
        200,
        {
            "user_id": victim,
            "incarnation": 1,
            "removed": {
                "samples": 3,
                "decisions": 4,
                "dead_letters": 1,
                "log_lines": forgotten.json()["removed"]["log_lines"],
            },
            "waiting": 0,
            "history": "rewritten",
        },
    )
    assert forgotten.json()["removed"]["log_lines"] >= 3
    check_only_a_tombstone(deployment, valkey, victim)
    tombstone = client.get(f"/admin/users/{victim}", params={"events": 9}).json()
    assert (tombstone["forgotten"], tombstone["traces"], tombstone["profile"]) == (True, NOTHING_LEFT, None)

    # Later events do not bring them back: of an old decision, an old event, and an old event that cannot be learned.
    late = client.post("/feedback", json={"decision_id": f"decision-{USERS.index(victim)}-0", "reward": 1})
    assert (late.status_code, late.json()["type"]) == (404, "/problems/unknown-decision")
    add(valkey, raw_event(victim, 1), victim)
    add(valkey, raw_event(victim, 2, reward=7.0), victim)
    eventually(lambda: waiting(valkey) == 0, "old events dropped")
    assert client.get(f"/admin/users/{victim}", params={"events": 9}).json() == tombstone
    # An epoch derived now has other members.
    published = int(valkey.hget(KEYS.epoch, "number") or 0)
    for user in neighbours:
        live_again = {"decision_id": f"decision-{USERS.index(user)}-0", "reward": 0.5, "event_id": f"event-{user}-x"}
        assert client.post("/feedback", params={"wait": "applied"}, json=live_again).json()["applied"]
    assert int(valkey.hget(KEYS.epoch, "number") or 0) >= published
    assert victim.encode() not in (valkey.hget(KEYS.epoch, "members") or b"")

    # The old events went through the store's file once more; forgetting again removes them.
    assert client.delete(f"/admin/users/{victim}").json()["history"] == "rewritten"
    job = client.post("/admin/snapshots").json()["id"]
    eventually(lambda: client.get(f"/admin/jobs/{job}").json()["state"] == "done", "a snapshot")
    assert any(name.startswith("snapshots/") for name in holders(files(deployment.data_dir), neighbours[0]))
    check_only_a_tombstone(deployment, valkey, victim)

    named = valkey.hgetall(KEYS.fusion_sources)
    assert sorted(named.values()) == sorted(user.encode() for user in neighbours)
    assert [token.encode() for token, *_ in json.loads(valkey.hget(KEYS.fusion, "sources") or b"")] == list(named)
    [job] = client.get("/admin/transfer").json()["jobs"]
    assert {job["request"]["user_id"], *job["request"]["sources"]} == set(neighbours)
    assert valkey.hkeys(KEYS.transfer_results) == [job["id"].encode()]
    for user in neighbours:
        assert valkey.exists(KEYS.start(user))
        after = client.get(f"/admin/users/{user}", params={"events": 9}).json()
        assert after["version"] == before[user]["version"] + 1
        assert after["events"][1:] == before[user]["events"]
        assert {name: after[name] for name in ("decisions", "profile", "forgotten", "incarnation")} == {
            name: before[user][name] for name in ("decisions", "profile", "forgotten", "incarnation")
        }
    letters = client.get("/admin/dead-letters").json()["letters"]
    assert sorted(letter["event"]["user_id"] for letter in letters) == sorted(neighbours)

    assert deployment.stop() == 0
    check_logs(deployment)


def check_logs(deployment: Deployment) -> None:
    for name, content in files(deployment.data_dir).items():
        if name.endswith(".log"):
            assert content
            for user in USERS:
                assert user.encode() not in content, name


def test_no_log_line_names_a_user(deployment: Deployment, client: httpx.Client, valkey: Redis) -> None:
    """User ids are not logged, in any operation or failure."""
    user, other, third = USERS
    live(client, user)
    # No request can send such a reward, and no learner stays finite with it.
    kept = Sample.decode(valkey.lindex(KEYS.samples(user), -1) or b"")
    valkey.rpush(KEYS.samples(user), replace(kept, reward=1e300, key=0).encode())
    add(valkey, raw_event(user, 1), user)
    eventually(lambda: "quarantined" in deployment.log(), "a learner put back to the prior")
    valkey.xadd(KEYS.events(1 - KEYS.partition_of(user)), raw_event(user, 2))  # type: ignore[arg-type]
    eventually(lambda: "events_failed" in deployment.log(), "an event in the wrong partition")
    valkey.hset(KEYS.user(other), mapping={"incarnation": 0, "version": 3, "epoch": 0, "state": b"damaged"})
    valkey.hset(KEYS.versions(KEYS.partition_of(other)), other, "0:3")
    body = {"user_id": other, "arms": [{"id": "a", "features": [1.0, 2.0, 3.0]}]}
    assert client.post("/recommend", json=body).status_code == 200
    assert "user_record_damaged" in deployment.log()
    job = client.post("/admin/snapshots").json()["id"]
    eventually(lambda: client.get(f"/admin/jobs/{job}").json()["state"] != "running", "a snapshot, or none")
    for path in (f"/admin/users/{user}", f"/admin/users/{user}/", f"/{user}", f"/admin/nothing/{user}?u={user}"):
        for method in ("GET", "POST", "DELETE"):
            client.request(method, path)
    client.post("/recommend", json={"user_id": third, "arms": [{"id": third, "features": [1e38, 1.0, 1.0]}]})
    client.post("/recommend", json={"user_id": third, third: 1})
    client.post("/feedback", json={"decision_id": third, "reward": 1})
    valkey.delete(KEYS.samples(user))
    valkey.set(KEYS.decided(user), "no list of decisions")
    assert client.get(f"/admin/users/{user}").status_code == 500
    assert "/admin/users/{user_id:path}" in deployment.log()
    assert deployment.stop() == 0
    check_logs(deployment)
