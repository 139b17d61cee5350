"""``/v1/embeddings``: vectors in OpenAI's shape."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.request import EngineOutput
from headrace.errors import HeadraceError, InvalidRequestError
from headrace.frontend.embedding import check_dimensions, vector_of
from headrace.server import requests
from headrace.server.requests import EmbeddingRequest
from headrace.server.responses import Embedding, EmbeddingList, EmbeddingUsage, encode
from headrace.server.routes import off_loop, read_request
from headrace.server.sender import sender_of
from headrace.server.state import ServerState
from headrace.web.http import while_connected
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend

_BYTES_A_VECTOR = 512  # of body that make as much work for the event loop as writing one vector


class EmbeddingRoutes:
    """The handler of the embeddings route over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def embeddings(self, http: Request) -> Response:
        """``POST /v1/embeddings``."""
        state, frontend = self._state, self._state.frontend
        size, request = await read_request(state, http, EmbeddingRequest)
        frontend.check_kind(embeds=True)
        check_dimensions(request.dimensions, frontend.client.architecture.hidden_size)
        texts = requests.prompts(request.input, "input")
        if len(texts) > state.settings.max_inputs:
            raise InvalidRequestError(
                f"`input`: {len(texts)} inputs given, at most {state.settings.max_inputs} are possible in "
                "one request",
                param="input",
            )
        sender, timeout_s = sender_of(
            http.headers,
            state.settings.gateway_credential,
            priority=request.priority,
            timeout_s=request.timeout_s,
        )
        line: dict[str, Any] = http.scope["state"]["log"]
        request_id = unique_id("embd")
        line.update(generation_id=request_id, inputs=len(texts))
        call = _Call(state, line, len(texts))

        async def work() -> bytes:
            limit = request.truncate_prompt_tokens
            ids = await off_loop(lambda: _encode(frontend, texts, limit), size)
            tokens = [len(each) for each in ids]
            call.prompt_tokens = sum(tokens)
            outputs = await frontend.embed(ids, request_id=request_id, sender=sender, timeout_s=timeout_s)
            call.outputs = outputs
            name = request.model or state.names[0]
            return await off_loop(
                lambda: _answer(frontend, request, outputs, name, tokens),
                len(outputs) * _BYTES_A_VECTOR,
            )

        state.enter()
        try:
            return Response(await while_connected(http.receive, work()), media_type="application/json")
        except HeadraceError as error:
            line["error"] = error.code
            state.note(error)
            raise
        finally:
            call.record()
            state.leave()


class _Call:
    """What metrics and the log line say of one request."""

    def __init__(self, state: ServerState, line: dict[str, Any], inputs: int) -> None:
        self.prompt_tokens = 0
        self.outputs: list[EngineOutput] = []
        self._state = state
        self._line = line
        self._inputs = inputs
        self._arrival = time.monotonic()

    def record(self) -> None:
        metrics = self._state.metrics
        self._line["prompt_tokens"] = self.prompt_tokens
        if not self.prompt_tokens:  # refused
            return
        metrics.e2e.observe(time.monotonic() - self._arrival)
        metrics.prompt_tokens.observe(self.prompt_tokens)
        failed = "error" if "error" in self._line else "abort"
        for _ in range(self._inputs - len(self.outputs)):
            metrics.finished(failed)
        for output in self.outputs:
            metrics.finished("stop")
            if output.first_scheduled_time is not None and output.first_token_time is not None:
                metrics.queue_time.observe(output.first_scheduled_time - self._arrival)
                metrics.prefill_time.observe(output.first_token_time - output.first_scheduled_time)


def _encode(frontend: Frontend, texts: list[str | list[int]], limit: int | None) -> list[list[int]]:
    out = []
    for index, text in enumerate(texts):
        try:
            out.append(frontend.encode_input(text, limit))
        except InvalidRequestError as error:
            error.param = "input" if error.param in (None, "prompt") else error.param
            if len(texts) > 1:
                error.message = f"`input[{index}]`: {error.message}"
            raise
    return out


def _answer(
    frontend: Frontend, request: EmbeddingRequest, outputs: list[EngineOutput], model: str, tokens: list[int]
) -> bytes:
    encoder = frontend.client.architecture.encoder
    assert encoder is not None
    write = _base64 if request.encoding_format == "base64" else _numbers
    data = [
        Embedding(index, write(vector_of(output, request.dimensions, normalize=encoder.normalize)))
        for index, output in enumerate(outputs)
    ]
    return encode(EmbeddingList(data, model, EmbeddingUsage(sum(tokens), sum(tokens), tokens)))


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def _numbers(vector: NDArray[np.float32]) -> msgspec.Raw:
    """The shortest decimals that read back as the same float32: half of what float64 would take."""
    return msgspec.Raw(orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY))
