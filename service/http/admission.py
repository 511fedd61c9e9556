"""Admission: refuses requests by their headers, and bodies while they arrive.

    headers ─▶ host ─▶ known key, or few unknown ones from this address ─▶ rate ─▶ concurrency ─▶ body size ─▶ the app

A token bucket for each sender limits rates. A request that waits for its body does not count as in progress; it is
checked again when the body is complete. One that waits for learning (`engine.waiting`) has a place of another kind.
Health probes are never refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metaban.service.engine.waiting import current_place
from metaban.service.errors import BodyTimeout, BodyTooLarge, Overloaded, RateLimited, ServiceError, WrongHost
from metaban.service.http.auth import KEY_HEADER, digest_of
from metaban.service.http.problems import service_problem
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics

#: Senders kept in memory; about 1 MB.
SENDERS_MAX: Final = 10_000


@final
class TokenBuckets:
    """A bucket for each sender; the least recently seen sender is dropped when there are too many."""

    def __init__(
        self,
        rate: float,
        burst: float,
        *,
        senders_max: int = SENDERS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate` tokens a second go into a bucket that holds `burst` of them."""
        if rate <= 0 or burst < 1 or senders_max < 1:
            raise ValueError("rate has to be positive; burst and senders_max at least 1")
        self._rate = rate
        self._burst = burst
        self._senders_max = senders_max
        self._clock = clock
        #: Tokens at a time, and that time.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Number of senders in memory."""
        return len(self._buckets)

    def take(self, sender: str) -> float:
        """Take a token; returns 0, or the seconds until there will be one."""
        now_s = self._clock()
        tokens, then_s = self._buckets.get(sender, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - then_s) * self._rate)
        missing = 1.0 - tokens
        self._buckets[sender] = (tokens if missing > 0 else tokens - 1.0, now_s)
        self._buckets.move_to_end(sender)
        while len(self._buckets) > self._senders_max:
            self._buckets.popitem(last=False)
        return max(0.0, missing / self._rate)


#: Requests with an unknown key, or none, that one address may send per second, and at once.
UNKNOWN_KEYS_RATE: Final = 10.0

UNKNOWN_KEYS_BURST: Final = 20

#: Our keys have 43 characters; a longer header is not hashed.
KEY_CHARS_MAX: Final = 256

#: Digits of a key's digest in logs: enough to tell keys apart, too few to find the key.
FINGERPRINT_DIGITS: Final = 8

#: How long a body may stay silent, and how fast it has to arrive on average after that.
BODY_GRACE_S: Final = 5.0

BODY_BYTES_PER_S: Final = 8_192

#: Bytes of all bodies in memory at once: parsed, they take many times as much.
BODIES_BYTES: Final = 16 * 2**20

#: ... but at least this many bodies of the largest size.
BODIES: Final = 4

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})

PROBES: Final = "/health/"

#: Its body is processed in pieces, and has a size limit of its own.
IMPORT_PATH: Final = "/admin/arms/import"

_KEY_HEADER: Final = KEY_HEADER.lower().encode()


@final
class Admission:
    """ASGI middleware in front of everything that costs more than reading headers."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics, is_known: Callable[[str], bool]) -> None:
        """`is_known` tells whether a digest belongs to a key of this service."""
        self._app = app
        self._metrics = metrics
        self._is_known = is_known
        self._has_keys = settings.has_keys
        # With keys, a web page that resolves its own host name to this machine has no key to send: any host may pass.
        self._hosts = None if settings.has_keys and not settings.allowed_hosts else settings.allowed_hosts
        if self._hosts is not None and not settings.has_keys:
            self._hosts |= LOOPBACK_HOSTS
        self._unknown_keys = TokenBuckets(UNKNOWN_KEYS_RATE, UNKNOWN_KEYS_BURST)
        self._senders = TokenBuckets(settings.rate_limit, settings.rate_burst) if settings.rate_limit else None
        # Connections with a request in progress or waiting cannot be closed for others: some must be left, for probes.
        self._concurrent_max = min(settings.max_concurrent, max(1, settings.max_connections // 2))
        self._waiting_max = (settings.max_connections - self._concurrent_max) // 2
        self._body_max = settings.max_body_bytes
        self._import_max = settings.max_import_bytes
        self._bodies_max = max(BODIES_BYTES, BODIES * settings.max_body_bytes)
        self._in_progress = 0
        self._waiting = 0
        self._held_bytes = 0
        self._waiting_bytes = 0
        metrics.inflight_requests.set_function(lambda: self._in_progress)
        metrics.waiting_requests.set_function(lambda: self._waiting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(PROBES):
            await self._app(scope, receive, send)
            return
        admitted = _AdmittedRequest(self, scope, receive)
        try:
            self._check_headers(scope, admitted)
        except ServiceError as refusal:
            await service_problem(refusal)(scope, receive, send)
            return
        self._in_progress += 1
        token = current_place.set(admitted)
        try:
            await self._app(scope, admitted.receive, send)
        finally:
            current_place.reset(token)
            self._in_progress -= 1
            self._held_bytes -= admitted.held_bytes

    def _check_headers(self, scope: Scope, admitted: _AdmittedRequest) -> None:
        hosts, key, length = [], None, 0
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == _KEY_HEADER and key is None:
                key = value
            elif name == b"content-length" and value.isdigit():
                # int() refuses thousands of digits; 19 are enough. The bytes that arrive are counted in any case.
                length = int(value[:19])
        if self._hosts is not None:
            self._check_hosts(scope, hosts)
        if self._has_keys or self._senders is not None:
            self._check_sender(scope, key)
        if self._in_progress >= self._concurrent_max:
            self._refuse_concurrency()
        admitted.check_size(length)

    def _check_hosts(self, scope: Scope, hosts: list[bytes]) -> None:
        """Refuse the requests of a web page that resolves its own host name to this machine (DNS rebinding)."""
        allowed = self._hosts or frozenset()
        for value in hosts:
            text = value.decode("latin-1").lower()
            name, colon, port = text.rpartition(":")
            host = (name if colon and port.isdigit() else text).removesuffix(".")
            if host not in allowed and (self._has_keys or host != _local_address(scope)):
                break
        else:
            if hosts:
                return
        self._metrics.rejected.labels("wrong-host").inc()
        raise WrongHost("The Host header names no host of this service; METABAN_ALLOWED_HOSTS can list more of them.")

    def _check_sender(self, scope: Scope, key: bytes | None) -> None:
        if self._has_keys:
            digest = digest_of(key.decode("latin-1")) if key is not None and len(key) <= KEY_CHARS_MAX else None
            if digest is not None:
                scope.setdefault("state", {})["key"] = digest[:FINGERPRINT_DIGITS]
            # Known keys pass even from an address that guesses keys: behind a proxy all clients share one address.
            if digest is None or not self._is_known(digest):
                if wait_s := self._unknown_keys.take(network_of(scope.get("client"))):
                    self._metrics.rejected.labels("wrong-keys").inc()
                    raise RateLimited("Too many requests without a known key from this address.", retry_after_s=wait_s)
                return
            sender = digest
        else:
            sender = network_of(scope.get("client"))
        if self._senders is not None and (wait_s := self._senders.take(sender)):
            self._metrics.rejected.labels("rate-limited").inc()
            raise RateLimited("Too many requests; slow down (METABAN_RATE_LIMIT).", retry_after_s=wait_s)

    def _refuse_concurrency(self) -> None:
        self._metrics.rejected.labels("overloaded").inc()
        raise Overloaded(f"{self._concurrent_max} requests are in progress (METABAN_MAX_CONCURRENT); try again later.")


@final
class _AdmittedRequest:
    """One admitted request: its body, limited in size, time and memory, and its place in progress."""

    __slots__ = (
        "_admission", "_complete", "_max_bytes", "_receive", "_setting", "_state", "_waited_s", "_waits", "held_bytes",
    )  # fmt: skip

    def __init__(self, admission: Admission, scope: Scope, receive: Receive) -> None:
        imports = scope["path"] == IMPORT_PATH and scope["method"] == "POST"
        self._max_bytes = admission._import_max if imports else admission._body_max
        self._setting = "METABAN_MAX_IMPORT_BYTES" if imports else "METABAN_MAX_BODY_BYTES"
        self._admission = admission
        self._receive = receive
        self._state = scope.setdefault("state", {})
        self._state["bytes_in"] = 0  # for the log line
        self._complete = False
        self._waited_s = 0.0
        self._waits = 0
        self.held_bytes = 0

    async def receive(self) -> Message:
        """The next piece of the body, if it comes in time; errors are raised in the code that reads it."""
        if self._complete:
            return await self._receive()  # waits for the client to disconnect
        admission = self._admission
        received = self._state["bytes_in"]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        admission._in_progress -= 1
        try:
            async with asyncio.timeout(BODY_GRACE_S + received / BODY_BYTES_PER_S - self._waited_s):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"The body is too slow: after {BODY_GRACE_S:g} s it has to bring {BODY_BYTES_PER_S} bytes a second."
            ) from None
        finally:
            admission._in_progress += 1
        self._waited_s += loop.time() - began_s
        if message["type"] != "http.request":
            self._complete = True
            return message
        received += len(message.get("body", b""))
        self._state["bytes_in"] = received
        self.check_size(received)
        # An import is read in pieces: more than one body's worth is never in memory.
        held = min(received, admission._body_max)
        admission._held_bytes += held - self.held_bytes
        self.held_bytes = held
        if admission._held_bytes > admission._bodies_max:
            admission._metrics.rejected.labels("overloaded").inc()
            raise Overloaded("Too many long bodies are in progress; try again later.")
        self._complete = not message.get("more_body", False)
        if self._complete and admission._in_progress > admission._concurrent_max:
            admission._refuse_concurrency()
        return message

    def begin_waiting(self) -> bool:
        """Change to a waiting place, with the bytes of the body."""
        admission = self._admission
        if self._waits == 0:
            full = admission._waiting_bytes + self.held_bytes > admission._bodies_max
            if full or admission._waiting >= admission._waiting_max:
                admission._metrics.rejected.labels("waiting").inc()
                return False
            self._move(1)
        self._waits += 1
        return True

    def end_waiting(self) -> None:
        """Change back with the last wait. Not refused even if too many are in progress then: it is nearly done."""
        self._waits -= 1
        if self._waits == 0:
            self._move(-1)

    def _move(self, places: int) -> None:
        admission, held = self._admission, places * self.held_bytes
        admission._in_progress -= places
        admission._waiting += places
        admission._held_bytes -= held
        admission._waiting_bytes += held

    def check_size(self, length: int) -> None:
        if length > self._max_bytes:
            raise BodyTooLarge(f"The body is longer than {self._max_bytes} bytes ({self._setting}).")


def _local_address(scope: Scope) -> str:
    """The address the client connected to, as a Host header writes it."""
    address: str = (scope.get("server") or ("",))[0]
    return f"[{address}]" if ":" in address else address


def network_of(client: tuple[str, int] | None) -> str:
    """The address of a client; for IPv6 its /64 network, since one machine can use any address of it."""
    address = client[0] if client else ""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
