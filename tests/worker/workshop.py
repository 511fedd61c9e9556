"""A namespace with its feature layout fixed, and the parts of a worker on it, for tests to put together."""

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

from models.features import FeatureLayout
from models.settings import MetaBanSettings, named_settings
from store.codec import Sample
from store.epochs import EpochStore
from store.events import Delivery, EventStream, RewardEvent
from store.keys import LEARNERS
from store.namespaces import NamespaceRecord, Namespaces
from store.users import UserStore
from worker.consumer import Consumer
from worker.desk import FittingDesk
from worker.meta import MetaTrainer
from worker.model import NamespaceModel
from worker.publisher import Publisher

INPUTS = 3
NAME = "shop"
#: Longest wait for something that has to happen.
SOON_S = 45.0
CPU = torch.device("cpu")


def small(**changes: Any) -> MetaBanSettings:
    """A learner that fits in no time."""
    return named_settings(changes.pop("preset", "paper"), **{"width": 6, "user_steps": 2, **changes})


def layout(inputs: int = INPUTS) -> FeatureLayout:
    """Arms are lists of numbers, and nothing is added to them."""
    return FeatureLayout(arm=inputs, context=0, arm_named=False, context_named=False, products=False, intercept=False)


def features(seed: int, inputs: int = INPUTS) -> np.ndarray:
    """An input that belongs to a number."""
    return np.random.default_rng(seed).normal(size=inputs).astype(np.float32)


def make_event(user_id: str, number: int, **changes: Any) -> RewardEvent:
    """Event `number` of a user; the number is its arm, its input and its time."""
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
    }
    return RewardEvent(**{**fields, **changes})


def make_sample(number: int, *, inputs: int = INPUTS, reward: float | None = None) -> Sample:
    """What the log keeps of event `number`."""
    return Sample(features(number, inputs), (number % 3) / 2 if reward is None else reward, 0.5, 0, number, str(number))


async def soon(holds: Callable[[], Awaitable[bool]], what: str = "") -> None:
    """Wait until something holds, and fail when it does not soon."""
    end = time.monotonic() + SOON_S
    while not await holds():
        assert time.monotonic() < end, f"did not happen: {what or holds}"
        await asyncio.sleep(0.01)


class Workshop:
    """Everything a worker is made of, around one namespace."""

    def __init__(self, redis: Redis, record: NamespaceRecord, compute: Executor, *, samples_kept: int) -> None:
        self.redis = redis
        self.record = record
        self.keys = record.keys
        self.compute = compute
        self.samples_kept = samples_kept
        self.namespaces = Namespaces(redis)
        self.streams = EventStream(redis, record.keys, dedupe_window_s=60, backlog_limit=100_000)
        self.users = self.user_store()
        self.epochs = EpochStore(redis, record.keys, record.store_epoch)
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
        settings: MetaBanSettings | None = None,
        fixed: bool = True,
    ) -> Workshop:
        """A new namespace, its layout fixed unless it is told not to be."""
        namespaces = Namespaces(redis)
        learner = (settings or small()).to_json()
        record = await namespaces.open_or_create(name, partitions=partitions, seed=0, learner=learner)
        if fixed:
            record = await namespaces.set_layout(record, layout().to_json())
        return cls(redis, record, compute, samples_kept=samples_kept)

    def user_store(self) -> UserStore:
        """A way to the users of its own, for tests that watch what passes it."""
        return UserStore(self.redis, self.keys, self.record.store_epoch, samples_kept=self.samples_kept)

    def new_model(self) -> NamespaceModel:
        """What another process would know of the namespace."""
        return NamespaceModel(self.namespaces, self.epochs, self.record, CPU)

    def publisher(self, consumer: str = "c1", *, users: UserStore | None = None, model: NamespaceModel | None = None):
        """A publisher of its own desk, as each process has one."""
        return Publisher(
            self.streams,
            users or self.users,
            model or self.model,
            FittingDesk(self.compute),
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
            publisher or self.publisher(name),
            self.stopping,
            on_applied=lambda partition, applied: None,
        )

    def meta(self, name: str = "m1", *, users: Any = None, model: NamespaceModel | None = None, pool: int = 100):
        return MetaTrainer(
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
        """Enqueue events and have them delivered to a consumer."""
        await self.streams.enqueue(events)
        return await self.streams.read(partition, consumer, count=1_000, block_ms=10)

    async def learn(self, plan: Mapping[str, int], *, first: int = 0) -> None:
        """So many events of each user, enqueued and applied."""
        numbers = count(first)
        await self.streams.enqueue(
            [make_event(user, next(numbers)) for user, events in plan.items() for _ in range(events)]
        )
        for partition in range(self.record.partitions):
            await self.publisher().publish(
                partition, await self.streams.read(partition, "c1", count=10_000, block_ms=1)
            )

    async def versions(self) -> dict[str, int]:
        """How many events of each user were applied."""
        found: dict[str, int] = {}
        for partition in range(self.record.partitions):
            found |= {user: version for user, (_, version) in (await self.users.versions(partition)).items()}
        return found

    async def epoch_number(self) -> int | None:
        """Of the newest epoch."""
        identity = await self.epochs.current_identity()
        return None if identity is None else identity[0]

    async def stamp(self) -> str:
        """What an epoch has to follow to be published now."""
        current = await self.epochs.current()
        return "" if current is None else current.stamp

    async def pending(self) -> int:
        """Deliveries that no one has finished."""
        return sum([await self.streams.pending(partition) for partition in range(self.record.partitions)])

    async def consumers(self, partition: int = 0) -> dict[str, int]:
        """Consumers the group knows, with what is pending for each."""
        rows = await self.redis.xinfo_consumers(self.keys.events(partition), LEARNERS)
        return {row["name"].decode(): row["pending"] for row in rows}

    async def dead_letters(self, partition: int = 0) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.redis.xrange(self.keys.dead_letters(partition))]

    def start_process(self, url: str, **environment: str) -> subprocess.Popen[bytes]:
        """`metaban worker`, which takes events over sooner than one that serves."""
        hurried = (
            "import sys, worker.consumer as consumer; consumer.STALLED_AFTER_MS = 300; consumer.CLAIM_EVERY_S = 0.05;"
            "from service.cli import main; sys.argv = ['metaban', 'worker']; sys.exit(main())"
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
