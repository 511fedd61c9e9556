"""A namespace of users some of whom agree, and workers that are asked who helps whom."""

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

from models.features import FeatureLayout
from models.learner import State, UserBatch
from models.transfer import TransferResult, TransferSettings, model_transfer
from models.transfer_nets import NetLosses
from store.namespaces import Namespaces
from store.transfer import TransferJob, TransferQuestion, TransferStore
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import SOON_S, Workshop, make_event, small
from worker.model import NamespaceModel
from worker.trainer import Pupil, _draw
from worker.transfer import TransferWorker
from worker.transfer_tasks import TransferTasks

INPUTS = 8
#: Rewards of each user, of which all are kept.
EVENTS = 300
LAYOUT = FeatureLayout(arm=INPUTS, context=0, arm_named=False, context_named=False, products=False, intercept=False)
#: What the target likes, as friends do; the rewards of foes are decided by a coin.
TARGET = "target"
FRIENDS = ("friend 0", "friend 1", "friend 2")
FOES = ("foe 0", "foe 1", "foe 2")
EVERYONE = (TARGET, *FRIENDS, *FOES)
TASTE = np.random.default_rng(0).normal(size=INPUTS)
ASKED = TransferQuestion("cross-entropy", user_id=TARGET, sources=(*FRIENDS, *FOES))


async def open_transferring(
    open_workshop: OpenWorkshop, users: Iterable[str] = EVERYONE, *, events: int = EVENTS
) -> Workshop:
    """Everyone has met arms of their own; who is no foe rewards those that are far from the middle of the taste."""
    shop = await open_workshop(settings=small(), samples_kept=EVENTS, fixed=False)
    shop.record = await Namespaces(shop.redis).set_layout(shop.record, LAYOUT.to_json())
    await shop.model.refresh_record()
    await live(shop, users, events=events)
    return shop


async def live(shop: Workshop, users: Iterable[str], *, events: int = EVENTS) -> None:
    """So many rewards of each user, learned."""
    for user in users:
        generator = np.random.default_rng(list(user.encode()))
        arms = generator.normal(size=(events, INPUTS)).astype(np.float32)
        liked = np.abs(arms @ TASTE / np.linalg.norm(TASTE)) > 0.67
        rewards = generator.integers(0, 2, size=events) if user in FOES else liked.astype(int)
        await shop.streams.enqueue(
            [make_event(user, number, features=arms[number], reward=float(rewards[number])) for number in range(events)]
        )
    for partition in range(shop.record.partitions):
        deliveries = await shop.streams.read(partition, "c1", count=100_000, block_ms=1)
        await shop.publisher().publish(partition, deliveries)


def transfer_store(shop: Workshop) -> TransferStore:
    return TransferStore(shop.redis, shop.keys, shop.record.store_epoch)


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


async def ask(shop: Workshop, question: TransferQuestion = ASKED) -> TransferJob:
    """A job as the service asks for it."""
    job = (await transfer_store(shop).request(question, dict.fromkeys(question.named, 0), now_ms())).job
    assert job is not None
    return job


async def look(shop: Workshop, job: TransferJob) -> tuple[TransferJob, dict[str, Any]]:
    """How a job is now, and what came of it."""
    found = await transfer_store(shop).job(job.id, now_ms())
    assert found is not None
    return found[0], found[1] or {}


def now_ms() -> int:
    return int(time.time() * 1_000)


def tell_kinds(model: NamespaceModel, kinds: dict[str, int]) -> None:
    """Have the learner tell these kinds of users, as one does by an epoch."""
    assert model.trainer is not None
    by_draw = {_draw(Pupil(user, 0, (), None)): kind for user, kind in kinds.items()}

    def told(shared: State, batch: UserBatch) -> Tensor:
        return torch.tensor([by_draw[draw] for draw in batch.draw.tolist()])

    model.trainer.learner.kinds = told  # type: ignore[method-assign]


@final
class Gate:
    """In place of `model_transfer`: is half-way, and goes on once it is opened; ends when it is cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.ended = threading.Event()
        self._open = threading.Event()
        monkeypatch.setattr("worker.transfer.model_transfer", self._model)

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        """Until somebody is at work."""
        assert await asyncio.to_thread(self.reached.wait, SOON_S)

    async def wait_for_end(self) -> None:
        assert await asyncio.to_thread(self.ended.wait, SOON_S)

    def _model(self, losses: NetLosses, settings: TransferSettings, *, seed: int, progress: Any) -> TransferResult:
        assert losses.progress is not None
        progress(0.5)
        self.reached.set()
        try:
            while not self._open.wait(0.01):
                losses.progress(0.5)
            return model_transfer(losses, settings, seed=seed, progress=progress)
        finally:
            self.ended.set()
