"""Errors that become problem documents for the client.

    ServiceError
    ├── InvalidInput         422  /problems/invalid-input         a field is invalid; `errors` names it
    ├── MalformedBody        400  /problems/malformed-body        the body is not JSON at all
    ├── Unauthorized         401  /problems/unauthorized          the key is missing or unknown
    ├── Forbidden            403  /problems/forbidden             the key does not allow this call
    ├── NotFound             404  /problems/not-found             what the path names does not exist
    ├── UnknownDecision      404  /problems/unknown-decision      the decision was never made, or is no longer kept
    ├── BodyTimeout          408  /problems/body-timeout          the body did not arrive in time
    ├── DecisionConflict     409  /problems/decision-conflict     the decision_id belongs to another request
    ├── UserReset            409  /problems/user-reset            the user was forgotten or restored since the decision
    ├── NotActivated         409  /problems/not-activated         the decision is deferred and was not activated yet
    ├── TooManyRewards       409  /problems/too-many-rewards      the arm has the most rewards that a decision takes
    ├── NotReplayable        409  /problems/not-replayable        the dead letter cannot be replayed
    ├── NamespaceExists      409  /problems/namespace-exists      the name of a new namespace is taken
    ├── SettingsChanged      409  /problems/settings-changed      the settings have another revision than expected
    ├── JobRunning           409  /problems/job-running           another job is running
    ├── ArmExists            409  /problems/arm-exists            the catalogue has an arm with this id
    ├── VersionConflict      409  /problems/version-conflict      the arm has another version than was expected
    ├── CatalogueFull        409  /problems/catalogue-full        the catalogue has the maximum number of arms
    ├── FusionUnavailable    409  /problems/fusion-unavailable    warm starts are off, or the learner has none
    ├── PreconditionFailed   412  /problems/precondition-failed   If-None-Match is `*` and the arm exists
    ├── BodyTooLarge         413  /problems/body-too-large        the body is too large
    ├── UnsupportedMedia     415  /problems/unsupported-media     the Content-Type is not accepted
    ├── WrongHost            421  /problems/wrong-host            the Host header names another host
    ├── RateLimited          429  /problems/rate-limited          more requests than allowed; retry later
    ├── Overloaded           503  /problems/overloaded            too much work is waiting; retry later
    ├── VersionNotReached    503  /problems/version-not-reached   the requested epoch is not served yet
    └── Unavailable          503  /problems/unavailable           a dependency does not answer; retry later

`metaban.service.http.problems` turns these, and errors of the store, into problem documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

#: A place in a request: names of members and indices of lists, such as ("arms", 3, "features", 1).
FieldPath: TypeAlias = Sequence[str | int]

#: Retry-After when there is no better estimate.
DEFAULT_RETRY_AFTER_S = 1.0


def format_field(path: FieldPath) -> str:
    """A path as text: `arms[3].features[1]`; an empty name is `[""]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part:
            text += '[""]'
        else:
            text += f".{part}" if text else part
    return text


@final
@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field; an empty `field` means the whole body."""

    field: str
    detail: str


class ServiceError(Exception):
    """Base of errors with a response of their own; `detail` is sent to the client."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, errors: Sequence[FieldError] = (), retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s


@final
class InvalidInput(ServiceError):
    """A field of the request is invalid."""

    status = 422
    slug = "invalid-input"
    title = "Invalid input"

    def __init__(self, field: FieldPath, message: str) -> None:
        self._describe([FieldError(format_field(field), message)])

    @classmethod
    def of(cls, errors: Sequence[FieldError]) -> InvalidInput:
        """The error of several fields; `errors` is not empty."""
        error = cls((), "")
        error._describe(errors)
        return error

    def _describe(self, errors: Sequence[FieldError]) -> None:
        first = errors[0]
        detail = f"{first.field}: {first.detail}" if first.field else first.detail
        if len(errors) > 1:
            detail += f" (and {len(errors) - 1} more)"
        super().__init__(detail, errors=errors)


@final
class MalformedBody(ServiceError):
    """The body is not JSON."""

    status = 400
    slug = "malformed-body"
    title = "Malformed body"


@final
class Unauthorized(ServiceError):
    """The key is missing or unknown."""

    status = 401
    slug = "unauthorized"
    title = "Unauthorized"


@final
class Forbidden(ServiceError):
    """The key does not allow this call."""

    status = 403
    slug = "forbidden"
    title = "Forbidden"


@final
class NotFound(ServiceError):
    """What the path names does not exist."""

    status = 404
    slug = "not-found"
    title = "Not found"


@final
class UnknownDecision(ServiceError):
    """The decision does not exist, or is no longer kept."""

    status = 404
    slug = "unknown-decision"
    title = "Unknown decision"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class BodyTimeout(ServiceError):
    """The body did not arrive in time."""

    status = 408
    slug = "body-timeout"
    title = "Body timed out"


@final
class DecisionConflict(ServiceError):
    """The decision_id was used by a request with another body."""

    status = 409
    slug = "decision-conflict"
    title = "Decision conflict"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class UserReset(ServiceError):
    """The user was forgotten or restored since the decision: its rewards have no effect."""

    status = 409
    slug = "user-reset"
    title = "User was reset"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class NotActivated(ServiceError):
    """The decision is deferred and not activated yet: activate it, then send the reward again."""

    status = 409
    slug = "not-activated"
    title = "Not activated"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class TooManyRewards(ServiceError):
    """The arm has the most rewards with event ids of their own that a decision takes: add them up before sending."""

    status = 409
    slug = "too-many-rewards"
    title = "Too many rewards"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class NotReplayable(ServiceError):
    """The dead letter is not a reward, or its event was accepted again since."""

    status = 409
    slug = "not-replayable"
    title = "Not replayable"


@final
class NamespaceExists(ServiceError):
    """The name of a new namespace is taken."""

    status = 409
    slug = "namespace-exists"
    title = "Namespace exists"


@final
class SettingsChanged(ServiceError):
    """The settings were changed by another request."""

    status = 409
    slug = "settings-changed"
    title = "Settings changed"


@final
class JobRunning(ServiceError):
    """Another job is running; jobs run one at a time."""

    status = 409
    slug = "job-running"
    title = "Job running"


@final
class ArmExists(ServiceError):
    """The catalogue has an arm with this id."""

    status = 409
    slug = "arm-exists"
    title = "Arm exists"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("id", detail)])


@final
class VersionConflict(ServiceError):
    """The arm has another version than the request expects."""

    status = 409
    slug = "version-conflict"
    title = "Version conflict"


@final
class CatalogueFull(ServiceError):
    """The catalogue has the maximum number of arms."""

    status = 409
    slug = "catalogue-full"
    title = "Catalogue full"


@final
class FusionUnavailable(ServiceError):
    """The learner of the namespace does not support warm starts, or they are off."""

    status = 409
    slug = "fusion-unavailable"
    title = "Fusion unavailable"


@final
class PreconditionFailed(ServiceError):
    """The arm exists, and `If-None-Match` requires that it does not."""

    status = 412
    slug = "precondition-failed"
    title = "Precondition failed"


@final
class BodyTooLarge(ServiceError):
    """The body is too large."""

    status = 413
    slug = "body-too-large"
    title = "Body too large"


@final
class UnsupportedMedia(ServiceError):
    """The Content-Type or Content-Encoding of the body is not accepted."""

    status = 415
    slug = "unsupported-media"
    title = "Unsupported media type"


@final
class WrongHost(ServiceError):
    """The Host header names another host."""

    status = 421
    slug = "wrong-host"
    title = "Misdirected request"


@final
class RateLimited(ServiceError):
    """The client exceeded its rate limit."""

    status = 429
    slug = "rate-limited"
    title = "Too many requests"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)


@final
class Overloaded(ServiceError):
    """Too much work is waiting."""

    status = 503
    slug = "overloaded"
    title = "Overloaded"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)


@final
class VersionNotReached(ServiceError):
    """The requested epoch is not served yet."""

    status = 503
    slug = "version-not-reached"
    title = "Version not reached"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, errors=[FieldError("min_version", detail)], retry_after_s=retry_after_s)


@final
class Unavailable(ServiceError):
    """A dependency, such as the store, does not answer."""

    status = 503
    slug = "unavailable"
    title = "Temporarily unavailable"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)
