"""What is refused by a request's head alone, and what may wait for a body: who, for whom, how often, how many at once.

    head ──▶ host ──▶ key known, or few wrong ones from this address ──▶ rate ──▶ room ──▶ the app, which reads the body

A request that waits for its body is not under way: it keeps a connection and what it sent busy, not the service. It is
admitted a second time when the body is there. Probes pass whatever happens.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable
from typing import Final, final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth import KEY_HEADER, digest_of
from service.buckets import TokenBuckets
from service.errors import BodyTimeout, Overloaded, RateLimited, ServiceError, WrongHost
from service.metrics import Metrics
from service.problems import service_problem
from service.settings import Settings

#: Requests with a wrong key, or none, that an address may send a second, and at once.
STRANGERS_RATE: Final = 10.0
STRANGERS_BURST: Final = 20
#: A key of ours has 43 characters; nothing that is longer than this is worth a hash.
KEY_CHARS_MAX: Final = 256
#: Digits of a key's digest that logs show: enough to tell keys apart, too few to be of use.
FINGERPRINT_DIGITS: Final = 8
#: What a body may be waited for without any of it coming, and how fast it has to come in the long run.
BODY_GRACE_S: Final = 5.0
BODY_BYTES_PER_S: Final = 8_192
#: Bytes of bodies that requests under way may hold together: once parsed they take many times the room.
BODIES_BYTES: Final = 16 * 2**20
#: At least so many bodies of the longest kind.
BODIES: Final = 4
LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
PROBES: Final = "/health/"


@final
class Gate:
    """ASGI middleware before anything that costs."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics, is_known: Callable[[str], bool]) -> None:
        """`is_known` tells whether a key of this digest is one of ours."""
        self._app = app
        self._metrics = metrics
        self._is_known = is_known
        self._has_keys = settings.has_keys
        # With keys a web page that got its own name resolved to us has no key to send, and may ask what it likes.
        self._hosts = None if settings.has_keys and not settings.allowed_hosts else settings.allowed_hosts
        self._own_hosts = frozenset() if settings.has_keys else LOOPBACK_HOSTS
        self._strangers = TokenBuckets(STRANGERS_RATE, STRANGERS_BURST)
        self._senders = TokenBuckets(settings.rate_limit, settings.rate_burst) if settings.rate_limit else None
        self._most = settings.max_concurrent
        self._body_max = settings.max_body_bytes
        self._bodies_max = max(BODIES_BYTES, BODIES * settings.max_body_bytes)
        self._under_way = 0
        self._held_bytes = 0
        metrics.inflight_requests.set_function(lambda: self._under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(PROBES):
            await self._app(scope, receive, send)
            return
        try:
            self._check_host(scope)
            self._check_sender(scope)
            self._check_room()
        except ServiceError as refusal:
            await service_problem(refusal)(scope, receive, send)
            return
        visit = _Visit(self, receive)
        self._under_way += 1
        try:
            await self._app(scope, visit.receive, send)
        finally:
            self._under_way -= 1
            self._held_bytes -= visit.held_bytes

    def _check_host(self, scope: Scope) -> None:
        """Refuse what a web page sends to a name of its own that it had resolved to this machine."""
        if self._hosts is None:
            return
        names = [_host(value) for name, value in scope["headers"] if name == b"host"]
        # The address that was connected to is ours for certain, and no name that somebody could have made up.
        address = _bracketed((scope.get("server") or ("",))[0]) if self._own_hosts else ""
        if not names or any(name not in self._hosts | self._own_hosts and name != address for name in names):
            self._metrics.rejected.labels("wrong-host").inc()
            raise WrongHost(
                "The Host header names none of this service's hosts; METABAN_ALLOWED_HOSTS may hold more of them."
            )

    def _check_sender(self, scope: Scope) -> None:
        address = _network(scope)
        sender = address
        if self._has_keys:
            digest = _key_digest(scope["headers"])
            if digest is not None:
                scope.setdefault("state", {})["key"] = digest[:FINGERPRINT_DIGITS]
            # Hashing a key takes a microsecond, and being known saves those who share an address with somebody who
            # guesses, behind a proxy for example. All else of a request costs a hundred times that.
            if digest is None or not self._is_known(digest):
                if wait_s := self._strangers.take(address):
                    self._metrics.rejected.labels("wrong-keys").inc()
                    raise RateLimited("Too many requests without a known key from this address.", retry_after_s=wait_s)
                return
            sender = digest
        if self._senders is not None and (wait_s := self._senders.take(sender)):
            self._metrics.rejected.labels("rate-limited").inc()
            raise RateLimited("Too many requests; slow down (METABAN_RATE_LIMIT).", retry_after_s=wait_s)

    def _check_room(self) -> None:
        if self._under_way >= self._most:
            self._refuse(f"{self._most} requests are under way (METABAN_MAX_CONCURRENT); try again later.")

    def _hold(self, visit: _Visit, received: int) -> None:
        """Count a body's bytes until its request ends; a body that is longer than most is read in pieces."""
        more = min(received, self._body_max) - visit.held_bytes
        visit.held_bytes += more
        self._held_bytes += more
        if self._held_bytes > self._bodies_max:
            self._refuse("Too many long bodies are under way; try again later.")

    def _refuse(self, detail: str) -> None:
        self._metrics.rejected.labels("overloaded").inc()
        raise Overloaded(detail)


@final
class _Visit:
    """One request that was let in, and its body."""

    __slots__ = ("_complete", "_gate", "_receive", "_received", "_waited_s", "held_bytes")

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self._gate = gate
        self._receive = receive
        self._complete = False
        self._received = 0
        self._waited_s = 0.0
        self.held_bytes = 0

    async def receive(self) -> Message:
        """The next piece of the body, if it comes in time; errors are raised inside whoever reads it."""
        if self._complete:
            return await self._receive()  # waits for the client to go
        gate = self._gate
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        gate._under_way -= 1
        try:
            async with asyncio.timeout(BODY_GRACE_S + self._received / BODY_BYTES_PER_S - self._waited_s):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"The body is too slow: after {BODY_GRACE_S:g} s it has to bring {BODY_BYTES_PER_S} bytes a second."
            ) from None
        finally:
            gate._under_way += 1
        self._waited_s += loop.time() - began_s
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            gate._hold(self, self._received)
            self._complete = not message.get("more_body", False)
            if self._complete and gate._under_way > gate._most:
                gate._check_room()
        else:
            self._complete = True
        return message


def _host(value: bytes) -> str:
    """A Host header without its port; what is no host comes out as no name that could be ours."""
    text = value.decode("latin-1").lower()
    name, colon, port = text.rpartition(":")
    return (name if colon and port.isdigit() else text).removesuffix(".")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _network(scope: Scope) -> str:
    """Whom an address belongs to: of IPv6, where one machine has more than can be counted, the network."""
    client = scope.get("client")
    address: str = client[0] if client else ""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def _key_digest(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    wanted = KEY_HEADER.lower().encode()
    for name, value in headers:
        if name == wanted:
            return digest_of(value.decode("latin-1")) if len(value) <= KEY_CHARS_MAX else None
    return None
