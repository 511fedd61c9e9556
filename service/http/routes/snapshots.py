"""/admin/snapshots: create, list, verify and restore snapshots of a namespace."""

from __future__ import annotations

from typing import Annotated, final

from fastapi import APIRouter, Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from metaban.service.errors import Forbidden, InvalidInput, JobRunning, NotFound, Unauthorized, Unavailable
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses
from metaban.service.http.routes.jobs import JobOut, job_response
from metaban.store.snapshots.manifest import ID_PATTERN, NAME_PATTERN, is_free_name

router = APIRouter(route_class=AuditedRoute, tags=["administration"])


@final
class SnapshotOut(BaseModel):
    """A snapshot. If its file cannot be read, only id, size and problem are known."""

    id: str = Field(examples=["20260301T060000Z-ab12cd"])
    name: str = ""
    namespace: str | None = None
    created_ms: int | None = None
    size: int = Field(description="Size of the file in bytes.")
    users: int | None = None
    events: int | None = Field(default=None, description="Events applied before it was taken.")
    epoch: int | None = None
    intact: bool | None = Field(default=None, description="null if it was not verified.")
    problem: str | None = None


@final
class SnapshotListOut(BaseModel):
    """The snapshots on this machine, the newest first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "snapshots": [
                        {
                            "id": "20260301T060000Z-ab12cd",
                            "name": "before-release",
                            "namespace": "default",
                            "created_ms": 1772344800000,
                            "size": 41943040,
                            "users": 5012,
                            "events": 90210,
                            "epoch": 7,
                            "intact": None,
                            "problem": None,
                        }
                    ]
                }
            ]
        }
    )

    snapshots: list[SnapshotOut]


def _checked_id(text: str) -> str:
    if not ID_PATTERN.fullmatch(text):
        raise PydanticCustomError("snapshot_id", "must be the id of a snapshot: GET /admin/snapshots lists them")
    return text


SnapshotId = Annotated[
    str,
    Path(json_schema_extra={"pattern": f"^{ID_PATTERN.pattern}$"}, examples=["20260301T060000Z-ab12cd"]),
    AfterValidator(_checked_id),
]


@router.post(
    "/admin/snapshots",
    summary="Take a snapshot",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, JobRunning, InvalidInput, Unavailable),
)
async def create(
    engine: AdminEngine,
    name: Annotated[
        str,
        Query(
            pattern=f"^({NAME_PATTERN.pattern})?$",
            description="Name of the snapshot.",
            examples=["before-release"],
        ),
    ] = "",
) -> JobOut:
    """Write everything learned to a file under `METABAN_DATA_DIR/snapshots` on this machine. Requests and learning go
    on meanwhile. Poll the job at `/admin/jobs/{id}`."""
    if not is_free_name(name):
        raise InvalidInput(("name",), "must be neither `latest` nor of the form of a snapshot id")
    engine.require_store()
    return job_response(engine.snapshots.create(name))


@router.get(
    "/admin/snapshots",
    summary="List snapshots",
    responses=problem_responses(Unauthorized, Forbidden, JobRunning, InvalidInput),
)
async def show(
    engine: AdminEngine,
    verify: Annotated[
        bool, Query(description="Read every snapshot completely. This is slow; only one such request runs at a time.")
    ] = False,
) -> SnapshotListOut:
    """The snapshots on this machine, the newest first."""
    listed = await engine.snapshots.list(verify=verify)
    return SnapshotListOut(snapshots=[SnapshotOut(**entry.fields(verified=verify)) for entry in listed])


@router.post(
    "/admin/snapshots/{snapshot_id}/restore",
    summary="Restore a snapshot",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, JobRunning, InvalidInput, Unavailable),
)
async def restore(engine: AdminEngine, snapshot_id: SnapshotId) -> JobOut:
    """Restore all users and the shared model while requests are answered. The snapshot is verified first; a damaged one
    is refused. Everything learned since is lost, and earlier decisions accept no more rewards, except those of users
    without any learned reward."""
    engine.require_store()
    return job_response(await engine.snapshots.restore(snapshot_id))
