"""Models in smaller shapes: stock architectures that any loader takes, and the right parts of the source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.backend.cpu.limits import Limits
from headrace.lab.compress.budget import Budget, budget_of, candidates
from headrace.lab.compress.cut import Cut, CutCheckpoint
from headrace.lab.compress.prune_steps import SearchStep
from headrace.lab.compress.quantize import Asked, Quantization
from headrace.lab.compress.shape import Shape, parameters, reshaped, shape_of
from headrace.lab.evaluate.scoring import open_scorer
from headrace.model.weights import open_checkpoint
from headrace.model.weights.hf_config import architecture_from_hf
from tests.lab.compressing import Compress, Done, compressor, make_files
from tests.lab.small_models import TEXT
from tests.model.tiny import CASES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def prune(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compress:
    call = compressor(files, capsys, monkeypatch)

    def pruning(*arguments: str) -> Done:
        return call(*arguments, command="prune")

    return pruning


def recipe(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(f"steps:\n{text}")
    return ["--recipe", str(tmp_path / "recipe.yaml")]


def report(folder: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((folder / "compress.json").read_text())
    return found


@pytest.mark.parametrize("by", ["influence", "kl"])
def test_layers_that_matter_least_are_left_out(by: str, prune: Compress, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*recipe(tmp_path, f"- {{step: depth, keep: 0.7, by: {by}}}\n"), "-o", str(out)]
    done = prune(*arguments, "--backend", "torch")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert (
        "note: shape: 3 layers, hidden size 64, feed-forward 160, 2 key and value heads; what" in done.stdout
    )
    assert "shape: num_hidden_layers 3 → 2, parameters 167872 → 124736 (74.3%)" in done.stdout
    found = report(out)["reshaped"]
    scores = found["influence" if by == "influence" else "divergence"]
    assert isinstance(scores, list)
    gone = int(np.argmin(scores))
    assert found["layers"] == [layer for layer in range(3) if layer != gone]
    before, after = (load_file(folder / "model.safetensors") for folder in (files / "model", out))
    for place, layer in enumerate([layer for layer in range(3) if layer != gone]):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            kept = before[f"model.layers.{layer}.{name}.weight"]
            assert torch.equal(after[f"model.layers.{place}.{name}.weight"], kept.bfloat16())
    assert len(transformers.AutoModelForCausalLM.from_pretrained(out).model.layers) == 2
    if by == "kl":
        text = report(out)["evaluation"]["suites"]["perplexity"]["result"]  # type: ignore[index]
        alone = sorted(map(float, scores))
        assert text["divergence"]["kl"]["value"] < 2 * alone[0] + 0.5


def test_width_is_a_stock_model_that_others_compute_alike(prune: Compress, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "- {step: width, feed_forward: 0.6, heads: 0.5, hidden: 0.5}\n"
    done = prune(*recipe(tmp_path, text), "-o", str(out), "--no-eval")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    config = json.loads((out / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[key] for key in sizes] == [32, 96, 2, 1, 16]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    token_ids = list(range(40, 60))
    wanted = theirs(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1).detach().numpy()
    with open_scorer(out, max_tokens=32, backend="torch") as scorer:
        ours = np.concatenate(list(scorer.log_probs(token_ids)))
    np.testing.assert_allclose(ours, wanted, atol=1e-4)
    with LLM(str(out), threads=1) as llm:
        answer = llm.generate(TEXT[:40], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("case", ["llama3", "qwen2", "qwen3", "gemma3"])
def test_what_stays_is_taken_from_its_place_in_every_family(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
    source = open_checkpoint(tmp_path)
    old = shape_of(source.architecture)
    stays = (0, 2) if case != "gemma3" else tuple(range(1, old.layers))
    channels, heads = np.arange(0, old.feed_forward, 2), np.array([1])
    cut = Cut(stays, (channels,) * len(stays), (heads,) * len(stays), np.arange(old.hidden))
    left = CutCheckpoint(source, cut)
    assert left.architecture == reshaped(source.architecture, cut.shape, stays)
    per_group = left.architecture.layers[0].attention.heads
    for place, layer in enumerate(stays):

        def both(part: str, place: int = place, layer: int = layer) -> tuple[np.ndarray, np.ndarray]:
            names = (f"layers.{layer}.{part}.weight", f"layers.{place}.{part}.weight")
            return np.asarray(source.tensor(names[0])), np.asarray(left.tensor(names[1]))

        whole, part = both("feed_forward.down")
        assert np.array_equal(part, whole[:, channels])
        whole, part = both("feed_forward.gate")
        assert np.array_equal(part, whole[channels])
        size = left.architecture.layers[0].attention.head_dim
        for name, width in (("k", size), ("q", size * per_group)):
            whole, part = both(f"attention.{name}")
            assert np.array_equal(part, whole[width : 2 * width])
        whole, part = both("attention.o")
        assert np.array_equal(part, whole[:, size * per_group : 2 * size * per_group])


def test_narrow_streams_keep_what_gemma_derives_from_their_size(tmp_path: Path) -> None:
    """Gemma multiplies embeddings by the root of the hidden size: a smaller one must not show."""
    CASES["gemma3"](tmp_path)
    source = open_checkpoint(tmp_path)
    old = shape_of(source.architecture)
    stays = np.arange(0, old.hidden, 2)
    everything = (np.arange(old.feed_forward),) * old.layers, (np.arange(old.kv_heads),) * old.layers
    left = CutCheckpoint(source, Cut(tuple(range(old.layers)), *everything, stays))
    before = np.asarray(source.tensor("embed.weight"), np.float32) * source.architecture.embedding_scale
    after = np.asarray(left.tensor("embed.weight")) * left.architecture.embedding_scale
    np.testing.assert_allclose(after, before[:, stays], rtol=1e-5)
    norms = [np.asarray(one.tensor("final_norm.weight"), np.float32) for one in (source, left)]
    head = [np.asarray(one.tensor("embed.weight"), np.float32) for one in (source, left)]
    np.testing.assert_allclose(head[1] * norms[1], (head[0] * norms[0])[:, stays], rtol=1e-5)


def test_features_that_are_always_zero_go_first_and_nothing_changes(
    prune: Compress, files: Path, tmp_path: Path
) -> None:
    """Half of the channels, one of two groups of heads and one layer give nothing: without them the model is
    the same, and they are what is found."""
    from safetensors.torch import save_file

    model = files / "idle"
    shutil.copytree(files / "model", model)
    tensors = load_file(model / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, 1::2] = 0
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, :32] = 0
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"][:] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "recipe.yaml"
    path.write_text("steps:\n- {step: depth, keep: 0.7}\n- {step: width, feed_forward: 0.6, heads: 0.5}\n")
    asked = Asked(
        model=str(model),
        recipe=str(path),
        output=tmp_path / "out",
        calibration=str(files / "calibration.jsonl"),
        sequence_length=96,
        texts=(str(files / "text.txt"),),
        backend="torch",
        threads=1,
    )
    made = Quantization(asked).run()
    assert made.reshaped is not None and made.reshaped.layers == [0, 2]
    text = made.text()
    assert text is not None and text.divergence is not None
    assert text.divergence.kl.value < 0.01  # what rounding to bfloat16 costs


@pytest.mark.parametrize("budget", ["parameters: 0.7", "size_mib: 0.24"])
def test_a_search_stays_within_its_budget(budget: str, prune: Compress, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = prune(*recipe(tmp_path, f"- {{step: search, {budget}}}\n"), "-o", str(out), "--no-eval")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = report(out)["reshaped"]
    left, source = found["left"], found["source"]
    assert isinstance(left, dict) and isinstance(source, dict)
    assert left["parameters"] < source["parameters"]
    if "parameters" in budget:
        assert left["parameters"] <= 0.7 * source["parameters"]
    if "size" in budget:
        assert 2 * left["parameters"] <= 0.24 * 2**20
    assert parameters(open_checkpoint(out).architecture) == left["parameters"]
    searched = found["searched"]
    assert isinstance(searched, list) and searched[0][1] == min(kl for _, kl in searched)
    assert not (tmp_path / ".out.work").exists()


def test_candidates_fill_the_budget_and_none_is_beaten(tmp_path: Path) -> None:
    CASES["llama3"](tmp_path)
    architecture = open_checkpoint(tmp_path).architecture
    budget = Budget(parameters, 0.8 * parameters(architecture), "parameters")
    found = candidates(architecture, ["depth", "feed_forward", "heads", "hidden"], budget)
    assert len(found) > 2
    for shape in found:
        assert parameters(reshaped(architecture, shape)) <= budget.limit
        wider = Shape(shape.layers, shape.feed_forward + 32, shape.kv_heads, shape.hidden)
        if wider.feed_forward <= 160:
            assert parameters(reshaped(architecture, wider)) > budget.limit
        assert not any(shape.within(other) for other in found if other != shape)


def test_a_latency_is_what_plan_predicts_of_this_machines_limits() -> None:
    config = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 1024}
    architecture = architecture_from_hf(config)
    limits = Limits("avx2", 2, {2**20: 1e11, 2**30: 1e10}, 1e12, 1e12, 1e12, 1e12)
    step = SearchStep.model_validate({"step": "search", "latency": 0.7})
    budget = budget_of(step, architecture, 2, limits)
    whole = budget.cost(architecture)
    assert budget.limit == pytest.approx(0.7 * whole)
    assert 2 * parameters(architecture) / 1e11 < whole / 1000 < 3 * parameters(architecture) / 1e10
    found = candidates(architecture, ["depth", "feed_forward"], budget)
    assert {shape.layers for shape in found} > {4, 5}
    for shape in found:
        assert 0.9 * budget.limit < budget.cost(reshaped(architecture, shape)) <= budget.limit


def test_stopped_anywhere_it_goes_on_to_the_same_bytes(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "steps:\n- {step: depth, keep: 0.7, by: kl}\n- {step: width, feed_forward: 0.8}\n"
        "- {step: prune, method: sparsegpt, sparsity: 0.5}\n- {step: round, method: gptq, group_size: 32}\n"
    )

    def asked(output: Path) -> Asked:
        return Asked(
            model=str(files / "model"),
            recipe=str(path),
            output=output,
            calibration=str(files / "calibration.jsonl"),
            sequence_length=96,
            suites=(),
            threads=1,
        )

    Quantization(asked(tmp_path / "whole")).run()
    for stop in (("looking", 2), ("sensitivity", 3), ("layers", 1)):
        output = tmp_path / stop[0]

        def stopping(stage: str, index: int, total: int, stop: tuple[str, int] = stop) -> None:
            if (stage, index) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Quantization(asked(output), progress=stopping).run()
        begun: list[tuple[str, int]] = []
        again = Quantization(asked(output), progress=lambda *what, begun=begun: begun.append(what[:2]))
        assert again.resumes() > 0
        again.run()
        assert ("looking", 0) not in begun
        whole, found = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", stop[0]))
        assert whole == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- step: depth\n  keep: 1.2\n", ":3: steps.0.depth.keep: Input should be less than 1"),
        ("- step: depth\n  keep: 0.1\n", "keep: 0.1 of 3 layers leaves none of them"),
        ("- step: depth\n  keep: 0.9\n", "keep: 0.9 of 3 layers leaves all of them"),
        ("- step: depth\n  kep: 0.9\n", "did you mean 'keep'?"),
        ("- step: width\n", "a width step says what share of feed_forward, heads or hidden stays"),
        ("- step: width\n  heads: 0.9\n", "The width step takes nothing away: this model has 3 layers"),
        ("- step: width\n  heads: 0\n", "Input should be greater than 0"),
        ("- step: search\n", "a search step has one budget: parameters, size_mib or latency"),
        ("- step: search\n  parameters: 0.5\n  latency: 0.5\n", "a search step has one budget"),
        ("- step: search\n  parameters: 0.1\n", "No shape meets the budget of 1.679e+04 parameters: the"),
        ("- step: search\n  size_mib: 64\n", "size_mib: 64 is no less than the 0.3 MiB that the model takes"),
        ("- step: search\n  parameters: 0.5\n  dimensions: [deth]\n", "did you mean 'depth'?"),
        ("- {step: search, parameters: 0.7}\n- {step: prune, sparsity: 0.5}\n", "search is a step by itself"),
        ("- {step: prune, sparsity: 0.5}\n- {step: depth, keep: 0.5}\n", "width and search come first"),
        ("- {step: depth, keep: 0.7}\n- {step: depth, keep: 0.7}\n", "depth can be a step once"),
    ],
)  # fmt: skip
def test_shapes_that_will_not_do(text: str, said: str, prune: Compress, tmp_path: Path) -> None:
    done = prune(*recipe(tmp_path, text), "-o", str(tmp_path / "out"), "--no-eval")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
