"""Which events are in the served parameters, as far as remembered, and who waits for one to be."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, TypeAlias, final

#: Applied events remembered for callers that ask after the fact.
APPLIED_REMEMBERED: Final = 65_536

#: Partition and entry id of an event.
Entry: TypeAlias = tuple[int, str]


@final
class AppliedEvents:
    """The applied events of one namespace; belongs to the event loop."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Entry, None] = OrderedDict()
        self._waiters: dict[Entry, set[asyncio.Future[None]]] = {}

    def __contains__(self, entry: Entry) -> bool:
        """Whether an event was applied lately."""
        return entry in self._seen

    @property
    def awaited(self) -> int:
        """Events that somebody waits for."""
        return len(self._waiters)

    async def wait(self, entry: Entry) -> None:
        """Return once an event is applied."""
        if entry in self._seen:
            return
        # One future for each who waits: whoever gives up takes nothing away from the others.
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(entry, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(entry, None)

    def settle(self, entries: Iterable[Entry]) -> None:
        """Take note of applied events and tell those who wait for them."""
        for entry in entries:
            self._seen[entry] = None
            for waiter in self._waiters.pop(entry, ()):
                if not waiter.done():
                    waiter.set_result(None)
        while len(self._seen) > APPLIED_REMEMBERED:
            self._seen.popitem(last=False)

    def doubt(self, partition: int) -> None:
        """Remember nothing of a partition any more: the store may have lost what it applied last."""
        for entry in [entry for entry in self._seen if entry[0] == partition]:
            del self._seen[entry]
