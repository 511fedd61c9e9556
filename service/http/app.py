"""The FastAPI app: routes, middleware and error handlers around the engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from metaban.service.http.admission import Admission
from metaban.service.http.app_state import AppState, attach_state
from metaban.service.http.auth import KEY_HEADER
from metaban.service.http.openapi import DESCRIPTION, install_openapi
from metaban.service.http.problems import install_handlers
from metaban.service.http.request_context import RequestContext
from metaban.service.http.response_headers import DOCS_PATH, SCHEMA_PATH
from metaban.service.http.routes import (
    arms,
    calibration,
    config,
    dead_letters,
    decisions,
    feedback,
    groups,
    health,
    jobs,
    namespaces,
    recommend,
    snapshots,
    stream,
    transfer,
    users,
    warm_starts,
)
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.logging import REQUEST_ID_HEADER
from metaban.service.telemetry.metrics import Metrics
from metaban.service.telemetry.tracing import TRACE_PARENT_HEADER, Tracing

if TYPE_CHECKING:
    from metaban.service.engine.registry import EngineRegistry

ROUTERS: Final = tuple(
    module.router
    for module in (
        recommend,
        decisions,
        feedback,
        arms,
        groups,
        users,
        warm_starts,
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


def create_app(settings: Settings, recommenders: EngineRegistry, metrics: Metrics | None = None) -> FastAPI:
    """An app that starts and stops the engines. Pass the metrics that the engines use, to expose their gauges."""
    metrics = metrics or Metrics()
    tracing = Tracing(settings.otlp_endpoint, version("metaban")) if settings.otlp_endpoint is not None else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await recommenders.start()
        _log.info("service_ready", namespace=settings.namespace, version=app.version)
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
        # A redirect would be sent before the key is checked, and would lose the body of a POST.
        redirect_slashes=False,
        # FastAPI's telemetry records paths and parameters; `metaban.service.telemetry.tracing` does not.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    attach_state(app, AppState(settings, recommenders, metrics))
    for router in ROUTERS:
        app.include_router(router)
    routes = [route for router in ROUTERS for route in router.routes]
    install_handlers(app, routes)
    install_openapi(app, settings, routes)
    # The last middleware added is the outermost.
    digests = frozenset(entry.rpartition(":")[2] for entry in settings.client_keys | settings.admin_keys)
    app.add_middleware(Admission, settings=settings, metrics=metrics, is_known=digests.__contains__)
    if settings.cors_origins:
        _allow_origins(app, settings)
    app.add_middleware(RequestContext, metrics=metrics, tracing=tracing)
    return app


def _allow_origins(app: FastAPI, settings: Settings) -> None:
    """Allow web pages of these origins (CORS). They still need a key: cookies are not used."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=sorted(settings.cors_origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Content-Type", "Idempotency-Key", KEY_HEADER, REQUEST_ID_HEADER, TRACE_PARENT_HEADER],
        expose_headers=[REQUEST_ID_HEADER, "Retry-After"],
    )
