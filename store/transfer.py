"""Transfer jobs: which users help a target, asked for by administrators and worked out by one leased worker.

Several are remembered for a day. A job names people, as its target or as its sources: forgetting one of them deletes
it, also while somebody is at work on it, and nothing more can be written of a job that is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, cast, final
from uuid import uuid4

from store.connection import Store, as_bytes, as_int, command
from store.errors import CorruptRecord, StoreReset
from store.keys import NamespaceKeys
from store.scripts import load_script

TransferState: TypeAlias = Literal["queued", "running", "failed", "done"]
TRANSFER_STATES: Final = ("queued", "running", "failed", "done")
#: Jobs of a namespace that are remembered, and for how long.
REMEMBERED: Final = 32
REMEMBERED_MS: Final = 24 * 3_600 * 1_000
#: Jobs that may wait or be under way at a time.
WAITING_MAX: Final = 8
#: Sources that a request may name.
SOURCES_MIN: Final = 2
SOURCES_MAX: Final = 50
#: Samples that a target needs: they are split into some to train on, to choose by and to judge with.
TARGET_SAMPLES_MIN: Final = 30


@final
@dataclass(frozen=True, slots=True)
class TransferQuestion:
    """Which sources help this target, by this metric?"""

    metric: str
    #: One of them: a user, or all users of a kind.
    user_id: str | None = None
    cluster: int | None = None
    #: Users; None: kinds of users are the sources.
    sources: tuple[str, ...] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The users that it names."""
        return (*(() if self.user_id is None else (self.user_id,)), *(self.sources or ()))

    def encode(self) -> str:
        """The same text for the same question, whatever the order of the sources."""
        told = asdict(self) | {"sources": None if self.sources is None else sorted(self.sources)}
        return json.dumps(told, sort_keys=True, ensure_ascii=False)

    @staticmethod
    def decode(text: str) -> TransferQuestion:
        told = json.loads(text)
        sources = told["sources"]
        return TransferQuestion(
            metric=_typed(told["metric"], str),
            user_id=None if told["user_id"] is None else _typed(told["user_id"], str),
            cluster=None if told["cluster"] is None else _typed(told["cluster"], int),
            sources=None if sources is None else tuple(_typed(source, str) for source in sources),
        )


@final
@dataclass(frozen=True, slots=True)
class TransferJob:
    """One question, and what became of it so far; what came of it stands apart, since it is long."""

    id: str
    question: TransferQuestion
    #: The incarnation of each user named when it was asked: whoever was forgotten since is named no more.
    users: Mapping[str, int]
    requested_ms: int
    state: TransferState = "queued"
    started_ms: int = 0
    finished_ms: int = 0
    progress: float = 0.0  # of the one under way, from 0 to 1
    doing: str = ""
    reason: str = ""  # of a failed one
    #: How often somebody began with it.
    begun: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in ("failed", "done")

    def encode(self) -> str:
        """As JSON. The question stands in it as text: scripts compare it."""
        told = {name: value for name, value in asdict(self).items() if name not in ("question", "users")}
        told |= {"asked": self.question.encode(), "users": dict(self.users)}
        return json.dumps(told, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def decode(stored: bytes) -> TransferJob:
        try:
            told = json.loads(stored)
            state = told["state"]
            if state not in TRANSFER_STATES:
                raise CorruptRecord("a transfer job is in an unknown state")
            return TransferJob(
                id=_typed(told["id"], str),
                question=TransferQuestion.decode(told["asked"]),
                users={user: _typed(since, int) for user, since in told["users"].items()},
                state=cast(TransferState, state),
                progress=float(told["progress"]),
                doing=_typed(told["doing"], str),
                reason=_typed(told["reason"], str),
                **{name: _typed(told[name], int) for name in ("requested_ms", "started_ms", "finished_ms", "begun")},
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptRecord("a transfer job cannot be read") from error


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """The job that answers a question, a new one or one that stands; None: too many wait."""

    job: TransferJob | None
    new: bool = False


@final
class TransferStore:
    """The transfer jobs of one namespace, and the lease of whoever works on one."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._request = load_script(redis, "transfer_request")
        self._put_job = load_script(redis, "transfer_job")
        self._strike = load_script(redis, "strike_transfer")
        self._lease = load_script(redis, "lease")

    async def request(
        self, question: TransferQuestion, users: Mapping[str, int], now_ms: int, *, waiting_max: int = WAITING_MAX
    ) -> Asked:
        """Ask for a job, of users in these incarnations.

        Whoever is forgotten in this very moment may be named by it: look again afterwards, and strike them.
        """
        if set(users) != set(question.named):
            raise ValueError("the incarnations have to be those of the users named")
        asked = question.encode()
        job = TransferJob(uuid4().hex[:12], TransferQuestion.decode(asked), users, now_ms)
        reply = await self._request.call(
            [self._keys.record, self._keys.transfer_jobs, self._keys.transfer_results],
            [
                self._store_epoch,
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
            return Asked(TransferJob.decode(as_bytes(reply[1])))
        return Asked(job, new=True) if reply[0] == b"ok" else Asked(None)

    async def jobs(self, now_ms: int) -> list[TransferJob]:
        """The jobs that are remembered, the newest first, without those that cannot be read."""
        reply = await command(self._redis, "HVALS", self._keys.transfer_jobs)
        found = []
        for stored in reply:
            try:
                job = TransferJob.decode(as_bytes(stored))
            except CorruptRecord:
                continue
            if not _over(job, now_ms):
                found.append(job)
        return sorted(found, key=lambda job: (-job.requested_ms, job.id))

    async def job(self, job_id: str, now_ms: int) -> tuple[TransferJob, dict[str, Any] | None] | None:
        """A job and, once it is done, what came of it; None when it is not remembered."""
        stored = await command(self._redis, "HGET", self._keys.transfer_jobs, job_id)
        if stored is None:
            return None
        job = TransferJob.decode(as_bytes(stored))
        if _over(job, now_ms):
            return None
        result = await command(self._redis, "HGET", self._keys.transfer_results, job_id) if job.ended else None
        return job, None if result is None else _decode_result(as_bytes(result))

    async def put_job(self, job: TransferJob, *, lease_token: str, result: Mapping[str, Any] | None = None) -> bool:
        """Say how a job is coming along; False when the lease is lost, and when the job is not there any more."""
        keys = self._keys
        told = "" if result is None else json.dumps(result, ensure_ascii=False, allow_nan=False)
        reply = await self._put_job.call(
            [keys.record, keys.transfer_lease, keys.transfer_jobs, keys.transfer_results],
            [self._store_epoch, lease_token, job.id, job.encode(), REMEMBERED_MS, told],
        )
        self._check(reply)
        return bool(reply == b"ok")

    async def strike(self, user_ids: Iterable[str]) -> int:
        """Delete the jobs that name any of these users, with what came of them; how many there were."""
        ids = list(user_ids)
        if not ids:
            return 0
        return as_int(await self._strike.call([self._keys.transfer_jobs, self._keys.transfer_results], ids))

    async def named(self) -> dict[str, int]:
        """Everyone whom a job names, with the earliest incarnation it may mean."""
        found: dict[str, int] = {}
        for job in await self.jobs(0):
            for user, since in job.users.items():
                found[user] = min(since, found.get(user, since))
        return found

    async def acquire_lease(self, token: str, ttl_ms: int) -> bool:
        """Take the lease if it is free or ours already; nobody gets it while a restore is unfinished."""
        keys = [self._keys.transfer_lease, self._keys.restoring]
        return bool(await self._lease.call(keys, ["acquire", token, ttl_ms, ""]))

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Keep the lease; False when it was lost."""
        return bool(await self._lease.call([self._keys.transfer_lease], ["renew", token, ttl_ms, ""]))

    async def release_lease(self, token: str) -> bool:
        """Give the lease back; False when it was lost."""
        return bool(await self._lease.call([self._keys.transfer_lease], ["release", token, 0, ""]))

    def _check(self, reply: bytes) -> None:
        if reply == b"reset":
            raise StoreReset(f"the record of namespace {self._keys.namespace} vanished or is of another store")


def _over(job: TransferJob, now_ms: int) -> bool:
    return job.requested_ms + REMEMBERED_MS <= now_ms


def _decode_result(stored: bytes) -> dict[str, Any]:
    try:
        result = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("what came of a transfer job is not JSON") from error
    if not isinstance(result, dict):
        raise CorruptRecord("what came of a transfer job is not an object")
    return result


def _typed(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CorruptRecord(f"expected {kind.__name__} in a transfer job, got {type(value).__name__}")
    return value
