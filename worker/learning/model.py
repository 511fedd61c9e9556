"""A namespace's trainer and current epoch in this process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import final

import torch

from metaban.models.features import FeatureLayout
from metaban.models.learner import State
from metaban.models.presets import build_learner
from metaban.models.settings import stored_settings
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.reward_rules import RewardRules
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.worker.learning.trainer import Trainer


@final
@dataclass(frozen=True, slots=True)
class SharedEpoch:
    """An epoch with its shared state on the device."""

    number: int
    events: int
    members: tuple[str, ...]
    tensors: State
    refitted: int = 0
    stamp: str = ""


@final
class NamespaceModel:
    """A namespace's record, the trainer built from it, and the current epoch.

    The constructor builds the learner, which may take long: call it on a thread.
    """

    def __init__(self, namespaces: NamespaceStore, epochs: EpochStore, record: NamespaceRecord, device: torch.device):
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
        """The namespace's record."""
        return self._record

    @property
    def trainer(self) -> Trainer | None:
        """None until the first request has fixed the feature layout."""
        return self._trainer

    @property
    def rules(self) -> RewardRules:
        """The namespace's reward rules."""
        return self._rules

    @property
    def epoch_published(self) -> bool:
        """Whether the epoch was read from the store; otherwise it is the learner's initial state."""
        return self._adopted is not None

    @property
    def breaks(self) -> int:
        """How many times an epoch was adopted that may not follow the one before it.

        A store that was set back to an earlier state causes this.
        """
        return self._breaks

    @property
    def epoch(self) -> SharedEpoch:
        """The epoch to fit under; number 0 before any is published."""
        if self._epoch is None:
            raise RuntimeError("the namespace has no feature layout yet, hence no epoch")
        return self._epoch

    async def refresh_record(self) -> None:
        """Adopt a changed record together with the current epoch; fits go on with the old ones meanwhile."""
        record = await self._namespaces.reload(self._record)
        if record.revision == self._record.revision:
            return
        async with self._refreshing:
            record, published = await self._namespaces.reload(self._record), await self._epochs.current()
            self._adopt(record, published, await asyncio.to_thread(self._built, record, published))

    async def refresh_epoch(self) -> None:
        """Adopt the newest published epoch; the learner's initial state when the store has none."""
        if self._trainer is None or await self._epochs.current_identity() == self._adopted:
            return
        async with self._refreshing:  # an older answer must not replace a newer one
            published = await self._epochs.current()
            if _identity(published) != self._adopted:
                self._adopt_epoch(published, await asyncio.to_thread(self._shared, self._trainer, published))

    def on_device(self, epoch: Epoch) -> SharedEpoch:
        """A published epoch with its tensors on the device."""
        tensors = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in epoch.tensors.items()}
        return SharedEpoch(epoch.number, epoch.events, epoch.members, tensors, epoch.refitted, epoch.stamp)

    def _built(self, record: NamespaceRecord, published: Epoch | None) -> tuple[Trainer, SharedEpoch] | None:
        """Trainer and epoch of a record; None while the record has no layout. Changes nothing."""
        if record.layout is None:
            return None
        settings = stored_settings(record.learner)
        layout = FeatureLayout.from_json(record.layout)
        learner = build_learner(settings, layout.parts)
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
