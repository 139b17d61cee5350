"""Formats out: what is written comes back to the bit, other libraries read the same, nothing looks complete
that is not."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from headrace import LLM, SamplingParams
from headrace.backend.torch import reference_logits
from headrace.cli import main
from headrace.errors import ConfigError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.compress.formats import check_format, write_checkpoint
from headrace.lab.compress.formats.config_json import config_of
from headrace.lab.compress.formats.gguf_metadata import architecture_metadata
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model.checkpoint import as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint
from headrace.model.weights.hf_config import architecture_from_hf
from headrace.model.weights.int32_codes import unpack
from tests.lab.formats_files import (
    FP8,
    INT4,
    INT4_ORDER,
    INT4_ZEROS,
    INT8,
    INT8_ZEROS,
    PROMPT,
    W8A8,
    WRITTEN,
    linears_of,
    make_source,
)
from tests.model.tiny import CASES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


def written(source: Path, folder: Path, name: str) -> dict[str, Any]:
    """The model of ``source`` in a format; its tensors as they went in."""
    form, scheme = WRITTEN[name]
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, scheme)
    rounded = {key: scheme for key, tensor in tensors.items() if isinstance(tensor, QuantizedLinear)}
    check_format(form, rounded, checkpoint)
    write_checkpoint(folder, form, tensors, checkpoint, dtype="float32" if form != "gguf" else None)
    return tensors


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_comes_back(source: Path, tmp_path: Path, name: str) -> None:
    tensors = written(source, tmp_path / "out", name)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert set(checkpoint.names()) == set(tensors)
    for key, tensor in tensors.items():
        back = checkpoint.tensor(key)
        if not isinstance(tensor, QuantizedLinear):
            if "gguf" not in name or tensor.ndim == 1:
                np.testing.assert_array_equal(as_float32(back), tensor, err_msg=key)
            continue
        assert isinstance(back, QuantTensor), key
        if name == "gguf q4_1":
            np.testing.assert_allclose(back.dequantize(), tensor.dequantize(), atol=1e-3, rtol=0)
        else:
            np.testing.assert_array_equal(back.dequantize(), tensor.dequantize(), err_msg=key)
    before, after = open_checkpoint(source).architecture, checkpoint.architecture
    assert before.hidden_size == after.hidden_size
    assert [layer.attention.heads for layer in before.layers] == [
        layer.attention.heads for layer in after.layers
    ]
    texts = ["the mill", "The miller said:\n\n 42 <eos>"]
    old, new = (
        load_tokenizer(source),
        load_tokenizer(next((tmp_path / "out").glob("*.gguf"), tmp_path / "out")),
    )
    assert [old.encode(text) for text in texts] == [new.encode(text) for text in texts]
    assert new.chat_template == old.chat_template
    assert (new.bos_token_id, set(new.eos_token_ids)) == (258, {259, 260})
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.native
def test_the_same_codes_give_the_same_tokens(source: Path, tmp_path: Path) -> None:
    """Whatever the format: 4-bit symmetric weights in five of them, served by the same engine."""
    said = set()
    for name in ("compressed-tensors int4", "gptq", "gptq-v2", "awq symmetric"):
        folder = tmp_path / name.replace(" ", "-")
        written(source, folder, name)
        with LLM(str(folder), max_model_len=128, threads=1) as llm:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            answers = llm.generate(["the miller", "Grain and water"], params)
        said.add(tuple(tuple(answer.outputs[0].token_ids) for answer in answers))
    assert len(said) == 1


def test_gguf_has_the_same_network(source: Path, tmp_path: Path) -> None:
    """Rows of q and k are interleaved there, rotary scaling is a tensor: the logits know nothing of it."""
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, INT8)
    write_checkpoint(tmp_path / "gguf", "gguf", tensors, checkpoint)
    gguf = open_checkpoint(tmp_path / "gguf")
    for name in ("embed.weight", "head.weight"):  # Q8_0 there
        tensors[name] = as_float32(gguf.tensor(name))
    write_checkpoint(tmp_path / "folder", "compressed-tensors", tensors, checkpoint, dtype="float32")
    one, other = (reference_logits(open_checkpoint(tmp_path / name), PROMPT) for name in ("gguf", "folder"))
    np.testing.assert_allclose(one, other, atol=2e-4 * np.abs(other).max(), rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("gemma3-multimodal",)])
def test_architectures_come_back(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
    architecture = open_checkpoint(tmp_path).architecture
    back = architecture_from_hf(config_of(architecture))
    assert back.layers[0].attention.rope == architecture.layers[0].attention.rope
    assert [layer.attention.window for layer in back.layers] == [
        layer.attention.window for layer in architecture.layers
    ]


@pytest.mark.parametrize("case", ["llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma3", "smollm2"])
@pytest.mark.parametrize("form", ["float", "gguf"])
def test_float_models_compute_the_same(case: str, form: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", case)
    checkpoint = open_checkpoint(source)
    if case == "gemma3" and form == "gguf":
        with pytest.raises(ConfigError, match="attention scale"):  # this small one's is not its head's
            architecture_metadata(checkpoint.architecture)
        return
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    write_checkpoint(tmp_path / "out", form, tensors, checkpoint, dtype="float32")
    expected = reference_logits(checkpoint, PROMPT)
    got = reference_logits(open_checkpoint(tmp_path / "out"), PROMPT)
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


def test_shards_have_an_index_and_aligned_tensors(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, INT4_ZEROS)
    write_checkpoint(tmp_path / "out", "compressed-tensors", tensors, checkpoint, shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        arrays = safetensors.numpy.load_file(tmp_path / "out" / file)  # the library's own reader
        assert all(index["weight_map"][name] == file for name in arrays)
        total += sum(array.nbytes for array in arrays.values())
    assert index["metadata"]["total_size"] == total
    back = open_checkpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedLinear):
            np.testing.assert_array_equal(as_float32(back.tensor(name)), tensor.dequantize())


# ---- other libraries read the same


@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name.startswith("compressed-tensors") and "act-order" not in name]
)
def test_compressed_tensors_reads_the_same(source: Path, tmp_path: Path, name: str) -> None:
    """Its own code for its own format: configuration and values, in float32, to the bit."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    tensors = written(source, tmp_path / "out", name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    known = QuantizationConfig.model_validate(config)
    (scheme,) = known.config_groups.values()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for layer, part in ((0, "self_attn.q_proj"), (2, "mlp.down_proj")):
        module = f"model.layers.{layer}.{part}."
        state = {key.removeprefix(module): value for key, value in stored.items() if key.startswith(module)}
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
        back = compressor.decompress(state, scheme)["weight"]
        ours = {"self_attn.q_proj": "attention.q", "mlp.down_proj": "feed_forward.down"}[part]
        expected = tensors[f"layers.{layer}.{ours}.weight"].dequantize()
        np.testing.assert_array_equal(back.float().numpy(), expected)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name.startswith("gguf")])
def test_gguf_py_reads_the_same(source: Path, tmp_path: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    written(source, tmp_path / "out", name)
    (path,) = (tmp_path / "out").iterdir()
    reader = gguf.GGUFReader(path)
    checkpoint = open_checkpoint(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in (
        ("layers.1.feed_forward.down.weight", "blk.1.ffn_down.weight"),
        ("layers.0.attention.v.weight", "blk.0.attn_v.weight"),
        ("embed.weight", "token_embd.weight"),
        ("final_norm.weight", "output_norm.weight"),
    ):
        tensor = stored[theirs]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values.reshape(-1), as_float32(checkpoint.tensor(ours)).reshape(-1))
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    assert reader.get_field("tokenizer.ggml.tokens").contents()[256:258] == ["th", "the"]
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == 259


@pytest.mark.parametrize("case", ["llama3", "smollm2"])  # the second's head is its embedding table
@pytest.mark.parametrize("name", ["compressed-tensors int4", "compressed-tensors w8a8"])
def test_transformers_loads_it(case: str, tmp_path: Path, name: str) -> None:
    source = make_source(tmp_path / "source", case)
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    import torch
    import transformers

    written(source, tmp_path / "out", name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    ours = reference_logits(open_checkpoint(tmp_path / "out"), PROMPT)
    bound = 0.1 if "w8a8" in name else 1e-3  # there activations are rounded as well
    np.testing.assert_allclose(theirs, ours, atol=bound * np.abs(ours).max(), rtol=0)


# ---- what cannot be written


@pytest.mark.parametrize(
    ("form", "scheme", "message"),
    [
        ("pickle", INT4, "no format 'pickle'"),
        ("awq", INT8, "4-bit"),
        ("awq", INT4_ORDER, "act-order"),
        ("gptq", FP8, "float8"),
        ("gptq-v2", FP8, "float8"),
        ("gguf", INT8_ZEROS, "GGUF has no type"),
        ("gguf", Scheme(4, 16), "GGUF has no type"),
        ("gguf", FP8, "GGUF has no type"),
        ("gguf", INT4_ORDER, "GGUF has no type"),
    ],
)
def test_formats_say_what_they_cannot_hold(
    source: Path, tmp_path: Path, form: str, scheme: Scheme, message: str
) -> None:
    """Before anything is computed, and while writing; nothing is left."""
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, scheme)
    schemes = {name: scheme for name, tensor in tensors.items() if isinstance(tensor, QuantizedLinear)}
    with pytest.raises(ConfigError, match=message):
        check_format(form, schemes, checkpoint)
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(tmp_path / "out", form, tensors, checkpoint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_one_scheme_for_all_where_the_format_has_one(source: Path, tmp_path: Path, form: str) -> None:
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, INT4)
    tensors["layers.1.attention.q.weight"] = linears_of(checkpoint, Scheme(4, 16))[
        "layers.1.attention.q.weight"
    ]
    with pytest.raises(ConfigError, match="have several"):
        write_checkpoint(tmp_path / "out", form, tensors, checkpoint)
    mixed = tmp_path / "mixed"
    tensors["layers.2.attention.q.weight"] = linears_of(checkpoint, W8A8)["layers.2.attention.q.weight"]
    tensors["layers.2.attention.k.weight"] = as_float32(checkpoint.tensor("layers.2.attention.k.weight"))
    write_checkpoint(mixed, "compressed-tensors", tensors, checkpoint)
    back = open_checkpoint(mixed)
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedLinear):
            np.testing.assert_array_equal(as_float32(back.tensor(name)), tensor.dequantize(), err_msg=name)
    config = json.loads((mixed / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert "model.layers.2.self_attn.k_proj" in config["ignore"]


def test_scales_that_float16_does_not_hold(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensors = linears_of(checkpoint, INT4, scale_type=np.float32)
    for form in ("gptq", "awq", "gguf"):
        with pytest.raises(ConfigError, match="float32"):
            write_checkpoint(tmp_path / form, form, tensors, checkpoint)
    write_checkpoint(tmp_path / "ct", "compressed-tensors", tensors, checkpoint)


def test_nothing_rounded_is_no_quantised_format(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    with pytest.raises(ConfigError, match="Nothing is rounded"):
        write_checkpoint(tmp_path / "out", "gptq", tensors, checkpoint)


def test_weights_beyond_float16(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensors: dict[str, Any] = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    tensors["layers.0.attention.q.weight"] = tensors["layers.0.attention.q.weight"] * np.float32(1e6)
    for form in ("gguf", "float"):
        with pytest.raises(ConfigError, match=r"layers\.0\.attention\.q\.weight.*float16"):
            write_checkpoint(tmp_path / "out", form, tensors, checkpoint, dtype="float16")
    assert list(tmp_path.iterdir()) == []


# ---- the command


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Convert = Callable[..., Done]


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Convert:
    """``headrace compress convert …`` in this process."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["headrace", "compress", "convert", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call


def test_convert_keeps_codes_through_formats(tmp_path: Path, convert: Convert) -> None:
    """Rounded once; after that every format holds the same values."""
    first, source = tmp_path / "gptq", make_source(tmp_path / "source", "smollm2")
    done = convert(str(source), "--format", "gptq", "--group-size", "32", "-o", str(first))
    assert done.returncode == 0, done.stderr
    assert "21 are rounded to nearest: int4, groups of 32, symmetric" in done.stdout
    values = {
        name: as_float32(open_checkpoint(first).tensor(name)) for name in open_checkpoint(first).names()
    }
    last = first
    for form in ("compressed-tensors", "awq", "gptq-v2", "gguf-q4_0", "gguf-q8_0", "compressed-tensors"):
        folder = tmp_path / f"{last.name}-{form}"
        done = convert(str(last), "--format", form, "-o", str(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("21 weights keep their codes\n"), (form, done.stdout)
        last = folder
        checkpoint = open_checkpoint(folder)
        for name, dense in values.items():
            if name.startswith("layers.") and dense.ndim == 2:
                np.testing.assert_array_equal(
                    as_float32(checkpoint.tensor(name)), dense, err_msg=f"{form} {name}"
                )


@pytest.mark.parametrize(
    ("form", "options", "stdout"),
    [
        (
            "compressed-tensors",
            ["--rounding", "w8a8"],
            "int8, one scale per output, symmetric, inputs rounded",
        ),
        ("compressed-tensors", ["--rounding", "fp8"], "float8 e4m3"),
        ("compressed-tensors", [], "int4, groups of 32, symmetric"),  # 128 does not divide 160
        ("awq", [], "int4, groups of 32, zero points"),
        ("gguf-q4_1", [], "int4, groups of 32, zero points"),
        ("gguf-f16", [], "21 are floats"),
        ("f32", [], "21 are floats"),
    ],
)
def test_convert_rounds_floats(
    source: Path, tmp_path: Path, convert: Convert, form: str, options: list[str], stdout: str
) -> None:
    done = convert(str(source), "--format", form, *options, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert stdout in done.stdout
    checkpoint, exact = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    for name in exact.names():
        dense = as_float32(exact.tensor(name))
        error = np.abs(as_float32(checkpoint.tensor(name)) - dense).max() / np.abs(dense).max()
        assert error < (0.1 if "int4" in stdout else 0.04), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gptq", "--rounding", "fp8"], "gptq does not hold fp8"),
        (["--format", "gguf-q4_0", "--rounding", "int8"], "leave --rounding out"),
        (["--format", "gptq", "--group-size", "7"], "--group-size"),
        (["--format", "gptq", "--group-size", "0"], "--group-size"),
        (["--format", "zip"], "zip"),
    ],
)
def test_convert_says_what_is_wrong(
    source: Path, tmp_path: Path, convert: Convert, arguments: list[str], message: str
) -> None:
    done = convert(str(source), *arguments, "-o", str(tmp_path / "out"))
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files fails in the same place as a disk without room."""
    command = [sys.executable, "-m", "headrace.cli", "compress", "convert", str(source)]
    done = subprocess.run(
        [*command, "--format", "f32", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)),
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(source: Path, tmp_path: Path, convert: Convert) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    done = convert(str(source), "--format", "f32", "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "exists" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_zero_points_are_stored_less_one_only_where_everybody_reads_them(
    source: Path, tmp_path: Path
) -> None:
    """GPTQ v1 cannot tell a zero point of 0; ours is symmetric, 7 in every nibble."""
    written(source, tmp_path / "v1", "gptq")
    written(source, tmp_path / "v2", "gptq zero points")
    stored = safetensors.numpy.load_file(tmp_path / "v1" / "model.safetensors")
    zeros = stored["model.layers.0.self_attn.q_proj.qzeros"]
    assert (unpack(zeros, 4, 64) == 7).all()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("v1", "v2")]
    found = [config["quantization_config"]["checkpoint_format"] for config in configs]
    assert found == ["gptq", "gptq_v2"]
