"""What every operation has in common in its documentation, and how one leads to another (OpenAPI links).

Links say where in an answer the input of the next call is: for people who read /docs, for code generators, and for the
fuzzer (`make fuzz`), which follows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from service.problems import MEDIA_TYPE

Operation: TypeAlias = dict[str, Any]
METHODS: Final = frozenset({"get", "post", "put", "patch", "delete"})

#: Refusals that happen before a route is asked, and so may come from any.
COMMON: Final[Mapping[str, str]] = {
    "400": "Not HTTP, or a body that is not JSON.",
    "408": "The body did not arrive in time.",
    "413": "The body is longer than the service reads.",
    "421": "The Host header names somebody else.",
    "429": "More requests than one sender may send.",
    "431": "The head of the request is longer than the service reads.",
    "503": "Too much at once, or something the service needs does not answer.",
}
#: Those of them that probes may get, which pass the gate whatever happens.
PROBES: Final = " /health/"
OF_PROBES: Final = ("400", "413", "431")
#: Refusals of what names a namespace, be it by leaving it out.
NAMESPACED: Final[Mapping[str, str]] = {
    "401": "No key, or one that is not known.",
    "403": "The key is bound to another namespace, or may not do this.",
    "404": "There is no such namespace, or nothing in it of the name that the path has.",
}
#: What FastAPI documents for parameters of a wrong form, which are answered with a problem like everything else.
FRAMEWORK_REFUSAL: Final = "#/components/schemas/HTTPValidationError"
INVALID: Final = "A parameter or a member of the body cannot be used; `errors` names it."
RETRIED: Final = frozenset({"429", "503"})
RETRY_AFTER: Final[Mapping[str, Any]] = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait before the next try."}
}


@final
@dataclass(frozen=True, slots=True)
class Link:
    """From the answer of one operation to the input of another; operations are named `METHOD /path`."""

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
        description="Say how the first choice went.",
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
    Link("shown", "POST /admin/namespaces", "GET /admin/namespaces/{name}", {"name": "$response.body#/name"}),
    Link("play", "POST /admin/namespaces", "POST /recommend", {"namespace": "$response.body#/name"}),
    Link("settings", "POST /admin/namespaces", "PATCH /admin/config", {"namespace": "$response.body#/name"}),
    Link("delete", "POST /admin/namespaces", "DELETE /admin/namespaces/{name}", {"name": "$response.body#/name"}),
)


def complete(schema: dict[str, Any]) -> None:
    """Add to a document what is common to all operations, and the links between those that it has."""
    operations = dict(_operations(schema))
    for called, operation in operations.items():
        common = {status: COMMON[status] for status in OF_PROBES} if PROBES in called else COMMON
        named = any(parameter["name"] == "namespace" for parameter in operation.get("parameters", ()))
        for status, description in {**common, **(NAMESPACED if named else {})}.items():
            operation["responses"].setdefault(status, _refusal(status, description))
        if FRAMEWORK_REFUSAL in str(operation["responses"].get("422")):
            operation["responses"]["422"] = _refusal("422", INVALID)
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


def _refusal(status: str, description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        **({"headers": dict(RETRY_AFTER)} if status in RETRIED else {}),
    }


def _success(operation: Operation) -> dict[str, Any]:
    """The answer of an operation that went well."""
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
