"""Runs everything `metaban serve` consists of in one process and one child, and stops it in order.

start:  socket bound → store (private Valkey) → worker → engine → requests
stop:   drained (service.drain) → engine → worker → store
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, final

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from service.app import create_app
from service.descriptors import raise_limit
from service.drain import DrainingServer
from service.edge import edge_in
from service.metrics import Metrics
from service.protocol import limited_protocol
from service.settings import Settings
from service.supervisor import Supervisor
from store.connection import check_server, connect
from store.embedded import EmbeddedServer

#: How long answers under way may take once no new requests come.
DRAIN_REQUESTS_S: Final = 10
#: Connections the system keeps waiting while all are busy.
ACCEPT_QUEUE: Final = 2048
#: Descriptors for everything but connections of clients: the store, files, the listener.
RESERVED_DESCRIPTORS: Final = 512
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: Longest wait before a worker that ended is started again: whatever it dies of, other events wait meanwhile.
WORKER_BACKOFF_S: Final = 2.0
#: -P: a folder named `service` in the current directory must not be taken for ours.
WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "service.cli", "worker")

log = structlog.get_logger()


class ServeError(Exception):
    """`metaban serve` cannot run as it was asked to: why, and what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy


@final
@dataclass(frozen=True, slots=True)
class Running:
    """What was started, for those who want to be told."""

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
            supervisor = Supervisor(
                WORKER_COMMAND, name="worker", environment={"REDIS_URL": url}, max_backoff_s=WORKER_BACKOFF_S
            )
            worker = stack.enter_context(supervisor).pid
        running = Running(_http_url(listener), store_name(settings), worker)
        try:
            _run(settings, url, listener, lambda: announce(running))
        finally:
            _ignore_signals()  # nothing interrupts the stopping of the rest


def bind(settings: Settings, host: str, port: int) -> socket.socket:
    """The socket to serve on; without keys only on loopback."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ServeError(
            f"cannot find the address of --host {host}: {error}", "Name one of this machine, such as 127.0.0.1."
        ) from error
    # The resolved address is judged and bound, so that a name cannot mean one here and another there.
    if not settings.has_keys and not ipaddress.ip_address(address[0]).is_loopback:
        raise ServeError(
            f"refusing to listen on {host}: anyone who reaches it could use the service, since no keys are set",
            "Make a key with `metaban key`, set METABAN_CLIENT_KEYS to its digest, and clients send the key in "
            "the X-API-Key header.\nOr listen on this machine alone: --host 127.0.0.1",
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may be bound to one address until one of them listens; uvicorn only sets the queue anew.
        listener.listen(ACCEPT_QUEUE)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _not_bound(error, host, port) from error
    return listener


def room_for_connections(wanted: int) -> int:
    """How many connections of clients there are descriptors for, beside those that the rest of the process needs.

    A process that runs out of descriptors cannot reach its store either.
    """
    limit, needed = raise_limit(), wanted + RESERVED_DESCRIPTORS
    if limit >= needed:
        return wanted
    room = max(1, limit - RESERVED_DESCRIPTORS, limit // 2)
    log.warning("too few descriptors", limit=limit, wanted=needed, effect=f"{room} connections at most")
    return room


def store_name(settings: Settings) -> str:
    """Where the state is, without the password."""
    if settings.redis_url is None:
        return f"private Valkey in {settings.data_dir.resolve()}"
    scheme, _, rest = settings.redis_url.partition("://")
    # Cut by hand: of several hosts the library makes no sense. No option is shown, one may be a password.
    place, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def _run(settings: Settings, redis_url: str, listener: socket.socket, started: Callable[[], None]) -> None:
    # Imports torch, which takes a second: not before everything cheap has succeeded.
    from service.recommenders import Recommenders

    metrics = Metrics()
    app = create_app(settings, Recommenders(settings, redis_url, metrics), metrics)
    uvloop.run(_serve_requests(app, listener, settings, started))


async def _serve_requests(
    app: FastAPI, listener: socket.socket, settings: Settings, started: Callable[[], None]
) -> None:
    metrics = edge_in(app).metrics
    connections_max = room_for_connections(settings.max_connections)
    config = uvicorn.Config(
        app,
        # The engine is started here, so that its errors arrive as they are and not as uvicorn's log lines.
        lifespan="off",
        # Not `limit_concurrency`: it counts connections and requests as one, turns probes away too, and answers in
        # plain text, with a line of log for everyone.
        http=limited_protocol(connections_max, lambda reason: metrics.rejected.labels(reason).inc()),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPT_QUEUE,
        timeout_graceful_shutdown=DRAIN_REQUESTS_S,
    )
    async with app.router.lifespan_context(app):
        # uvicorn catches the signals while it runs, and when it is done raises them again for whoever is next.
        _ignore_signals()
        # What was loaded so far stays: looked through again by every full collection, it would hold all requests up.
        gc.collect()
        gc.freeze()
        started()
        server = DrainingServer(config, drain_s=settings.drain_s, on_drain=edge_in(app).stopping.set)
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
            f"port {port} on {host} is in use", "Stop the program that has it, or choose another with --port."
        )
    if error.errno == errno.EACCES:
        return ServeError(f"this user may not listen on port {port}", "Choose one above 1023 with --port.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ServeError(f"{host} is not an address of this machine", "Choose another with --host.")
    return ServeError(f"cannot listen on {host}, port {port}: {error}", "Choose others with --host and --port.")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends whatever runs the way Ctrl-C does, with everything that was started stopped."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Not SIG_IGN, which a child started from now on would inherit."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
