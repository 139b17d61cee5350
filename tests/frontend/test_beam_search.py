"""Beam search: the rules of transformers, and its answers on a model of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models
from transformers import GenerationConfig

from headrace import LLM, BeamSearchParams, SamplingParams
from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import open_torch_runner
from headrace.engine.config import SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.thread_client import ThreadClient
from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.frontend.frontend import Frontend
from headrace.frontend.outputs import CompletionOutput
from headrace.frontend.tokenizer import Tokenizer
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.model.tiny import CASES

PROMPT = [5, 60, 200, 7, 9]
TOKENS = 10


class Both:
    """A tiny float32 model in transformers and in an engine of our own."""

    def __init__(self, folder: Path) -> None:
        self.model = CASES["llama2"](folder)
        settings = RunnerSettings(num_blocks=256, max_batch_tokens=512, max_sequences=32, max_model_len=256)
        runner = open_torch_runner(SafetensorsCheckpoint(folder), settings)
        self.client = ThreadClient(Engine(runner, settings, SchedulerConfig()))
        self._open: list[LLM] = []
        self._words = tokenizers.Tokenizer(models.BPE({chr(0x100 + i): i for i in range(300)}, []))
        self._words.decoder = decoders.ByteLevel()

    def ours(self, params: BeamSearchParams, ends: list[int]) -> list[CompletionOutput]:
        frontend = Frontend(self.client, Tokenizer(self._words, eos_token_ids=ends), "tiny")
        self._open.append(LLM.from_frontend(frontend))  # one that goes closes the engine
        [answer] = self._open[-1].beam_search({"prompt_token_ids": PROMPT}, params)
        return answer.outputs

    def theirs(self, width: int, ends: list[int], **options: Any) -> list[tuple[list[int], float]]:
        """Output ids, the end token included, and scores."""
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        with torch.no_grad():
            made = self.model.generate(torch.tensor([PROMPT]), generation_config=config)
        rows = [row[len(PROMPT) :] for row in made.sequences.tolist()]
        upto = [next((i + 1 for i, token in enumerate(row) if token in ends), TOKENS) for row in rows]
        return [
            (row[:end], score)
            for row, end, score in zip(rows, upto, made.sequences_scores.tolist(), strict=True)
        ]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    made = Both(tmp_path_factory.mktemp("llama"))
    yield made
    made.client.close()


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [(0.0, "never"), (1.0, False), (1.0, True), (-1.0, False), (2.0, "never")],
)
def test_the_beams_of_transformers(both: Both, early_stopping: Any, length_penalty: float) -> None:
    """Beams that end at all lengths: the end tokens are such as likely beams have in their middle."""
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    lengths = set()
    for width in (2, 5):
        params = BeamSearchParams(beam_width=width, max_tokens=TOKENS, **options)
        free = both.ours(params, [])
        for ends in ([299], [free[1].token_ids[3]], [free[0].token_ids[6], free[1].token_ids[1]]):
            wanted = both.theirs(width, ends, **options)
            found = both.ours(params, ends)
            assert [output.token_ids for output in found] == [ids for ids, _ in wanted]
            for output, (ids, score) in zip(found, wanted, strict=True):
                assert output.cumulative_logprob is not None
                penalised = output.cumulative_logprob / len(ids) ** length_penalty
                assert penalised == pytest.approx(score, rel=1e-4)
                assert output.finish_reason == ("stop" if ids[-1] in ends else "length")
                lengths.add(len(ids))
    assert len(lengths) > 2 or length_penalty > 0  # which prefers those that go on


def test_many_prompts_at_once_and_the_text(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    prompts = ["one", "two two", {"prompt_token_ids": [1, 2, 3]}]
    together = llm.beam_search(prompts, params)
    assert [answer.prompt for answer in together] == ["one", "two two", None]
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = llm.beam_search(prompt, params)
        assert alone.outputs == answer.outputs
        assert len(answer.outputs) == 4
        for output in answer.outputs:
            assert output.text == llm.frontend.tokenizer.decode(output.token_ids)
    assert llm.stats().prefix_cache_hits == 0  # such short texts have no full block to share


def test_beams_share_their_past(llm: LLM) -> None:
    llm.beam_search({"prompt_token_ids": list(range(40))}, BeamSearchParams(beam_width=3, max_tokens=6))
    stats = llm.stats()
    assert stats.prefix_cache_hits > 0.7 * stats.prefix_cache_queries


def test_one_beam_is_greedy(llm: LLM) -> None:
    [beam] = llm.beam_search("hello", BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    [greedy] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert beam.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_beams_end_with_the_context(make_frontend: Callable[..., Frontend]) -> None:
    llm = LLM.from_frontend(make_frontend(max_model_len=16))
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    [answer] = llm.beam_search({"prompt_token_ids": [1] * 10}, params)
    assert [len(output.token_ids) for output in answer.outputs] == [6, 6]
    with pytest.raises(ContextLengthError):
        llm.beam_search({"prompt_token_ids": [1] * 16}, params)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": "2"}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_bad_values(llm: LLM, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.beam_search("hello", BeamSearchParams(**{"beam_width": 2, **changes}))
    assert caught.value.param == param
