"""Whether the store counts as away: found out once, not by every request for itself.

    there ── a call failed, or took longer than its budget ──▶ away ── a probe was answered ──▶ there

While the store is away, calls fail at once and do not touch it. One probe at a time looks at it: right when it went
away, then every PROBE_EVERY_S; and every HEARTBEAT_S while it is there, so that an outage is noticed even when nobody
asks.

A call that takes longer than DOUBT_S is not to blame on the store yet: the event loop may be busy, or all connections.
It has the store probed, and when that fails all calls under way are given up. So a store that hangs is away after the
doubt and a probe, and one that answers is not away because many ask it at once.

A cluster is not away because one of its servers is: there a failed call has the store probed, and only a failed probe
counts.

A call that is given up may have happened all the same: its reply is lost, not its effect.
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

from store.errors import StoreError, StoreReset, StoreUnavailable

#: A call that takes longer has the store probed.
DOUBT_S: Final = 0.25
#: Time a probe has, which a store far away needs for some round trips, and the pause between two while it is away.
PROBE_BUDGET_S: Final = 2.0
PROBE_EVERY_S: Final = 0.25
#: Pause between two probes while the store is there.
HEARTBEAT_S: Final = 1.0
#: Time is counted in steps of this length.
STEP_S: Final = 0.05

Result = TypeVar("Result")

log = structlog.get_logger()


@final
class TimeLimit:
    """Cancels what the current task does inside it when the budget is spent, or on `end`; TimeoutError then.

    Time passes in steps: an event loop that was held up for a second takes one step then, and the answers that came in
    meanwhile are read before the next. And it cancels again at every further step: before Python 3.12
    `asyncio.wait_for`, below the driver, may swallow a cancellation.
    """

    __slots__ = ("_before", "_budget", "_cancellations", "_doubt", "_loop", "_steps", "_task", "_timer")

    def __init__(self, budget_s: float | None, doubt: Callable[[], None] | None = None) -> None:
        """`doubt` is called once, after DOUBT_S."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be limited")
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
        """Let the time be over now."""
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
class StoreBreaker:
    """Stands between requests and the store."""

    def __init__(self, probe: Callable[[], Awaitable[None]], *, trust_calls: bool = True) -> None:
        """`probe` returns when the store can do all that calls need, and raises a StoreError otherwise.

        Without `trust_calls` a call that failed says nothing about others.
        """
        self._probe = probe
        self._trust_calls = trust_calls
        self._away: StoreUnavailable | StoreReset | None = None
        self._trips = 0
        self._under_way: set[TimeLimit] = set()
        self._woken = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def away(self) -> StoreUnavailable | StoreReset | None:
        """Why the store counts as away; None while it is there."""
        return self._away

    def start(self) -> None:
        """Begin to look after the store."""
        # A context of its own, so that its log lines carry nobody's request id.
        self._watching = asyncio.create_task(self._watch(), context=Context())

    async def stop(self) -> None:
        """Look no more; calls still pass, or fail at once, as it was last."""
        self._stopping = True
        self._woken.set()
        tasks = [task for task in (self._watching, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def retire(self, reason: str) -> None:
        """Let no call pass any more, for good: whoever comes from now on is late."""
        self._away = StoreReset(reason)

    async def call(self, work: Callable[[], Awaitable[Result]], *, budget_s: float | None = None) -> Result:
        """Have something done by the store.

        Raises StoreUnavailable or StoreReset at once while it is away. When the store fails, or the budget runs out,
        it counts as away from then on, or is looked at where calls are not trusted. Without a budget a call waits for
        as long as probes are answered.
        """
        if self._away is not None:
            raise type(self._away)(str(self._away))
        trips = self._trips
        try:
            with TimeLimit(budget_s, self._look_soon) as limit:
                self._under_way.add(limit)
                try:
                    return await work()
                finally:
                    self._under_way.discard(limit)
        except TimeoutError:
            failure = StoreUnavailable("the store does not answer in time")
            self._blame(failure, trips)
            raise failure from None
        except StoreUnavailable as error:
            self._blame(error, trips)
            raise

    async def check(self) -> None:
        """Look at the store now, unless it is away, which is known well enough."""
        if self._away is None:
            await self._look()

    async def _watch(self) -> None:
        while not self._stopping:
            self._woken.clear()
            await self._look()
            pause_s = HEARTBEAT_S if self._away is None else PROBE_EVERY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()

    def _look_soon(self) -> None:
        if self._away is None:
            self._woken.set()

    async def _look(self) -> None:
        """Probe, or wait for the probe that is under way."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._probe_once(), context=Context())
        # Others may wait for it too.
        await asyncio.shield(self._looking)

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
            log.exception("store cannot be probed")
            self._lose(StoreUnavailable(f"the store cannot be probed: {error!r}"))
        else:
            # An answer says nothing about a failure that came after the question: whoever failed woke the watch.
            if self._away is not None and trips == self._trips:
                self._away = None
                log.info("store back")

    def _blame(self, failure: StoreUnavailable, trips: int) -> None:
        """A call failed that was begun after so many trips; what was begun before the latest is old news."""
        if not self._trust_calls:
            self._look_soon()
        elif trips == self._trips:
            self._trip(failure)

    def _lose(self, failure: StoreUnavailable | StoreReset) -> None:
        """A probe failed: the store is away for certain."""
        self._trip(failure)
        if isinstance(failure, StoreUnavailable):
            for limit in self._under_way:
                limit.end()

    def _trip(self, failure: StoreUnavailable | StoreReset) -> None:
        if self._away is None:
            log.warning("store away", reason=str(failure))
            self._trips += 1
            self._woken.set()
        self._away = failure
