"""Outages of the store, logged once for a namespace when they begin and once when they end."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final, final

import structlog

from metaban.store.errors import StoreUnavailable

#: An outage is over when nothing failed for this long: longer than the time limit of a command, since a cluster may
#: have one server that hangs while the others answer.
OVER_AFTER_S: Final = 8.0

log = structlog.get_logger()


@final
class StoreOutage:
    """Whether the store of one namespace is unavailable; told by all parts of a worker."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_failure_s = 0.0

    def failed(self, error: StoreUnavailable) -> None:
        """A command failed."""
        self._last_failure_s = time.monotonic()
        if self._since_s is None:
            self._since_s = self._last_failure_s
            log.warning("store_unavailable", error=str(error))

    def answered(self) -> None:
        """The store answered a command that is sent all the time."""
        if self._since_s is not None and time.monotonic() - self._last_failure_s >= OVER_AFTER_S:
            log.info("store_recovered", outage_s=round(self._last_failure_s - self._since_s, 3))
            self._since_s = None


#: The outage of the namespace that the current task works on; bound beside the `namespace` of its log lines.
STORE_OUTAGE: ContextVar[StoreOutage | None] = ContextVar("store_outage", default=None)


def store_failed(error: StoreUnavailable) -> None:
    """Tell the namespace of the current task that the store did not answer."""
    (STORE_OUTAGE.get() or StoreOutage()).failed(error)


def store_answered() -> None:
    """Tell the namespace of the current task that the store answered."""
    if (outage := STORE_OUTAGE.get()) is not None:
        outage.answered()
