"""Token buckets: so many requests a second for each sender, and a few at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, final

#: Senders that are remembered; about 1 MB.
SENDERS_MAX: Final = 10_000


@final
class TokenBuckets:
    """A bucket for each sender. Of more senders than are remembered, the one heard least lately starts anew."""

    def __init__(
        self,
        rate: float,
        burst: float,
        *,
        senders_max: int = SENDERS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate` tokens a second go into a bucket that holds `burst` of them."""
        if rate <= 0 or burst < 1 or senders_max < 1:
            raise ValueError("a bucket has to be filled, and to hold a token")
        self._rate = rate
        self._burst = burst
        self._senders_max = senders_max
        self._clock = clock
        #: Tokens that were there, and when.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Senders remembered."""
        return len(self._buckets)

    def take(self, sender: str) -> float:
        """Take a token; 0 when there was one, else the seconds until there is."""
        now_s = self._clock()
        tokens, then_s = self._buckets.get(sender, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - then_s) * self._rate)
        missing = 1.0 - tokens
        self._buckets[sender] = (tokens if missing > 0 else tokens - 1.0, now_s)
        self._buckets.move_to_end(sender)
        while len(self._buckets) > self._senders_max:
            self._buckets.popitem(last=False)
        return max(0.0, missing / self._rate)
