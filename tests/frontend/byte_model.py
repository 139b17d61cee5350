"""A tokenizer of 256 bytes and three control tokens: real, and small enough to reason about."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

BOS, EOS, TURN = 256, 257, 258
VOCAB = 259
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def byte_backend() -> tokenizers.Tokenizer:
    """256 byte tokens, whose ids are ranks in the byte-level alphabet, then <bos>, <eos>, <turn>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<turn>")])
    return backend
