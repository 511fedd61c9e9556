"""Namespaces: one record each, and a marker in every partition that tells this store from any other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, final
from uuid import uuid4

from store.connection import Store, as_bytes, as_int, as_text, command, pipeline, scan
from store.errors import CorruptRecord, NamespaceConflict, StoreReset
from store.events import create_groups
from store.keys import NAMESPACE_NAMES, NamespaceKeys
from store.reward_rules import RewardRules
from store.scripts import load_script

Json: TypeAlias = Any
#: Races on one record that are worth another try; each means that somebody else succeeded.
MAX_RACES = 16


@final
@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """What is fixed or agreed for a namespace; learner, layouts and overrides mean nothing to the store.

    A deleted one leaves its record behind: whoever still serves it can tell that from a store that lost everything.
    """

    name: str
    partitions: int
    store_epoch: str
    seed: int
    learner: dict[str, Json]
    layout: dict[str, Json] | None
    revision: int
    state: Literal["creating", "ready", "deleted"]
    #: Settings in which the namespace differs from the deployment's.
    overrides: dict[str, Json] = field(default_factory=dict)
    #: RewardRules as JSON; None: those by default.
    rewards: dict[str, Json] | None = None
    #: How what requests tell of users is laid out; None until one tells something.
    profile_layout: dict[str, Json] | None = None

    @property
    def reward_rules(self) -> RewardRules:
        """What rewards mean here."""
        return RewardRules.from_json(self.rewards)

    @property
    def keys(self) -> NamespaceKeys:
        return NamespaceKeys(self.name, self.partitions)

    def encode(self) -> bytes:
        fields = asdict(self)
        if self.rewards is None:
            del fields["rewards"]  # as records were before there were rules
        if self.profile_layout is None:
            del fields["profile_layout"]
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def decode(blob: bytes) -> NamespaceRecord:
        try:
            fields = json.loads(blob)
            record = NamespaceRecord(**fields)
            types = {
                "name": str,
                "partitions": int,
                "store_epoch": str,
                "seed": int,
                "learner": dict,
                "revision": int,
            }
            wrong = [name for name, kind in types.items() if not isinstance(fields[name], kind)]
            optional = (
                isinstance(record.layout, dict | None)
                and isinstance(record.overrides, dict)
                and isinstance(record.rewards, dict | None)
                and isinstance(record.profile_layout, dict | None)
            )
            if wrong or not optional or record.state not in ("creating", "ready", "deleted"):
                raise CorruptRecord(
                    f"a namespace record has wrong fields: {wrong or ['layouts, overrides, rewards or state']}"
                )
            NamespaceKeys(record.name, record.partitions)
            RewardRules.from_json(record.rewards)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptRecord(f"not a namespace record: {error}") from error
        return record


@final
class Namespaces:
    """The namespaces of a store."""

    def __init__(self, redis: Store) -> None:
        self._redis = redis
        self._replace = load_script(redis, "namespace")
        self._unlinking = load_script(redis, "unlink")

    async def names(self) -> list[str]:
        """All namespaces, in alphabetical order."""
        return sorted(as_text(name) for name in await command(self._redis, "SMEMBERS", NAMESPACE_NAMES))

    async def open_or_create(
        self,
        name: str,
        *,
        partitions: int,
        seed: int,
        learner: dict[str, Json],
        layout: dict[str, Json] | None = None,
        overrides: dict[str, Json] | None = None,
    ) -> NamespaceRecord:
        """The namespace, created if there is none; a creation that was interrupted is completed.

        All but the name count for a new namespace only. Raises NamespaceConflict when it exists with another number of
        partitions, StoreReset when partitions lost their markers or carry another store's.
        """
        fresh = NamespaceRecord(name, partitions, uuid4().hex, seed, learner, layout, 0, "creating", overrides or {})
        stored = await command(self._redis, "SET", fresh.keys.record, fresh.encode(), "NX", "GET")
        record = fresh if stored is None else NamespaceRecord.decode(as_bytes(stored))
        if record.state == "deleted":
            # Whoever deleted it may not have come to the end, and a request under way may have written after that.
            await self._clear(record)
            record = await self._succeed(record, fresh)
        if record.partitions != partitions:
            raise NamespaceConflict(
                f"namespace {name} has {record.partitions} partitions, not {partitions}: they are fixed when "
                "it is created, so ask for that number or use another namespace"
            )
        return await self.open(record)

    async def open(self, record: NamespaceRecord) -> NamespaceRecord:
        """A namespace that was loaded, checked, and completed if its creation was interrupted."""
        if record.state == "creating":
            # Before it is ready: whoever is told of it finds it, or waits for it.
            await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)
            await self.revive(record)
            return await self._finish(record)
        await self._check_markers(record)
        await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)
        return record

    async def revive(self, record: NamespaceRecord) -> None:
        """Take back partitions that lost all they had; StoreReset when one belongs to another store.

        Only a restore may do so, which then writes every user of them.
        """
        partitions = range(record.partitions)
        await pipeline(
            self._redis,
            [("SET", record.keys.marker(partition), record.store_epoch, "NX") for partition in partitions],
        )
        await self._check_markers(record)
        await create_groups(self._redis, record.keys, partitions)

    async def load(self, name: str) -> NamespaceRecord | None:
        """The record of a namespace."""
        stored = await command(self._redis, "GET", NamespaceKeys(name, 1).record)
        return None if stored is None else NamespaceRecord.decode(as_bytes(stored))

    async def reload(self, record: NamespaceRecord) -> NamespaceRecord:
        """The record as it is now; StoreReset when the namespace is gone, or another one has its name."""
        current = await self.load(record.name)
        if current is None or current.store_epoch != record.store_epoch or current.state == "deleted":
            raise StoreReset(f"namespace {record.name} was deleted, or vanished with its store")
        return current

    async def set_layout(self, record: NamespaceRecord, layout: dict[str, Json]) -> NamespaceRecord:
        """Agree on the feature layout; the record that holds now, of another caller if that one was first.

        A layout that exists is replaced only while no event was ever enqueued: NamespaceConflict otherwise.
        """
        for _ in range(MAX_RACES):
            if record.layout == layout:
                return record
            if record.layout is not None and await self._events_enqueued(record):
                raise NamespaceConflict(
                    f"namespace {record.name} has events of another feature layout: use another namespace"
                )
            wanted = replace(record, layout=layout, revision=record.revision + 1)
            current = await self._compare_and_set(record, wanted)
            if current is None:
                return wanted
            if current.layout != record.layout:
                return current
            record = current
        raise NamespaceConflict(f"the record of namespace {record.name} keeps changing")

    async def set_profile_layout(self, record: NamespaceRecord, layout: dict[str, Json]) -> NamespaceRecord:
        """Agree on the layout of profiles; the record that holds now. Whoever is first fixes it for good."""
        for _ in range(MAX_RACES):
            if record.profile_layout is not None:
                return record
            wanted = replace(record, profile_layout=layout, revision=record.revision + 1)
            current = await self._compare_and_set(record, wanted)
            if current is None:
                return wanted
            record = current
        raise NamespaceConflict(f"the record of namespace {record.name} keeps changing")

    async def replace_learner(self, record: NamespaceRecord, learner: dict[str, Json]) -> NamespaceRecord:
        """Change the learner's settings; NamespaceConflict when the record is not the stored one any more."""
        wanted = replace(record, learner=learner, revision=record.revision + 1)
        current = await self._compare_and_set(record, wanted)
        if current is not None:
            raise NamespaceConflict(
                f"namespace {record.name} is at revision {current.revision}, not {record.revision}: load it again"
            )
        return wanted

    async def change(self, record: NamespaceRecord, **changes: Json) -> NamespaceRecord | None:
        """The record with some fields changed; None when somebody else changed it first."""
        wanted = replace(record, **changes, revision=record.revision + 1)
        return wanted if await self._compare_and_set(record, wanted) is None else None

    async def delete(self, record: NamespaceRecord) -> None:
        """Delete a namespace with all it has; only the word of it stays, in its record. Repeated, it is completed.

        Without its markers no script writes into it any more.
        """
        record = await self.mark_deleted(record)
        await self._clear(record)
        await command(self._redis, "SREM", NAMESPACE_NAMES, record.name)
        begun = await self.load(record.name)
        if begun is not None and begun.state != "deleted":
            # Somebody had the name already, and was just taken off the list with it.
            await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)

    async def mark_deleted(self, record: NamespaceRecord) -> NamespaceRecord:
        """Have nobody begin to use a namespace any more; what it has is still there, for `delete`."""
        while record.state != "deleted":
            gone = await self.change(record, state="deleted", layout=None, overrides={}, profile_layout=None)
            record = gone or await self.load(record.name) or replace(record, state="deleted")
        return record

    async def _clear(self, deleted: NamespaceRecord) -> None:
        """Delete all that a deleted namespace has, and nothing of one that has begun under its name."""
        keys = deleted.keys
        # What belongs together goes at one moment: nobody who still reads finds half of an arm.
        await self._unlink(deleted, [*keys.shared, *map(keys.marker, range(deleted.partitions))])
        async for found in scan(self._redis, keys.every_pattern):
            await self._unlink(deleted, [as_text(key) for key in found if key != keys.record.encode()])

    async def _unlink(self, deleted: NamespaceRecord, doomed: Iterable[str]) -> None:
        guarded: dict[str, list[str]] = {}
        for key in doomed:
            guarded.setdefault(deleted.keys.guard_of(key), []).append(key)
        await self._unlinking.call_many(
            ([guard, *keys], [deleted.store_epoch, "namespace" if guard == deleted.keys.record else "marker"])
            for guard, keys in guarded.items()
        )

    async def _succeed(self, deleted: NamespaceRecord, fresh: NamespaceRecord) -> NamespaceRecord:
        """Begin anew under a name whose namespace was deleted; of several who do one wins."""
        wanted = replace(fresh, revision=deleted.revision + 1)
        current = await self._compare_and_set(deleted, wanted)
        return wanted if current is None else current

    async def set_reward_rules(self, record: NamespaceRecord, rules: RewardRules) -> NamespaceRecord:
        """Change what rewards mean, whatever else of the record is changed meanwhile; the record that holds then."""
        for _ in range(MAX_RACES):
            if record.reward_rules == rules:
                return record
            wanted = replace(record, rewards=rules.to_json(), revision=record.revision + 1)
            current = await self._compare_and_set(record, wanted)
            if current is None:
                return wanted
            record = current
        raise NamespaceConflict(f"the record of namespace {record.name} keeps changing")

    async def _finish(self, record: NamespaceRecord) -> NamespaceRecord:
        """Mark a namespace ready, or find that somebody else who completed it did."""
        ready = replace(record, state="ready", revision=record.revision + 1)
        current = await self._compare_and_set(record, ready)
        return ready if current is None else current

    async def _compare_and_set(self, record: NamespaceRecord, wanted: NamespaceRecord) -> NamespaceRecord | None:
        """None when `wanted` was written, otherwise the record that stands in its place."""
        done, *stored = await self._replace.call(
            [record.keys.record], [record.store_epoch, record.revision, wanted.encode()]
        )
        if done:
            return None
        current = NamespaceRecord.decode(as_bytes(stored[0])) if stored else None
        if current is None or (current.store_epoch != record.store_epoch and record.state != "deleted"):
            raise StoreReset(f"the record of namespace {record.name} vanished or is of another store")
        if current.state == "deleted" and wanted.state != "deleted" and record.state != "deleted":
            raise StoreReset(f"namespace {record.name} was deleted")
        return current

    async def _check_markers(self, record: NamespaceRecord) -> None:
        partitions = range(record.partitions)
        markers = await pipeline(self._redis, [("GET", record.keys.marker(partition)) for partition in partitions])
        foreign = [
            partition
            for partition, marker in zip(partitions, markers, strict=True)
            if marker is None or as_text(marker) != record.store_epoch
        ]
        if foreign:
            raise StoreReset(
                f"namespace {record.name}: partitions {foreign} lost their data or belong to another store; "
                "restore a snapshot, or delete the namespace's keys to begin anew"
            )

    async def _events_enqueued(self, record: NamespaceRecord) -> int:
        counts = await pipeline(
            self._redis,
            [("HGET", record.keys.counters(partition), "enqueued") for partition in range(record.partitions)],
        )
        return sum(as_int(count, absent=0) for count in counts)
