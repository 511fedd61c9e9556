"""Starts the parts of `metaban serve` and stops them in order; raises the limit of file descriptors.

start:  socket bound → store (private Valkey) → worker → engine → requests
stop:   drained (metaban.service.process.drain) → engine → worker → store
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from metaban.service.http.app import create_app
from metaban.service.http.app_state import state_of
from metaban.service.http.protocol import limited_protocol
from metaban.service.process.drain import DrainingServer
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics
from metaban.store.client.connection import check_server, connect
from metaban.store.processes import SupervisedProcess, spawn_ending_with_parent
from metaban.store.valkey.server import EmbeddedServer

#: Time limit of requests in progress after the listener has closed.
DRAIN_REQUESTS_S: Final = 10

#: How long a connection may wait for its next request. Clients and proxies close theirs after 5 to 60 s; were the
#: service first, a request that is on its way would be lost. Idle connections are closed earlier when room is short.
KEEP_ALIVE_S: Final = 75

#: Length of the kernel's queue of connections not accepted yet.
ACCEPT_QUEUE: Final = 2048

#: Wanted limit of file descriptors. Each connection needs one, and so does each partition of each namespace.
DESCRIPTORS_WANTED: Final = 65_536

#: Descriptors for everything but client connections: the store, files, the listener.
RESERVED_DESCRIPTORS: Final = 512

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

#: Longest wait before a worker that ended is restarted: events wait meanwhile.
WORKER_BACKOFF_S: Final = 2.0

#: -P: a folder in the current directory must not shadow an installed package.
WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "metaban.service.cli.main", "worker")

log = structlog.get_logger()


class ServeError(Exception):
    """`metaban serve` cannot run: the problem, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy


@final
@dataclass(frozen=True, slots=True)
class Running:
    """The parts that were started."""

    url: str
    store: str
    worker_pid: int | None


def serve(settings: Settings, host: str, port: int, *, with_worker: bool, announce: Callable[[Running], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; returns when everything is stopped."""
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        listener = stack.enter_context(bind(settings, host, port))
        if settings.redis_url is None:
            embedded = EmbeddedServer(settings.data_dir, appendfsync=settings.appendfsync)
            url = stack.enter_context(embedded).url
        else:
            url = settings.redis_url
        asyncio.run(_check_store(url))
        worker = None
        if with_worker:
            process = SupervisedProcess(
                lambda: spawn_ending_with_parent(WORKER_COMMAND, environment={"REDIS_URL": url}),
                name="worker",
                max_backoff_s=WORKER_BACKOFF_S,
            )
            worker = stack.enter_context(process).pid
        running = Running(_http_url(listener), store_name(settings), worker)
        try:
            _run(settings, url, listener, lambda: announce(running))
        finally:
            _ignore_signals()  # the shutdown of the other parts is not interrupted
    log.info("service_stopped")


def bind(settings: Settings, host: str, port: int) -> socket.socket:
    """The listening socket; without keys on loopback only."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ServeError(
            f"cannot find the address of --host {host}: {error}", "Use an address of this machine, such as 127.0.0.1."
        ) from error
    # Check and bind the same resolved address: a name may resolve differently the next time.
    if not settings.has_keys and not ipaddress.ip_address(address[0]).is_loopback:
        raise ServeError(
            f"refusing to listen on {host} without keys: anyone who reaches it could use the service",
            "Make a key with `metaban key` and set METABAN_CLIENT_KEYS to its digest; clients send the key in the "
            "X-API-Key header.\nOr listen on this machine only: --host 127.0.0.1",
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets can be bound to one address until one of them listens, so listen here; uvicorn does so again.
        listener.listen(ACCEPT_QUEUE)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _not_bound(error, host, port) from error
    return listener


def room_for_connections(wanted: int) -> int:
    """Client connections that fit the descriptor limit, with descriptors left for the rest of the process.

    A process without free descriptors cannot reach its store.
    """
    limit, needed = raise_descriptor_limit(), wanted + RESERVED_DESCRIPTORS
    if limit >= needed:
        return wanted
    room = max(1, limit - RESERVED_DESCRIPTORS, limit // 2)
    log.warning("descriptors_limited", limit=limit, wanted=needed, max_connections=room)
    return room


def raise_descriptor_limit() -> int:
    """Raise the soft limit of file descriptors as far as allowed and useful; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_WANTED
    if soft < DESCRIPTORS_WANTED:
        most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def store_name(settings: Settings) -> str:
    """The store's address, without the password."""
    if settings.redis_url is None:
        return f"private Valkey in {settings.data_dir.resolve()}"
    scheme, _, rest = settings.redis_url.partition("://")
    # urlsplit does not parse several hosts. Options are left out: one may be a password.
    place, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def _run(settings: Settings, redis_url: str, listener: socket.socket, started: Callable[[], None]) -> None:
    # Imports torch, which takes a second: after everything cheap has succeeded.
    from metaban.service.engine.registry import EngineRegistry

    metrics = Metrics()
    settings = settings.model_copy(update={"max_connections": room_for_connections(settings.max_connections)})
    app = create_app(settings, EngineRegistry(settings, redis_url, metrics), metrics)
    uvloop.run(_serve_requests(app, listener, settings, started))


async def _serve_requests(
    app: FastAPI, listener: socket.socket, settings: Settings, started: Callable[[], None]
) -> None:
    metrics = state_of(app).metrics
    config = uvicorn.Config(
        app,
        # The engines are started below, so that their errors are raised and not logged by uvicorn.
        lifespan="off",
        # Not `limit_concurrency`: it does not tell connections from requests, refuses probes too, answers in plain
        # text, and logs every refusal.
        http=limited_protocol(settings.max_connections, lambda reason: metrics.rejected.labels(reason).inc()),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPT_QUEUE,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_REQUESTS_S,
    )
    async with app.router.lifespan_context(app):
        # uvicorn handles the signals while it runs, and raises them again when it has stopped.
        _ignore_signals()
        # Objects made so far stay: without freeze every full collection would scan them and delay requests.
        gc.collect()
        gc.freeze()
        started()
        server = DrainingServer(config, drain_s=settings.drain_s, on_drain=state_of(app).stopping.set)
        metrics.open_connections.set_function(lambda: len(server.server_state.connections))
        await server.serve(sockets=[listener])


async def _check_store(url: str) -> None:
    redis = connect(url)
    try:
        await check_server(redis)
    finally:
        await redis.aclose()


def _http_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _not_bound(error: OSError, host: str, port: int) -> ServeError:
    if error.errno == errno.EADDRINUSE:
        return ServeError(
            f"port {port} on {host} is in use", "Stop the program that uses it, or choose another with --port."
        )
    if error.errno == errno.EACCES:
        return ServeError(f"this user may not listen on port {port}", "Choose one above 1023 with --port.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ServeError(f"{host} is not an address of this machine", "Choose another with --host.")
    return ServeError(f"cannot listen on {host}, port {port}: {error}", "Choose others with --host and --port.")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that everything started is stopped."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Ignore stop signals; not with SIG_IGN, which children would inherit."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
