"""An engine with scripted answers that records its calls, for tests of the HTTP layer alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np

from metaban.service.engine.commands import (
    CheckResult,
    FeedbackOutcome,
    Recommendation,
    RecommendCommand,
    RewardCommand,
)
from metaban.service.engine.reward_watch import LearningWarning
from metaban.service.errors import NotFound
from metaban.service.http.app import create_app
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics
from metaban.store.decisions.decisions import DecidedItem, DecisionRecord

#: A request to /recommend, and one to /feedback.
ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2.5]}, {"id": "b", "features": [0, -1]}]}
ONE_REWARD = {"decision_id": "d", "reward": 1}


def decided(
    decision_id: str, items: tuple[DecidedItem, ...], *, user_id: str = "u", activated_ms: int | None = None
) -> DecisionRecord:
    """A decision for these items."""
    inputs = np.zeros((len(items), 0), dtype=np.float32)
    return DecisionRecord(
        decision_id=decision_id,
        user_id=user_id,
        fingerprint="",
        items=items,
        features=inputs,
        phi=inputs,
        policy="ucb-floor",
        epoch=3,
        user_version=0,
        cold_start="meta",
        created_ms=1_000,
        activated_ms=activated_ms,
    )


class ScriptedEngine:
    """Records commands; answers with fixed scores, `outcome` and `checks`, or raises `error`."""

    namespace = "default"

    def __init__(self) -> None:
        self.metrics = Metrics().of(self.namespace)
        self.decider = self.feedback = self
        self.calls: list[RecommendCommand | list[RewardCommand]] = []
        self.waited: list[bool] = []
        self.activated: list[str] = []
        self.running = False
        self.warnings: list[LearningWarning] = []
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
        decision = decided(command.decision_id or "d-1", items, user_id=command.user_id)
        return Recommendation(decision, logged=self.logged)

    async def activate(self, decision_id: str) -> DecisionRecord:
        self.activated.append(decision_id)
        if self.error:
            raise self.error
        return decided(decision_id, (), activated_ms=1_234)

    async def accept(self, commands: list[RewardCommand], wait_applied: bool) -> FeedbackOutcome:
        self.calls.append(commands)
        self.waited.append(wait_applied)
        if self.error:
            raise self.error
        return self.outcome

    async def readiness(self) -> dict[str, CheckResult]:
        return self.checks

    async def refresh_gauges(self) -> None:
        if self.error:
            raise self.error


class OneEngine:
    """A registry with one engine, of the namespace `default`."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.default = engine

    async def start(self) -> None:
        await self.default.start()

    async def stop(self) -> None:
        await self.default.stop()

    async def engine(self, name: str) -> ScriptedEngine:
        if name != "default":
            raise NotFound("There is no namespace of this name.")
        return self.default

    async def readiness(self) -> dict[str, CheckResult]:
        return await self.default.readiness()

    def warnings(self) -> list[tuple[str, LearningWarning]]:
        return [(self.default.namespace, each) for each in self.default.warnings]

    async def refresh_gauges(self) -> None:
        await self.default.refresh_gauges()


@asynccontextmanager
async def scripted_app(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real app around a scripted engine."""
    metrics = Metrics()
    engine.metrics = metrics.of(engine.namespace)
    app = create_app(Settings(**settings), OneEngine(engine), metrics)  # type: ignore[arg-type]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client
