"""A namespace whose users have informative profiles, and FusionTrainers on it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import final

import numpy as np

from metaban.models.features import FeatureLayout
from metaban.models.settings import named_settings
from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.users.profiles import ProfileStore, encode_profile
from metaban.worker.jobs.fusion import FusionSchedule, FusionTrainer
from metaban.worker.jobs.fusion_sources import EVENTS_MIN, FusionSources
from metaban.worker.jobs.fusion_task import COMMAND, FusionTask, encode_answer, train_in_child
from metaban.worker.learning.model import NamespaceModel
from tests.worker.workshop import INPUTS, OpenWorkshop, Workshop, features, make_event, soon

#: Sources of a training.
FEW = 32
#: One round: a poor but real fit.
SCHEDULE = FusionSchedule(interval_s=3_600, growth=0.25, min_sources=FEW, rounds=1)
PROFILES = FeatureLayout(arm=2, context=0, arm_named=False, context_named=False, products=False, intercept=False)
#: Cached answer of a training of one round.
_answers: list[bytes] = []


def writing_command(text: str, status: int = 0, *, more: int = 0) -> Sequence[str]:
    """Command of a process that writes `text` and `more` further characters, and exits."""
    script = f"import sys; sys.stdout.write({text!r} + {more} * 'x'); sys.stdout.flush(); sys.exit({status})"
    return (sys.executable, "-c", script)


@final
class Gate:
    """A process in place of the training child; it waits for `open` and then writes the given answer."""

    def __init__(self, folder: Path, answer: bytes = b"") -> None:
        self._pid, self._open, told = folder / "pid", folder / "open", folder / "answer"
        told.write_bytes(answer)
        self.command = (
            sys.executable,
            "-c",
            "import os, pathlib, sys, time\n"
            "pid, gate, answer = map(pathlib.Path, sys.argv[1:])\n"
            "print('{\"progress\": 0.5}', flush=True)\n"
            "pid.with_suffix('.new').write_text(str(os.getpid())); pid.with_suffix('.new').rename(pid)\n"
            "while not gate.exists(): time.sleep(0.01)\n"
            "blob = answer.read_bytes()\n"
            "sys.stdout.buffer.write(b'{\"blob\": %d}\\n' % len(blob) + blob)\n",
            str(self._pid),
            str(self._open),
            str(told),
        )

    @property
    def reached(self) -> bool:
        return self._pid.exists()

    @property
    def pid(self) -> int:
        return int(self._pid.read_text())

    async def wait(self) -> None:
        """Wait until the process runs."""

        async def there() -> bool:
            return self.reached

        await soon(there, "a process that trains")

    def open(self) -> None:
        self._open.touch()

    def ended(self) -> bool:
        """Whether the process is gone, not even a zombie."""
        return not Path(f"/proc/{self.pid}").exists()


async def trained(shop: Workshop) -> bytes:
    """Answer of the real child process on this namespace; computed once, because it is slow."""
    if not _answers:
        learner = shop.model.trainer
        assert learner is not None
        sources, batches = await sources_of(shop).batches(learner, await sources_of(shop).find(PROFILES))
        task = FusionTask(
            learner=shop.record.learner,
            inputs=learner.learner.parts,
            seed=0,
            threads=1,
            rounds=1,
            shared={name: tensor.numpy() for name, tensor in shop.model.epoch.tensors.items()},
            batches=batches,
            profiles=np.stack([source.profile for source in sources]),
        )
        _answers.append(encode_answer(*await train_in_child(task, lambda share: None, limit_s=200)))
    return _answers[0]


def profile_of(number: int) -> np.ndarray:
    return features(10_000 + number, 2)


async def open_fusion_users(open_workshop: OpenWorkshop, *, users: int = FEW, name: str = "shop") -> Workshop:
    """Users with a profile and as many rewards as a source needs; rewards depend on profile and arm."""
    shop = await open_workshop(settings=named_settings("default"), samples_kept=20, partitions=2, name=name)
    shop.record = await shop.namespaces.set_profile_layout(shop.record, PROFILES.to_json())
    await populate(shop, range(users))
    await shop.model.refresh_record()
    await shop.epoch_trainer().tick()
    await shop.model.refresh_epoch()
    return shop


async def populate(shop: Workshop, users: Sequence[int], *, events: int = EVENTS_MIN) -> None:
    numbers = count(1_000 * (1 + max(users, default=0)))
    trainer = shop.model.trainer
    assert trainer is not None
    phi = np.zeros(trainer.learner.noted, dtype=np.float32)
    rewarded = []
    for user in users:
        await store_profile(shop, f"user {user}", profile_of(user).tolist())
        for number in (next(numbers) for _ in range(events)):
            liking = float(profile_of(user) @ features(number, INPUTS)[:2])
            rewarded.append(make_event(f"user {user}", number, reward=1 / (1 + np.exp(-liking)), phi=phi))
    await shop.streams.enqueue(rewarded)
    for partition in range(shop.record.partitions):
        deliveries = await shop.streams.read([partition], "c1", count=10_000, block_ms=1)
        if deliveries:
            await shop.publisher().publish(partition, deliveries)


async def store_profile(shop: Workshop, user: str, profile: object, *, incarnation: int = 0) -> None:
    """Store the profile of a user together with a decision."""
    decision = DecisionRecord(
        f"of {user} {incarnation}", user, "", (), np.empty((0, 1)), np.empty((0, 0)), "ucb", 0, 0, None, 0, incarnation
    )
    decisions = DecisionStore(shop.redis, shop.keys, ttl_s=60)
    await decisions.put(decision, profile=encode_profile(profile))  # type: ignore[arg-type]


def fusion_store(shop: Workshop) -> FusionStore:
    return FusionStore(shop.redis, shop.keys, shop.record.store_id)


def sources_of(shop: Workshop) -> FusionSources:
    return FusionSources(shop.users, ProfileStore(shop.redis, shop.keys), partitions=shop.record.partitions)


def trainer(
    shop: Workshop,
    name: str = "t1",
    *,
    schedule: FusionSchedule = SCHEDULE,
    command: Sequence[str] = COMMAND,
    limit_s: float = 120,
    fusion: FusionStore | None = None,
    sources: FusionSources | None = None,
    model: NamespaceModel | None = None,
    stopping: asyncio.Event | None = None,
) -> FusionTrainer:
    return FusionTrainer(
        shop.users,
        fusion or fusion_store(shop),
        sources or sources_of(shop),
        model or shop.model,
        stopping or shop.stopping,
        token=name,
        schedule=schedule,
        command=command,
        limit_s=limit_s,
    )
