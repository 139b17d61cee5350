"""What clients may ask: the bodies of the OpenAI routes, as msgspec structs.

The structs give types, ranges and the OpenAPI schema; :func:`decode` turns every way a body can be wrong into
one InvalidRequestError that names the field.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.engine.request import StructuredOutputs
from headrace.errors import InvalidRequestError
from headrace.frontend.beam_search import MAX_BEAMS
from headrace.server.structured import ResponseFormat, structured_outputs
from headrace.server.tools import Tool, ToolChoice

MAX_STOP_STRINGS = 16
_INT32 = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Unsupported = Annotated[Any, Meta(description="Not supported: anything that asks for it is refused.")]
Ignored = Annotated[Any, Meta(description="Accepted and ignored: it would not change the answer.")]

_TEMPLATE_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text is supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. ``developer`` counts as ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: a last chunk without choices carries the usage; ``continuous_usage_stats`` (vLLM's):
    and all others the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class Resume(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer that broke off elsewhere: its tokens, and the ``system_fingerprint`` of their server."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    system_fingerprint: str


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every request has. Null counts as absent everywhere."""

    model: str | None = None


class GenerationRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """What both generation routes share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    # extensions, named as in vLLM
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    use_beam_search: bool | None = None
    num_beams: Annotated[int, Meta(ge=1, le=MAX_BEAMS)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=_INT32)] | None = None  # ours
    # ours: chunks carry `token_ids`, with which `resume` has the answer go on at another server
    resumable: bool | None = None
    resume: Resume | None = None
    # what the answer looks like; only one of these
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # no effect on the answer
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Ignored = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``. ``prompt``: text, token ids, or a list of either."""

    prompt: str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Unsupported = None


class EmbeddingRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/embeddings``. ``input``: text, token ids, or a list of either."""

    input: str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=_INT32)] | None = None
    # extensions, named as in vLLM
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=_INT32)] | None = None  # ours
    # no effect on the answer
    user: Ignored = None


R = TypeVar("R", bound=Body)

_PATH = re.compile(r" - at `(key` in `)?\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_ENUMS = {
    ".role": "system, developer, user, assistant or tool",
    "response_format.type": "text, json_object or json_schema",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
    "tool_choice.type": "function",
    "].type": "function",
}
_JSON_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode(kind: type[R], body: bytes) -> R:
    """``body`` as a checked ``kind``. Raises InvalidRequestError naming the field that is wrong."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(kind, str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON in UTF-8: {error}") from None
    if isinstance(request, GenerationRequest):
        if request.stream_options is not None and not request.stream:
            raise InvalidRequestError(
                "`stream_options` needs `stream`: true; leave it out or stream", param="stream_options"
            )
        _check_stop(request.stop)
        _check_beams(request)
        if request.stream and request.prompt_logprobs is not None:
            raise _unsupported("prompt_logprobs", "them in streams; ask for the whole answer")
        structured_outputs(request)
        _check_resume(request)
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        _check_completion(request)
    elif isinstance(request, EmbeddingRequest):
        _check_embedding(request)
    return request


def _explain(kind: type[msgspec.Struct], text: str) -> InvalidRequestError:
    """msgspec's message in the words of JSON, with the field as ``param``."""
    param: str | None = None
    where = ""
    found = _PATH.search(text)
    if found is not None:
        text = text[: found.start()]
        where = f"`{found[2]}`: " if found[2] else ""
        where = f"a key of {where}" if found[1] else where
        param = re.split(r"[.\[]", found[2])[0] or None
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = unknown[1][:100]
        inside = f" in `{param}`" if param else ""
        known = StreamOptions if param == "stream_options" else kind
        near = difflib.get_close_matches(name, known.__struct_fields__, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else "; remove it"
        return InvalidRequestError(f"unknown parameter `{name}`{inside}{hint}", param=param or name)
    missing = re.search(r"missing required field `(.*)`", text)
    if missing is not None:
        name = missing[1]
        return InvalidRequestError(f"{where}`{name}` is required", param=param or name)
    for field, values in _ENUMS.items():
        if where.endswith(f"{field}`: ") and (field == ".role" or text.startswith("Invalid enum value")):
            text = f"expected {values}"
    text = re.sub(r"`([a-z |]+)`", _in_json_words, text)
    return InvalidRequestError(where + text[:1].lower() + text[1:500], param=param)


def _in_json_words(found: re.Match[str]) -> str:
    names = [name for name in found[1].split(" | ") if name != "null" or found[1] == "null"]
    return " or ".join(_JSON_WORDS.get(name, f"`{name}`") for name in names)


def _check_stop(stop: str | list[str] | None) -> None:
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"`stop`: {len(stop)} strings given, at most {MAX_STOP_STRINGS} are possible", param="stop"
        )
    if stop is not None and any(not text for text in stop_strings(stop)):
        raise InvalidRequestError("`stop`: a stop string must not be empty", param="stop")


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """The stop strings as a list, however the client wrote them."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


def _check_resume(request: GenerationRequest) -> None:
    """Streams of one answer can be continued elsewhere, and are continued as streams."""
    for name in ("resumable", "resume"):
        if not getattr(request, name):
            continue
        if not request.stream or (request.n or 1) != 1:
            raise InvalidRequestError(f"`{name}` needs `stream`: true and one choice", param=name)
        if isinstance(request, CompletionRequest):
            if len(prompts(request.prompt)) != 1:
                raise InvalidRequestError(f"`{name}` needs one prompt", param=name)
            if request.echo:
                raise _unsupported("echo", f"`echo` with `{name}`; leave one of them out")


_NOT_WITH_BEAMS = (
    *("stream", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "bad_words", "allowed_token_ids"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "tools"),
)


def _check_beams(request: GenerationRequest) -> None:
    if not request.use_beam_search:
        for name in ("num_beams", "length_penalty", "early_stopping"):
            if getattr(request, name) is not None:
                raise InvalidRequestError(f"`{name}` needs `use_beam_search`: true", param=name)
        return
    for name in _NOT_WITH_BEAMS:
        if getattr(request, name, None) not in (None, False, 0, [], {}):
            raise _unsupported(name, f"`{name}` with `use_beam_search`; leave one of them out")
    if request.repetition_penalty not in (None, 1.0):
        raise _unsupported("repetition_penalty", "penalties with `use_beam_search`; leave one of them out")
    if request.num_beams is None and (request.n or 1) > MAX_BEAMS:
        raise InvalidRequestError(f"`n`: beam search gives at most {MAX_BEAMS} answers", param="n")
    if request.num_beams is not None and (request.n or 1) > request.num_beams:
        raise InvalidRequestError("`n` must not be above `num_beams`", param="n")


def _check_chat(request: ChatCompletionRequest) -> None:
    for name in ("functions", "function_call"):
        if getattr(request, name) not in (None, [], "none", "auto"):
            raise _unsupported(name, "function calls of the old kind; send `tools` and `tool_choice`")
    if request.modalities not in (None, ["text"]):
        raise _unsupported("modalities", 'anything but text; leave it out or send ["text"]')
    for name in ("audio", "web_search_options"):
        if getattr(request, name) is not None:
            raise _unsupported(name, f"`{name}`; leave it out")
    if request.reasoning_effort not in (None, "none"):
        raise _unsupported("reasoning_effort", "reasoning settings; use `chat_template_kwargs`")
    if request.verbosity not in (None, "medium"):
        raise _unsupported("verbosity", "`verbosity`; leave it out")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other; send one of them",
            param="continue_final_message",
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequestError(
            "`max_tokens` and `max_completion_tokens` differ; send one of them", param="max_tokens"
        )
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: Message, where: str) -> None:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequestError(f"`{where}.content` is required", param="messages")
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if part.type != "text":
                raise InvalidRequestError(
                    f"`{where}.content[{number}]`: this server does not support parts of type "
                    f"{part.type[:40]!r}; send text",
                    param="messages",
                )
            if part.text is None:
                raise InvalidRequestError(f"`{where}.content[{number}].text` is required", param="messages")


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """``chat_template_kwargs``, checked. Raises InvalidRequestError for what the request says elsewhere."""
    extra = dict(given or {})
    for reserved in _TEMPLATE_VARIABLES & extra.keys():
        raise InvalidRequestError(
            f"`chat_template_kwargs` must not set `{reserved}`", param="chat_template_kwargs"
        )
    return extra


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: plain dicts, content one string."""
    out: list[dict[str, Any]] = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        plain: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content,
        }
        for key in ("name", "tool_calls", "tool_call_id"):
            if getattr(message, key) is not None:
                plain[key] = getattr(message, key)
        out.append(plain)
    return out


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise _unsupported("suffix", "text after the completion; leave it out")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", "choosing among more completions than `n`; leave it out")
    if request.stream and request.echo and request.logprobs is not None:
        raise _unsupported("echo", "the prompt's logprobs in streams; ask for the whole answer")
    prompts(request.prompt)


def _check_embedding(request: EmbeddingRequest) -> None:
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "`truncate_prompt_tokens` must be -1 (the model's limit) or 1 or more",
            param="truncate_prompt_tokens",
        )
    for index, item in enumerate(prompts(request.input, "input")):
        if not item:
            raise InvalidRequestError(
                f"`input[{index}]` is empty" if isinstance(request.input, list) else "`input` is empty",
                param="input",
            )


def prompts(prompt: str | list[Any], name: str = "prompt") -> list[str | list[int]]:
    """The prompts one by one. Raises InvalidRequestError for a list of mixed kinds or an empty prompt.

    ``name``: of the field that holds them.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"`{name}`: a list must hold strings only, token ids only, or lists of token ids only",
            param=name,
        )
    if kinds == {int}:
        return [prompt]
    for index, item in enumerate(prompt):
        if isinstance(item, list) and not item:
            raise InvalidRequestError(f"`{name}[{index}]`: a list of token ids must not be empty", param=name)
    return prompt


def _unsupported(name: str, what: str) -> InvalidRequestError:
    error = InvalidRequestError(f"`{name}`: this server does not support {what}", param=name)
    error.code = "unsupported_parameter"
    return error
