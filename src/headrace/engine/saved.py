"""What a journal says: its records, and the requests that they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headrace.engine.request import EngineOutput, EngineRequest

MAX_DEATHS = 3
"""Of the process, in a row, that a request may be part of without a token of progress."""

GIVEN_UP = (
    f"The engine has died {MAX_DEATHS} times in a row while this request was under way without progress; it "
    "is not tried again."
)


class Identity(msgspec.Struct, tag="identity", frozen=True):
    """Whose journal it is. Equal fingerprints go on with the same tokens; another model's mean nothing.

    ``exact``: the engine promises that equal fingerprints give equal tokens.
    """

    fingerprint: str
    model: str
    vocab_size: int
    exact: bool


class Admitted(msgspec.Struct, tag="admitted", omit_defaults=True):
    """A request has been submitted, or goes on in another process."""

    request: EngineRequest  # with its seed
    time: float  # time.time() of its arrival
    known: int = 0  # tokens of its answer at that moment
    deaths: int = 0  # of the process, up to then, since its answer last had a new token
    ended: float = 0.0  # time.time() of its end; 0 = it goes on
    exact: bool = True  # all processes that have worked on it give equal tokens


class Heard(msgspec.Struct, tag="heard"):
    """News of one choice, several steps' in one; without times, which mean nothing to another process."""

    output: EngineOutput
    time: float


class Dropped(msgspec.Struct, tag="dropped"):
    """A request is of no more interest: it was aborted, collected, or nobody has come for it."""

    request_id: str


class Closed(msgspec.Struct, tag="closed"):
    """The process ended as it should; ``clean``: and so had its engine, until then."""

    clean: bool


Record = Identity | Admitted | Heard | Dropped | Closed


@dataclass(slots=True)
class SavedRequest:
    """A request and what it has had. ``outputs``: everything each choice has said, by choice.

    ``admitted``: time.time() when it arrived. ``ended``: when its last choice ended; None while it goes on.
    ``exact``: what it goes on with is what it would have gone on with in the process before.
    """

    request: EngineRequest
    admitted: float
    outputs: dict[int, EngineOutput] = field(default_factory=dict)
    ended: float | None = None
    exact: bool = True
    known: int = 0
    deaths: int = 0
    size_bytes: int = 0  # of its records
    written: dict[int, int] = field(default_factory=dict)  # tokens of each choice that are in the file

    @property
    def num_tokens(self) -> int:
        """Of all its choices' outputs."""
        return sum(len(output.token_ids) for output in self.outputs.values())

    @property
    def open_choices(self) -> list[int]:
        """The choices that have not ended."""
        ended = {choice for choice, output in self.outputs.items() if output.finish_reason is not None}
        return [choice for choice in self.request.open_choices if choice not in ended]

    def take(self, news: EngineOutput, now: float) -> bool:
        """Add news of one choice; False if that has ended already."""
        total = self.outputs.get(news.choice)
        if total is None:
            if not 0 <= news.choice < self.request.params.n:
                return False
            total = EngineOutput(request_id=news.request_id, choice=news.choice)
            self.outputs[news.choice] = total
        if total.finish_reason is not None:
            return False
        join(total, news)
        if not self.open_choices:
            self.ended = now
        return True

    def unwritten(self, choice: int) -> EngineOutput:
        """What is not in the file yet of a choice that has had something. It counts as written then."""
        total, start = self.outputs[choice], self.written.get(choice, 0)
        self.written[choice] = len(total.token_ids)
        if start == 0:
            return total
        return msgspec.structs.replace(
            total,
            token_ids=total.token_ids[start:],
            logprobs=None if total.logprobs is None else total.logprobs[start:],
            prompt_logprobs=None,
        )

    def copy(self) -> SavedRequest:
        """One that later news do not change."""
        outputs = {choice: _copied(output) for choice, output in self.outputs.items()}
        return SavedRequest(
            self.request,
            self.admitted,
            outputs,
            self.ended,
            self.exact,
            self.known,
            self.deaths,
            self.size_bytes,
        )

    def records(self) -> list[Record]:
        """What says all of this in a new file."""
        admitted = Admitted(
            self.request, self.admitted, self.known, self.deaths, self.ended or 0.0, self.exact
        )
        self.written = {choice: len(output.token_ids) for choice, output in self.outputs.items()}
        return [admitted, *(Heard(output, self.ended or 0.0) for output in self.outputs.values())]


class SavedRequests(dict[str, SavedRequest]):
    """All that a journal keeps, by request id, in the order of arrival."""

    def apply(self, record: Record) -> None:
        """What a record changes. One that speaks of an unknown request changes nothing."""
        if isinstance(record, Admitted):
            request = record.request
            self[request.request_id] = SavedRequest(
                request,
                record.time,
                ended=record.ended or None,
                exact=record.exact,
                known=record.known,
                deaths=record.deaths,
            )
        elif isinstance(record, Heard):
            if (saved := self.get(record.output.request_id)) is not None:
                saved.take(record.output, record.time)
        elif isinstance(record, Dropped):
            self.pop(record.request_id, None)


def join(total: EngineOutput, news: EngineOutput) -> None:
    """Add to a choice's output, whose lists are its own, what came after it; times are left out."""
    total.token_ids += news.token_ids
    if news.logprobs is not None:
        total.logprobs = total.logprobs or []
        total.logprobs += news.logprobs
    if news.prompt_logprobs is not None:
        total.prompt_logprobs = news.prompt_logprobs
    total.num_cached_tokens = max(total.num_cached_tokens, news.num_cached_tokens)
    total.finish_reason = news.finish_reason
    total.stop_token_id = news.stop_token_id
    total.error_message, total.error_kind = news.error_message, news.error_kind


def _copied(output: EngineOutput) -> EngineOutput:
    made = EngineOutput(request_id=output.request_id, choice=output.choice)
    join(made, output)
    return made
