"""What admins did: one line each in a capped stream, without secrets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, final

from store.connection import Store, as_text, command, parse_entries
from store.errors import CorruptRecord, StoreReset
from store.keys import NamespaceKeys
from store.scripts import load_script

#: Lines kept, at least; older ones go.
AUDIT_CAP: Final = 10_000
CURSOR: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
UINT64_MAX: Final = 2**64 - 1


@final
@dataclass(frozen=True, slots=True)
class AuditLine:
    """One thing done; `cursor` is its place in the log, and begins with the time in milliseconds."""

    actor: str  # the first digits of the digest of the key; empty where no keys are set
    action: str  # method and route, such as PATCH /admin/config
    target: str  # what the path named
    request_id: str
    detail: dict[str, Any]
    cursor: str = ""

    @property
    def at_ms(self) -> int:
        return int(self.cursor.partition("-")[0])

    @staticmethod
    def decode(cursor: str, fields: dict[bytes, bytes]) -> AuditLine:
        try:
            detail = json.loads(fields[b"d"])
            actor, action, target, request_id = (as_text(fields[name]) for name in (b"a", b"m", b"p", b"r"))
            return AuditLine(actor, action, target, request_id, dict(detail), cursor)
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptRecord(f"not a line of the audit log: {error!r}") from error


@final
class AuditLog:
    """The audit log of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._add = load_script(redis, "audit")

    async def add(self, line: AuditLine) -> None:
        """Write a line; the store says when it was. StoreReset when the namespace is gone."""
        detail = json.dumps(line.detail, separators=(",", ":"), allow_nan=False)
        fields = ("a", line.actor, "m", line.action, "p", line.target, "r", line.request_id, "d", detail)
        written = await self._add.call([self._keys.record, self._keys.audit], [self._store_epoch, AUDIT_CAP, *fields])
        if written is None:
            raise StoreReset(f"namespace {self._keys.namespace} was deleted, or vanished with its store")

    async def newest(self, count: int, *, before: str | None = None) -> list[AuditLine]:
        """Lines from the newest on, those before a cursor; ValueError for a cursor that no line has."""
        start = "+" if before is None else f"({_checked(before)}"
        rows = await command(self._redis, "XREVRANGE", self._keys.audit, start, "-", "COUNT", count)
        return [AuditLine.decode(cursor, fields) for cursor, fields in parse_entries(rows)]


def _checked(cursor: str) -> str:
    parts = CURSOR.fullmatch(cursor)
    if parts is None or any(int(part) > UINT64_MAX for part in parts.groups()) or not any(map(int, parts.groups())):
        raise ValueError("not a cursor of the audit log")
    return cursor
