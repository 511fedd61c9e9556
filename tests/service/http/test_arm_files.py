"""/admin/arms/import and export: valid, invalid and hostile files."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import structlog
import uvicorn
from redis.asyncio import Redis

from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.telemetry.metrics import Metrics
from tests.service.apps import finished, served
from tests.service.engines import settings
from tests.service.http.arm_calls import NDJSON, line, lines, listed, put, send, small_catalogue
from tests.worker.workshop import soon


@pytest.fixture
async def client(redis: Redis, valkey_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with small_catalogue(valkey_url, tmp_path) as client:
        yield client


class TestFiles:
    async def test_import_and_export(self, client: httpx.AsyncClient) -> None:
        arms = {f"arm {n:02d} é": [n / 7, -1e-30, 1e30] for n in range(17)}
        body = lines(*(line(arm, features) for arm, features in arms.items()), b"", b"  \r")
        job = await send(client, body)
        assert (job["kind"], job["state"], job["error"]) == ("arms-import", "done", None)
        assert job["progress"] == {"doing": "arms", "done": 17, "total": 17}
        assert job["result"] == {"arms": 17, "written": 17, "unchanged": 0, "removed": 0}
        assert await listed(client) == arms

        exported = await client.get("/admin/arms/export")
        assert exported.headers["content-type"] == "application/x-ndjson"
        rows = [json.loads(row) for row in exported.content.splitlines()]
        assert {row["id"]: row["features"] for row in rows} == arms
        assert all(row.keys() == {"id", "features", "version", "updated_ms"} for row in rows)
        again = await send(client, exported.content, "replace")
        assert again["result"] == {"arms": 17, "written": 0, "unchanged": 17, "removed": 0}
        assert (await client.get("/admin/arms/export")).content == exported.content

    async def test_named_features_are_exported_unchanged(self, client: httpx.AsyncClient) -> None:
        features = {"price": 2.4, "kind": "tea", "vegan": True, "é": False}
        await send(client, line("tea", features))  # without a final line break
        [row] = (await client.get("/admin/arms/export")).content.splitlines()
        assert json.loads(row)["features"] == features
        assert json.loads(row)["features"]["vegan"] is True

    async def test_line_separators_are_escaped(self, client: httpx.AsyncClient) -> None:
        """Some readers end a line at characters that JSON need not escape."""
        features = {"a\u2028b\u2029": "c\x85d", "e\x0bf\x0c": "\x1c\x1d\x1e\r\n", "\x7f": "é"}
        await send(client, line("tea", features))
        async with client.stream("GET", "/admin/arms/export") as exported:
            [row] = [row async for row in exported.aiter_lines()]
        assert json.loads(row)["features"] == features
        again = await send(client, row.encode())
        assert again["result"]["unchanged"] == 1

    async def test_an_empty_export(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/admin/arms/export")
        assert (answer.status_code, answer.content) == (200, b"")

    async def test_an_export_of_many_pages(self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("metaban.service.engine.admin.arm_files.EXPORT_ARMS", 3)
        await send(client, lines(*(line(str(n)) for n in range(10))))
        rows = (await client.get("/admin/arms/export")).content.splitlines()
        assert [json.loads(row)["id"] for row in rows] == [str(n) for n in range(10)]

    async def test_upsert_keeps_and_replace_removes(self, client: httpx.AsyncClient) -> None:
        await send(client, lines(*(line(arm) for arm in "abcd")))
        job = await send(client, lines(line("c", [9, 9]), line("e"), line("d")))
        assert job["result"] == {"arms": 3, "written": 2, "unchanged": 1, "removed": 0}
        assert set(await listed(client)) == set("abcde")
        job = await send(client, lines(line("c", [9, 9]), line("x")), "replace")
        assert job["result"] == {"arms": 2, "written": 1, "unchanged": 1, "removed": 4}
        assert await listed(client) == {"c": [9, 9], "x": [1, 2]}

    async def test_a_full_catalogue_can_be_replaced(self, client: httpx.AsyncClient) -> None:
        await send(client, lines(*(line(f"old {n}") for n in range(20))))
        job = await send(client, lines(line("new")))
        assert (job["state"], "may have 20" in job["error"]) == ("failed", True)
        assert len(await listed(client)) == 20
        job = await send(client, lines(*(line(f"new {n}") for n in range(20))), "replace")
        assert job["state"] == "done"
        assert sorted(await listed(client)) == sorted(f"new {n}" for n in range(20))

    async def test_import_of_several_batches(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async with served(valkey_url, tmp_path) as client:
            first = lines(*(line(f"{n:04d}") for n in range(1_234)))
            assert (await send(client, first))["result"]["written"] == 1_234
            second = lines(*(line(f"{n:04d}", [3.0, 4.0]) for n in range(1_100, 1_300)))
            assert (await send(client, second, "replace"))["result"] == {
                "arms": 200, "written": 200, "unchanged": 0, "removed": 1_100,
            }  # fmt: skip
            page = (await client.get("/admin/arms?limit=1")).json()
            assert (page["arms"][0]["id"], page["count"]) == ("1100", 200)
            answer = await client.post("/recommend", json={"user_id": "u", "k": 100})
            assert len(answer.json()["items"]) == 100

    @pytest.mark.parametrize(
        ("bad", "told"),
        [
            (b"{", "not JSON"),
            (b"1", "must be a JSON object"),
            (b'{"id": "x"}', "features"),
            (b'{"id": "x", "features": [1, 2], "colour": 1}', "colour"),
            (b'{"id": "x", "features": [1, "2"]}', "features[1]"),
            (b'{"id": "x", "features": [1, NaN]}', "features[1]"),
            (b'{"id": "x", "features": [1, 1e999]}', "features[1]"),
            (b'{"id": "\xff", "features": [1, 2]}', "not JSON"),
            (b'{"id": "\\ud800", "features": [1, 2]}', "not JSON"),
            (b'{"id": "x\\n", "features": [1, 2]}', "control characters"),
            (b"\xef\xbb\xbf" + line("x"), "not JSON"),
            (b"[" * 1_900, "nested too deeply"),
            (b'{"a":' * 300 + b"1" + b"}" * 300, "nested too deeply"),
            (b'{"id": "x", "features": [' + b"9" * 1_000 + b", 1]}", "features[0]"),
            (b'{"id": "' + b"x" * 5_000 + b'", "features": [1, 2]}', "longer than 2000 bytes"),
            (b" " * 7_000, None),
            (line("x", [1, 2, 3]), "has 3 numbers where the first arm has 2"),
            (line("x", {"y": 1}), "must be a list in all lines"),
            (line("first"), "is also the id of line 1"),
            (line("x", [1.0] * 9), "at most 8"),
        ],
    )
    async def test_invalid_line_refuses_the_import(
        self, client: httpx.AsyncClient, bad: bytes, told: str | None
    ) -> None:
        await put(client, "here", [5, 5])
        with structlog.testing.capture_logs() as logs:
            job = await send(client, lines(line("first"), b"", bad, line("last")), "replace")
        if told is None:
            assert job["state"] == "done"
            return
        assert job["state"] == "failed"
        assert "line 3: " in job["error"]
        assert told in job["error"]
        assert "line 4" not in job["error"], "what follows a bad line is read as it should be"
        assert len(job["error"]) < 400
        assert job["error"] not in str(logs)
        assert await listed(client) == {"here": [5, 5]}

    async def test_first_invalid_lines_are_listed(self, client: httpx.AsyncClient) -> None:
        job = await send(client, lines(line("a"), *[b"x"] * 50))
        assert [f"line {n}: " in job["error"] for n in (2, 11, 12)] == [True, True, False]
        assert len(job["error"]) < 2_500
        job = await send(client, lines(*[line("a" * 300, {"n" * 300: None})] * 6))
        assert len(job["error"]) < 2_500

    async def test_too_many_arms_are_refused(self, client: httpx.AsyncClient) -> None:
        job = await send(client, lines(*(line(str(n)) for n in range(30))), "replace")
        assert "line 21: " in job["error"]
        assert "METABAN_MAX_CATALOGUE" in job["error"]
        assert await listed(client) == {}

    @pytest.mark.parametrize("mode", ["upsert", "replace"])
    async def test_an_empty_file_removes_nothing(self, client: httpx.AsyncClient, mode: str) -> None:
        await put(client, "a", [1])
        for body in (b"", b"\n \n"):
            assert "no arms" in (await send(client, body, mode))["error"]
        assert await listed(client) == {"a": [1]}

    async def test_lines_must_fit_the_layout(self, client: httpx.AsyncClient) -> None:
        arms = [{"id": "a", "features": [1, 2, 3]}]
        await client.post("/recommend", json={"user_id": "u", "arms": arms})
        job = await send(client, lines(line("x", [1, 2, 3]), line("y", [1, 2])))
        assert job["error"].startswith("line 2: features: this namespace takes 3 numbers, not 2")
        assert await listed(client) == {}

    async def test_media_types(self, client: httpx.AsyncClient) -> None:
        for kind in ("application/json", "text/plain", None):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = await client.post("/admin/arms/import", content=line("a"), headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (415, "/problems/unsupported-media")
        packed = await client.post(
            "/admin/arms/import", content=line("a"), headers={**NDJSON, "Content-Encoding": "gzip"}
        )
        assert packed.status_code == 415
        assert (await client.post("/admin/arms/import?mode=merge", content=b"", headers=NDJSON)).status_code == 422

    async def test_imports_have_their_own_size_limit(self, client: httpx.AsyncClient) -> None:
        sent = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(100):
                sent += 1_000
                yield b" " * 999 + b"\n"

        for body in (b" " * 20_001, chunks()):
            answer = await client.post("/admin/arms/import", content=body, headers=NDJSON)
            assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")
            assert "METABAN_MAX_IMPORT_BYTES" in answer.json()["detail"]
        assert sent <= 22_000, "it went on reading past the cap"
        longer = await client.put("/admin/arms/import", json={"features": ["x" * 3_000]})
        assert (longer.status_code, "METABAN_MAX_BODY_BYTES" in longer.text) == (413, True), (
            "this one is held in memory"
        )
        # Longer than the limit of other bodies.
        assert (await send(client, lines(line("a")) + b"\n" * 15_000))["state"] == "done"

    async def test_default_size_limit_of_a_streamed_import(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(70):
                assert os.listdir(tmp_path) == [], "the file has no name"
                yield b"\n" * 1_048_576

        async with served(valkey_url, tmp_path) as client:
            answer = await client.post("/admin/arms/import", content=chunks(), headers=NDJSON)
        assert answer.status_code == 413

    async def test_one_import_at_a_time(self, client: httpx.AsyncClient) -> None:
        go_on = asyncio.Event()
        begun = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield lines(line("a"))
            begun.set()
            await go_on.wait()
            yield lines(line("b"))

        first = asyncio.create_task(client.post("/admin/arms/import", content=slow(), headers=NDJSON))
        await begun.wait()

        second = await client.post("/admin/arms/import", content=line("c"), headers=NDJSON)
        assert (second.status_code, second.json()["type"]) == (409, "/problems/job-running")
        go_on.set()
        assert (await finished(client, await first))["state"] == "done"
        assert set(await listed(client)) == {"a", "b"}
        assert (await send(client, line("d")))["state"] == "done"

    async def test_full_disk(self, redis: Redis, valkey_url: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        async with served(valkey_url, tmp_path / "file" / "data") as client:
            answer = await client.post("/admin/arms/import", content=line("a"), headers=NDJSON)
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
            assert await listed(client) == {}

    async def test_silent_client_is_cut_off(self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("metaban.service.engine.admin.arm_files.SILENCE_S", 0.05)

        async def silent() -> AsyncIterator[bytes]:
            yield lines(line("a"))
            await asyncio.sleep(30)

        answer = await client.post("/admin/arms/import", content=silent(), headers=NDJSON)
        assert (answer.status_code, answer.json()["type"]) == (408, "/problems/body-timeout")
        assert (await send(client, line("b")))["state"] == "done"


@pytest.mark.parametrize("how", ["cut off", "cut off in a chunk"])
async def test_disconnected_client(redis: Redis, valkey_url: str, tmp_path: Path, how: str) -> None:
    """Over a real connection: nothing is imported, no file remains, and the next import is served."""
    configured = settings(data_dir=tmp_path)
    metrics = Metrics()
    app = create_app(configured, EngineRegistry(configured, valkey_url, metrics), metrics)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    running = asyncio.create_task(server.serve())

    async def has_started() -> bool:
        return server.started

    try:
        await soon(has_started)
        port = server.servers[0].sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /admin/arms/import?mode=replace HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        body = lines(line("a")) * 50_000
        if how == "cut off":
            head += f"Content-Length: {len(body) + 1_000}\r\n\r\n"
            writer.write(head.encode() + body)
        else:
            head += "Transfer-Encoding: chunked\r\n\r\n"
            writer.write(head.encode() + f"{len(body) + 1_000:x}\r\n".encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            taken: list[httpx.Response] = []

            async def free() -> bool:
                answer = await client.post("/admin/arms/import", content=line("b"), headers=NDJSON)
                taken.append(answer)
                return answer.status_code == 202

            await soon(free)
            # Only then: the count of a list read during an import may differ from its length.
            assert (await finished(client, taken[-1]))["state"] == "done"
            assert await listed(client) == {"b": [1, 2]}
        assert os.listdir(tmp_path) == []
    finally:
        server.should_exit = True
        await running


async def test_stop_cancels_an_import(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with served(valkey_url, tmp_path, max_catalogue=100_000, max_import_bytes=20_000_000) as client:
        body = lines(*(line(str(n)) for n in range(100_000)))
        assert (await client.post("/admin/arms/import", content=body, headers=NDJSON)).status_code == 202
    assert os.listdir(tmp_path) == []
