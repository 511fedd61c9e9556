"""A namespace in which some users agree, and transfer jobs on it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor

from metaban.models.features import FeatureLayout
from metaban.models.learner import State, UserBatch
from metaban.models.transfer.nets import NetLosses
from metaban.models.transfer.task_modeling import TaskModelResult, TransferSettings, model_transfer
from metaban.store.namespaces import NamespaceStore
from metaban.store.shared.transfer import TransferJobRecord, TransferQuestion, TransferStore
from metaban.worker.jobs import transfer as transfer_module
from metaban.worker.jobs.transfer import TransferWorker
from metaban.worker.jobs.transfer_tasks import TransferTasks
from metaban.worker.learning.model import NamespaceModel
from metaban.worker.learning.trainer import FitInput, seed_of
from tests.worker.workshop import SOON_S, OpenWorkshop, Workshop, make_event, notes

INPUTS = 8
#: Rewards of each user; all are kept.
EVENTS = 300
LAYOUT = FeatureLayout(arm=INPUTS, context=0, arm_named=False, context_named=False, products=False, intercept=False)
#: Target and friends like the same arms; rewards of foes are random.
TARGET = "target"
FRIENDS = ("friend 0", "friend 1", "friend 2")
FOES = ("foe 0", "foe 1", "foe 2")
EVERYONE = (TARGET, *FRIENDS, *FOES)
TASTE = np.random.default_rng(0).normal(size=INPUTS)
ASKED = TransferQuestion("cross-entropy", user_id=TARGET, sources=(*FRIENDS, *FOES))


async def open_transfer_users(
    open_workshop: OpenWorkshop, users: Iterable[str] = EVERYONE, *, events: int = EVENTS
) -> Workshop:
    """Users rate random arms; all but the foes like arms far from the plane orthogonal to TASTE."""
    shop = await open_workshop(samples_kept=EVENTS, fixed=False)
    shop.record = await NamespaceStore(shop.redis).set_layout(shop.record, LAYOUT.to_json())
    await shop.model.refresh_record()
    await apply_rewards(shop, users, events=events)
    return shop


async def apply_rewards(shop: Workshop, users: Iterable[str], *, events: int = EVENTS) -> None:
    """Apply `events` rewards of each user."""
    trainer = shop.model.trainer
    assert trainer is not None
    noted = trainer.learner.noted
    for user in users:
        generator = np.random.default_rng(list(user.encode()))
        arms = generator.normal(size=(events, INPUTS)).astype(np.float32)
        liked = np.abs(arms @ TASTE / np.linalg.norm(TASTE)) > 0.67
        rewards = generator.integers(0, 2, size=events) if user in FOES else liked.astype(int)
        await shop.streams.enqueue(
            [
                make_event(user, number, features=arms[number], reward=float(rewards[number]), phi=notes(number, noted))
                for number in range(events)
            ]
        )
    for partition in range(shop.record.partitions):
        deliveries = await shop.streams.read([partition], "c1", count=100_000, block_ms=1)
        await shop.publisher().publish(partition, deliveries)


def transfer_store(shop: Workshop) -> TransferStore:
    return TransferStore(shop.redis, shop.keys, shop.record.store_id)


def transfer_worker(
    shop: Workshop,
    compute: Executor,
    name: str = "t1",
    *,
    model: NamespaceModel | None = None,
    stopping: asyncio.Event | None = None,
) -> TransferWorker:
    return TransferWorker(
        shop.users,
        transfer_store(shop),
        TransferTasks(shop.users, compute, partitions=shop.record.partitions),
        model or shop.model,
        compute,
        stopping or shop.stopping,
        token=name,
    )


async def request_job(shop: Workshop, question: TransferQuestion = ASKED) -> TransferJobRecord:
    """Request a job as the service does."""
    job = (await transfer_store(shop).request(question, dict.fromkeys(question.named, 0), now_ms())).job
    assert job is not None
    return job


async def job_status(shop: Workshop, job: TransferJobRecord) -> tuple[TransferJobRecord, dict[str, Any]]:
    """Status and result of a job."""
    found = await transfer_store(shop).job(job.id, now_ms())
    assert found is not None
    return found[0], found[1] or {}


def now_ms() -> int:
    return int(time.time() * 1_000)


def set_clusters(model: NamespaceModel, clusters: dict[str, int]) -> None:
    """Make the learner assign these clusters to users."""
    assert model.trainer is not None
    by_draw = {seed_of(FitInput(user, 0, (), None)): cluster for user, cluster in clusters.items()}

    def told(shared: State, batch: UserBatch) -> Tensor:
        return torch.tensor([by_draw[draw] for draw in batch.draw.tolist()])

    model.trainer.learner.cluster_of = told  # type: ignore[method-assign]


@final
class Gate:
    """In place of `model_transfer`: waits half-way for `open`, and ends when it is cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.ended = threading.Event()
        self._open = threading.Event()
        monkeypatch.setattr(transfer_module, "model_transfer", self._model)

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        """Wait until a job reaches it."""
        assert await asyncio.to_thread(self.reached.wait, SOON_S)

    async def wait_for_end(self) -> None:
        assert await asyncio.to_thread(self.ended.wait, SOON_S)

    def _model(self, losses: NetLosses, settings: TransferSettings, *, seed: int, progress: Any) -> TaskModelResult:
        assert losses.progress is not None
        progress(0.5)
        self.reached.set()
        try:
            while not self._open.wait(0.01):
                losses.progress(0.5)
            return model_transfer(losses, settings, seed=seed, progress=progress)
        finally:
            self.ended.set()
