"""What differs between the engines and APIs that can be upstreams: one small adapter each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Capability = Literal["chat", "completions", "embeddings", "tools"]
ALL: frozenset[Capability] = frozenset({"chat", "completions", "embeddings", "tools"})

Translation = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Events of another API's stream, each as the chunks of OpenAI's that it stands for."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine's habits.

    ``probe``: the path asked to see whether it lives, below the host if it begins with ``/``, else below the
    API's address. ``renames``: fields of chat requests that it knows by another name. ``failures``: statuses
    below 500 with which it reports failures of its own. ``serves``: what it can at most. ``lacks``: fields
    that it cannot honour. ``tells_tokens``: it continues answers from their tokens (``resumable`` and
    ``resume``, as ours do). ``continues``: what it continues from the text so far: completions, or chats too
    (by ``continue_final_message``). ``any_name``: it has one model, whatever name that is asked by.
    ``tokenizes``: it has ``/tokenize`` for prompts and chats, as vLLM does, and takes token ids as a prompt.
    ``gauges``: of its ``/metrics``, whose sum is the requests that it has in hand, from whomever. ``holds``:
    the path that lists the models in its memory; others it has to load first.
    """

    probe: str
    renames: tuple[tuple[str, str], ...] = ()
    failures: frozenset[int] = frozenset()
    serves: frozenset[Capability] = ALL
    lacks: frozenset[str] = frozenset()
    tells_tokens: bool = False
    continues: Literal["nothing", "completions", "chats"] = "completions"
    any_name: bool = False
    tokenizes: bool = False
    gauges: tuple[str, ...] = ()
    holds: str = ""

    def headers(self, key: str | None) -> dict[str, str]:
        """How it wants to be told its API key."""
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def path(self, route: str) -> str:
        """Where it has ``route``, below its address."""
        return route

    def body(self, asked: dict[str, Any], model: str, route: str, *, most: int) -> bytes:
        """The request as this engine takes it, usage always asked for. ``most``: tokens of its answer.

        Raises InvalidRequestError for what cannot be put into its words.
        """
        body = {**asked, "model": model}
        if body.get("stream"):
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if route == "chat/completions":
            for ours, theirs in self.renames:
                if ours in body:
                    value = body.pop(ours)
                    body.setdefault(theirs, value)
        return orjson.dumps(body)

    def answer(self, answer: Any) -> Any:
        """A whole answer as OpenAI's; the same object where it is that already."""
        return answer

    def translation(self) -> Translation | None:
        """For the events of one stream; None if they are OpenAI's."""
        return None

    def failed(self, status: int) -> bool:
        """Whether an answer's status says that the engine failed, and another one may do better."""
        return status >= 500 or status in self.failures or status == 408

    def can(self, body: dict[str, Any]) -> bool:
        """Whether it honours all that a request asks."""
        return not any(asks(body, name) for name in self.lacks)


def asks(body: dict[str, Any], name: str) -> bool:
    """Whether a request's field ``name`` asks for something."""
    value = body.get(name)
    if name == "n":
        return value not in (None, 1)
    if name == "tools":
        return bool(value) and body.get("tool_choice") != "none"
    if name == "response_format":
        return value is not None and not (isinstance(value, dict) and value.get("type") == "text")
    return value is not None and value is not False and value not in ([], {}, "")


def kind_of(name: str) -> Kind:
    """The kind of that name in :data:`KINDS`."""
    if name == "anthropic":
        from headrace.gateway.anthropic import ANTHROPIC

        return ANTHROPIC
    return KINDS[name]


_MAX_TOKENS = (("max_completion_tokens", "max_tokens"),)  # where only the older name is known

_AS_VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting")

KINDS: dict[str, Kind] = {
    # Anything else that speaks OpenAI's API. It need not have a health route.
    "compatible": Kind(probe="models"),
    "headrace": Kind(
        probe="/health/readiness", tells_tokens=True, continues="chats", tokenizes=True, gauges=_AS_VLLM
    ),
    "vllm": Kind(probe="/health", continues="chats", tokenizes=True, gauges=_AS_VLLM),
    "sglang": Kind(
        probe="/health", continues="chats", gauges=("sglang:num_running_reqs", "sglang:num_queue_reqs")
    ),
    # 503 while it loads its model, in /health as in every route. A last message of the assistant's is
    # continued, by later versions if they are told so.
    "llamacpp": Kind(
        probe="/health",
        continues="chats",
        any_name=True,
        gauges=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ),
    # 424 is its "generation failed".
    "tgi": Kind(
        probe="/health",
        renames=_MAX_TOKENS,
        failures=frozenset({424}),
        continues="chats",
        any_name=True,
        gauges=("tgi_batch_current_size", "tgi_queue_size"),
    ),
    # trtllm-serve refuses fields that it does not know, continue_final_message among them.
    "trtllm": Kind(probe="/health"),
    # DeepSpeed-MII: streams tell no usage, messages hold only text.
    "deepspeed": Kind(
        probe="models",
        renames=_MAX_TOKENS,
        serves=frozenset({"chat", "completions"}),
        lacks=frozenset({"logprobs", "response_format", "logit_bias", "seed"}),
    ),
    # ONNX Runtime GenAI behind Foundry Local's server.
    "onnxruntime": Kind(
        probe="/openai/status", renames=_MAX_TOKENS, serves=frozenset({"chat"}), continues="nothing"
    ),
    # It puts the prompts of completions into the model's chat template, so nothing continues a text.
    "ollama": Kind(probe="/api/version", renames=_MAX_TOKENS, continues="nothing", holds="/api/ps"),
    # Its reasoning models refuse max_tokens, and all of its models take the newer name.
    "openai": Kind(probe="models", renames=(("max_tokens", "max_completion_tokens"),), continues="nothing"),
}


def told_error(body: bytes) -> tuple[str, str | None, str | None, str | None] | None:
    """Message, type, param and code of an error in any of the shapes that engines use; None if it is none."""
    try:
        return error_in(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None


_OVERFLOWS = re.compile(
    r"context[ _-]?(?:length|window|size)|prompt is too long|max_input_len|`inputs` (?:tokens|must)",
    re.IGNORECASE,
)


def is_overflow(message: str, code: str | None) -> bool:
    """Whether an engine's refusal says that prompt and answer do not fit into its context.

    OpenAI, and ours, have a code for that. vLLM, SGLang, llama.cpp and TensorRT-LLM speak of the model's
    context length, size or input length, Anthropic says that the prompt is too long, and TGI what its inputs
    must be.
    """
    return code == "context_length_exceeded" or _OVERFLOWS.search(message[:2000]) is not None


def error_in(told: Any) -> tuple[str, str | None, str | None, str | None] | None:
    """:func:`told_error`, of JSON that is read already.

    OpenAI writes ``{"error": {"message", "type", "param", "code"}}``, as do Anthropic, vLLM and Ollama;
    llama.cpp has a number as the code, TGI ``{"error": "text", "error_type": "validation"}``; SGLang,
    TensorRT-LLM, DeepSpeed-MII and older vLLM have the fields on the outside, and servers made with FastAPI
    ``{"detail": …}``.
    """
    if not isinstance(told, dict):
        return None
    error = told.get("error")
    if isinstance(error, str):
        return error, _text(told.get("error_type")), None, None
    if not isinstance(error, dict):
        error = told if told.get("object") == "error" else {"message": told.get("detail")}
    message = error.get("message")
    if not message:
        return None
    text = message if isinstance(message, str) else orjson.dumps(message).decode()
    return text, _text(error.get("type")), _text(error.get("param")), _text(error.get("code"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
