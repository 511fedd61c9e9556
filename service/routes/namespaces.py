"""/admin/namespaces: the recommenders of a deployment, for those who look after all of them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from models.features import FeatureLayout
from service.auditing import note_detail
from service.auth import require_operator
from service.edge import edge_of
from service.errors import (
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
from service.examples import NEWS, SHOP
from service.intake import body_as, parse_json, read_body
from service.openapi import json_body, problem_responses
from service.problems import unusable_settings
from service.schemas import RequestModel
from service.settings import Settings, SettingsError
from store.keys import NAMESPACE_PATTERN
from store.namespaces import NamespaceRecord

router = APIRouter(prefix="/admin/namespaces", tags=["namespaces"], dependencies=[Depends(require_operator)])

#: A namespace has connections to each of its partitions; those that are made by a call share a process.
MAX_PARTITIONS = 64
Name = Annotated[str, Path(pattern=f"^{NAMESPACE_PATTERN.pattern}$", examples=["shop"])]
Preset = Literal["default", "paper", "pooled"]


@final
class NewNamespace(RequestModel):
    """A recommender to be; what is left out is as in the deployment's settings."""

    model_config = ConfigDict(json_schema_extra={"examples": [SHOP, NEWS]})

    name: str = Field(pattern=f"^{NAMESPACE_PATTERN.pattern}$", description="Lower-case letters, digits, _ and -.")
    preset: Preset | None = Field(default=None, description="The learner.")
    learner: dict[str, JsonValue] | None = Field(default=None, description="More settings of it.", max_length=64)
    partitions: int | None = Field(default=None, ge=1, le=MAX_PARTITIONS)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    hash_dimension: int | None = Field(default=None, ge=1, le=4096)
    context_products: bool | None = None
    intercept: bool | None = None
    arm_features: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Numbers in the features of an arm; left out, the first request shows it.",
    )
    context_features: int | None = Field(
        default=None, ge=0, le=1_000_000, description="Numbers in the context, with `arm_features`; 0 for none."
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
    """One recommender."""

    model_config = ConfigDict(json_schema_extra={"examples": [NAMESPACE_EXAMPLE]})

    name: str
    preset: str
    partitions: int
    dimension: int | None = Field(description="Inputs of the learner; null until the first request shows it.")
    layout: dict[str, JsonValue] | None
    overridden: list[str] = Field(description="Settings in which it differs from the deployment.")
    revision: int


@final
class NamespacesOut(BaseModel):
    """All recommenders."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"namespaces": [NAMESPACE_EXAMPLE]}]})

    namespaces: list[NamespaceOut]


@final
class DeletedOut(BaseModel):
    """A namespace is gone."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "shop", "deleted": True}]})

    name: str
    deleted: Literal[True] = True


@router.get("", summary="List namespaces", responses=problem_responses(Unauthorized, Forbidden, Unavailable))
async def show_all(request: Request) -> NamespacesOut:
    """Every namespace of the store, in the order of their names."""
    records = await edge_of(request).recommenders.records()
    return NamespacesOut(namespaces=[_shown(record) for record in records])


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
    """An independent recommender with users, arms, learners and settings of its own, served at once by the process
    that answers and by others when they are asked for it. Workers find it within a second."""
    wanted = body_as(NewNamespace, parse_json(await read_body(request)))
    edge = edge_of(request)
    overrides = wanted.model_dump(exclude={"name", "arm_features", "context_features"}, exclude_none=True)
    try:
        record = await edge.recommenders.create(wanted.name, overrides, _layout(wanted, edge.settings))
    except SettingsError as error:
        raise unusable_settings(str(error), wanted.model_fields_set) from error
    note_detail(request, name=wanted.name)
    return _shown(record)


@router.get(
    "/{name}",
    summary="One namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def show(request: Request, name: Name) -> NamespaceOut:
    """How it was made, and in what it differs from the deployment."""
    return _shown(await edge_of(request).recommenders.record(name))


@router.delete(
    "/{name}",
    summary="Delete a namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def delete(request: Request, name: Name) -> DeletedOut:
    """Everything of it is gone from the store: users, events, arms, decisions, settings. Snapshots stay where they
    are. The namespace of requests that name none begins anew, empty: the next request shows what its features are."""
    await edge_of(request).recommenders.delete(name)
    return DeletedOut(name=name)


def _layout(wanted: NewNamespace, settings: Settings) -> FeatureLayout | None:
    if wanted.arm_features is None:
        if wanted.context_features is not None:
            raise InvalidInput(("context_features",), "needs `arm_features` beside it")
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
            ("arm_features",), f"makes {layout.dimension} inputs, more than the {settings.max_dimension} allowed"
        )
    return layout


def _shown(record: NamespaceRecord) -> NamespaceOut:
    return NamespaceOut(
        name=record.name,
        preset=str(record.learner["preset"]),
        partitions=record.partitions,
        dimension=None if record.layout is None else FeatureLayout.from_json(record.layout).dimension,
        layout=record.layout,
        overridden=sorted(record.overrides),
        revision=record.revision,
    )
