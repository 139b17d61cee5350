"""``/tokenize`` and ``/detokenize``, as vLLM has them: what a prompt or a chat is in tokens, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import InvalidRequestError, ModelFormatError
from headrace.frontend.tools import tool_format
from headrace.server import requests
from headrace.server.requests import Body, Message, TokenId
from headrace.server.responses import encode
from headrace.server.routes import off_loop, read_request
from headrace.server.state import ServerState
from headrace.server.tools import Tool, tool_use

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend


class TokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` and what else makes a chat's prompt.

    ``add_special_tokens``: of the prompt, those that the model was trained with; a chat's template writes
    its own.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /detokenize``."""

    tokens: list[TokenId]


class Tokens(msgspec.Struct):
    """Answer of ``POST /tokenize``. ``token_strs``: as the vocabulary spells them, if that was asked."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Answer of ``POST /detokenize``: the text, control tokens included."""

    prompt: str


class TokenizeRoutes:
    """Handlers of both routes over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, http: Request) -> Response:
        """``POST /tokenize``."""
        size, request = await read_request(self._state, http, TokenizeRequest)
        frontend = self._state.frontend
        parser = self._state.settings.tool_call_parser
        ids = await off_loop(lambda: _ids(frontend, request, parser), size)
        texts = None
        if request.return_token_strs:
            texts = [frontend.tokenizer.token(index) for index in ids]
        return _json(Tokens(len(ids), frontend.max_model_len, ids, texts))

    async def detokenize(self, http: Request) -> Response:
        """``POST /detokenize``."""
        size, request = await read_request(self._state, http, DetokenizeRequest)
        frontend = self._state.frontend

        def text() -> str:
            if not request.tokens:
                return ""
            try:
                ids = frontend.encode_prompt(request.tokens)
                return frontend.tokenizer.decode(ids, skip_special_tokens=False)
            except ModelFormatError as error:
                raise InvalidRequestError(error.message, param="model") from None
            except InvalidRequestError as error:
                error.param = "tokens"
                raise

        return _json(Detokenized(await off_loop(text, size)))


def _ids(frontend: Frontend, request: TokenizeRequest, parser: str | None) -> list[int]:
    """Raises InvalidRequestError for anything but a prompt or messages."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("send either `prompt` or `messages`", param="prompt")
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        return frontend.tokenizer.encode(request.prompt, add_special_tokens=special)
    if request.add_special_tokens:
        raise InvalidRequestError(
            "`add_special_tokens`: a chat's template writes them itself; leave it out",
            param="add_special_tokens",
        )
    form = tool_format(frontend.tokenizer.chat_template, parser)
    tools = tool_use(request.tools, None, None, form)
    assert request.messages is not None
    return frontend.encode_chat(
        requests.message_dicts(request.messages),
        None if tools is None else tools.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        **requests.template_variables(request.chat_template_kwargs),
    )


def _json(body: Tokens | Detokenized) -> Response:
    return Response(encode(body), media_type="application/json")
