"""``headrace compress prune`` from outside: zeros in files, with rounding and without; what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.errors import ConfigError
from headrace.lab.compress.plan import make_plan
from headrace.lab.compress.quantize import Asked, Quantization
from headrace.lab.compress.recipe import BUILT_IN, PRUNING, Recipe, named_recipe
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from headrace.model.weights.hf_config import architecture_from_hf
from tests.e2e.running import COMMAND
from tests.lab.compressing import Compress, Done, compressor, make_files
from tests.lab.small_models import TEXT

ZEROS = [name for name in PRUNING if not named_recipe(name)[1].reshapes]


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
    (tmp_path / "recipe.yaml").write_text(text)
    return ["--recipe", str(tmp_path / "recipe.yaml")]


def zeros(folder: Path) -> dict[str, np.ndarray]:
    """Where the layers' matrices are exactly zero, as our reader has them."""
    checkpoint = open_checkpoint(folder)
    found = {name: as_float32(checkpoint.tensor(name)) for name in checkpoint.names()}
    return {name: array == 0 for name, array in found.items() if array.ndim == 2 and "layers." in name}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_in_the_file_and_it_is_served(name: str, prune: Compress, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = prune("--recipe", name, "-o", str(out), "--backend", "torch")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads((out / "compress.json").read_text())
    assert report["output_format"] == ("compressed-tensors" if "int4" in name else "float")
    assert len(report["tensors"]) == 21
    for one in report["tensors"]:
        assert one["zeros"] == pytest.approx(0.5, abs=0.05 if "int4" in name else 0.003)
        assert (one["lost"] is None) == (name == "magnitude-50")
    found = zeros(out)
    assert len(found) == 21
    for array in found.values():
        if name.endswith("2-4"):
            assert (array.reshape(len(array), -1, 4).sum(-1) == 2).all()
        else:
            assert 0.49 < array.mean() < 0.6
    assert "zeros: 5" in done.stdout
    assert report["evaluation"]["suites"]["perplexity"]["result"]["divergence"]["kl"]["value"] > 0
    with LLM(str(out), threads=1) as llm:
        answer = llm.generate(TEXT[:40], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_that_stay_are_the_models(prune: Compress, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "steps:\n- {step: prune, pattern: 4:8, targets: [feed_forward], ignore: ['layers.1.*']}\n"
    done = prune(*recipe(tmp_path, text), "-o", str(out), "--no-eval")
    assert done.returncode == 0, done.stderr
    assert "6 tensors: 4 of 8 zero (Wanda)" in done.stdout
    before, after = (load_file(folder / "model.safetensors") for folder in (files / "model", out))
    for name, tensor in after.items():
        stays = tensor != 0
        assert (tensor[stays] == before[name].bfloat16()[stays]).all()
        pruned = ".mlp." in name and ".1." not in name
        assert float(stays.float().mean()) == (0.5 if pruned else 1.0)


@pytest.mark.parametrize("form", ["gptq", "awq", "gguf"])
def test_zeros_stay_zeros_when_weights_are_rounded(form: str, prune: Compress, tmp_path: Path) -> None:
    """Every format of codes has one for zero; what GGUF's Q4_1 would lose is refused."""
    symmetric = str(form != "awq").lower()
    text = (
        "steps:\n- step: awq\n- {step: prune, method: wanda, pattern: '2:4', targets: [attention]}\n"
        "- {step: prune, method: sparsegpt, sparsity: 0.6, targets: [feed_forward]}\n"
        f"- {{step: round, method: gptq, group_size: 32, symmetric: {symmetric}}}\n"
    )
    out = tmp_path / "out"
    arguments = [*recipe(tmp_path, text), "-o", str(out), "--format", form, "--no-eval"]
    done = prune(*arguments)
    assert done.returncode == 0, done.stderr
    path = out / "model.gguf" if form == "gguf" else out
    for name, array in zeros(path).items():
        if "attention" in name:
            assert (array.reshape(len(array), -1, 4).sum(-1) >= 2).all()
        else:
            assert array.mean() >= 0.59
    (tmp_path / "recipe.yaml").write_text(text.replace("symmetric: true", "symmetric: false"))
    if form == "gguf":
        done = prune(*arguments[:-1], "--overwrite")
        assert "GGUF's Q4_1 rounds the minimum of a group, so that zeros do not stay zeros" in done.stderr


def test_preflight_says_what_becomes_zero(prune: Compress, tmp_path: Path) -> None:
    done = prune("--recipe", "sparsegpt-50-int4", "-o", str(tmp_path / "out"), "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    line = "layers.2.attention.o.weight 64×64 50% zero (SparseGPT), int4, groups of 32, zero points, GPTQ"
    assert line in " ".join(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- step: prune\n", "a prune step has either sparsity, as 0.5, or pattern, as 2:4"),
        ("- step: prune\n  sparsity: 1\n", ":3: steps.0.prune.sparsity: Input should be less than 1"),
        ("- step: prune\n  sparsity: 0\n", ":3: steps.0.prune.sparsity: Input should be greater than 0"),
        ("- step: prune\n  sparsity: 0.001\n", "0.001 of the 64 inputs of layers.0.attention.q is none of"),
        ("- step: prune\n  pattern: 4:4\n", "pattern is N:M, N weights that stay of every M, with M one of"),
        ("- step: prune\n  pattern: 3:5\n", "N from 1 below M; not 3:5"),
        ("- step: prune\n  pattern: half\n", "N from 1 below M; not half"),
        ("- step: prune\n  sparsity: 0.5\n  method: wonda\n", "did you mean 'wanda'?"),
        ("- step: prune\n  sparsty: 0.5\n", "did you mean 'sparsity'?"),
        ("- step: prune\n  sparsity: 0.5\n  targets: [head]\n", "take head out of the targets"),
        ("- step: prune\n  sparsity: 0.5\n- step: prune\n  sparsity: 0.5\n", "prunes nothing: earlier ones"),
        ("- step: round\n  group_size: 32\n- step: prune\n  sparsity: 0.5\n", "before those that round"),
        ("- {step: prune, method: sparsegpt, pattern: 2:4}\n"
         "- {step: round, method: gptq, group_size: 32, act_order: static}\n", "leave act_order out"),
        ("- step: awq\n- step: prune\n  sparsity: 0.5\n", "no step rounds anything"),
    ],
)  # fmt: skip
def test_recipes_that_will_not_do(text: str, said: str, prune: Compress, tmp_path: Path) -> None:
    done = prune(*recipe(tmp_path, f"steps:\n{text}"), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_each_command_takes_recipes_that_do_what_it_is_called(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = compressor(files, capsys, monkeypatch)
    out = str(tmp_path / "out")
    done = call("--recipe", "wanda-50", "-o", out)
    assert done.stderr == "headrace: The recipe wanda-50 rounds nothing: headrace compress prune takes it.\n"
    done = call("--recipe", "rtn-int8", "-o", out, command="prune")
    assert "rtn-int8 prunes nothing: headrace compress quantize takes it" in done.stderr
    assert call("--recipe", "sparsegpt-50-int4", "-o", out, "--dry-run").returncode == 0
    done = call("--recipe", "magnitud-50", "-o", out, command="prune")
    assert "did you mean 'magnitude-50'?" in done.stderr
    done = call("--recipe", "wanda-50", "-o", out, "--format", "awq", command="prune")
    assert done.stderr == (
        "headrace: Nothing is rounded, so there is nothing to write as awq: write float.\n"
    )


def test_a_pattern_that_does_not_divide_is_refused() -> None:
    sizes = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 36}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    found = Recipe.model_validate({"steps": [{"step": "prune", "pattern": "4:8"}]})
    with pytest.raises(ConfigError, match=r"pattern: 4:8 does not divide the 36 inputs of layers\.0\.feed"):
        make_plan(architecture_from_hf(sizes | heads), found)


def test_recipes_are_printed_as_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in PRUNING:
        monkeypatch.setattr("sys.argv", ["headrace", "compress", "recipes", name])
        with pytest.raises(SystemExit):
            main()
        path = tmp_path / f"{name}.yaml"
        path.write_text(capsys.readouterr().out)
        assert named_recipe(str(path)) == named_recipe(name)
    assert not set(BUILT_IN) & set(PRUNING)


def test_killed_it_goes_on_to_the_same_bytes(files: Path, tmp_path: Path) -> None:
    def asked(output: Path) -> Asked:
        return Asked(
            model=str(files / "model"),
            recipe="sparsegpt-50",
            output=output,
            calibration=str(files / "calibration.jsonl"),
            sequence_length=96,
            suites=(),
            threads=1,
        )

    output = tmp_path / "out"
    arguments = ["compress", "prune", str(files / "model"), "--recipe", "sparsegpt-50", "-o", str(output)]
    arguments += ["--calibration", str(files / "calibration.jsonl"), "--sequence-length", "96", "--no-eval"]
    command = [*COMMAND, *arguments, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = tmp_path / ".out.work" / "layer-00000.safetensors"
    while not first.exists() and not output.exists():
        assert process.poll() in (None, 0)
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not output.exists():  # the machine may have been too quick for us
        again = Quantization(asked(output))
        assert again.resumes() >= 1
        again.run()
    Quantization(asked(tmp_path / "whole")).run()
    whole, found = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert whole == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
