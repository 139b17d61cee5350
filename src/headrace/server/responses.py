"""What the server answers: the bodies of the OpenAI routes, encoded by msgspec."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens``: prompt tokens that came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a whole request; a prompt counts once however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)


class TopLogprob(msgspec.Struct):
    """A token that might have been; ``bytes`` are exact where ``token`` is not valid UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token that was sampled, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice, one entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """A candidate at a prompt token's place; ``rank`` 1 is the likeliest, null not among the top ones."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion choice; ``text_offset`` counts characters.

    With ``echo`` the prompt's come first: null for its first token, which follows nothing.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each prompt token the candidates by id; null for the first."""


class CalledFunction(msgspec.Struct):
    """The function that a call names, and its arguments as a string of JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """One call of a tool."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """The answer of a chat choice. ``content`` is null when it is nothing but tool calls."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct):
    """What a chunk adds to a call: its name the first time, and more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """News of the call with this ``index``; ``id`` and ``type`` come with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to a chat choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """News of one chat choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # of a resumable stream: all since the last chunk


class ChatCompletionChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct):
    """One completion, or in a stream what was added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # of a resumable stream: all since the last chunk


class Completion(msgspec.Struct):
    """Answer of ``POST /v1/completions``, and each event of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs, and, which is ours, of each."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_by_input: list[int]


class Embedding(msgspec.Struct):
    """One input's vector: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str | msgspec.Raw
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct):
    """Answer of ``POST /v1/embeddings``."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    max_model_len: int | None
    root: str
    owned_by: str = "headrace"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    """Answer of ``GET /v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(msgspec.Struct):
    """Answer of the health routes."""

    status: Literal["ok", "loading", "draining", "failed"]


def event(chunk: msgspec.Struct, name: object = None) -> bytes:
    """``chunk`` as one server-sent event; ``name``: its id, if it has one."""
    data = b"data: " + encode(chunk) + b"\n\n"
    return data if name is None else b"id: %s\n" % str(name).encode() + data
