"""Token ids to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.frontend.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into text as they come, in constant time per token.

    A character whose bytes are spread over several tokens appears with the last of them; bytes that can
    never become a character appear as U+FFFD. Joined, the pieces are exactly what
    :meth:`Tokenizer.decode` makes of all tokens at once.

    ``continues_text``: the tokens follow others that were text, so that a SentencePiece tokenizer's leading
    space is a real space; otherwise the first one is dropped, as in decoding a whole text.
    """

    __slots__ = ("_at_start", "_bytes_of", "_skipped", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._at_start = tokenizer.strips_leading_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; possibly empty."""
        skipped, bytes_of = self._skipped, self._bytes_of
        data = b"".join([bytes_of(token) for token in token_ids if token not in skipped])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the last character is incomplete, else nothing."""
        return self._utf8.decode(b"", True)
