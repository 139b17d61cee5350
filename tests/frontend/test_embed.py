"""LLM.embed: the reference's vectors, the same bits however texts are batched, and clear refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from headrace import LLM, SchedulerConfig
from headrace.backend.cpu._native import supported_isas
from headrace.backend.cpu.runner import chosen_isa
from headrace.engine.client import OutputSink
from headrace.engine.request import EngineRequest
from headrace.engine.thread_client import ThreadClient
from headrace.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from headrace.frontend.outputs import EmbeddingRequestOutput
from headrace.frontend.tokenizer import load_tokenizer
from tests.data.prompts import PROMPTS
from tests.model.tiny_bert import CLS, HIDDEN, MAX_TOKENS, SEP, tiny_bert

pytestmark = pytest.mark.native

_SNIPPETS = (
    "naïve café, déjà vu, Ελληνικά, русский текст",
    "日本語のテキストと漢字、中文字符",
    "🙂👍🏽 flags 🇫🇷 and \u200bzero\u200bwidth, e\u0301 combining",
    "def f(x):\n\treturn x ** 2  # ¯\\_(ツ)_/¯",
    "العربية עברית हिन्दी ไทย 한국어",
    "1,234.56 € @home http://example.org/?q=a%20b&c#d",
    "UPPER lower MiXeD\r\n\r\n  spaces   and\ttabs  ",
    "supercalifragilisticexpialidocious" * 4,
)


def varied_texts() -> list[str]:
    """Five hundred texts: prompts whole and in part, snippets of many scripts, and long ones of both."""
    texts = [*PROMPTS, *_SNIPPETS]
    words = " ".join(PROMPTS).split()
    rng = np.random.default_rng(11)
    while len(texts) < 488:
        start, length = rng.integers(0, len(words) - 40), rng.integers(1, 12)
        snippet = _SNIPPETS[rng.integers(len(_SNIPPETS))]
        cut = snippet[: rng.integers(0, len(snippet))]
        texts.append(" ".join([*words[start : start + length], cut]))
    for length in np.linspace(40, 650, 12).astype(int).tolist():
        start = int(rng.integers(0, len(words) - 650))
        texts.append(" ".join(words[start : start + length]))
    return texts


def matrix(outputs: list[EmbeddingRequestOutput]) -> NDArray[np.float32]:
    return np.array([output.outputs.embedding for output in outputs], np.float32)


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Iterator[LLM]:
    with LLM(str(minilm_path), threads=1, max_model_len=512) as llm:
        yield llm


def reference(path: Path, ids: list[list[int]]) -> NDArray[np.float32]:
    """Mean-pooled, normalised vectors of transformers' BertModel in float32."""
    model = transformers.BertModel.from_pretrained(path, dtype=torch.float32).eval()
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    out = np.empty((len(ids), model.config.hidden_size), np.float32)
    for start, stop in pairwise([*range(0, len(order), 25), len(order)]):
        batch = order[start:stop]
        width = max(len(ids[index]) for index in batch)
        tokens = torch.tensor([ids[index] + [0] * (width - len(ids[index])) for index in batch])
        mask = torch.tensor([[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in batch])
        with torch.inference_mode():
            states = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        sums = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out[batch] = torch.nn.functional.normalize(sums, dim=1).numpy()
    return out


def test_five_hundred_texts_equal_the_reference(minilm: LLM, minilm_path: Path) -> None:
    texts = varied_texts()[:-1]
    if chosen_isa() != supported_isas()[0]:
        texts = texts[8::10]  # the best path answers for all; the others differ from it by rounding only
    outputs = minilm.embed([*texts, {"prompt_token_ids": [7592]}], truncate_prompt_tokens=-1)
    assert len(outputs) in (500, 51)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert min(lengths) == 1
    assert max(lengths) == 512
    got = matrix(outputs)
    want = reference(minilm_path, [output.prompt_token_ids for output in outputs])
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    assert (got * want).sum(1).min() > 0.9999
    # Alone, in another order, among others: the same bits.
    some = range(0, len(texts), 29)
    again = minilm.embed([texts[index] for index in reversed(some)], truncate_prompt_tokens=-1)
    assert matrix(again)[::-1].tobytes() == got[list(some)].tobytes()
    for index in (3, len(texts) * 41 // 100, len(texts) * 94 // 100):
        assert matrix(minilm.embed(texts[index])).tobytes() == got[[index]].tobytes()


def test_tokens_are_those_of_transformers(minilm_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(minilm_path)
    ours = load_tokenizer(minilm_path)
    for text in [*_SNIPPETS, *PROMPTS[::17], "word " * 600]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        cut = theirs(text, truncation=True, max_length=12)["input_ids"]
        assert ours.encode_truncated(text, 12) == cut


def test_meaning_is_near(minilm: LLM) -> None:
    a, b, c = matrix(minilm.embed(["A cat sleeps.", "The kitten naps.", "Interest rates rose by a percent."]))
    assert a @ b > a @ c + 0.3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert(folder)
    with LLM(str(folder), threads=1) as llm:
        yield llm


def test_the_outputs_say_what_they_are_of(tiny: LLM) -> None:
    first, second = tiny.embed(["ab c", {"prompt_token_ids": [CLS, 7, SEP]}], use_tqdm=False)
    assert first.prompt == "ab c"
    assert (first.prompt_token_ids[0], first.prompt_token_ids[-1]) == (CLS, SEP)
    assert second.prompt is None
    assert second.prompt_token_ids == [CLS, 7, SEP]
    assert first.outputs.hidden_size == len(first.outputs.embedding) == HIDDEN
    assert first.finished
    assert first.request_id != second.request_id
    assert tiny.embed([]) == []


def test_dimensions_cut_and_normalise(tiny: LLM) -> None:
    (whole,) = matrix(tiny.embed("abc"))
    (cut,) = matrix(tiny.embed("abc", dimensions=10))
    np.testing.assert_allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), rtol=1e-6)
    assert matrix(tiny.embed("abc", dimensions=HIDDEN)).tobytes() == whole.tobytes()
    for wrong in (0, -1, HIDDEN + 1, True, 1.5, 10**5000):
        with pytest.raises(InvalidRequestError, match=f"from 1 to {HIDDEN}"):
            tiny.embed("abc", dimensions=wrong)  # type: ignore[arg-type]


def test_texts_that_are_too_long(tiny: LLM) -> None:
    long = "a b c d " * 50
    with pytest.raises(ContextLengthError, match=rf"prompt 1 of 2: .* 202 tokens; .*up to {MAX_TOKENS}"):
        tiny.embed(["a", long])
    (output,) = tiny.embed(long, truncate_prompt_tokens=-1)
    assert len(output.prompt_token_ids) == MAX_TOKENS
    (output,) = tiny.embed(long, truncate_prompt_tokens=5)
    assert output.prompt_token_ids == [*tiny.embed("a b c")[0].prompt_token_ids]
    (output,) = tiny.embed({"prompt_token_ids": list(range(60)) * 2}, truncate_prompt_tokens=3)
    assert output.prompt_token_ids == [0, 1, 2]
    (output,) = tiny.embed("a", truncate_prompt_tokens=50)
    assert len(output.prompt_token_ids) == 3
    for wrong in (0, -2, MAX_TOKENS + 1, True, "5"):
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be -1, or from 1 to"):
            tiny.embed(long, truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no room beside the model's own 2 special tokens"):
        tiny.embed(long, truncate_prompt_tokens=2)


def test_an_encoder_does_not_generate(tiny: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="does not generate"):
        tiny.generate("abc")
    with pytest.raises(InvalidRequestError, match="does not generate"):
        tiny.chat([{"role": "user", "content": "abc"}])
    with pytest.raises(InvalidRequestError, match="prompt"):
        tiny.embed([3.5])  # type: ignore[list-item]
    assert len(tiny.embed("abc")) == len(tiny.embed([3, 4])) == 1  # text, or token ids


def test_a_decoder_does_not_embed(smollm2_path: Path) -> None:
    with (
        LLM(str(smollm2_path), kv_cache_memory_bytes=2**24) as llm,
        pytest.raises(InvalidRequestError, match="does not embed"),
    ):
        llm.embed("abc")


def test_more_texts_than_may_wait(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    with LLM(
        str(tmp_path), threads=1, scheduler_config=SchedulerConfig(max_waiting=3, max_num_seqs=2)
    ) as llm:
        outputs = llm.embed(["a b c"] * 300)
        assert len(outputs) == 300
        assert len({tuple(output.outputs.embedding) for output in outputs}) == 1


class _Refusing:
    """A client that refuses the submissions of given numbers, and passes the others on."""

    def __init__(self, client: ThreadClient, refuse: set[int], error: Exception) -> None:
        self._client = client
        self._refuse = refuse
        self._error = error
        self.calls = 0

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        self.calls += 1
        if self.calls in self._refuse:
            raise self._error
        self._client.submit(request, sink)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._client.abort(request_id, choice)


@pytest.mark.parametrize(
    ("refused", "error", "ends_well"),
    [
        (set(range(5, 9)), OverloadedError("full"), True),  # its own texts make room again
        ({1}, OverloadedError("full"), False),
        ({5}, EngineDeadError("dead"), False),
    ],
)
def test_a_job_ends_once_whatever_is_refused(
    refused: set[int], error: Exception, ends_well: bool, tiny: LLM
) -> None:
    from headrace.frontend.embedding import EmbeddingJob

    client = _Refusing(tiny.frontend.client, refused, error)  # type: ignore[arg-type]
    ends: list[int] = []
    over = threading.Event()

    def done() -> None:
        ends.append(1)
        over.set()

    job = EmbeddingJob(client, [[5, 6, 7]] * 40, done, request_id="job")  # type: ignore[arg-type]
    job.start()
    assert over.wait(20)
    job.abort()
    assert ends == [1]
    if ends_well:
        assert job.error is None
        assert len({output.vector for output in job.outputs}) == 1
    else:
        assert job.error is error
    tiny.embed("the engine is well")


def test_an_aborted_job_leaves_nothing(tiny: LLM) -> None:
    over = threading.Event()
    job = tiny.frontend.embedding_job([[5] * 80] * 300, over.set)
    job.start()
    job.abort()
    assert over.wait(5)
    assert isinstance(job.error, OverloadedError)
    tiny.embed("abc")
    stats = tiny.stats()
    assert (stats.num_running_seqs, stats.num_waiting_seqs) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
