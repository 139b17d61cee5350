"""Perplexity and divergence against transformers in float32, computed in one piece."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelFormatError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.evaluate.divergence import Window, measure, windows_of
from headrace.lab.evaluate.reference_file import ReferenceFile, about, write
from headrace.lab.evaluate.scoring import Scorer, open_scorer
from tests.lab.small_models import TEXT, make_model
from tests.model.tiny import CASES


class Pair:
    """A model, a noisy copy of it, and transformers' version of both."""

    def __init__(self, folder: Path) -> None:
        self.paths = {"good": folder / "good", "noisy": folder / "noisy"}
        self.models = {
            "good": make_model(self.paths["good"]),
            "noisy": make_model(self.paths["noisy"], noise=0.2),
        }
        self.tokens = load_tokenizer(self.paths["good"]).encode(TEXT)

    def log_probs(self, name: str, window: Window) -> NDArray[np.float64]:
        """Rows of the tokens that count, the independent way."""
        with torch.no_grad():
            logits = self.models[name](input_ids=torch.tensor([window.token_ids])).logits[0].double()
        rows: NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()[window.first - 1 : -1]
        return rows

    def losses(self, name: str, windows: list[Window]) -> NDArray[np.float64]:
        found = []
        for window in windows:
            rows = self.log_probs(name, window)
            found.append(-rows[np.arange(len(rows)), window.token_ids[window.first :]])
        return np.concatenate(found)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def torch_scorer(path: Path, max_tokens: int = 256) -> Scorer:
    return open_scorer(path, max_tokens=max_tokens, backend="torch", threads=1)


def test_windows_cut_as_their_conventions_say() -> None:
    tokens = list(range(10))
    plain = windows_of(tokens, "windows", 4)
    assert [(w.token_ids, w.first) for w in plain] == [([0, 1, 2, 3], 1), ([4, 5, 6, 7], 1), ([8, 9], 1)]
    llama = windows_of(tokens, "llama.cpp", 4, bos_token_id=99)
    assert [(w.token_ids, w.first) for w in llama] == [([99, 1, 2, 3], 3), ([99, 5, 6, 7], 3)]
    with pytest.raises(InvalidRequestError, match="12 or more"):
        windows_of(tokens, "llama.cpp", 12)


@pytest.mark.parametrize(("convention", "context"), [("windows", 200), ("llama.cpp", 128)])
def test_perplexity_is_that_of_an_independent_float32(pair: Pair, convention: Any, context: int) -> None:
    windows = windows_of(pair.tokens, convention, context, bos_token_id=7)
    with torch_scorer(pair.paths["good"]) as scorer:
        found, _ = measure(windows, scorer)
    losses = pair.losses("good", windows)
    assert found.n == len(losses)
    assert found.value == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert found.se == pytest.approx(
        math.exp(losses.mean()) * losses.std(ddof=1) / math.sqrt(len(losses)), rel=1e-4
    )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_models_that_see_a_window_only(tmp_path: Path, kind: str, backend: Any) -> None:
    """Chunks of a sequence go through KV groups of several windows."""
    model = CASES[kind](tmp_path)
    tokens = np.random.default_rng(2).integers(0, 290, 200).tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    rows = torch.log_softmax(logits, -1).numpy()[:-1]
    expected = math.exp(-rows[np.arange(199), tokens[1:]].mean())
    with open_scorer(tmp_path, max_tokens=200, backend=backend, threads=1) as scorer:
        found, _ = measure(windows_of(tokens, "windows", 200), scorer)
    assert found.value == pytest.approx(expected, rel=1e-5 if backend == "torch" else 0.05)


def test_the_cpu_backend_scores_the_same(pair: Pair) -> None:
    """Its KV cache is bfloat16 and its activations int8: close, where the reference is exact."""
    windows = windows_of(pair.tokens, "windows", 200)
    with open_scorer(pair.paths["good"], max_tokens=200, threads=1) as scorer:
        found, _ = measure(windows, scorer)
    assert found.value == pytest.approx(math.exp(pair.losses("good", windows).mean()), rel=0.02)


def test_divergence_is_that_of_a_direct_computation(pair: Pair, tmp_path: Path) -> None:
    windows = windows_of(pair.tokens, "windows", 200)
    with torch_scorer(pair.paths["noisy"]) as model, torch_scorer(pair.paths["good"]) as reference:
        _, found = measure(windows, model, reference)
    assert found is not None
    ours = np.concatenate([pair.log_probs("noisy", window) for window in windows])
    theirs = np.concatenate([pair.log_probs("good", window) for window in windows])
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    assert found.kl.value == pytest.approx(kl.mean(), rel=1e-4)
    assert found.kl.se == pytest.approx(kl.std(ddof=1) / math.sqrt(len(kl)), rel=1e-4)
    assert found.kl_median == pytest.approx(np.median(kl), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    assert found.kl_p999 == pytest.approx(np.percentile(kl, 99.9), rel=1e-3)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-3)
    assert found.same_top1.value == (ours.argmax(1) == theirs.argmax(1)).mean()
    difference = pair.losses("noisy", windows) - pair.losses("good", windows)
    assert found.ln_ppl_ratio.value == pytest.approx(difference.mean(), abs=1e-5)
    assert found.ln_ppl_ratio.se == pytest.approx(
        difference.std(ddof=1) / math.sqrt(len(difference)), rel=1e-4
    )


def test_a_model_does_not_diverge_from_itself(pair: Pair) -> None:
    windows = windows_of(pair.tokens, "windows", 128)[:2]
    with torch_scorer(pair.paths["good"]) as model, torch_scorer(pair.paths["good"]) as reference:
        _, found = measure(windows, model, reference)
    assert found is not None
    assert (found.kl.value, found.kl_max, found.same_top1.value, found.ln_ppl_ratio.value) == (0, 0, 1, 0)


def test_continuations_share_a_context(pair: Pair) -> None:
    """One continuation's keys and values must not be seen by the next, whichever is longer."""
    context, whole = pair.tokens[:150], pair.tokens
    continuations = [whole[150:153], whole[20:160], whole[7:8]]
    with torch_scorer(pair.paths["good"], 300) as scorer:
        found = scorer.continuations(context, continuations)
    for continuation, scores in zip(continuations, found, strict=True):
        window = Window([*context, *continuation], 150)
        rows = pair.log_probs("good", window)
        np.testing.assert_allclose(scores, rows[np.arange(len(rows)), continuation], atol=1e-4)


def test_what_cannot_be_scored(pair: Pair) -> None:
    with torch_scorer(pair.paths["good"], 16) as scorer:
        with pytest.raises(ContextLengthError, match="17"):
            next(scorer.log_probs([1] * 17))
        with pytest.raises(InvalidRequestError, match="299"):
            next(scorer.log_probs([1, 300]))
        with pytest.raises(InvalidRequestError):
            scorer.continuations([], [[1]])


def test_reference_logits_on_disk_give_the_same_divergence(pair: Pair, tmp_path: Path) -> None:
    windows = windows_of(pair.tokens, "llama.cpp", 128)
    path = tmp_path / "reference.safetensors"
    described = about(windows, tokenizer="t", vocab_size=300, reference="good")
    with torch_scorer(pair.paths["noisy"]) as model, torch_scorer(pair.paths["good"]) as reference:
        assert sum(write(path, described, windows, reference)) == described.rows
        _, direct = measure(windows, model, reference)
        _, kept = measure(windows, model, ReferenceFile(path))
    assert direct is not None and kept is not None
    assert kept.kl.value == pytest.approx(direct.kl.value, abs=1e-6)
    assert kept.same_top1 == direct.same_top1
    ReferenceFile(path).require(described, path, any_reference=False)
    other = about(windows[:1], tokenizer="t", vocab_size=300, reference="good")
    with pytest.raises(ConfigError, match="something else: tokens is"):
        ReferenceFile(path).require(other, path, any_reference=True)


def test_an_interrupted_reference_leaves_no_file(pair: Pair, tmp_path: Path) -> None:
    windows = windows_of(pair.tokens, "llama.cpp", 128)
    described = about(windows, tokenizer="t", vocab_size=300, reference="good")
    with torch_scorer(pair.paths["good"]) as reference:
        writing = write(tmp_path / "file", described, windows, reference)
        next(writing)
        writing.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "text", "weights"])
def test_files_that_hold_no_reference_logits(pair: Pair, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    if damage == "weights":
        path = pair.paths["good"] / "model.safetensors"
    elif damage == "text":
        path.write_bytes(b"perplexity" * 9)
    else:
        windows = windows_of(pair.tokens, "llama.cpp", 128)[:1]
        with torch_scorer(pair.paths["good"]) as reference:
            described = about(windows, tokenizer="t", vocab_size=300, reference="good")
            list(write(path, described, windows, reference))
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ModelFormatError):
        ReferenceFile(path)
