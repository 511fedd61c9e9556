"""/admin/arms: the catalogue, one arm at a time or all at once."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from service.auth import AdminEngine
from service.edge import edge_of
from service.errors import (
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
from service.examples import ARM_EXAMPLES, MENU_LINES, SENCHA
from service.intake import catalogue_arm, parse_json, read_body
from service.limits import IMPORT_PATH
from service.openapi import json_body, problem_responses
from service.routes.jobs import JobOut, shown
from service.schemas import ArmFeaturesIn, ArmIn, Identifier
from store.catalogue import Arm

#: Arms shown on one page.
PAGE_ARMS: Final = 50
PAGE_ARMS_MAX: Final = 200
#: Lines of JSON, one arm each.
NDJSON: Final = "application/x-ndjson"
NDJSON_MEDIA: Final = re.compile(r"\s*application/(?:x-)?ndjson\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
ETAG: Final = re.compile(r'"?([0-9]{1,15})"?')
LINES: Final = {"schema": {"type": "string"}, "example": MENU_LINES}

router = APIRouter(prefix="/admin/arms", tags=["arms"])

ArmId = Annotated[Identifier, Path(description="Percent-encoded where a URL needs it.", examples=[SENCHA["id"]])]
Version = Annotated[
    int | None,
    Query(ge=0, le=10**15, description="The version that the arm must have, 0 for none; `If-Match` says the same."),
]
IfMatch = Annotated[str | None, Header(description="The version that the arm must have, as ETag told it.")]
IfNoneMatch = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="`*`: only add it, 412 when there is an arm of this id."),
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
    features: list[float] | dict[str, float | str | bool] = Field(description="As they were sent.")
    version: int = Field(description="1 at first; grows with every change, also when it is removed and added again.")
    updated_ms: int

    @staticmethod
    def of(arm: Arm) -> ArmOut:
        return ArmOut.model_construct(id=arm.id, features=arm.features, version=arm.version, updated_ms=arm.updated_ms)


@final
class ArmsOut(BaseModel):
    """A page of the catalogue."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"arms": [ARM_EXAMPLE], "count": 1, "cursor": None}]})

    arms: list[ArmOut] = Field(description="In the order of their ids; fewer than asked for when they are large.")
    count: int = Field(description="Arms in the whole catalogue.")
    cursor: str | None = Field(description="Ask for the next page with it; null on the last one.")


@final
class ArmRemovedOut(BaseModel):
    """An arm was taken out of the catalogue."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": SENCHA["id"], "version": 4}]})

    id: str
    version: int = Field(description="Added again, the arm has a higher one.")


@router.get(
    "",
    summary="List the arms of the catalogue",
    response_model=ArmsOut,
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def show(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=PAGE_ARMS_MAX)] = PAGE_ARMS,
    cursor: Annotated[Identifier | None, Query(description="Go on where another page ended.")] = None,
) -> Response:
    """The arms in the order of their ids."""
    page, count = await engine.arms.page(limit=limit, cursor=cursor)
    return _answer(ArmsOut(arms=[ArmOut.of(arm) for arm in page.arms], count=count, cursor=page.cursor))


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
    """409 `arm-exists` when the catalogue has an arm of this id, `catalogue-full` when it has as many as it may."""
    arm = catalogue_arm(parse_json(await read_body(request)), ArmIn, edge_of(request).settings)
    return _shown(await engine.arms.create(arm.id, arm.features), 201)


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
        Query(description="`replace` removes in the end the arms that are not in the file."),
    ] = "upsert",
) -> JobOut:
    """One `{"id", "features"}` a line, as an export writes them (`version` and `updated_ms` are ignored).

    All lines are checked first: a file with a bad one ends the job as `failed`, with the first bad lines in `error`,
    and writes nothing. Arms are then written in batches, while requests are answered. An import that was broken off is
    completed by sending the file again.
    """
    if not NDJSON_MEDIA.fullmatch(request.headers.get("content-type", "")):
        raise UnsupportedMedia(f"Send one JSON object a line, with the header `Content-Type: {NDJSON}`.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMedia("Send the body as it is: compressed bodies are not read.")
    engine.require_store()
    return shown(await engine.arms.receive(request.stream(), mode))


@router.get(
    "/export",
    summary="Export all arms",
    response_class=StreamingResponse,
    responses={
        200: {"content": {NDJSON: LINES}, "description": "One arm a line, in the order of their ids."},
        **problem_responses(Unauthorized, Forbidden, Unavailable),
    },
)
async def export(engine: AdminEngine) -> StreamingResponse:
    """One `{"id", "features", "version", "updated_ms"}` a line; an import takes it as it is. A connection that breaks
    off before its end tells of an export that is not complete."""
    return StreamingResponse(await engine.arms.export(), media_type=NDJSON)


@router.get(
    "/{arm_id:path}",
    summary="One arm of the catalogue",
    response_model=ArmOut,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def describe(engine: AdminEngine, arm_id: ArmId) -> Response:
    """An arm called `export` is found by listing."""
    arm = await engine.arms.get(arm_id)
    if arm is None:
        raise NotFound("The catalogue has no such arm.")
    return _shown(arm, 200)


@router.put(
    "/{arm_id:path}",
    summary="Add or change an arm",
    response_model=ArmOut,
    openapi_extra=json_body(ArmFeaturesIn),
    responses={
        201: {"model": ArmOut, "description": "It is new."},
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
    """201 for a new arm, 200 for one that was there; the same features again change nothing, its version neither.

    With a version, 409 `version-conflict` unless it is that of the arm; with `If-None-Match: *`, 412 when there is one.
    """
    expected = _expected(version, if_match)
    if if_none_match is not None:
        if expected:
            raise InvalidInput(("If-None-Match",), "says that no such arm may be there, and a version that one must be")
        expected = 0
    body = catalogue_arm(parse_json(await read_body(request)), ArmFeaturesIn, edge_of(request).settings)
    try:
        arm, created = await engine.arms.put(arm_id, body.features, expected=expected)
    except VersionConflict:
        if if_none_match is None:
            raise
        raise PreconditionFailed("There is an arm of this id: leave out `If-None-Match` to change it.") from None
    return _shown(arm, 201 if created else 200)


@router.delete(
    "/{arm_id:path}",
    summary="Remove an arm",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, VersionConflict, InvalidInput, Unavailable),
)
async def remove(
    engine: AdminEngine, arm_id: ArmId, version: Version = None, if_match: IfMatch = None
) -> ArmRemovedOut:
    """From the next request on it is chosen by no process. Decisions that chose it stand, and take their rewards."""
    outcome = await engine.arms.remove(arm_id, expected=_expected(version, if_match))
    if not outcome.changed:
        raise NotFound("The catalogue has no such arm.")
    return ArmRemovedOut(id=arm_id, version=outcome.version)


def _expected(version: int | None, if_match: str | None) -> int | None:
    if if_match is None:
        return version
    found = ETAG.fullmatch(if_match.strip())
    if found is None:
        raise InvalidInput(("If-Match",), 'must be the version of an arm, as the ETag header tells it: "3"')
    if version is not None and version != int(found[1]):
        raise InvalidInput(("If-Match",), "says another version than the parameter `version`")
    return int(found[1])


def _shown(arm: Arm, status: int) -> Response:
    return _answer(ArmOut.of(arm), status, {"ETag": f'"{arm.version}"'})


def _answer(answer: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), status, headers, media_type="application/json")
