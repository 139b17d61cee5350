"""What grammars need of a tokenizer. Compiling them, and walking them, is :mod:`headrace.engine.grammar`."""

from __future__ import annotations

from headrace.engine.grammar import Vocabulary
from headrace.errors import InvalidRequestError
from headrace.frontend.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The bytes of ids below ``vocab_size`` (the model's, which may be padded beyond the tokenizer's).

    Raises InvalidRequestError if the model has no end token, ModelFormatError if it can't generate at all.
    """
    eos_token_ids = [token for token in tokenizer.eos_token_ids if token < vocab_size]
    if not eos_token_ids:
        raise InvalidRequestError(
            "This model's tokenizer names no end token, which structured output needs.",
            param="structured_outputs",
        )
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(vocab_size)],
        special_ids=sorted(token for token in tokenizer.special_token_ids if token < vocab_size),
        eos_token_ids=eos_token_ids,
    )
