"""A document that is too long for one request: where it is in it, and how it is cut into parts.

Map and reduce, by a declared plan: every part is asked about by itself, and one last request, which is the
client's own with notes in the place of the document, makes the answer of what the parts gave.

The document is what stands between ``<document>`` and ``</document>`` in the last user message, and the task
is the rest of that message. Without the marks the whole message is the document, and the task is the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.gateway.shaping.settings import DocumentPlan
from headrace.gateway.shaping.templates import render
from headrace.gateway.usage import BYTES_PER_TOKEN, prompt_estimate

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway

HEADER = "x-headrace-document-plan"
FIELD = "document_plan"
_OFF = "off"
_OPEN, _CLOSE = "<document>", "</document>"
_FRAME = ("system", "developer")  # messages that every part is asked with
_LEAST_ROOM = 16  # tokens of the document in a part
_BREAKS = ("\n\n", "\n", ". ", " ")  # where a text is cut rather than in the middle of a word
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "chat_template_kwargs", "reasoning_effort", "user", "priority"),
)
"""What a part's request has of the client's: how it samples, not what its answer looks like."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a request is read in parts. ``bodies``: of their requests, with estimates ``part_tokens``.

    ``merge_tokens``: of the last request's prompt, at most. ``before``: the messages before the document's.
    """

    name: str
    plan: DocumentPlan
    bodies: tuple[dict[str, Any], ...]
    part_tokens: tuple[int, ...]
    merge_tokens: int
    before: tuple[Any, ...]
    task: str

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(self.part_tokens) + self.merge_tokens

    @property
    def output_tokens(self) -> int:
        """Of all parts' answers, at most."""
        return len(self.bodies) * self.plan.part_output_tokens

    @property
    def longest(self) -> int:
        """The longest prompt of all."""
        return max(*self.part_tokens, self.merge_tokens)

    def merged(self, notes: Sequence[str]) -> list[Any]:
        """The last request's messages."""
        return _messages(self.plan, self.before, self.task, notes)


def split(gateway: Gateway, context: RequestContext, asked: str) -> Split | None:
    """The parts of a chat that a plan holds for and that is too long for one request; else None.

    ``asked``: the model's name in the request. Takes the field out of the body. Raises InvalidRequestError
    for a plan that there is not, or that the request does not go with, and ContextLengthError where even
    parts would be too many or too long.
    """
    found = _plan(gateway, context, asked)
    if found is None:
        return None
    name, plan = found
    output = _asked_output(context.body) or gateway.config.default_output_tokens
    contexts = [target.context for target in context.candidates if target.context is not None]
    longest = max(contexts, default=None)
    limit = plan.over_tokens or longest
    if limit is None or context.prompt_tokens + output <= limit:
        return None
    *before, last = context.body["messages"]
    text = _text_of(last)
    if text is None:
        raise InvalidRequestError(
            f"the plan {name} needs a last user message that is all text: that is the document",
            param="messages",
        )
    document, task = _document(text, plan)
    frame = [message for message in before if isinstance(message, dict) and message.get("role") in _FRAME]
    room = _room(name, plan, frame, task, longest)
    pieces = cut(document, room * BYTES_PER_TOKEN, plan.overlap_tokens * BYTES_PER_TOKEN)
    if len(pieces) > plan.max_parts:
        raise ContextLengthError(
            f"the document makes {len(pieces)} parts of about {room} tokens; the plan {name} allows "
            f"{plan.max_parts}: shorten it",
            param="messages",
        )
    sampling = {field: context.body[field] for field in _SAMPLING if field in context.body}
    bodies = []
    for number, piece in enumerate(pieces, 1):
        prompt = _part(plan, task, str(number), str(len(pieces)), piece)
        messages = [*frame, {"role": "user", "content": prompt}]
        maximum = {"max_tokens": plan.part_output_tokens}
        bodies.append({"model": context.body["model"], **sampling, **maximum, "messages": messages})
    notes = [""] * len(pieces)
    empty = prompt_estimate({"messages": _messages(plan, before, task, notes)})
    merge = empty + len(pieces) * plan.part_output_tokens
    if longest is not None and merge + output > longest:
        raise ContextLengthError(
            f"{len(pieces)} parts with answers of up to {plan.part_output_tokens} tokens make a last prompt "
            f"of about {merge}, and its answer may have {output}; the model has {longest}: shorten the "
            "document or lower max_tokens",
            param="messages",
        )
    counts = tuple(prompt_estimate(body) for body in bodies)
    return Split(name, plan, tuple(bodies), counts, merge, tuple(before), task)


def cut(text: str, most_bytes: int, overlap_bytes: int = 0) -> list[str]:
    """``text`` in pieces of at most ``most_bytes`` of UTF-8, cut where it breaks by itself if it does.

    Without an overlap the pieces are the text. With it each further one begins up to so many bytes before the
    last one's end. ``most_bytes`` is 8 at least and twice ``overlap_bytes``.
    """
    pieces, begin = [], 0
    while True:
        end = _reach(text, begin, most_bytes)
        if end == len(text):
            pieces.append(text[begin:])
            return pieces
        end = _break(text, begin, end)
        pieces.append(text[begin:end])
        begin = max(_back(text, end, overlap_bytes), begin + (end - begin + 1) // 2)


def _plan(gateway: Gateway, context: RequestContext, asked: str) -> tuple[str, DocumentPlan] | None:
    plans = gateway.config.documents
    wish = context.body.pop(FIELD, None)
    wish = context.headers.get(HEADER, wish)
    if wish is None:
        if context.route != "chat/completions":
            return None
        return next(((name, plan) for name, plan in plans.items() if asked in plan.models), None)
    if wish == _OFF:
        return None
    if not isinstance(wish, str) or wish not in plans:
        known = ", ".join((*plans, _OFF))
        raise InvalidRequestError(f"`{FIELD}`: there is no such plan; there is: {known}", param=FIELD)
    if context.route != "chat/completions":
        raise InvalidRequestError(f"`{FIELD}` is for chats", param=FIELD)
    return wish, plans[wish]


def _asked_output(body: dict[str, Any]) -> int:
    """What the request says of its answer's length; what is no number is refused later."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if type(value) is int and value > 0:
            return value
    return 0


def _text_of(message: object) -> str | None:
    if not isinstance(message, dict) or message.get("role") != "user":
        return None
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            return None
        content = "\n\n".join(texts)  # type: ignore[arg-type]
    return content if isinstance(content, str) else None


def _document(text: str, plan: DocumentPlan) -> tuple[str, str]:
    """Document and task."""
    begin, end = text.find(_OPEN), text.rfind(_CLOSE)
    if begin < 0 or end < begin:
        return text, plan.task
    before, after = text[:begin].strip(), text[end + len(_CLOSE) :].strip()
    task = "\n\n".join(part for part in (before, after) if part)
    return text[begin + len(_OPEN) : end].strip(), task or plan.task


def _room(name: str, plan: DocumentPlan, frame: list[Any], task: str, longest: int | None) -> int:
    """Tokens of the document that a part has room for."""
    if longest is None:
        if plan.part_tokens is None:
            raise InvalidRequestError(
                f"the plan {name} says no part_tokens, and how long the model's context is is not known",
                param="model",
            )
        return plan.part_tokens
    prompt = _part(plan, task, "1000", "1000", "")
    frame = [*frame, {"role": "user", "content": prompt}]
    room = longest - plan.part_output_tokens - prompt_estimate({"messages": frame})
    if room < _LEAST_ROOM + plan.overlap_tokens * 2:
        raise ContextLengthError(
            f"beside the task and the system prompt a context of {longest} tokens has no room for a part of "
            "the document: shorten them",
            param="messages",
        )
    return room if plan.part_tokens is None else min(room, plan.part_tokens)


def _part(plan: DocumentPlan, task: str, number: str, count: str, part: str) -> str:
    return render(plan.part_prompt, {"task": task, "number": number, "count": count, "part": part})


def _messages(plan: DocumentPlan, before: Sequence[Any], task: str, notes: Sequence[str]) -> list[Any]:
    listed = "\n\n".join(f"[{number}] {note.strip()}" for number, note in enumerate(notes, 1))
    values = {"task": task, "count": str(len(notes)), "notes": listed}
    return [*before, {"role": "user", "content": render(plan.merge_prompt, values)}]


def _reach(text: str, begin: int, most_bytes: int) -> int:
    """The furthest end of a piece that begins at ``begin``."""
    end = min(begin + most_bytes, len(text))
    raw = text[begin:end].encode("utf-8", "surrogatepass")
    if len(raw) <= most_bytes:
        return end
    low, high = begin + 1, end
    while low < high:
        middle = (low + high + 1) // 2
        if len(text[begin:middle].encode("utf-8", "surrogatepass")) <= most_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _break(text: str, begin: int, end: int) -> int:
    """Where to cut at or before ``end``: after the best break in the second half, or right there."""
    half = begin + (end - begin) // 2
    for mark in _BREAKS:
        found = text.rfind(mark, half, end)
        if found >= 0:
            return found + len(mark)
    return end


def _back(text: str, end: int, overlap_bytes: int) -> int:
    """So many bytes before ``end``, at the beginning of a word."""
    if not overlap_bytes:
        return end
    raw = text[end - overlap_bytes : end].encode("utf-8", "surrogatepass")[-overlap_bytes:]
    begin = end - len(raw.decode("utf-8", "ignore"))
    found = text.find(" ", begin, end)
    return begin if found < 0 else found + 1
