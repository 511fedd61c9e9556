"""Problem documents (RFC 9457): the format of every error answer.

They are short and repeat no input except field names and unknown paths. Details for operators (addresses, stack
traces) go to the log, with the request id that the client receives as `instance`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast, final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from metaban.service.errors import FieldError, InvalidInput, Overloaded, ServiceError, Unavailable, format_field
from metaban.service.http.schemas.fields import UNION_TAGS
from metaban.service.telemetry.logging import request_id
from metaban.store.errors import BacklogFull, NotReplicated, StoreReset, StoreUnavailable

MEDIA_TYPE: Final = "application/problem+json"

MAX_DETAIL_CHARS: Final = 400

MAX_FIELD_CHARS: Final = 200

MAX_ERRORS: Final = 20

#: An emptied or replaced store needs an operator, or a restart of this process.
RESET_RETRY_AFTER_S: Final = 10.0

#: pydantic's kinds of errors in our words; the names in braces are of the error's context.
TEXTS: Final = {
    "missing": "is missing",
    "extra_forbidden": "is not a field here",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be an object"),
    "list_type": "must be a list",
    "too_short": "must have {min_length} or more elements",
    "too_long": "must have {max_length} elements or fewer",
    "string_type": "must be a string",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} characters or fewer",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    "int_parsing_size": "has too many digits",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}

#: pydantic adds this to the path when the name of a member is invalid, not its value.
NAME_MARK: Final = "[key]"

NAME_ERRORS: Final = frozenset({"string_too_short", "string_too_long"})

#: Status, slug, title and detail of an unexpected error, which is logged.
UNEXPECTED: Final = (
    500,
    "internal",
    "Internal error",
    "The service failed; its log has the error with this instance.",
)

_log = structlog.stdlib.get_logger(__name__)


@final
class FieldProblem(BaseModel):
    """What is wrong with one field."""

    field: str = Field(description="Empty for the body as a whole.", examples=["arms[3].features[1]"])
    detail: str


@final
class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(examples=["/problems/invalid-input"])
    title: str
    status: int
    detail: str
    instance: str = Field(description="The request id, as in the X-Request-ID header and the logs.")
    errors: list[FieldProblem] | None = Field(default=None, description="Left out when the problem concerns no field.")


@final
class ProblemResponse(Response):
    """A problem document as a response; the log line of the request names the problem."""

    media_type = MEDIA_TYPE

    def __init__(self, document: Mapping[str, Any], slug: str, headers: Mapping[str, str] | None = None) -> None:
        # ASCII: a field name sent by a client may hold lone surrogates, which UTF-8 cannot encode.
        content = json.dumps(document, allow_nan=False).encode("ascii")
        super().__init__(content, document["status"], dict(headers or {}))
        self._slug = slug

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["problem"] = self._slug
        await super().__call__(scope, receive, send)


def problem_document(
    status: int, slug: str, title: str, detail: str, errors: Sequence[FieldError] = ()
) -> dict[str, Any]:
    """A problem document of limited length."""
    document: dict[str, Any] = {
        "type": f"/problems/{slug}",
        "title": title,
        "status": status,
        "detail": _cut(detail, MAX_DETAIL_CHARS),
        "instance": request_id(),
    }
    if errors:
        document["errors"] = [
            {"field": _cut(error.field, MAX_FIELD_CHARS), "detail": _cut(error.detail, MAX_DETAIL_CHARS)}
            for error in errors[:MAX_ERRORS]
        ]
    return document


def problem_response(
    status: int,
    slug: str,
    title: str,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A problem document as a response."""
    return ProblemResponse(problem_document(status, slug, title, detail, errors), slug, headers)


def service_problem(error: ServiceError) -> Response:
    """The response to a ServiceError."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "ApiKey"
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        headers["Connection"] = "close"  # the rest of the body is not waited for
    return problem_response(error.status, error.slug, error.title, error.detail, errors=error.errors, headers=headers)


def unexpected_problem() -> Response:
    """The response to an unexpected error."""
    return problem_response(*UNEXPECTED)


def problem_within(error: Exception, namespace: str) -> tuple[int, dict[str, Any]]:
    """Status and document for the error of one item of a batch."""
    expected = as_service_error(error, namespace)
    if expected is None:
        _log.error("unexpected_error", namespace=namespace, exc_info=error)
        return UNEXPECTED[0], problem_document(*UNEXPECTED)
    document = problem_document(expected.status, expected.slug, expected.title, expected.detail, expected.errors)
    return expected.status, document


def invalid_input(error: ValidationError) -> InvalidInput:
    """A pydantic error as InvalidInput, without the input."""
    return InvalidInput.of(field_errors(error.errors(include_url=False, include_input=False)))


def unusable_settings(reason: str, members: Iterable[str]) -> InvalidInput:
    """A SettingsError as InvalidInput: variables become the members of the body they were sent as."""
    variables, _, detail = reason.partition("\n")[0].partition(": ")
    named = [variable.removeprefix("METABAN_").lower() for variable in variables.split(", ")]
    sent = frozenset(members)
    blamed = next((name for name in named if name in sent), None)
    return InvalidInput((), reason) if blamed is None else InvalidInput((blamed,), detail)


def field_errors(errors: Iterable[Any]) -> list[FieldError]:
    """pydantic's list of errors as fields and messages."""
    return [_field_error(error["type"], error["loc"], _detail(error)) for error in errors]


def _detail(error: Any) -> str:
    if (text := TEXTS.get(error["type"])) is None:
        return cast(str, error["msg"]).removeprefix("Value error, ")
    context = error.get("ctx", {}).items()
    # Limits may be floats: 31536000, not 31536000.0 or 3.1536e+07.
    return text.format(**{name: f"{value:.12g}" if isinstance(value, float) else value for name, value in context})


def _field_error(kind: str, path: Sequence[str | int], detail: str) -> FieldError:
    # A string value's path ends in its union tag, so this path is about the name of a member.
    if kind in NAME_ERRORS and path[-1] == NAME_MARK:
        path, detail = path[:-1], f"its name {detail}"
    return FieldError(format_field([part for part in path if part not in UNION_TAGS]), detail)


def install_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer expected errors with problem documents; `metaban.service.http.request_context` catches the rest.

    The casts are safe: a handler only gets the type of error it is registered for.
    """

    async def http_error(request: Request, error: Exception) -> Response:
        refused = cast(HTTPException, error)
        title = HTTPStatus(refused.status_code).phrase.capitalize()
        slug = title.lower().replace(" ", "-")
        detail = refused.detail
        headers = dict(refused.headers or {})
        if refused.status_code == HTTPStatus.NOT_FOUND:
            detail = f"There is nothing at {request.scope['path']}; /docs lists all paths."
        if refused.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # The framework names the methods of the first matching route only, and each route has one method.
            allowed = {method for route in routes for method in _methods(route, request)}
            allowed = allowed or set(headers.get("Allow", "").split(", "))
            if "GET" in allowed:
                allowed.add("HEAD")  # answered by `metaban.service.http.request_context`, and unknown to routes
            headers["Allow"] = ", ".join(sorted(allowed))
            detail = f"Allowed here: {headers['Allow']}."
        return problem_response(refused.status_code, slug, title, detail, headers=headers)

    for foreseen in (ServiceError, StoreUnavailable, StoreReset, BacklogFull, NotReplicated):
        app.add_exception_handler(foreseen, _foreseen_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    app.add_exception_handler(HTTPException, http_error)


def as_service_error(error: Exception, namespace: str | None) -> ServiceError | None:
    """The ServiceError for an error, None if it is unexpected; logs errors that operators have to know."""
    log = _log.bind(namespace=namespace)
    match error:
        case ServiceError():
            return error
        case BacklogFull():
            log.warning("backlog_full", reason=str(error))
            return Overloaded("Too many events wait to be learned; try again later.", retry_after_s=error.retry_after_s)
        case NotReplicated():
            log.warning("replication_not_confirmed", reason=str(error))
            return Unavailable(
                "Too few replicas of the store confirmed in time; send the request again, nothing is learned twice."
            )
        case StoreReset():
            log.error("store_reset", reason=str(error))
            return Unavailable(
                "The store was emptied or replaced, or the namespace was deleted.", retry_after_s=RESET_RETRY_AFTER_S
            )
        case StoreUnavailable():
            log.warning("store_unavailable", reason=str(error))
            return Unavailable("The store does not answer; try again later.")
    return None


async def _foreseen_error(request: Request, error: Exception) -> Response:
    namespace = request.scope.get("state", {}).get("namespace")
    return service_problem(cast(ServiceError, as_service_error(error, namespace)))


async def _parameter_error(request: Request, error: Exception) -> Response:
    # The first part of the path is `query`, `path` or `header`, not a field.
    found = [{**item, "loc": item["loc"][1:]} for item in cast(RequestValidationError, error).errors()]
    return service_problem(InvalidInput.of(field_errors(found)))


def _methods(route: BaseRoute, request: Request) -> Iterable[str]:
    """The methods of a route if it matches the path of the request."""
    fits = isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    return (cast(Route, route).methods or ()) if fits else ()


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
