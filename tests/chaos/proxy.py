"""A proxy between two processes that delays, drops and cuts connections."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

CHUNK_BYTES = 65_536


@final
@dataclass
class NetworkFaults:
    """Faults of the proxy; may be changed at any time."""

    #: Delay of every chunk in both directions, in seconds.
    delay_s: float = 0.0
    #: Probability per chunk of replies that the connection is cut instead; the requests were executed.
    reply_lost: float = 0.0
    #: Probability per chunk in either direction that the connection is cut before it is forwarded.
    cut: float = 0.0
    #: Chunks are dropped silently.
    dropped: bool = False


@final
class Proxy:
    """Listens on a unix socket and forwards to another socket or port, with the faults of `NetworkFaults`."""

    def __init__(self, socket: Path, upstream: Path | tuple[str, int], rng: random.Random) -> None:
        self.socket = socket
        self.faults = NetworkFaults()
        self.cuts = 0
        self._upstream = upstream
        self._rng = rng
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_unix_server(self._accept, self.socket, backlog=1_024)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut_all(self) -> None:
        """Cut all open connections."""
        self._loop.call_soon_threadsafe(self._cut, list(self._writers))

    async def _close(self) -> None:
        self._server.close()
        self._cut(list(self._writers))
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self, writers: list[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._writers.update(pair)
        ways = [
            asyncio.create_task(self._pass_on(reader, far_writer, replies=False)),
            asyncio.create_task(self._pass_on(far_reader, writer, replies=True)),
        ]
        # When one direction ends, end the other too.
        with suppress(asyncio.CancelledError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._cut(list(pair))
        self._writers.difference_update(pair)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._upstream, Path):
            return await asyncio.open_unix_connection(self._upstream)
        return await asyncio.open_connection(*self._upstream)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                faults = self.faults
                if faults.delay_s:
                    await asyncio.sleep(faults.delay_s)
                if self._rng.random() < (faults.cut + faults.reply_lost if replies else faults.cut):
                    self.cuts += 1
                    break
                if not faults.dropped:
                    writer.write(chunk)
                    await writer.drain()
