"""What the service tells a client it could not do.

    ServiceError
    ├── InvalidInput         422  /problems/invalid-input         a field cannot be used; `errors` names it
    ├── MalformedBody        400  /problems/malformed-body        the body is not JSON at all
    ├── Unauthorized         401  /problems/unauthorized          no key, or a wrong one
    ├── Forbidden            403  /problems/forbidden             a client's key where an admin's is needed
    ├── NotFound             404  /problems/not-found             nothing of that name is here
    ├── UnknownDecision      404  /problems/unknown-decision      never made, or not kept any more
    ├── BodyTimeout          408  /problems/body-timeout          the body did not arrive in time
    ├── DecisionConflict     409  /problems/decision-conflict     the decision_id belongs to another request
    ├── UserReset            409  /problems/user-reset            the user was forgotten or restored since the decision
    ├── NotActivated         409  /problems/not-activated         the decision is deferred and was not activated yet
    ├── NotReplayable        409  /problems/not-replayable        the dead letter cannot be put back
    ├── NamespaceExists      409  /problems/namespace-exists      the name of a new namespace is taken
    ├── SettingsChanged      409  /problems/settings-changed      the settings are not of the revision that was given
    ├── JobRunning           409  /problems/job-running           one job at a time, and one is under way
    ├── ArmExists            409  /problems/arm-exists            the catalogue has an arm of this id
    ├── VersionConflict      409  /problems/version-conflict      the arm has another version than was expected
    ├── CatalogueFull        409  /problems/catalogue-full        the catalogue has as many arms as it may
    ├── FusionUnavailable    409  /problems/fusion-unavailable    no warm starts here, by the preset or by a setting
    ├── PreconditionFailed   412  /problems/precondition-failed   there is what If-None-Match says must not be
    ├── BodyTooLarge         413  /problems/body-too-large        more bytes than the service reads
    ├── UnsupportedMedia     415  /problems/unsupported-media     the body is not declared as JSON
    ├── WrongHost            421  /problems/wrong-host            the Host header names somebody else
    ├── RateLimited          429  /problems/rate-limited          more requests than allowed; come back later
    ├── Overloaded           503  /problems/overloaded            come back after `retry_after_s`
    ├── VersionNotReached    503  /problems/version-not-reached   the epoch asked for is not served yet
    └── Unavailable          503  /problems/unavailable           come back after `retry_after_s`

`service.problems` turns these into problem documents, and does the same for the errors of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

#: Where in the request: names of members and places in lists, such as ("arms", 3, "features", 1).
FieldPath: TypeAlias = Sequence[str | int]

#: A client that is turned away without a better guess comes back after this long.
DEFAULT_RETRY_AFTER_S = 1.0


def format_field(path: FieldPath) -> str:
    """A path as a client would write it: `arms[3].features[1]`; a name that is empty is `[""]`."""
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
    """One thing wrong with one field; the empty path is the whole body."""

    field: str
    detail: str


class ServiceError(Exception):
    """Anything with an answer of its own; `detail` is shown to the client."""

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
    """One field of the request cannot be used."""

    status = 422
    slug = "invalid-input"
    title = "Invalid input"

    def __init__(self, field: FieldPath, message: str) -> None:
        self._describe([FieldError(format_field(field), message)])

    @classmethod
    def of(cls, errors: Sequence[FieldError]) -> InvalidInput:
        """Several fields at once; `errors` is not empty."""
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
    """No key, or one that is not ours."""

    status = 401
    slug = "unauthorized"
    title = "Unauthorized"


@final
class Forbidden(ServiceError):
    """A key that is ours, for something it may not do."""

    status = 403
    slug = "forbidden"
    title = "Forbidden"


@final
class NotFound(ServiceError):
    """What the path names is not here."""

    status = 404
    slug = "not-found"
    title = "Not found"


@final
class UnknownDecision(ServiceError):
    """No such decision, or it is not kept any more."""

    status = 404
    slug = "unknown-decision"
    title = "Unknown decision"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class BodyTimeout(ServiceError):
    """The client stopped sending."""

    status = 408
    slug = "body-timeout"
    title = "Body timed out"


@final
class DecisionConflict(ServiceError):
    """The decision_id was used before by a request with another body."""

    status = 409
    slug = "decision-conflict"
    title = "Decision conflict"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class UserReset(ServiceError):
    """The user was forgotten or restored since the decision: its rewards have no effect any more."""

    status = 409
    slug = "user-reset"
    title = "User began anew"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class NotActivated(ServiceError):
    """The decision is deferred and was not activated yet: the reward can be sent again once it is."""

    status = 409
    slug = "not-activated"
    title = "Not activated"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, errors=[FieldError("decision_id", detail)])


@final
class NotReplayable(ServiceError):
    """The dead letter is no reward event, or its event was accepted again since."""

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
    """Somebody else changed the settings first."""

    status = 409
    slug = "settings-changed"
    title = "Settings changed"


@final
class JobRunning(ServiceError):
    """One job at a time, and one is under way."""

    status = 409
    slug = "job-running"
    title = "Job running"


@final
class ArmExists(ServiceError):
    """The catalogue has an arm of this id already."""

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
    """The catalogue has as many arms as it may."""

    status = 409
    slug = "catalogue-full"
    title = "Catalogue full"


@final
class FusionUnavailable(ServiceError):
    """The learner of the namespace takes no warm starts, or they are switched off."""

    status = 409
    slug = "fusion-unavailable"
    title = "Fusion unavailable"


@final
class PreconditionFailed(ServiceError):
    """There is an arm of this id, and `If-None-Match` says that there must be none."""

    status = 412
    slug = "precondition-failed"
    title = "Precondition failed"


@final
class BodyTooLarge(ServiceError):
    """The body is longer than the service reads."""

    status = 413
    slug = "body-too-large"
    title = "Body too large"


@final
class UnsupportedMedia(ServiceError):
    """The body is declared as something that is not read here."""

    status = 415
    slug = "unsupported-media"
    title = "Unsupported media type"


@final
class WrongHost(ServiceError):
    """The request was meant for somebody else."""

    status = 421
    slug = "wrong-host"
    title = "Misdirected request"


@final
class RateLimited(ServiceError):
    """More requests than one sender may send."""

    status = 429
    slug = "rate-limited"
    title = "Too many requests"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)


@final
class Overloaded(ServiceError):
    """More work waits than can be done in time."""

    status = 503
    slug = "overloaded"
    title = "Overloaded"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)


@final
class VersionNotReached(ServiceError):
    """The answer was to come from an epoch that is not served yet."""

    status = 503
    slug = "version-not-reached"
    title = "Version not reached"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, errors=[FieldError("min_version", detail)], retry_after_s=retry_after_s)


@final
class Unavailable(ServiceError):
    """Something the service needs does not answer."""

    status = 503
    slug = "unavailable"
    title = "Temporarily unavailable"

    def __init__(self, detail: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)
