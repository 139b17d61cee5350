"""HTTP over one frontend: OpenAI-compatible routes, SSE, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.server.app import create_app
    from headrace.server.state import ServerSettings

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use: FastAPI is slow to import."""
    if name == "create_app":
        from headrace.server.app import create_app

        return create_app
    if name == "ServerSettings":
        from headrace.server.state import ServerSettings

        return ServerSettings
    raise AttributeError(f"module 'headrace.server' has no attribute {name!r}")
