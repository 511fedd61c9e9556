"""Fusion models, which make warm starts from profiles: published versions, the training job and its lease.

The profiles of the source users are stored with the model, each under a random token; one hash maps tokens to user
ids, so that a forgotten user can be removed.
"""

from __future__ import annotations

import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, cast, final

import numpy as np

from metaban.store.client.connection import Store, as_bytes, as_int, as_text, command
from metaban.store.client.node import Argument
from metaban.store.client.scripts import load_script
from metaban.store.codec import decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.epochs import EPOCH_LOG_CAP, new_stamp

FLOAT64: Final = np.dtype("<f8")

JobState: TypeAlias = Literal["idle", "queued", "running", "failed", "done"]

JobCause: TypeAlias = Literal["", "schedule", "growth", "request"]

JOB_STATES: Final = ("idle", "queued", "running", "failed", "done")
JOB_CAUSES: Final = ("", "schedule", "growth", "request")
RECORD_FIELDS: Final = ("version", "blob", "sources", "report", "created_ms", "stamp", "events")


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionSource:
    """One source user of a fusion model: token and profile."""

    token: str
    profile: np.ndarray  # float64 [d]
    incarnation: int = 0  # of the user when the profile was read; a user forgotten since is not a source


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionRecord:
    """One published version of the model; the first is 1.

    The stamp is set at publication, and again whenever a source is removed.
    """

    version: int
    arrays: dict[str, np.ndarray]
    sources: tuple[FusionSource, ...]
    report: dict[str, Any]
    created_ms: int
    stamp: str = ""
    events: int = 0  # applied in all partitions when the sources were read

    def encode(self) -> bytes:
        """The arrays."""
        return encode_tensors(self.arrays, {})

    def encode_sources(self) -> bytes:
        """The sources as JSON; profiles in base64, so that scripts do not change them."""
        rows = [
            [source.token, b64encode(np.asarray(source.profile, dtype=FLOAT64).tobytes()).decode(), source.incarnation]
            for source in self.sources
        ]
        return json.dumps(rows).encode()


@final
@dataclass(frozen=True, slots=True)
class FusionStanding:
    """Numbers about the newest version."""

    version: int
    created_ms: int
    events: int
    count: int  # sources it was trained on
    struck: int  # of them, removed since


@final
@dataclass(frozen=True, slots=True)
class FusionJobRecord:
    """Status of the latest training job."""

    state: JobState = "idle"
    requested_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    progress: float = 0.0  # of a running job, 0..1
    doing: str = ""
    reason: str = ""  # of a failed job
    by: JobCause = ""

    def arguments(self) -> list[Argument]:
        """Field names and values, as script arguments."""
        return [part for pair in asdict(self).items() for part in pair]

    @staticmethod
    def decode(stored: Mapping[bytes, bytes]) -> FusionJobRecord:
        found = {field.name: stored.get(field.name.encode()) for field in fields(FusionJobRecord)}
        state, by = as_text(found["state"] or b"idle"), as_text(found["by"] or b"")
        try:
            progress = float(found["progress"] or 0)
        except ValueError as error:
            raise CorruptRecord("the progress of a fusion job is not a number") from error
        if state not in JOB_STATES or by not in JOB_CAUSES:
            raise CorruptRecord("a fusion job is in an unknown state")
        return FusionJobRecord(
            state=cast(JobState, state),
            requested_ms=as_int(found["requested_ms"], absent=0),
            started_ms=as_int(found["started_ms"], absent=0),
            finished_ms=as_int(found["finished_ms"], absent=0),
            progress=progress,
            doing=as_text(found["doing"] or b""),
            reason=as_text(found["reason"] or b""),
            by=cast(JobCause, by),
        )


def new_token() -> str:
    """Random token of a source."""
    return secrets.token_hex(8)


@final
class FusionStore:
    """Fusion model of one namespace, its training job and the lease for it."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._publish = load_script(redis, "publish_fusion")
        self._strike = load_script(redis, "strike_fusion")
        self._put_job = load_script(redis, "fusion_job")
        self._request = load_script(redis, "fusion_request")
        self._lease = load_script(redis, "lease")

    async def current(self) -> FusionRecord | None:
        """The newest version."""
        reply = await command(self._redis, "HMGET", self._keys.fusion, *RECORD_FIELDS)
        version, blob, sources, report, created_ms, stamp, events = reply
        if version is None:
            return None
        arrays, _ = decode_tensors(as_bytes(blob))
        return FusionRecord(
            version=as_int(version),
            arrays=arrays,
            sources=_decode_sources(as_bytes(sources)),
            report=_decode_report(as_bytes(report)),
            created_ms=as_int(created_ms),
            stamp=as_text(stamp or b""),
            events=as_int(events, absent=0),
        )

    async def identity(self) -> tuple[int, str] | None:
        """(version, stamp) of the newest version, without its arrays. No two versions share both."""
        version, stamp = await command(self._redis, "HMGET", self._keys.fusion, "version", "stamp")
        return None if version is None else (as_int(version), as_text(stamp or b""))

    async def publish(self, record: FusionRecord, names: Mapping[str, str], *, lease_token: str) -> bool:
        """Make this the current version; `names` maps tokens to user ids. False if it does not follow the stored one.

        Also False if the lease is lost, and while a restore is unfinished. Users forgotten during the training are
        among the names: remove them with `strike` right after.
        """
        if {source.token for source in record.sources} != names.keys():
            raise ValueError("names must have exactly the tokens of the sources")
        keys = self._keys
        arguments: list[Argument] = [
            self._store_id,
            lease_token,
            record.version,
            new_stamp(),
            record.encode(),
            record.encode_sources(),
            json.dumps(record.report, allow_nan=False),
            record.created_ms,
            record.events,
            len(record.sources),
            EPOCH_LOG_CAP,
        ]
        arguments += [part for pair in names.items() for part in pair]
        reply = await self._publish.call(
            [
                keys.record,
                keys.fusion_lease,
                keys.fusion,
                keys.fusion_sources,
                keys.epoch,
                keys.epoch_log,
                keys.restoring,
            ],
            arguments,
        )
        self._check(reply)
        return bool(reply == b"ok")

    async def names(self, tokens: Iterable[str]) -> dict[str, str]:
        """User ids of these tokens, without removed ones."""
        asked = list(dict.fromkeys(tokens))
        if not asked:
            return {}
        replies = await command(self._redis, "HMGET", self._keys.fusion_sources, *asked)
        return {token: as_text(user) for token, user in zip(asked, replies, strict=True) if user is not None}

    async def everyone(self) -> dict[str, str]:
        """User ids of all tokens."""
        reply = await command(self._redis, "HGETALL", self._keys.fusion_sources)
        return {as_text(token): as_text(user) for token, user in _pairs(reply)}

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Remove users from the sources and from the tokens; returns how many were there."""
        ids = list(user_ids)
        if not ids:
            return 0
        keys = [self._keys.fusion, self._keys.fusion_sources, self._keys.epoch, self._keys.epoch_log]
        return as_int(await self._strike.call(keys, [EPOCH_LOG_CAP, new_stamp(), *ids]))

    async def standing(self) -> FusionStanding | None:
        """Numbers about the newest version, without its arrays and sources."""
        names = ("version", "created_ms", "events", "count", "struck")
        version, *rest = await command(self._redis, "HMGET", self._keys.fusion, *names)
        if version is None:
            return None
        return FusionStanding(as_int(version), *(as_int(number, absent=0) for number in rest))

    async def request(self, now_ms: int) -> FusionJobRecord:
        """Request a training; returns its job, or the one that is queued or running already."""
        wanted = FusionJobRecord(state="queued", requested_ms=now_ms, by="request")
        keys = [self._keys.record, self._keys.fusion_job]
        reply = await self._request.call(keys, [self._store_id, *wanted.arguments()])
        self._check(reply)
        return wanted if reply == b"ok" else await self.job()

    async def job(self) -> FusionJobRecord:
        """Latest training job."""
        return FusionJobRecord.decode(dict(_pairs(await command(self._redis, "HGETALL", self._keys.fusion_job))))

    async def put_job(self, job: FusionJobRecord, *, lease_token: str) -> bool:
        """Write the status of the training; False if the lease is lost."""
        keys = [self._keys.record, self._keys.fusion_lease, self._keys.fusion_job]
        reply = await self._put_job.call(keys, [self._store_id, lease_token, *job.arguments()])
        self._check(reply)
        return bool(reply == b"ok")

    async def acquire_lease(self, token: str, ttl_ms: int) -> bool:
        """Acquire the lease if it is free or already ours; not while a restore is unfinished."""
        keys = [self._keys.fusion_lease, self._keys.restoring]
        return bool(await self._lease.call(keys, ["acquire", token, ttl_ms, ""]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Renew the lease; False if it was lost."""
        return bool(await self._lease.call([self._keys.fusion_lease], ["renew", token, ttl_ms, ""]))

    async def release_lease(self, token: str) -> bool:
        """Release the lease; False if it was lost."""
        return bool(await self._lease.call([self._keys.fusion_lease], ["release", token, 0, ""]))

    def _check(self, reply: bytes) -> None:
        if reply == b"reset":
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")


def _pairs(reply: Any) -> Iterable[tuple[bytes, bytes]]:
    """Fields of a hash, from a RESP2 or RESP3 reply."""
    return reply.items() if isinstance(reply, dict) else zip(reply[0::2], reply[1::2], strict=True)


def _decode_sources(stored: bytes) -> tuple[FusionSource, ...]:
    try:
        return tuple(
            FusionSource(_text(token), np.frombuffer(b64decode(profile, validate=True), dtype=FLOAT64), as_int(since))
            for token, profile, since in json.loads(stored)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptRecord("the sources of a fusion cannot be read") from error


def _decode_report(stored: bytes) -> dict[str, Any]:
    try:
        report = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("the report of a fusion is not JSON") from error
    if not isinstance(report, dict):
        raise CorruptRecord("the report of a fusion is not an object")
    return report


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptRecord(f"expected text in a fusion, got {type(value).__name__}")
    return value
