"""The namespaces of a deployment: one engine each, opened when the service starts or when it first hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, final

import structlog

from models.features import FeatureLayout
from models.settings import stored_settings
from service.contracts import CheckResult
from service.engine import Engine
from service.errors import NamespaceExists, NotFound, ServiceError, Unavailable
from service.live import overridden
from service.metrics import Metrics
from service.settings import Settings, SettingsError, learner_settings
from store.connection import connect
from store.errors import NamespaceConflict, StoreError
from store.namespaces import NamespaceRecord, Namespaces

TAKEN: Final = "A namespace of this name exists."
#: What is wrong with a namespace's settings takes somebody to see to it.
MISFIT_RETRY_AFTER_S: Final = 10.0

log = structlog.get_logger()


@final
class Recommenders:
    """Every namespace of the store, by name."""

    def __init__(self, settings: Settings, redis_url: str, metrics: Metrics) -> None:
        self._settings = settings
        self._redis_url = redis_url
        self._metrics = metrics
        self._redis = connect(redis_url, max_connections=8)
        self._namespaces = Namespaces(self._redis)
        self._opening = asyncio.Lock()
        self._engines: dict[str, Engine] = {}

    async def start(self) -> None:
        """Open the namespace of requests that name none, without which nothing is served, and all the others."""
        self._engines[self._settings.namespace] = await self._opened(self._settings.namespace)
        for name in await self._namespaces.names():
            try:
                await self.engine(name)
            # The others are served; this one is tried again when it is asked for.
            except StoreError as error:
                log.error("namespace not opened", namespace=name, reason=str(error))
            except ServiceError:
                pass  # deleted meanwhile, or told of already

    async def stop(self) -> None:
        """Let go of the store."""
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        await self._redis.aclose()

    @property
    def engines(self) -> Mapping[str, Engine]:
        """What is open now."""
        return self._engines

    @property
    def default(self) -> Engine:
        """The one for requests that name none."""
        return self._engines[self._settings.namespace]

    async def engine(self, name: str) -> Engine:
        """The engine of a namespace; NotFound when there is no such namespace."""
        engine = self._engines.get(name)
        if engine is not None and not self._is_over(engine):
            return engine
        async with self._opening:
            engine = self._engines.get(name)
            if engine is not None and self._is_over(engine):
                # Deleted, by this process or another, and perhaps created again since.
                await self._close(name)
            elif engine is not None:
                return engine
            record = await self._namespaces.load(name)
            if record is None or record.state == "deleted":
                raise NotFound("There is no namespace of this name: GET /admin/namespaces lists them.")
            try:
                self._engines[name] = await self._opened(name)
            except (SettingsError, NamespaceConflict) as error:
                log.error("namespace not opened", namespace=name, reason=str(error))
                raise Unavailable(
                    "The namespace cannot be served: its settings do not go with those of the deployment.",
                    retry_after_s=MISFIT_RETRY_AFTER_S,
                ) from error
            return self._engines[name]

    async def records(self) -> list[NamespaceRecord]:
        """The records of all namespaces, in the order of their names."""
        loaded = [await self._namespaces.load(name) for name in await self._namespaces.names()]
        return [record for record in loaded if record is not None and record.state == "ready"]

    async def create(self, name: str, overrides: Mapping[str, Any], layout: FeatureLayout | None) -> NamespaceRecord:
        """A new namespace, served from now on; SettingsError when it cannot have these settings."""
        settings = overridden(self._settings, name, overrides)
        learner = learner_settings(settings)
        async with self._opening:
            before = await self._namespaces.load(name)
            if before is not None and before.state != "deleted":
                raise NamespaceExists(TAKEN)
            try:
                record = await self._namespaces.open_or_create(
                    name,
                    partitions=settings.partitions,
                    seed=settings.seed,
                    learner=learner.to_json(),
                    layout=None if layout is None else layout.to_json(),
                    overrides=dict(overrides),
                )
            except NamespaceConflict as error:
                raise NamespaceExists(TAKEN) from error
            if record.overrides != dict(overrides):
                raise NamespaceExists(TAKEN)  # another process was faster, with other settings
            await self._close(name)
            self._engines[name] = await self._opened(name)
        log.info("namespace created", namespace=name, preset=stored_settings(record.learner).preset)
        return record

    async def delete(self, name: str) -> None:
        """Delete a namespace with everything in it; that of requests that name none begins anew, empty."""
        engine = await self.engine(name)
        async with self._opening:
            await self._close(name)
            await self._namespaces.delete(engine.live.record)
            if name == self._settings.namespace:
                self._engines[name] = await self._opened(name)
        log.info("namespace deleted", namespace=name)

    async def readiness(self) -> dict[str, CheckResult]:
        """The checks of the namespace of requests that name none, and what is wrong with others."""
        others = [name for name in self._engines if name != self._settings.namespace]
        own, *found = await asyncio.gather(
            self.default.readiness(), *(self._engines[name].readiness() for name in others)
        )
        checks = dict(own)
        for name, theirs in zip(others, found, strict=True):
            for part, check in theirs.items():
                # What the store lacks is told once. And who else is served here goes on to be.
                if not check.ok and part != "store":
                    checks[f"{part} of {name}"] = CheckResult(False, check.detail, vital=False)
        return checks

    async def refresh_gauges(self) -> None:
        """Bring the gauges that live in the store up to date."""
        await asyncio.gather(*(engine.refresh_gauges() for engine in self._engines.values() if not engine.lost))

    def _is_over(self, engine: Engine) -> bool:
        """Whether an engine serves what is not there any more.

        That of requests that name none is given up for one that was made in its place on purpose, and for no other: a
        store that lost everything needs a person.
        """
        return engine.lost and (engine.succeeded or engine.namespace != self._settings.namespace)

    async def _opened(self, name: str) -> Engine:
        settings = self._settings.model_copy(update={"namespace": name})
        engine = Engine.from_settings(settings, self._redis_url, self._metrics)
        try:
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _close(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            await engine.stop()
            self._metrics.forget(name)
