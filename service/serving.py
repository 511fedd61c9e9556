"""What serves a namespace from the moment its feature layout is known: by its record, or by the first request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

import structlog

from models.device import choose_device
from models.features import FeatureLayout, assemble, infer_layout
from models.presets import build_learner
from models.settings import stored_settings
from service.contracts import RecommendCommand
from service.metrics import NamespaceMetrics
from service.replica import Replica
from service.scorer import Scorer
from service.served import ServedModel
from service.settings import Settings
from store.epochs import EpochStore
from store.namespaces import NamespaceRecord, Namespaces
from store.users import UserStore

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the feature layout is known."""

    layout: FeatureLayout
    replica: Replica
    scorer: Scorer


@final
class ServingRoom:
    """Empty until the feature layout of the namespace is known."""

    def __init__(
        self,
        settings: Settings,
        namespaces: Namespaces,
        record: NamespaceRecord,
        users: UserStore,
        epochs: EpochStore,
        compute: Executor,
        metrics: NamespaceMetrics,
    ) -> None:
        self._settings = settings
        self._namespaces = namespaces
        self._record = record
        self._users = users
        self._epochs = epochs
        self._compute = compute
        self._metrics = metrics
        self._opening = asyncio.Lock()
        self.serving: Serving | None = None

    async def start(self) -> None:
        """Serve what the namespace has learned, if its layout is known."""
        if self._record.layout is not None:
            self.serving = await self._open(FeatureLayout.from_json(self._record.layout))

    async def stop(self) -> None:
        """Let go of the store."""
        if self.serving is not None:
            await self.serving.replica.stop()

    async def fix_layout(self, command: RecommendCommand) -> Serving:
        """Fix the feature layout by the first request; of several first requests one wins."""
        async with self._opening:
            if self.serving is None:
                settings = self._settings
                layout = infer_layout(
                    [arm.features for arm in command.arms],
                    command.context,
                    products=settings.context_products,
                    intercept=settings.intercept,
                    hash_dimension=settings.hash_dimension,
                    max_dimension=settings.max_dimension,
                )
                # Nothing is fixed by a request that does not fit even its own layout.
                assemble(layout, [arm.features for arm in command.arms], command.context)
                current = await self._namespaces.load(self._record.name) or self._record
                if current.layout is None:
                    current = await self._namespaces.set_layout(current, layout.to_json())
                self._record = current
                self.serving = await self._open(FeatureLayout.from_json(current.layout or layout.to_json()))
                log.info("feature layout fixed", **(current.layout or {}))
            return self.serving

    async def _open(self, layout: FeatureLayout) -> Serving:
        settings = self._settings
        learner = build_learner(stored_settings(self._record.learner), layout.dimension)
        model = ServedModel(
            learner,
            choose_device(settings.device),
            pool_max=settings.candidate_pool,
            guests_max=settings.active_users_max,
        )
        replica = Replica(
            self._users, self._epochs, model, self._compute, self._metrics, partitions=self._record.partitions
        )
        await replica.start()
        return Serving(layout, replica, Scorer(model, self._compute, self._metrics))
