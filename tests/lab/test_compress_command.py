"""``headrace compress quantize`` from outside: preflight, output and report, the gate, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.lab.compress.recipe import BUILT_IN, named_recipe
from headrace.model.weights import open_checkpoint
from tests.lab.compressing import HELD_OUT, Compress, compressor, make_files
from tests.lab.small_models import TEXT
from tests.model.tiny_bert import tiny_bert

STRICT = "kl_mean: 0.0000001\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def compress(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compress:
    return compressor(files, capsys, monkeypatch)


def recipe(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(text)
    return ["--recipe", str(tmp_path / "recipe.yaml")]


def test_preflight_names_every_tensor_and_why(compress: Compress, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = compress("--recipe", "awq-int4", "-o", str(out), "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "embed.weight 300×64 kept: the embedding table",
        "layers.2.attention.o.weight 64×64 int4, groups of 32, zero points, to nearest, inputs scaled (AWQ)",
        "layers.0.attention_norm.weight 64 divided by the scales of the inputs that it makes",
        "final_norm.weight 64 kept: norms are not rounded",
        "head.weight 300×64 kept: no step of the recipe is for it",
        "note: group_size 128 does not divide 64 inputs: all groups are of 32",
        "note: grouped-query attention",
        "note: vocabulary: 41 rows behind the tokenizer's tokens are padding, and stay",
        "calibration: 16 sequences, 1536 tokens of calibration.jsonl; chat template: yes, BOS: no",
        "estimate: about 1 s and ",
    ):
        assert line in " ".join(done.stdout.split())
    assert len(done.stdout.splitlines()) == 30 + 5
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "mixed-int4-int8"])
def test_every_built_in_recipe_makes_a_model_that_is_served(
    name: str, compress: Compress, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = compress("--recipe", name, "-o", str(out), "--backend", "torch")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith(f"written: {out}\n")
    report = json.loads((out / "compress.json").read_text())
    assert (report["recipe_name"], report["model"].endswith("/model")) == (name, True)
    assert len(report["tensors"]) == 21
    assert report["size"]["rounded_share"] < (0.36 if "int4" in name else 0.6)
    assert set(report["files"]) >= {"model.safetensors", "config.json", "tokenizer.json"}
    divergence = report["evaluation"]["suites"]["perplexity"]["result"]["divergence"]
    assert 0 < divergence["kl"]["value"] < (0.6 if "int4" in name else 0.1)
    assert "KL 0." in (out / "compress.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with LLM(str(out), threads=1) as llm:
        answer = llm.generate(TEXT[:40], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 4


def test_what_is_read_back_is_what_was_rounded(compress: Compress, files: Path, tmp_path: Path) -> None:
    """With AWQ's scales folded in, norms and weights must fit each other in the file as well."""
    out = tmp_path / "out"
    assert compress("--recipe", "awq-int4", "-o", str(out), "--no-eval").returncode == 0
    source, written = open_checkpoint(files / "model"), open_checkpoint(out)
    assert written.architecture == source.architecture
    for name in source.names():
        before, after = source.tensor(name), written.tensor(name)
        same = name.startswith(("embed", "final", "head"))
        plain = np.asarray(before, np.float32)
        read = np.asarray(after, np.float32) if isinstance(after, np.ndarray) else after.dequantize()
        if same:
            np.testing.assert_allclose(read, plain, rtol=2**-8, atol=1e-6)
    report = json.loads((out / "compress.json").read_text())
    assert all(0 < one["lost"] < 0.05 for one in report["tensors"])


def test_a_refused_model_is_not_kept_and_a_looser_gate_goes_on(compress: Compress, tmp_path: Path) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate.yaml"
    gate.write_text(STRICT)
    arguments = ["--recipe", "gptq-int4", "-o", str(out), "--gate", str(gate)]
    done = compress(*arguments)
    assert (done.returncode, done.stderr) == (1, "")
    assert "gate: perplexity: kl_mean is" in done.stdout
    assert "gate: refused" in done.stdout
    assert not out.exists()
    assert sorted(path.name for path in (tmp_path / "out.refused").iterdir()) == [
        "compress.json",
        "compress.md",
    ]
    gate.write_text("kl_mean: 5\n")
    done = compress(*arguments)
    assert done.returncode == 0, done.stderr
    assert "goes on after 3 finished layers" in done.stdout
    assert "gate: passed" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.yaml", "out"]
    assert json.loads((out / "compress.json").read_text())["gate_failures"] == []


def test_an_output_that_exists_is_replaced_only_if_it_is_ours(compress: Compress, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--recipe", "rtn-int8", "-o", str(out), "--no-eval"]
    assert compress(*arguments).returncode == 0
    assert "exists: name another folder" in compress(*arguments).stderr
    assert compress(*arguments, "--overwrite").returncode == 0
    (out / "compress.json").unlink()
    assert "is no model that headrace compress wrote" in compress(*arguments, "--overwrite").stderr
    assert (out / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps:\n- step: round\n  grup_size: 64\n", ":3: steps.0.round.grup_size: Extra inputs are not "
         "permitted; did you mean 'group_size'?"),
        ("steps:\n- step: awqq\n", "did you mean 'awq'?"),
        ("steps:\n- step: round\n  method: gptk\n", ":3: steps.0.round.method: Input should be 'rtn' or "
         "'gptq'; did you mean 'gptq'?"),
        ("stepz: []\n", "did you mean 'steps'?"),
        ("steps:\n- step: awq\n", "no step rounds anything"),
        ("steps:\n- step: round\n- step: awq\n", "come before those that round"),
        ("steps:\n- step: round\n  bits: 3\n", ":3: steps.0.round.bits: Input should be 4 or 8"),
        ("steps:\n- step: round\n  group_size: 20\n", "16 or a multiple of it, or -1"),
        ("steps:\n- step: round\n  group_size: 48\n", "group_size: 48 does not divide the 64 inputs of "
         "layers.0.attention.q: choose one that does, such as 16"),
        ("steps:\n- step: round\n  kind: float8\n", "float8 goes with bits: 8"),
        ("steps:\n- step: round\n  act_order: static\n  group_size: 32\n", "act_order is of method: gptq"),
        ("steps:\n- step: round\n  group_size: 32\n  targets: [dwon]\n", "No linear weight is called 'dwon'"),
        ("steps:\n- step: round\n  group_size: 32\n  targets: [dwon]\n", "did you mean 'down'?"),
        ("steps:\n- step: round\n  group_size: 32\n- step: round\n  targets: [down]\n", "rounds nothing"),
        ("steps:\n- step: awq\n  targets: [q]\n- step: round\n  targets: [down]\n  group_size: 32\n",
         "The step awq scales the inputs of weights that no step rounds."),
        ("steps:\n- step: round\n  group_size: 32\n  average_bits: 5\n", "leaves room for no layer"),
        ("steps:\n- step: round\n  average_bits: 9\n", "average_bits lies between 4 and 8"),
    ],
)  # fmt: skip
def test_recipes_that_will_not_do(text: str, said: str, compress: Compress, tmp_path: Path) -> None:
    done = compress(*recipe(tmp_path, text), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_recipes_and_their_nearest_names(compress: Compress, tmp_path: Path) -> None:
    done = compress("--recipe", "awq-int5", "-o", str(tmp_path / "out"))
    assert done.stderr.startswith("headrace: There is no recipe 'awq-int5': there are rtn-int8,")
    assert "did you mean 'awq-int4'?" in done.stderr


def test_recipes_are_printed_as_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in BUILT_IN:
        monkeypatch.setattr("sys.argv", ["headrace", "compress", "recipes", name])
        with pytest.raises(SystemExit):
            main()
        path = tmp_path / f"{name}.yaml"
        path.write_text(capsys.readouterr().out)
        assert named_recipe(str(path)) == named_recipe(name)


def test_layers_by_pattern_and_an_untied_head(compress: Compress, tmp_path: Path) -> None:
    text = (
        "steps:\n- step: round\n  targets: [layers.0.*, head]\n  ignore: ['*.down']\n"
        "  bits: 8\n  group_size: -1\n"
        "- step: round\n  targets: ['layers.[12].attention.*']\n  group_size: 16\n"
    )
    out = tmp_path / "out"
    done = compress(*recipe(tmp_path, text), "-o", str(out), "--no-eval")
    assert done.returncode == 0, done.stderr
    schemes = {
        one["name"]: one["scheme"] for one in json.loads((out / "compress.json").read_text())["tensors"]
    }
    assert schemes["head.weight"] == schemes["layers.0.attention.q.weight"]
    assert schemes["head.weight"] == "int8, one scale per output, symmetric"
    assert schemes["layers.2.attention.v.weight"] == "int4, groups of 16, symmetric"
    assert len(schemes) == 6 + 1 + 8
    assert "layers.0.feed_forward.down.weight" not in schemes
    assert "layers.1.feed_forward.up.weight" not in schemes


def test_a_head_that_is_the_embedding_is_refused(compress: Compress, files: Path, tmp_path: Path) -> None:
    tied = files / "tied"
    if not tied.exists():
        shutil.copytree(files / "model", tied)
        config = json.loads((tied / "config.json").read_text())
        (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    text = "steps:\n- step: round\n  targets: [linears, head]\n  group_size: 32\n"
    done = compress(*recipe(tmp_path, text), "-o", str(tmp_path / "out"), model="tied")
    assert "this model's head is its embedding table" in done.stderr


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"text": "fine"}\n{"text": 3}\n', "cal.jsonl:2: `text` must be a text"),
        ('{"text": "fine"}\n\n{"txt": "a"}\n', "cal.jsonl:3: a line needs `text`, `messages`, or"),
        ('{"prompt": "a"}\n', "cal.jsonl:1: `completion` must be a text"),
        ("no json\n", "cal.jsonl:1: not valid JSON"),
        ('{"messages": [{"role": "user"}]}\n', "cal.jsonl:1: messages[0].content is missing"),
        ('{"text": "too short"}\n', "9 tokens are too few to calibrate with: give at least 256"),
        (json.dumps({"text": "<|im_start|>user\nHi<|im_end|>\n" * 20}), "another model's chat template"),
        (json.dumps({"text": HELD_OUT}), "is in the calibration, word for word"),
    ],
)
def test_calibrations_that_will_not_do(lines: str, said: str, compress: Compress, tmp_path: Path) -> None:
    (tmp_path / "cal.jsonl").write_text(lines)
    done = compress(
        "--recipe", "gptq-int4", "-o", str(tmp_path / "out"), "--calibration", str(tmp_path / "cal.jsonl")
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_conversations_need_a_template_or_a_word(compress: Compress, files: Path, tmp_path: Path) -> None:
    base = files / "base"
    if not base.exists():
        shutil.copytree(files / "model", base)
        (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    arguments = ["--recipe", "gptq-int4", "-o", str(tmp_path / "out"), "--dry-run"]
    assert "has no chat template to write messages with" in compress(*arguments, model="base").stderr
    done = compress(*arguments, "--calibration-template", "off", model="base")
    assert "chat template: no" in done.stdout


def broken(files: Path, folder: Path, name: str, value: float) -> str:
    """A copy of the model with one number changed."""
    shutil.copytree(files / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("model.layers.1.mlp.up_proj.weight", float("nan"), "layers.1.feed_forward.up.weight holds NaN"),
        ("model.layers.2.input_layernorm.weight", float("nan"),
         "Layer 2 gives values that are not finite, and its layers.2.attention_norm.weight holds some"),
        ("model.layers.1.mlp.down_proj.weight", 3e38, "Layer 1 gives values that are not finite"),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_name_their_layer(
    tensor: str, value: float, said: str, compress: Compress, files: Path, tmp_path: Path
) -> None:
    model = broken(files, tmp_path / "broken", tensor, value)
    if value == 3e38:
        tensors = load_file(Path(model) / "model.safetensors")
        tensors["model.layers.1.post_attention_layernorm.weight"] *= 1e20
        save_file(tensors, Path(model) / "model.safetensors", metadata={"format": "pt"})
    done = compress("--recipe", "gptq-int4", "-o", str(tmp_path / "out"), model=model)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_silent_channels_are_told_of(compress: Compress, files: Path, tmp_path: Path) -> None:
    model = tmp_path / "silent"
    shutil.copytree(files / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][:5] = 0
    tensors["model.layers.0.self_attn.v_proj.weight"][3] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for name in ("awq-int4", "gptq-int4", "smoothquant-w8a8"):
        done = compress("--recipe", name, "-o", str(tmp_path / name), model=str(model))
        assert done.returncode == 0, done.stderr
        assert "note: layers.1.after attention_norm: 5 of 64 channels were always zero" in done.stdout
        found = json.loads((tmp_path / name / "compress.json").read_text())
        text = found["evaluation"]["suites"]["perplexity"]["result"]
        assert text["divergence"]["kl"]["value"] < 0.6


def test_encoders_are_refused(compress: Compress, tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert")
    done = compress("--recipe", "rtn-int8", "-o", str(tmp_path / "out"), model=str(tmp_path / "bert"))
    assert done.stderr == ("headrace: Compression is for models that generate; this one is an encoder.\n")
