"""/admin/arms: the catalogue, one arm at a time or all at once."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from metaban.service.errors import (
    ArmExists,
    BodyTooLarge,
    CatalogueFull,
    Forbidden,
    InvalidInput,
    JobRunning,
    MalformedBody,
    NotFound,
    PreconditionFailed,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    VersionConflict,
)
from metaban.service.http.admission import IMPORT_PATH
from metaban.service.http.app_state import state_of
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import catalogue_arm, parse_arm_line, parse_json, read_body
from metaban.service.http.routes.jobs import JobOut, job_response
from metaban.service.http.schemas.arms import ArmFeaturesIn, ArmIn
from metaban.service.http.schemas.examples import ARM_EXAMPLES, MENU_LINES, SENCHA
from metaban.service.http.schemas.fields import Identifier
from metaban.store.catalogue import CatalogueArm

#: Arms on one page: by default, and at most.
PAGE_ARMS: Final = 50
PAGE_ARMS_MAX: Final = 200

#: Lines of JSON, one arm each.
NDJSON: Final = "application/x-ndjson"

NDJSON_MEDIA: Final = re.compile(r"\s*application/(?:x-)?ndjson\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)

ETAG: Final = re.compile(r'"?([0-9]{1,15})"?')

LINES: Final = {"schema": {"type": "string"}, "example": MENU_LINES}

router = APIRouter(route_class=AuditedRoute, prefix="/admin/arms", tags=["arms"])

ArmId = Annotated[Identifier, Path(description="Id of the arm, percent-encoded.", examples=[SENCHA["id"]])]

Version = Annotated[
    int | None,
    Query(ge=0, le=10**15, description="Version the arm must have, 0 if it must not exist. Same as `If-Match`."),
]

IfMatch = Annotated[str | None, Header(description="Version the arm must have, as in the ETag header.")]

IfNoneMatch = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="`*`: only add; 412 if the arm exists."),
]

ARM_EXAMPLE: Final[dict[str, Any]] = {
    **SENCHA,
    "version": 3,
    "updated_ms": 1772344800000,
}


@final
class ArmOut(BaseModel):
    """An arm of the catalogue."""

    model_config = ConfigDict(json_schema_extra={"examples": [ARM_EXAMPLE]})

    id: str
    features: list[float] | dict[str, float | str | bool] = Field(description="Features as they were sent.")
    version: int = Field(description="Starts at 1 and grows with every change, including removal.")
    updated_ms: int

    @staticmethod
    def of(arm: CatalogueArm) -> ArmOut:
        return ArmOut.model_construct(id=arm.id, features=arm.features, version=arm.version, updated_ms=arm.updated_ms)


@final
class ArmsOut(BaseModel):
    """A page of the catalogue."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"arms": [ARM_EXAMPLE], "count": 1, "cursor": None}]})

    arms: list[ArmOut] = Field(description="Sorted by id. Can be fewer than `limit` if arms are large.")
    count: int = Field(description="Number of arms in the catalogue.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


@final
class ArmRemovedOut(BaseModel):
    """An arm that was removed from the catalogue."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": SENCHA["id"], "version": 4}]})

    id: str
    version: int = Field(description="If the arm is added again, it gets a higher version.")


@router.get(
    "",
    summary="List the arms of the catalogue",
    response_model=ArmsOut,
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def show(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=PAGE_ARMS_MAX)] = PAGE_ARMS,
    cursor: Annotated[Identifier | None, Query(description="`cursor` of the previous page.")] = None,
) -> Response:
    """The arms of the catalogue, sorted by id."""
    page, count = await engine.arms.page(limit=limit, cursor=cursor)
    return _json_response(ArmsOut(arms=[ArmOut.of(arm) for arm in page.arms], count=count, cursor=page.cursor))


@router.post(
    "",
    summary="Add an arm",
    status_code=201,
    response_model=ArmOut,
    openapi_extra=json_body(ArmIn, examples=ARM_EXAMPLES),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        Forbidden,
        CatalogueFull,
        ArmExists,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        Unavailable,
    ),
)
async def create(request: Request, engine: AdminEngine) -> Response:
    """409 `arm-exists` if the catalogue has an arm with this id, `catalogue-full` if no arm can be added."""
    arm = catalogue_arm(parse_json(await read_body(request)), ArmIn, state_of(request.app).settings)
    return _arm_response(await engine.arms.create(arm.id, arm.features), 201)


@router.post(
    IMPORT_PATH.removeprefix("/admin/arms"),
    summary="Import arms from a file",
    status_code=202,
    openapi_extra={"requestBody": {"required": True, "content": {NDJSON: LINES}}},
    responses=problem_responses(
        Unauthorized, Forbidden, JobRunning, BodyTooLarge, UnsupportedMedia, InvalidInput, Unavailable
    ),
)
async def load(
    request: Request,
    engine: AdminEngine,
    mode: Annotated[
        Literal["upsert", "replace"],
        Query(description="`replace` also removes the arms that are not in the file."),
    ] = "upsert",
) -> JobOut:
    """The body has one `{"id", "features"}` per line, as in an export (`version` and `updated_ms` are ignored).

    All lines are checked first. If a line is invalid, the job fails with the first invalid lines in `error`, and
    nothing is written. Arms are then written in batches; requests are answered meanwhile. To complete an interrupted
    import, send the file again.
    """
    if not NDJSON_MEDIA.fullmatch(request.headers.get("content-type", "")):
        raise UnsupportedMedia(f"Send one JSON object per line, with the header `Content-Type: {NDJSON}`.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMedia("Send the body uncompressed.")
    engine.require_store()
    parse = partial(parse_arm_line, settings=state_of(request.app).settings)
    return job_response(await engine.arms.receive(request.stream(), mode, parse))


@router.get(
    "/export",
    summary="Export all arms",
    response_class=StreamingResponse,
    responses={
        200: {"content": {NDJSON: LINES}, "description": "One arm per line, sorted by id."},
        **problem_responses(Unauthorized, Forbidden, Unavailable),
    },
)
async def export(engine: AdminEngine) -> StreamingResponse:
    """One `{"id", "features", "version", "updated_ms"}` per line, in the format of an import. If the export fails, the
    connection is closed before the end of the body."""
    return StreamingResponse(await engine.arms.export(), media_type=NDJSON)


@router.get(
    "/{arm_id:path}",
    summary="Show an arm",
    response_model=ArmOut,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def describe(engine: AdminEngine, arm_id: ArmId) -> Response:
    """Features and version of an arm. An arm with the id `export` is only available in the list."""
    arm = await engine.arms.get(arm_id)
    if arm is None:
        raise NotFound("The catalogue has no arm with this id.")
    return _arm_response(arm, 200)


@router.put(
    "/{arm_id:path}",
    summary="Add or change an arm",
    response_model=ArmOut,
    openapi_extra=json_body(ArmFeaturesIn),
    responses={
        201: {"model": ArmOut, "description": "The arm was added."},
        **problem_responses(
            MalformedBody,
            Unauthorized,
            Forbidden,
            CatalogueFull,
            VersionConflict,
            PreconditionFailed,
            BodyTooLarge,
            UnsupportedMedia,
            InvalidInput,
            Unavailable,
        ),
    },
)
async def put(
    request: Request,
    engine: AdminEngine,
    arm_id: ArmId,
    version: Version = None,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """201 if the arm is new, 200 if it existed. Unchanged features do not change the version.

    With a version, 409 `version-conflict` if the arm has another one. With `If-None-Match: *`, 412 if the arm exists.
    """
    expected = _expected(version, if_match)
    if if_none_match is not None:
        if expected:
            raise InvalidInput(("If-None-Match",), "contradicts the version: `*` requires that the arm does not exist")
        expected = 0
    body = catalogue_arm(parse_json(await read_body(request)), ArmFeaturesIn, state_of(request.app).settings)
    try:
        arm, created = await engine.arms.put(arm_id, body.features, expected=expected)
    except VersionConflict:
        if if_none_match is None:
            raise
        raise PreconditionFailed("An arm with this id exists: leave out `If-None-Match` to change it.") from None
    return _arm_response(arm, 201 if created else 200)


@router.delete(
    "/{arm_id:path}",
    summary="Remove an arm",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, VersionConflict, InvalidInput, Unavailable),
)
async def remove(
    engine: AdminEngine, arm_id: ArmId, version: Version = None, if_match: IfMatch = None
) -> ArmRemovedOut:
    """No process chooses the arm from the next request on. Earlier decisions for it still accept rewards."""
    outcome = await engine.arms.remove(arm_id, expected=_expected(version, if_match))
    if not outcome.changed:
        raise NotFound("The catalogue has no arm with this id.")
    return ArmRemovedOut(id=arm_id, version=outcome.version)


def _expected(version: int | None, if_match: str | None) -> int | None:
    if if_match is None:
        return version
    found = ETAG.fullmatch(if_match.strip())
    if found is None:
        raise InvalidInput(("If-Match",), 'must be the version of an arm as in the ETag header: "3"')
    if version is not None and version != int(found[1]):
        raise InvalidInput(("If-Match",), "differs from the parameter `version`")
    return int(found[1])


def _arm_response(arm: CatalogueArm, status: int) -> Response:
    return _json_response(ArmOut.of(arm), status, {"ETag": f'"{arm.version}"'})


def _json_response(content: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content.model_dump_json(), status, headers, media_type="application/json")
