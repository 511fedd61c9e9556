"""Fusion models, trained briefly on a small population and published as by a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from redis.asyncio import Redis

from metaban.models.fusion.training import FusionSettings
from metaban.models.fusion.warm_start_training import train_warm_starts
from metaban.models.learner import Learner
from metaban.models.presets import build_learner
from metaban.models.settings import named_settings
from metaban.store.codec import Sample
from metaban.store.namespaces import NamespaceStore
from metaban.store.shared.fusion import FusionRecord, FusionSource, FusionStore
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.service.apps import SMALL

#: Arms of three numbers and a constant.
INPUTS = 4
PROFILE = 2
SOURCES = 40
QUICK = FusionSettings(processes=3, inducing=10, batch=32, round_steps=10, rounds=4)


@dataclass(frozen=True)
class Trained:
    """A fusion model, and the profiles of its sources."""

    arrays: dict[str, np.ndarray]
    report: dict[str, Any]
    profiles: np.ndarray


def learner() -> Learner:
    """The learner of `apps.SMALL`."""
    return build_learner(named_settings("default", width=SMALL["width"]), INPUTS)


@cache
def trained() -> Trained:
    """A model of users whose taste is their profile. The guard's verdict is set, because the training is too short."""
    generator = np.random.default_rng(3)
    model = learner()
    trainer = Trainer(model, torch.device("cpu"))
    profiles = generator.normal(size=(SOURCES, PROFILE))
    pupils = []
    for number, profile in enumerate(profiles):
        samples = []
        for event in range(12):
            arm = np.append(generator.normal(size=INPUTS - 1), 1).astype(np.float32)
            reward = 0.5 + 0.3 * float(np.tanh(arm[0] * profile[0] + arm[1] * profile[1]))
            noted = np.zeros(model.noted, dtype=np.float32)
            samples.append(replace(Sample(arm, reward, 0.5, 0, event, str(event)), phi=noted))
        pupils.append(FitInput(f"source {number}", len(samples), samples, None))
    found = train_warm_starts(
        model, model.initial_shared(), [trainer.batch(pupils)], torch.from_numpy(profiles), seed=1, settings=QUICK
    )
    report = replace(found.report, verdict="fusion", blend=1.0, trust=0.6)
    arrays = {**found.arrays, "blend": np.array(1.0), "trust": np.array(0.6)}
    return Trained(arrays, report.to_json(), profiles)


async def fusion_store(redis: Redis, namespace: str = "default") -> FusionStore:
    record = await NamespaceStore(redis).load(namespace)
    assert record is not None
    return FusionStore(redis, record.keys, record.store_id)


async def publish(
    redis: Redis, version: int = 1, *, namespace: str = "default", report: dict[str, Any] | None = None, **arrays: Any
) -> Trained:
    """Publish a version, with some of its arrays replaced."""
    store, made = await fusion_store(redis, namespace), trained()
    sources = tuple(FusionSource(f"token {row}", profile) for row, profile in enumerate(made.profiles))
    record = FusionRecord(
        version, {**made.arrays, **arrays}, sources, report or made.report, created_ms=1_000 + version
    )
    assert await store.acquire_lease("test", 60_000)
    names = {source.token: f"source {row}" for row, source in enumerate(sources)}
    assert await store.publish(record, names, lease_token="test")
    return made
