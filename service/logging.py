"""Logs: one line an event, each with the request id, as JSON or for people; never a body, never a key.

Everything goes through the root logger of the standard library to stderr: our own lines, those of the store and the
worker, and uvicorn's. Stack traces show no local variables, since these hold what users sent.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Final, Literal
from uuid import uuid4

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

REQUEST_ID_HEADER: Final = "X-Request-ID"
REQUEST_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def configure_logging(
    log_format: Literal["json", "console"] = "console",
    level: Literal["debug", "info", "warning", "error"] = "info",
) -> None:
    """Set up logging for this process; the last call counts."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.stdlib.ExtraAdder(allow=()),
    ]
    renderers: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.PositionalArgumentsFormatter()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    # Every request has a line of ours, with its id and its time; "Started server process" tells nobody anything.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def begin_request(offered: str | None) -> str:
    """Start the context of one request: the id it was offered when that is harmless, or a new one."""
    chosen = offered if offered is not None and REQUEST_ID_PATTERN.fullmatch(offered) else uuid4().hex
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=chosen)
    return chosen


def request_id() -> str:
    """The id of the request this runs for; empty outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))
