"""LLM with a checkpoint_path: what one process did not return, the next one does."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.build import SimulatedSpec
from headrace.engine.config import CheckpointConfig, ModelConfig, SchedulerConfig
from headrace.engine.journaled_client import journaled
from headrace.engine.request import SamplingParams, StructuredOutputs
from headrace.engine.thread_client import ThreadClient
from headrace.errors import ConfigError, ModelNotFoundError
from headrace.frontend.frontend import Frontend
from headrace.frontend.llm import LLM
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.tokenizer import Tokenizer
from tests.frontend.byte_model import VOCAB

PROMPTS: list[Any] = ["one", "two is longer", [1, 2, 3], "four", "five"]
PARAMS = [
    SamplingParams(n=3, max_tokens=60, stop=["a", "qu"], min_tokens=20, include_stop_str_in_output=True),
    SamplingParams(max_tokens=80, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2),
    SamplingParams(max_tokens=90, temperature=0.0, bad_words=["b", "cd"], ignore_eos=True),
    SamplingParams(max_tokens=70, structured_outputs=StructuredOutputs(regex="[a-z]{10,40}é*[0-9]")),
    SamplingParams(max_tokens=200, seed=7, ignore_eos=True, n=2, detokenize=False),
]


@pytest.fixture
def open_llm(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., LLM]]:
    """LLMs over simulated engines whose prompts are kept in a folder."""
    opened: list[LLM] = []

    def make(folder: Path, step_s: float = 0.0, **config: Any) -> LLM:
        spec = SimulatedSpec(
            num_blocks=256,
            max_model_len=512,
            scheduler=SchedulerConfig(max_num_seqs=4),
            vocab_size=VOCAB,
            seed=1,
            step_s=step_s,
        )
        checkpoint = CheckpointConfig(str(folder), interval_s=0.0, **config)
        client = journaled(ThreadClient(spec.build()), checkpoint, ModelConfig("simulated", seed=1))
        opened.append(LLM.from_frontend(Frontend(client, byte_tokenizer, "simulated")))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


def without_ids(answers: list[RequestOutput]) -> list[RequestOutput]:
    for answer in answers:
        answer.request_id = ""
    return answers


@pytest.mark.parametrize("tokens", [1, 150, 300])
def test_the_rest_of_a_batch(tokens: int, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """A batch whose process had died began anew, with other answers where no seed was given."""
    first = open_llm(tmp_path / "first", step_s=0.003)
    returned: list[RequestOutput] = []
    batch = threading.Thread(target=lambda: returned.extend(first.generate(PROMPTS, PARAMS)))
    batch.start()
    while first.stats().generation_tokens < tokens:
        time.sleep(0.001)
    first.checkpoint()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    batch.join()
    second = open_llm(tmp_path / "second")
    found = second.resume()
    begun = len(found)
    assert begun >= 1
    assert without_ids(found) == without_ids(returned)[:begun]
    assert begun == len(PROMPTS) or tokens < 300, "all of them were under way"
    assert second.resume() == []
    second.checkpoint()
    second.close()
    assert open_llm(tmp_path / "second").resume() == []


def test_what_was_returned_is_forgotten(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """resume() gave answers that the user had long since."""
    llm = open_llm(tmp_path)
    llm.generate(PROMPTS, PARAMS)
    llm.chat([{"role": "user", "content": "hi"}])
    llm.close()
    assert open_llm(tmp_path).resume() == []


def test_an_interrupted_batch_goes_on_in_the_next_process(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C threw away hours of work that was safe on the disk."""
    llm = open_llm(tmp_path, step_s=0.003)
    expected = without_ids(open_llm(tmp_path / "other").generate(PROMPTS[:2], PARAMS[:2]))

    def interrupt(*_: Any) -> None:
        if llm.stats().generation_tokens > 40:
            raise KeyboardInterrupt

    monkeypatch.setattr("headrace.frontend.batch.append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:2], PARAMS[:2])
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while llm.stats().num_running_seqs:
        assert time.monotonic() < deadline, "what was interrupted still runs"
        time.sleep(0.001)
    llm.close()
    assert without_ids(open_llm(tmp_path).resume()) == expected


def test_without_a_path(llm: LLM, tmp_path: Path) -> None:
    """A user who had forgotten the path waited for answers that were nowhere."""
    for call in (llm.resume, llm.checkpoint):
        with pytest.raises(ConfigError, match="checkpoint_path"):
            call()
    with pytest.raises(ConfigError, match="give it once"):
        LLM("nothing", checkpoint_path="a", checkpoint_config=CheckpointConfig("b"))
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "nothing"), checkpoint_path=str(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


def test_settings_that_are_wrong(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """A grace time of minus one dropped every answer at once."""
    for name, value in (("grace_s", -1.0), ("max_bytes", 1.5), ("grace_s", float("nan"))):
        with pytest.raises(ConfigError, match=name):
            open_llm(tmp_path, **{name: value})


def test_an_encoder_has_nothing_to_go_on_with(minilm_path: Path, tmp_path: Path) -> None:
    """A checkpoint_path that did nothing looked as if it did."""
    with pytest.raises(ConfigError, match="embeds"):
        LLM(str(minilm_path), checkpoint_path=str(tmp_path))
