"""``headrace compress quantize`` from outside: scales of keys and values, what calibration and evaluation may
not share, numbers out of range, and outputs that are no smaller."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.lab.compress.quantized import FLOAT8_MAX
from tests.e2e.running import COMMAND
from tests.frontend.byte_model import byte_backend
from tests.lab.compressing import Compress, compressor, make_files
from tests.lab.small_models import TEXT

CACHE = "- step: kv_cache\n"
ONE_WEIGHT = "steps:\n- {step: round, bits: 8, group_size: 32, targets: ['layers.2.feed_forward.up']}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def compress(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compress:
    return compressor(files, capsys, monkeypatch)


def recipe(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(text)
    return ["--recipe", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out")]


def cache_scales(folder: Path) -> list[list[float]]:
    tensors = load_file(folder / "model.safetensors")
    return [
        [float(tensors[f"model.layers.{layer}.self_attn.{part}_scale"]) for part in "kv"]
        for layer in range(3)
    ]


# ---- scales of keys and values


def test_scales_of_keys_and_values_are_those_of_a_cache(
    compress: Compress, files: Path, tmp_path: Path
) -> None:
    """Against the cache that transformers fills with the same text: keys are rotated in it."""
    import transformers

    text = TEXT[:300]
    (tmp_path / "cal.jsonl").write_text(json.dumps({"text": text}))
    arguments = ["--calibration", str(tmp_path / "cal.jsonl"), "--sequence-length", "400", "--no-eval"]
    done = compress(*recipe(tmp_path, ONE_WEIGHT + CACHE), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "note: keys and values: a float8 scale of each for every layer" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([byte_backend().encode(text).ids])).past_key_values
    found = cache_scales(tmp_path / "out")
    for layer in range(3):
        held = cache.layers[layer]
        expected = [float(part.abs().max()) / FLOAT8_MAX for part in (held.keys, held.values)]
        assert found[layer] == pytest.approx(expected, rel=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["type"] == "float"
    report = json.loads((tmp_path / "out" / "compress.json").read_text())
    for told, stored in zip(report["kv_scales"], found, strict=True):
        assert told == pytest.approx(stored, rel=1e-6)


def test_values_that_a_recipe_scales_get_the_scale_of_what_they_become(
    compress: Compress, tmp_path: Path
) -> None:
    """SmoothQuant divides the values of a head for the sake of what reads them."""
    rounded = "- {step: round, bits: 8, group_size: -1}\n"
    scales = {}
    for name, first in (("plain", ""), ("scaled", "- {step: smoothquant, targets: [o]}\n")):
        arguments = recipe(tmp_path, f"steps:\n{first}{rounded}{CACHE}")
        arguments[-1] = str(tmp_path / name)
        assert compress(*arguments, "--no-eval").returncode == 0
        scales[name] = cache_scales(tmp_path / name)
    for plain, scaled in zip(scales["plain"], scales["scaled"], strict=True):
        assert scaled[0] == pytest.approx(plain[0], rel=0.01)
        assert scaled[1] != pytest.approx(plain[1], rel=0.05)


def test_others_load_a_model_with_them_and_we_say_that_we_use_none(
    compress: Compress, files: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    import transformers
    from compressed_tensors.quantization import QuantizationConfig

    text = "steps:\n- {step: round, bits: 8, group_size: 32}\n" + CACHE
    assert compress(*recipe(tmp_path, text), "--no-eval").returncode == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    source = transformers.AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert scheme is not None
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (8, "float", "tensor", False)
    ids = torch.tensor([byte_backend().encode(TEXT[:64]).ids])
    with torch.no_grad():
        rounded, exact = (one(input_ids=ids).logits for one in (model, source))
    assert float((rounded - exact).abs().max() / exact.abs().max()) < 0.2
    done = subprocess.run(
        [*COMMAND, "eval", str(tmp_path / "out"), "--against", str(files / "model"), "--suite", "perplexity",
         "--text", str(files / "text.txt"), "--tokens", "64", "--threads", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "scales for keys and values (kv_cache_scheme), which are not used" in done.stderr


@pytest.mark.parametrize("form", ["gptq", "awq", "gguf", "float"])
def test_formats_without_a_place_for_them_say_so(form: str, compress: Compress, tmp_path: Path) -> None:
    text = "steps:\n- {step: round, bits: 4, group_size: 32}\n" + CACHE
    done = compress(*recipe(tmp_path, text), "--format", form)
    assert done.returncode == 1
    assert f"{form} has no place for the scales of keys and values: write compressed-tensors" in done.stderr


def test_the_step_comes_last(compress: Compress, tmp_path: Path) -> None:
    done = compress(*recipe(tmp_path, f"steps:\n{CACHE}- {{step: round, group_size: 32}}\n"))
    assert "kv_cache is the last step" in done.stderr


# ---- calibration and evaluation


def test_a_work_is_not_calibrated_with_and_judged_by(compress: Compress, tmp_path: Path) -> None:
    """Another part of the same text is the same work."""
    verses = [
        f"Sack {number} of the mill holds {number * number} grains, says the book. " for number in range(400)
    ]
    (tmp_path / "book.txt").write_text("".join(verses))
    (tmp_path / "cal.jsonl").write_text(json.dumps({"text": "".join(verses[300:])}))
    done = compress(
        "--recipe", "awq-int4", "-o", str(tmp_path / "out"), "--text", str(tmp_path / "book.txt"),
        "--tokens", "64", "--calibration", str(tmp_path / "cal.jsonl"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "of the calibration is from the text that is to judge the model" in done.stderr


SUITE = """
name: mill
max_tokens: 4
cases:
- prompt: How much flour does the miller of the upper mill grind from ninety sacks of rye and oats?
  checks: [contains: sacks]
- prompt: Who opened the gate in the morning, when the river had risen over the weir and the bridge?
  checks: [contains: miller]
"""


def test_questions_of_a_suite_are_not_calibrated_with(
    compress: Compress, files: Path, tmp_path: Path
) -> None:
    (tmp_path / "mill.yaml").write_text(SUITE)
    lines = (files / "calibration.jsonl").read_text()
    question = SUITE.split("prompt: ")[1].split("\n")[0]
    (tmp_path / "cal.jsonl").write_text(f"{json.dumps({'text': question})}\n{lines}")
    arguments = ["--recipe", "awq-int4", "--suite", str(tmp_path / "mill.yaml")]
    out = str(tmp_path / "out")
    done = compress(*arguments, "-o", out, "--calibration", str(tmp_path / "cal.jsonl"))
    assert done.returncode == 1
    assert "1 of the 2 questions of" in done.stderr
    assert "are in the calibration, literally" in done.stderr
    done = compress(*arguments, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "mill: pass 0.000 ± 0.000 of 2, +0.000 ± 0.000; 0 gained, 0 lost" in done.stdout
    assert "mill: answers of" in (tmp_path / "out" / "compress.md").read_text()


# ---- numbers, and sizes


def test_channels_whose_squares_overflow_are_told_of(compress: Compress, files: Path, tmp_path: Path) -> None:
    """Values of 1e20 that the next weights take back: the network is the same, its statistics are not."""
    model = tmp_path / "loud"
    shutil.copytree(files / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e20
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 1e-20
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for name in ("awq-int4", "gptq-int4", "smoothquant-w8a8"):
        arguments = ["--recipe", name, "-o", str(tmp_path / name), "--backend", "torch"]
        done = compress(*arguments, model=str(model))
        assert done.returncode == 0, done.stderr
        assert "note: layers.1.after attention.v: channels reach " in done.stdout
        report = json.loads((tmp_path / name / "compress.json").read_text())
        assert report["evaluation"]["suites"]["perplexity"]["result"]["divergence"]["kl"]["value"] < 0.6
        lost = {one["name"]: one["lost"] for one in report["tensors"]}
        assert lost["layers.1.attention.o.weight"] is None
        assert lost["layers.1.attention.k.weight"] > 0


def test_an_output_that_is_larger_is_an_error(compress: Compress, files: Path, tmp_path: Path) -> None:
    model = tmp_path / "narrow"
    shutil.copytree(files / "model", model)
    tensors = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = "steps:\n- {step: round, bits: 8, group_size: 16, targets: ['layers.0.attention.k']}\n"
    done = compress(*recipe(tmp_path, text), "--no-eval", model=str(model))
    assert done.returncode == 1
    assert "this recipe makes it larger. Use larger groups or fewer bits." in done.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()
