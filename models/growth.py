"""When there are so many more events that something is worth doing again."""

from __future__ import annotations

import math
from typing import Final

#: Applied events from which on doublings count.
FIRST_EPOCH_EVENTS: Final = 16
#: What a quotient of logarithms may be too small by.
ROUNDING: Final = 1e-9


def doubled(epoch_events: int, total_events: int) -> bool:
    """Whether the events have passed a power of two, 16 or more, since the epoch."""
    return total_events >= FIRST_EPOCH_EVENTS and total_events.bit_length() > epoch_events.bit_length()


def grown(epoch_events: int, total_events: int, growth: float) -> bool:
    """Whether the events have passed a power of this number since the epoch."""
    return _powers(total_events, growth) > _powers(epoch_events, growth)


def _powers(events: int, growth: float) -> int:
    return int(math.log(max(1, events)) / math.log(growth) + ROUNDING)
