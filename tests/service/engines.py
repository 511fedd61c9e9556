"""Engines without HTTP, and commands for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metaban.service.engine.commands import ArmInput, RecommendCommand, RewardCommand
from metaban.service.engine.engine import Engine
from metaban.service.settings.environment import Settings
from metaban.store.decisions.decisions import DecisionRecord
from metaban.worker.namespace import WorkerSettings
from metaban.worker.process import work_until_signal
from tests.service.apps import SMALL

MakeEngine = Callable[..., Engine]


def settings(**changes: Any) -> Settings:
    """Settings of the namespace `shop`, with a small learner."""
    return Settings(**{**SMALL, "namespace": "shop", **changes})


@asynccontextmanager
async def worker_running(url: str) -> AsyncIterator[None]:
    """A worker in this process."""
    limits = WorkerSettings(samples_kept=20, backlog_limit=1_000, candidate_pool=100, device="cpu")
    worker = asyncio.create_task(work_until_signal(url, limits))
    try:
        yield
    finally:
        while not (await asyncio.wait([worker], timeout=0.5))[0]:
            worker.cancel()


def ask(
    user: str = "u", *, arms: int = 4, inputs: int = 3, k: int = 1, decision_id: str | None = None, body: str = "body"
) -> RecommendCommand:
    """A request with random arms, seeded by the numbers of arms and inputs."""
    generator = np.random.default_rng(arms * 100 + inputs)
    return RecommendCommand(
        user_id=user,
        arms=tuple(ArmInput(f"arm {place}", generator.normal(size=inputs).tolist()) for place in range(arms)),
        context=None,
        k=k,
        decision_id=decision_id,
        fingerprint=body,
    )


def reward(decision_id: str, value: float = 1.0, *, arm: str | None = None, event: str | None = None) -> RewardCommand:
    """One reward of a decision."""
    return RewardCommand(decision_id, arm, value, event)


@dataclass
class Held:
    """State of decisions held before they are stored: `come` when one waits, `passing` to release it."""

    come: asyncio.Event = field(default_factory=asyncio.Event)
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    incarnations: list[int] = field(default_factory=list)


def hold_puts(engine: Engine, *, times: int) -> Held:
    """Hold the next decisions of an engine before they are stored; each is released by `passing`."""
    held, put = Held(), engine._decisions.put

    async def late(decision: DecisionRecord, **more: Any) -> DecisionRecord:
        held.incarnations.append(decision.incarnation)
        if len(held.incarnations) <= times:
            held.come.set()
            async with asyncio.timeout(30):
                await held.passing.wait()
            held.passing.clear()
        return await put(decision, **more)

    engine._decisions.put = late  # type: ignore[method-assign]
    return held
