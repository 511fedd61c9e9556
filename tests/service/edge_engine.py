"""An engine that remembers what it was asked: for tests of the HTTP edge, and of nothing behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from service.app import create_app
from service.contracts import (
    Activation,
    CheckResult,
    FeedbackOutcome,
    Recommendation,
    RecommendCommand,
    RewardCommand,
)
from service.errors import NotFound
from service.metrics import Metrics
from service.settings import Settings
from store.decisions import DecidedItem


class EdgeEngine:
    namespace = "default"

    def __init__(self) -> None:
        self.metrics = Metrics().of(self.namespace)
        self.calls: list[RecommendCommand | list[RewardCommand]] = []
        self.waited: list[bool] = []
        self.activated: list[str] = []
        self.running = False
        self.error: Exception | None = None
        self.outcome = FeedbackOutcome(1, 0, (), None)
        self.logged = True
        self.checks = {"store": CheckResult(True, "answers")}

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def recommend(self, command: RecommendCommand) -> Recommendation:
        self.calls.append(command)
        if self.error:
            raise self.error
        items = tuple(
            DecidedItem(arm.id, rank, 0.75, 0.5, 0.25, 0.98, 1)
            for rank, arm in enumerate(command.arms[: command.k], start=1)
        )
        return Recommendation(command.decision_id or "d-1", items, "ucb-floor", 3, "meta", False, self.logged)

    async def activate(self, decision_id: str) -> Activation:
        self.activated.append(decision_id)
        if self.error:
            raise self.error
        return Activation(decision_id, 1_234)

    async def feedback(self, commands: list[RewardCommand], wait_applied: bool) -> FeedbackOutcome:
        self.calls.append(commands)
        self.waited.append(wait_applied)
        if self.error:
            raise self.error
        return self.outcome

    async def readiness(self) -> dict[str, CheckResult]:
        if self.error:
            raise self.error
        return self.checks

    async def refresh_gauges(self) -> None:
        if self.error:
            raise self.error


class Lone:
    """A deployment with one namespace."""

    def __init__(self, engine: EdgeEngine) -> None:
        self.default = engine

    async def start(self) -> None:
        await self.default.start()

    async def stop(self) -> None:
        await self.default.stop()

    async def engine(self, name: str) -> EdgeEngine:
        if name != "default":
            raise NotFound("There is no namespace of this name.")
        return self.default

    async def readiness(self) -> dict[str, CheckResult]:
        return await self.default.readiness()

    async def refresh_gauges(self) -> None:
        await self.default.refresh_gauges()


@asynccontextmanager
async def edge(engine: EdgeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real app around the engine."""
    metrics = Metrics()
    engine.metrics = metrics.of(engine.namespace)
    app = create_app(Settings(**settings), Lone(engine), metrics)  # type: ignore[arg-type]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client,
    ):
        yield client
