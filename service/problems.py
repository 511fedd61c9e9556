"""Problem documents (RFC 9457): the one shape of everything that goes wrong.

What is sent never repeats input beyond a field's name, and nothing of it is long. Reasons that concern operators
(addresses, stack traces) go to the log, next to the request id that the client was told.
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

_log = structlog.stdlib.get_logger(__name__)


def problem_response(
    status: int,
    slug: str,
    title: str,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
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


def unexpected_problem() -> Response:
    """The document of an error nobody foresaw; what it was is in the log."""
    return problem_response(
        500, "internal", "Internal error", "Something went wrong on our side; the log has it under the instance."
    )


def invalid_input(error: ValidationError) -> InvalidInput:
    """What pydantic found, without what it found it in."""
    return InvalidInput.of(field_errors(error.errors(include_url=False, include_context=False, include_input=False)))


def field_errors(errors: Iterable[Any]) -> list[FieldError]:
    """Pydantic's list of errors as fields and sentences."""
    return [
        FieldError(
            format_field([part for part in error["loc"] if part not in UNION_TAGS]),
            error["msg"].removeprefix("Value error, "),
        )
        for error in errors
    ]


def install_handlers(app: FastAPI) -> None:
    """Answer every foreseen error with a problem document; the rest is caught by `service.middleware`.

    A handler is called with the type of error it is registered for and no other, which its signature cannot say.
    """
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(StoreUnavailable, _store_unavailable)
    app.add_exception_handler(StoreReset, _store_reset)
    app.add_exception_handler(BacklogFull, _backlog_full)
    app.add_exception_handler(NotReplicated, _not_replicated)


async def _service_error(request: Request, error: Exception) -> Response:
    return service_problem(cast(ServiceError, error))


async def _parameter_error(request: Request, error: Exception) -> Response:
    # The first part of the path says query, path or header, which a client does not write.
    found = [{**item, "loc": item["loc"][1:]} for item in cast(RequestValidationError, error).errors()]
    return service_problem(InvalidInput.of(field_errors(found)))


async def _http_error(request: Request, error: Exception) -> Response:
    refused = cast(HTTPException, error)
    title = HTTPStatus(refused.status_code).phrase
    slug = title.lower().replace(" ", "-")
    return problem_response(refused.status_code, slug, title, refused.detail, headers=refused.headers)


async def _store_unavailable(request: Request, error: Exception) -> Response:
    _log.warning("store_unavailable", reason=str(error))
    return service_problem(Unavailable("The store does not answer; try again later."))


async def _store_reset(request: Request, error: Exception) -> Response:
    _log.error("store_reset", reason=str(error))
    return service_problem(Unavailable("The store was emptied or exchanged.", retry_after_s=RESET_RETRY_AFTER_S))


async def _backlog_full(request: Request, error: Exception) -> Response:
    _log.warning("backlog_full", reason=str(error))
    return service_problem(
        Overloaded(
            "Too many events wait to be learned; try again later.",
            retry_after_s=cast(BacklogFull, error).retry_after_s,
        )
    )


async def _not_replicated(request: Request, error: Exception) -> Response:
    _log.warning("not_replicated", reason=str(error))
    return service_problem(
        Unavailable("Too few replicas of the store confirmed in time; send the same again, nothing is learned twice.")
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
