"""Logging to stderr: one line per event, with the request id, as JSON or for people; never a body, never a key.

Everything goes through the root logger, uvicorn's lines too. Stack traces show no local variables: these hold what
users sent.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final, Literal

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

REQUEST_ID_HEADER: Final = "X-Request-ID"


def configure_logging(
    log_format: Literal["json", "console"] = "console",
    level: Literal["debug", "info", "warning", "error"] = "info",
) -> None:
    """Set up logging for this process; may be called again."""
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
    # Every request has a line of ours. uvicorn's warnings are about requests that are not HTTP: anyone could fill the
    # log with them.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def request_id() -> str:
    """The id of the current request; empty outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))
