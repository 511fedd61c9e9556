"""Follows everything that a replica has to know: the update logs of all partitions and the epoch log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from metaban.store.client.connection import Store, as_text, block_arguments, entries_by_key, pipeline, reads_together
from metaban.store.client.scripts import load_script
from metaban.store.keys import NamespaceKeys
from metaban.store.users.records import UpdateEntry

#: The epoch log, or the update log of a partition.
Log: TypeAlias = int | Literal["epochs"]

EPOCHS: Final = "epochs"


@final
@dataclass(frozen=True, slots=True)
class NewLines:
    """What one read of several logs returned."""

    #: Id of the running server that answered, see `NamespaceLogs.server`.
    server: str
    #: Lines after the cursors of update logs.
    updates: dict[int, list[UpdateEntry]]
    #: Cursor of the newest epoch published after the given one.
    published: str | None


@final
class NamespaceLogs:
    """The logs of one namespace."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._server = load_script(redis, "server")

    @property
    def groups(self) -> list[list[Log]]:
        """All logs, those together that one `read` takes."""
        logs: list[Log] = [EPOCHS, *range(self._keys.partitions)]
        return [logs] if reads_together(self._redis) else [[log] for log in logs]

    async def server(self, logs: Sequence[Log]) -> str:
        """Id of the running server that has these logs.

        As long as it is the same, the logs were only continued. After a restart it is another one.
        """
        return as_text(await self._server.call([self._key(logs[0])], []))

    async def read(self, cursors: Mapping[Log, str], *, block_ms: int, count: int) -> NewLines:
        """Lines after the cursors, at most `count` of each log.

        Waits at most `block_ms`, and less than the socket time-out.
        """
        keys = {self._key(log): log for log in cursors}
        wait = block_arguments(self._redis, block_ms)
        lines = ("XREAD", "COUNT", count, *wait, "STREAMS", *keys, *cursors.values())
        # The id comes last: if another server takes over between the two commands, it is not that of the lines' server.
        reply, server = await pipeline(self._redis, [lines, self._server.inline([next(iter(keys))], [])])
        updates: dict[int, list[UpdateEntry]] = {}
        published: str | None = None
        for key, entries in entries_by_key(reply).items():
            log = keys[key]
            if log == EPOCHS:
                published = entries[-1][0]
            else:
                updates[log] = [UpdateEntry.decode(entry_id, fields) for entry_id, fields in entries]
        return NewLines(as_text(server), updates, published)

    def _key(self, log: Log) -> str:
        return self._keys.epoch_log if log == EPOCHS else self._keys.update_log(log)
