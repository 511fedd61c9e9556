"""Writes of a restore, and its intent: a record that stays in the store until the final epoch is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from metaban.store.client.connection import Store, as_int, as_text, pipeline
from metaban.store.client.node import Argument
from metaban.store.client.scripts import load_script
from metaban.store.errors import CorruptRecord, SnapshotError, StoreReset
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.epochs import EPOCH_LOG_CAP, Epoch, new_stamp
from metaban.store.snapshots.records import UserRecord

#: Error of a restore when another one has begun.
OVERTAKEN: Final = "another restore has begun; this one was stopped"
FIELDS: Final = ("generation", "token", "snapshot", "target")


@final
@dataclass(frozen=True, slots=True)
class Restoring:
    """An unfinished restore; `alive` while its process holds the lease."""

    snapshot: str
    generation: int
    target: int  # number of the epoch that it will publish
    alive: bool = True


@final
class RestoreStore:
    """Restore of one namespace; every write names the generation of its restore."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str, *, update_log_cap: int = 100_000) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._log_cap = update_log_cap
        self._begin = load_script(redis, "begin_restore")
        self._restore = load_script(redis, "restore")
        self._finish = load_script(redis, "finish_restore")

    async def unfinished(self) -> Restoring | None:
        """The unfinished restore, if there is one."""
        fields, lease = await pipeline(
            self._redis, [("HMGET", self._keys.restoring, *FIELDS), ("GET", self._keys.lease)]
        )
        generation, token, snapshot, target = fields
        if generation is None:
            return None
        return Restoring(as_text(snapshot), as_int(generation), as_int(target), alive=lease == token)

    async def begin(self, snapshot: str, *, lease_token: str, least_number: int) -> Restoring:
        """Write the intent of a restore, replacing an unfinished one. The lease must be held."""
        keys = self._keys
        status, *rest = await self._begin.call(
            [keys.record, keys.lease, keys.epoch, keys.restoring, keys.restores],
            [self._store_id, lease_token, snapshot, least_number],
        )
        self._check(status)
        return Restoring(snapshot, as_int(rest[0]), as_int(rest[1]))

    async def write(
        self, restoring: Restoring, partition: int, records: Sequence[UserRecord], *, applied: int
    ) -> list[bool]:
        """Restore users, or drop those without a state. Returns False for a user who was forgotten and stays so.

        The counter of applied events is raised to at least `applied`, for a new store.
        """
        keys = [
            self._keys.marker(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.restored(partition),
        ]
        arguments: list[Argument] = [self._store_id, restoring.generation, self._log_cap, applied]
        for record in records:
            if self._keys.partition_of(record.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            user_id = record.user_id
            keys += [self._keys.user(user_id), self._keys.samples(user_id), self._keys.start(user_id)]
            arguments += [user_id, record.incarnation, record.version, record.epoch, record.state, record.start]
            arguments += [len(record.samples), *record.samples]
        status, *done = await self._restore.call(keys, arguments)
        if status == b"corrupt":
            raise CorruptRecord(f"the version of a user of partition {partition} is damaged")
        self._check(status)
        return [bool(flag) for flag in done]

    async def finish(self, restoring: Restoring, epoch: Epoch, *, lease_token: str) -> None:
        """Publish the final epoch and delete the intent."""
        keys = self._keys
        status = await self._finish.call(
            [keys.record, keys.lease, keys.epoch, keys.epoch_log, keys.restoring],
            [
                self._store_id,
                lease_token,
                restoring.generation,
                epoch.number,
                epoch.encode(with_members=False),
                EPOCH_LOG_CAP,
                new_stamp(),
                epoch.encode_members(),
            ],
        )
        self._check(status)

    def _check(self, status: bytes) -> None:
        if status in (b"reset", b"store-id"):
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")
        if status != b"ok":
            raise SnapshotError(OVERTAKEN)
