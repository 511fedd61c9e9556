"""The namespaces of a deployment: one engine each, opened at start or at the first request for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import Context
from dataclasses import replace
from typing import Any, Final, final

import structlog

from metaban.models.features import FeatureLayout
from metaban.models.settings import stored_settings
from metaban.service.engine.commands import CheckResult
from metaban.service.engine.engine import Connections, Engine
from metaban.service.engine.reward_watch import LearningWarning
from metaban.service.errors import NamespaceExists, NotFound, Unavailable
from metaban.service.settings.environment import Settings, SettingsError, learner_settings, reward_rules
from metaban.service.settings.namespace import check_size, overridden
from metaban.service.telemetry.metrics import Metrics
from metaban.store.errors import CorruptRecord, NamespaceConflict, StoreUnavailable
from metaban.store.namespaces import NamespaceRecord, NamespaceStore

#: Pause between two checks for namespaces that another process deleted.
SWEEP_S: Final = 1.0

#: A namespace that could not be opened is not tried again for this long.
RETRY_S: Final = 1.0

log = structlog.get_logger()


@final
class EngineRegistry:
    """The engines of all namespaces, by name."""

    def __init__(self, settings: Settings, redis_url: str, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._connections = Connections(redis_url)
        self._namespaces = NamespaceStore(self._connections.requests)
        self._opening = asyncio.Lock()
        self._engines: dict[str, Engine] = {}
        #: Namespaces that could not be opened: when to try again, and the error until then.
        self._failed: dict[str, tuple[float, str]] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the default namespace, which must succeed, and all others."""
        self._engines[self._settings.namespace] = await self._start_engine(self._settings)
        for name in await self._namespaces.names():
            try:
                await self.engine(name)
            except (Unavailable, NotFound, StoreUnavailable):
                continue  # tried again at the next request for it
        self._sweeping = asyncio.create_task(self._sweep(), context=Context())

    async def stop(self) -> None:
        """Stop all engines and close the connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        await self._connections.aclose()

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The open engines."""
        return self._engines

    @property
    def default(self) -> Engine:
        """The engine of requests that name no namespace."""
        return self._engines[self._settings.namespace]

    async def engine(self, name: str) -> Engine:
        """The engine of a namespace; NotFound when there is no such namespace."""
        engine = self._engines.get(name)
        if engine is not None and (not engine.lost or not self._is_over(engine)):
            return engine
        # Fail at once while the store is unavailable: requests must not queue for the lock.
        self.default.require_store()
        async with self._opening:
            engine = self._engines.get(name)
            if engine is not None and not self._is_over(engine):
                return engine
            until, reason = self._failed.get(name, (0.0, ""))
            if asyncio.get_running_loop().time() < until:
                raise Unavailable(reason)
            if engine is not None and name == self._settings.namespace:
                return await self._replace(engine)
            if engine is not None and not await self._close_deleted(engine):
                return engine
            return await self._open(name)

    async def record(self, name: str) -> NamespaceRecord:
        """The record of a namespace, served or not; NotFound when there is none."""
        self.default.require_store()
        record = await self._namespaces.load(name)
        if record is None or record.state == "deleted":
            raise NotFound("There is no namespace with this name: GET /admin/namespaces lists them.")
        return record

    async def records(self) -> list[NamespaceRecord]:
        """The records of all namespaces, sorted by name."""
        self.default.require_store()
        found = []
        for name in await self._namespaces.names():
            try:
                record = await self._namespaces.load(name)
            except (CorruptRecord, ValueError) as error:  # a damaged record, or an invalid name
                log.error("namespace_record_unreadable", namespace=name, reason=str(error))
                continue
            if record is not None and record.state == "ready":
                found.append(record)
        return found

    async def create(self, name: str, overrides: Mapping[str, Any], layout: FeatureLayout | None) -> NamespaceRecord:
        """Create a namespace and serve it; SettingsError when the settings are invalid.

        Called again with the same arguments, an interrupted creation is completed.
        """
        overridden(self._settings, name, overrides)
        settings = self._settings.model_copy(
            update={field: overrides[field] for field in ("partitions", "seed") if field in overrides}
        )
        learner = learner_settings(settings, preset=overrides.get("preset"), own=overrides.get("learner"))
        wanted = None if layout is None else layout.to_json()
        check_size(learner, wanted, blamed="METABAN_LEARNER, METABAN_ARM_FEATURES")
        self.default.require_store()
        async with self._opening:
            before = await self._namespaces.load(name)
            if before is not None and (
                before.state == "ready"
                or (before.state == "creating" and (before.overrides, before.layout) != (overrides, wanted))
            ):
                raise _already_exists()
            try:
                record = await self._namespaces.open_or_create(
                    name,
                    partitions=settings.partitions,
                    seed=settings.seed,
                    learner=learner.to_json(),
                    layout=wanted,
                    overrides=dict(overrides),
                    rewards=reward_rules(settings),
                )
            except NamespaceConflict:
                raise _already_exists() from None
            if (record.overrides, record.layout) != (overrides, wanted):
                raise _already_exists()  # another process created a different one
            await self._close(name)
            await self._open(name)
        log.info("namespace_created", namespace=name, preset=stored_settings(record.learner).preset)
        return record

    async def delete(self, name: str) -> None:
        """Delete a namespace with all its data, even if it cannot be served or an earlier deletion was interrupted.

        The default namespace is created again, empty.
        """
        self.default.require_store()
        async with self._opening:
            record = await self._namespaces.load(name)
            if record is None or (record.state == "deleted" and name not in await self._namespaces.names()):
                raise NotFound("There is no namespace with this name: GET /admin/namespaces lists them.")
            record = await self._namespaces.mark_deleted(record)
            if name == self._settings.namespace:
                await self._replace(self.default)  # creating it again deletes the old data first
            else:
                await self._close(name)
        if name != self._settings.namespace:
            # Outside of the lock: the record is marked as deleted, so nothing has to wait for this.
            await self._namespaces.delete(record)
        log.info("namespace_deleted", namespace=name)

    async def readiness(self) -> dict[str, CheckResult]:
        """The checks of the default namespace, and the failed checks of others.

        An outage of the store is vital if it is so for the default namespace or, while that was never used, for all
        that were.
        """
        names = list(self._engines)
        found = await asyncio.gather(*(self._engines[name].readiness() for name in names), return_exceptions=True)
        checks: dict[str, CheckResult] = {}
        serving: list[CheckResult] = []
        for name, theirs in zip(names, found, strict=True):
            if isinstance(theirs, BaseException):
                log.error("readiness_check_failed", namespace=name, exc_info=theirs)
                theirs = {"state": CheckResult(False, "the check failed: see the log")}
            if name == self._settings.namespace:
                checks.update(theirs)
                continue
            if "store" in theirs and self._engines[name].serving is not None:
                serving.append(theirs["store"])
            for part, check in theirs.items():
                # The store is reported once, and another namespace's failure does not make this one unready.
                if not check.ok and part != "store":
                    checks[f"{part} of {name}"] = CheckResult(False, check.detail, vital=False)
        if "store" in checks and serving and self.default.serving is None:
            checks["store"] = replace(checks["store"], vital=all(check.vital for check in serving))
        return checks

    def warnings(self) -> list[tuple[str, LearningWarning]]:
        """Why namespaces cannot learn, with their names."""
        return [(name, each) for name, engine in self._engines.items() for each in engine.watch.warnings]

    async def refresh_gauges(self) -> None:
        """Update the gauges whose values are in the store; raises the first error after all namespaces were tried."""
        open_engines = [engine for engine in self._engines.values() if not engine.lost]
        outcomes = await asyncio.gather(*(engine.refresh_gauges() for engine in open_engines), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _is_over(self, engine: Engine) -> bool:
        """Whether an engine's namespace is gone and the engine has to be replaced.

        The default engine is replaced only if its namespace was deleted on purpose: a store that lost its data needs
        an operator.
        """
        return engine.lost and (engine.succeeded or engine.namespace != self._settings.namespace)

    async def _replace(self, before: Engine) -> Engine:
        """Open the default namespace again; the previous engine answers until then."""
        engine = await self._register(before.namespace, self._start_engine(self._settings))
        await before.stop()
        return engine

    async def _open(self, name: str) -> Engine:
        """Open a namespace and serve it."""

        async def opening() -> Engine:
            record = await self.record(name)
            own = self._settings.model_copy(update={"namespace": name, "partitions": record.partitions})
            return await self._start_engine(own, record)

        return await self._register(name, opening())

    async def _register(self, name: str, opening: Coroutine[None, None, Engine]) -> Engine:
        """Register an engine once it is open; Unavailable, logged, when it cannot be opened."""
        try:
            engine = await opening
        except (NotFound, StoreUnavailable):
            raise
        except Exception as error:
            # Any error: the other namespaces must still be served.
            log.error("namespace_open_failed", namespace=name, exc_info=error)
            reason = _not_served(error)
            self._failed[name] = (asyncio.get_running_loop().time() + RETRY_S, reason)
            if name not in self._engines:
                self._metrics.forget(name)
            raise Unavailable(reason) from error
        self._failed.pop(name, None)
        self._engines[name] = engine
        return engine

    async def _start_engine(self, settings: Settings, record: NamespaceRecord | None = None) -> Engine:
        engine = Engine.from_settings(settings, self._connections, self._metrics)
        try:
            await engine.start(record)
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _close(self, name: str) -> None:
        self._failed.pop(name, None)
        engine = self._engines.pop(name, None)
        if engine is not None:
            await engine.stop()
            self._metrics.forget(name)

    async def _sweep(self) -> None:
        """Close namespaces that another process deleted, and open the default one again.

        The default one cannot wait for a request: while it is not ready, no requests are routed here.
        """
        while True:
            await asyncio.sleep(SWEEP_S)
            for name in [name for name, engine in self._engines.items() if self._is_over(engine)]:
                try:
                    if name == self._settings.namespace:
                        await self.engine(name)
                    else:
                        async with self._opening:
                            engine = self._engines.get(name)
                            if engine is not None and self._is_over(engine):
                                await self._close_deleted(engine)
                except Exception as error:
                    # Any error: the next check tries again.
                    log.error("namespace_close_failed", namespace=name, exc_info=error)

    async def _close_deleted(self, engine: Engine) -> bool:
        """Close an engine whose namespace was deleted, and perhaps created again; the caller holds the lock.

        False, with the engine still open, if the store was emptied: until an operator restores a snapshot, it answers
        as in an outage.
        """
        if await self._namespaces.load(engine.namespace) is None:
            return False
        await self._close(engine.namespace)
        return True


def _already_exists() -> NamespaceExists:
    return NamespaceExists("A namespace with this name exists.")


def _not_served(error: Exception) -> str:
    if isinstance(error, SettingsError):
        return f"This namespace cannot be served with its settings; it can be deleted. {error}"
    return "This namespace cannot be served; the log of the service says why."
