"""An OpenAI-compatible endpoint whose every answer the test makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[[dict[str, Any], str | None], tuple[int, bytes] | tuple[int, bytes, dict[str, str]]]


@contextmanager
def server(respond: Respond) -> Iterator[str]:
    """Its address; ``respond`` makes status, body and headers of a request's body and Authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer, *more = respond(body, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def completion(text: str | None, **more: object) -> bytes:
    """The body of a chat completion."""
    return json.dumps({"choices": [{"message": {"content": text}}], **more}).encode()
