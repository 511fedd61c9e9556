"""The app: routes, middleware and error handlers around one engine. Nothing is made at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog
from fastapi import FastAPI

from service.edge import Edge, attach_edge
from service.limits import BodyLimit
from service.metrics import Metrics
from service.middleware import RequestContext
from service.openapi import DESCRIPTION, install_openapi
from service.problems import install_handlers
from service.routes import (
    dead_letters,
    feedback,
    groups,
    health,
    jobs,
    recommend,
    recommend_batch,
    snapshots,
    stream,
    users,
)
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine import Engine

_log = structlog.stdlib.get_logger(__name__)


def create_app(settings: Settings, engine: Engine, metrics: Metrics | None = None) -> FastAPI:
    """An app that starts and stops the engine with itself; give both the same metrics to see the engine's gauges."""
    metrics = metrics or Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        _log.info("ready", namespace=settings.namespace, version=app.version)
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        title="metaban",
        version=version("metaban"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        # A redirect answers before the key and the body are looked at, and loses the body of a POST.
        redirect_slashes=False,
    )
    attach_edge(app, Edge(settings, engine, metrics))
    routers = (recommend, recommend_batch, feedback, health, users, groups, stream, dead_letters, snapshots, jobs)
    for routes in routers:
        app.include_router(routes.router)
    install_handlers(app)
    install_openapi(app, settings)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(RequestContext, metrics=metrics)
    return app
