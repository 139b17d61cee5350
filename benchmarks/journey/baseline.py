"""What people start with: transformers behind a plain HTTP server, one request at a time.

``python -m benchmarks.journey.baseline FOLDER`` prints its address once the model is loaded. OpenAI's chat
route, streaming or not; ``model.generate`` does the work. Nothing here is slow on purpose: the model is
loaded as transformers recommends, all cores compute, and the stream goes out as tokens come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}


class Model:
    """A model, and whose turn it is."""

    tokenizer: Any
    network: Any

    def __init__(self, folder: str, dtype: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype])
        self.network = network.eval()
        self.free = asyncio.Lock()

    def prompt(self, messages: list[dict[str, Any]]) -> Any:
        """Token ids ``[1, n]`` of a conversation."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]


class Answer:
    """One greedy answer. ``tokens`` is known when ``pieces`` has ended."""

    def __init__(self, model: Model, body: dict[str, Any]) -> None:
        self.ids = model.prompt(body["messages"])
        self.tokens = 0
        self._model = model
        self._streamer: Any = transformers.TextIteratorStreamer(
            model.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        longest = int(body.get("max_tokens", 16))
        self._settings = {
            "max_new_tokens": longest,
            "min_new_tokens": longest if body.get("ignore_eos") else 1,
        }

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it is generated, once all requests before this one are answered."""
        loop = asyncio.get_running_loop()
        async with self._model.free:
            worker = threading.Thread(target=self._generate, daemon=True)
            worker.start()
            texts = iter(self._streamer)
            try:
                while (piece := await loop.run_in_executor(None, next, texts, None)) is not None:
                    yield piece
            finally:
                await loop.run_in_executor(None, worker.join)

    def usage(self) -> dict[str, int]:
        """As OpenAI counts."""
        return {"prompt_tokens": int(self.ids.shape[1]), "completion_tokens": self.tokens}

    @torch.inference_mode()
    def _generate(self) -> None:
        tokenizer = self._model.tokenizer
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        try:
            made = self._model.network.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                pad_token_id=pad,
                do_sample=False,
                streamer=self._streamer,
                **self._settings,
            )
            self.tokens = int(made.shape[1] - self.ids.shape[1])
        except BaseException:
            self._streamer.end()  # whoever reads must not wait for ever
            raise


def build(model: Model) -> FastAPI:
    """The server."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "baseline", "object": "model", "owned_by": "transformers"}]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: dict[str, Any]) -> Response:
        answer = Answer(model, body)
        if body.get("stream"):
            return StreamingResponse(_events(answer), media_type="text/event-stream")
        text = "".join([piece async for piece in answer.pieces()])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": answer.usage()})

    return app


async def _events(answer: Answer) -> AsyncIterator[str]:
    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        chunk = {"object": "chat.completion.chunk", "choices": choices, **more}
        return f"data: {json.dumps(chunk)}\n\n"

    async for piece in answer.pieces():
        if piece:
            yield event([{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
    yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield event([], usage=answer.usage())
    yield "data: [DONE]\n\n"


def main() -> None:
    """Load, say where, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="auto")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    app = build(Model(options.folder, options.dtype))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", options.port))
        print(f"Serving {options.folder} on http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


if __name__ == "__main__":
    main()
