"""Builds and holds the parts that serve a namespace, and the thread they compute on.

The parts need the feature layout, which comes from the namespace's record or is fixed by the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, final

import structlog

from metaban.models.features import FeatureError, FeatureLayout, Features, assemble, infer_layout
from metaban.models.learner import Learner
from metaban.models.numerics.hardware import choose_device
from metaban.models.presets import build_learner
from metaban.models.settings import stored_settings
from metaban.service.engine.model.batcher import Batcher
from metaban.service.engine.model.explain import Explainer
from metaban.service.engine.model.replica import Replica
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.warm_starts import ServedFusion
from metaban.service.errors import Unavailable
from metaban.service.settings.environment import SettingsError
from metaban.service.settings.namespace import LiveSettings
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.users.logs import NamespaceLogs
from metaban.store.users.users import UserStore

Parameters = ParamSpec("Parameters")

Result = TypeVar("Result")

log = structlog.get_logger()


@final
class TensorThread(ThreadPoolExecutor):
    """The only thread that uses the tensors of a namespace. After shutdown, submit() raises Unavailable (503)."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="tensors")

    def submit(
        self, work: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Run a function on the thread; Unavailable after shutdown."""
        try:
            return super().submit(work, *args, **kwargs)
        except RuntimeError as error:
            raise Unavailable("The namespace was closed during the request; try again.") from error


@final
@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that need the feature layout."""

    layout: FeatureLayout
    model: ServedModel
    replica: Replica
    batcher: Batcher
    explainer: Explainer
    fusion: ServedFusion


@final
class ModelHost:
    """Holds the serving parts; `serving` is None until the feature layout is known."""

    def __init__(
        self,
        live: LiveSettings,
        namespaces: NamespaceStore,
        users: UserStore,
        epochs: EpochStore,
        fusion: FusionStore,
        logs: NamespaceLogs,
        compute: Executor,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._namespaces = namespaces
        self._users = users
        self._epochs = epochs
        self._fusion = fusion
        self._logs = logs
        self._compute = compute
        self._metrics = metrics
        self._opening = asyncio.Lock()
        self._built_from = live.record
        self.serving: Serving | None = None

    async def start(self) -> None:
        """Start serving if the layout is known."""
        record = self._live.record
        if record.layout is not None:
            self.serving = await self._open(record, FeatureLayout.from_json(record.layout))
        self._built_from = record

    async def stop(self) -> None:
        """Stop following the store."""
        if self.serving is not None:
            await self.serving.replica.stop()

    def adopt(self, record: NamespaceRecord) -> None:
        """Use the settings of a newer record at once, without waiting for the learner."""
        if record.revision > self._live.record.revision:
            self._live.adopt(record)

    @property
    def outdated(self) -> bool:
        """Whether the serving parts were built with another layout or other learner settings than the current ones."""
        now, built = self._live.record, self._built_from
        return (now.layout, now.learner) != (built.layout, built.learner)

    async def update(self) -> None:
        """Use the newest settings of the learner or, before any event, another layout."""
        async with self._opening:
            record, before = self._live.record, self._built_from
            if record.layout != before.layout:
                await self.stop()
                self.serving = None
                await self.start()
            elif self.serving is not None and record.learner != before.learner:
                learner = build_learner(stored_settings(record.learner), self.serving.layout.parts)
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._compute, self.serving.model.adopt_learner, learner)
                self.serving.model.pool_max = self._live.learner.candidate_pool
            self._built_from = record

    async def open_serving(self) -> Serving | None:
        """The serving parts, also when another process has just fixed the layout."""
        if self.serving is None:
            with suppress(SettingsError):  # the next probe logs it
                self.adopt(await self._namespaces.reload(self._live.record))
            await self.update()
        return self.serving

    async def known_layout(self) -> FeatureLayout | None:
        """The feature layout, also when another process has fixed it."""
        if self.serving is not None:
            return self.serving.layout
        current = await self._namespaces.reload(self._live.record)
        return None if current.layout is None else FeatureLayout.from_json(current.layout)

    async def fix_layout(self, features: Sequence[Features], context: Features | None) -> Serving:
        """Fix the feature layout by the first request; one of several concurrent first requests wins."""
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
                # A request that does not fit its own layout must not fix it.
                assemble(layout, features, context)
                current = await self._namespaces.reload(self._live.record)
                if current.layout is None:
                    _check_size(current, layout)
                    current = await self._namespaces.set_layout(current, layout.to_json())
                self.adopt(current)
                self.serving = await self._open(current, FeatureLayout.from_json(current.layout or layout.to_json()))
                self._built_from = current
                log.info("feature_layout_fixed", namespace=current.name, **(current.layout or {}))
            return self.serving

    async def _open(self, record: NamespaceRecord, layout: FeatureLayout) -> Serving:
        learner = build_learner(stored_settings(record.learner), layout.parts)
        # Off the event loop: building a large learner takes a while.
        model = await asyncio.get_running_loop().run_in_executor(self._compute, self._model, learner)
        fusion = ServedFusion(self._fusion, learner, self._compute, self._metrics)
        replica = Replica(
            self._users,
            self._epochs,
            fusion,
            model,
            self._compute,
            self._metrics,
            self._logs,
            partitions=record.partitions,
        )
        await replica.start()
        explainer = Explainer(model, layout, self._compute)
        return Serving(layout, model, replica, Batcher(model, self._compute, self._metrics), explainer, fusion)

    def _model(self, learner: Learner) -> ServedModel:
        settings = self._live.settings
        return ServedModel(
            learner,
            choose_device(settings.device),
            pool_max=self._live.learner.candidate_pool,
            guests_max=settings.active_users_max,
        )


def _check_size(record: NamespaceRecord, layout: FeatureLayout) -> None:
    """FeatureError when the learner cannot have as many inputs as the layout."""
    try:
        build_learner(stored_settings(record.learner), layout.parts)
    except ValueError as error:
        raise FeatureError(("arms", 0, "features"), str(error)) from None
