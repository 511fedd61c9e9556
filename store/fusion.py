"""Fusion: the model that makes warm starts from profiles, trained by one leased worker and published by version.

What it was made from can be taken back: profiles of its sources stand beside its arrays, each under a random token,
and only one hash says whose token it is.
"""

from __future__ import annotations

import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, cast, final

import numpy as np

from store.codec import decode_tensors, encode_tensors
from store.connection import Argument, Store, as_bytes, as_int, as_text, command
from store.epochs import EPOCH_LOG_CAP, new_stamp
from store.errors import CorruptRecord, StoreReset
from store.keys import NamespaceKeys
from store.scripts import load_script

FLOAT64: Final = np.dtype("<f8")
JobState: TypeAlias = Literal["idle", "queued", "running", "failed", "done"]
JobCause: TypeAlias = Literal["", "schedule", "growth", "request"]
JOB_STATES: Final = ("idle", "queued", "running", "failed", "done")
JOB_CAUSES: Final = ("", "schedule", "growth", "request")
RECORD_FIELDS: Final = ("version", "blob", "sources", "report", "created_ms", "stamp", "events")


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionSource:
    """What fusion was told of one user: a token in place of their name, and their profile."""

    token: str
    profile: np.ndarray  # float64 [d]
    incarnation: int = 0  # of the user when this was read: whoever was forgotten since is no source


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionRecord:
    """One published version; the first has number 1.

    The stamp is given at publication, and anew whenever a source is struck out.
    """

    version: int
    arrays: dict[str, np.ndarray]
    sources: tuple[FusionSource, ...]
    report: dict[str, Any]
    created_ms: int
    stamp: str = ""
    events: int = 0  # applied in all partitions when its sources were read

    def encode(self) -> bytes:
        """The arrays."""
        return encode_tensors(self.arrays, {})

    def encode_sources(self) -> bytes:
        """The sources; profiles as text, which scripts leave as it is."""
        rows = [
            [source.token, b64encode(np.asarray(source.profile, dtype=FLOAT64).tobytes()).decode(), source.incarnation]
            for source in self.sources
        ]
        return json.dumps(rows).encode()


@final
@dataclass(frozen=True, slots=True)
class FusionStanding:
    """What the newest version says of itself, in numbers."""

    version: int
    created_ms: int
    events: int
    count: int  # of the sources it was trained on
    struck: int  # of them since


@final
@dataclass(frozen=True, slots=True)
class FusionJob:
    """What became of the latest training that was asked for or due."""

    state: JobState = "idle"
    requested_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    progress: float = 0.0  # of the one under way, from 0 to 1
    doing: str = ""
    reason: str = ""  # of a failed one
    by: JobCause = ""

    def arguments(self) -> list[Argument]:
        """Names and values, as scripts take them."""
        return [part for pair in asdict(self).items() for part in pair]

    @staticmethod
    def decode(stored: Mapping[bytes, bytes]) -> FusionJob:
        found = {field.name: stored.get(field.name.encode()) for field in fields(FusionJob)}
        state, by = as_text(found["state"] or b"idle"), as_text(found["by"] or b"")
        try:
            progress = float(found["progress"] or 0)
        except ValueError as error:
            raise CorruptRecord("the progress of a fusion job is not a number") from error
        if state not in JOB_STATES or by not in JOB_CAUSES:
            raise CorruptRecord("a fusion job is in an unknown state")
        return FusionJob(
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
    """A name for a source that tells nothing of the user."""
    return secrets.token_hex(8)


@final
class FusionStore:
    """The fusion of one namespace, the job that trains it and the lease of whoever does."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
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
        """(version, stamp) of the newest version, without its arrays; no other has them."""
        version, stamp = await command(self._redis, "HMGET", self._keys.fusion, "version", "stamp")
        return None if version is None else (as_int(version), as_text(stamp or b""))

    async def publish(self, record: FusionRecord, names: Mapping[str, str], *, lease_token: str) -> bool:
        """Make this the current version, with the names of its sources; False when it does not follow the stored one.

        False as well when the lease is lost, and while a restore is unfinished. Whoever was forgotten while it was
        trained is named again: strike them right after.
        """
        if {source.token for source in record.sources} != names.keys():
            raise ValueError("every source needs a name, and nobody else does")
        keys = self._keys
        arguments: list[Argument] = [
            self._store_epoch,
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
        """The users behind these tokens, without those who were struck out."""
        asked = list(dict.fromkeys(tokens))
        if not asked:
            return {}
        replies = await command(self._redis, "HMGET", self._keys.fusion_sources, *asked)
        return {token: as_text(user) for token, user in zip(asked, replies, strict=True) if user is not None}

    async def everyone(self) -> dict[str, str]:
        """All tokens there are, and who is behind them."""
        reply = await command(self._redis, "HGETALL", self._keys.fusion_sources)
        return {as_text(token): as_text(user) for token, user in _pairs(reply)}

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Strike users out of the sources and of who is behind tokens; how many of them were there."""
        ids = list(user_ids)
        if not ids:
            return 0
        keys = [self._keys.fusion, self._keys.fusion_sources, self._keys.epoch, self._keys.epoch_log]
        return as_int(await self._strike.call(keys, [EPOCH_LOG_CAP, new_stamp(), *ids]))

    async def standing(self) -> FusionStanding | None:
        """What the newest version says of itself, without its arrays and sources."""
        names = ("version", "created_ms", "events", "count", "struck")
        version, *rest = await command(self._redis, "HMGET", self._keys.fusion, *names)
        if version is None:
            return None
        return FusionStanding(as_int(version), *(as_int(number, absent=0) for number in rest))

    async def request(self, now_ms: int) -> FusionJob:
        """Ask for a training; the job that holds, another one if that waits or is under way already."""
        wanted = FusionJob(state="queued", requested_ms=now_ms, by="request")
        keys = [self._keys.record, self._keys.fusion_job]
        reply = await self._request.call(keys, [self._store_epoch, *wanted.arguments()])
        self._check(reply)
        return wanted if reply == b"ok" else await self.job()

    async def job(self) -> FusionJob:
        """What became of the latest training."""
        return FusionJob.decode(dict(_pairs(await command(self._redis, "HGETALL", self._keys.fusion_job))))

    async def put_job(self, job: FusionJob, *, lease_token: str) -> bool:
        """Say how the training is coming along; False when the lease is lost."""
        keys = [self._keys.record, self._keys.fusion_lease, self._keys.fusion_job]
        reply = await self._put_job.call(keys, [self._store_epoch, lease_token, *job.arguments()])
        self._check(reply)
        return bool(reply == b"ok")

    async def acquire_lease(self, token: str, ttl_ms: int) -> bool:
        """Take the lease if it is free or ours already; nobody gets it while a restore is unfinished."""
        keys = [self._keys.fusion_lease, self._keys.restoring]
        return bool(await self._lease.call(keys, ["acquire", token, ttl_ms, ""]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Keep the lease; False when it was lost."""
        return bool(await self._lease.call([self._keys.fusion_lease], ["renew", token, ttl_ms, ""]))

    async def release_lease(self, token: str) -> bool:
        """Give the lease back; False when it was lost."""
        return bool(await self._lease.call([self._keys.fusion_lease], ["release", token, 0, ""]))

    def _check(self, reply: bytes) -> None:
        if reply == b"reset":
            raise StoreReset(f"the record of namespace {self._keys.namespace} vanished or is of another store")


def _pairs(reply: Any) -> Iterable[tuple[bytes, bytes]]:
    """The fields of a hash, whichever version of the protocol they came by."""
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
