"""The OpenAI routes that generate: parse, tokenise, start, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.request import SamplingParams
from headrace.errors import EngineDeadError, HeadraceError, InvalidRequestError, OverloadedError
from headrace.frontend.outputs import TextOutput
from headrace.frontend.tools import tool_format
from headrace.server import requests
from headrace.server.generation import Generation, Outputs
from headrace.server.params import beam_params, chat_params, completion_params
from headrace.server.positions import Positions
from headrace.server.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from headrace.server.saved_answer import SavedAnswer
from headrace.server.sender import sender_of
from headrace.server.state import ServerState
from headrace.server.structured import compile_grammar, structured_outputs
from headrace.server.tools import tool_use
from headrace.web.errors import error_event
from headrace.web.http import EventStream, read_body, while_connected
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend

_INLINE_BYTES = 4096  # a body up to this size is parsed and tokenised in well under a millisecond

T = TypeVar("T")


_GOES_ON = (OverloadedError, EngineDeadError)
"""What ends a request here that, if a journal keeps it, has not ended."""


class Answer(Protocol):
    """A route's way to write the outputs of a generation."""

    async def whole(self, generation: Outputs) -> bytes: ...

    def events(self, generation: Outputs) -> AsyncIterator[bytes]: ...

    def skip(self, told: TextOutput) -> None: ...


class GenerationRoutes:
    """Handlers of the generation routes over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat(self, http: Request) -> Response:
        """``POST /v1/chat/completions``."""
        frontend = self._state.frontend
        size, request = await read_request(self._state, http, ChatCompletionRequest)
        frontend.check_kind(embeds=False)
        extra = requests.template_variables(request.chat_template_kwargs)
        messages = requests.message_dicts(request.messages)
        opening = request.add_generation_prompt is not False
        open_ended = bool(request.continue_final_message)

        params = chat_params(request)
        form = tool_format(frontend.tokenizer.chat_template, self._state.settings.tool_call_parser)
        tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, form)
        if tools is not None:
            tools.constrain(params, frontend.tokenizer)
        told = None if tools is None else tools.tools
        field = _grammar_field(request, params)

        def tokenise() -> list[list[int]]:
            if tools is not None:
                tools.compile(frontend, params)
            compile_grammar(frontend, params, field)
            ids = frontend.encode_chat(
                messages, told, add_generation_prompt=opening, continue_final_message=open_ended, **extra
            )
            return [frontend.truncate(ids, params)]

        plan = SavedAnswer(
            kind="chat",
            id=unique_id("chatcmpl"),
            model=request.model or self._state.names[0],
            created=int(time.time()),
            request_name=http.scope["state"]["request_id"],
            n=params.n,
            stream=bool(request.stream),
            wants_logprobs=bool(request.logprobs),
            wants_prompt_logprobs=request.prompt_logprobs is not None,
            include_usage=_include_usage(request),
            continuous_usage=_continuous_usage(request),
            tools=tools,
            resumable=_resumable(request),
        )
        return await self._serve(http, frontend, request, params, plan, tokenise, size)

    async def completions(self, http: Request) -> Response:
        """``POST /v1/completions``."""
        frontend = self._state.frontend
        size, request = await read_request(self._state, http, CompletionRequest)
        frontend.check_kind(embeds=False)
        prompts = requests.prompts(request.prompt)
        if len(prompts) > self._state.settings.max_prompts:
            raise InvalidRequestError(
                f"`prompt`: {len(prompts)} prompts given, at most {self._state.settings.max_prompts} "
                "are possible in one request",
                param="prompt",
            )

        params = completion_params(request)
        field = _grammar_field(request, params)
        echo: list[str] = []
        first_tokens: list[int] = []

        def tokenise() -> list[list[int]]:
            compile_grammar(frontend, params, field)
            out = []
            for prompt in prompts:
                whole = frontend.encode_prompt(prompt)
                ids = frontend.truncate(whole, params)
                if request.echo:
                    as_given = isinstance(prompt, str) and len(ids) == len(whole)
                    echo.append(str(prompt) if as_given else frontend.tokenizer.decode(ids))
                    first_tokens.append(ids[0])
                out.append(ids)
            return out

        plan = SavedAnswer(
            kind="completion",
            id=unique_id("cmpl"),
            model=request.model or self._state.names[0],
            created=int(time.time()),
            request_name=http.scope["state"]["request_id"],
            n=params.n,
            prompts=len(prompts),
            stream=bool(request.stream),
            wants_logprobs=request.logprobs is not None,
            wants_prompt_logprobs=request.prompt_logprobs is not None,
            include_usage=_include_usage(request),
            continuous_usage=_continuous_usage(request),
            echo=echo,
            first_tokens=first_tokens,
            resumable=_resumable(request),
        )
        return await self._serve(http, frontend, request, params, plan, tokenise, size)

    async def _serve(
        self,
        http: Request,
        frontend: Frontend,
        request: GenerationRequest,
        params: SamplingParams,
        plan: SavedAnswer,
        tokenise: Callable[[], list[list[int]]],
        size: int,
    ) -> Response:
        line: dict[str, Any] = http.scope["state"]["log"]
        line.update(generation_id=plan.id, stream=plan.stream)
        sender, params.timeout_s = sender_of(
            http.headers,
            self._state.settings.gateway_credential,
            priority=request.priority,
            timeout_s=request.timeout_s,
        )
        resumed = _resumed(request, frontend.client.capabilities.fingerprint)
        generation = Generation(self._state, frontend, plan.id, line)
        kept = frontend.journal is not None and not request.use_beam_search
        answer = plan.open(frontend)

        async def work() -> Response:
            heavy = size if params.structured_outputs is None else _INLINE_BYTES + 1  # a grammar to compile
            prompts = await off_loop(tokenise, heavy)
            beams = beam_params(request, params, frontend.max_model_len)
            notes = plan.notes() if kept else None
            await generation.start(prompts, params, sender, beams, resumed, notes)
            if kept:
                answer.positions = Positions([0] * (plan.n * plan.prompts))
            if generation.told is not None:
                answer.skip(generation.told)
            if plan.stream:
                await generation.first()
            return await respond(self._state, generation, answer, plan, line)

        streaming = False
        try:
            response = await while_connected(http.receive, work())
            streaming = isinstance(response, EventStream)
            return response
        except HeadraceError as error:
            line["error"] = error.code
            self._state.note(error)
            if not isinstance(error, _GOES_ON):
                generation.collected()
            raise
        finally:
            if not streaming:  # an EventStream closes it when it ends
                await generation.aclose()


async def respond(
    state: ServerState, generation: Outputs, answer: Answer, plan: SavedAnswer, line: dict[str, Any]
) -> Response:
    """The answer as it was asked for. A stream closes ``generation`` when it ends, nobody else does."""
    if plan.stream:
        events = _Events(state, generation, answer, line)
        return EventStream(events, write_timeout_s=state.settings.write_timeout_s)
    body = await answer.whole(generation)
    return Response(body, media_type="application/json", background=BackgroundTask(generation.collected))


class _Events:
    """The events of one stream: chunks and ``[DONE]``, or chunks and one error event."""

    def __init__(self, state: ServerState, generation: Outputs, answer: Answer, line: dict[str, Any]) -> None:
        self._state = state
        self._generation = generation
        self._answer = answer
        self._line = line

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        try:
            async for data in self._answer.events(self._generation):
                yield data
            yield b"data: [DONE]\n\n"
            self._generation.collected()
        except HeadraceError as error:
            self._line["error"] = error.code
            self._state.note(error)
            yield error_event(error)
            if not isinstance(error, _GOES_ON):
                self._generation.collected()
        except Exception as error:
            self._line["error"] = HeadraceError.code
            self._state.log.error("unexpected error in a stream", exc_info=error, **self._line)
            yield error_event(HeadraceError("something went wrong in the server; it is logged"))

    async def aclose(self) -> None:
        """Give the stream up: whatever still runs is aborted."""
        await self._generation.aclose()


async def read_request(state: ServerState, http: Request, kind: type[requests.R]) -> tuple[int, requests.R]:
    """The size of the body and what it asks. Raises for a body that is wrong, or a model that is not here."""
    settings = state.settings
    body = await read_body(http, settings.max_body_bytes, settings.read_timeout_s)
    request = await off_loop(lambda: requests.decode(kind, body), len(body))
    state.check_model(request.model)
    return len(body), request


async def off_loop(work: Callable[[], T], size: int) -> T:
    """``work()``, in a thread if ``size`` bytes of input may keep the event loop noticeably."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


def _grammar_field(request: GenerationRequest, params: SamplingParams) -> str:
    """The field that the grammar of ``params`` comes from, for messages about it."""
    asked = structured_outputs(request)
    if asked is not None:
        return asked[0]
    return "tools" if params.structured_outputs is not None else ""


def _resumable(request: GenerationRequest) -> bool:
    return bool(request.resumable) or request.resume is not None


def _resumed(request: GenerationRequest, fingerprint: str) -> list[int] | None:
    """The tokens behind which the answer goes on, if it was begun elsewhere."""
    resume = request.resume
    if resume is None:
        return None
    if resume.system_fingerprint != fingerprint:
        error = InvalidRequestError(
            f"`resume`: this server's system_fingerprint is {fingerprint}, so its tokens would differ; send "
            "the text so far instead",
            param="resume",
        )
        error.status, error.code = 409, "fingerprint_mismatch"
        raise error
    return resume.token_ids


def _include_usage(request: GenerationRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _continuous_usage(request: GenerationRequest) -> bool:
    return _include_usage(request) and bool(
        request.stream_options and request.stream_options.continuous_usage_stats
    )
