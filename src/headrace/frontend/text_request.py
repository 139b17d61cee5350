"""One request's way from token ids to text: a detokenizer and stop strings for each of its choices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

import msgspec

from headrace.engine.client import EngineClient
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams
from headrace.errors import InvalidRequestError
from headrace.frontend.detokenizer import Detokenizer
from headrace.frontend.outputs import TextOutput
from headrace.frontend.stop import StopMatcher
from headrace.frontend.tokenizer import Tokenizer


class TextChoice:
    """One of a request's sequences. ``finished`` once its only ``finish_reason`` has been decided."""

    def __init__(
        self,
        choice: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        eos_token_ids: Collection[int] = (),
        continues_text: bool = False,
        output_token_ids: list[int] | None = None,
    ) -> None:
        """``output_token_ids``: generated elsewhere; their text has been told, and is :attr:`told`.

        Raises InvalidRequestError if a stop string is in it.
        """
        self.finished = False
        self._choice = choice
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._unchecked = params.min_tokens  # stop strings are not looked for in the first so many tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._detokenizer = (
            Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, continues_text=continues_text
            )
            if params.detokenize
            else None
        )
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._news: TextOutput | None = None
        self.told, matched = "", None
        if output_token_ids:
            self.told, _, matched = self._text_of(EngineOutput(request_id="", token_ids=output_token_ids))
        if matched is not None:
            raise InvalidRequestError(
                f"The output so far is a whole answer already: it has the stop string {matched!r}.",
                param="output_token_ids",
            )

    def push(self, output: EngineOutput) -> bool:
        """Take in news; True if a stop string was found, so that the engine has to be told to stop.

        Tokens after the one that completes a stop string are dropped, as is all news after the end.
        """
        if self.finished:
            return False
        news = self._news
        if news is None:
            news = self._news = TextOutput(self._choice)
        text, kept, matched = self._text_of(output)
        news.text += text
        news.token_ids += output.token_ids[:kept]
        if output.logprobs is not None:
            news.logprobs = (news.logprobs or []) + output.logprobs[:kept]
        if output.prompt_logprobs is not None:
            news.prompt_logprobs = output.prompt_logprobs
        news.num_cached_tokens = max(news.num_cached_tokens, output.num_cached_tokens)
        news.first_scheduled_time = news.first_scheduled_time or output.first_scheduled_time
        news.first_token_time = news.first_token_time or output.first_token_time
        if matched is not None:
            news.finish_reason, news.stop_reason = "stop", matched
        elif output.finish_reason is not None:
            news.finish_reason = output.finish_reason
            news.error_message, news.error_kind = output.error_message, output.error_kind
            if output.stop_token_id not in self._eos:
                news.stop_reason = output.stop_token_id
        self.finished = news.finish_reason is not None
        return matched is not None and output.finish_reason is None

    def take(self) -> TextOutput | None:
        """Everything since the last call, as one delta; None if there is nothing."""
        news, self._news = self._news, None
        return news

    def _text_of(self, output: EngineOutput) -> tuple[str, int, str | None]:
        """The text to show, how many of the output's tokens it stands for, and the stop string found."""
        tokens, matcher, detokenizer = output.token_ids, self._matcher, self._detokenizer
        if detokenizer is None:
            return "", len(tokens), None
        shown = len(tokens)
        if output.finish_reason == "stop" and shown and tokens[-1] == output.stop_token_id:
            shown -= not self._keeps_stop  # a stop token ends the text and is no part of it
        ending = output.finish_reason is not None
        if matcher is None:
            text = detokenizer.push(tokens[:shown])
            return text + detokenizer.finish() if ending else text, len(tokens), None
        text = ""
        for index in range(shown):
            piece = detokenizer.push(tokens[index : index + 1])
            if self._unchecked > 0:
                self._unchecked -= 1
                text += piece
                continue
            safe, matched = matcher.push(piece)
            text += safe
            if matched is not None:
                return text + matched * self._keeps_stop, index + 1, matched
        if ending:
            safe, matched = matcher.push(detokenizer.finish())
            text += safe
            if matched is not None:
                return text + matched * self._keeps_stop, len(tokens), matched
            text += matcher.finish()
        return text, len(tokens), None


class TextRequest:
    """A request under way.

    :meth:`receive` may run on any thread and only stores what it is given; all other methods belong to
    one thread, the consumer's, where :meth:`process` does the work on text. ``wake`` is called, on the
    client's thread, whenever there is something to process.
    """

    def __init__(
        self,
        client: EngineClient,
        request: EngineRequest,
        tokenizer: Tokenizer,
        wake: Callable[[TextRequest], None],
        *,
        one_by_one: bool = False,
    ) -> None:
        """``one_by_one``: :meth:`take` has an output for each token."""
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self._client = client
        self._wake = wake
        self._inbox: deque[list[EngineOutput]] = deque()  # append and popleft are atomic
        special = tokenizer.special_token_ids
        continues = any(token not in special for token in request.prompt_token_ids)
        self._choices = [
            TextChoice(
                choice,
                tokenizer,
                request.params,
                eos_token_ids=request.eos_token_ids,
                continues_text=continues,
                output_token_ids=request.output_token_ids[choice] if request.output_token_ids else None,
            )
            for choice in range(request.params.n)
        ]
        self._single: list[TextOutput] | None = [] if one_by_one else None

    @property
    def told(self) -> str:
        """The first choice's text that was told elsewhere, if the request goes on with an answer."""
        return self._choices[0].told

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish_reason (which may still wait to be taken)."""
        return not self.open_choices

    def receive(self, outputs: list[EngineOutput]) -> None:
        """The engine's sink."""
        self._inbox.append(outputs)
        self._wake(self)

    def process(self) -> None:
        """Turn what has been received into text; end choices whose stop string has come."""
        while self._inbox:
            for output in self._inbox.popleft():
                if self._push(output):
                    self._client.abort(self.request_id, output.choice)

    def replay(self, outputs: Iterable[EngineOutput]) -> None:
        """Take in what another process has heard."""
        for output in outputs:
            self._push(output)

    @property
    def open_choices(self) -> list[int]:
        """The choices without a finish_reason."""
        return [index for index, choice in enumerate(self._choices) if not choice.finished]

    def take(self) -> list[TextOutput]:
        """At most one output per choice: everything since the last call. Empty if there is nothing."""
        if self._single is not None:
            taken, self._single = self._single, []
            return taken
        return [news for choice in self._choices if (news := choice.take()) is not None]

    def _push(self, output: EngineOutput) -> bool:
        """Whether the engine has to be told to stop."""
        choice = self._choices[output.choice]
        if self._single is None:
            return choice.push(output)
        stop = False
        for part in _parts(output):
            stop = choice.push(part) or stop
            if (news := choice.take()) is not None:
                self._single.append(news)
        return stop

    def abort(self) -> None:
        """End whatever still runs."""
        if not self.finished:
            self._client.abort(self.request_id)


def _parts(output: EngineOutput) -> list[EngineOutput]:
    """The same news, a token at a time."""
    count = len(output.token_ids)
    if count < 2:
        return [output]
    parts = []
    for at in range(count):
        last = at == count - 1
        parts.append(
            msgspec.structs.replace(
                output,
                token_ids=output.token_ids[at : at + 1],
                logprobs=None if output.logprobs is None else output.logprobs[at : at + 1],
                prompt_logprobs=output.prompt_logprobs if at == 0 else None,
                finish_reason=output.finish_reason if last else None,
                stop_token_id=output.stop_token_id if last else None,
                error_message=output.error_message if last else None,
                error_kind=output.error_kind if last else None,
            )
        )
    return parts
