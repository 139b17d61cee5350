"""headrace serve: one model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import gc
import json
import shlex
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import options
from headrace.cli.config_file import read_options
from headrace.engine.config import (
    DEFAULT_MODEL,
    CacheConfig,
    CheckpointConfig,
    ModelConfig,
    SchedulerConfig,
)

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend

_DEFAULTS = SchedulerConfig()
_CHECKPOINT = CheckpointConfig(path="")
_WRITE_TIMEOUT_S = 60.0  # a client that takes nothing for so long is given up


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """What the file says takes the place of defaults: the command line and the environment win over it."""
    if path is not None:
        context.default_map = read_options(path, serve, "headrace serve")
    return path


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=options.REFERENCE_HELP, show_default=True)
    ] = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; repeat it for several.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="HEADRACE_API_KEY", help="Ask clients for this key.", show_envvar=True),
    ] = None,
    gateway_credential: Annotated[
        str | None,
        typer.Option(
            envvar="HEADRACE_GATEWAY_CREDENTIAL",
            help="Whoever sends this may name tenants and priorities.",
            show_envvar=True,
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|default",
            help="Keys, quotas, caches and routes of this gateway.yaml in front; `default`: just a ledger.",
        ),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    swap_space: options.SwapSpace = 0.0,
    kv_tier_path: options.KVTierPath = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=4096, help="Sequences that run at once.")
    ] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step.")
    ] = _DEFAULTS.max_num_batched_tokens,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more get 503.")
    ] = _DEFAULTS.max_waiting,
    max_queue_time: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Longest wait before 503.")
    ] = _DEFAULTS.max_queue_time_s,
    priority_aging: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Wait that counts as a level of priority; 0: never."),
    ] = _DEFAULTS.priority_aging_s,
    tpot_target_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Time per output token that prompts must not spoil."),
    ] = None,
    max_body_size: Annotated[str, typer.Option(metavar="SIZE", help="Longest request body.")] = "8MiB",
    prefix_caching: Annotated[bool, typer.Option(help="Share the KV blocks of equal beginnings.")] = True,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Speculative decoding: {"method": "ngram"}, or {"method": "draft_model", "model": REF}.',
        ),
    ] = None,
    threads: options.Threads = 0,
    backend: options.Backend = "cpu",
    device: options.Device = "cpu",
    engine_process: Annotated[
        bool, typer.Option("--engine-process/--engine-thread", help="Where the engine runs.")
    ] = False,
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json", "mistral"] | None,
        typer.Option(help="How the model writes tool calls (default: as its chat template teaches)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes requests without a seed repeatable.")] = None,
    checkpoint_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Keep requests here: after a restart they go on."),
    ] = None,
    checkpoint_interval: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="What they have had is written so often.")
    ] = _CHECKPOINT.interval_s,
    checkpoint_grace: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Clients are waited for so long after a restart."),
    ] = _CHECKPOINT.grace_s,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time for running requests on SIGTERM.")
    ] = 30.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least level that is logged.")
    ] = "info",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML of these options by their long names; the command line wins over it.",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API. Logs are JSON lines on standard error."""
    del config  # read before the others were
    settings = ModelConfig(
        model=model,
        quantization=quantization,
        max_model_len=max_model_len,
        backend=backend,
        device=device,
        threads=threads,
        seed=seed,
    )
    cache = CacheConfig(
        kv_cache_memory_bytes=options.size_bytes(kv_cache_memory, "--kv-cache-memory"),
        enable_prefix_caching=prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
        swap_space=swap_space,
        kv_tier_path=kv_tier_path,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        max_queue_time_s=max_queue_time,
        priority_aging_s=priority_aging,
        tpot_target_ms=tpot_target_ms,
        speculative=options.speculative_config(speculative_config),
    )
    checkpoint = None
    if checkpoint_path is not None:
        checkpoint = CheckpointConfig(checkpoint_path, checkpoint_interval, checkpoint_grace)
    body_limit = options.size_bytes(max_body_size, "--max-body-size")

    # Nothing that loading makes is garbage: not looking for any saves a tenth of the start.
    gc.disable()
    from headrace.web.listen import listen

    names = tuple(served_model_name or (model,))
    front = None
    if gateway is not None:
        from headrace.cli.serve_gateway import gateway_in_front

        given = {
            "--api-key": api_key,
            "--gateway-credential": gateway_credential,
            "--checkpoint-path": checkpoint_path,
        }
        front = gateway_in_front(gateway, names, given, body_limit)
        gateway_credential = front.credential
    sock = listen(host, port, _WRITE_TIMEOUT_S)
    # Weights are read in a thread while this one imports the HTTP stack: together they set the cold start.
    loading = _start_loading(settings, cache, scheduler, checkpoint, engine_process)

    from headrace.engine.memory import trim_memory
    from headrace.observe.logs import logger
    from headrace.server.run import run
    from headrace.server.state import ServerSettings, ServerState

    state = ServerState(
        ServerSettings(
            served_model_names=names,
            api_key=api_key,
            gateway_credential=gateway_credential,
            max_body_bytes=body_limit,
            write_timeout_s=_WRITE_TIMEOUT_S,
            tool_call_parser=tool_call_parser,
        ),
        logger(level=log_level),
    )

    address = f"http://{_url_host(host)}:{sock.getsockname()[1]}"

    def announce(frontend: Frontend) -> None:
        gc.freeze()  # and later collections need not look at it either
        gc.enable()
        trim_memory()
        print(f"Serving {names[0]} on {address} (documentation: {address}/docs). Try:\n")
        with_key = api_key is not None if front is None else front.with_keys
        print(_curl(address, names[0], _route(frontend), with_key=with_key) + "\n", flush=True)
        if front is not None:
            front.announce()

    maker = None if front is None else front.maker(state.log)
    run(state, sock, loading, on_ready=announce, drain_timeout_s=drain_timeout, front=maker)


_EXAMPLES: dict[str, dict[str, object]] = {
    "chat/completions": {
        "stream": True,
        "max_tokens": 256,  # small models may not find an end
        "messages": [{"role": "user", "content": "Hello!"}],
    },
    "completions": {"stream": True, "prompt": "Once upon a time", "max_tokens": 64},
    "embeddings": {"input": "Hello!"},
}


def _route(frontend: Frontend) -> str:
    """What the model is for: encoders embed; base models complete, they do not chat."""
    if frontend.client.architecture.encoder is not None:
        return "embeddings"
    return "completions" if frontend.tokenizer.chat_template is None else "chat/completions"


def _curl(address: str, model: str, route: str, *, with_key: bool) -> str:
    """A command to paste that shows what the model does."""
    body = {"model": model, **_EXAMPLES[route]}
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if with_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -N {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"


def _url_host(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _start_loading(
    config: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    checkpoint: CheckpointConfig | None,
    process: bool,
) -> Future[Frontend]:
    future: Future[Frontend] = Future()

    def work() -> None:
        try:
            from headrace.cli.progress import download_progress
            from headrace.frontend.open import open_frontend

            with download_progress() as progress:
                frontend = open_frontend(
                    config, cache, scheduler, process=process, progress=progress, checkpoint=checkpoint
                )
            future.set_result(frontend)
        except BaseException as error:
            future.set_exception(error)

    # A daemon: when told to stop while loading, the process must not wait for it.
    threading.Thread(target=work, name="load-model", daemon=True).start()
    return future
