"""What one request for a decision wants of the store, and how it goes on when the store does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, final

from service.breaker import StoreBreaker
from store.errors import StoreReset, StoreUnavailable

#: Time for one read or write of a decision; a store that answers nobody is found out sooner, by the breaker.
DECISION_BUDGET_S: Final = 2.0

Result = TypeVar("Result")


@final
class Errands:
    """The dealings of one request with the store.

    With `go_on` the request outlives the store: the first errand that fails is answered with None, and so are all
    after it, without being tried. Otherwise the failure is raised.
    """

    __slots__ = ("_breaker", "_failed", "_go_on")

    def __init__(self, breaker: StoreBreaker, *, go_on: bool) -> None:
        self._breaker = breaker
        self._go_on = go_on
        self._failed = False

    async def run(
        self, work: Callable[[], Awaitable[Result]], *, budget_s: float | None = DECISION_BUDGET_S
    ) -> Result | None:
        """What the store answered; None when it did not."""
        if self._failed:
            return None
        try:
            return await self._breaker.call(work, budget_s=budget_s)
        except (StoreUnavailable, StoreReset):
            if not self._go_on:
                raise
            self._failed = True
            return None
