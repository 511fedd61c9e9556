"""Carrying out what `service.client_core` plans: blocking, or in asyncio. Nothing here knows what is asked.

`blocking` and `awaiting` turn a function that plans a call into a method that makes it, with the same arguments; their
like for lists in pages and for answers read line by line give iterators.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, final

import httpx

from service.client_core import Lines, Outcome, Pages, Pause, Policy, Send, Task, broken_off

P = ParamSpec("P")
T = TypeVar("T")

KEY_HEADER: Final = "X-API-Key"
#: What a header can hold: the HTTP library's error about anything else would show it.
PRINTABLE: Final = re.compile(r"[\x21-\x7e]{1,512}")
#: Idle connections are dropped before the service drops them (after 5 s): a request on one that it is just closing has
#: to be sent twice.
LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)


@final
@dataclass(frozen=True, slots=True)
class Address:
    """Where the service is, and who asks for which namespace."""

    url: httpx.URL
    key: str | None = field(repr=False)
    namespace: str | None

    @classmethod
    def of(cls, base_url: str, key: str | None, namespace: str | None) -> Address:
        """Checked; no message repeats what may be secret."""
        url = httpx.URL(base_url)
        if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.query or url.fragment:
            raise ValueError("base_url must be http(s)://host, perhaps with a port and a path; a key goes into `key`")
        if key is not None and not PRINTABLE.fullmatch(key):
            raise ValueError("key must be printable ASCII without spaces, as `metaban key` prints it")
        return cls(url, key, namespace)

    @property
    def headers(self) -> dict[str, str]:
        """Sent with every request."""
        return {} if self.key is None else {KEY_HEADER: self.key}

    def request(self, step: Send) -> dict[str, Any]:
        """A request as httpx wants it, but for its body."""
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
class BlockingSender:
    """Sends and sleeps; may be shared by threads."""

    def __init__(self, address: Address, policy: Policy, transport: httpx.BaseTransport | None) -> None:
        self.address = address
        self._policy = policy
        self._http = httpx.Client(base_url=address.url, headers=address.headers, transport=transport, limits=LIMITS)

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
        response = self._http.send(
            self._http.build_request(**self.address.request(step), content=body), stream=step.call.streamed
        )
        if not response.is_success:
            response.read()
        return response

    def iterate(self, pages: Pages[T]) -> Iterator[T]:
        page = self.run(pages.page(None))
        yield from page.items
        while page.cursor is not None:
            page = self.run(pages.page(page.cursor))
            yield from page.items

    def lines(self, lines: Lines[T]) -> Iterator[T]:
        response = self.run(lines.call)
        try:
            for line in response.iter_lines():
                yield lines.read(line)
        except httpx.RequestError as error:
            raise broken_off(self._policy.where, error) from None
        finally:
            response.close()


@final
class AwaitingSender:
    """The same in asyncio; may be shared by the tasks of one loop."""

    def __init__(self, address: Address, policy: Policy, transport: httpx.AsyncBaseTransport | None) -> None:
        self.address = address
        self._policy = policy
        self._http = httpx.AsyncClient(
            base_url=address.url, headers=address.headers, transport=transport, limits=LIMITS
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, task: Task[T]) -> T:
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
        response = await self._http.send(
            self._http.build_request(**self.address.request(step), content=body), stream=step.call.streamed
        )
        if not response.is_success:
            await response.aread()
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
        try:
            async for line in response.aiter_lines():
                yield lines.read(line)
        except httpx.RequestError as error:
            raise broken_off(self._policy.where, error) from None
        finally:
            await response.aclose()


async def _in_thread(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces that come from a file or from long work, without holding up the loop."""
    iterator = iter(pieces)
    while piece := await asyncio.to_thread(next, iterator, b""):
        yield piece


class Blocking:
    """Has methods made by `blocking`."""

    def __init__(self, sender: BlockingSender) -> None:
        self._sender = sender


class Awaiting:
    """Has methods made by `awaiting`."""

    def __init__(self, sender: AwaitingSender) -> None:
        self._sender = sender


def blocking(plan: Callable[P, Task[T]]) -> Callable[Concatenate[Blocking, P], T]:
    """A method that makes the call and returns its answer."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._sender.run(plan(*args, **kwargs))

    return _documented(method, plan)


def blocking_pages(plan: Callable[P, Pages[T]]) -> Callable[Concatenate[Blocking, P], Iterator[T]]:
    """A method that asks for page after page as they are needed."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._sender.iterate(plan(*args, **kwargs))

    return _documented(method, plan)


def blocking_lines(plan: Callable[P, Lines[T]]) -> Callable[Concatenate[Blocking, P], Iterator[T]]:
    """A method that reads an answer while it arrives."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._sender.lines(plan(*args, **kwargs))

    return _documented(method, plan)


def awaiting(plan: Callable[P, Task[T]]) -> Callable[Concatenate[Awaiting, P], Coroutine[Any, Any, T]]:
    """A coroutine method that makes the call and returns its answer."""

    async def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._sender.run(plan(*args, **kwargs))

    return _documented(method, plan)


def awaiting_pages(plan: Callable[P, Pages[T]]) -> Callable[Concatenate[Awaiting, P], AsyncIterator[T]]:
    """A method that asks for page after page as they are needed."""

    def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._sender.iterate(plan(*args, **kwargs))

    return _documented(method, plan)


def awaiting_lines(plan: Callable[P, Lines[T]]) -> Callable[Concatenate[Awaiting, P], AsyncIterator[T]]:
    """A method that reads an answer while it arrives."""

    def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._sender.lines(plan(*args, **kwargs))

    return _documented(method, plan)


Method = TypeVar("Method", bound=Callable[..., Any])


def _documented(method: Method, plan: Callable[..., Any]) -> Method:
    """The method under the name, with the documentation and the arguments of its plan, for `help` and notebooks."""
    update_wrapper(method, plan)
    planned = inspect.signature(plan)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = planned.replace(
        parameters=[itself, *planned.parameters.values()], return_annotation=inspect.Signature.empty
    )
    vars(method)["__signature__"] = shown
    return method
