"""Errors of the client.

    MetabanError
    ├── InvalidArgument      an argument is wrong (type, NaN, contradiction …) and was not sent; also a ValueError
    ├── ClientUnusable       the client is closed or belongs to another event loop; also a RuntimeError
    ├── ConnectionFailed     no answer: not connected, timed out, or the connection broke
    ├── UnexpectedAnswer     the answer is not what the API documents
    ├── JobFailed            a job failed, or did not end within the time given to wait for it
    └── ApiError             the service answered with an error (problem document); `type` and `slug` say which
        ├── InvalidInput     400, 413, 415, 422: the service refuses the request; `errors` names the fields
        ├── Unauthorized     401: the key is missing or unknown
        ├── Forbidden        403: the key does not permit this call
        ├── NotFound         404: no such decision, user, arm, dead letter, snapshot, job …
        ├── Conflict         409: the request contradicts the current state; `slug` says why
        ├── RateLimited      429: too many requests; try again after `retry_after_s`
        └── Unavailable      502, 503, 504: try again after `retry_after_s`

No message contains the key, a request body, or a URL with a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, final

#: Type of a problem without a `type` member (RFC 9457).
NO_TYPE: Final = "about:blank"
#: Retry-After in seconds; the service does not send dates.
SECONDS: Final = re.compile(r"\d{1,9}")


class MetabanError(Exception):
    """Base class of all errors that the client raises."""


@final
class InvalidArgument(MetabanError, ValueError):
    """An argument cannot be sent; the message says what is accepted. An import may have been sent in part."""


@final
class ClientUnusable(MetabanError, RuntimeError):
    """The client is closed, or an AsyncMetaban is used in another event loop than before."""


@final
class ConnectionFailed(MetabanError):
    """The service did not answer. If `sent` is true, it may have executed the request nevertheless."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@final
class UnexpectedAnswer(MetabanError):
    """The answer is not JSON, or a required member is missing or has the wrong type."""


@final
class JobFailed(MetabanError):
    """The job failed, or did not end in time."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


@final
@dataclass(frozen=True, slots=True)
class FieldError:
    """One error in one field, such as `arms[3].features[1]`; an empty `field` means the whole body."""

    field: str
    detail: str


class ApiError(MetabanError):
    """A problem document (RFC 9457). `instance` is the request id, which the service's log contains too."""

    def __init__(
        self,
        status: int,
        *,
        type: str = NO_TYPE,
        title: str = "",
        detail: str = "",
        instance: str = "",
        errors: Sequence[FieldError] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.type = type
        self.title = title
        self.detail = detail
        self.instance = instance
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s
        message = f"{status} {title}: {detail}" if detail else f"{status} {title}"
        super().__init__(f"{message} (request {instance})" if instance else message)

    @property
    def slug(self) -> str:
        """Last part of `type`: `unknown-decision` of `/problems/unknown-decision`."""
        return self.type.rpartition("/")[2]


@final
class InvalidInput(ApiError):
    """The service refuses the request: it has to be changed."""


@final
class Unauthorized(ApiError):
    """The key is missing or unknown."""


@final
class Forbidden(ApiError):
    """The key does not permit this call, or not in this namespace."""


@final
class NotFound(ApiError):
    """The named thing does not exist."""


@final
class Conflict(ApiError):
    """The request contradicts the current state."""


@final
class RateLimited(ApiError):
    """Too many requests with this key."""


@final
class Unavailable(ApiError):
    """The service cannot answer at the moment."""


BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: InvalidInput,
    415: InvalidInput,
    422: InvalidInput,
    429: RateLimited,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def api_error(status: int, document: Any, retry_after: str | None = None) -> ApiError:
    """The error for a status. `document` is the parsed answer, or None if it was not JSON (a proxy's error page)."""
    problem = document if isinstance(document, dict) else {}
    errors = problem.get("errors")
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown status"
    return BY_STATUS.get(status, ApiError)(
        status,
        type=_text(problem, "type") or NO_TYPE,
        title=_text(problem, "title") or phrase,
        detail=_text(problem, "detail"),
        instance=_text(problem, "instance"),
        errors=[
            FieldError(_text(entry, "field"), _text(entry, "detail"))
            for entry in (errors if isinstance(errors, list) else [])
            if isinstance(entry, dict)
        ],
        retry_after_s=float(retry_after) if retry_after and SECONDS.fullmatch(retry_after.strip()) else None,
    )


def _text(document: Mapping[str, Any], member: str) -> str:
    value = document.get(member)
    return value if isinstance(value, str) else ""
