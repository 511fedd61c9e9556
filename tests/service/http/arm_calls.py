"""Calls of /admin/arms, and an app with low limits."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.service.apps import finished, served

NDJSON = {"Content-Type": "application/x-ndjson"}


@asynccontextmanager
async def small_catalogue(valkey_url: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with low limits. Afterwards, check that it left no file."""
    async with served(
        valkey_url, folder, max_catalogue=20, max_dimension=8, max_body_bytes=2_000, max_import_bytes=20_000
    ) as client:
        yield client
    assert os.listdir(folder) == []


def line(arm: Any, features: Any = (1.0, 2.0), **more: Any) -> bytes:
    return json.dumps({"id": arm, "features": features, **more}).encode()


def lines(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


async def send(client: httpx.AsyncClient, body: Any, mode: str = "upsert") -> dict[str, Any]:
    return await finished(
        client, await client.post("/admin/arms/import", params={"mode": mode}, content=body, headers=NDJSON)
    )


async def put(client: httpx.AsyncClient, arm: str, features: Any, **params: Any) -> httpx.Response:
    return await client.put(f"/admin/arms/{quote(arm, safe='')}", json={"features": features}, params=params)


async def listed(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cursor: dict[str, str] = {}
    while True:
        page = (await client.get("/admin/arms", params={"limit": 3, **cursor})).json()
        found |= {arm["id"]: arm["features"] for arm in page["arms"]}
        if page["cursor"] is None:
            assert page["count"] == len(found)
            assert list(found) == sorted(found)
            return found
        cursor = {"cursor": page["cursor"]}
