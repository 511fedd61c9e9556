"""Sending requests, with retries.

A call is a generator of steps (send, pause) that receives the outcome of each step. Both clients execute the same
steps; they differ only in how they send and sleep.

A repeatable call (its effect comes once, however often it arrives) is retried after a failed connection, a time-out,
429, 502, 503 and 504; any other call only if no connection could be made. The pause doubles with each try, with jitter,
and is at least Retry-After. If the pause would end after the deadline of the call, the call fails at once.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

import httpx

from metaban.client.admin_types import Page
from metaban.client.codec import number, parse, text, whole
from metaban.client.errors import (
    ApiError,
    ClientUnusable,
    ConnectionFailed,
    InvalidArgument,
    MetabanError,
    UnexpectedAnswer,
    api_error,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RETRIED_STATUSES: Final = frozenset({429, 502, 503, 504})
#: The request was not sent: every call may be retried.
NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
#: A retry would fail in the same way.
PERMANENT: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
#: Pause before the second try, and the longest pause.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
#: Shortest and longest time-out of one try. The shortest applies near the deadline, the longest is what sockets accept.
SHORTEST_TRY_S: Final = 0.05
LONGEST_TRY_S: Final = 86_400.0
KEY_HEADER: Final = "X-API-Key"
#: Characters that a header can hold. httpx would show other keys in its error message.
PRINTABLE: Final = re.compile(r"[\x21-\x7e]{1,512}")
#: Idle connections are closed before the service closes them (after 5 s): a request sent on a connection that is just
#: being closed has to be sent again.
LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
CLOSED: Final = "the client is closed: make another one"


# Calls and retries


@final
@dataclass(frozen=True, slots=True)
class Policy:
    """How often a call is tried and how long it may take; `where` names the service in errors."""

    where: str = "the service"
    #: Time-out of one try, in seconds.
    timeout_s: float = 10.0
    #: Tries after the first.
    retries: int = 4
    #: No try begins later than this many seconds after the call.
    deadline_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    #: Random numbers from 0 to 1, for the jitter of pauses.
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        durations = (number("timeout_s", self.timeout_s), number("deadline_s", self.deadline_s))
        if min(durations) <= 0 or whole("retries", self.retries) < 0:
            raise InvalidArgument("timeout_s and deadline_s must be above 0, and retries 0 or more")

    def pause_s(self, tries: int, retry_after_s: float | None) -> float:
        """Pause after so many tries; at least `retry_after_s`."""
        backoff = min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16), LONGEST_PAUSE_S)
        if retry_after_s is not None:
            # Spread: the service sends the same number to many clients at once.
            return retry_after_s + backoff * self.chance()
        return backoff * (0.5 + 0.5 * self.chance())


@final
@dataclass(frozen=True, slots=True)
class Send:
    """Step: send this request. The outcome is the response, read completely unless it is a stream and successful."""

    call: Call[Any]
    timeout_s: float


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """Step: sleep."""

    seconds: float


#: Outcome of a step: a response or an error after Send, None after Pause.
Outcome: TypeAlias = httpx.Response | httpx.RequestError | None
Steps: TypeAlias = Generator[Send | Pause, Outcome, T_co]


class Task(Protocol[T_co]):
    """One call, or several in sequence."""

    def steps(self, policy: Policy) -> Steps[T_co]:
        """The steps, and the result as return value."""


@final
@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """One request, and how to read its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T_co]
    query: Mapping[str, str] = field(default_factory=dict)
    #: The body, or a function that returns its pieces; it is called for every try.
    content: bytes | Callable[[], Iterable[bytes]] | None = field(default=None, repr=False)
    media_type: str = "application/json"
    #: Whether the effect comes once, however often the request arrives.
    repeatable: bool = True
    #: Statuses besides 2xx whose answer is read.
    also_read: frozenset[int] = frozenset()
    #: A 404 after a try without an answer is a success: that try deleted it.
    deletes: bool = False
    streamed: bool = False
    #: Whether the namespace of the client is added to the query.
    of_namespace: bool = True

    def steps(self, policy: Policy) -> Steps[T_co]:
        """Try until there is an answer, an error that is not retried, or no try or time left."""
        deadline = policy.clock() + policy.deadline_s
        tries, may_have_arrived = 0, False
        while True:
            tries += 1
            left = max(deadline - policy.clock(), SHORTEST_TRY_S)
            outcome = yield Send(self, min(policy.timeout_s, left, LONGEST_TRY_S))
            failure: MetabanError
            retry_after_s = None
            if isinstance(outcome, httpx.Response):
                if outcome.is_success or outcome.status_code in self.also_read:
                    return self.read(outcome)
                if self.deletes and may_have_arrived and outcome.status_code == httpx.codes.NOT_FOUND:
                    return self.read(outcome)
                failure = refusal = _error_of(outcome)
                may_have_arrived |= outcome.is_server_error
                again = self.repeatable and outcome.status_code in RETRIED_STATUSES
                retry_after_s = refusal.retry_after_s
            elif isinstance(outcome, httpx.DecodingError):
                raise UnexpectedAnswer("the answer cannot be decoded: its Content-Encoding is wrong")
            else:
                sent = not isinstance(outcome, NEVER_SENT)
                may_have_arrived |= sent
                failure = ConnectionFailed(_no_answer(policy.where, outcome, tries), sent=sent)
                again = not sent or (self.repeatable and not isinstance(outcome, PERMANENT))
            pause_s = policy.pause_s(tries, retry_after_s)
            if not again or tries > policy.retries or policy.clock() + pause_s >= deadline:
                raise failure
            yield Pause(pause_s)


@final
@dataclass(frozen=True, slots=True)
class Pages(Generic[T_co]):
    """A list that is read page by page; `page` makes the call for the page at a cursor."""

    page: Callable[[str | None], Call[Page[T_co]]]


@final
@dataclass(frozen=True, slots=True)
class Lines(Generic[T_co]):
    """An answer that is read line by line while it arrives."""

    call: Call[httpx.Response]
    read: Callable[[bytes], T_co]


def _error_of(response: httpx.Response) -> ApiError:
    try:
        document = parse(response.content)
    except UnexpectedAnswer:
        document = None
    return api_error(response.status_code, document, response.headers.get("Retry-After"))


def _no_answer(where: str, error: httpx.RequestError | None, tries: int) -> str:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"no answer from {where} ({reason}) after {tries} {'try' if tries == 1 else 'tries'}"


def _broken_off(where: str, error: httpx.RequestError) -> ConnectionFailed:
    return ConnectionFailed(f"the answer of {where} broke off: {type(error).__name__}", sent=True)


# Sending


@final
@dataclass(frozen=True, slots=True)
class Address:
    """URL of the service, key and namespace."""

    url: httpx.URL
    key: str | None = field(repr=False)
    namespace: str | None

    @classmethod
    def of(cls, base_url: str, key: str | None, namespace: str | None) -> Address:
        """Check the arguments. No message repeats them, since they may hold secrets."""
        try:
            url = httpx.URL(text("base_url", base_url))
        except (httpx.InvalidURL, ValueError):
            url = httpx.URL()
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.query or url.fragment:
            raise InvalidArgument(
                "base_url must be http(s)://host, optionally with a port and a path; a key goes into `key`"
            )
        if key is not None and not (isinstance(key, str) and PRINTABLE.fullmatch(key)):
            raise InvalidArgument("key must be printable ASCII without spaces, as `metaban key` prints it")
        return cls(url, key, None if namespace is None else text("namespace", namespace))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.key is None else {KEY_HEADER: self.key}

    def request(self, step: Send) -> dict[str, Any]:
        """Arguments of httpx's `build_request`, without the body."""
        call = step.call
        named = {"namespace": self.namespace} if call.of_namespace and self.namespace is not None else {}
        return {
            "method": call.method,
            "url": call.path,
            "params": {**call.query, **named},
            "headers": {} if call.content is None else {"Content-Type": call.media_type},
            "timeout": step.timeout_s,
        }

    def __str__(self) -> str:
        key = "set" if self.key else "none"
        return f"{str(self.url)!r}, namespace={self.namespace!r}, key: {key}"


@final
class Sender:
    """Executes tasks and blocks; threads may share it."""

    def __init__(self, address: Address, policy: Policy, transport: httpx.BaseTransport | None) -> None:
        self.address = address
        self._policy = policy
        _check_transport(transport, "handle_request")
        try:
            self._http = httpx.Client(base_url=address.url, headers=address.headers, transport=transport, limits=LIMITS)
        except Exception as error:
            raise _not_set_up(error) from None

    def close(self) -> None:
        self._http.close()

    def run(self, task: Task[T]) -> T:
        steps = task.steps(self._policy)
        try:
            step = next(steps)
            while True:
                outcome: Outcome = None
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    try:
                        outcome = self._send(step)
                    except httpx.RequestError as error:
                        outcome = error
                step = steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result

    def _send(self, step: Send) -> httpx.Response:
        content = step.call.content
        body = content() if callable(content) else content
        try:
            request = self._http.build_request(**self.address.request(step), content=body)
            response = self._http.send(request, stream=step.call.streamed)
            if not response.is_success:
                response.read()
        except httpx.InvalidURL as error:
            raise _invalid_url(error) from None
        except RuntimeError:
            self._check_usable()
            raise
        return response

    def iterate(self, pages: Pages[T]) -> Iterator[T]:
        page = self.run(pages.page(None))
        yield from page.items
        while page.cursor is not None:
            page = self.run(pages.page(page.cursor))
            yield from page.items

    def lines(self, lines: Lines[T]) -> Iterator[T]:
        response = self.run(lines.call)
        splitter = LineSplitter()
        try:
            for piece in response.iter_bytes():
                yield from map(lines.read, splitter.lines(piece))
            yield from map(lines.read, splitter.rest())
        except httpx.RequestError as error:
            raise _broken_off(self._policy.where, error) from None
        except httpx.StreamError:
            self._check_usable()
            raise
        finally:
            response.close()

    def _check_usable(self) -> None:
        if self._http.is_closed:
            raise ClientUnusable(CLOSED)


@final
class AsyncSender:
    """Executes tasks in asyncio; the tasks of one event loop may share it."""

    def __init__(self, address: Address, policy: Policy, transport: httpx.AsyncBaseTransport | None) -> None:
        self.address = address
        self._policy = policy
        #: The event loop of the first call: connections belong to it.
        self._loop: asyncio.AbstractEventLoop | None = None
        _check_transport(transport, "handle_async_request")
        try:
            self._http = httpx.AsyncClient(
                base_url=address.url, headers=address.headers, transport=transport, limits=LIMITS
            )
        except Exception as error:
            raise _not_set_up(error) from None

    async def close(self) -> None:
        try:
            await self._http.aclose()
        except RuntimeError:
            self._check_usable()
            raise

    async def run(self, task: Task[T]) -> T:
        self._loop = self._loop or asyncio.get_running_loop()
        steps = task.steps(self._policy)
        try:
            step = next(steps)
            while True:
                outcome: Outcome = None
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    try:
                        outcome = await self._send(step)
                    except httpx.RequestError as error:
                        outcome = error
                step = steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _send(self, step: Send) -> httpx.Response:
        content = step.call.content
        body = _in_thread(content()) if callable(content) else content
        try:
            request = self._http.build_request(**self.address.request(step), content=body)
            response = await self._http.send(request, stream=step.call.streamed)
            if not response.is_success:
                await response.aread()
        except httpx.InvalidURL as error:
            raise _invalid_url(error) from None
        except RuntimeError:
            self._check_usable()
            raise
        return response

    async def iterate(self, pages: Pages[T]) -> AsyncIterator[T]:
        page = await self.run(pages.page(None))
        while True:
            for item in page.items:
                yield item
            if page.cursor is None:
                return
            page = await self.run(pages.page(page.cursor))

    async def lines(self, lines: Lines[T]) -> AsyncIterator[T]:
        response = await self.run(lines.call)
        splitter = LineSplitter()
        try:
            async for piece in response.aiter_bytes():
                for line in splitter.lines(piece):
                    yield lines.read(line)
            for line in splitter.rest():
                yield lines.read(line)
        except httpx.RequestError as error:
            raise _broken_off(self._policy.where, error) from None
        except httpx.StreamError:
            self._check_usable()
            raise
        finally:
            await response.aclose()

    def _check_usable(self) -> None:
        if self._http.is_closed:
            raise ClientUnusable(CLOSED)
        if self._loop not in (None, asyncio.get_running_loop()):
            raise ClientUnusable("this AsyncMetaban belongs to another event loop: make one for each loop")


@final
class LineSplitter:
    """Splits pieces of an answer at line feeds, and only there: JSON strings may contain other line separators."""

    def __init__(self) -> None:
        self._begun = b""

    def lines(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        *ended, self._begun = (self._begun + piece).split(b"\n")
        return ended

    def rest(self) -> list[bytes]:
        """The last line, if it does not end with a line feed."""
        return [self._begun] if self._begun else []


async def _in_thread(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The pieces, made in a thread: reading a file would block the event loop."""
    iterator = iter(pieces)
    while piece := await asyncio.to_thread(next, iterator, b""):
        yield piece


def _check_transport(transport: object, method: str) -> None:
    if transport is not None and not callable(getattr(transport, method, None)):
        raise InvalidArgument(f"transport must be an httpx transport with the method {method}")


def _not_set_up(error: Exception) -> InvalidArgument:
    # httpx reads proxies and certificates from the environment. Its message may contain a password.
    return InvalidArgument(
        f"httpx refuses its settings ({type(error).__name__}): check the environment variables "
        "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
    )


def _invalid_url(error: httpx.InvalidURL) -> InvalidArgument:
    return InvalidArgument(f"the arguments do not fit into a URL: {error}")
