"""Hostile clients, run as `python -m metaban.bench.serving.attacks NAME URL`, with the key in METABAN_KEY.

An attack runs until SIGTERM, at a rate that leaves CPU time to the service, then prints the outcomes of its requests as
JSON. All but the wrong-keys attack have a valid key: without one, requests are refused before their body is read.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final, final
from urllib.parse import urlsplit

from metaban.service.process.server import raise_descriptor_limit

MIB: Final = 2**20
PIECE: Final = b" " * 65_536
LONG_BODY_BYTES: Final = 64 * MIB
DEPTH: Final = 20_000
TRICKLING: Final = 500

#: More than the service accepts from all clients together.
IDLE_SOCKETS: Final = 2_300

#: Longest wait for a response.
PATIENCE_S: Final = 30.0


@final
class Attacker:
    """Sends requests and counts outcomes: the status, `closed` (no response) or `silent` (time-out)."""

    def __init__(self, url: str, key: str) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._key = key
        self.outcomes: Counter[str] = Counter()

    def headers(self, *lines: str, key: str | None = None, path: str = "/recommend") -> bytes:
        """Request line and headers without the final empty line; with the valid key unless another is given."""
        first = [f"POST {path} HTTP/1.1", f"Host: {self._host}", "Content-Type: application/json"]
        return "\r\n".join([*first, f"X-API-Key: {key or self._key}", *lines, ""]).encode()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection that is closed on exit."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def send_all(self, *parts: bytes | Iterator[bytes]) -> None:
        """Send a request on its own connection until it is answered or cut off; count the outcome."""
        try:
            async with self.connection() as (reader, writer), asyncio.timeout(PATIENCE_S):
                answer = asyncio.create_task(read_status(reader))
                try:
                    for part in parts:
                        for piece in (part,) if isinstance(part, bytes) else part:
                            writer.write(piece)
                            await writer.drain()
                except ConnectionError:
                    pass  # the service may have answered before it closed
                self.outcomes[await answer] += 1
        except TimeoutError:
            self.outcomes["silent"] += 1
        except OSError:
            self.outcomes["closed"] += 1


async def read_status(reader: asyncio.StreamReader) -> str:
    """The status of a response, after reading all of it; `closed` when there is none."""
    try:
        headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        await reader.readexactly(int(headers.partition("content-length: ")[2].split("\r\n")[0] or 0))
        return headers.split()[1]
    except (ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError):
        return "closed"


async def long_bodies(attacker: Attacker) -> None:
    """Bodies of 64 MB with their Content-Length."""
    while True:
        headers = attacker.headers(f"Content-Length: {LONG_BODY_BYTES}")
        await attacker.send_all(headers + b"\r\n", (PIECE for _ in range(LONG_BODY_BYTES // len(PIECE))))
        await asyncio.sleep(0.25)


async def chunked_bodies(attacker: Attacker) -> None:
    """Bodies of 64 MB in chunks, so that their length is not known in advance."""
    chunk = b"%x\r\n" % len(PIECE) + PIECE + b"\r\n"
    while True:
        headers = attacker.headers("Transfer-Encoding: chunked")
        await attacker.send_all(headers + b"\r\n", (chunk for _ in range(LONG_BODY_BYTES // len(PIECE))), b"0\r\n\r\n")
        await asyncio.sleep(0.25)


async def deep_json(attacker: Attacker) -> None:
    """Bodies of 20,000 nested lists."""
    body = b"[" * DEPTH + b"]" * DEPTH
    while True:
        await attacker.send_all(attacker.headers(f"Content-Length: {len(body)}", "Connection: close") + b"\r\n" + body)
        await asyncio.sleep(0.05)


async def trickle(attacker: Attacker) -> None:
    """500 connections that send one byte a second; half never finish their headers, half never finish their body."""

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.004)  # opened gradually
        while True:
            try:
                async with attacker.connection() as (reader, writer):
                    writer.write(attacker.headers("Content-Length: 100000") + (b"\r\n" if number % 2 else b"X-Slow: "))
                    answer = asyncio.create_task(read_status(reader))
                    while not answer.done():
                        writer.write(b" ")
                        await asyncio.wait([answer], timeout=1.0)
                    attacker.outcomes[answer.result()] += 1
            except OSError:
                attacker.outcomes["closed"] += 1
            await asyncio.sleep(0.5)

    await asyncio.gather(*map(one, range(TRICKLING)))


async def wrong_keys(attacker: Attacker) -> None:
    """200 wrong keys a second."""
    number = 0
    while True:
        async with attacker.connection() as (reader, writer):
            for _ in range(200):
                number += 1
                writer.write(attacker.headers("Content-Length: 2", key=f"guess-{number}") + b"\r\n{}")
                outcome = await read_status(reader)
                attacker.outcomes[outcome] += 1
                if outcome == "closed":
                    break
                await asyncio.sleep(0.005)


async def header_floods(attacker: Attacker) -> None:
    """Endless request headers: many short ones, then a single long one."""
    while True:
        await attacker.send_all(attacker.headers(), (b"x-a: b\r\n" * 1_000 for _ in range(1_000)))
        await asyncio.sleep(0.05)
        await attacker.send_all(attacker.headers() + b"x-long: ", (PIECE.replace(b" ", b"b") for _ in range(100)))
        await asyncio.sleep(0.05)


async def one_byte_chunks(attacker: Attacker) -> None:
    """Bodies in chunks of one byte."""
    chunks = b"1\r\n \r\n" * 10_000
    while True:
        headers = attacker.headers("Transfer-Encoding: chunked", "Connection: close")
        await attacker.send_all(headers + b"\r\n", (chunks for _ in range(50)), b"0\r\n\r\n")
        await asyncio.sleep(0.1)


async def pipelines(attacker: Attacker) -> None:
    """2,000 pipelined requests on one connection."""
    request = attacker.headers("Content-Length: 2") + b"\r\n{}"
    while True:
        try:
            async with attacker.connection() as (reader, writer):
                writer.write(request * 2_000)
                while (outcome := await read_status(reader)) != "closed":
                    attacker.outcomes[outcome] += 1
                attacker.outcomes[outcome] += 1
        except OSError:
            attacker.outcomes["closed"] += 1
        await asyncio.sleep(0.25)


async def never_read(attacker: Attacker) -> None:
    """50 connections that send requests and never read a response."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nX-API-Key: " + attacker._key.encode() + b"\r\n\r\n"

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.02)
        while True:
            try:
                async with attacker.connection() as (reader, writer):
                    reader._transport.pause_reading()  # type: ignore[attr-defined]
                    for _ in range(2_000):
                        writer.write(request)
                        await asyncio.sleep(1.0)
            except OSError:
                attacker.outcomes["closed"] += 1

    await asyncio.gather(*map(one, range(50)))


async def idle_sockets(attacker: Attacker) -> None:
    """2,300 connections that send nothing; one that is closed is opened again."""

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.0005)  # opened gradually
        while True:
            try:
                async with attacker.connection() as (reader, _):
                    await reader.read()
            except OSError:
                pass
            attacker.outcomes["closed"] += 1
            await asyncio.sleep(1.0)

    await asyncio.gather(*map(one, range(IDLE_SOCKETS)))


#: By name: the attack, and the outcomes it may have.
ATTACKS: Final[dict[str, tuple[Callable[[Attacker], Awaitable[None]], frozenset[str]]]] = {
    "64 MB bodies": (long_bodies, frozenset({"413"})),
    "64 MB chunked": (chunked_bodies, frozenset({"413"})),
    "20,000-deep JSON": (deep_json, frozenset({"422"})),
    "500 trickling": (trickle, frozenset({"408", "closed"})),
    "wrong keys": (wrong_keys, frozenset({"401", "429"})),
    "header floods": (header_floods, frozenset({"431"})),
    "crumbs": (one_byte_chunks, frozenset({"400", "413"})),
    "pipelines": (pipelines, frozenset({"422", "closed"})),
    "deaf readers": (never_read, frozenset({"closed"})),
    "2,300 idle sockets": (idle_sockets, frozenset({"closed"})),
}


async def _attack(name: str, url: str, key: str) -> Counter[str]:
    attacker = Attacker(url, key)
    task = asyncio.ensure_future(ATTACKS[name][0](attacker))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    # Tells the parent that the interpreter has started, so that its start is not measured.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with suppress(asyncio.CancelledError):
        await task
    return attacker.outcomes


def main() -> None:
    """Run an attack until a signal stops it."""
    name, url = sys.argv[1:]
    raise_descriptor_limit()
    outcomes = asyncio.run(_attack(name, url, os.environ["METABAN_KEY"]))
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main()
