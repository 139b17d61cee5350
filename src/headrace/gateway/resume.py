"""Going on with a broken stream at another upstream, so that its client sees one answer.

Ours continues from the tokens so far, with the seed of the request: under one ``system_fingerprint`` that is
the answer that the broken upstream would have given, bit by bit. Others continue the text so far, as well as
they can. What cannot be continued rightly is not: half a tool call, log-probabilities, a grammar's output.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.gateway.kinds import Kind, asks

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.upstream import Target

How = Literal["again", "exact", "text"]
"""How a stream went on: from the beginning (no text was told yet), from its tokens, or from its text."""

_HEAD = ("id", "created", "model", "object", "system_fingerprint")
_LABEL = b": headrace: from here on, another upstream continues the text so far\n\n"
_NOT_FROM_TEXT = (
    *("n", "logprobs", "top_logprobs", "prompt_logprobs", "tools", "functions", "response_format", "suffix"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"),
    *("json_schema", "regex", "ebnf", "use_beam_search", "continue_final_message", "modalities", "audio"),
)
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")


def is_resumable(context: RequestContext) -> bool:
    """Whether a stream of this request might go on elsewhere: one answer, told from its beginning."""
    body = context.body
    return context.choices == 1 and not (body.get("resume") or body.get("echo"))


class Progress:
    """What the client of a stream has been told of its only answer."""

    __slots__ = ("_keeps_ids", "head", "only_text", "role_told", "seed", "text_events", "texts", "token_ids")

    def __init__(self, asked: dict[str, Any]) -> None:
        seed = asked.get("seed")
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if seed is None else seed
        self.head: dict[str, Any] = {}  # what all chunks have in common
        self.texts: list[str] = []
        self.token_ids: list[int] | None = []  # None: not known of all that was told
        self.text_events = 0  # about as many tokens
        self.role_told = False
        self.only_text = True
        # whether the client wants to see them: from ours, or from vLLM
        self._keeps_ids = bool(asked.get("resumable") or asked.get("return_token_ids"))

    @property
    def num_tokens(self) -> int | None:
        """Tokens so far, where the upstream tells them."""
        return len(self.token_ids) if self.token_ids else None

    @property
    def nothing_told(self) -> bool:
        """Whether the client has seen no more than that an answer begins."""
        return self.only_text and not self.texts and not self.token_ids

    def note(self, chunk: dict[str, Any]) -> bool:
        """``chunk`` is about to be told. True if what concerns only the gateway was taken out of it."""
        if not self.head:
            self.head = {name: chunk[name] for name in _HEAD if name in chunk}
        changed = False
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if isinstance(delta, dict):
                text = delta.get("content")
                self.role_told = self.role_told or "role" in delta
                if len(delta) > 1 or (delta and text is None):
                    more = (value for name, value in delta.items() if name not in ("role", "content"))
                    self.only_text = self.only_text and not any(more)
            else:
                text = choice.get("text")
            if isinstance(text, str) and text:
                self.texts.append(text)
                self.text_events += 1
            ids = choice.get("token_ids")
            if isinstance(ids, list):
                if self.token_ids is not None:
                    self.token_ids += ids
                if not self._keeps_ids:
                    del choice["token_ids"]
                    changed = True
            elif text or not self.only_text:
                self.token_ids = None
        return changed

    def fit(self, chunk: dict[str, Any]) -> bool:
        """Make a chunk of another upstream one of this stream's. False if it has nothing new to tell."""
        chunk.update(self.head)
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if isinstance(delta, dict) and self.role_told:
                delta.pop("role", None)
        return not chunk["choices"] or any(map(_says_something, chunk["choices"]))


def _says_something(choice: dict[str, Any]) -> bool:
    if choice.get("finish_reason") is not None or choice.get("text") or choice.get("logprobs"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.values())


@dataclass(frozen=True, slots=True)
class Continuation:
    """How to go on. ``told_tokens`` were told and are in its prompt. ``label``: a comment for the client."""

    how: How
    body: bytes
    told_tokens: int = 0
    label: bytes = b""


def first_asked(kind: Kind, context: RequestContext, progress: Progress | None) -> dict[str, Any]:
    """The request as it is first asked, so that ours tell their tokens and sample with a seed we know."""
    if progress is None or not kind.tells_tokens:
        return context.body
    return {**context.body, "resumable": True, "seed": progress.seed}


def continuation(
    target: Target, context: RequestContext, progress: Progress, *, exact: bool
) -> Continuation | None:
    """How ``target`` is asked for the rest; None if that cannot be right. ``exact``: whether from tokens."""
    kind, most = target.upstream.kind, context.output_tokens
    asked = first_asked(kind, context, progress)
    if progress.nothing_told:
        return Continuation("again", kind.body(asked, target.name, context.route, most=most))
    if exact and kind.tells_tokens and progress.token_ids:
        fingerprint = progress.head.get("system_fingerprint")
        resume = {"token_ids": progress.token_ids, "system_fingerprint": fingerprint}
        body = kind.body({**asked, "resume": resume}, target.name, context.route, most=most)
        return Continuation("exact", body)
    told = progress.num_tokens or progress.text_events
    text = _from_text(kind, asked, context.route, progress, told)
    if text is None:
        return None
    body = kind.body(text, target.name, context.route, most=max(most - told, 1))
    return Continuation("text", body, told, _LABEL)


def _from_text(
    kind: Kind, asked: dict[str, Any], route: str, progress: Progress, told: int
) -> dict[str, Any] | None:
    """``asked`` with the text so far as the beginning of the answer, and limits that count it."""
    if not progress.only_text or any(asks(asked, name) for name in _NOT_FROM_TEXT):
        return None
    text = "".join(progress.texts)
    left = {name: max(asked[name] - told, name != "min_tokens") for name in _LIMITS if asked.get(name)}
    if route == "completions":
        # without a limit, each engine has another one
        if kind.continues == "nothing" or not isinstance(asked["prompt"], str) or "max_tokens" not in left:
            return None
        return {**asked, **left, "prompt": asked["prompt"] + text}
    if kind.continues != "chats" or asked["messages"][-1].get("role") == "assistant":
        return None
    messages = [*asked["messages"], {"role": "assistant", "content": text}]
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    return {**asked, **left, **open_end, "messages": messages}
