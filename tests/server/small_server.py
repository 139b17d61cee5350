"""A whole server in one process: the real frontend and engine, a simulated runner, a byte tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers

from headrace.engine.build import SimulatedSpec
from headrace.engine.client import EngineClient
from headrace.engine.config import CheckpointConfig, SchedulerConfig
from headrace.engine.journal import Journal
from headrace.engine.journaled_client import JournaledClient
from headrace.engine.saved import Identity
from headrace.engine.thread_client import ThreadClient
from headrace.frontend.frontend import Frontend
from headrace.frontend.tokenizer import Tokenizer
from headrace.server import ServerSettings, create_app

EOS = 256
MAX_MODEL_LEN = 512
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = _TEMPLATE, marks: Sequence[str] = ()) -> Tokenizer:
    """One token a byte (0 … 255, in the order of the byte-level alphabet), the end token 256, ``marks``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", *marks])
    return Tokenizer(backend, eos_token_ids=[EOS], chat_template=chat_template)


def small_frontend(
    *,
    step_s: float = 0.0,
    num_blocks: int = 256,
    max_model_len: int = MAX_MODEL_LEN,
    chat_template: str | None = _TEMPLATE,
    marks: Sequence[str] = (),
    checkpoint: CheckpointConfig | None = None,
    fingerprint: str = "small",
    **scheduler: Any,
) -> Frontend:
    """A frontend over an engine whose steps take ``step_s``; ``scheduler`` are fields of SchedulerConfig.

    ``checkpoint``: where its requests are kept; ``fingerprint``: of the process that keeps them.
    """
    spec = SimulatedSpec(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        scheduler=SchedulerConfig(**scheduler),
        vocab_size=EOS + 1 + len(marks),
        seed=0,
        step_s=step_s,
    )
    client: EngineClient = ThreadClient(spec.build())
    if checkpoint is not None:
        identity = Identity(fingerprint, "small", spec.vocab_size, exact=True)
        client = JournaledClient(client, Journal(checkpoint, identity), seed=0)
    return Frontend(client, byte_tokenizer(chat_template, marks), "small")


def small_app(frontend: Frontend, **settings: Any) -> FastAPI:
    """The application over ``frontend``."""
    return create_app(frontend, ServerSettings(**settings))


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of ``app`` without a network between."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://small") as client:
        yield client


def events(text: str) -> list[Any]:
    """The data of a stream's events, ``[DONE]`` as a string."""
    out: list[Any] = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                out.append(data if data == "[DONE]" else json.loads(data))
    return out


class RawClient:
    """One request straight to the application, so that a test can leave at any moment."""

    def __init__(
        self, app: Any, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._sent = False
        self.body = bytearray()
        self.status: int | None = None
        self.arrived = asyncio.Event()  # something of the answer's body
        self.stall: asyncio.Event | None = None  # when set, the client reads nothing until it is
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "scheme": "http",
            "server": ("small", 80),
            "client": ("test", 1),
            "root_path": "",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.stall is not None:
            await self.stall.wait()
        if message.get("body"):
            self.body += message["body"]
            self.arrived.set()


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def idle(frontend: Frontend) -> bool:
    """Nothing runs, waits or holds a block."""
    stats = frontend.client.stats()
    return (
        stats.num_running_seqs == 0
        and stats.num_waiting_seqs == 0
        and stats.num_free_blocks == stats.num_blocks
    )
