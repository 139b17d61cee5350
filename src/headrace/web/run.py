"""uvicorn as all our programs run it: our connections, our logs, our signals."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from headrace.observe.logs import Forward
from headrace.web.connection import Bounds, Connection

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def uvicorn_config(
    app: ASGIApp, bounds: Bounds, log: FilteringBoundLogger, *, last_words_s: float
) -> uvicorn.Config:
    """Settings of a server of ``app``; what libraries and our own rooms log goes to ``log``.

    ``last_words_s``: for aborted streams to send their error event and close when the server ends.
    """
    forward = Forward(log)
    for name in ("uvicorn.error", "asyncio", "headrace"):
        logging.getLogger(name).handlers = [forward]
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).propagate = False
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, bounds),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(last_words_s),
    )


class Server(uvicorn.Server):
    """uvicorn's server, which leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
