"""The namespaces of a deployment: one engine each, opened when the service starts or when it first hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import Context
from typing import Any, Final, final

import structlog

from models.features import FeatureLayout
from models.settings import stored_settings
from service.contracts import CheckResult
from service.engine import Engine
from service.errors import NamespaceExists, NotFound, Unavailable
from service.learner_checks import check_size
from service.live import kept, overridden
from service.metrics import Metrics
from service.settings import Settings, SettingsError, learner_settings
from store.connection import connect
from store.errors import CorruptRecord, NamespaceConflict, StoreUnavailable
from store.namespaces import NamespaceRecord, Namespaces

#: How often it is looked for namespaces that were deleted elsewhere.
SWEEP_S: Final = 1.0
#: A namespace that could not be opened is not tried again for this long, however many ask for it.
RETRY_S: Final = 1.0

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
        #: Until when names are not tried again, and what is said meanwhile.
        self._failed: dict[str, tuple[float, str]] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the namespace of requests that name none, without which nothing is served, and all the others."""
        self._engines[self._settings.namespace] = await self._opened(self._settings)
        for name in await self._namespaces.names():
            try:
                await self.engine(name)
            except (Unavailable, NotFound, StoreUnavailable):
                continue  # the others are served; this one is tried again when it is asked for
        self._sweeping = asyncio.create_task(self._sweep(), context=Context())

    async def stop(self) -> None:
        """Let go of the store."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
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
        # Those who would wait for a store that is away, one after the other, would leave no room for others.
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
            if engine is not None:
                # Deleted, by this process or another, and perhaps created again since.
                await self._close(name)
            return await self._open(name)

    async def record(self, name: str) -> NamespaceRecord:
        """The record of a namespace, be it served or not; NotFound when there is none."""
        self.default.require_store()
        record = await self._namespaces.load(name)
        if record is None or record.state == "deleted":
            raise NotFound("There is no namespace of this name: GET /admin/namespaces lists them.")
        return record

    async def records(self) -> list[NamespaceRecord]:
        """The records of all namespaces, in the order of their names."""
        self.default.require_store()
        found = []
        for name in await self._namespaces.names():
            try:
                record = await self._namespaces.load(name)
            except (CorruptRecord, ValueError) as error:  # a record, or a name, that nobody here has written
                log.error("record of a namespace cannot be read", namespace=name, reason=str(error))
                continue
            if record is not None and record.state == "ready":
                found.append(record)
        return found

    async def create(self, name: str, overrides: Mapping[str, Any], layout: FeatureLayout | None) -> NamespaceRecord:
        """A new namespace, served from now on; SettingsError when it cannot have these settings.

        Asked for the same again, a creation that broke off is completed.
        """
        settings = overridden(self._settings, name, overrides)
        learner, wanted = learner_settings(settings), None if layout is None else layout.to_json()
        check_size(learner, wanted, blamed="METABAN_LEARNER, METABAN_ARM_FEATURES")  # as members of the call
        self.default.require_store()
        async with self._opening:
            before = await self._namespaces.load(name)
            if before is not None and (
                before.state == "ready"
                or (before.state == "creating" and (before.overrides, before.layout) != (overrides, wanted))
            ):
                raise _taken()
            try:
                record = await self._namespaces.open_or_create(
                    name,
                    partitions=settings.partitions,
                    seed=settings.seed,
                    learner=learner.to_json(),
                    layout=wanted,
                    overrides=dict(overrides),
                )
            except NamespaceConflict:
                raise _taken() from None
            if (record.overrides, record.layout) != (overrides, wanted):
                raise _taken()  # somebody else was first, and wants another one
            await self._close(name)
            await self._open(name)
        log.info("namespace created", namespace=name, preset=stored_settings(record.learner).preset)
        return record

    async def delete(self, name: str) -> None:
        """Delete a namespace with everything in it, also one that cannot be served, or was only deleted in part.

        That of requests that name none begins anew, empty.
        """
        self.default.require_store()
        async with self._opening:
            record = await self._namespaces.load(name)
            if record is None or (record.state == "deleted" and name not in await self._namespaces.names()):
                raise NotFound("There is no namespace of this name: GET /admin/namespaces lists them.")
            record = await self._namespaces.mark_deleted(record)
            if name == self._settings.namespace:
                await self._replace(self.default)  # which begins with deleting all there is
            else:
                await self._close(name)
        if name != self._settings.namespace:
            # Others need not wait for that, nor does whoever asks for it: it is not there any more.
            await self._namespaces.delete(record)
        log.info("namespace deleted", namespace=name)

    async def readiness(self) -> dict[str, CheckResult]:
        """The checks of the namespace of requests that name none, and what is wrong with others."""
        others = {name: engine for name, engine in self._engines.items() if name != self._settings.namespace}
        own, *found = await asyncio.gather(
            self.default.readiness(), *(engine.readiness() for engine in others.values()), return_exceptions=True
        )
        if isinstance(own, BaseException):
            raise own
        checks = dict(own)
        for name, theirs in zip(others, found, strict=True):
            if isinstance(theirs, BaseException):
                log.error("namespace cannot tell how it is", namespace=name, exc_info=theirs)
                theirs = {"state": CheckResult(False, "cannot be told: the log says why")}
            for part, check in theirs.items():
                # What the store lacks is told once. And who else is served here goes on to be.
                if not check.ok and part != "store":
                    checks[f"{part} of {name}"] = CheckResult(False, check.detail, vital=False)
        return checks

    async def refresh_gauges(self) -> None:
        """Bring the gauges that live in the store up to date; of as many namespaces as can be, then the error."""
        there = [engine for engine in self._engines.values() if not engine.lost]
        outcomes = await asyncio.gather(*(engine.refresh_gauges() for engine in there), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _is_over(self, engine: Engine) -> bool:
        """Whether an engine serves what is not there any more.

        That of requests that name none is given up for one that was made in its place on purpose, and for no other: a
        store that lost everything needs a person.
        """
        return engine.lost and (engine.succeeded or engine.namespace != self._settings.namespace)

    async def _replace(self, before: Engine) -> Engine:
        """Serve the namespace of requests that name none anew; the one before answers until then."""
        engine = await self._tried(before.namespace, self._opened(self._settings))
        await before.stop()
        return engine

    async def _open(self, name: str) -> Engine:
        """Begin to serve a namespace."""

        async def opened() -> Engine:
            record = await self.record(name)
            return await self._opened(kept(self._settings, record), record)

        return await self._tried(name, opened())

    async def _tried(self, name: str, opening: Coroutine[None, None, Engine]) -> Engine:
        """An engine that is being opened; Unavailable when it cannot be, which the log tells of."""
        try:
            engine = await opening
        except (NotFound, StoreUnavailable):
            raise
        except Exception as error:
            # Whatever it is, it is wrong with this one, and the others are served.
            log.error("namespace not opened", namespace=name, exc_info=error)
            reason = _not_served(error)
            self._failed[name] = (asyncio.get_running_loop().time() + RETRY_S, reason)
            if name not in self._engines:
                self._metrics.forget(name)
            raise Unavailable(reason) from error
        self._failed.pop(name, None)
        self._engines[name] = engine
        return engine

    async def _opened(self, settings: Settings, record: NamespaceRecord | None = None) -> Engine:
        engine = Engine.from_settings(settings, self._redis_url, self._metrics)
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
        """Let go of namespaces that were deleted elsewhere and that nobody asks for any more.

        That of requests that name none is served anew: while it is not, nobody is sent here to ask.
        """
        while True:
            await asyncio.sleep(SWEEP_S)
            for name in [name for name, engine in self._engines.items() if self._is_over(engine)]:
                try:
                    await (self.engine(name) if name == self._settings.namespace else self._let_go(name))
                except Exception as error:
                    # Whatever it is, the next look comes.
                    log.error("namespace not let go of", namespace=name, exc_info=error)

    async def _let_go(self, name: str) -> None:
        async with self._opening:
            engine = self._engines.get(name)
            record = await self._namespaces.load(name)
            if engine is None or not engine.lost or record is None:
                return  # of a store that was emptied somebody may restore a snapshot
            await self._close(name)


def _taken() -> NamespaceExists:
    return NamespaceExists("A namespace of this name exists.")


def _not_served(error: Exception) -> str:
    if isinstance(error, SettingsError):
        return f"This namespace cannot be served with its settings; it can be deleted. {error}"
    return "This namespace cannot be served as it is; the log of the service says why."
