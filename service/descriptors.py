"""Descriptors: every connection takes one, and each partition of each namespace has a connection of its own."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

#: Enough for some hundred namespaces.
DESCRIPTORS_WANTED: Final = 65_536


def raise_limit() -> int:
    """Take as many descriptors as this process may have, up to what is of use; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_WANTED
    if soft < DESCRIPTORS_WANTED:
        most = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
