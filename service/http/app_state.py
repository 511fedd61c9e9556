"""What the routes of an app share, kept in `app.state`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, final

from fastapi import FastAPI

from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from metaban.service.engine.registry import EngineRegistry


@final
@dataclass(frozen=True, slots=True)
class AppState:
    """Settings, engines and metrics of one app."""

    settings: Settings
    recommenders: EngineRegistry
    metrics: Metrics
    #: Whether requests need a key.
    has_keys: bool = field(init=False)
    #: Set when the service has received a stop signal and still answers requests.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_keys", self.settings.has_keys)


def attach_state(app: FastAPI, state: AppState) -> None:
    """Store the state where `state_of` finds it."""
    app.state.metaban = state


def state_of(app: FastAPI) -> AppState:
    """The state of an app."""
    return cast(AppState, app.state.metaban)
