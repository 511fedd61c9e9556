"""The admin calls. Each function makes the call for one method of the clients, as in `api.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, Protocol, TypeVar, final, runtime_checkable

import httpx

from metaban.client.admin_types import (
    Arm,
    AuditLine,
    Calibration,
    Forgotten,
    Fusion,
    FusionJob,
    Group,
    ImportMode,
    Job,
    Letter,
    LetterOrder,
    Namespace,
    Page,
    Replayed,
    Settings,
    Snapshot,
    Stream,
    TransferJob,
    TransferOverview,
    User,
)
from metaban.client.api import as_answer
from metaban.client.codec import (
    ArmFeatures,
    Features,
    arm_json,
    arms_json,
    encoded,
    features_json,
    flag,
    given,
    member,
    members,
    number,
    optional,
    parse,
    query,
    read,
    segment,
    text,
    texts,
)
from metaban.client.errors import InvalidArgument, JobFailed
from metaban.client.transport import Call, Lines, Pages, Pause, Policy, Steps

T = TypeVar("T")

#: Size of the pieces in which an import is sent.
CHUNK_BYTES: Final = 65_536
NDJSON: Final = "application/x-ndjson"
#: First and longest pause between two requests for the state of a job.
FIRST_POLL_S: Final = 0.05
LONGEST_POLL_S: Final = 2.0


def as_page(answer: type[T], name: str) -> Callable[[httpx.Response], Page[T]]:
    """Reads one page of a list."""

    def read_page(response: httpx.Response) -> Page[T]:
        document = parse(response.content)
        items: tuple[T, ...] = read(tuple[answer, ...], member(document, name), name)  # type: ignore[valid-type]
        cursor: str | None = read(str | None, member(document, "cursor"), "cursor")  # type: ignore[arg-type]
        count: int | None = read(int | None, document.get("count"), "count")  # type: ignore[arg-type]
        return Page(items, cursor, count)

    return read_page


def as_list(answer: type[T], name: str) -> Callable[[httpx.Response], tuple[T, ...]]:
    """Reads a whole list."""

    def read_list(response: httpx.Response) -> tuple[T, ...]:
        items: tuple[T, ...] = read(tuple[answer, ...], member(parse(response.content), name), name)  # type: ignore[valid-type]
        return items

    return read_list


def ignored(response: httpx.Response) -> None:
    """Ignores the answer."""


# Catalogue


def list_arms(*, limit: int | None = None, cursor: str | None = None) -> Call[Page[Arm]]:
    """One page of the catalogue."""
    return Call("GET", "/admin/arms", as_page(Arm, "arms"), query(limit=limit, cursor=cursor))


def iterate_arms(*, limit: int | None = None) -> Pages[Arm]:
    """All arms of the catalogue; `limit` is the size of a page."""
    return Pages(lambda cursor: list_arms(limit=limit, cursor=cursor))


def get_arm(arm_id: str) -> Call[Arm]:
    """One arm."""
    return Call("GET", _arm_path(arm_id), as_answer(Arm))


def create_arm(arm_id: str, features: Features) -> Call[Arm]:
    """Create an arm; raises Conflict if it exists."""
    content = encoded(arm_json(arm_id, features))
    return Call("POST", "/admin/arms", as_answer(Arm), content=content, repeatable=False)


def put_arm(arm_id: str, features: Features, *, version: int | None = None) -> Call[Arm]:
    """Create an arm or replace its features. With `version`, only if the arm has this version (0: does not exist);
    raises Conflict otherwise."""
    return Call(
        "PUT",
        _arm_path(arm_id),
        as_answer(Arm),
        query(version=version),
        encoded({"features": features_json("features", features)}),
        # After a try without an answer, a retry could find the version changed by that try.
        repeatable=version is None,
    )


def delete_arm(arm_id: str, *, version: int | None = None) -> Call[None]:
    """Delete an arm from the catalogue; with `version`, only if the arm has this version."""
    return Call("DELETE", _arm_path(arm_id), ignored, query(version=version), repeatable=version is None, deletes=True)


def _arm_path(arm_id: str) -> str:
    return f"/admin/arms/{segment('arm_id', arm_id)}"


@runtime_checkable
class OpenFile(Protocol):
    """An open file, binary or text."""

    def read(self, size: int, /) -> bytes | str: ...
    def seekable(self) -> bool: ...
    def seek(self, offset: int, /) -> int: ...
    def tell(self) -> int: ...


def import_lines(source: Path | OpenFile | ArmFeatures, *, mode: ImportMode = "upsert") -> Call[Job]:
    """Import arms into the catalogue: from an NDJSON file (a Path or an open file), or arms as `recommend` takes them,
    which may come from a generator.

    Mode `replace` deletes all other arms. The import is a job: `wait_for_job` waits for it.
    """
    if isinstance(source, str | bytes):
        raise InvalidArgument('the name of a file must be a Path: import_lines(Path("arms.ndjson"))')
    content: Callable[[], Iterator[bytes]]
    if isinstance(source, Path):
        _opened(source).close()  # an error shows before anything is sent
        content = partial(_pieces_of_path, source)
    elif isinstance(source, OpenFile):
        content = partial(_pieces_of_file, source, _position(source))
    else:
        arms_json("arms to import", source)
        content = partial(_pieces_of_arms, source)
    return Call(
        "POST",
        "/admin/arms/import",
        as_answer(Job),
        query(mode=mode),
        content,
        media_type=NDJSON,
        repeatable=False,
    )


def export_arms() -> Lines[Arm]:
    """All arms, read while they arrive."""
    call: Call[httpx.Response] = Call("GET", "/admin/arms/export", lambda response: response, streamed=True)
    return Lines(call, lambda line: read(Arm, parse(line)))


def _pieces_of_arms(arms: ArmFeatures) -> Iterator[bytes]:
    piece = bytearray()
    for arm in arms_json("arms to import", arms):
        piece += encoded(arm) + b"\n"
        if len(piece) >= CHUNK_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise _unreadable(error) from error


def _pieces_of_path(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        yield from _pieces_of_file(file, None)


def _pieces_of_file(file: OpenFile, start: int | None) -> Iterator[bytes]:
    if start is not None:
        file.seek(start)  # a retry sends the same bytes
    while piece := _piece(file):
        yield piece


def _piece(file: OpenFile) -> bytes:
    try:
        piece = file.read(CHUNK_BYTES)
        return piece.encode() if isinstance(piece, str) else bytes(memoryview(piece))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(error) from error


def _position(file: OpenFile) -> int | None:
    try:
        return file.tell() if file.seekable() else None
    except (OSError, ValueError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> InvalidArgument:
    return InvalidArgument(f"the file cannot be read: {error}")


# Users and groups


def groups(
    user_id: str,
    *,
    arm_id: str | None = None,
    features: Features | None = None,
    context: Features | None = None,
    limit: int | None = None,
) -> Call[Group]:
    """The users who agree with a user about an arm: an arm of the catalogue, or any arm by its features. Lists the
    `limit` nearest."""
    if (arm_id is None) == (features is None):
        raise InvalidArgument("pass either arm_id, of an arm of the catalogue, or features")
    if context is not None and features is None:
        raise InvalidArgument("pass a context together with features, those of the arm, instead of arm_id")
    if features is None:
        return Call("GET", "/admin/groups", as_answer(Group), query(user_id=user_id, arm_id=arm_id, limit=limit))
    body = given(
        user_id=text("user_id", user_id),
        features=features_json("features", features),
        context=None if context is None else features_json("context", context),
        limit=limit,
    )
    return Call("POST", "/admin/groups", as_answer(Group), content=encoded(body))


def user(user_id: str, *, events: int | None = None) -> Call[User]:
    """What the store holds about a user, with the latest `events` events."""
    return Call("GET", _user_path(user_id), as_answer(User), query(events=events))


def forget(user_id: str) -> Call[Forgotten]:
    """Forget a user. After a retry, `removed` may count only what an earlier try did not delete."""
    return Call("DELETE", _user_path(user_id), as_answer(Forgotten))


def _user_path(user_id: str) -> str:
    return f"/admin/users/{segment('user_id', user_id)}"


# Warm starts and predictions


def fusion() -> Call[Fusion]:
    """State of warm starts and of the training of the fusion model."""
    return Call("GET", "/admin/fusion", as_answer(Fusion))


def train_fusion() -> Call[FusionJob]:
    """Train the fusion model; returns the job that is queued or running, if there is one."""
    return Call("POST", "/admin/fusion", as_answer(FusionJob))


def calibration() -> Call[Calibration]:
    """How predictions compare with rewards."""
    return Call("GET", "/admin/calibration", as_answer(Calibration))


# Events


def stream() -> Call[Stream]:
    """State of the event streams."""
    return Call("GET", "/admin/stream", as_answer(Stream))


def list_letters(
    *, limit: int | None = None, cursor: str | None = None, order: LetterOrder = "newest"
) -> Call[Page[Letter]]:
    """One page of the dead letters."""
    parameters = query(limit=limit, cursor=cursor, order=order)
    return Call("GET", "/admin/dead-letters", as_page(Letter, "letters"), parameters)


def iterate_letters(*, limit: int | None = None, order: LetterOrder = "newest") -> Pages[Letter]:
    """All dead letters; `limit` is the size of a page."""
    return Pages(lambda cursor: list_letters(limit=limit, cursor=cursor, order=order))


def replay_letter(partition: int, letter_id: str) -> Call[str]:
    """Put a dead letter back into its stream; returns the id of the new entry."""
    return Call("POST", f"{_letter_path(partition, letter_id)}/replay", as_answer(str, "entry_id"), repeatable=False)


def replay_letters(*, cursor: str | None = None) -> Call[Replayed]:
    """Put up to 1,000 dead letters back into their streams."""
    return Call("POST", "/admin/dead-letters/replay", as_answer(Replayed), query(cursor=cursor), repeatable=False)


def discard_letter(partition: int, letter_id: str) -> Call[None]:
    """Delete a dead letter."""
    return Call("DELETE", _letter_path(partition, letter_id), ignored, deletes=True)


def _letter_path(partition: int, letter_id: str) -> str:
    return f"/admin/dead-letters/{segment('partition', partition)}/{segment('letter_id', letter_id)}"


# Snapshots and jobs


class AnyJob(Protocol):
    """A job of any kind; `state` is `done`, `failed`, or something else while it runs."""

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> str: ...


J = TypeVar("J", bound=AnyJob)


@final
@dataclass(frozen=True, slots=True)
class JobWatch(Generic[J]):
    """Polls a job until it ends."""

    poll: Call[J]
    #: Why the job failed.
    reason: Callable[[J], str | None]
    on_progress: Callable[[J], None] | None
    timeout_s: float

    def __post_init__(self) -> None:
        if self.on_progress is not None and not callable(self.on_progress):
            raise InvalidArgument("on_progress must be a function of one argument, the job")
        if not (isinstance(self.timeout_s, float) and self.timeout_s == math.inf):
            number("timeout_s", self.timeout_s)

    def steps(self, policy: Policy) -> Steps[J]:
        """Poll with growing pauses."""
        deadline, pause_s = policy.clock() + self.timeout_s, FIRST_POLL_S
        while True:
            job = yield from self.poll.steps(policy)
            if self.on_progress is not None:
                self.on_progress(job)
            if job.state == "done":
                return job
            if job.state == "failed":
                raise JobFailed(self.reason(job) or "the service gives no reason", job_id=job.id)
            if policy.clock() + pause_s >= deadline:
                raise JobFailed(f"the job is not done after {self.timeout_s:g} s; it continues", job_id=job.id)
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)


def list_snapshots(*, verify: bool = False) -> Call[tuple[Snapshot, ...]]:
    """The snapshots, newest first; `verify` reads each file completely."""
    parameters = query(verify=flag("verify", verify) or None)
    return Call("GET", "/admin/snapshots", as_list(Snapshot, "snapshots"), parameters)


def create_snapshot(name: str = "") -> Call[Job]:
    """Create a snapshot."""
    parameters = query(name=text("name", name) or None)
    return Call("POST", "/admin/snapshots", as_answer(Job), parameters, repeatable=False)


def restore_snapshot(snapshot_id: str) -> Call[Job]:
    """Restore a snapshot."""
    path = f"/admin/snapshots/{segment('snapshot_id', snapshot_id)}/restore"
    return Call("POST", path, as_answer(Job), repeatable=False)


def list_jobs() -> Call[tuple[Job, ...]]:
    """The jobs that the service remembers."""
    return Call("GET", "/admin/jobs", as_list(Job, "jobs"))


def get_job(job_id: str) -> Call[Job]:
    """State of a job."""
    return Call("GET", f"/admin/jobs/{segment('job_id', job_id)}", as_answer(Job))


def wait_for_job(
    job_id: str, *, on_progress: Callable[[Job], None] | None = None, timeout_s: float = 3600.0
) -> JobWatch[Job]:
    """Wait until a job is done; raises JobFailed if it fails or takes longer than `timeout_s`."""
    return JobWatch(get_job(job_id), lambda job: job.error, on_progress, timeout_s)


# Task modeling: which users help a target


def transfer_overview() -> Call[TransferOverview]:
    """The transfer jobs, without their results, and the weights of the clusters."""
    return Call("GET", "/admin/transfer", as_answer(TransferOverview))


def start_transfer(
    *,
    user_id: str | None = None,
    cluster: int | None = None,
    sources: Iterable[str] | None = None,
    metric: str = "mse",
) -> Call[TransferJob]:
    """Start a job that finds which sources help a target (a user or a cluster). Without `sources`, every other cluster
    is a source.

    Returns the queued or running job if there is one with the same arguments.
    """
    if (user_id is None) == (cluster is None):
        raise InvalidArgument("pass the target: either user_id or cluster")
    body = given(user_id=user_id, cluster=cluster, sources=optional(texts, "sources", sources), metric=metric)
    return Call("POST", "/admin/transfer", as_answer(TransferJob), content=encoded(body))


def get_transfer(job_id: str) -> Call[TransferJob]:
    """State of a transfer job, and its result."""
    return Call("GET", f"/admin/transfer/{segment('job_id', job_id)}", as_answer(TransferJob))


def wait_for_transfer(
    job_id: str, *, on_progress: Callable[[TransferJob], None] | None = None, timeout_s: float = 3600.0
) -> JobWatch[TransferJob]:
    """Wait until a transfer job is done; raises JobFailed if it fails or takes longer than `timeout_s`."""
    return JobWatch(get_transfer(job_id), lambda job: job.reason, on_progress, timeout_s)


# Settings, audit and namespaces


def get_config() -> Call[Settings]:
    """The live settings of the namespace."""
    return Call("GET", "/admin/config", as_answer(Settings))


def patch_config(changes: Mapping[str, Any], *, revision: int | None = None) -> Call[Settings]:
    """Change live settings; None restores the deployment's value. With `revision`, only if it is the current revision;
    raises Conflict otherwise."""
    return Call(
        "PATCH",
        "/admin/config",
        as_answer(Settings),
        query(revision=revision),
        encoded(members("changes", changes)),
        media_type="application/merge-patch+json",
        # After a try without an answer, a retry could find the revision changed by that try.
        repeatable=revision is None,
    )


def list_audit(*, limit: int | None = None, cursor: str | None = None) -> Call[Page[AuditLine]]:
    """One page of the audit log, newest first."""
    return Call("GET", "/admin/audit", as_page(AuditLine, "lines"), query(limit=limit, cursor=cursor))


def iterate_audit(*, limit: int | None = None) -> Pages[AuditLine]:
    """The whole audit log, newest first; `limit` is the size of a page."""
    return Pages(lambda cursor: list_audit(limit=limit, cursor=cursor))


def list_namespaces() -> Call[tuple[Namespace, ...]]:
    """All namespaces of the store."""
    return Call("GET", "/admin/namespaces", as_list(Namespace, "namespaces"), of_namespace=False)


def create_namespace(
    name: str,
    *,
    preset: str | None = None,
    learner: Mapping[str, Any] | None = None,
    partitions: int | None = None,
    seed: int | None = None,
    hash_dimension: int | None = None,
    context_products: bool | None = None,
    intercept: bool | None = None,
    arm_features: int | None = None,
    context_features: int | None = None,
) -> Call[Namespace]:
    """Create a namespace; arguments left out have the deployment's values. Raises Conflict if it exists."""
    body = given(
        name=text("name", name),
        preset=preset,
        learner=optional(members, "learner", learner),
        partitions=partitions,
        seed=seed,
        hash_dimension=hash_dimension,
        context_products=context_products,
        intercept=intercept,
        arm_features=arm_features,
        context_features=context_features,
    )
    content = encoded(body)
    return Call(
        "POST", "/admin/namespaces", as_answer(Namespace), content=content, repeatable=False, of_namespace=False
    )


def get_namespace(name: str) -> Call[Namespace]:
    """One namespace."""
    return Call("GET", _namespace_path(name), as_answer(Namespace), of_namespace=False)


def delete_namespace(name: str) -> Call[None]:
    """Delete a namespace and everything in it."""
    return Call("DELETE", _namespace_path(name), ignored, deletes=True, of_namespace=False)


def _namespace_path(name: str) -> str:
    return f"/admin/namespaces/{segment('name', name)}"
