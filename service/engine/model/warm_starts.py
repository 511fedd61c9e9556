"""Warm starts: serves the newest fusion model that workers have published."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import structlog
from numpy.typing import NDArray

from metaban.models.fusion.model import InvalidFusion
from metaban.models.fusion.warm_starts import WarmStarter
from metaban.models.learner import Learner
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.store.shared.fusion import FusionRecord, FusionStore
from metaban.store.users.warm_starts import StoredWarmStart

#: Nearest sources stored with a warm start.
NEAREST_STORED: Final = 5

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class NewStart:
    """A warm start that is not stored yet, with its fusion version and nearest sources (token, distance)."""

    values: NDArray[np.float64]
    version: int
    nearest: tuple[tuple[str, float], ...]

    def of(self, incarnation: int, created_ms: int) -> StoredWarmStart:
        """The record to store for a user of this incarnation."""
        return StoredWarmStart(incarnation, self.values, self.version, self.nearest, created_ms)


@final
@dataclass(frozen=True, slots=True)
class _Served:
    version: int
    starter: WarmStarter
    tokens: tuple[str, ...]


@final
class ServedFusion:
    """Makes warm starts from profiles; none while there is no fusion model or its guard rejects it."""

    def __init__(self, store: FusionStore, learner: Learner, compute: Executor, metrics: NamespaceMetrics) -> None:
        self._store = store
        self._learner = learner
        self._compute = compute
        self._metrics = metrics
        self._log = log.bind(namespace=metrics.namespace)
        self._served: _Served | None = None
        self._seen: tuple[int, str] | None = None

    @property
    def version(self) -> int | None:
        """The served version; None while there is none."""
        return None if self._served is None else self._served.version

    async def follow(self) -> None:
        """Serve the stored fusion model, even if it is older or gone. An invalid one is refused and the previous stays.

        When a forgotten source is removed from the stored model, its stamp changes, so it is loaded again.
        """
        identity = await self._store.identity()
        if identity == self._seen:
            return
        try:
            record = await self._store.current()
            served = None if record is None else await asyncio.to_thread(_load_fusion, self._learner, record)
        except (StoreUnavailable, StoreReset):
            raise
        except Exception as error:
            # Any error: an invalid fusion model must not stop the replica.
            self._log.error("fusion_refused", version=identity and identity[0], reason=str(error))
            self._seen = identity
            return
        self._served, self._seen = served, None if record is None else (record.version, record.stamp)
        sources = 0 if served is None else len(served.tokens)
        self._metrics.fusion_version.set(0 if served is None else served.version)
        self._metrics.fusion_sources.set(sources)
        used = served is not None and served.starter.active
        self._log.info("fusion_served", version=self.version, sources=sources, used=used)

    async def start(self, profile: NDArray[np.float64]) -> NewStart | None:
        """A warm start for a user with this profile; None to begin from the prior."""
        served = self._served
        if served is None or not served.starter.active or served.starter.profile_size != len(profile):
            return None
        with self._metrics.stage("fusion"):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._compute, _make_start, served, profile)
            except (ArithmeticError, RuntimeError, ValueError) as error:
                # The request goes on with the prior.
                self._log.error("warm_start_failed", version=served.version, exc_info=error)
                return None


def _load_fusion(learner: Learner, record: FusionRecord) -> _Served | None:
    if not record.sources:
        return None  # all sources were forgotten
    try:
        profiles = np.stack([source.profile for source in record.sources])
    except ValueError as error:
        raise InvalidFusion("its sources have profiles of different lengths") from error
    starter = WarmStarter.from_arrays(learner, record.arrays, profiles)
    return _Served(record.version, starter, tuple(source.token for source in record.sources))


def _make_start(served: _Served, profile: NDArray[np.float64]) -> NewStart | None:
    values = served.starter.start(profile)
    if not np.isfinite(values).all() or values[-1] <= 0:
        return None  # no better than the prior
    nearest = served.starter.nearest(profile, NEAREST_STORED)
    return NewStart(values, served.version, tuple((served.tokens[row], distance) for row, distance in nearest))
