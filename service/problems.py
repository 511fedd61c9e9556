"""Problem documents (RFC 9457): the one shape of everything that goes wrong.

What is sent never repeats input beyond a field's name or a path that is not here, and nothing of it is long. Reasons
that concern operators (addresses, stack traces) go to the log, next to the request id that the client was told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from service.errors import FieldError, InvalidInput, Overloaded, ServiceError, Unavailable, format_field
from service.logging import request_id
from service.schemas import UNION_TAGS
from store.errors import BacklogFull, NotReplicated, StoreReset, StoreUnavailable

MEDIA_TYPE: Final = "application/problem+json"
MAX_DETAIL_CHARS: Final = 400
MAX_FIELD_CHARS: Final = 200
MAX_ERRORS: Final = 20
#: A store that came back empty or is not ours needs a person, or a restart of this process.
RESET_RETRY_AFTER_S: Final = 10.0
#: Pydantic's words for what is not an object are of Python, and name our classes.
OBJECT_ERRORS: Final = frozenset({"model_type", "model_attributes_type", "dict_type"})
NO_OBJECT: Final = "Input should be an object"
#: What pydantic puts behind the name of a member when it is the name that cannot be used.
NAME_MARK: Final = "[key]"
NAME_ERRORS: Final = frozenset({"string_too_short", "string_too_long"})

_log = structlog.stdlib.get_logger(__name__)


def problem_document(
    status: int, slug: str, title: str, detail: str, errors: Sequence[FieldError] = ()
) -> dict[str, Any]:
    """A problem document, cut to a bounded length."""
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
    """A problem document as an answer."""
    document = problem_document(status, slug, title, detail, errors)
    # ASCII only: a name that a client made up may hold what UTF-8 cannot.
    content = json.dumps(document, allow_nan=False).encode("ascii")
    return Response(content, status, dict(headers or {}), media_type=MEDIA_TYPE)


def service_problem(error: ServiceError) -> Response:
    """The document of one of our own errors."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "ApiKey"
    return problem_response(error.status, error.slug, error.title, error.detail, errors=error.errors, headers=headers)


#: What is said of an error nobody foresaw; what it was is in the log.
UNEXPECTED: Final = (
    500,
    "internal",
    "Internal error",
    "Something went wrong on our side; the log has it under the instance.",
)


def unexpected_problem() -> Response:
    """The document of an error nobody foresaw."""
    return problem_response(*UNEXPECTED)


def problem_within(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and document of what went wrong with a part of a request, the rest of which is answered."""
    told = as_service_error(error)
    if told is None:
        _log.error("unexpected_error", exc_info=error)
        return UNEXPECTED[0], problem_document(*UNEXPECTED)
    return told.status, problem_document(told.status, told.slug, told.title, told.detail, told.errors)


def invalid_input(error: ValidationError) -> InvalidInput:
    """What pydantic found, without what it found it in."""
    return InvalidInput.of(field_errors(error.errors(include_url=False, include_context=False, include_input=False)))


def unusable_settings(reason: str, members: Iterable[str]) -> InvalidInput:
    """What a SettingsError says, in which variables stand for members of the body, of those that were sent."""
    variables, _, detail = reason.partition("\n")[0].partition(": ")
    named = [variable.removeprefix("METABAN_").lower() for variable in variables.split(", ")]
    sent = frozenset(members)
    blamed = next((name for name in named if name in sent), None)
    return InvalidInput((), reason) if blamed is None else InvalidInput((blamed,), detail)


def field_errors(errors: Iterable[Any]) -> list[FieldError]:
    """Pydantic's list of errors as fields and sentences."""
    return [_field_error(error["type"], error["loc"], error["msg"]) for error in errors]


def _field_error(kind: str, path: Sequence[str | int], message: str) -> FieldError:
    told = NO_OBJECT if kind in OBJECT_ERRORS else message.removeprefix("Value error, ")
    # A string that is a value ends in the tag of its kind, so this is about the name of a member.
    if kind in NAME_ERRORS and path[-1] == NAME_MARK:
        path, told = path[:-1], told.replace("String", "Its name", 1)
    return FieldError(format_field([part for part in path if part not in UNION_TAGS]), told)


def install_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer every foreseen error with a problem document; the rest is caught by `service.middleware`.

    A handler is called with the type of error it is registered for and no other, which its signature cannot say.
    """

    async def http_error(request: Request, error: Exception) -> Response:
        refused = cast(HTTPException, error)
        title = HTTPStatus(refused.status_code).phrase.capitalize()
        slug = title.lower().replace(" ", "-")
        detail = refused.detail
        headers = dict(refused.headers or {})
        if refused.status_code == HTTPStatus.NOT_FOUND:
            detail = f"There is nothing at {request.scope['path']}; /docs lists all there is."
        if refused.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # The framework names the methods of the first route that has the path, and each of ours has one.
            allowed = {method for route in routes for method in _methods(route, request)}
            allowed = allowed or set(headers.get("Allow", "").split(", "))
            if "GET" in allowed:
                allowed.add("HEAD")  # answered by `service.head`, and known to no route
            headers["Allow"] = ", ".join(sorted(allowed))
            detail = f"Allowed here: {headers['Allow']}."
        return problem_response(refused.status_code, slug, title, detail, headers=headers)

    for foreseen in (ServiceError, StoreUnavailable, StoreReset, BacklogFull, NotReplicated):
        app.add_exception_handler(foreseen, _foreseen_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    app.add_exception_handler(HTTPException, http_error)


def as_service_error(error: Exception) -> ServiceError | None:
    """What a client is told of an error, with a line in the log where operators have to know; None if unforeseen."""
    match error:
        case ServiceError():
            return error
        case BacklogFull():
            _log.warning("backlog_full", reason=str(error))
            return Overloaded("Too many events wait to be learned; try again later.", retry_after_s=error.retry_after_s)
        case NotReplicated():
            _log.warning("not_replicated", reason=str(error))
            return Unavailable(
                "Too few replicas of the store confirmed in time; send the same again, nothing is learned twice."
            )
        case StoreReset():
            _log.error("store_reset", reason=str(error))
            return Unavailable(
                "The store was emptied or exchanged, or the namespace deleted.", retry_after_s=RESET_RETRY_AFTER_S
            )
        case StoreUnavailable():
            _log.warning("store_unavailable", reason=str(error))
            return Unavailable("The store does not answer; try again later.")
    return None


async def _foreseen_error(request: Request, error: Exception) -> Response:
    return service_problem(cast(ServiceError, as_service_error(error)))


async def _parameter_error(request: Request, error: Exception) -> Response:
    # The first part of the path says query, path or header, which a client does not write.
    found = [{**item, "loc": item["loc"][1:]} for item in cast(RequestValidationError, error).errors()]
    return service_problem(InvalidInput.of(field_errors(found)))


def _methods(route: BaseRoute, request: Request) -> Iterable[str]:
    """The methods of a route, if it has the path of the request."""
    fits = isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    return (cast(Route, route).methods or ()) if fits else ()


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
