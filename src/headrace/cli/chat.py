"""headrace chat: talk to a model in the terminal, or pipe one prompt through it."""

from __future__ import annotations

import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import options
from headrace.engine.config import DEFAULT_MODEL, CacheConfig, ModelConfig
from headrace.errors import HeadraceError, InvalidRequestError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from headrace.engine.request import SamplingParams
    from headrace.frontend.frontend import Frontend

_HELP = """\
/help    show this
/clear   forget the conversation
/exit    leave (so does Ctrl-D)
Ctrl-C   stop the answer"""


def chat(
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="REF", help=options.REFERENCE_HELP)
    ] = DEFAULT_MODEL,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="Instructions for the whole conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 = always the likeliest.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep the likeliest share.")] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    max_model_len: options.MaxModelLen = None,
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    threads: options.Threads = 0,
    backend: options.Backend = "cpu",
    device: options.Device = "cpu",
) -> None:
    """Chat with a model. Piped input is one prompt, and only its answer is printed."""
    if raw and system is not None:
        raise InvalidRequestError("--system needs a chat template; leave out --raw")
    import asyncio

    from headrace.cli.progress import download_progress
    from headrace.engine.request import SamplingParams

    config = ModelConfig(
        model=model,
        quantization=quantization,
        max_model_len=max_model_len,
        backend=backend,
        device=device,
        threads=threads,
    )
    cache = CacheConfig(
        kv_cache_memory_bytes=options.size_bytes(kv_cache_memory, "--kv-cache-memory"),
        kv_cache_dtype=kv_cache_dtype,
    )
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    interactive = sys.stdin.isatty()
    prompt = "" if interactive else _read_prompt()
    with download_progress() as progress:
        frontend = options.load(config, cache, progress)
    try:
        with asyncio.Runner() as runner:
            conversation = Conversation(frontend, params, raw=raw, system=system)
            if interactive:
                _talk(runner, conversation)
            else:
                runner.run(conversation.answer(prompt, _write))
                _write("\n")
    finally:
        frontend.client.close()


def _read_prompt() -> str:
    text = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    if not text.strip():
        raise InvalidRequestError("the prompt on standard input is empty")
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass(slots=True)
class Timing:
    """How one answer came."""

    prompt_tokens: int = 0
    tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""

    def __str__(self) -> str:
        rate = f"{(self.tokens - 1) / self.decode_s:.1f} tokens/s" if self.tokens > 1 else "one token"
        cut = " · cut at --max-tokens" if self.finish_reason == "length" else ""
        return f"{self.tokens} tokens · {rate} · first after {self.ttft_s * 1000:.0f} ms{cut}"


class Conversation:
    """What was said so far. ``raw``: every prompt stands alone and is continued as it is."""

    def __init__(
        self, frontend: Frontend, params: SamplingParams, *, raw: bool = False, system: str | None = None
    ) -> None:
        self._frontend = frontend
        self._params = params
        self._raw = raw
        self._start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._count = 0

    def clear(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._start)

    async def answer(self, text: str, write: Callable[[str], None]) -> Timing:
        """Answer ``text``, piece by piece to ``write``. A failed turn is forgotten; a stopped one is kept."""
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._frontend.encode_prompt(text) if self._raw else self._frontend.encode_chat(asked)
        self._count += 1
        began = time.perf_counter()
        timing = Timing(prompt_tokens=len(prompt))
        stream = await self._frontend.start(prompt, self._params, request_id=f"chat-{self._count}")
        said: list[str] = []
        first = 0.0
        async with aclosing(stream) as outputs:
            try:
                async for output in (o async for batch in outputs for o in batch):
                    if output.finish_reason == "error":
                        raise HeadraceError(output.error_message or "generation failed")
                    now = time.perf_counter()
                    if output.token_ids and not timing.tokens:
                        first, timing.ttft_s = now, now - began
                    timing.tokens += len(output.token_ids)
                    timing.decode_s = now - first
                    timing.finish_reason = output.finish_reason or ""
                    said.append(output.text)
                    write(output.text)
            finally:
                if said and not self._raw:
                    self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return timing


def _talk(runner: asyncio.Runner, conversation: Conversation) -> None:
    import contextlib

    from rich.console import Console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    console = Console(highlight=False)
    console.print("[dim]/help shows what is possible; Ctrl-D leaves.[/dim]")
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
            console.print("[dim]forgotten[/dim]")
        elif text.startswith("/"):
            console.print(_HELP if text == "/help" else f"there is no {text}; /help shows what is possible")
        elif text:
            _turn(runner, conversation, console, text)


def _turn(runner: asyncio.Runner, conversation: Conversation, console: Any, text: str) -> None:
    def write(piece: str) -> None:
        console.out(piece, end="", highlight=False)

    try:
        timing = runner.run(conversation.answer(text, write))
        console.print(f"\n[dim]{timing}[/dim]")
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
    except HeadraceError as error:
        console.print(f"[red]{error.message}[/red]", markup=True)
