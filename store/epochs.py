"""Epochs: what all users share, derived from their states by one leased trainer and published by number."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from store.codec import decode_tensors, encode_tensors
from store.connection import (
    BEFORE_ALL,
    Store,
    as_bytes,
    as_int,
    as_text,
    block_arguments,
    command,
    parse_entries,
    stream_entries,
)
from store.errors import CorruptRecord, StoreReset
from store.keys import NamespaceKeys
from store.scripts import load_script

#: Lines kept of the epoch log; a reader only needs the newest.
EPOCH_LOG_CAP: Final = 1_000


@final
@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """One published state of everything shared; the first has number 0.

    A store that comes back without its latest writes gives a number twice: the stamp tells the two epochs apart. It is
    given at publication, so neither it nor `follows` is in the blob. In the store `members` are not in it either: users
    who are forgotten have to be struck out.
    """

    number: int
    events: int  # applied in all partitions when this was derived
    tensors: dict[str, np.ndarray]
    members: tuple[str, ...]  # candidate pool; empty means all users
    created_ms: int
    refitted: int = 0  # number of the last epoch under which every user had to be fitted again
    stamp: str = ""  # unlike that of any other publication; empty before one, and in stores from before there were any
    follows: str = ""  # stamp of the epoch this was derived from; empty when there was none

    def encode(self, *, with_members: bool = True) -> bytes:
        """The epoch as a file holds it, or as the store does, which has the members beside it."""
        fields: dict[str, Any] = {
            "number": self.number,
            "events": self.events,
            "created_ms": self.created_ms,
            "refitted": self.refitted,
        }
        if with_members:
            fields["members"] = list(self.members)
        return encode_tensors(self.tensors, {"epoch": json.dumps(fields)})

    def encode_members(self) -> bytes:
        """The members, as the store holds them."""
        return json.dumps(self.members).encode()

    @staticmethod
    def decode(blob: bytes, members_beside: bytes | None = None) -> Epoch:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["epoch"])
            # Stores of before have them in the blob.
            members = _user_ids(fields.get("members", []) if members_beside is None else members_beside)
            return Epoch(
                number=as_int(fields["number"]),
                events=as_int(fields["events"]),
                tensors=tensors,
                members=members,
                created_ms=as_int(fields["created_ms"]),
                refitted=as_int(fields["refitted"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptRecord(f"not an epoch: {error!r}") from error


def _user_ids(members: Any) -> tuple[str, ...]:
    """The members of an epoch, or the JSON of them."""
    try:
        ids = json.loads(members) if isinstance(members, bytes) else members
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("the members of an epoch are not JSON") from error
    if not isinstance(ids, list) or not all(isinstance(member, str) for member in ids):
        raise CorruptRecord("the members of an epoch are not user ids")
    return tuple(ids)


def new_stamp() -> str:
    """A stamp for one publication."""
    return secrets.token_hex(8)


@final
class EpochStore:
    """The epochs of one namespace, and the lease of the one who makes them."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._publish = load_script(redis, "publish")
        self._lease = load_script(redis, "lease")
        self._refit = load_script(redis, "refit")
        self._strike = load_script(redis, "strike")

    async def current(self) -> Epoch | None:
        """The newest epoch."""
        fields = ("blob", "members", "stamp", "follows")
        blob, members, stamp, follows = await command(self._redis, "HMGET", self._keys.epoch, *fields)
        if blob is None:
            return None
        return replace(
            Epoch.decode(as_bytes(blob), members), stamp=as_text(stamp or b""), follows=as_text(follows or b"")
        )

    async def current_identity(self) -> tuple[int, str] | None:
        """(number, stamp) of the newest epoch, without its tensors; no other has them, even in a store set back."""
        number, stamp = await command(self._redis, "HMGET", self._keys.epoch, "number", "stamp")
        return None if number is None else (as_int(number), as_text(stamp or b""))

    async def publish(self, epoch: Epoch, *, lease_token: str) -> bool:
        """Make this the current epoch; False when the stored one is not what it was derived from.

        False as well when the lease is lost, and while a restore is unfinished.
        """
        reply = await self._publish.call(
            [self._keys.record, self._keys.lease, self._keys.epoch, self._keys.epoch_log, self._keys.restoring],
            [
                self._store_epoch,
                lease_token,
                epoch.number,
                epoch.encode(with_members=False),
                EPOCH_LOG_CAP,
                new_stamp(),
                epoch.follows,
                epoch.encode_members(),
            ],
        )
        if reply == b"reset":
            raise StoreReset(f"the record of namespace {self._keys.namespace} vanished or is of another store")
        return bool(reply == b"ok")

    async def members(self) -> tuple[str, ...]:
        """The members of the newest epoch as they are now, without its tensors."""
        members = await command(self._redis, "HGET", self._keys.epoch, "members")
        if members is None:  # no epoch yet, or one of before they stood beside it
            epoch = await self.current()
            return () if epoch is None else epoch.members
        return _user_ids(members)

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Strike users out of the members of the newest epoch; how many of them were."""
        ids = list(user_ids)
        return as_int(await self._strike.call([self._keys.epoch], ids)) if ids else 0

    async def begin_refit(self, lease_token: str) -> int | None:
        """The number under which users may be fitted before their epoch is out; None when the lease is lost."""
        number = as_int(await self._refit.call([self._keys.lease, self._keys.refits], [lease_token]))
        return number or None

    async def tail(self, cursor: str, block_ms: int) -> list[tuple[str, int]]:
        """(cursor, number) of epochs published after `cursor`; waits at most `block_ms`."""
        wait = block_arguments(self._redis, block_ms)
        reply = await command(self._redis, "XREAD", *wait, "STREAMS", self._keys.epoch_log, cursor)
        return [(entry_id, as_int(fields.get(b"n"))) for entry_id, fields in stream_entries(reply)]

    async def log_head(self) -> str:
        """The cursor of the newest epoch."""
        reply = await command(self._redis, "XREVRANGE", self._keys.epoch_log, "+", "-", "COUNT", 1)
        rows = parse_entries(reply)
        return rows[0][0] if rows else BEFORE_ALL

    async def acquire_lease(self, token: str, ttl_ms: int, *, for_restore: bool = False) -> bool:
        """Take the lease if it is free or ours already; while a restore is unfinished only a restore gets it."""
        kind = "restore" if for_restore else ""
        return bool(await self._lease.call(self._lease_keys, ["acquire", token, ttl_ms, kind]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Keep the lease; False when it was lost."""
        return bool(await self._lease.call(self._lease_keys, ["renew", token, ttl_ms, ""]))

    async def release_lease(self, token: str) -> bool:
        """Give the lease back; False when it was lost."""
        return bool(await self._lease.call(self._lease_keys, ["release", token, 0, ""]))

    @property
    def _lease_keys(self) -> list[str]:
        return [self._keys.lease, self._keys.restoring]
