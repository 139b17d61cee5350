"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.request import TokenLogprobs
from headrace.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_FLOOR = -9999.0  # stands for minus infinity, which JSON cannot write


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


def chat_logprobs(tokenizer: TokenBytes, tokens: list[TokenLogprobs]) -> ChatLogprobs:
    """One entry a token: its text, exact bytes, log-probability and the most likely tokens."""
    content = []
    for token in tokens:
        raw = tokenizer.token_bytes(token.token_id)
        content.append(
            TokenLogprob(
                raw.decode(errors="replace"),
                max(token.logprob, _FLOOR),
                list(raw),
                [
                    _top(tokenizer, top_id, logprob)
                    for top_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)
                ],
            )
        )
    return ChatLogprobs(content)


def _top(tokenizer: TokenBytes, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(raw.decode(errors="replace"), max(logprob, _FLOOR), list(raw))


def prompt_logprobs(tokenizer: TokenBytes, tokens: list[TokenLogprobs]) -> PromptLogprobs:
    """vLLM's shape. ``tokens``: the prompt's from the second on."""

    def candidate(token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        return PromptLogprob(max(logprob, _FLOOR), rank, text)

    out: PromptLogprobs = [None]
    for token in tokens:
        found = {
            top_id: candidate(top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(zip(token.top_ids, token.top_logprobs, strict=True), 1)
        }
        if token.token_id not in found:
            found[token.token_id] = candidate(token.token_id, token.logprob, None)
        out.append(found)
    return out


def completion_logprobs(
    tokenizer: TokenBytes, tokens: list[TokenLogprobs], offset: int, first_token_id: int | None = None
) -> tuple[CompletionLogprobs, int]:
    """The older shape, and the offset in characters after the last token.

    ``first_token_id``: a token that stands before them without log-probabilities.
    """
    out = CompletionLogprobs([], [], [], [])
    assert out.top_logprobs is not None
    if first_token_id is not None:
        out.tokens.append(_name(tokenizer, first_token_id))
        out.token_logprobs.append(None)
        out.top_logprobs.append(None)
        out.text_offset.append(offset)
        offset += len(tokenizer.token_bytes(first_token_id).decode(errors="replace"))
    for token in tokens:
        text = _name(tokenizer, token.token_id)
        out.tokens.append(text)
        out.token_logprobs.append(max(token.logprob, _FLOOR))
        tops = {
            _name(tokenizer, top_id): max(logprob, _FLOOR)
            for top_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)
        }
        tops.setdefault(text, max(token.logprob, _FLOOR))
        out.top_logprobs.append(tops)
        out.text_offset.append(offset)
        offset += len(tokenizer.token_bytes(token.token_id).decode(errors="replace"))
    return out, offset


def text_length(tokenizer: TokenBytes, token_ids: list[int]) -> int:
    """By how many characters these tokens move ``text_offset`` on."""
    return sum(len(tokenizer.token_bytes(token_id).decode(errors="replace")) for token_id in token_ids)


def _name(tokenizer: TokenBytes, token_id: int) -> str:
    """A token's text, or ``bytes:\\xe2\\x80`` where it is not valid UTF-8 by itself (as OpenAI writes it)."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
