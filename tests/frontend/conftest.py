"""A byte tokenizer and an engine without weights: real parts, small enough to reason about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.engine.build import SimulatedSpec
from headrace.engine.config import SchedulerConfig
from headrace.engine.thread_client import ThreadClient
from headrace.frontend.frontend import Frontend
from headrace.frontend.llm import LLM
from headrace.frontend.tokenizer import Tokenizer

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


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), bos_token_id=BOS, eos_token_ids=[EOS], chat_template=TEMPLATE)


@pytest.fixture
def make_frontend(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., Frontend]]:
    """Open frontends over simulated engines: ``make(num_blocks=…, step_s=…, max_num_seqs=…)``."""
    opened: list[Frontend] = []

    def make(
        *,
        num_blocks: int = 64,
        step_s: float = 0.0,
        max_model_len: int = 512,
        tokenizer: Tokenizer = byte_tokenizer,
        **scheduler: int,
    ) -> Frontend:
        spec = SimulatedSpec(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(**scheduler),
            vocab_size=VOCAB,
            seed=1,
            step_s=step_s,
        )
        frontend = Frontend(ThreadClient(spec.build()), tokenizer, "simulated")
        opened.append(frontend)
        return frontend

    yield make
    for frontend in opened:
        frontend.close()


@pytest.fixture
def frontend(make_frontend: Callable[..., Frontend]) -> Frontend:
    return make_frontend()


@pytest.fixture
def llm(frontend: Frontend) -> LLM:
    return LLM.from_frontend(frontend)
