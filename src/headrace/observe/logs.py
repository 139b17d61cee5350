"""Structured logs: one JSON object a line on stderr. Never the content of a message."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

import orjson
import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def logger(stream: TextIO | None = None, level: str = "info") -> FilteringBoundLogger:
    """A logger that writes JSON lines with time and level to ``stream`` (stderr)."""
    made: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(stream or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return made


def _to_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


class Forward(logging.Handler):
    """Sends a library's records (uvicorn's) to a structured logger, so that stderr stays JSON."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record at its own level, with its traceback if it has one."""
        self._log.log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )
