"""What every route needs, kept with the app it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from fastapi import FastAPI, Request

from service.metrics import Metrics
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine import Engine


@final
@dataclass(frozen=True, slots=True)
class Edge:
    """The parts of one app."""

    settings: Settings
    engine: Engine
    metrics: Metrics


def attach_edge(app: FastAPI, edge: Edge) -> None:
    """Keep the parts where `edge_of` finds them."""
    app.state.edge = edge


def edge_of(request: Request) -> Edge:
    """The parts of the app that serves this request."""
    return cast(Edge, request.app.state.edge)
