"""Audit log: one line for each admin request, in a capped stream, without secrets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, final

from metaban.store.client.connection import Store, as_text, command, parse_entries
from metaban.store.client.scripts import load_script
from metaban.store.errors import CorruptRecord, StoreReset
from metaban.store.keys import NamespaceKeys

#: Least number of lines kept; older ones are deleted.
AUDIT_CAP: Final = 10_000
CURSOR: Final = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
UINT64_MAX: Final = 2**64 - 1


@final
@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One admin request; `cursor` is its place in the log and begins with the time in milliseconds."""

    actor: str  # first digits of the digest of the key; empty if no keys are set
    action: str  # method and route, such as PATCH /admin/config
    target: str  # resource named in the path
    request_id: str
    detail: dict[str, Any]
    cursor: str = ""

    @property
    def at_ms(self) -> int:
        return int(self.cursor.partition("-")[0])

    @staticmethod
    def decode(cursor: str, fields: dict[bytes, bytes]) -> AuditRecord:
        try:
            detail = json.loads(fields[b"d"])
            actor, action, target, request_id = (as_text(fields[name]) for name in (b"a", b"m", b"p", b"r"))
            return AuditRecord(actor, action, target, request_id, dict(detail), cursor)
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptRecord(f"not a line of the audit log: {type(error).__name__}") from error


@final
class AuditLog:
    """The audit log of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._add = load_script(redis, "audit")

    async def add(self, line: AuditRecord) -> None:
        """Write a line with the time of the store. StoreReset if the namespace is gone."""
        detail = json.dumps(line.detail, separators=(",", ":"), allow_nan=False)
        fields = ("a", line.actor, "m", line.action, "p", line.target, "r", line.request_id, "d", detail)
        written = await self._add.call([self._keys.record, self._keys.audit], [self._store_id, AUDIT_CAP, *fields])
        if written is None:
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")

    async def newest(self, count: int, *, before: str | None = None) -> list[AuditRecord]:
        """Newest lines, or those before a cursor; ValueError for an invalid cursor."""
        start = "+" if before is None else f"({_checked(before)}"
        rows = await command(self._redis, "XREVRANGE", self._keys.audit, start, "-", "COUNT", count)
        return [AuditRecord.decode(cursor, fields) for cursor, fields in parse_entries(rows)]


def _checked(cursor: str) -> str:
    parts = CURSOR.fullmatch(cursor)
    if parts is None or any(int(part) > UINT64_MAX for part in parts.groups()) or not any(map(int, parts.groups())):
        raise ValueError("not a cursor of the audit log")
    return cursor
