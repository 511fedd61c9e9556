"""Failpoints: named places in the code where a test can make the process kill itself with SIGKILL.

`METABAN_FAILPOINTS="worker-before-apply=3,meta-after-publish=1"` kills the process when it reaches the first place for
the third time, or the second place for the first time. `worker-learn:arm-7=1` counts only visits with that detail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

FAILPOINTS_VARIABLE: Final = "METABAN_FAILPOINTS"


def parse_failpoints(text: str) -> dict[str, int]:
    """Place → number of the visit that kills the process, from the text of the variable."""
    left: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        place, _, times = part.rpartition("=")
        if not place or not times.isdigit() or int(times) < 1:
            raise ValueError(f"{FAILPOINTS_VARIABLE}: {part!r} is not of the form place=times")
        left[place] = int(times)
    return left


_left = parse_failpoints(os.environ.get(FAILPOINTS_VARIABLE, ""))


def reach(place: str, detail: str = "", *, left: dict[str, int] = _left) -> None:
    """Kill the process here if the variable says so."""
    if not left:
        return
    for name in (place, f"{place}:{detail}"):
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def armed(left: Mapping[str, int] = _left) -> bool:
    """Whether any failpoint is set; logged at start, since no production process should have one."""
    return bool(left)
