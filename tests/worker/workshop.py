"""A namespace with a feature layout, and the parts of a worker on it, for tests to put together.

The namespace has the shipped learner (`default`) unless a test gives other settings.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import count
from typing import Any

import numpy as np
import torch
from redis.asyncio import Redis

from metaban.models.features import FeatureLayout
from metaban.models.presets import build_learner
from metaban.models.settings import LearnerSettings, MetaBanSettings, named_settings
from metaban.store.codec import Sample
from metaban.store.decisions.default_rewards import AwaitedRewardStore
from metaban.store.events.event import Delivery, RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.keys import LEARNERS
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import EpochStore
from metaban.store.users.users import UserStore
from metaban.worker.epochs.epoch_trainer import EpochTrainer
from metaban.worker.learning import reader as reader_module
from metaban.worker.learning.consumer import Consumer
from metaban.worker.learning.fit_batcher import FitBatcher
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.publisher import Publisher

INPUTS = 3
NAME = "shop"
#: Longest time that `soon` waits.
SOON_S = 45.0
CPU = torch.device("cpu")


def small_default(**changes: Any) -> LearnerSettings:
    """The shipped learner, small enough to fit at once."""
    return named_settings("default", **{"width": 6, "bins": 2, "memory_samples": 4, **changes})


def small_paper(**changes: Any) -> MetaBanSettings:
    """The learner of the paper (`paper`, or `pooled`), small enough to fit at once."""
    return named_settings(changes.pop("preset", "paper"), **{"width": 6, "user_steps": 2, **changes})


#: Numbers that the default learner notes of an arm at decision time.
NOTED = build_learner(small_default(), INPUTS).noted
#: The paper's learner notes none.
NO_NOTES = np.zeros(0, dtype=np.float32)


def layout(inputs: int = INPUTS) -> FeatureLayout:
    """Arms are lists of numbers, used as they are."""
    return FeatureLayout(arm=inputs, context=0, arm_named=False, context_named=False, products=False, intercept=False)


def features(seed: int, inputs: int = INPUTS) -> np.ndarray:
    """Random inputs of an arm."""
    return np.random.default_rng(seed).normal(size=inputs).astype(np.float32)


def notes(seed: int, noted: int = NOTED) -> np.ndarray:
    """Random notes of an arm."""
    return np.random.default_rng(seed).uniform(size=noted).astype(np.float32)


def make_event(user_id: str, number: int, **changes: Any) -> RewardEvent:
    """Event `number` of a user, for the default learner; the number determines arm, inputs, notes and time."""
    fields: dict[str, Any] = {
        "event_id": f"{user_id}/{number}",
        "decision_id": f"decision {user_id}/{number}",
        "user_id": user_id,
        "arm_id": str(number),
        "features": features(number),
        "reward": (number % 3) / 2,
        "propensity": 0.5,
        "epoch": 0,
        "decided_ms": number,
        "received_ms": number,
        "phi": notes(number),
    }
    return RewardEvent(**{**fields, **changes})


def make_sample(number: int, *, inputs: int = INPUTS, reward: float | None = None, noted: int = 0) -> Sample:
    """The sample of event `number`; for the default learner, with `noted=NOTED`."""
    value = (number % 3) / 2 if reward is None else reward
    return Sample(features(number, inputs), value, 0.5, 0, number, str(number), phi=notes(number, noted))


async def soon(holds: Callable[[], Awaitable[bool]], what: str = "") -> None:
    """Wait until `holds` is true; fail after SOON_S."""
    end = time.monotonic() + SOON_S
    while not await holds():
        assert time.monotonic() < end, f"not in time: {what or holds}"
        await asyncio.sleep(0.01)


class Workshop:
    """The stores of one namespace, and the parts of a worker made from them."""

    def __init__(self, redis: Redis, record: NamespaceRecord, compute: Executor, *, samples_kept: int) -> None:
        self.redis = redis
        self.record = record
        self.keys = record.keys
        self.compute = compute
        self.samples_kept = samples_kept
        self.namespaces = NamespaceStore(redis)
        self.streams = EventStream(redis, record.keys, dedupe_window_s=60, backlog_limit=100_000)
        self.users = self.user_store()
        self.epochs = EpochStore(redis, record.keys, record.store_id)
        self.model = self.new_model()
        self.stopping = asyncio.Event()

    @classmethod
    async def open(
        cls,
        redis: Redis,
        compute: Executor,
        *,
        name: str = NAME,
        partitions: int = 1,
        samples_kept: int = 5,
        settings: LearnerSettings | MetaBanSettings | None = None,
        fixed: bool = True,
    ) -> Workshop:
        """A new namespace; its feature layout is set unless `fixed` is False."""
        namespaces = NamespaceStore(redis)
        learner = {**(settings or small_default()).to_json(), "samples_kept": samples_kept}
        record = await namespaces.open_or_create(name, partitions=partitions, seed=0, learner=learner)
        if fixed:
            record = await namespaces.set_layout(record, layout().to_json())
        return cls(redis, record, compute, samples_kept=samples_kept)

    def user_store(self) -> UserStore:
        """A separate UserStore, for tests that replace its methods."""
        return UserStore(self.redis, self.keys, self.record.store_id, samples_kept=self.samples_kept)

    def new_model(self) -> NamespaceModel:
        """The model of another process."""
        return NamespaceModel(self.namespaces, self.epochs, self.record, CPU)

    def publisher(self, consumer: str = "c1", *, users: UserStore | None = None, model: NamespaceModel | None = None):
        """A publisher with its own FitBatcher, as in another process."""
        return Publisher(
            self.streams,
            users or self.users,
            AwaitedRewardStore(self.redis, self.keys),
            model or self.model,
            FitBatcher(self.compute, self.stopping),
            consumer=consumer,
            samples_kept=self.samples_kept,
        )

    def consumer(
        self, name: str = "c1", partition: int = 0, *, publisher: Publisher | None = None, streams: Any = None
    ) -> Consumer:
        return Consumer(
            partition,
            name,
            streams or self.streams,
            reader_module.EventReader(streams or self.streams, name),
            publisher or self.publisher(name),
            self.stopping,
            on_applied=lambda partition, applied: None,
        )

    def epoch_trainer(
        self, name: str = "m1", *, users: Any = None, model: NamespaceModel | None = None, pool: int = 100
    ) -> EpochTrainer:
        return EpochTrainer(
            users or self.users,
            self.epochs,
            model or self.model,
            self.compute,
            self.stopping,
            token=name,
            partitions=self.record.partitions,
            candidate_pool=pool,
        )

    async def give(self, events: Sequence[RewardEvent], consumer: str = "c1", partition: int = 0) -> list[Delivery]:
        """Enqueue events and deliver them to a consumer."""
        await self.streams.enqueue(events)
        return await self.streams.read([partition], consumer, count=1_000, block_ms=10)

    async def learn(self, plan: Mapping[str, int], *, first: int = 0) -> None:
        """Enqueue and apply `plan[user]` events of each user."""
        trainer, numbers = self.model.trainer, count(first)
        changes = {} if trainer is None or trainer.learner.noted else {"phi": NO_NOTES}
        await self.streams.enqueue(
            [make_event(user, next(numbers), **changes) for user, events in plan.items() for _ in range(events)]
        )
        for partition in range(self.record.partitions):
            await self.publisher().publish(
                partition, await self.streams.read([partition], "c1", count=10_000, block_ms=1)
            )

    async def versions(self) -> dict[str, int]:
        """The number of applied events of each user."""
        found: dict[str, int] = {}
        for partition in range(self.record.partitions):
            found |= {user: version for user, (_, version) in (await self.users.versions(partition)).items()}
        return found

    async def epoch_number(self) -> int | None:
        """Number of the newest epoch."""
        identity = await self.epochs.current_identity()
        return None if identity is None else identity[0]

    async def stamp(self) -> str:
        """Stamp of the newest epoch, which the next one has to follow."""
        current = await self.epochs.current()
        return "" if current is None else current.stamp

    async def pending(self) -> int:
        """Number of deliveries that were not acknowledged."""
        return sum([await self.streams.pending(partition) for partition in range(self.record.partitions)])

    async def consumers(self, partition: int = 0) -> dict[str, int]:
        """Consumers of the group, with the number of pending events of each."""
        rows = await self.redis.xinfo_consumers(self.keys.events(partition), LEARNERS)
        return {row["name"].decode(): row["pending"] for row in rows}

    async def dead_letters(self, partition: int = 0) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.redis.xrange(self.keys.dead_letters(partition))]

    def start_process(self, url: str, **environment: str) -> subprocess.Popen[bytes]:
        """`metaban worker` that claims stalled events sooner than usual."""
        hurried = (
            f"import sys, {reader_module.__name__} as reader; "
            "reader.STALLED_AFTER_MS = 300; reader.CLAIM_EVERY_S = 0.05; "
            "from metaban.service.cli.main import main; sys.argv = ['metaban', 'worker']; sys.exit(main())"
        )
        return subprocess.Popen(
            [sys.executable, "-c", hurried],
            env={
                **os.environ,
                "REDIS_URL": url,
                "METABAN_NAMESPACE": NAME,
                "METABAN_SAMPLES_KEPT": str(self.samples_kept),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


#: The fixture `open_workshop`: `Workshop.open` on the test's store.
OpenWorkshop = Callable[..., Awaitable[Workshop]]
