"""What snapshots are called: an id that sorts by time, and a name if somebody gave one."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

ID_PATTERN: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: What the newest snapshot is asked for by.
LATEST: Final = "latest"


def new_id(now_s: float | None = None) -> str:
    """An id for a snapshot taken now."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s)) + "-" + secrets.token_hex(3)


def is_free_name(name: str) -> bool:
    """Whether a name means nothing else where a snapshot is asked for."""
    return name != LATEST and ID_PATTERN.fullmatch(name) is None
