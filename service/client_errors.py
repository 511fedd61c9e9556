"""What can go wrong between an application and the service.

    MetabanError
    ├── ConnectionFailed     the service was not reached, or hung up before it had answered
    ├── Unsendable           what was given cannot be sent: NaN, what JSON has no form for, arguments that contradict
    ├── UnexpectedAnswer     it answered something that this client cannot read
    ├── JobFailed            a job that was waited for has failed, or did not end in time
    └── ApiError             it answered with a problem document; its `type` says which problem
        ├── InvalidInput     400, 413, 415, 422: the request has to be changed; `errors` names the fields
        ├── Unauthorized     401: no key, or one that is not known
        ├── Forbidden        403: the key may not do this
        ├── NotFound         404: no such decision, user, arm, letter, snapshot, job …
        ├── Conflict         409: it cannot be done as things are; `type` says why
        ├── RateLimited      429: too many requests; come back after `retry_after_s`
        └── Unavailable      502, 503, 504: come back after `retry_after_s`

No message holds a key, a body or an address with a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, final

#: The type of an error whose sender did not name a problem, as RFC 9457 has it.
NO_TYPE: Final = "about:blank"
#: Other forms of Retry-After (a date) are not sent by the service.
SECONDS: Final = re.compile(r"\d{1,9}")


class MetabanError(Exception):
    """Anything that the client raises about a call."""


@final
class ConnectionFailed(MetabanError):
    """No answer; when `sent` is true, the service may have done what it was asked."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@final
class Unsendable(MetabanError, ValueError):
    """Nothing was sent, or no more of it: what the application gave is nothing that a request can hold."""


@final
class UnexpectedAnswer(MetabanError):
    """The answer lacks something that the client needs, or is no JSON at all."""


@final
class JobFailed(MetabanError):
    """The job is not done, and waiting for it any longer is of no use."""

    def __init__(self, message: str, *, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


@final
@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing wrong with one field, such as `arms[3].features[1]`; the whole body when `field` is empty."""

    field: str
    detail: str


class ApiError(MetabanError):
    """A problem document (RFC 9457); `instance` is the request id to look for in the service's log."""

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
        said = f"{status} {title}: {detail}" if detail else f"{status} {title}"
        super().__init__(f"{said} (request {instance})" if instance else said)

    @property
    def slug(self) -> str:
        """The last part of `type`: `unknown-decision` of `/problems/unknown-decision`."""
        return self.type.rpartition("/")[2]


@final
class InvalidInput(ApiError):
    """The request cannot be used as it is."""


@final
class Unauthorized(ApiError):
    """No key, or one that the service does not know."""


@final
class Forbidden(ApiError):
    """The key may not do this, or not in this namespace."""


@final
class NotFound(ApiError):
    """What was named is not there."""


@final
class Conflict(ApiError):
    """What was asked for does not go with what is there."""


@final
class RateLimited(ApiError):
    """More requests than this key may send."""


@final
class Unavailable(ApiError):
    """Not now."""


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
    """The error of an answer. `document` is its JSON, or None when it had none (a proxy's page, perhaps)."""
    said = document if isinstance(document, dict) else {}
    errors = said.get("errors")
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown status"
    return BY_STATUS.get(status, ApiError)(
        status,
        type=_text(said, "type") or NO_TYPE,
        title=_text(said, "title") or phrase,
        detail=_text(said, "detail"),
        instance=_text(said, "instance"),
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
