"""Frontend: text in, text out, over one engine."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headrace.engine.client import EngineClient
from headrace.engine.request import (
    NOBODY,
    EngineOutput,
    EngineRequest,
    SamplingParams,
    Sender,
    StructuredOutputs,
)
from headrace.engine.validate import wrong_kind
from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.frontend.embedding import EmbeddingJob
from headrace.frontend.outputs import TextOutput
from headrace.frontend.text_request import TextRequest
from headrace.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:  # asyncio and jinja2 are imported where they are used: LLM needs neither to start
    from asyncio import AbstractEventLoop

    from headrace.engine.grammar import GrammarCompiler
    from headrace.engine.journal import Journal
    from headrace.frontend.chat_template import ChatTemplate
    from headrace.frontend.stream import LoopWaker, TextStream


class Frontend:
    """Tokenises, submits, and turns tokens back into text; thread-safe, and never on the engine's thread.

    ``max_model_len``: tokens of prompt and output together that one sequence may have.
    ``eos_token_ids``: tokens that end an answer. ``journal``: where requests that have a note are kept, if
    the client keeps any. ``opened_at``: by the monotonic clock, when the model's files, which are here by
    then, began to be opened.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, model_name: str, *, opened_at: float | None = None
    ) -> None:
        self.client = client
        self.journal: Journal | None = client.journal
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.opened_at = time.monotonic() if opened_at is None else opened_at
        self.max_model_len = client.max_model_len
        self.eos_token_ids = [i for i in tokenizer.eos_token_ids if i < client.architecture.vocab_size]
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count()  # next() on it is atomic
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None
        self._grammar_lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None
        self._wakers: WeakKeyDictionary[AbstractEventLoop, LoopWaker] = WeakKeyDictionary()

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, with BOS as the model was trained; a list of ids is only checked.

        Control tokens spelled out in the text become control tokens (see :meth:`Tokenizer.encode`). Raises
        InvalidRequestError if there is nothing, or something that is neither text nor ids.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) and all(type(item) is int for item in prompt):
            ids = list(prompt)
        else:
            raise InvalidRequestError("A prompt must be a string or a list of token ids.", param="prompt")
        if not ids:
            raise InvalidRequestError("The prompt is empty; it needs at least one token.", param="prompt")
        vocab_size = self.client.architecture.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(item for item in ids if not 0 <= item < vocab_size)
            raise InvalidRequestError(
                f"Token id {wrong if abs(wrong) < 2**63 else 'of more than 64 bits'} is not in the "
                f"vocabulary (0 to {vocab_size - 1}).",
                param="prompt",
            )
        return ids

    def encode_input(self, text: str | Sequence[int], truncate_prompt_tokens: int | None = None) -> list[int]:
        """Token ids of something to embed; a list of ids is only checked.

        ``truncate_prompt_tokens``: cut what is longer, keeping its beginning; -1 = to the model's limit.
        Raises InvalidRequestError for what is no text, ContextLengthError if it is too long.
        """
        limit, longest = truncate_prompt_tokens, self.max_model_len
        if limit is not None:
            if type(limit) is not int or not (limit == -1 or 1 <= limit <= longest):
                raise InvalidRequestError(
                    f"truncate_prompt_tokens must be -1, or from 1 to {longest}.",
                    param="truncate_prompt_tokens",
                )
            limit = longest if limit == -1 else limit
        if limit is not None and isinstance(text, str):
            return self.tokenizer.encode_truncated(text, limit)
        ids = self.encode_prompt(text)[:limit]
        if len(ids) > longest:
            raise ContextLengthError(
                f"The text has {len(ids)} tokens; the model embeds up to {longest}. Shorten it, or let "
                "truncate_prompt_tokens cut it.",
                param="input",
            )
        return ids

    def check_kind(self, *, embeds: bool) -> None:
        """Raise InvalidRequestError if the model does not embed, or (``embeds`` false) does not generate."""
        if (self.client.architecture.encoder is not None) != embeds:
            raise wrong_kind(embeds=not embeds)

    def embedding_job(
        self,
        inputs: Sequence[list[int]],
        done: Callable[[], None],
        *,
        request_id: str | None = None,
        sender: Sender = NOBODY,
        timeout_s: float | None = None,
        embedded: Callable[[int], None] | None = None,
    ) -> EmbeddingJob:
        """A job, to be started, that embeds all ``inputs``. Raises InvalidRequestError for a decoder."""
        self.check_kind(embeds=True)
        name = request_id or f"{self._prefix}-{next(self._numbers)}"
        return EmbeddingJob(
            self.client,
            inputs,
            done,
            request_id=name,
            sender=sender,
            timeout_s=timeout_s,
            embedded=embedded,
        )

    async def embed(
        self,
        inputs: Sequence[list[int]],
        *,
        request_id: str | None = None,
        sender: Sender = NOBODY,
        timeout_s: float | None = None,
    ) -> list[EngineOutput]:
        """One output with a vector for each input. Cancelling it ends what still runs.

        Raises InvalidRequestError, ContextLengthError, OverloadedError, DeadlineExceededError,
        GenerationError or EngineDeadError.
        """
        import asyncio

        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        job = self.embedding_job(inputs, done, request_id=request_id, sender=sender, timeout_s=timeout_s)
        try:
            job.start()
            await ended.wait()
        finally:
            job.abort()
        if job.error is not None:
            raise job.error
        return job.outputs

    def render_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that the model's chat template makes of a conversation.

        Raises InvalidRequestError if the messages are malformed, the template refuses them, or the model
        has none.
        """
        return self._chat_template().render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def encode_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation: :meth:`render_chat`, tokenised.

        As in vLLM and transformers the rendered text is parsed with its control tokens, and a message that
        spells one out (``<|im_end|>``) writes it: messages are not a security boundary. Raises
        InvalidRequestError as render_chat does.
        """
        text = self.render_chat(messages, tools, add_generation_prompt, **template_kwargs)
        ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        if not ids:
            raise InvalidRequestError("The chat template made an empty prompt of these messages.")
        return ids

    def truncate(self, prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
        """The end of a prompt, as long as ``truncate_prompt_tokens`` says.

        -1 leaves the answer its ``max_tokens``, or one token if it has no limit.
        """
        most = params.truncate_prompt_tokens
        if most is None or type(most) is not int:  # check() refuses what is no number
            return prompt_token_ids
        if most == -1:
            answer = params.max_tokens if type(params.max_tokens) is int else 1
            most = max(1, self.max_model_len - max(1, answer))
        return prompt_token_ids[-most:] if most > 0 else prompt_token_ids

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """What can be said before submitting: raises InvalidRequestError or ContextLengthError."""
        self.check_kind(embeds=False)
        params.validate(self.client.architecture.vocab_size)
        if params.structured_outputs is not None:
            self.compile(params.structured_outputs)
        if len(prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt_token_ids)} tokens; the context holds {self.max_model_len}, the "
                f"answer included, so {self.max_model_len - 1} at most would be right.",
                param="prompt",
            )

    def compile(self, wanted: StructuredOutputs) -> None:
        """Have a grammar ready, so that submitting a request that wants it costs nothing more.

        Milliseconds as a rule; the first time the vocabulary is indexed as well. Raises InvalidRequestError
        saying what is wrong with it.
        """
        self._compiler().compile(wanted)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        wake: Callable[[TextRequest], None],
        *,
        request_id: str | None = None,
        sender: Sender = NOBODY,
        output_token_ids: Sequence[int] = (),
        note: bytes = b"",
        gather: int = 1,
    ) -> TextRequest:
        """Queue a request whose owner calls ``process()`` and ``take()`` after each ``wake`` (on any thread).

        ``gather``: the owner is in no hurry, and may be woken once for so many tokens of a sequence, unless
        there are stop strings, which have to be found soon.
        ``output_token_ids``: of an answer (``n`` = 1) that broke off elsewhere; its rest is what comes.
        ``note``: opaque; with one, a journal keeps the request until its answer is dropped there. Raises
        InvalidRequestError, ContextLengthError, OverloadedError or EngineDeadError at once.
        """
        self.check_kind(embeds=False)
        self.tokenizer.token_bytes(0)  # raises if this tokenizer can't generate
        request = EngineRequest(
            request_id=request_id or f"{self._prefix}-{next(self._numbers)}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            eos_token_ids=self.eos_token_ids,
            priority=sender.priority,
            tenant=sender.tenant,
            tenant_weight=sender.tenant_weight,
            arrival_time=time.monotonic(),
            cache_salt=sender.cache_salt,
            note=note if self.journal is not None else b"",
            output_token_ids=[list(output_token_ids)] if output_token_ids else [],
            gather=1 if params.stop else gather,
        )
        self.check(request.prompt_token_ids, params)
        request.bad_word_ids = self._bad_word_ids(params.bad_words)
        text_request = TextRequest(self.client, request, self.tokenizer, wake)
        self.client.submit(request, text_request.receive)
        return text_request

    async def start(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        sender: Sender = NOBODY,
        output_token_ids: Sequence[int] = (),
        note: bytes = b"",
    ) -> TextStream:
        """Submit now and return the stream of news. Raises as :meth:`submit` does, before any item."""
        from headrace.frontend.stream import TextStream

        return TextStream(
            lambda wake: self.submit(
                prompt_token_ids,
                params,
                wake,
                request_id=request_id,
                sender=sender,
                output_token_ids=output_token_ids,
                note=note,
            ),
            self.waker(),
        )

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        sender: Sender = NOBODY,
    ) -> AsyncIterator[list[TextOutput]]:
        """:meth:`start`, as a generator: submits when first awaited, aborts when closed."""
        async with await self.start(prompt_token_ids, params, request_id=request_id, sender=sender) as news:
            async for outputs in news:
                yield outputs

    def close(self) -> None:
        """Close the engine: what still runs ends with ``abort``. Closing twice is fine."""
        self.client.close()

    def _bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as the model may spell it: at the beginning of a text and after a space."""
        vocab_size = self.client.architecture.vocab_size
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and max(ids) < vocab_size:
                    spellings[tuple(ids)] = None
        return [list(ids) for ids in spellings]

    def _chat_template(self) -> ChatTemplate:
        from headrace.frontend.chat_template import ChatTemplate

        self.check_kind(embeds=False)
        source = self.tokenizer.chat_template
        if source is None:
            raise InvalidRequestError(
                f"The model {self.model_name!r} has no chat template: it is a base model. Use completions "
                "(on the command line: --raw) instead of chat.",
                param="messages",
            )
        with self._lock:
            if self._template is None:
                self._template = ChatTemplate(
                    source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token
                )
            return self._template

    def _compiler(self) -> GrammarCompiler:
        """The grammars of this model, made when the first is asked for; the engine learns of it then."""
        from headrace.engine.grammar import GrammarCompiler
        from headrace.frontend.grammar import vocabulary_of

        with self._grammar_lock:
            if self._grammars is None:
                vocabulary = vocabulary_of(self.tokenizer, self.client.architecture.vocab_size)
                self._grammars = GrammarCompiler(vocabulary)
                self.client.use_grammars(self._grammars)
            return self._grammars

    def waker(self) -> LoopWaker:
        """What wakes streams on the running event loop."""
        import asyncio

        from headrace.frontend.stream import LoopWaker

        loop = asyncio.get_running_loop()
        with self._lock:
            waker = self._wakers.get(loop)
            if waker is None:
                waker = self._wakers[loop] = LoopWaker(loop)
            return waker
