"""The OpenAPI document: body schemas, common responses, and links between calls.

Bodies are validated by `parsing.py`, not by FastAPI, so their schemas are added here. Links say where in an answer the
input of the next call is: for readers of /docs, for code generators, and for the fuzzer (`make fuzz`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from metaban.service.errors import ServiceError
from metaban.service.http.problems import MEDIA_TYPE, Problem
from metaban.service.settings.environment import Settings

Operation: TypeAlias = dict[str, Any]

#: Where models are in the document.
REF: Final = "#/components/schemas/{model}"

DESCRIPTION: Final = """
Online recommendations that learn from rewards: of the user, of users who agree with them, and of all users.

1. `POST /recommend` with the user and the arms; show the first item of the response.
2. `POST /feedback` with the `decision_id` of the response and a reward, between 0 and 1 unless another range is set.

The examples can be sent to a new service in this order: `POST /admin/arms`, `POST /recommend`,
`POST /recommend/batch`, `POST /feedback`, and then the others. An example that needs more, such as another namespace,
says so.

Errors are problem documents (RFC 9457); `instance` is the request id, which is also in the logs.
"""

METHODS: Final = frozenset({"get", "post", "put", "patch", "delete"})

#: Errors that any operation may answer with, because they are found before a route is called.
COMMON: Final[Mapping[str, str]] = {
    "400": "The request is not HTTP, or its body is not JSON.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "421": "The Host header names another host.",
    "429": "The client exceeded its rate limit.",
    "431": "The request headers are too large.",
    "503": "The service is overloaded, or a dependency such as the store does not answer.",
}

#: Probes are never refused by admission: only these errors are possible.
PROBES: Final = " /health/"
PROBE_ERRORS: Final = ("400", "413", "431")

#: Further errors of operations with the parameter `namespace`.
NAMESPACED: Final[Mapping[str, str]] = {
    "401": "The key is missing or unknown.",
    "403": "The key is for another namespace, or does not allow this call.",
    "404": "The namespace, or what the path names in it, does not exist.",
}

#: FastAPI's schema for invalid parameters; it is replaced, because they are answered with a problem document.
FRAMEWORK_REFUSAL: Final = "#/components/schemas/HTTPValidationError"

INVALID: Final = "A parameter or a member of the body is invalid; `errors` names it."

#: Statuses with a Retry-After header.
RETRIED: Final = frozenset({"429", "503"})

RETRY_AFTER: Final[Mapping[str, Any]] = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait before the next attempt."}
}


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A link from the response of one operation to the input of another. Operations are named `METHOD /path`."""

    name: str
    source: str
    target: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    description: str = ""


_DECISION, _ARM = "$response.body#/decision_id", "$response.body#/items/0/arm_id"

_USER = "$request.body#/user_id"

LINKS: Final = (
    Link(
        "reward",
        "POST /recommend",
        "POST /feedback",
        body={"decision_id": _DECISION, "arm_id": _ARM},
        description="Send the reward of the first item.",
    ),
    Link("activate", "POST /recommend", "POST /decisions/{decision_id}/activate", {"decision_id": _DECISION}),
    Link("again", "POST /recommend", "POST /recommend", body={"decision_id": _DECISION, "user_id": _USER}),
    Link("user", "POST /recommend", "GET /admin/users/{user_id}", {"user_id": _USER}),
    Link("forget", "POST /recommend", "DELETE /admin/users/{user_id}", {"user_id": _USER}),
    Link("arm", "POST /admin/arms", "GET /admin/arms/{arm_id}", {"arm_id": "$response.body#/id"}),
    Link("change", "POST /admin/arms", "PUT /admin/arms/{arm_id}", {"arm_id": "$response.body#/id"}),
    Link("remove", "POST /admin/arms", "DELETE /admin/arms/{arm_id}", {"arm_id": "$response.body#/id"}),
    Link("choose", "POST /admin/arms", "POST /recommend", body={"arm_ids": ["$response.body#/id"]}),
    Link("group", "POST /admin/arms", "GET /admin/groups", {"arm_id": "$response.body#/id"}),
    Link("import-job", "POST /admin/arms/import", "GET /admin/jobs/{job_id}", {"job_id": "$response.body#/id"}),
    Link("transfer-job", "POST /admin/transfer", "GET /admin/transfer/{job_id}", {"job_id": "$response.body#/id"}),
    Link("snapshot-job", "POST /admin/snapshots", "GET /admin/jobs/{job_id}", {"job_id": "$response.body#/id"}),
    Link(
        "restore",
        "GET /admin/snapshots",
        "POST /admin/snapshots/{snapshot_id}/restore",
        {"snapshot_id": "$response.body#/snapshots/0/id"},
    ),
    Link(
        "restore-job",
        "POST /admin/snapshots/{snapshot_id}/restore",
        "GET /admin/jobs/{job_id}",
        {"job_id": "$response.body#/id"},
    ),
    *(
        Link(
            name,
            "GET /admin/dead-letters",
            target,
            {"partition": "$response.body#/letters/0/partition", "letter_id": "$response.body#/letters/0/letter_id"},
        )
        for name, target in (
            ("replay", "POST /admin/dead-letters/{partition}/{letter_id}/replay"),
            ("discard", "DELETE /admin/dead-letters/{partition}/{letter_id}"),
        )
    ),
    Link("more", "GET /admin/dead-letters", "GET /admin/dead-letters", {"cursor": "$response.body#/cursor"}),
    Link("before", "GET /admin/audit", "GET /admin/audit", {"cursor": "$response.body#/cursor"}),
    Link("show", "POST /admin/namespaces", "GET /admin/namespaces/{name}", {"name": "$response.body#/name"}),
    Link("play", "POST /admin/namespaces", "POST /recommend", {"namespace": "$response.body#/name"}),
    Link("settings", "POST /admin/namespaces", "PATCH /admin/config", {"namespace": "$response.body#/name"}),
    Link("delete", "POST /admin/namespaces", "DELETE /admin/namespaces/{name}", {"name": "$response.body#/name"}),
)


@final
class BodyDescription(dict[str, Any]):
    """The `openapi_extra` of a route with a JSON body, and the models of that body."""

    models: tuple[type[BaseModel], ...] = ()


def json_body(*models: type[BaseModel], examples: dict[str, dict[str, Any]] | None = None) -> BodyDescription:
    """The `openapi_extra` of a route whose body is one of these models."""
    references = [{"$ref": REF.format(model=model.__name__)} for model in models]
    content: dict[str, Any] = {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
    if examples:
        content["examples"] = examples
    description = BodyDescription(requestBody={"required": True, "content": {"application/json": content}})
    description.models = models
    return description


def problem_responses(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may raise these errors."""
    documents: dict[int | str, dict[str, Any]] = {}
    for error in errors:
        before = documents.get(error.status, {"description": ""})["description"]
        description = f"{before} {(error.__doc__ or error.title).strip()}".strip()
        documents[error.status] = _error_response(str(error.status), description)
    return documents


def install_openapi(app: FastAPI, settings: Settings, routes: Sequence[BaseRoute]) -> None:
    """Make `app.openapi` return the document of all routes; `routes` are those of our routers."""
    described = [route for route in routes if isinstance(route, APIRoute)]

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, settings, described)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def examples_of(model: type[BaseModel]) -> list[Any]:
    """The examples of a model, complete: FastAPI leaves out members that are null."""
    extra = model.model_config.get("json_schema_extra")
    examples = extra.get("examples") if isinstance(extra, dict) else None
    return examples if isinstance(examples, list) else []


def _schema(app: FastAPI, settings: Settings, routes: Sequence[APIRoute]) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    _, models = models_json_schema([(model, "validation") for model in _body_models(routes)], ref_template=REF)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(models["$defs"])
    for model in _response_models(routes):
        if examples := examples_of(model):
            components[model.__name__]["examples"] = examples
    members = components["RecommendRequest"]["properties"]
    for name in ("arms", "arm_ids", "exclude"):
        members[name]["anyOf"][0]["maxItems"] = settings.max_arms
    for features in _with_type(components["ArmIn"], "array"):
        features["maxItems"] = settings.max_dimension
    _complete(schema)
    return schema


def _complete(schema: dict[str, Any]) -> None:
    """Add the responses that operations have in common, and the links between operations."""
    operations = dict(_operations(schema))
    for called, operation in operations.items():
        common = {status: COMMON[status] for status in PROBE_ERRORS} if PROBES in called else COMMON
        named = any(parameter["name"] == "namespace" for parameter in operation.get("parameters", ()))
        for status, description in {**common, **(NAMESPACED if named else {})}.items():
            operation["responses"].setdefault(status, _error_response(status, description))
        if FRAMEWORK_REFUSAL in str(operation["responses"].get("422")):
            operation["responses"]["422"] = _error_response("422", INVALID)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    for link in LINKS:
        source, target = operations.get(link.source), operations.get(link.target)
        if source is not None and target is not None:
            _success(source).setdefault("links", {})[link.name] = _link(link, target)


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, Operation]]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if method in METHODS:
                yield f"{method.upper()} {path}", operation


def _error_response(status: str, description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}},
        **({"headers": dict(RETRY_AFTER)} if status in RETRIED else {}),
    }


def _success(operation: Operation) -> dict[str, Any]:
    """The successful response of an operation."""
    status = min(status for status in operation["responses"] if status.startswith("2"))
    response: dict[str, Any] = operation["responses"][status]
    return response


def _link(link: Link, target: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": target["operationId"]}
    if link.parameters:
        described["parameters"] = dict(link.parameters)
    if link.body is not None:
        described["requestBody"] = dict(link.body)
    if link.description:
        described["description"] = link.description
    return described


def _body_models(routes: Sequence[APIRoute]) -> list[type[BaseModel]]:
    """The models of all request bodies, and Problem."""
    described = [route.openapi_extra for route in routes]
    named = [model for body in described if isinstance(body, BodyDescription) for model in body.models]
    return [Problem, *dict.fromkeys(named)]


def _response_models(routes: Sequence[APIRoute]) -> list[type[BaseModel]]:
    """The models of all responses."""
    return [route.response_model for route in routes if route.response_model is not None]


def _with_type(schema: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The alternatives for an arm's features that have this JSON type."""
    return [option for option in schema["properties"]["features"]["oneOf"] if option.get("type") == kind]
