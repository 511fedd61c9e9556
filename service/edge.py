"""What every route needs, kept with the app it belongs to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, final

from fastapi import FastAPI, Request

from service.metrics import Metrics
from service.settings import Settings

if TYPE_CHECKING:
    from service.recommenders import Recommenders


@final
@dataclass(frozen=True, slots=True)
class Edge:
    """The parts of one app."""

    settings: Settings
    recommenders: Recommenders
    metrics: Metrics
    #: Set when the service was told to stop, while it still answers.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def attach_edge(app: FastAPI, edge: Edge) -> None:
    """Keep the parts where `edge_of` finds them."""
    app.state.edge = edge


def edge_of(request: Request) -> Edge:
    """The parts of the app that serves this request."""
    return edge_in(request.app)


def edge_in(app: FastAPI) -> Edge:
    """The parts of an app."""
    return cast(Edge, app.state.edge)
