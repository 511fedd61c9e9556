"""The app: routes, middleware and error handlers around the engines. Nothing is made at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import FastAPI

from service.auditing import AuditTrail
from service.edge import Edge, attach_edge
from service.limits import BodyLimit
from service.metrics import Metrics
from service.middleware import RequestContext
from service.openapi import DESCRIPTION, install_openapi
from service.problems import install_handlers
from service.routes import (
    arms,
    config,
    dead_letters,
    decisions,
    feedback,
    groups,
    health,
    jobs,
    namespaces,
    recommend,
    recommend_batch,
    snapshots,
    stream,
    users,
)
from service.settings import Settings

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
        stream,
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

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await recommenders.start()
        _log.info("ready", namespace=settings.namespace, version=app.version)
        try:
            yield
        finally:
            await recommenders.stop()

    app = FastAPI(
        title="metaban",
        version=version("metaban"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        # A redirect answers before the key and the body are looked at, and loses the body of a POST.
        redirect_slashes=False,
    )
    attach_edge(app, Edge(settings, recommenders, metrics))
    for router in ROUTERS:
        app.include_router(router)
    install_handlers(app)
    install_openapi(app, settings, [route for router in ROUTERS for route in router.routes])
    # The last one added is the outermost.
    app.add_middleware(AuditTrail)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, max_import_bytes=settings.max_import_bytes)
    app.add_middleware(RequestContext, metrics=metrics)
    return app
