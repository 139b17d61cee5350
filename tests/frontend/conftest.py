"""Frontends over engines without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from headrace.engine.build import SimulatedSpec
from headrace.engine.config import SchedulerConfig
from headrace.engine.thread_client import ThreadClient
from headrace.frontend.frontend import Frontend
from headrace.frontend.llm import LLM
from headrace.frontend.tokenizer import Tokenizer
from tests.frontend.byte_model import BOS, EOS, TEMPLATE, VOCAB, byte_backend

settings.register_profile("headrace", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("headrace")


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
