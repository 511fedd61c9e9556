"""Store guard: a circuit breaker for the store, and the store calls of one request.

An outage is detected once, not by every request:

    available ── a call failed or exceeded its budget ──▶ unavailable ── a probe succeeded ──▶ available

While the store is unavailable, calls fail at once without touching it. One probe runs at a time: right after the
failure, then every PROBE_EVERY_S, and every HEARTBEAT_S while the store is available, so that an outage is noticed
without traffic.

A call slower than DOUBT_S does not open the breaker by itself, because the event loop or the connection pool may be the
cause. It triggers a probe; if the probe fails, all calls in progress are cancelled.

One failed server of a cluster does not make the cluster unavailable: there a failed call only triggers a probe.

A cancelled call may still have taken effect: its reply is lost, not its write.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from types import TracebackType
from typing import Final, TypeVar, final

import structlog

from metaban.store.errors import StoreError, StoreReset, StoreUnavailable

#: A slower call triggers a probe.
DOUBT_S: Final = 0.25

#: Time limit of a probe; it makes several round trips.
PROBE_BUDGET_S: Final = 2.0

#: Pause between two probes while the store is unavailable.
PROBE_EVERY_S: Final = 0.25

#: Pause between two probes while the store is available.
HEARTBEAT_S: Final = 1.0

#: Resolution of TimeLimit.
STEP_S: Final = 0.05

Result = TypeVar("Result")

log = structlog.get_logger()


@final
class TimeLimit:
    """Context manager that cancels the current task's work when the budget is spent or on `end()`; raises TimeoutError.

    Time is counted in event loop steps: a loop that was blocked for a second counts one step, so replies that arrived
    meanwhile are read first. The cancellation is repeated at every further step, because before Python 3.12
    `asyncio.wait_for`, used by the driver, may swallow one.
    """

    __slots__ = ("_before", "_budget", "_cancellations", "_doubt", "_loop", "_steps", "_task", "_timer")

    def __init__(self, budget_s: float | None, doubt: Callable[[], None] | None = None) -> None:
        """`doubt` is called once after DOUBT_S."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("TimeLimit needs a running task")
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._before = task.cancelling()
        self._cancellations = 0
        self._budget = math.inf if budget_s is None else budget_s / STEP_S
        self._doubt = doubt
        self._steps = 0
        self._timer = self._loop.call_later(STEP_S, self._step)

    def __enter__(self) -> TimeLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        others = self._before
        for _ in range(self._cancellations):
            others = self._task.uncancel()
        if self._cancellations and kind is asyncio.CancelledError and others <= self._before:
            raise TimeoutError from error

    def end(self) -> None:
        """Time out now."""
        if not self._cancellations:
            self._timer.cancel()
            self._budget = 0
            self._step()

    def _step(self) -> None:
        self._steps += 1
        if self._steps >= self._budget:
            self._cancellations += 1
            self._task.cancel()
        elif self._doubt is not None and self._steps * STEP_S >= DOUBT_S:
            self._doubt()
            self._doubt = None
        self._timer = self._loop.call_later(STEP_S, self._step)


@final
class StoreGuard:
    """Runs calls to the store, or refuses them while it is unavailable."""

    def __init__(
        self, probe: Callable[[], Awaitable[None]], *, trust_calls: bool = True, namespace: str | None = None
    ) -> None:
        """`probe` returns when the store can do what calls need, and raises a StoreError otherwise.

        With `trust_calls` a failed call opens the breaker; without, it only triggers a probe (cluster).
        """
        self._probe = probe
        self._trust_calls = trust_calls
        self._log = log.bind(namespace=namespace)
        #: Why the store is unavailable; None while it is available.
        self.outage: StoreUnavailable | StoreReset | None = None
        self._trips = 0
        self._in_progress: set[TimeLimit] = set()
        self._woken = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Start probing."""
        # An empty context: its log lines must not carry the id of the request that started it.
        self._watcher = asyncio.create_task(self._watch(), context=Context())

    async def stop(self) -> None:
        """Stop probing; the last state stays."""
        self._stopping = True
        self._woken.set()
        tasks = [task for task in (self._watcher, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def retire(self, reason: str) -> None:
        """Refuse all further calls, permanently."""
        self.outage = StoreReset(reason)

    async def call(self, work: Callable[[], Awaitable[Result]], *, budget_s: float | None = None) -> Result:
        """Run a call to the store.

        Raises StoreUnavailable or StoreReset at once while the store is unavailable. A failure or an exceeded budget
        opens the breaker, or triggers a probe without `trust_calls`. Without a budget a call may take as long as probes
        succeed.
        """
        if self.outage is not None:
            raise type(self.outage)(str(self.outage))
        trips = self._trips
        try:
            with TimeLimit(budget_s, self._probe_soon) as limit:
                self._in_progress.add(limit)
                try:
                    return await work()
                finally:
                    self._in_progress.discard(limit)
        except TimeoutError:
            failure = StoreUnavailable("the store does not answer in time")
            self._blame(failure, trips)
            raise failure from None
        except StoreUnavailable as error:
            self._blame(error, trips)
            raise

    async def check(self) -> None:
        """Probe the store now, unless it is known to be unavailable."""
        if self.outage is None:
            await self._probe_shared()

    async def _watch(self) -> None:
        while not self._stopping:
            self._woken.clear()
            await self._probe_shared()
            pause_s = HEARTBEAT_S if self.outage is None else PROBE_EVERY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()

    def _probe_soon(self) -> None:
        if self.outage is None:
            self._woken.set()

    async def _probe_shared(self) -> None:
        """Probe, or wait for the probe in progress."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_once(), context=Context())
        # Shielded: other callers may wait for the same probe.
        await asyncio.shield(self._probing)

    async def _probe_once(self) -> None:
        trips = self._trips
        try:
            with TimeLimit(PROBE_BUDGET_S):
                await self._probe()
        except TimeoutError:
            self._lose(StoreUnavailable("the store does not answer in time"))
        except (StoreUnavailable, StoreReset) as error:
            self._lose(error)
        except StoreError as error:
            self._lose(StoreUnavailable(str(error)))
        except Exception as error:
            self._log.exception("store_probe_failed")
            self._lose(StoreUnavailable(f"the probe of the store failed: {error!r}"))
        else:
            # A probe that started before the latest failure proves nothing; that failure has triggered another one.
            if self.outage is not None and trips == self._trips:
                self.outage = None
                self._log.info("store_recovered")

    def _blame(self, failure: StoreUnavailable, trips: int) -> None:
        """Report a failed call. `trips` is the count at its start; a call from before the latest trip is ignored."""
        if not self._trust_calls:
            self._probe_soon()
        elif trips == self._trips:
            self._trip(failure)

    def _lose(self, failure: StoreUnavailable | StoreReset) -> None:
        """Report a failed probe: open the breaker and cancel the calls in progress."""
        self._trip(failure)
        if isinstance(failure, StoreUnavailable):
            for limit in self._in_progress:
                limit.end()

    def _trip(self, failure: StoreUnavailable | StoreReset) -> None:
        if self.outage is None:
            self._log.warning("store_unavailable", reason=str(failure))
            self._trips += 1
            self._woken.set()
        self.outage = failure


#: Time for one read or write of a decision. A store that hangs for everybody is detected sooner, by the breaker.
DECISION_BUDGET_S: Final = 2.0


@final
class StoreAccess:
    """The store calls of one request.

    With `go_on` the request continues without the store: the first call that fails returns None, and later calls
    return None without being tried. Without it, the failure is raised.
    """

    __slots__ = ("_failed", "_go_on", "_guard")

    def __init__(self, guard: StoreGuard, *, go_on: bool) -> None:
        self._guard = guard
        self._go_on = go_on
        self._failed = False

    async def run(
        self, work: Callable[[], Awaitable[Result]], *, budget_s: float | None = DECISION_BUDGET_S
    ) -> Result | None:
        """The store's answer; None when the request goes on without the store."""
        if self._failed:
            return None
        try:
            return await self._guard.call(work, budget_s=budget_s)
        except (StoreUnavailable, StoreReset):
            if not self._go_on:
                raise
            self._failed = True
            return None
