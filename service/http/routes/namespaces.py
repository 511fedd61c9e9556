"""/admin/namespaces: list, create and delete the namespaces of a deployment."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from metaban.models.features import FeatureLayout
from metaban.service.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidInput,
    MalformedBody,
    NamespaceExists,
    NotFound,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from metaban.service.http.app_state import state_of
from metaban.service.http.audit import AuditedRoute, note_detail
from metaban.service.http.auth import require_operator
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import body_as, parse_json, read_body
from metaban.service.http.problems import unusable_settings
from metaban.service.http.schemas.examples import NEWS, SHOP
from metaban.service.http.schemas.fields import RequestModel
from metaban.service.settings.environment import Settings, SettingsError
from metaban.store.keys import NAMESPACE_PATTERN
from metaban.store.namespaces import NamespaceRecord

router = APIRouter(
    route_class=AuditedRoute, prefix="/admin/namespaces", tags=["namespaces"], dependencies=[Depends(require_operator)]
)

#: Each partition needs connections to the store, and all namespaces share the descriptors of the process.
MAX_PARTITIONS: Final = 64

Name = Annotated[str, Path(pattern=f"^{NAMESPACE_PATTERN.pattern}$", examples=["shop"])]

Preset = Literal["default", "paper", "pooled"]


@final
class NewNamespace(RequestModel):
    """A namespace to create. Members left out have the value of the deployment's settings."""

    model_config = ConfigDict(json_schema_extra={"examples": [SHOP, NEWS]})

    name: str = Field(pattern=f"^{NAMESPACE_PATTERN.pattern}$", description="Lower-case letters, digits, _ and -.")
    preset: Preset | None = Field(default=None, description="Preset of the learner.")
    learner: dict[str, JsonValue] | None = Field(default=None, description="Further learner settings.", max_length=64)
    partitions: int | None = Field(default=None, ge=1, le=MAX_PARTITIONS)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    hash_dimension: int | None = Field(default=None, ge=1, le=4096)
    context_products: bool | None = None
    intercept: bool | None = None
    arm_features: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Length of the features of an arm. Left out: taken from the first request.",
    )
    context_features: int | None = Field(
        default=None, ge=0, le=1_000_000, description="Length of the context, 0 for none. Only with `arm_features`."
    )


NAMESPACE_EXAMPLE: Final[dict[str, Any]] = {
    "name": "shop",
    "preset": "default",
    "partitions": 4,
    "dimension": 13,
    "layout": {
        "arm": 12,
        "context": 0,
        "arm_named": False,
        "context_named": False,
        "products": False,
        "intercept": True,
    },
    "overridden": ["partitions"],
    "revision": 2,
}


@final
class NamespaceOut(BaseModel):
    """A namespace."""

    model_config = ConfigDict(json_schema_extra={"examples": [NAMESPACE_EXAMPLE]})

    name: str
    preset: str
    partitions: int
    dimension: int | None = Field(description="Number of inputs of the learner; null before the first request.")
    layout: dict[str, JsonValue] | None
    overridden: list[str] = Field(description="Settings that differ from those of the deployment.")
    revision: int


@final
class NamespacesOut(BaseModel):
    """All namespaces."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"namespaces": [NAMESPACE_EXAMPLE]}]})

    namespaces: list[NamespaceOut]


@final
class DeletedOut(BaseModel):
    """A namespace that was deleted."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "shop", "deleted": True}]})

    name: str
    deleted: Literal[True] = True


@router.get("", summary="List namespaces", responses=problem_responses(Unauthorized, Forbidden, Unavailable))
async def show_all(request: Request) -> NamespacesOut:
    """All namespaces in the store, sorted by name."""
    records = await state_of(request.app).recommenders.records()
    return NamespacesOut(namespaces=[_namespace_response(record) for record in records])


@router.post(
    "",
    summary="Create a namespace",
    status_code=201,
    openapi_extra=json_body(NewNamespace),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        Forbidden,
        NamespaceExists,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        Unavailable,
    ),
)
async def create(request: Request) -> NamespaceOut:
    """A namespace is an independent recommender with its own users, arms, learners and settings. This process serves it
    at once, other processes from the first request they get for it. Workers find it within a second."""
    wanted = body_as(NewNamespace, parse_json(await read_body(request)))
    app_state = state_of(request.app)
    overrides = wanted.model_dump(exclude={"name", "arm_features", "context_features"}, exclude_none=True)
    try:
        record = await app_state.recommenders.create(wanted.name, overrides, _layout(wanted, app_state.settings))
    except SettingsError as error:
        raise unusable_settings(str(error), wanted.model_fields_set) from error
    note_detail(request, name=wanted.name)
    return _namespace_response(record)


@router.get(
    "/{name}",
    summary="Show a namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def show(request: Request, name: Name) -> NamespaceOut:
    """Preset, layout of the features, and settings that differ from those of the deployment."""
    return _namespace_response(await state_of(request.app).recommenders.record(name))


@router.delete(
    "/{name}",
    summary="Delete a namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def delete(request: Request, name: Name) -> DeletedOut:
    """Delete all users, events, arms, decisions and settings of the namespace from the store. Snapshots are kept. The
    namespace used by requests that name none is created again, empty."""
    await state_of(request.app).recommenders.delete(name)
    return DeletedOut(name=name)


def _layout(wanted: NewNamespace, settings: Settings) -> FeatureLayout | None:
    if wanted.arm_features is None:
        if wanted.context_features is not None:
            raise InvalidInput(("context_features",), "needs `arm_features`")
        return None
    products = settings.context_products if wanted.context_products is None else wanted.context_products
    layout = FeatureLayout(
        arm=wanted.arm_features,
        context=wanted.context_features or 0,
        arm_named=False,
        context_named=False,
        products=products and bool(wanted.context_features),
        intercept=settings.intercept if wanted.intercept is None else wanted.intercept,
    )
    if layout.dimension > settings.max_dimension:
        raise InvalidInput(
            ("arm_features",), f"gives {layout.dimension} inputs; at most {settings.max_dimension} are allowed"
        )
    return layout


def _namespace_response(record: NamespaceRecord) -> NamespaceOut:
    return NamespaceOut(
        name=record.name,
        preset=str(record.learner["preset"]),
        partitions=record.partitions,
        dimension=None if record.layout is None else FeatureLayout.from_json(record.layout).dimension,
        layout=record.layout,
        overridden=sorted(record.overrides),
        revision=record.revision,
    )
