"""The learner of a namespace as this process knows it: settings, layout and the epoch it is at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import final

import torch

from models.features import FeatureLayout
from models.learner import State
from models.presets import build_learner
from models.settings import stored_settings
from store.epochs import Epoch, EpochStore
from store.namespaces import NamespaceRecord, Namespaces
from store.reward_rules import RewardRules
from worker.trainer import Trainer


@final
@dataclass(frozen=True, slots=True)
class SharedEpoch:
    """Shared state on the device, with what its epoch says of itself."""

    number: int
    events: int
    members: tuple[str, ...]
    tensors: State
    refitted: int = 0
    stamp: str = ""


@final
class NamespaceModel:
    """A trainer for the namespace's record, rebuilt when the record changes, and its current epoch.

    To make one takes as long as the first tensors of its learner do: let a thread wait for it.
    """

    def __init__(self, namespaces: Namespaces, epochs: EpochStore, record: NamespaceRecord, device: torch.device):
        self._namespaces = namespaces
        self._epochs = epochs
        self._device = device
        self._record = record
        self._rules = record.reward_rules
        self._trainer: Trainer | None = None
        self._epoch: SharedEpoch | None = None
        self._adopted: tuple[int, str] | None = None
        self._breaks = 0
        self._refreshing = asyncio.Lock()
        self._adopt(record, None, self._built(record, None))

    @property
    def record(self) -> NamespaceRecord:
        """What is agreed for the namespace."""
        return self._record

    @property
    def trainer(self) -> Trainer | None:
        """None until the first request has fixed the feature layout."""
        return self._trainer

    @property
    def rules(self) -> RewardRules:
        """What rewards mean in the namespace."""
        return self._rules

    @property
    def epoch_published(self) -> bool:
        """Whether the epoch comes from the store, not from the settings."""
        return self._adopted is not None

    @property
    def breaks(self) -> int:
        """How often an epoch was adopted that is not known to follow the one before: the store may have lost that."""
        return self._breaks

    @property
    def epoch(self) -> SharedEpoch:
        """The epoch to fit under; number 0 before any is published."""
        if self._epoch is None:
            raise RuntimeError("an epoch is only known once the layout is")
        return self._epoch

    async def refresh_record(self) -> None:
        """Take over a changed record, together with the epoch that holds: fits go on while it is read."""
        record = await self._namespaces.reload(self._record)
        if record.revision == self._record.revision:
            return
        async with self._refreshing:
            record, published = await self._namespaces.reload(self._record), await self._epochs.current()
            self._adopt(record, published, await asyncio.to_thread(self._built, record, published))

    async def refresh_epoch(self) -> None:
        """Take over the newest published epoch; the one of the settings when the store has lost all."""
        if self._trainer is None or await self._epochs.current_identity() == self._adopted:
            return
        async with self._refreshing:  # two answers may arrive in either order
            published = await self._epochs.current()
            if _identity(published) != self._adopted:
                self._adopt_epoch(published, await asyncio.to_thread(self._shared, self._trainer, published))

    def on_device(self, epoch: Epoch) -> SharedEpoch:
        """A published epoch as tensors."""
        tensors = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in epoch.tensors.items()}
        return SharedEpoch(epoch.number, epoch.events, epoch.members, tensors, epoch.refitted, epoch.stamp)

    def _built(self, record: NamespaceRecord, published: Epoch | None) -> tuple[Trainer, SharedEpoch] | None:
        """What a record and an epoch come to, while those before still hold; None without a layout."""
        if record.layout is None:
            return None
        settings = stored_settings(record.learner)
        learner = build_learner(settings, FeatureLayout.from_json(record.layout).dimension)
        trainer = Trainer(learner, self._device, user_weight=settings.user_weight, rules=record.reward_rules)
        return trainer, self._shared(trainer, published)

    def _shared(self, trainer: Trainer, published: Epoch | None) -> SharedEpoch:
        if published is not None:
            return self.on_device(published)
        initial = {name: tensor.to(self._device) for name, tensor in trainer.learner.initial_shared().items()}
        return SharedEpoch(0, 0, (), initial)

    def _adopt(
        self, record: NamespaceRecord, published: Epoch | None, built: tuple[Trainer, SharedEpoch] | None
    ) -> None:
        self._record = record
        self._rules = record.reward_rules
        if built is None:
            self._trainer = None
            return
        self._trainer, epoch = built
        self._adopt_epoch(published, epoch)

    def _adopt_epoch(self, published: Epoch | None, epoch: SharedEpoch) -> None:
        before, found = self._adopted, _identity(published)
        self._epoch = epoch
        self._adopted = found
        followed = published is not None and before == (published.number - 1, published.follows)
        if before not in (None, found) and not followed:
            self._breaks += 1


def _identity(epoch: Epoch | None) -> tuple[int, str] | None:
    return None if epoch is None else (epoch.number, epoch.stamp)
