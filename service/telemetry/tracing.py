"""OpenTelemetry traces, when METABAN_OTLP_ENDPOINT is set: a span per request, and one per stage.

The packages are an extra, imported only then. A thread sends spans from a bounded queue; when the collector is slow the
oldest are dropped, and no request waits. Attributes are method, route, status and namespace: no path, user or key.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Final, final

#: Length of the queue, and spans per export.
QUEUED_SPANS: Final = 4_096

BATCH_SPANS: Final = 512

SEND_EVERY_MS: Final = 1_000

#: Time limit of one export, and of the last one at shutdown.
SEND_TIMEOUT_S: Final = 5.0

STOP_TIMEOUT_S: Final = 2.0

#: Path added to an endpoint without one.
TRACES_PATH: Final = "/v1/traces"

TRACE_PARENT_HEADER: Final = "traceparent"

#: https://www.w3.org/TR/trace-context/: version, trace, parent, flags; later versions may add more.
TRACE_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

#: The span of the current request.
REQUEST_SPAN: ContextVar[RequestSpan | None] = ContextVar("request_span", default=None)


def can_trace() -> bool:
    """Whether the packages of the extra `otel` are installed."""
    try:
        return find_spec("opentelemetry.sdk.trace") is not None and (
            find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
        )
    except ModuleNotFoundError:
        return False


def trace_id_in(header: str | None) -> str | None:
    """The trace id of a traceparent header, if it is valid."""
    found = TRACE_PARENT.fullmatch(header) if header is not None else None
    return None if found is None else found.group(1)


@final
class RequestSpan:
    """The span of one request."""

    def __init__(self, tracer: Any, span: Any, context: Any) -> None:
        self._tracer = tracer
        self._span = span
        self._context = context

    @property
    def trace_id(self) -> str:
        """As a traceparent writes it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def child(self, name: str) -> Any:
        """A child span, started now."""
        return self._tracer.start_span(name, context=self._context)

    def finish(self, *, method: str, route: str, status: int, namespace: str | None) -> None:
        """Set the attributes and end the span."""
        self._span.update_name(route)
        self._span.set_attribute("http.request.method", method)
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if namespace is not None:
            self._span.set_attribute("metaban.namespace", namespace)
        if status >= 500:
            self._span.set_status(_error_status())
        self._span.end()


@final
class Tracing:
    """Creates the spans of one app, and sends them."""

    def __init__(self, endpoint: str, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = exporter = OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=SEND_TIMEOUT_S)
        self._provider = TracerProvider(
            # Neither global nor ended at exit: the app ends it.
            resource=Resource.create({"service.name": "metaban", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUED_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("metaban", version)
        # A warning for each failed attempt is too much; the error when it gives up is enough.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)

    def begin(self, trace_parent: str | None) -> RequestSpan:
        """Start the span of a request, in its caller's trace if there is one."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = None
        if trace_id_in(trace_parent) is not None:
            parent = TraceContextTextMapPropagator().extract({TRACE_PARENT_HEADER: trace_parent})
        span = self._tracer.start_span("unmatched", context=parent, kind=SpanKind.SERVER)
        return RequestSpan(self._tracer, span, set_span_in_context(span))

    def stop(self) -> None:
        """Send what is queued, with a time limit; blocks."""
        # The exporter's own time-outs are too long for a shutdown.
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(STOP_TIMEOUT_S)
        if last.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # stops its retries


@contextmanager
def request_span(span: RequestSpan | None) -> Iterator[None]:
    """Make stages inside this block children of the span."""
    token = REQUEST_SPAN.set(span)
    try:
        yield
    finally:
        REQUEST_SPAN.reset(token)


def end_child(child: Any, error: type[BaseException] | None) -> None:
    """End a child span; an error sets its status."""
    if error is not None:
        child.set_status(_error_status())
    child.end()


def _traces_url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base + TRACES_PATH if "/" not in base.partition("://")[2] else base


def _error_status() -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR)
