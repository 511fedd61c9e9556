"""The calls of administrators, as plans, in the manner of `service.client_calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import httpx

from service.client_admin_types import (
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
    User,
)
from service.client_calls import as_answer, as_list, as_page, encoded, ignored, query, segment
from service.client_core import Call, Lines, Pages
from service.client_errors import Unsendable
from service.client_jobs import JobWatch
from service.client_reading import parse, read
from service.client_types import Features, arm_json, features_json

#: Pieces that an import is sent in.
CHUNK_BYTES: Final = 65_536
NDJSON: Final = "application/x-ndjson"


@runtime_checkable
class OpenFile(Protocol):
    """A file that is open, for bytes or for text."""

    def read(self, size: int, /) -> bytes | str: ...
    def seekable(self) -> bool: ...
    def seek(self, offset: int, /) -> int: ...
    def tell(self) -> int: ...


# The catalogue


def list_arms(*, limit: int | None = None, cursor: str | None = None) -> Call[Page[Arm]]:
    """A page of the catalogue."""
    return Call("GET", "/admin/arms", as_page(Arm, "arms"), query(limit=limit, cursor=cursor))


def iterate_arms(*, limit: int | None = None) -> Pages[Arm]:
    """All arms of the catalogue, `limit` with every request."""
    return Pages(lambda cursor: list_arms(limit=limit, cursor=cursor))


def get_arm(arm_id: str) -> Call[Arm]:
    """One arm."""
    return Call("GET", _arm_path(arm_id), as_answer(Arm))


def create_arm(arm_id: str, features: Features) -> Call[Arm]:
    """A new arm; raises Conflict when there is one of that id."""
    content = encoded(arm_json(arm_id, features))
    return Call("POST", "/admin/arms", as_answer(Arm), content=content, repeatable=False)


def put_arm(arm_id: str, features: Features, *, version: int | None = None) -> Call[Arm]:
    """A new arm, or other features for one that is there. With `version`: only if the arm has that one (0: if there is
    none), otherwise raises Conflict."""
    return Call(
        "PUT",
        _arm_path(arm_id),
        as_answer(Arm),
        query(version=version),
        encoded({"features": features_json(features)}),
        # A retry would find the version changed by the try before it.
        repeatable=version is None,
    )


def delete_arm(arm_id: str, *, version: int | None = None) -> Call[None]:
    """Take an arm out of the catalogue; with `version`, only if it has that one."""
    return Call("DELETE", _arm_path(arm_id), ignored, query(version=version), repeatable=version is None, deletes=True)


def _arm_path(arm_id: str) -> str:
    return f"/admin/arms/{segment(arm_id)}"


def import_lines(
    source: Path | OpenFile | Mapping[str, Features] | Iterable[tuple[str, Features]],
    *,
    mode: ImportMode = "upsert",
) -> Call[Job]:
    """Put many arms into the catalogue: those of an NDJSON file, by its path or open, or (id, features) from anywhere,
    sent as they come.

    `replace` makes them all there is. Look after the job with `wait_for_job`. An iterator is used up by it.
    """

    start = source.tell() if isinstance(source, OpenFile) and source.seekable() else None

    def chunks() -> Iterator[bytes]:
        if isinstance(source, Path):
            return _pieces_of_path(source)
        if not isinstance(source, OpenFile):
            return _joined(_lines_of(source))
        if start is not None:
            source.seek(start)  # another try begins where the first did
        return _pieces_of_file(source)

    return Call(
        "POST",
        "/admin/arms/import",
        as_answer(Job),
        query(mode=mode),
        chunks,
        media_type=NDJSON,
        repeatable=False,
    )


def export_arms() -> Lines[Arm]:
    """All arms, read while they arrive."""
    call: Call[httpx.Response] = Call("GET", "/admin/arms/export", lambda response: response, streamed=True)
    return Lines(call, lambda line: read(Arm, parse(line)))


def _lines_of(source: Mapping[str, Features] | Iterable[tuple[str, Features]]) -> Iterator[bytes]:
    for pair in source.items() if isinstance(source, Mapping) else source:
        try:
            arm_id, features = pair
        except (TypeError, ValueError):
            raise Unsendable("arms to import are pairs of an id and features, or the lines of a file") from None
        yield encoded(arm_json(arm_id, features)) + b"\n"


def _joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= CHUNK_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _pieces_of_path(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from _pieces_of_file(file)


def _pieces_of_file(file: OpenFile) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece.encode() if isinstance(piece, str) else piece


# Users and groups


def groups(
    user_id: str,
    *,
    arm_id: str | None = None,
    features: Features | None = None,
    context: Features | None = None,
    limit: int | None = None,
) -> Call[Group]:
    """Who agrees with a user about an arm: one of the catalogue, or any by its features; lists the `limit` nearest."""
    if (arm_id is None) == (features is None):
        raise Unsendable("name an arm of the catalogue by arm_id, or give the features of one")
    if features is None:
        return Call("GET", "/admin/groups", as_answer(Group), query(user_id=user_id, arm_id=arm_id, limit=limit))
    body: dict[str, Any] = {"user_id": user_id, "features": features_json(features)}
    if context is not None:
        body["context"] = features_json(context)
    if limit is not None:
        body["limit"] = limit
    return Call("POST", "/admin/groups", as_answer(Group), content=encoded(body))


def user(user_id: str, *, events: int | None = None) -> Call[User]:
    """What is stored of a user, with so many of their latest events."""
    return Call("GET", _user_path(user_id), as_answer(User), query(events=events))


def forget(user_id: str) -> Call[Forgotten]:
    """Forget everything about a user. After a retry `removed` may count what the try before it left."""
    return Call("DELETE", _user_path(user_id), as_answer(Forgotten))


def _user_path(user_id: str) -> str:
    return f"/admin/users/{segment(user_id)}"


# Warm starts


def fusion() -> Call[Fusion]:
    """What new users begin from, and how its training is doing."""
    return Call("GET", "/admin/fusion", as_answer(Fusion))


def train_fusion() -> Call[FusionJob]:
    """Have a worker train fusion; the training that waits or is under way, if one does."""
    return Call("POST", "/admin/fusion", as_answer(FusionJob))


# Predictions


def calibration() -> Call[Calibration]:
    """Whether predictions come true."""
    return Call("GET", "/admin/calibration", as_answer(Calibration))


# Events


def stream() -> Call[Stream]:
    """How rewards are doing on their way to the learner."""
    return Call("GET", "/admin/stream", as_answer(Stream))


def list_letters(
    *, limit: int | None = None, cursor: str | None = None, order: LetterOrder = "newest"
) -> Call[Page[Letter]]:
    """A page of the events that were given up on."""
    parameters = query(limit=limit, cursor=cursor, order=order)
    return Call("GET", "/admin/dead-letters", as_page(Letter, "letters"), parameters)


def iterate_letters(*, limit: int | None = None, order: LetterOrder = "newest") -> Pages[Letter]:
    """All events that were given up on, `limit` with every request."""
    return Pages(lambda cursor: list_letters(limit=limit, cursor=cursor, order=order))


def replay_letter(partition: int, letter_id: str) -> Call[str]:
    """Have one learned again; what it is called in its stream now."""
    return Call("POST", f"{_letter_path(partition, letter_id)}/replay", as_answer(str, "entry_id"), repeatable=False)


def replay_letters(*, cursor: str | None = None) -> Call[Replayed]:
    """Have up to 1,000 of them learned again."""
    return Call("POST", "/admin/dead-letters/replay", as_answer(Replayed), query(cursor=cursor), repeatable=False)


def discard_letter(partition: int, letter_id: str) -> Call[None]:
    """Throw one away."""
    return Call("DELETE", _letter_path(partition, letter_id), ignored, deletes=True)


def _letter_path(partition: int, letter_id: str) -> str:
    return f"/admin/dead-letters/{segment(partition)}/{segment(letter_id)}"


# Snapshots and jobs


def list_snapshots(*, verify: bool = False) -> Call[tuple[Snapshot, ...]]:
    """The snapshots there are, the newest first; `verify` reads them whole."""
    return Call("GET", "/admin/snapshots", as_list(Snapshot, "snapshots"), query(verify=verify or None))


def create_snapshot(name: str = "") -> Call[Job]:
    """Take a snapshot."""
    return Call("POST", "/admin/snapshots", as_answer(Job), query(name=name or None), repeatable=False)


def restore_snapshot(snapshot_id: str) -> Call[Job]:
    """Go back to a snapshot."""
    return Call("POST", f"/admin/snapshots/{segment(snapshot_id)}/restore", as_answer(Job), repeatable=False)


def list_jobs() -> Call[tuple[Job, ...]]:
    """The jobs that the service remembers."""
    return Call("GET", "/admin/jobs", as_list(Job, "jobs"))


def get_job(job_id: str) -> Call[Job]:
    """How a job is doing."""
    return Call("GET", f"/admin/jobs/{segment(job_id)}", as_answer(Job))


def wait_for_job(
    job_id: str, *, on_progress: Callable[[Job], None] | None = None, timeout_s: float = 3600.0
) -> JobWatch[Job]:
    """The job, when it is done; raises JobFailed when it has failed or takes longer than `timeout_s`."""
    return JobWatch(get_job(job_id), lambda job: job.error, on_progress, timeout_s)


# Settings, audit and namespaces


def get_config() -> Call[Settings]:
    """The settings of the namespace that can be changed while it is served."""
    return Call("GET", "/admin/config", as_answer(Settings))


def patch_config(changes: Mapping[str, Any], *, revision: int | None = None) -> Call[Settings]:
    """Change settings; None goes back to the deployment's. With `revision`: only if nobody else has changed any since,
    otherwise raises Conflict."""
    return Call(
        "PATCH",
        "/admin/config",
        as_answer(Settings),
        query(revision=revision),
        encoded(dict(changes)),
        media_type="application/merge-patch+json",
        # A retry would find the revision changed by the try before it.
        repeatable=revision is None,
    )


def list_audit(*, limit: int | None = None, cursor: str | None = None) -> Call[Page[AuditLine]]:
    """Who changed what when, the newest first: a page of it."""
    return Call("GET", "/admin/audit", as_page(AuditLine, "lines"), query(limit=limit, cursor=cursor))


def iterate_audit(*, limit: int | None = None) -> Pages[AuditLine]:
    """All of it, `limit` lines with every request."""
    return Pages(lambda cursor: list_audit(limit=limit, cursor=cursor))


def list_namespaces() -> Call[tuple[Namespace, ...]]:
    """The namespaces of the store."""
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
    """A new recommender; what is left out is as in the deployment. Raises Conflict when there is one of that name."""
    wanted = {
        "name": name,
        "preset": preset,
        "learner": learner and dict(learner),
        "partitions": partitions,
        "seed": seed,
        "hash_dimension": hash_dimension,
        "context_products": context_products,
        "intercept": intercept,
        "arm_features": arm_features,
        "context_features": context_features,
    }
    content = encoded({name: value for name, value in wanted.items() if value is not None})
    return Call(
        "POST", "/admin/namespaces", as_answer(Namespace), content=content, repeatable=False, of_namespace=False
    )


def get_namespace(name: str) -> Call[Namespace]:
    """One namespace."""
    return Call("GET", f"/admin/namespaces/{segment(name)}", as_answer(Namespace), of_namespace=False)


def delete_namespace(name: str) -> Call[None]:
    """Delete a namespace and everything in it."""
    return Call("DELETE", f"/admin/namespaces/{segment(name)}", ignored, deletes=True, of_namespace=False)
