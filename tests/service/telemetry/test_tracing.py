"""Traces, sent to a small OTLP collector that decodes them."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.http.auth import FreshKey
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import STAGES, Metrics
from metaban.service.telemetry.tracing import trace_id_in
from tests.service.scripted_engine import ScriptedEngine, scripted_app

ROOT = Path(__file__).resolve().parents[3]
ASK = {"user_id": "private-user", "arms": [{"id": "private-arm", "features": [1, 2]}]}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
FROM_CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """An OTLP collector over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.append(gzip.decompress(body) if "gzip" in self.headers.values() else body)
                collector.paths.add(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.paths: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "metaban"
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


@asynccontextmanager
async def real_service(valkey_url: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app around a real engine."""
    chosen, metrics = Settings(partitions=2, namespace="shop", **settings), Metrics()
    app = create_app(chosen, EngineRegistry(chosen, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client


async def test_spans_of_a_request_and_its_stages(redis: Any, valkey_url: str, collector: Collector) -> None:
    key = FreshKey.generate()
    async with real_service(valkey_url, client_keys={key.digest}, otlp_endpoint=collector.url) as client:
        client.headers["X-API-Key"] = key.key
        answer = await client.post("/recommend", json=ASK, headers=FROM_CALLER)
        assert answer.status_code == 200
        assert (await client.get("/made-up/private-path")).status_code == 404
        assert (await client.get("/health/live")).status_code == 200
    assert collector.paths == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans()}
    passed = {stage for stage in STAGES if stage != "fusion"}  # the requests have no profile
    assert set(spans) == {"/recommend", "unmatched", *passed}
    request = spans["/recommend"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/recommend",
        "http.response.status_code": 200,
        "metaban.namespace": "shop",
    }
    for stage in passed:
        assert spans[stage].trace_id.hex() == TRACE
        assert spans[stage].parent_span_id == request.span_id
        assert request.start_time_unix_nano <= spans[stage].start_time_unix_nano
        assert spans[stage].end_time_unix_nano <= request.end_time_unix_nano
    assert spans["unmatched"].trace_id.hex() != TRACE
    sent = b"".join(collector.bodies)
    for secret in (b"private", key.key.encode(), key.digest[:8].encode()):
        assert secret not in sent


async def test_failed_spans_are_marked(collector: Collector) -> None:
    engine = ScriptedEngine()
    engine.error = RuntimeError("private")
    with structlog.testing.capture_logs():
        async with scripted_app(engine, otlp_endpoint=f"{collector.url}/v1/traces") as client:
            assert (await client.post("/recommend", json=ASK)).status_code == 500
            assert (await client.post("/recommend", json={})).status_code == 422
    assert collector.paths == {"/v1/traces"}
    requests = {attributes(span)["http.response.status_code"]: span for span in collector.spans() if span.attributes}
    assert requests[500].status.code == 2
    assert requests[422].status.code == 0
    assert b"private" not in b"".join(collector.bodies)


async def test_the_caller_decides_whether_a_trace_is_kept(collector: Collector) -> None:
    async with scripted_app(ScriptedEngine(), otlp_endpoint=collector.url) as client:
        await client.post("/recommend", json=ASK, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await client.post("/feedback", json={"decision_id": "d", "reward": 1}, headers={"traceparent": "nonsense"})
    assert {span.name for span in collector.spans()} == {"/feedback"}


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://127.0.0.1:{silent}"], ids=["away", "silent"])
async def test_silent_collector_does_not_delay_requests(endpoint: str) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, scripted_app(ScriptedEngine(), otlp_endpoint=endpoint.format(silent=port)) as client:
        statuses = [(await client.post("/recommend", json=ASK)).status_code for _ in range(200)]
    assert statuses == [200] * 200


@pytest.mark.parametrize("traced", [True, False])
async def test_log_lines_name_the_trace(collector: Collector, traced: bool) -> None:
    engine = ScriptedEngine()
    engine.error = RuntimeError("broken")
    settings = {"otlp_endpoint": collector.url} if traced else {}
    processors = [structlog.contextvars.merge_contextvars]
    with structlog.testing.capture_logs(processors=processors) as logs:
        async with scripted_app(engine, **settings) as client:
            await client.post("/recommend", json=ASK, headers=FROM_CALLER)
            await client.post("/recommend", json=ASK)
    lines = [line for line in logs if line["event"] == "request"]
    assert lines[0]["trace_id"] == TRACE
    assert next(line["trace_id"] for line in logs if line["event"] == "unexpected_error") == TRACE
    assert ("trace_id" in lines[1]) == traced
    assert lines[1].get("trace_id") != TRACE


@pytest.mark.parametrize(
    "header",
    [
        None, "", "nonsense", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-01\n",
    ],
)  # fmt: skip
def test_invalid_traceparent_is_ignored(header: str | None) -> None:
    assert trace_id_in(header) is None


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PATH": "", **environment}
    )


def test_opentelemetry_is_imported_only_when_enabled() -> None:
    code = """
import sys
from metaban.service.http.app import create_app
from metaban.service.settings.environment import load_settings
create_app(load_settings(), None)
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))])
"""
    done = run(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_packages_are_a_settings_error() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from metaban.service.settings.environment import SettingsError, load_settings
try:
    load_settings()
except SettingsError as error:
    print(error)
"""
    done = run(code, METABAN_OTLP_ENDPOINT="http://user:password@127.0.0.1:4318")
    assert done.stdout.startswith("METABAN_OTLP_ENDPOINT: "), done.stderr
    assert "pip install '.[otel]'" in done.stdout
    assert "password" not in done.stdout
    assert run(code).stdout == ""
