"""What serves a namespace from the moment its feature layout is known: by its record, or by the first request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import structlog

from models.device import choose_device
from models.features import FeatureError, FeatureLayout, Features, assemble, infer_layout
from models.learner import Learner
from models.presets import build_learner
from models.settings import stored_settings
from service.explaining import Explainer
from service.live import LiveSettings
from service.metrics import NamespaceMetrics
from service.replica import Replica
from service.scorer import Scorer
from service.served import ServedModel
from service.settings import SettingsError
from service.warm_starts import ServedFusion
from store.epochs import EpochStore
from store.fusion import FusionStore
from store.namespaces import NamespaceRecord, Namespaces
from store.users import UserStore

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the feature layout is known."""

    layout: FeatureLayout
    model: ServedModel
    replica: Replica
    scorer: Scorer
    explainer: Explainer
    fusion: ServedFusion


@final
class ServingRoom:
    """Empty until the feature layout of the namespace is known."""

    def __init__(
        self,
        live: LiveSettings,
        namespaces: Namespaces,
        users: UserStore,
        epochs: EpochStore,
        fusion: FusionStore,
        compute: Executor,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._namespaces = namespaces
        self._users = users
        self._epochs = epochs
        self._fusion = fusion
        self._compute = compute
        self._metrics = metrics
        self._opening = asyncio.Lock()
        self._made_by = live.record
        self.serving: Serving | None = None

    async def start(self) -> None:
        """Serve what the namespace has learned, if its layout is known."""
        record = self._live.record
        if record.layout is not None:
            self.serving = await self._open(record, FeatureLayout.from_json(record.layout))
        self._made_by = record

    async def stop(self) -> None:
        """Let go of the store."""
        if self.serving is not None:
            await self.serving.replica.stop()

    def take(self, record: NamespaceRecord) -> None:
        """Go by the settings of a record, if it is a newer one, at once: a learner that hangs holds up no switch."""
        if record.revision > self._live.record.revision:
            self._live.adopt(record)

    @property
    def behind(self) -> bool:
        """Whether what serves was made with another layout, or other settings of the learner, than there are now."""
        now, made = self._live.record, self._made_by
        return (now.layout, now.learner) != (made.layout, made.learner)

    async def follow(self) -> None:
        """Serve by the newest settings of the learner or, before any event, by another layout."""
        async with self._opening:
            record, before = self._live.record, self._made_by
            if record.layout != before.layout:
                await self.stop()
                self.serving = None
                await self.start()
            elif self.serving is not None and record.learner != before.learner:
                learner = build_learner(stored_settings(record.learner), self.serving.layout.dimension)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._compute, self.serving.model.adopt_learner, learner)
            self._made_by = record

    async def opened(self) -> Serving | None:
        """What serves, also when the layout was fixed a moment ago by another process."""
        if self.serving is None:
            with suppress(SettingsError):  # the next probe tells of it
                self.take(await self._namespaces.reload(self._live.record))
            await self.follow()
        return self.serving

    async def known_layout(self) -> FeatureLayout | None:
        """The feature layout, also when it was fixed by another process."""
        if self.serving is not None:
            return self.serving.layout
        current = await self._namespaces.reload(self._live.record)
        return None if current.layout is None else FeatureLayout.from_json(current.layout)

    async def fix_layout(self, features: Sequence[Features], context: Features | None) -> Serving:
        """Fix the feature layout by the first request; of several first requests one wins."""
        async with self._opening:
            if self.serving is None:
                settings = self._live.settings
                layout = infer_layout(
                    features,
                    context,
                    products=settings.context_products,
                    intercept=settings.intercept,
                    hash_dimension=settings.hash_dimension,
                    max_dimension=settings.max_dimension,
                )
                # Nothing is fixed by a request that does not fit even its own layout.
                assemble(layout, features, context)
                current = await self._namespaces.reload(self._live.record)
                if current.layout is None:
                    _check_size(current, layout)
                    current = await self._namespaces.set_layout(current, layout.to_json())
                self.take(current)
                self.serving = await self._open(current, FeatureLayout.from_json(current.layout or layout.to_json()))
                self._made_by = current
                log.info("feature layout fixed", **(current.layout or {}))
            return self.serving

    async def _open(self, record: NamespaceRecord, layout: FeatureLayout) -> Serving:
        learner = build_learner(stored_settings(record.learner), layout.dimension)
        # Not here: the first tensors of a large learner take a while, and others are served meanwhile.
        model = await asyncio.get_running_loop().run_in_executor(self._compute, self._model, learner)
        fusion = ServedFusion(self._fusion, learner, self._compute, self._metrics)
        replica = Replica(
            self._users,
            self._epochs,
            fusion,
            model,
            self._compute,
            self._metrics,
            partitions=record.partitions,
        )
        await replica.start()
        explainer = Explainer(model, layout, self._compute)
        return Serving(layout, model, replica, Scorer(model, self._compute, self._metrics), explainer, fusion)

    def _model(self, learner: Learner) -> ServedModel:
        settings = self._live.settings
        return ServedModel(
            learner,
            choose_device(settings.device),
            pool_max=settings.candidate_pool,
            guests_max=settings.active_users_max,
        )


def _check_size(record: NamespaceRecord, layout: FeatureLayout) -> None:
    """Have nothing fixed by a request of more inputs than the learner of the namespace can have."""
    try:
        build_learner(stored_settings(record.learner), layout.dimension)
    except ValueError as error:
        raise FeatureError(("arms", 0, "features"), str(error)) from None
