"""The app: routes, middleware and error handlers around the engines. Nothing is made at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from service.auditing import AuditTrail
from service.auth import KEY_HEADER
from service.edge import Edge, attach_edge
from service.gate import Gate
from service.head import HeadAsGet
from service.headers import DOCS_PATH, SCHEMA_PATH
from service.limits import BodyLimit
from service.logging import REQUEST_ID_HEADER
from service.metrics import Metrics
from service.middleware import RequestContext
from service.openapi import DESCRIPTION, install_openapi
from service.problems import install_handlers
from service.routes import (
    arms,
    calibration,
    config,
    dead_letters,
    decisions,
    feedback,
    fusion,
    groups,
    health,
    jobs,
    namespaces,
    recommend,
    recommend_batch,
    snapshots,
    stream,
    transfer,
    users,
)
from service.settings import Settings
from service.tracing import TRACE_PARENT_HEADER, Tracing

if TYPE_CHECKING:
    from service.recommenders import Recommenders

ROUTERS: Final = tuple(
    module.router
    for module in (
        recommend,
        recommend_batch,
        decisions,
        feedback,
        arms,
        groups,
        users,
        fusion,
        transfer,
        stream,
        calibration,
        dead_letters,
        snapshots,
        jobs,
        config,
        namespaces,
        health,
    )
)

_log = structlog.stdlib.get_logger(__name__)


def create_app(settings: Settings, recommenders: Recommenders, metrics: Metrics | None = None) -> FastAPI:
    """An app that starts and stops the engines with itself; give both the same metrics to see the engines' gauges."""
    metrics = metrics or Metrics()
    tracing = Tracing(settings.otlp_endpoint, version("metaban")) if settings.otlp_endpoint is not None else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await recommenders.start()
        _log.info("ready", namespace=settings.namespace, version=app.version)
        try:
            yield
        finally:
            await recommenders.stop()
            if tracing is not None:
                await run_in_threadpool(tracing.stop)

    app = FastAPI(
        title="metaban",
        version=version("metaban"),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=DOCS_PATH,
        openapi_url=SCHEMA_PATH,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A redirect answers before the key and the body are looked at, and loses the body of a POST.
        redirect_slashes=False,
        # FastAPI's own would tell paths and what was in requests; `service.tracing` does not.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    attach_edge(app, Edge(settings, recommenders, metrics))
    for router in ROUTERS:
        app.include_router(router)
    routes = [route for router in ROUTERS for route in router.routes]
    install_handlers(app, routes)
    install_openapi(app, settings, routes)
    # The last one added is the outermost.
    app.add_middleware(HeadAsGet)
    app.add_middleware(AuditTrail)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, max_import_bytes=settings.max_import_bytes)
    digests = frozenset(entry.rpartition(":")[2] for entry in settings.client_keys | settings.admin_keys)
    app.add_middleware(Gate, settings=settings, metrics=metrics, is_known=digests.__contains__)
    if settings.cors_origins:
        _allow_origins(app, settings)
    app.add_middleware(RequestContext, metrics=metrics, tracing=tracing)
    return app


def _allow_origins(app: FastAPI, settings: Settings) -> None:
    """Let browsers pass on what pages of these origins ask; a page still needs a key, for which no cookie stands in."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=sorted(settings.cors_origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Content-Type", "Idempotency-Key", KEY_HEADER, REQUEST_ID_HEADER, TRACE_PARENT_HEADER],
        expose_headers=[REQUEST_ID_HEADER, "Retry-After"],
    )
