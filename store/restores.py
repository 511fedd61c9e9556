"""The one restore that may be under way: its intent stands in the store until the epoch that ends it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from store.connection import Argument, Store, as_int, as_text, pipeline
from store.epochs import EPOCH_LOG_CAP, Epoch, new_stamp
from store.errors import CorruptRecord, SnapshotError, StoreReset
from store.keys import NamespaceKeys
from store.scripts import load_script
from store.snapshot_records import UserRecord

#: What is said to whoever restores while somebody else does.
OVERTAKEN: Final = "another restore has begun meanwhile; this one has stopped"
FIELDS: Final = ("generation", "token", "snapshot", "target")


@final
@dataclass(frozen=True, slots=True)
class Restoring:
    """A restore that is not finished; `alive` while somebody is at it."""

    snapshot: str
    generation: int
    target: int  # number of the epoch that will end it
    alive: bool = True


@final
class RestoreStore:
    """How users of one namespace are put back; every write names the generation of its restore."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str, *, update_log_cap: int = 100_000) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._log_cap = update_log_cap
        self._begin = load_script(redis, "begin_restore")
        self._restore = load_script(redis, "restore")
        self._finish = load_script(redis, "finish_restore")

    async def unfinished(self) -> Restoring | None:
        """The restore that has begun and not ended, if there is one."""
        fields, lease = await pipeline(
            self._redis, [("HMGET", self._keys.restoring, *FIELDS), ("GET", self._keys.lease)]
        )
        generation, token, snapshot, target = fields
        if generation is None:
            return None
        return Restoring(as_text(snapshot), as_int(generation), as_int(target), alive=lease == token)

    async def begin(self, snapshot: str, *, lease_token: str, least_number: int) -> Restoring:
        """Announce a restore, in place of one that was not finished; the lease must be held."""
        keys = self._keys
        status, *rest = await self._begin.call(
            [keys.record, keys.lease, keys.epoch, keys.restoring, keys.restores],
            [self._store_epoch, lease_token, snapshot, least_number],
        )
        self._check(status)
        return Restoring(snapshot, as_int(rest[0]), as_int(rest[1]))

    async def write(
        self, restoring: Restoring, partition: int, records: Sequence[UserRecord], *, applied: int
    ) -> list[bool]:
        """Put users back, or drop those without a state; False for one who was forgotten on request and stays so.

        Counters of what was ever applied are raised to `applied` where they are below, in a store that is new.
        """
        keys = [
            self._keys.marker(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.restored(partition),
        ]
        arguments: list[Argument] = [self._store_epoch, restoring.generation, self._log_cap, applied]
        for record in records:
            if self._keys.partition_of(record.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            user_id = record.user_id
            keys += [self._keys.user(user_id), self._keys.samples(user_id), self._keys.start(user_id)]
            arguments += [user_id, record.incarnation, record.version, record.epoch, record.state, record.start]
            arguments += [len(record.samples), *record.samples]
        status, *done = await self._restore.call(keys, arguments)
        if status == b"corrupt":
            raise CorruptRecord(f"the version of a user of partition {partition} is not one")
        self._check(status)
        return [bool(flag) for flag in done]

    async def finish(self, restoring: Restoring, epoch: Epoch, *, lease_token: str) -> None:
        """Publish the epoch that ends the restore."""
        keys = self._keys
        status = await self._finish.call(
            [keys.record, keys.lease, keys.epoch, keys.epoch_log, keys.restoring],
            [
                self._store_epoch,
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
        if status in (b"reset", b"store-epoch"):
            raise StoreReset(f"namespace {self._keys.namespace} vanished or belongs to another store")
        if status != b"ok":
            raise SnapshotError(OVERTAKEN)
