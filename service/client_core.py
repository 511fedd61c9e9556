"""One call, from its parts to its answer, with all the tries it takes; without sending anything.

A call is a generator of steps (send this, pause so long) that is told what came of each, so that the blocking and the
asyncio client differ in how they send and sleep and in nothing else.

What is tried again. A call that may be repeated (its effect comes once however often it arrives): after a connection
that failed, a time-out, 429, 502, 503 and 504. Any other call: only when the connection could not be made at all. The
pause doubles with every try, with jitter, and is never shorter than Retry-After says; when it would end after the
deadline of the call, the call fails at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

import httpx

from service.client_admin_types import Page
from service.client_errors import ApiError, ConnectionFailed, MetabanError, UnexpectedAnswer, api_error
from service.client_reading import parse

T_co = TypeVar("T_co", covariant=True)

RETRIED_STATUSES: Final = frozenset({429, 502, 503, 504})
#: The request did not leave: it may be sent again whatever it is.
NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
#: A further try would fail in the same way.
HOPELESS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
#: Pause before the second try, and the longest one before any.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
#: A try is given at least this long, however near the deadline is.
SHORTEST_TRY_S: Final = 0.05


@final
@dataclass(frozen=True, slots=True)
class Policy:
    """How long a call may take and how often it is tried; `where` names the service in errors."""

    where: str = "the service"
    #: Silence after which one try has failed, in seconds.
    timeout_s: float = 10.0
    #: Tries after the first.
    retries: int = 4
    #: After which no further try is begun.
    deadline_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    #: Numbers from 0 to 1 that pauses are spread by.
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.retries < 0 or not 0 < self.timeout_s < float("inf") or not 0 < self.deadline_s < float("inf"):
            raise ValueError("timeout_s and deadline_s must be positive and finite, and retries 0 or more")

    def pause_s(self, tries: int, retry_after_s: float | None) -> float:
        """How long to wait after so many tries; at least as long as the service asked for."""
        backoff = min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S)
        if retry_after_s is not None:
            # Everybody who was turned away was told the same number.
            return retry_after_s + backoff * self.chance()
        return backoff * (0.5 + 0.5 * self.chance())


@final
@dataclass(frozen=True, slots=True)
class Send:
    """A step: send this request. Answered with the response, read unless it is wanted as a stream and went well."""

    call: Call[Any]
    timeout_s: float


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """A step: wait."""

    seconds: float


#: What a step came to: an answer or its failure after Send, nothing after Pause.
Outcome: TypeAlias = httpx.Response | httpx.RequestError | None
Steps: TypeAlias = Generator[Send | Pause, Outcome, T_co]


class Task(Protocol[T_co]):
    """Something to ask of the service: one call, or several."""

    def steps(self, policy: Policy) -> Steps[T_co]:
        """How to do it."""


@final
@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """One request, and how to read its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T_co]
    query: Mapping[str, str] = field(default_factory=dict)
    #: The whole body, or the pieces of a long one: begun anew for every try.
    content: bytes | Callable[[], Iterable[bytes]] | None = field(default=None, repr=False)
    media_type: str = "application/json"
    #: Whether its effect comes once however often it arrives.
    repeatable: bool = True
    #: Statuses whose answer is read, beside 2xx.
    also_read: frozenset[int] = frozenset()
    #: What is deleted may be gone because an earlier try of the same call deleted it.
    deletes: bool = False
    streamed: bool = False
    #: Whether it is asked of a namespace.
    of_namespace: bool = True

    def steps(self, policy: Policy) -> Steps[T_co]:
        """Try until it is answered, refused, or out of tries or time."""
        deadline = policy.clock() + policy.deadline_s
        tries, unsure = 0, False
        while True:
            tries += 1
            left = max(deadline - policy.clock(), SHORTEST_TRY_S)
            outcome = yield Send(self, min(policy.timeout_s, left))
            failure: MetabanError
            retry_after_s = None
            if isinstance(outcome, httpx.Response):
                if outcome.is_success or outcome.status_code in self.also_read:
                    return self.read(outcome)
                if self.deletes and unsure and outcome.status_code == httpx.codes.NOT_FOUND:
                    return self.read(outcome)
                failure = refused = error_of(outcome)
                unsure |= outcome.is_server_error
                again = self.repeatable and outcome.status_code in RETRIED_STATUSES
                retry_after_s = refused.retry_after_s
            else:
                sent = not isinstance(outcome, NEVER_SENT)
                unsure |= sent
                failure = ConnectionFailed(_told(policy.where, outcome, tries), sent=sent)
                again = not sent or (self.repeatable and not isinstance(outcome, HOPELESS))
            pause_s = policy.pause_s(tries, retry_after_s)
            if not again or tries > policy.retries or policy.clock() + pause_s >= deadline:
                raise failure
            yield Pause(pause_s)


@final
@dataclass(frozen=True, slots=True)
class Pages(Generic[T_co]):
    """A list that is asked for page by page; `page` makes the call for the one at a cursor."""

    page: Callable[[str | None], Call[Page[T_co]]]


@final
@dataclass(frozen=True, slots=True)
class Lines(Generic[T_co]):
    """An answer that is read line by line while it arrives."""

    call: Call[httpx.Response]
    read: Callable[[str], T_co]


def error_of(response: httpx.Response) -> ApiError:
    """The error that a response tells of."""
    try:
        document = parse(response.content)
    except UnexpectedAnswer:
        document = None
    return api_error(response.status_code, document, response.headers.get("Retry-After"))


def broken_off(where: str, error: httpx.RequestError) -> ConnectionFailed:
    """The error of an answer that ended too early."""
    return ConnectionFailed(f"the answer of {where} broke off: {type(error).__name__}", sent=True)


def _told(where: str, error: httpx.RequestError | None, tries: int) -> str:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"no answer from {where} ({reason}) after {tries} {'try' if tries == 1 else 'tries'}"
