"""A namespace whose users have profiles that say what they like, and trainers of fusion on it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import final

import numpy as np

from models.features import FeatureLayout
from models.settings import named_settings
from store.decisions import Decision, DecisionStore
from store.fusion import FusionStore
from store.profiles import ProfileStore, encode_profile
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import INPUTS, Workshop, features, make_event, soon
from worker.fusion import FusionPlan, FusionTrainer
from worker.fusion_child import COMMAND, train_in_child
from worker.fusion_sources import EVENTS_MIN, FusionSources
from worker.fusion_task import FusionTask, encode_answer
from worker.model import NamespaceModel

#: As few as a training takes.
FEW = 32
#: A fit of one round is a poor one, and a real one.
PLAN = FusionPlan(interval_s=3_600, growth=0.25, least_sources=FEW, rounds=1)
PROFILES = FeatureLayout(arm=2, context=0, arm_named=False, context_named=False, products=False, intercept=False)
#: What a training of one round answers, once there was one.
_answers: list[bytes] = []


def saying(text: str, status: int = 0, *, more: int = 0) -> Sequence[str]:
    """A process that answers with something of its own, and so many letters after it."""
    script = f"import sys; sys.stdout.write({text!r} + {more} * 'x'); sys.stdout.flush(); sys.exit({status})"
    return (sys.executable, "-c", script)


@final
class Gate:
    """A process in place of the one that trains, which answers as that did, and not before it is told to."""

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
        """Until the process is there."""

        async def there() -> bool:
            return self.reached

        await soon(there, "a process that trains")

    def open(self) -> None:
        self._open.touch()

    def ended(self) -> bool:
        """Whether the process is gone, and no zombie."""
        return not Path(f"/proc/{self.pid}").exists()


async def trained(shop: Workshop) -> bytes:
    """What the real process answers on this namespace; asked once, since it takes its time."""
    if not _answers:
        learner = shop.model.trainer
        assert learner is not None
        sources, batches = await sources_of(shop).batches(learner, await sources_of(shop).find(PROFILES))
        task = FusionTask(
            learner=shop.record.learner,
            inputs=learner.learner.inputs_expected,
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


async def open_fusing(open_workshop: OpenWorkshop, *, users: int = FEW, name: str = "shop") -> Workshop:
    """Users with a profile each, and as many rewards as a source needs, which follow from profile and arm."""
    shop = await open_workshop(settings=named_settings("default"), samples_kept=20, partitions=2, name=name)
    shop.record = await shop.namespaces.set_profile_layout(shop.record, PROFILES.to_json())
    await populate(shop, range(users))
    await shop.model.refresh_record()
    await shop.meta()._tick()
    await shop.model.refresh_epoch()
    return shop


async def populate(shop: Workshop, users: Sequence[int], *, events: int = EVENTS_MIN) -> None:
    numbers = count(1_000 * (1 + max(users, default=0)))
    trainer = shop.model.trainer
    assert trainer is not None
    phi = np.zeros(trainer.learner.noted, dtype=np.float32)
    rewarded = []
    for user in users:
        await tell(shop, f"user {user}", profile_of(user).tolist())
        for number in (next(numbers) for _ in range(events)):
            liking = float(profile_of(user) @ features(number, INPUTS)[:2])
            rewarded.append(make_event(f"user {user}", number, reward=1 / (1 + np.exp(-liking)), phi=phi))
    await shop.streams.enqueue(rewarded)
    for partition in range(shop.record.partitions):
        deliveries = await shop.streams.read(partition, "c1", count=10_000, block_ms=1)
        if deliveries:
            await shop.publisher().publish(partition, deliveries)


async def tell(shop: Workshop, user: str, profile: object, *, incarnation: int = 0) -> None:
    """What a request tells of its user, with a decision."""
    decision = Decision(
        f"of {user} {incarnation}", user, "", (), np.empty((0, 1)), np.empty((0, 0)), "ucb", 0, 0, None, 0, incarnation
    )
    decisions = DecisionStore(shop.redis, shop.keys, ttl_s=60)
    await decisions.put(decision, profile=encode_profile(profile))  # type: ignore[arg-type]


def fusion_store(shop: Workshop) -> FusionStore:
    return FusionStore(shop.redis, shop.keys, shop.record.store_epoch)


def sources_of(shop: Workshop) -> FusionSources:
    return FusionSources(shop.users, ProfileStore(shop.redis, shop.keys), partitions=shop.record.partitions)


def trainer(
    shop: Workshop,
    name: str = "t1",
    *,
    plan: FusionPlan = PLAN,
    command: Sequence[str] = COMMAND,
    limit_s: float = 120,
    model: NamespaceModel | None = None,
    stopping: asyncio.Event | None = None,
) -> FusionTrainer:
    return FusionTrainer(
        shop.users,
        fusion_store(shop),
        sources_of(shop),
        model or shop.model,
        stopping or shop.stopping,
        token=name,
        plan=plan,
        command=command,
        limit_s=limit_s,
    )
