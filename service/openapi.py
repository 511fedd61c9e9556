"""What /docs shows: bodies are validated by `service.intake`, so that their schemas are put in by hand, once, here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from service.errors import ServiceError
from service.openapi_links import complete
from service.problems import MEDIA_TYPE
from service.schemas import Problem
from service.settings import Settings

REF: Final = "#/components/schemas/{model}"

DESCRIPTION: Final = """
Online recommendations that learn: ask which arm to show a user, say how it went, and the next answer is better, for
that user, for users who agree with them, and for users never seen.

1. `POST /recommend` with the user and the arms there are; show the first item of the answer.
2. `POST /feedback` with the `decision_id` of the answer and a reward, between 0 and 1 unless another range is set.

The examples of the calls are one story, and each can be sent to a new service after the ones before it: the arms of
`POST /admin/arms`, `POST /recommend`, its batch, `POST /feedback`, and then the rest. An example that needs more, such
as a namespace of its own, says so.

Errors are problem documents (RFC 9457); `instance` is the request id to look for in the logs.
"""


@final
class BodyDescription(dict[str, Any]):
    """The part of a route's documentation that describes its body, and the models that it names."""

    models: tuple[type[BaseModel], ...] = ()


def json_body(*models: type[BaseModel], examples: dict[str, dict[str, Any]] | None = None) -> BodyDescription:
    """The part of a route's documentation that describes its body: one of the models."""
    references = [{"$ref": REF.format(model=model.__name__)} for model in models]
    content: dict[str, Any] = {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
    if examples:
        content["examples"] = examples
    description = BodyDescription(requestBody={"required": True, "content": {"application/json": content}})
    description.models = models
    return description


def problem_responses(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """The part of a route's documentation that describes how it fails."""
    documents: dict[int | str, dict[str, Any]] = {}
    for error in errors:
        headers = {
            "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait before the next try."}
        }
        before = documents.get(error.status, {"description": ""})["description"]
        documents[error.status] = {
            "description": f"{before} {(error.__doc__ or error.title).strip()}".strip(),
            "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}},
            **({"headers": headers} if error.status in {429, 503} else {}),
        }
    return documents


def install_openapi(app: FastAPI, settings: Settings, routes: Sequence[BaseRoute]) -> None:
    """Let the app describe itself, these routes of ours among all, with the limits it runs with."""
    described = [route for route in routes if isinstance(route, APIRoute)]

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, settings, described)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _schema(app: FastAPI, settings: Settings, routes: Sequence[APIRoute]) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    _, models = models_json_schema([(model, "validation") for model in _body_models(routes)], ref_template=REF)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(models["$defs"])
    for model in _answer_models(routes):
        if examples := examples_of(model):
            components[model.__name__]["examples"] = examples
    asked = components["RecommendRequest"]["properties"]
    for name in ("arms", "arm_ids", "exclude"):
        asked[name]["anyOf"][0]["maxItems"] = settings.max_arms
    for features in _with_type(components["ArmIn"], "array"):
        features["maxItems"] = settings.max_dimension
    complete(schema)
    return schema


def examples_of(model: type[BaseModel]) -> list[Any]:
    """The examples that a model shows, as they were written: FastAPI leaves out what is null in them."""
    extra = model.model_config.get("json_schema_extra")
    examples = extra.get("examples") if isinstance(extra, dict) else None
    return examples if isinstance(examples, list) else []


def _body_models(routes: Sequence[APIRoute]) -> list[type[BaseModel]]:
    """Every model that a route names as its body, and that of problems."""
    described = [route.openapi_extra for route in routes]
    named = [model for body in described if isinstance(body, BodyDescription) for model in body.models]
    return [Problem, *dict.fromkeys(named)]


def _answer_models(routes: Sequence[APIRoute]) -> list[type[BaseModel]]:
    """Every model that a route answers with."""
    return [route.response_model for route in routes if route.response_model is not None]


def _with_type(schema: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The alternatives for an arm's features that are of this JSON type."""
    return [option for option in schema["properties"]["features"]["oneOf"] if option.get("type") == kind]
