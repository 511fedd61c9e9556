"""When enough events have arrived to repeat an expensive step."""

from __future__ import annotations

import math
from typing import Final

#: Doublings count from this many applied events on.
FIRST_EPOCH_EVENTS: Final = 16

#: Tolerance for rounding in a quotient of logarithms.
ROUNDING: Final = 1e-9


def doubled(epoch_events: int, total_events: int) -> bool:
    """Whether the number of events has passed a power of two, 16 or more, since the epoch."""
    return total_events >= FIRST_EPOCH_EVENTS and total_events.bit_length() > epoch_events.bit_length()


def grown(epoch_events: int, total_events: int, growth: float) -> bool:
    """Whether the number of events has passed a power of `growth` since the epoch."""
    return _powers(total_events, growth) > _powers(epoch_events, growth)


def _powers(events: int, growth: float) -> int:
    return int(math.log(max(1, events)) / math.log(growth) + ROUNDING)
