"""When the namespaces of a worker check the store: all together, and more rarely while nothing happens."""

from __future__ import annotations

import math
import time
from typing import Final, final

#: Longest pause between two checks that find nothing.
QUIET_PAUSE_MAX_S: Final = 8.0

#: Share of a period by which a timer may be early.
EARLY_SHARE: Final = 0.1


def until_next(period_s: float) -> float:
    """Seconds to the next multiple of a period: namespaces that check then share a round trip to the store."""
    left_s = period_s - time.monotonic() % period_s
    # A timer may end a little early; that must not count as another period.
    return left_s if left_s > EARLY_SHARE * period_s else left_s + period_s


@final
class QuietChecks:
    """Whether a check is due. Its pause doubles each time that nothing was found, and is short again after a find."""

    def __init__(self, every_s: float) -> None:
        """Callers ask once in `every_s`, which is the shortest pause."""
        self._every_s = every_s
        self._pause_s = every_s
        self._next_s = -math.inf

    @property
    def due(self) -> bool:
        """Whether to check now."""
        # Half a period early: otherwise a caller that is a little early would skip a whole one.
        return time.monotonic() >= self._next_s - self._every_s / 2

    def hurry(self) -> None:
        """Check again after the shortest pause at the latest: there is something to find, perhaps."""
        self._pause_s = self._every_s
        self._next_s = min(self._next_s, time.monotonic() + self._every_s)

    def done(self, *, quiet: bool) -> None:
        """Begin the next pause; `quiet` says that nothing was found."""
        self._pause_s = min(2 * self._pause_s, max(self._every_s, QUIET_PAUSE_MAX_S)) if quiet else self._every_s
        self._next_s = time.monotonic() + self._pause_s
