"""headrace plan from outside: models, sizes, hardware files, bad input, this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import HeadraceError

LLAMA = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336"]
LLAMA += ["--vocab", "128256"]


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return found


def refusal(*arguments: str) -> str:
    with pytest.raises(HeadraceError) as caught:
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    return caught.value.message


def test_sizes_and_the_shape_of_the_same_sizes_agree() -> None:
    by_sizes, by_name = plan_json(*LLAMA), plan_json("llama-3.1-8b")
    assert by_sizes["network"]["parameters"] == 8_030_261_248
    assert by_sizes["network"]["kv_bytes_per_token"] == 131072
    times = [[option["each_copy"]["ttft_ms"] for option in each["options"]] for each in (by_sizes, by_name)]
    assert times[0] == times[1]


def test_the_table_says_what_is_assumed_and_where_prices_are_from() -> None:
    text = plan("llama-3.1-8b", "--slo", "ttft=500ms,tpot=30ms", "--concurrency", "4")
    assert "8.03 B parameters" in text
    assert "128 KiB a token" in text
    assert "meets the SLO" in text
    assert "75% of its bandwidth" in text
    assert "Prices are list prices" in text
    first = next(line for line in text.splitlines() if line.startswith("│"))
    assert "meets the SLO" in first


def test_every_option_carries_its_price_and_source() -> None:
    found = plan_json("qwen3-8b", "--rate", "2", "--slo", "tpot=40ms")
    assert len(found["options"]) >= 24  # eight GPUs and two CPUs, in three precisions, less what lacks a rate
    for option in found["options"]:
        assert option["price_source"]
        assert option["price_date"]
    good = [option for option in found["options"] if option["meets_slo"]]
    costs = [option["price_per_million_output_tokens"] for option in good]
    assert costs == sorted(costs)
    assert found["options"][: len(good)] == good


def test_a_small_model_on_a_large_gpu_is_told_to_share_it() -> None:
    work = ["--prompt-tokens", "128", "--output-tokens", "64", "--rate", "1", "--slo", "tpot=50ms"]
    texts = {each["device"]: each["text"] for each in plan_json("qwen3-0.6b", *work)["suggestions"]}
    assert "of 7 MIG 1g.10gb" in texts["h100-sxm"]
    assert "time-slicing" in texts["l4"]


def test_a_gguf_file_is_also_planned_as_it_is_stored(smollm2_path: Path) -> None:
    found = plan_json(str(smollm2_path), "--on", "l4")
    stored = [option for option in found["options"] if option["precision"] == "as stored"]
    assert len(stored) == 1
    assert stored[0]["weight_bytes"] == pytest.approx(smollm2_path.stat().st_size, rel=0.03)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert plan_json(name, "--on", "l4")["network"]["parameters"] == 1_235_814_400


def test_experts_are_counted_once_a_batch(tmp_path: Path) -> None:
    dense = plan_json("llama-3.1-70b", "--on", "h200", "--precision", "fp8", "--concurrency", "1")
    sparse = plan_json("qwen3-30b-a3b", "--on", "h200", "--precision", "fp8", "--concurrency", "1")
    assert sparse["network"]["active_matrix_parameters"] < sparse["network"]["parameters"] / 8
    speeds = [found["options"][0]["output_tokens_per_s"] for found in (sparse, dense)]
    assert speeds[0] > 5 * speeds[1]


def test_a_file_adds_devices_and_changes_prices(tmp_path: Path) -> None:
    table = tmp_path / "mine.yaml"
    table.write_text(
        "devices:\n"
        "  h100-sxm: {like: h100-sxm, price_per_hour: 0.01}\n"
        "  mine:\n"
        "    title: Mine\n    kind: gpu\n    memory_gib: 40\n    bandwidth_gbs: 1000\n"
        "    tflops: {bf16: 100}\n    source: its label\n    source_date: '2026'\n"
    )
    found = plan_json("llama-3.1-8b", "--hardware", str(table))
    assert found["options"][0]["device"] == "h100-sxm"
    assert found["options"][0]["price_source"] == "yours"
    mine = [option for option in found["options"] if option["device"] == "mine"]
    assert {option["precision"] for option in mine} == {"bf16", "int4"}
    assert mine[0]["price_per_hour"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices:\n  l4:\n    like: l4\n    memory_gib: -3\n", ":4: devices.l4.change.memory_gib: "),
        ("devices:\n  l4:\n    like: l4\n    colour: red\n", ":4: "),
        ("devices:\n  new: {like: nothing}\n", "devices.new is like 'nothing'"),
        ("devices:\n  new:\n    title: New\n", ":2: devices.new.whole.kind: "),
        ("devices: [1]\n", ":1: devices: "),
        (
            "efficiency:\n  gpu:\n    bandwidth: {value: 7, reason: no}\n",
            ":3: efficiency.gpu.bandwidth.value: ",
        ),
        ("devices:\n  l4: {like: l4, price_per_hour: .nan}\n", ":2: "),
        ("a: [", "is not YAML"),
        ("- 1\n", ":1: "),
    ],
)
def test_a_malformed_hardware_file_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    table = tmp_path / "mine.yaml"
    table.write_text(text)
    message = refusal("llama-3.1-8b", "--hardware", str(table))
    assert str(table) in message
    assert says in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lama-3.1-8b"], "Did you mean llama-3.1-8b?"),
        ([], "Name a model"),
        (["--layers", "3", "--hidden", "64"], "add --heads, --ffn, --vocab"),
        (["llama-3.1-8b", "--layers", "3"], "not both"),
        ([*LLAMA[:6], "--kv-heads", "7", *LLAMA[8:]], "--kv-heads must divide --heads"),
        ([*LLAMA, "--experts", "8"], "--active-experts"),
        ([*LLAMA, "--experts", "8", "--active-experts", "9"], "from 1 to 8 experts"),
        (["llama-3.1-8b", "--rate", "-1"], "--rate"),
        (["llama-3.1-8b", "--rate", "nan"], "--rate"),
        (["llama-3.1-8b", "--rate", "1", "--concurrency", "1"], "two kinds of load"),
        (["llama-3.1-8b", "--slo", "tpot=fast"], "--slo"),
        (["llama-3.1-8b", "--on", "abacus"], "there is no 'abacus'"),
        (["llama-3.1-8b", "--on", "a100-80g", "--precision", "fp8"], "has a rate for fp8"),
        (["llama-3.1-8b", "--hardware", "/nowhere.yaml"], "cannot be read"),
        (["llama-3.1-8b", "--check"], "--here"),
        (["llama-3.1-8b", "--quantization", "int4"], "--here"),
        (["llama-3.2-1b", "--here", "--check"], "needs its weights"),
        (["qwen3-30b-a3b", "--here"], "no mixture of experts"),
        (["minilm-l6"], "encoder"),
    ],
)
def test_what_cannot_be_planned_says_why(arguments: list[str], says: str) -> None:
    assert says in refusal(*arguments)


def test_negative_sizes_are_one_line_and_status_2() -> None:
    command = [sys.executable, "-m", "headrace.cli", "plan", *LLAMA[2:], "--layers", "-3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--layers" in done.stderr


def test_an_unknown_model_is_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "headrace.cli", "plan", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Traceback" not in done.stderr


def test_this_machine_is_measured_and_checked(smollm2_path: Path) -> None:
    """How close it is depends on what else runs: benchmarks/plan_check.py holds the bar."""
    work = ["--prompt-tokens", "32", "--output-tokens", "4", "--concurrency", "2", "--threads", "1"]
    found = plan_json(str(smollm2_path), "--here", "--check", *work)
    assert found["fits"]
    assert found["threads"] == 1
    assert found["weight_bytes"] == 96_436_224
    for kind in ("decode", "prefill"):
        predicted = found["predicted"][f"{kind}_tokens_per_s"]
        measured = found["measured"][f"{kind}_tokens_per_s"]
        assert predicted > 0 < measured
        assert found["error"][kind] == pytest.approx(predicted / measured - 1)
    assert found["predicted"]["sequences"] == 2
