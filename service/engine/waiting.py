"""Requests that wait for an epoch, or until their rewards are learned, leave their place in progress to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol


class RequestPlace(Protocol):
    """The place of one request among those in progress."""

    def begin_waiting(self) -> bool:
        """Change to a place among the requests that wait; False when there is none. A request may wait several times
        at once, such as for the rewards of a batch."""

    def end_waiting(self) -> None:
        """Change back when the last wait has ended."""


#: The place of the current request; None outside of requests.
current_place: Final[ContextVar[RequestPlace | None]] = ContextVar("current_place", default=None)


@contextmanager
def waiting(longest_s: float) -> Iterator[float]:
    """The seconds that the current request may wait: `longest_s`, or 0 when too many requests wait already."""
    place = current_place.get()
    if place is None:
        yield longest_s
    elif place.begin_waiting():
        try:
            yield longest_s
        finally:
            place.end_waiting()
    else:
        yield 0.0
