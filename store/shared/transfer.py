"""Transfer jobs: which sources help a target user. Admins request them; the worker that holds the lease runs them.

Jobs are kept for a day. Forgetting a user deletes the jobs that name the user, even running ones; nothing is written
to a deleted job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast, final
from uuid import uuid4

from metaban.store.client.connection import Store, as_bytes, as_int, command
from metaban.store.client.scripts import load_script
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.keys import NamespaceKeys

TransferState: TypeAlias = Literal["queued", "running", "failed", "done"]

TRANSFER_STATES: Final = ("queued", "running", "failed", "done")

#: Most jobs kept in a namespace, and for how long.
REMEMBERED: Final = 32
REMEMBERED_MS: Final = 24 * 3_600 * 1_000

#: Most jobs that may be queued or running.
WAITING_MAX: Final = 8

#: Number of sources that a request may name.
SOURCES_MIN: Final = 2
SOURCES_MAX: Final = 50

#: Least samples of a target: they are split into a training, a validation and a test set.
TARGET_SAMPLES_MIN: Final = 30


@final
@dataclass(frozen=True, slots=True)
class TransferQuestion:
    """Question of a job: which sources help this target, by this metric?"""

    metric: str
    #: Target: either a user, or all users of a kind.
    user_id: str | None = None
    cluster: int | None = None
    #: Source users; None: the clusters of users are the sources.
    sources: tuple[str, ...] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """Users that the question names."""
        return (*(() if self.user_id is None else (self.user_id,)), *(self.sources or ()))

    def encode(self) -> str:
        """Same text for the same question, whatever the order of the sources."""
        fields = asdict(self) | {"sources": None if self.sources is None else sorted(self.sources)}
        return json.dumps(fields, sort_keys=True, ensure_ascii=False)

    @staticmethod
    def decode(text: str) -> TransferQuestion:
        fields = json.loads(text)
        sources = fields["sources"]
        return TransferQuestion(
            metric=_typed(fields["metric"], str),
            user_id=None if fields["user_id"] is None else _typed(fields["user_id"], str),
            cluster=None if fields["cluster"] is None else _typed(fields["cluster"], int),
            sources=None if sources is None else tuple(_typed(source, str) for source in sources),
        )


@final
@dataclass(frozen=True, slots=True)
class TransferJobRecord:
    """One job and its status. Its result is stored separately, since it is long."""

    id: str
    question: TransferQuestion
    #: Incarnation of each named user at the time of the request.
    users: Mapping[str, int]
    requested_ms: int
    #: Place in the order of requests, given by the script that stores the job; 0 for jobs of an older version.
    number: int = 0
    state: TransferState = "queued"
    started_ms: int = 0
    finished_ms: int = 0
    progress: float = 0.0  # of a running job, 0..1
    doing: str = ""
    reason: str = ""  # of a failed job
    #: How often it was started.
    begun: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: jobs are run in the order in which they were requested."""
        return self.number, self.requested_ms

    @property
    def ended(self) -> bool:
        """Whether it is failed or done."""
        return self.state in ("failed", "done")

    def encode(self) -> str:
        """JSON of the job, with the question as text, which scripts compare."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("question", "users")}
        fields |= {"asked": self.question.encode(), "users": dict(self.users)}
        if not self.number:
            del fields["number"]  # the script adds it
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def decode(stored: bytes) -> TransferJobRecord:
        try:
            fields = json.loads(stored)
            state = fields["state"]
            if state not in TRANSFER_STATES:
                raise CorruptRecord("a transfer job is in an unknown state")
            return TransferJobRecord(
                id=_typed(fields["id"], str),
                question=TransferQuestion.decode(fields["asked"]),
                users={user: _typed(since, int) for user, since in fields["users"].items()},
                number=_typed(fields.get("number", 0), int),
                state=cast(TransferState, state),
                progress=float(fields["progress"]),
                doing=_typed(fields["doing"], str),
                reason=_typed(fields["reason"], str),
                **{name: _typed(fields[name], int) for name in ("requested_ms", "started_ms", "finished_ms", "begun")},
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptRecord("a transfer job cannot be read") from error


@final
@dataclass(frozen=True, slots=True)
class TransferRequestResult:
    """Result of a request: a new or existing job; None if too many are waiting."""

    job: TransferJobRecord | None
    new: bool = False


@final
class TransferStore:
    """Transfer jobs of one namespace, and the lease for running them."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._request = load_script(redis, "transfer_request")
        self._put_job = load_script(redis, "transfer_job")
        self._strike = load_script(redis, "strike_transfer")
        self._lease = load_script(redis, "lease")

    async def request(
        self, question: TransferQuestion, users: Mapping[str, int], now_ms: int, *, waiting_max: int = WAITING_MAX
    ) -> TransferRequestResult:
        """Request a job; `users` are the incarnations of the users it names.

        A user forgotten at this moment may be named by the new job: check again afterwards and `strike` them.
        """
        if set(users) != set(question.named):
            raise ValueError("users must be exactly those that the question names")
        asked = question.encode()
        job = TransferJobRecord(uuid4().hex[:12], TransferQuestion.decode(asked), users, now_ms)
        reply = await self._request.call(
            [self._keys.record, self._keys.transfer_jobs, self._keys.transfer_results],
            [
                self._store_id,
                now_ms,
                REMEMBERED_MS,
                REMEMBERED,
                waiting_max,
                job.id,
                asked,
                job.encode(),
            ],
        )
        self._check(reply[0])
        if reply[0] == b"standing":
            return TransferRequestResult(TransferJobRecord.decode(as_bytes(reply[1])))
        if reply[0] == b"full":
            return TransferRequestResult(None)
        return TransferRequestResult(replace(job, number=as_int(reply[1])), new=True)

    async def jobs(self, now_ms: int) -> list[TransferJobRecord]:
        """Stored jobs, newest first, without damaged ones."""
        reply = await command(self._redis, "HVALS", self._keys.transfer_jobs)
        found = []
        for stored in reply:
            try:
                job = TransferJobRecord.decode(as_bytes(stored))
            except CorruptRecord:
                continue
            if not _expired(job, now_ms):
                found.append(job)
        return sorted(found, key=lambda job: job.order, reverse=True)

    async def job(self, job_id: str, now_ms: int) -> tuple[TransferJobRecord, dict[str, Any] | None] | None:
        """A job and, if it is done, its result; None if there is no such job."""
        stored = await command(self._redis, "HGET", self._keys.transfer_jobs, job_id)
        if stored is None:
            return None
        job = TransferJobRecord.decode(as_bytes(stored))
        if _expired(job, now_ms):
            return None
        result = await command(self._redis, "HGET", self._keys.transfer_results, job_id) if job.ended else None
        return job, None if result is None else _decode_result(as_bytes(result))

    async def put_job(
        self, job: TransferJobRecord, *, lease_token: str, result: Mapping[str, Any] | None = None
    ) -> bool:
        """Write the status of a job; False if the lease is lost or the job was deleted."""
        keys = self._keys
        encoded_result = "" if result is None else json.dumps(result, ensure_ascii=False, allow_nan=False)
        reply = await self._put_job.call(
            [keys.record, keys.transfer_lease, keys.transfer_jobs, keys.transfer_results],
            [self._store_id, lease_token, job.id, job.encode(), REMEMBERED_MS, encoded_result],
        )
        self._check(reply)
        return bool(reply == b"ok")

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Delete the jobs that name any of these users, and their results; returns their number."""
        ids = list(user_ids)
        if not ids:
            return 0
        return as_int(await self._strike.call([self._keys.transfer_jobs, self._keys.transfer_results], ids))

    async def named(self) -> dict[str, int]:
        """Users named by jobs, with the earliest incarnation named."""
        found: dict[str, int] = {}
        for job in await self.jobs(0):
            for user, since in job.users.items():
                found[user] = min(since, found.get(user, since))
        return found

    async def acquire_lease(self, token: str, ttl_ms: int) -> bool:
        """Acquire the lease if it is free or already ours; not while a restore is unfinished."""
        keys = [self._keys.transfer_lease, self._keys.restoring]
        return bool(await self._lease.call(keys, ["acquire", token, ttl_ms, ""]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Renew the lease; False if it was lost."""
        return bool(await self._lease.call([self._keys.transfer_lease], ["renew", token, ttl_ms, ""]))

    async def release_lease(self, token: str) -> bool:
        """Release the lease; False if it was lost."""
        return bool(await self._lease.call([self._keys.transfer_lease], ["release", token, 0, ""]))

    def _check(self, reply: bytes) -> None:
        if reply == b"reset":
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")


def _expired(job: TransferJobRecord, now_ms: int) -> bool:
    return job.requested_ms + REMEMBERED_MS <= now_ms


def _decode_result(stored: bytes) -> dict[str, Any]:
    try:
        result = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("the result of a transfer job is not JSON") from error
    if not isinstance(result, dict):
        raise CorruptRecord("the result of a transfer job is not an object")
    return result


def _typed(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CorruptRecord(f"expected {kind.__name__} in a transfer job, got {type(value).__name__}")
    return value
