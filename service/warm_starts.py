"""The fusion model that new users of a namespace begin from in this process, followed as workers publish it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import structlog
from numpy.typing import NDArray

from models.fusion import InvalidFusion
from models.learner import Learner
from models.warm_starts import WarmStarter
from service.metrics import NamespaceMetrics
from store.errors import StoreReset, StoreUnavailable
from store.fusion import FusionRecord, FusionStore
from store.starts import Start

#: Sources told of a start, the nearest.
NEAREST_TOLD: Final = 5

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class NewStart:
    """What a user is to begin from who has no start yet, and where that comes from."""

    values: NDArray[np.float64]
    version: int
    nearest: tuple[tuple[str, float], ...]

    def of(self, incarnation: int, created_ms: int) -> Start:
        """As it is stored of a user in this incarnation."""
        return Start(incarnation, self.values, self.version, self.nearest, created_ms)


@final
@dataclass(frozen=True, slots=True)
class _Served:
    version: int
    starter: WarmStarter
    tokens: tuple[str, ...]


@final
class ServedFusion:
    """Makes warm starts from profiles; none before a fusion model exists, or while its guard is against it."""

    def __init__(self, store: FusionStore, learner: Learner, compute: Executor, metrics: NamespaceMetrics) -> None:
        self._store = store
        self._learner = learner
        self._compute = compute
        self._metrics = metrics
        self._served: _Served | None = None
        self._seen: tuple[int, str] | None = None

    @property
    def version(self) -> int | None:
        """The version that is served."""
        return None if self._served is None else self._served.version

    async def follow(self) -> None:
        """Serve what the store has, be it older or nothing. What cannot be used is refused, and the one before stays.

        Struck out of the store, a source is not held here any longer either: the stamp is another one then.
        """
        identity = await self._store.identity()
        if identity == self._seen:
            return
        try:
            record = await self._store.current()
            served = None if record is None else await asyncio.to_thread(_opened, self._learner, record)
        except (StoreUnavailable, StoreReset):
            raise
        except Exception as error:
            # Whatever is wrong with it, it must not keep users and epochs from being followed.
            log.error("fusion refused; the one before stays", version=identity and identity[0], reason=str(error))
            self._seen = identity
            return
        self._served, self._seen = served, None if record is None else (record.version, record.stamp)
        sources = 0 if served is None else len(served.tokens)
        self._metrics.fusion_version.set(0 if served is None else served.version)
        self._metrics.fusion_sources.set(sources)
        used = served is not None and served.starter.active
        log.info("fusion served", version=self.version, sources=sources, used=used)

    async def start(self, profile: NDArray[np.float64]) -> NewStart | None:
        """What a user with this profile is to begin from; None where everyone's beginning is all there is."""
        served = self._served
        if served is None or not served.starter.active or served.starter.profile_size != len(profile):
            return None
        with self._metrics.stage("fusion"):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._compute, _made, served, profile)
            except (ArithmeticError, RuntimeError, ValueError) as error:
                # Nobody waits for a better beginning than everyone has.
                log.error("no warm start", version=served.version, exc_info=error)
                return None


def _opened(learner: Learner, record: FusionRecord) -> _Served | None:
    if not record.sources:
        return None  # all of them were forgotten
    try:
        profiles = np.stack([source.profile for source in record.sources])
    except ValueError as error:
        raise InvalidFusion("its sources have profiles of different lengths") from error
    starter = WarmStarter.from_arrays(learner, record.arrays, profiles)
    return _Served(record.version, starter, tuple(source.token for source in record.sources))


def _made(served: _Served, profile: NDArray[np.float64]) -> NewStart | None:
    values = served.starter.start(profile)
    if not np.isfinite(values).all() or values[-1] <= 0:
        return None  # it would say nothing
    nearest = served.starter.nearest(profile, NEAREST_TOLD)
    return NewStart(values, served.version, tuple((served.tokens[row], distance) for row, distance in nearest))
