"""Errors of the store.

    StoreError
    ├── StoreUnavailable     connection lost, timed out, loading, busy or memory full: try later (503)
    ├── BacklogFull          too many events wait to be learned: nothing was written (503 + Retry-After)
    ├── NotReplicated        written, but too few replicas confirmed it in time: send it again (503 + Retry-After)
    ├── CorruptRecord        stored bytes cannot be decoded
    ├── StoreReset           the store id is missing or differs: FLUSHALL, or another store at the same address
    ├── FenceLost            an apply was refused and wrote nothing; `.reason` says which check failed
    ├── NamespaceConflict    a namespace exists with other settings, or its record was changed meanwhile
    ├── ArmLimitExceeded     the catalogue would exceed its limit of arms: nothing was written (409)
    ├── ArmConflict          an arm does not have the expected version: nothing was written (409)
    ├── SnapshotError        a snapshot cannot be taken, read or restored
    └── EmbeddedServerError  the private server did not start, or ended

`raise_translated` turns errors of the driver into these; driver errors never leave this package.
"""

from __future__ import annotations

from typing import Literal, NoReturn, TypeAlias, final

import redis.exceptions as driver

#: Which check of a write failed. `overtaken`: a later refit or restore wrote there.
FenceReason: TypeAlias = Literal["not-pending", "version", "incarnation", "store-id", "overtaken"]

#: Error codes of temporary failures; the driver has no class for most of them.
TRANSIENT_CODES = frozenset(
    {
        "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN",
        "UNBLOCKED",
    }
)  # fmt: skip

#: Errors of the driver and the system that mean: no answer.
UNANSWERED = (driver.ConnectionError, driver.TimeoutError, driver.ClusterDownError, driver.InvalidResponse, OSError)

#: What precedes the arguments in the refusal of an unknown command.
COMMAND_ARGUMENTS = ", with args beginning with"

#: Methods that the driver calls on the writer of a connection.
WRITER_CALLS = frozenset({"writelines", "write", "drain", "close", "wait_closed"})


class StoreError(Exception):
    """Base class of all errors of the store."""


@final
class StoreUnavailable(StoreError):
    """The store does not answer; the same call may succeed later."""


@final
class BacklogFull(StoreError):
    """The backlog of a partition would exceed its limit; nothing was written there."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@final
class NotReplicated(StoreError):
    """Too few replicas confirmed a write in time. It may be lost; an event sent again is answered `duplicate`."""


@final
class CorruptRecord(StoreError):
    """Stored bytes cannot be decoded as the expected record."""


@final
class StoreReset(StoreError):
    """The store id is missing or differs: data read before is no longer valid."""


@final
class FenceLost(StoreError):
    """A fence did not hold, and the script wrote nothing."""

    def __init__(self, reason: FenceReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: FenceReason = reason
        self.detail = detail


@final
class NamespaceConflict(StoreError):
    """The namespace exists with other settings, or another writer changed its record first."""


@final
class ArmLimitExceeded(StoreError):
    """The catalogue would exceed its limit of arms; nothing was written."""


@final
class ArmConflict(StoreError):
    """An arm does not have the version that a change expects; nothing was written. Version 0: no such arm."""

    def __init__(self, arm_id: str, version: int) -> None:
        super().__init__(f"the arm has version {version}" if version else "there is no such arm")
        self.arm_id = arm_id
        self.version = version


@final
class SnapshotError(StoreError):
    """A snapshot cannot be taken, read or restored; the message says why and what to do."""


@final
class EmbeddedServerError(StoreError):
    """The private server did not start, or ended."""


def raise_translated(error: Exception) -> NoReturn:
    """Raise an error of the driver as an error of this package, and any other error as it is."""
    if isinstance(error, driver.AuthenticationError):
        # A ConnectionError in the driver, but a wrong password does not pass with time.
        raise StoreError(f"the store refused the credentials: {error}") from error
    if isinstance(error, UNANSWERED) or (isinstance(error, RuntimeError) and "closed" in str(error)):
        # uvloop raises RuntimeError when a connection was closed between two writes.
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    if isinstance(error, AttributeError) and error.obj is None and error.name in WRITER_CALLS:
        # The driver raises this when a connection was closed just before a write: its writer is None.
        raise StoreUnavailable("the store does not answer: the connection was closed") from error
    if isinstance(error, driver.RedisError):
        # A server names the arguments of a command that it does not know; they may be ids.
        error.args = tuple(str(part).partition(COMMAND_ARGUMENTS)[0] for part in error.args)
        if is_transient(error):
            raise StoreUnavailable(f"the store cannot serve now: {error}") from error
        raise StoreError(f"the store refused a command: {error}") from error
    raise error


def is_transient(error: driver.RedisError) -> bool:
    """Whether the same command may succeed later."""
    if isinstance(error, driver.ReadOnlyError | driver.TryAgainError | driver.OutOfMemoryError):
        return True  # the driver strips the code off the message of these
    words = str(error).split(maxsplit=1)
    return bool(words) and words[0] in TRANSIENT_CODES
