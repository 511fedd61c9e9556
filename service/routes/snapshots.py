"""/admin/snapshots: keep what was learned, and go back to it."""

from __future__ import annotations

from typing import Annotated, final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.errors import Forbidden, InvalidInput, JobRunning, NotFound, Unauthorized, Unavailable
from service.openapi import problem_responses
from service.routes.jobs import JobOut, shown
from store.snapshot_names import ID_PATTERN, NAME_PATTERN, is_free_name

router = APIRouter(tags=["administration"])


@final
class SnapshotOut(BaseModel):
    """A snapshot; of one that cannot be read only its id and size are known."""

    id: str = Field(examples=["20260301T060000Z-ab12cd"])
    name: str = ""
    namespace: str | None = None
    created_ms: int | None = None
    size: int = Field(description="Bytes of the file.")
    users: int | None = None
    events: int | None = Field(default=None, description="Events ever applied when it was taken.")
    epoch: int | None = None
    intact: bool | None = Field(default=None, description="null: was not verified.")
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


SnapshotId = Annotated[str, Path(pattern=f"^{ID_PATTERN.pattern}$", examples=["20260301T060000Z-ab12cd"])]


@router.post(
    "/admin/snapshots",
    summary="Take a snapshot",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, JobRunning, InvalidInput, Unavailable),
)
async def create(
    engine: AdminEngine,
    name: Annotated[
        str, Query(pattern=f"^({NAME_PATTERN.pattern})?$", description="To find it by.", examples=["before-release"])
    ] = "",
) -> JobOut:
    """Keep everything learned in a file under `METABAN_DATA_DIR/snapshots` of this machine; requests and learning go
    on meanwhile. Look after the job at `/admin/jobs/{id}`."""
    if not is_free_name(name):
        raise InvalidInput(("name",), "stands for another snapshot: neither `latest` nor the form of an id will do")
    engine.require_store()
    return shown(engine.snapshots.create(name))


@router.get(
    "/admin/snapshots",
    summary="List snapshots",
    responses=problem_responses(Unauthorized, Forbidden, JobRunning, InvalidInput),
)
async def show(
    engine: AdminEngine,
    verify: Annotated[
        bool, Query(description="Read every snapshot whole; takes its time, and is done for one at a time.")
    ] = False,
) -> SnapshotListOut:
    """The snapshots on this machine, the newest first."""
    listed = await engine.snapshots.list(verify=verify)
    return SnapshotListOut(snapshots=[SnapshotOut(**entry.fields(verified=verify)) for entry in listed])


@router.post(
    "/admin/snapshots/{snapshot_id}/restore",
    summary="Go back to a snapshot",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, JobRunning, InvalidInput, Unavailable),
)
async def restore(engine: AdminEngine, snapshot_id: SnapshotId) -> JobOut:
    """Put every user and the shared model back, while requests are answered. The snapshot is verified first, and a
    damaged one changes nothing. What was learned since is gone, and rewards of earlier decisions no longer count,
    except of users of whom nothing had been learned by then."""
    engine.require_store()
    return shown(await engine.snapshots.restore(snapshot_id))
