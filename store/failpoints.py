"""Places where a process can be made to die, for tests of what happens then.

`METABAN_FAILPOINTS="worker-before-apply=3,meta-after-publish=1"` has the process kill itself, as `kill -9` would, when
it comes to a place for the third time and for the first. `worker-learn:arm-7=1` means the place only when it is reached
with that detail. Without the variable a place costs one look at an empty table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

FAILPOINTS_VARIABLE: Final = "METABAN_FAILPOINTS"


def parse_failpoints(text: str) -> dict[str, int]:
    """Place → times it has to be reached, from what the variable says."""
    left: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        place, _, times = part.rpartition("=")
        if not place or not times.isdigit() or int(times) < 1:
            raise ValueError(f"{FAILPOINTS_VARIABLE}: {part!r} is not of the form place=times")
        left[place] = int(times)
    return left


_left = parse_failpoints(os.environ.get(FAILPOINTS_VARIABLE, ""))


def reach(place: str, detail: str = "", *, left: dict[str, int] = _left) -> None:
    """Die here if a test asked for it."""
    if not left:
        return
    for name in (place, f"{place}:{detail}"):
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def armed(left: Mapping[str, int] = _left) -> bool:
    """Whether any place is set to die at; said in the log, since no production process should."""
    return bool(left)
