"""Epochs: numbered publications of the shared state, derived by the one worker that holds the epoch lease."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import structlog

from metaban.store.client.connection import (
    BEFORE_ALL,
    Store,
    as_bytes,
    as_int,
    as_text,
    command,
    parse_entries,
    separate_client,
)
from metaban.store.client.scripts import load_script
from metaban.store.codec import decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.keys import NamespaceKeys

#: Lines kept in the epoch log; readers need only the newest.
EPOCH_LOG_CAP: Final = 1_000

#: Why the script does not publish an epoch.
REFUSALS: Final = {
    b"lease": "the lease was lost while the epoch was derived",
    b"number": "another epoch was published while it was derived",
    b"stamp": "the epoch it was derived from was replaced meanwhile",
    b"restoring": "a restore is unfinished",
}

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """One publication of the shared state; the first has number 0.

    A store that lost its latest writes assigns a number twice; the stamps of the two epochs differ. The stamp is set at
    publication, so neither it nor `follows` is in the blob. In the store `members` is a separate field, since
    forgotten users are removed from it.
    """

    number: int
    events: int  # applied in all partitions when this was derived
    tensors: dict[str, np.ndarray]
    members: tuple[str, ...]  # users of the pool; empty means all users
    created_ms: int
    refitted: int = 0  # number of the last epoch under which every user was refitted
    stamp: str = ""  # unique to a publication; empty before it, and in old stores
    follows: str = ""  # stamp of the epoch it was derived from; empty if there was none

    def encode(self, *, with_members: bool = True) -> bytes:
        """The epoch for a file; `with_members=False` for the store, which keeps the members separately."""
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
        """Members as stored."""
        return json.dumps(self.members).encode()

    @staticmethod
    def decode(blob: bytes, stored_members: bytes | None = None) -> Epoch:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["epoch"])
            # Old stores have the members in the blob.
            members = _user_ids(fields.get("members", []) if stored_members is None else stored_members)
            return Epoch(
                number=as_int(fields["number"]),
                events=as_int(fields["events"]),
                tensors=tensors,
                members=members,
                created_ms=as_int(fields["created_ms"]),
                refitted=as_int(fields["refitted"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptRecord(f"not an epoch: {type(error).__name__}") from error


def _user_ids(members: Any) -> tuple[str, ...]:
    """Members of an epoch, from a list or its JSON."""
    try:
        ids = json.loads(members) if isinstance(members, bytes) else members
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("the members of an epoch are not JSON") from error
    if not isinstance(ids, list) or not all(isinstance(member, str) for member in ids):
        raise CorruptRecord("the members of an epoch are not user ids")
    return tuple(ids)


def new_stamp() -> str:
    """New stamp for one publication."""
    return secrets.token_hex(8)


@final
class EpochStore:
    """Epochs of one namespace, and the lease of the worker that derives them."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
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
        """(number, stamp) of the newest epoch, without its tensors. No two epochs share both."""
        number, stamp = await command(self._redis, "HMGET", self._keys.epoch, "number", "stamp")
        return None if number is None else (as_int(number), as_text(stamp or b""))

    async def publish(self, epoch: Epoch, *, lease_token: str) -> bool:
        """Make this the current epoch. False, with a log line, if the store refuses it: see REFUSALS."""
        reply = await self._publish.call(
            [self._keys.record, self._keys.lease, self._keys.epoch, self._keys.epoch_log, self._keys.restoring],
            [
                self._store_id,
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
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")
        if reply != b"ok":
            log.warning("epoch_refused", number=epoch.number, reason=REFUSALS[reply])
        return bool(reply == b"ok")

    async def members(self) -> tuple[str, ...]:
        """Current members of the newest epoch, without its tensors."""
        members = await command(self._redis, "HGET", self._keys.epoch, "members")
        if members is None:  # no epoch, or one with its members in the blob
            epoch = await self.current()
            return () if epoch is None else epoch.members
        return _user_ids(members)

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Remove users from the members of the newest epoch; returns how many were members."""
        ids = list(user_ids)
        return as_int(await self._strike.call([self._keys.epoch], ids)) if ids else 0

    async def begin_refit(self, lease_token: str) -> int | None:
        """Number of a new refit, before its epoch is published; None if the lease is lost."""
        number = as_int(await self._refit.call([self._keys.lease, self._keys.refits], [lease_token]))
        return number or None

    async def log_head(self) -> str:
        """Cursor of the newest epoch."""
        reply = await command(self._redis, "XREVRANGE", self._keys.epoch_log, "+", "-", "COUNT", 1)
        rows = parse_entries(reply)
        return rows[0][0] if rows else BEFORE_ALL

    async def acquire_lease(self, token: str, ttl_ms: int, *, for_restore: bool = False) -> bool:
        """Acquire the lease if it is free or already ours. While a restore is unfinished only a restore gets it."""
        kind = "restore" if for_restore else ""
        return bool(await self._lease.call(self._lease_keys, ["acquire", token, ttl_ms, kind]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Renew the lease; False if it was lost."""
        return bool(await self._lease.call(self._lease_keys, ["renew", token, ttl_ms, ""]))

    async def renew_lease_separately(self, token: str, ttl_ms: int) -> bool:
        """`renew_lease` over a connection of its own, so that it can run on another event loop."""
        redis = separate_client(self._redis)
        try:
            return await EpochStore(redis, self._keys, self._store_id).renew_lease(token, ttl_ms)
        finally:
            await redis.aclose()

    async def release_lease(self, token: str) -> bool:
        """Release the lease; False if it was lost."""
        return bool(await self._lease.call(self._lease_keys, ["release", token, 0, ""]))

    @property
    def _lease_keys(self) -> list[str]:
        return [self._keys.lease, self._keys.restoring]
