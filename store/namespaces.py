"""Namespaces: the record of each, and the store id as a marker in every partition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, final
from uuid import uuid4

from metaban.store.client.connection import Store, as_bytes, as_int, as_text, command, pipeline, scan
from metaban.store.client.scripts import load_script
from metaban.store.errors import CorruptRecord, NamespaceConflict, StoreReset
from metaban.store.events.stream import create_groups
from metaban.store.keys import NAMESPACE_NAMES, NamespaceKeys
from metaban.store.reward_rules import RewardRules

Json: TypeAlias = Any

#: Fields whose name in stored records differs.
STORED_NAMES: Final = {"store_id": "store_epoch"}

#: Most attempts at changing a record; each failure means that another writer changed it.
MAX_RACES = 16


@final
@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """Settings of a namespace: all that shapes learning. The store does not interpret learner, layouts and overrides.

    The record of a deleted namespace stays: its services can tell the deletion from a store that lost its data.
    """

    name: str
    partitions: int
    store_id: str
    seed: int
    learner: dict[str, Json]
    layout: dict[str, Json] | None
    revision: int
    state: Literal["creating", "ready", "deleted"]
    #: Settings that an admin chose for the namespace.
    overrides: dict[str, Json] = field(default_factory=dict)
    #: RewardRules as JSON; None means the default rules.
    rewards: dict[str, Json] | None = None
    #: Layout of profiles; None until the first profile.
    profile_layout: dict[str, Json] | None = None

    @property
    def reward_rules(self) -> RewardRules:
        """Reward rules of the namespace."""
        return RewardRules.from_json(self.rewards)

    @property
    def keys(self) -> NamespaceKeys:
        return NamespaceKeys(self.name, self.partitions)

    def encode(self) -> bytes:
        fields = {STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}
        if self.rewards is None:
            del fields["rewards"]  # as in old records
        if self.profile_layout is None:
            del fields["profile_layout"]
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def decode(blob: bytes) -> NamespaceRecord:
        try:
            fields = json.loads(blob)
            names = {stored: name for name, stored in STORED_NAMES.items()}
            record = NamespaceRecord(**{names.get(name, name): value for name, value in fields.items()})
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
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptRecord(f"not a namespace record: {error}") from error
        return record


@final
class NamespaceStore:
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
        rewards: RewardRules | None = None,
    ) -> NamespaceRecord:
        """The namespace, created if it does not exist; an interrupted creation is completed.

        For an existing namespace only the name and the number of partitions count. Raises NamespaceConflict if it has
        another number of partitions, and StoreReset if partitions have no marker or that of another store.
        """
        rules = None if rewards is None else rewards.to_json()
        fresh = NamespaceRecord(
            name, partitions, uuid4().hex, seed, learner, layout, 0, "creating", overrides or {}, rules
        )
        stored = await command(self._redis, "SET", fresh.keys.record, fresh.encode(), "NX", "GET")
        record = fresh if stored is None else NamespaceRecord.decode(as_bytes(stored))
        if record.state == "deleted":
            # The deletion may have been interrupted, or a request may have written after it.
            await self._clear(record)
            record = await self._succeed(record, fresh)
        if record.partitions != partitions:
            raise NamespaceConflict(
                f"namespace {name} has {record.partitions} partitions, not {partitions}: the number is fixed at "
                "creation, so use that number or another namespace"
            )
        return await self.open(record)

    async def open(self, record: NamespaceRecord) -> NamespaceRecord:
        """Check the markers of a loaded namespace; complete it if its creation was interrupted."""
        if record.state == "creating":
            # Before it is ready, so that every ready namespace is listed.
            await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)
            await self.revive(record)
            return await self._finish(record)
        await self._check_markers(record)
        await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)
        return record

    async def revive(self, record: NamespaceRecord) -> None:
        """Write missing markers and groups; StoreReset if a partition belongs to another store.

        Only for creation and for a restore, which writes every user of the partitions afterwards.
        """
        partitions = range(record.partitions)
        await pipeline(
            self._redis,
            [("SET", record.keys.marker(partition), record.store_id, "NX") for partition in partitions],
        )
        await self._check_markers(record)
        await create_groups(self._redis, record.keys, partitions)

    async def load(self, name: str) -> NamespaceRecord | None:
        """The record of a namespace."""
        stored = await command(self._redis, "GET", NamespaceKeys(name, 1).record)
        return None if stored is None else NamespaceRecord.decode(as_bytes(stored))

    async def reload(self, record: NamespaceRecord) -> NamespaceRecord:
        """Current record; StoreReset if the namespace is gone or another one has its name."""
        current = await self.load(record.name)
        if current is None or current.store_id != record.store_id or current.state == "deleted":
            raise StoreReset(f"namespace {record.name} was deleted or belongs to another store")
        return current

    async def set_layout(self, record: NamespaceRecord, layout: dict[str, Json]) -> NamespaceRecord:
        """Set the feature layout and return the current record; if another caller was first, with its layout.

        An existing layout is replaced only if no event was ever enqueued; otherwise raises NamespaceConflict.
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
        """Set the layout of profiles unless it is set already; returns the current record."""
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
        """Change the learner's settings; NamespaceConflict if the record was changed meanwhile."""
        wanted = replace(record, learner=learner, revision=record.revision + 1)
        current = await self._compare_and_set(record, wanted)
        if current is not None:
            raise NamespaceConflict(
                f"namespace {record.name} is at revision {current.revision}, not {record.revision}: load it again"
            )
        return wanted

    async def change(self, record: NamespaceRecord, **changes: Json) -> NamespaceRecord | None:
        """Change fields of the record and return it; None if it was changed meanwhile."""
        wanted = replace(record, **changes, revision=record.revision + 1)
        return wanted if await self._compare_and_set(record, wanted) is None else None

    async def delete(self, record: NamespaceRecord) -> None:
        """Delete a namespace with all its data, except its record. Idempotent; a repeated call completes it.

        Scripts do not write to a partition without its marker.
        """
        record = await self.mark_deleted(record)
        await self._clear(record)
        await command(self._redis, "SREM", NAMESPACE_NAMES, record.name)
        begun = await self.load(record.name)
        if begun is not None and begun.state != "deleted":
            # A new namespace of this name was created meanwhile, and SREM removed it from the list.
            await command(self._redis, "SADD", NAMESPACE_NAMES, record.name)

    async def mark_deleted(self, record: NamespaceRecord) -> NamespaceRecord:
        """Mark a namespace as deleted, so that it is not opened any more; `delete` removes its data."""
        while record.state != "deleted":
            gone = await self.change(record, state="deleted", layout=None, overrides={}, profile_layout=None)
            record = gone or await self.load(record.name) or replace(record, state="deleted")
        return record

    async def _clear(self, deleted: NamespaceRecord) -> None:
        """Delete all data of a deleted namespace, and nothing of a new one of the same name."""
        keys = deleted.keys
        # Shared keys are deleted together, so that a reader does not find half of an arm.
        await self._unlink(deleted, [*keys.shared, *map(keys.marker, range(deleted.partitions))])
        async for found in scan(self._redis, keys.every_pattern):
            await self._unlink(deleted, [as_text(key) for key in found if key != keys.record.encode()])

    async def _unlink(self, deleted: NamespaceRecord, doomed: Iterable[str]) -> None:
        guarded: dict[str, list[str]] = {}
        for key in doomed:
            guarded.setdefault(deleted.keys.guard_of(key), []).append(key)
        await self._unlinking.call_many(
            ([guard, *keys], [deleted.store_id, "namespace" if guard == deleted.keys.record else "marker"])
            for guard, keys in guarded.items()
        )

    async def _succeed(self, deleted: NamespaceRecord, fresh: NamespaceRecord) -> NamespaceRecord:
        """Create a namespace under the name of a deleted one; of several callers one wins."""
        wanted = replace(fresh, revision=deleted.revision + 1)
        current = await self._compare_and_set(deleted, wanted)
        return wanted if current is None else current

    async def fill(
        self, record: NamespaceRecord, *, learner: Mapping[str, Json], rewards: RewardRules
    ) -> NamespaceRecord:
        """Add what the record of an older version lacks; of several callers the first one's values stay.

        NamespaceConflict if the added reward rules contradict the stored ones.
        """
        for _ in range(MAX_RACES):
            wanted = replace(
                record,
                learner={**learner, **record.learner},
                rewards=rewards.to_json() | (record.rewards or {}),
                revision=record.revision + 1,
            )
            if (wanted.learner, wanted.rewards) == (record.learner, record.rewards):
                return record
            try:
                RewardRules.from_json(wanted.rewards)
            except ValueError as error:
                raise NamespaceConflict(
                    f"the reward rules of namespace {record.name} contradict the environment: {error}"
                ) from error
            current = await self._compare_and_set(record, wanted)
            if current is None:
                return wanted
            record = current
        raise NamespaceConflict(f"the record of namespace {record.name} keeps changing")

    async def _finish(self, record: NamespaceRecord) -> NamespaceRecord:
        """Mark a namespace as ready, unless another caller did."""
        ready = replace(record, state="ready", revision=record.revision + 1)
        current = await self._compare_and_set(record, ready)
        return ready if current is None else current

    async def _compare_and_set(self, record: NamespaceRecord, wanted: NamespaceRecord) -> NamespaceRecord | None:
        """None if `wanted` was written, otherwise the stored record."""
        done, *stored = await self._replace.call(
            [record.keys.record], [record.store_id, record.revision, wanted.encode()]
        )
        if done:
            return None
        current = NamespaceRecord.decode(as_bytes(stored[0])) if stored else None
        if current is None or (current.store_id != record.store_id and record.state != "deleted"):
            raise StoreReset(f"the record of namespace {record.name} is missing or belongs to another store")
        if current.state == "deleted" and wanted.state != "deleted" and record.state != "deleted":
            raise StoreReset(f"namespace {record.name} was deleted")
        return current

    async def _check_markers(self, record: NamespaceRecord) -> None:
        partitions = range(record.partitions)
        markers = await pipeline(self._redis, [("GET", record.keys.marker(partition)) for partition in partitions])
        foreign = [
            partition
            for partition, marker in zip(partitions, markers, strict=True)
            if marker is None or as_text(marker) != record.store_id
        ]
        if foreign:
            raise StoreReset(
                f"namespace {record.name}: partitions {foreign} lost their data or belong to another store; "
                "restore a snapshot, or delete the keys of the namespace to start empty"
            )

    async def _events_enqueued(self, record: NamespaceRecord) -> int:
        counts = await pipeline(
            self._redis,
            [("HGET", record.keys.counters(partition), "enqueued") for partition in range(record.partitions)],
        )
        return sum(as_int(count, absent=0) for count in counts)
