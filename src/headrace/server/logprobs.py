"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.request import TokenLogprobs
from headrace.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

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


def completion_logprobs(
    tokenizer: TokenBytes, tokens: list[TokenLogprobs], offset: int
) -> tuple[CompletionLogprobs, int]:
    """The older shape, and the offset in characters after the last token."""
    out = CompletionLogprobs([], [], [], [])
    assert out.top_logprobs is not None
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


def _name(tokenizer: TokenBytes, token_id: int) -> str:
    """A token's text, or ``bytes:\\xe2\\x80`` where it is not valid UTF-8 by itself (as OpenAI writes it)."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
