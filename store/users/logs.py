"""Follows everything that a replica has to know: the update logs of all partitions and the epoch log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, final

from metaban.store.client.connection import Store, block_arguments, command, entries_by_key, reads_together
from metaban.store.keys import NamespaceKeys
from metaban.store.users.records import UpdateEntry

#: The epoch log, or the update log of a partition.
Log: TypeAlias = int | Literal["epochs"]

EPOCHS: Final = "epochs"


@final
class NamespaceLogs:
    """The logs of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys

    @property
    def groups(self) -> list[list[Log]]:
        """All logs, those together that one `read` takes."""
        logs: list[Log] = [EPOCHS, *range(self._keys.partitions)]
        return [logs] if reads_together(self._redis) else [[log] for log in logs]

    async def read(
        self, cursors: Mapping[Log, str], *, block_ms: int, count: int
    ) -> tuple[dict[int, list[UpdateEntry]], str | None]:
        """Lines after the cursors of update logs, and the cursor of the newest epoch published after the given one.

        At most `count` lines of each log. Waits at most `block_ms`, and less than the socket time-out.
        """
        keys = {self._key(log): log for log in cursors}
        wait = block_arguments(self._redis, block_ms)
        reply = await command(self._redis, "XREAD", "COUNT", count, *wait, "STREAMS", *keys, *cursors.values())
        lines: dict[int, list[UpdateEntry]] = {}
        published: str | None = None
        for key, entries in entries_by_key(reply).items():
            log = keys[key]
            if log == EPOCHS:
                published = entries[-1][0]
            else:
                lines[log] = [UpdateEntry.decode(entry_id, fields) for entry_id, fields in entries]
        return lines, published

    def _key(self, log: Log) -> str:
        return self._keys.epoch_log if log == EPOCHS else self._keys.update_log(log)
