"""The stages of a request: timed for Prometheus, and spans of its trace when there is one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, final

from prometheus_client import Histogram

from service.tracing import begin_child, end_child


@final
class Stage:
    """`with` one of these, once."""

    __slots__ = ("_began_s", "_name", "_seconds", "_span")

    def __init__(self, name: str, seconds: Histogram) -> None:
        self._name = name
        self._seconds = seconds

    def __enter__(self) -> None:
        self._span: Any = begin_child(self._name)
        self._began_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds.observe(time.perf_counter() - self._began_s)
        if self._span is not None:
            end_child(self._span, kind)
