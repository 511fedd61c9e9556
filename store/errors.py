"""What can go wrong in the store.

    StoreError
    ├── StoreUnavailable     connection lost, timed out, loading, busy or memory full: try later (503)
    ├── BacklogFull          too many events wait to be learned: nothing was written (503 + Retry-After)
    ├── NotReplicated        written, yet too few replicas confirmed it in time: send it again (503 + Retry-After)
    ├── CorruptRecord        stored bytes are not what this version writes
    ├── StoreReset           the store epoch vanished or differs: FLUSHALL, or another store at the same address
    ├── FenceLost            an apply was refused and wrote nothing; `.reason` says which check failed
    ├── NamespaceConflict    a namespace exists with other settings, or its record changed under us
    ├── CatalogueFull        the catalogue would hold more arms than it may: nothing was written (409)
    ├── ArmConflict          an arm has not the version that was expected: nothing was written (409)
    ├── SnapshotError        a snapshot cannot be taken, read or restored
    └── EmbeddedServerError  the private server did not start or died

Errors of the driver never leave this package: `translate_errors` turns them into the above.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, final

import redis.exceptions as driver

#: Why a write was refused: an entry is not pending for the consumer, a user moved on or began anew, another store.
FenceReason: TypeAlias = Literal["not-pending", "version", "incarnation", "store-epoch", "overtaken"]

#: Error codes of the server that pass by themselves; the driver has no class for most of them.
TRANSIENT_CODES = frozenset(
    {
        "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN",
        "UNBLOCKED",
    }
)  # fmt: skip


#: What the driver calls on the writer of a connection.
WRITER_CALLS = frozenset({"writelines", "write", "drain", "close", "wait_closed"})


class StoreError(Exception):
    """Anything the store could not do."""


@final
class StoreUnavailable(StoreError):
    """The store does not answer now; the same call may succeed later."""


@final
class BacklogFull(StoreError):
    """The events waiting in a partition would exceed the limit; nothing was written there."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@final
class NotReplicated(StoreError):
    """Too few replicas confirmed a write in time. It may last or not; sent again, an event is a duplicate."""


@final
class CorruptRecord(StoreError):
    """Stored bytes do not decode as the record they should be."""


@final
class StoreReset(StoreError):
    """The store lost or changed its epoch: what was read from it before no longer holds."""


@final
class FenceLost(StoreError):
    """A guarded write found the world changed and wrote nothing."""

    def __init__(self, reason: FenceReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: FenceReason = reason
        self.detail = detail


@final
class NamespaceConflict(StoreError):
    """The namespace exists with other settings, or another writer changed its record first."""


@final
class CatalogueFull(StoreError):
    """The catalogue would hold more arms than it may; nothing was written."""


@final
class ArmConflict(StoreError):
    """An arm has not the version that a change expects; nothing was written. 0: there is no such arm."""

    def __init__(self, arm_id: str, version: int) -> None:
        super().__init__(f"the arm has version {version}" if version else "there is no such arm")
        self.arm_id = arm_id
        self.version = version


@final
class SnapshotError(StoreError):
    """A snapshot cannot be taken, read or restored; the message says why, and what to do."""


@final
class EmbeddedServerError(StoreError):
    """The private server did not start, or died."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the errors of the driver as errors of this package."""
    try:
        yield
    except driver.AuthenticationError as error:
        # A subclass of ConnectionError in the driver, yet waiting does not mend a wrong password.
        raise StoreError(f"the store refused the credentials: {error}") from error
    except (
        driver.ConnectionError, driver.TimeoutError, driver.ClusterDownError, driver.InvalidResponse, OSError
    ) as error:  # fmt: skip
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    except RuntimeError as error:
        # How uvloop tells that a connection was closed between two writes to it.
        if "closed" not in str(error):
            raise
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    except AttributeError as error:
        # How the driver tells that a connection was closed while it was about to write to it: its writer is gone.
        if error.obj is not None or error.name not in WRITER_CALLS:
            raise
        raise StoreUnavailable("the store does not answer: the connection was closed") from error
    except driver.RedisError as error:
        if is_transient(error):
            raise StoreUnavailable(f"the store cannot serve now: {error}") from error
        raise StoreError(f"the store refused a command: {error}") from error


def is_transient(error: driver.RedisError) -> bool:
    """Whether the server said that the same command may succeed later."""
    if isinstance(error, driver.ReadOnlyError | driver.TryAgainError | driver.OutOfMemoryError):
        return True  # the driver strips the code off the message of these
    words = str(error).split(maxsplit=1)
    return bool(words) and words[0] in TRANSIENT_CODES
